"""Tiny models of the families under test, a packed batch for them, and the gradients of both ways."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn.functional import cross_entropy

import varlen as vl
from varlen.adapters import hf
from varlen.batch.packed import Layout, PackedBatch

VOCABULARY = 97
WINDOW = 6
LENGTHS = (17, 5, 3, 1, 20, 2, 9)
"""Documents longer than the window and shorter, of one token, and rows with and without padding."""

FAMILIES = ("llama", "qwen3", "gemma2", "mistral", "gpt_neox", "gpt2")
ATTENTIONS = ("eager", "sdpa", "varlen")
# transformers refuses sdpa for Gemma 2, whose soft cap it doesn't compute.
PAIRS = [(family, name) for family in FAMILIES for name in ATTENTIONS if (family, name) != ("gemma2", "sdpa")]
LAYOUTS: tuple[Layout, ...] = ("rows", "flat")

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED),
    "gemma2": lambda: transformers.Gemma2Config(
        **GROUPED, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
    ),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=WINDOW),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SMALL),
    # Learned positions: unlike rotary ones they show a mere shift.
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, **NO_DROPOUT
    ),
}


# Models this small lose more by waking a second thread than it computes.
torch.set_num_threads(1)


def make(config: Any, attention: str, dtype: torch.dtype = torch.float64) -> Any:
    """Return a model with weights large enough that every token matters to those that see it."""
    hf.register()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model.to(dtype)


@functools.cache
def verified(family: str) -> vl.VerifyReport:
    """The report on a family with the usual settings, which tests of several files read."""
    return vl.verify(family)


def tiny(family: str, attention: str, dtype: torch.dtype = torch.float64) -> Any:
    return make(CONFIGS[family](), attention, dtype)


def documents(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, length).astype(np.int32) for length in lengths]


def packed(layout: Layout = "rows", lengths: tuple[int, ...] = LENGTHS, **options: Any) -> PackedBatch:
    """Return documents of random tokens in rows of 26, in input order."""
    packing = vl.pack(lengths, capacity=26, method="next_fit")
    return vl.collate(documents(lengths), packing, layout=layout, **options)


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def packed_loss(model: Any, batch: PackedBatch) -> torch.Tensor:
    """Return the summed loss of all targets, from the arguments that keep documents apart."""
    arguments = hf.model_inputs(batch, model)
    labels = arguments.pop("labels")
    logits = model(**arguments).logits
    assert logits.shape[:2] == labels.shape
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def loss_one_by_one(model: Any, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    """Return the summed loss of the same documents, each in a call of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for document in documents(lengths):
        tokens = torch.as_tensor(document).long()
        logits = model(**hf.plain_inputs(tokens[None], model)).logits[0]
        total = total + cross_entropy(logits[:-1], tokens[1:], reduction="sum")
    return total


def furthest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of any gradient, relative to that gradient's largest value."""
    assert ours.keys() == theirs.keys()
    return max(
        float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1e-300))
        for name in theirs
    )
