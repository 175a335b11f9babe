"""Tiny models of the families under test, and a packed batch made by hand, so that tests stay fast and exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GemmaConfig, Gemma2Config, GPTNeoXConfig, LlamaConfig  # noqa: F401
from transformers import MistralConfig, Qwen3Config

from varlen.batch.packed import PackedBatch

VOCAB = 97
WINDOW = 6


def config(family: str) -> Any:
    small = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        num_key_value_heads=2,
        max_position_embeddings=256,
        head_dim=8,
        pad_token_id=0,
    )
    match family:
        case "llama":
            return LlamaConfig(**small)
        case "qwen3":
            return Qwen3Config(**small)
        case "gemma2":
            return Gemma2Config(
                **small, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
            )
        case "mistral":
            return MistralConfig(**small, sliding_window=WINDOW)
        case "gpt_neox":
            small.pop("num_key_value_heads"), small.pop("head_dim")
            return GPTNeoXConfig(**small)
    raise KeyError(family)


def tiny(family: str, attention: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(family), attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model.to(dtype)


def by_hand(rows: list[list[int]], width: int, layout: str = "rows", seed: int = 0) -> PackedBatch:
    """Lay random documents of these lengths out, in the plainest numpy, independent of `vl.collate`."""
    rng = np.random.default_rng(seed)
    ids, labels, positions, segments, cu, lengths = [], [], [], [], [0], []
    for row in rows:
        for number, length in enumerate(row):
            document = rng.integers(1, VOCAB, length)
            ids += document.tolist()
            labels += [-100, *document[1:].tolist()]
            positions += range(length)
            segments += [number] * length
            cu.append(cu[-1] + length)
            lengths.append(length)
        padding = width - sum(row)
        ids += [0] * padding
        labels += [-100] * padding
        positions += [0] * padding
        segments += [-1] * padding
        cu += [cu[-1] + padding] if padding else []
    if layout == "flat":
        real = [i for i, s in enumerate(segments) if s >= 0]
        owners = np.cumsum([p == 0 for p in np.array(positions)[real]]) - 1
        ids, labels, positions, segments = (
            np.array(ids)[real],
            np.array(labels)[real],
            np.array(positions)[real],
            owners,
        )
        cu, width = [0, *np.cumsum(lengths)], len(real)
    as_rows = lambda values, dtype=np.int32: np.asarray(values, dtype).reshape(-1, width)  # noqa: E731
    targets = sum(length - 1 for length in lengths)
    return PackedBatch(
        input_ids=as_rows(ids),
        labels=as_rows(labels),
        position_ids=as_rows(positions),
        segment_ids=as_rows(segments),
        cu_seqlens=np.asarray(cu, np.int32),
        cu_seqlens_padded=None,
        max_seqlen=max(lengths),
        document_ids=np.arange(len(lengths)),
        document_starts=np.zeros(len(lengths), np.int32),
        document_lengths=np.asarray(lengths, np.int32),
        document_targets=np.asarray(lengths, np.int32) - 1,
        pack_ids=np.arange(len(rows)),
        pack_offsets=np.cumsum([0, *map(len, rows)]),
        layout=layout,
        pad_id=0,
        max_token_id=int(np.max(ids)),
        num_targets=targets,
        step_num_targets=targets,
    )
