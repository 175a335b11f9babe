"""Attention masks made from a batch's boundaries, in the form that a transformers model takes them.

transformers can infer boundaries from `position_ids`, but only some families ask it to, and any cache or
2-D mask silently turns it off. A finished 4-D mask is passed on unread by every family.
"""

from __future__ import annotations

from typing import Any

import torch

from varlen.adapters.hf.model import model_type, named_kinds, only_kind, text_config
from varlen.adapters.hf.recurrent import MASKLESS_KINDS, TOLD
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
    kinds = named_kinds(config)
    if model_type(model) in TOLD:
        masked = [kind for kind in dict.fromkeys(("full_attention", *kinds)) if kind not in MASKLESS_KINDS]
        masks = {kind: _mask(batch, config, kind, form, dtype) for kind in masked}
        return masks | dict.fromkeys(MASKLESS_KINDS)
    if kinds:
        return {kind: _mask(batch, config, kind, form, dtype) for kind in kinds}
    return _mask(batch, config, only_kind(model), form, dtype)


def _mask(batch: PackedBatch, config: Any, kind: str, form: str, dtype: torch.dtype) -> Any:
    window = config.sliding_window if kind == "sliding_attention" else None
    if form == "block":
        if kind == "chunked_attention":
            raise ModelError(
                "chunked attention has no FlexAttention block mask in varlen; use "
                'model.set_attn_implementation("sdpa")'
            )
        return batch.block_mask(sliding_window=window)
    mask: torch.Tensor = batch.dense_mask(sliding_window=window)
    if kind == "chunked_attention":
        chunk = batch.position_ids // config.attention_chunk_size
        mask = mask & (chunk[:, :, None] == chunk[:, None, :])
    mask = mask[:, None]
    if form == "bool":
        return mask
    zero, closed = torch.zeros((), dtype=dtype, device=mask.device), torch.finfo(dtype).min
    return torch.where(mask, zero, closed)
