"""Tiny encoders and decoders with heads, documents for them, and what each document has alone."""

import itertools
from typing import Any

import numpy as np
import torch
import transformers
from tests.support.hf_models import GROUPED, SMALL, VOCABULARY, WINDOW
from tests.support.rarely import mostly

import varlen as vl
from varlen.adapters import hf
from varlen.batch.packed import Layout, PackedBatch

LENGTHS = (17, 5, 3, 1, 20, 2, 9)
"""Documents longer than the windows and shorter, and of one token."""
ATTENTIONS = ("eager", "sdpa", "flex_attention", "varlen")
CELLS = mostly(
    [*((attention, "rows") for attention in ATTENTIONS), ("varlen", "flat")],
    itertools.product(ATTENTIONS, ("rows", "flat")),
)
"""Attention and layout."""
AFTER_PADDING = SMALL | {"max_position_embeddings": 66, "pad_token_id": 1}
MODERN = SMALL | {"num_hidden_layers": 3, "local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2}
SPECIAL = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
CONFIGS: dict[str, Any] = {
    "bert": lambda: transformers.BertConfig(**SMALL),
    "roberta": lambda: transformers.RobertaConfig(**AFTER_PADDING),
    "xlm-roberta": lambda: transformers.XLMRobertaConfig(**AFTER_PADDING),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=64
    ),
    "electra": lambda: transformers.ElectraConfig(**SMALL, embedding_size=16),
    "albert": lambda: transformers.AlbertConfig(**SMALL, embedding_size=16),
    "modernbert": lambda: transformers.ModernBertConfig(**MODERN, **SPECIAL),
    "modernbert, mean": lambda: transformers.ModernBertConfig(**MODERN, **SPECIAL, classifier_pooling="mean"),
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED),
    "qwen3, both ways": lambda: transformers.Qwen3Config(**GROUPED, is_causal=False),
    "gemma3, both ways": lambda: transformers.Gemma3TextConfig(
        **GROUPED,
        sliding_window=WINDOW,
        use_bidirectional_attention=True,
        layer_types=["sliding_attention", "full_attention"],
    ),
}
DTYPES = (torch.float32, torch.float64)


def made(
    kind: Any, family: str, attention: str = "sdpa", dtype: torch.dtype = torch.float64, **more: Any
) -> Any:
    """Return a tiny model in eval mode, with weights large enough that every visible token matters."""
    hf.register()
    config = CONFIGS[family]()
    for name, value in more.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind.from_config(config, attn_implementation=attention)
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(0, 0.2)
    return model.to(dtype).eval()


def documents(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, VOCABULARY, length).astype(np.int32) for length in lengths]


def packed(layout: Layout = "rows", lengths: tuple[int, ...] = LENGTHS, **options: Any) -> PackedBatch:
    """Return documents of random tokens in rows of 26, in input order."""
    return vl.collate(
        documents(lengths), vl.pack(lengths, capacity=26, method="next_fit"), layout=layout, **options
    )


def padded(lengths: tuple[int, ...] = LENGTHS, pad: int = 0) -> dict[str, torch.Tensor]:
    """Return the same documents as rows, padded on the right."""
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    ids = torch.full(mask.shape, pad)
    ids[mask] = torch.from_numpy(np.concatenate(documents(lengths))).long()
    return {"input_ids": ids, "attention_mask": mask.long()}


def alone(model: Any, document: Any, **more: Any) -> Any:
    """Return what a model makes of one document in a call of its own."""
    with torch.no_grad():
        return model(**hf.plain_inputs(torch.as_tensor(document).long()[None], model), **more)


def differ(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of gradients, relative to each one's largest value.

    Some are 0 but for rounding, as those of keys' biases, so no scale is less than a millionth of the largest of all.
    """
    assert ours.keys() == theirs.keys()
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    return max(
        float((ours[name] - theirs[name]).abs().max()) / max(float(theirs[name].abs().max()), 1e-6 * largest)
        for name in theirs
    )
