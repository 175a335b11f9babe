"""Attention masks made from a batch's boundaries, in the form that a transformers model takes them.

transformers can infer boundaries from `position_ids`, but only some families ask it to, and any cache or
2-D mask silently turns it off. A finished 4-D mask is passed on unread by every family.
"""

from __future__ import annotations

from typing import Any

import torch

from varlen.adapters.hf.model import layer_kinds, text_config
from varlen.batch.packed import PackedBatch
from varlen.errors import ModelError


def explicit_masks(batch: PackedBatch, model: Any, form: str, dtype: torch.dtype) -> Any:
    """Return what to pass as `attention_mask`: one mask, or one for each kind of layer.

    Args:
        batch: torch tensors on the model's device.
        model: decides which kinds of layers, and how wide their windows are.
        form: "bool" (sdpa), "additive" (eager) or "block" (FlexAttention).
        dtype: of additive masks.

    Returns:
        `[rows, 1, width, width]`, or a mapping from kind to such a mask for models with
        `config.layer_types`. Quadratic in the width, except for "block".
    """
    config = text_config(model)
    if kinds := layer_kinds(config):
        return {kind: _mask(batch, config, kind, form, dtype) for kind in kinds}
    return _mask(batch, config, _only_kind(config), form, dtype)


def _only_kind(config: Any) -> str:
    """Return the kind of a model whose layers are all alike, as transformers reads it from the config."""
    if getattr(config, "sliding_window", None) is not None:
        return "sliding_attention"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "chunked_attention"
    return "full_attention"


def _mask(batch: PackedBatch, config: Any, kind: str, form: str, dtype: torch.dtype) -> Any:
    window = config.sliding_window if kind == "sliding_attention" else None
    if form == "block":
        if kind == "chunked_attention":
            raise ModelError(
                "chunked attention has no FlexAttention block mask in varlen; use "
                'model.set_attn_implementation("sdpa")'
            )
        return batch.block_mask(sliding_window=window)
    mask = _dense(batch, window)
    if kind == "chunked_attention":
        chunk = batch.position_ids // config.attention_chunk_size
        mask = mask & (chunk[:, :, None] == chunk[:, None, :])
    mask = mask[:, None]
    if form == "bool":
        return mask
    zero, closed = torch.zeros((), dtype=dtype, device=mask.device), torch.finfo(dtype).min
    return torch.where(mask, zero, closed)


def _dense(batch: PackedBatch, window: int | None) -> torch.Tensor:
    """Return bool `[rows, width, width]`: same segment, not later, within the window; padding sees itself."""
    segments, width = batch.segment_ids, batch.segment_ids.shape[1]
    places = torch.arange(width, device=segments.device)
    distance = places[:, None] - places[None, :]
    near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    same = (segments[:, :, None] == segments[:, None, :]) & (segments >= 0)[:, :, None]
    return (same & near) | (distance == 0)
