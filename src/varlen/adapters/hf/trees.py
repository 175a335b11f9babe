"""The arguments with which a transformers model computes trees of rows, each token as in every row alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from varlen.adapters.hf import attention
from varlen.adapters.hf.mixing import check_kinds, is_bidirectional, takes_mapping
from varlen.adapters.hf.model import (
    accepts,
    check_size,
    family,
    first_position,
    implementation,
    model_type,
    named_kinds,
    only_kind,
    text_config,
    unwrap,
)
from varlen.attention.rules import check_rotary
from varlen.attention.tree_masks import tree_block_mask
from varlen.attention.trees import TreeSpans
from varlen.batch.packed import on_host
from varlen.batch.tree_batch import TreeBatch
from varlen.errors import ModelError

BY_INDEX = {
    "bloom": "adds a bias by the distance of tokens in their row (ALiBi)",
    "mpt": "adds a bias by the distance of tokens in their row (ALiBi)",
    "gpt_neo": "has layers whose window is counted by the places of tokens in their row",
}
"""Families that go by where a token stands in a row, beside its position and a mask."""
_ROWS = "give it the rows unfolded, as documents: vl.pack and vl.collate"


def check_trees(batch: TreeBatch, model: Any) -> None:
    """Refuse models that mix tokens by anything but masks and positions, and batches that are too large for one.

    Args:
        batch: of trees.
        model: a transformers model, whose family was checked.
    """
    config, name = text_config(model), type(unwrap(model)).__name__
    why = BY_INDEX.get(model_type(model), "")
    if not why and getattr(config, "alibi", False):
        why = BY_INDEX["bloom"]
    if not why and family(model).boundaries:
        why = "carries a state from token to token, which a fork would have to copy"
    if not why and is_bidirectional(model):
        why = "attends in both directions, and a tree has several next tokens"
    if not why and not accepts(model, "position_ids"):
        why = "takes no position_ids, and numbers tokens by their places in a row"
    if why:
        raise ModelError(f"{name} {why}, and in a tree branches stand side by side; {_ROWS}")
    positions = on_host(batch.position_ids)
    check_size(batch, model, int(positions.max(initial=-1)) + 1)
    check_rotary(on_host(batch.row_lengths), config, name)
    if getattr(config, "attn_temperature_tuning", False) and hasattr(config, "floor_scale"):
        step, places = config.floor_scale, np.arange(positions.shape[1])
        wrong = (on_host(batch.forest_tokens) >= 0) & ((places + 1) // step != (positions + 1) // step)
        if wrong.any():
            raise ModelError(
                f"{name} scales attention by a token's place in its row (attn_temperature_tuning, by steps of "
                f"{step:,}), and {int(wrong.sum()):,} tokens of this batch stand beyond the step of their position; "
                "pack with a smaller capacity, or set config.attn_temperature_tuning=False before the model is made"
            )


def tree_arguments(batch: TreeBatch, model: Any, forms: dict[str, str]) -> dict[str, Any]:
    """Return tokens, positions, and masks or spans for the attention that the model is set to.

    Args:
        batch: of trees.
        model: a transformers model that `check_trees` accepts.
        forms: the form of mask that each attention function takes.
    """
    base, name = unwrap(model), implementation(model)
    device = None if base.device.type == "meta" else base.device
    tensors = batch.to_torch(device)
    inputs: dict[str, Any] = {
        "input_ids": tensors.input_ids,
        "position_ids": tensors.position_ids + first_position(model),
        "use_cache": False,
    }
    if name == attention.NAME:
        return inputs | {"tree_spans": spans_of(batch)}
    if name not in forms:
        known = ", ".join((*forms, attention.NAME))
        raise ModelError(
            f'the model\'s attention is "{name}", which computes no trees; choose one of {known} with '
            f"model.set_attn_implementation(...), {attention.NAME} with varlen.adapters.hf.use_varlen_attention"
        )
    check_kinds(model)
    kinds = named_kinds(text_config(model))
    masks = {
        kind: _mask(tensors, model, kind, forms[name], base.dtype) for kind in kinds or (only_kind(model),)
    }
    return inputs | {
        "attention_mask": masks if kinds and takes_mapping(model) else next(iter(masks.values()))
    }


def spans_of(batch: TreeBatch) -> TreeSpans:
    """Return where the segments of a batch lie in its flattened tokens."""
    found = batch.segments()
    positions = on_host(batch.position_ids).reshape(-1).astype(np.int64)
    return TreeSpans(found.begins, found.ends, found.stops, found.depths, positions)


def _mask(batch: TreeBatch, model: Any, kind: str, form: str, dtype: torch.dtype) -> Any:
    """Return the mask of layers of a kind."""
    config = text_config(model)
    window = config.sliding_window if kind == "sliding_attention" else None
    chunk = config.attention_chunk_size if kind == "chunked_attention" else None
    if form == "block":
        return tree_block_mask(batch.subtree_end, batch.position_ids, window, chunk)
    mask = batch.visible(window, chunk)[:, None]
    if form == "bool":
        return mask
    zero, closed = torch.zeros((), dtype=dtype, device=mask.device), torch.finfo(dtype).min
    return torch.where(mask, zero, closed)
