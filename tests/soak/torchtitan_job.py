"""torchtitan's own Llama over a packed batch, and over each of its documents alone: `python torchtitan_job.py`.

Prints the largest difference of losses and gradients, and of the same without positions: what must be seen.
"""

import numpy as np
import torch
import torchtitan_on_cpu  # noqa: F401  before torchtitan's own modules
from torch.nn.functional import cross_entropy
from torchtitan.models.llama3 import model_registry

import varlen as vl
from varlen.adapters.torchtitan import trainer_batch


def gradients(model, batches, targets):
    """The mean loss over some (inputs, positions, labels), and its gradients."""
    model.zero_grad()
    total = 0.0
    for tokens, positions, labels in batches:
        masks = model.get_attention_masks(positions=positions)
        logits = model(tokens, positions=positions, attention_masks=masks)
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / targets
        loss.backward()
        total += loss.item()
    return total, [parameter.grad.clone() for parameter in model.parameters()]


def furthest(found, expected):
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in zip(found, expected))


def main():
    torch.manual_seed(0)
    model = model_registry("debugmodel").model.build()
    model.init_weights(buffer_device=torch.device("cpu"))
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 2000, length) for length in (5, 130, 60, 90, 1, 200, 31, 250)]
    packing = vl.pack([len(ids) for ids in documents], capacity=256)
    batch = vl.collate(documents, packing)
    inputs, labels = trainer_batch(batch)
    alone = []
    for ids in documents:
        tokens = torch.from_numpy(ids)[None]
        targets = torch.cat([tokens[:, 1:], torch.full((1, 1), -100)], dim=1)
        alone.append((tokens, torch.arange(len(ids))[None], targets))
    expected, wanted = gradients(model, alone, batch.num_targets)
    for name, positions in (
        ("packed", inputs["positions"]),
        ("joined", torch.arange(256).expand(batch.num_rows, -1).contiguous()),
    ):
        loss, found = gradients(model, [(inputs["input"], positions, labels)], batch.num_targets)
        print(name, abs(loss - expected) / expected, furthest(found, wanted))


if __name__ == "__main__":
    main()
