"""A document much longer than fits otherwise, trained in slices: what memory it takes, and that gradients are equal.

python examples/long_document.py                 # 8,192 tokens in slices of 512, beside the uncut model
python examples/long_document.py 65536 1024      # too long to run uncut here: in slices alone
"""

import sys

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import varlen as vl
from varlen.adapters import hf
from varlen.runtime.clock import bytes_meter

UNCUT = 8192
"""Tokens that are run uncut, too, to compare."""


def make_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=2**20, **sizes, **heads))


def make_batch(tokens):
    document = np.random.default_rng(0).integers(0, 512, tokens, dtype=np.int32)
    return vl.collate([document], vl.pack([tokens], capacity=tokens))


def taken(model):
    """The gradients, which the model has no more then."""
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return gradients


def main(tokens=UNCUT, slice_tokens=512):
    model, batch = make_model(), make_batch(tokens)
    engine = vl.SliceEngine(model, slice_tokens=slice_tokens)
    with bytes_meter(torch.device("cpu")) as meter:
        stats = engine.step(batch, meter=meter)
    in_slices = taken(model)
    print(f"{tokens:,} tokens in {len(stats.plan.forward.starts)} slices of {slice_tokens:,}:", end=" ")
    print(f"loss {stats.loss:.4f}, {stats.peak_bytes / 1e6:,.0f} MB at most")
    if tokens <= UNCUT:
        with bytes_meter(torch.device("cpu")) as meter:
            meter.begin_peak()
            model(**hf.model_inputs(batch.to_torch(), model)).loss.backward()
            peak_bytes = meter.peak
        apart = max(
            float((ours - theirs).norm() / theirs.norm()) for ours, theirs in zip(in_slices, taken(model))
        )
        print(
            f"uncut: {peak_bytes / 1e6:,.0f} MB; no gradient is further from the uncut one than {apart:.0e} of it"
        )

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        loss = engine.step(batch).loss
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {loss:.4f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
