"""Variable-length attention kernels for CUDA: PyTorch's own, and FlashAttention's where it is installed.

Both take all documents in one call and half precision only. What neither computes is left to
`per_document`, which computes everything.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from varlen.adapters.hf.rules import LayerRules

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, LayerRules], torch.Tensor]

MAX_HEAD_DIM = 256


def fused_kernel(query: torch.Tensor, value: torch.Tensor, rules: LayerRules) -> Kernel | None:
    """Return a kernel that computes these rules on CUDA in one call, or None where none does.

    Args:
        query: `[tokens, query_heads, head_dim]`; only dtype and shape are looked at.
        value: `[tokens, key_heads, value_dim]`, likewise.
    """
    half = query.dtype in (torch.float16, torch.bfloat16)
    width = query.shape[-1]
    if not half or rules.sinks is not None or width != value.shape[-1] or width % 8 or width > MAX_HEAD_DIM:
        return None
    if rules.softcap is None and rules.dropout == 0:
        return by_torch
    return by_flash_attention if importlib.util.find_spec("flash_attn") is not None else None


def by_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    rules: LayerRules,
) -> torch.Tensor:
    """Attend within segments with the kernel that `torch.nn.attention.varlen` calls.

    `varlen_attn` itself takes no scale, window or grouped heads in PyTorch 2.11.

    Args:
        query: `[tokens, query_heads, head_dim]`, in half precision.
        key: `[tokens, key_heads, head_dim]`.
        ends: int32 `[segments + 1]`, from 0 to `tokens`, never falling.

    Returns:
        `[tokens, query_heads, head_dim]`.
    """
    # A window is one of both sides, and takes the place of the causal diagonal.
    sides = (None, None) if rules.window is None else (rules.window - 1, 0)
    out: Any = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        ends,
        ends,
        longest,
        longest,
        0.0,
        rules.window is None,
        False,
        scale=rules.scale,
        window_size_left=sides[0],
        window_size_right=sides[1],
    )
    return out[0]  # type: ignore[no-any-return]


def by_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    rules: LayerRules,
) -> torch.Tensor:
    """Attend within segments with the flash-attn package.

    Args:
        query: `[tokens, query_heads, head_dim]`, in half precision.
        key: `[tokens, key_heads, head_dim]`.
        ends: int32 `[segments + 1]`, from 0 to `tokens`, never falling.

    Returns:
        `[tokens, query_heads, head_dim]`.
    """
    flash_attn: Any = importlib.import_module("flash_attn")
    out: Any = flash_attn.flash_attn_varlen_func(
        query,
        key,
        value,
        ends,
        ends,
        longest,
        longest,
        dropout_p=rules.dropout,
        softmax_scale=rules.scale,
        causal=True,
        window_size=(_to_the_left(rules), 0),
        softcap=rules.softcap or 0.0,
    )
    return out  # type: ignore[no-any-return]


def _to_the_left(rules: LayerRules) -> int:
    """Return how many earlier tokens the kernels may look back to: they don't count the token itself."""
    return -1 if rules.window is None else rules.window - 1
