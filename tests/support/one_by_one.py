"""What a packed step must equal: each document alone in the model, and the sum over all of them by hand."""

import json
from pathlib import Path

from tests.support.ranks import ROOT, as_ranks

EXAMPLES = ROOT / "examples"
GRADIENTS_JOB = Path(__file__).with_name("gradients_job.py")
EOS = 256  # of the tokenizer "bytes"


def ids_of(texts, numbers):
    """The token ids of some lines of a file of texts, as the tokenizer "bytes" has them."""
    rows = [json.loads(line)["text"] for line in Path(texts).read_text().splitlines()]
    return [[*rows[number].encode(), EOS] for number in numbers]


def loss_and_gradients(model, documents):
    """The mean loss over the targets of all documents, each alone in the model, and its gradients by name."""
    import torch

    model.zero_grad()
    total = sum(len(ids) - 1 for ids in documents)
    loss = 0.0
    for ids in documents:
        one = torch.tensor([ids])
        logits = model(input_ids=one).logits[0, :-1]
        part = torch.nn.functional.cross_entropy(logits, one[0, 1:], reduction="sum") / total
        part.backward()
        loss += float(part)
    return loss, {name: value.grad.clone() for name, value in model.named_parameters()}


def assert_same_gradients(found, expected):
    """Every parameter's gradient is the expected one, up to the rounding of float32."""
    import torch

    assert set(found) == set(expected)
    for name, value in expected.items():
        assert float(value.abs().max()) > 0, name
        torch.testing.assert_close(
            found[name], value, rtol=1e-4, atol=2e-6 * float(value.abs().max()), msg=name
        )


def python(*arguments, cwd=None, **variables):
    return as_ranks(*arguments, ranks=1, folder=cwd, **variables)


def seen_in(folder):
    """The documents that each rank has trained on."""
    return [[int(line) for line in file.read_text().split()] for file in sorted(folder.glob("seen-*.txt"))]
