"""The choice of what computes a slice's attention: a kernel of whole slices, or rectangles one by one.

A kernel is used where a small case of the same kind, both passes, agrees with scores formed here: versions of the
libraries differ in which of their arguments they heed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Literal, get_args

import torch

from varlen.errors import ModelError, SettingError
from varlen.runtime import flash
from varlen.runtime.flash import HALF, MAX_HEAD_DIM, Rule
from varlen.runtime.kernels import FlashAttn, Flex, Lengths, Merged, Qkv, SliceKernel, TorchVarlen, seen_by

Kernels = Literal["auto", "sdpa", "varlen", "flash_attn", "flex"]
"""What computes slices: PyTorch's dense kernels rectangle by rectangle ("sdpa"), its variable-length one ("varlen"),
the flash-attn package's, FlexAttention, or the first of "varlen", "flash_attn", "flex" and "sdpa" that can."""


MAKERS: dict[str, Callable[[], SliceKernel]] = {
    "varlen": TorchVarlen,
    "flash_attn": FlashAttn,
    "flex": Flex,
}


def check_kernels(name: str) -> None:
    """Refuse a name that says nothing."""
    if name not in get_args(Kernels):
        raise SettingError(f"kernels={name!r}; there are {', '.join(get_args(Kernels))}")


def chosen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule, name: str
) -> SliceKernel | None:
    """Return what computes slices whole, or None where they are computed rectangle by rectangle.

    Args:
        query: `[1, query_heads, rows, dim]`.
        key: `[1, key_heads, rows, dim]`.
        value: `[1, key_heads, rows, value_dim]`.
    """
    if name == "sdpa" or (name == "auto" and not query.is_cuda):
        return None
    why: list[str] = []
    heads = (query.shape[1], key.shape[1], query.shape[3], value.shape[3])
    for each in MAKERS if name == "auto" else (name,):
        kernel, fault = _tried(
            each, query.device, query.dtype, heads, rule.window is not None, rule.cap is not None
        )
        if kernel is not None:
            return kernel
        why.append(fault)
    if name == "auto":
        return None
    raise ModelError(
        f'kernels="{name}" doesn\'t compute this attention: {why[0]}; kernels="auto" finds one that does'
    )


@lru_cache(maxsize=64)
def _tried(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int, int, int],
    windowed: bool,
    capped: bool,
) -> tuple[SliceKernel | None, str]:
    """Return a kernel that computes a small case right, else None and why not."""
    query_heads, key_heads, width, value_width = heads
    if device.type != "cuda" or dtype not in HALF:
        return None, f"it takes half precision on CUDA, and this is {dtype} on {device.type}"
    if width != value_width or width % 8 or width > MAX_HEAD_DIM:
        return (
            None,
            f"heads are {width} and {value_width} wide; it takes one multiple of 8 up to {MAX_HEAD_DIM}",
        )
    if capped and name == "varlen":
        return None, "it knows no soft cap"
    rule = Rule(width**-0.5, 3 if windowed else None, 5.0 if capped else None)
    try:
        kernel = MAKERS[name]()
        off = error_on_a_small_case(kernel, (query_heads, key_heads, width), rule, device, dtype)
    except Exception as error:  # whatever a build of it says, another kernel runs
        return None, f"{type(error).__name__}: {str(error)[:200]}"
    return (kernel, "") if off < 0.05 else (None, f"it is off by {off:.2g} on a small case")


def error_on_a_small_case(
    kernel: SliceKernel, heads: tuple[int, int, int], rule: Rule, device: torch.device, dtype: torch.dtype
) -> float:
    """Return how far a kernel is from scores formed here on two slices, as `error_of`."""
    return error_of(kernel, Lengths((4, 9), (11, 9)), heads, rule, device, dtype)


def error_of(
    kernel: SliceKernel,
    lengths: Lengths,
    heads: tuple[int, int, int],
    rule: Rule,
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    """Return how far a kernel is from scores formed here, in both passes; in units of the largest."""
    query_heads, key_heads, width = heads
    made = torch.Generator().manual_seed(0)
    rows, keys = sum(lengths.queries), sum(lengths.keys)
    sizes = [(rows, query_heads), (keys, key_heads), (keys, key_heads), (rows, query_heads)]
    *tokens, gradient = (torch.randn(*size, width, generator=made).to(device, dtype) for size in sizes)
    given, exact = Qkv(*tokens), Qkv(*(x.double() for x in tokens))
    merged, known = kernel.forward(given, lengths, rule), BY_SCORES.forward(exact, lengths, rule)
    found = (*merged, *kernel.backward(gradient, given, merged, lengths, rule))
    wanted = (*known, *BY_SCORES.backward(gradient.double(), exact, known, lengths, rule))
    off = [float((one - two).abs().max() / two.abs().max()) for one, two in zip(found, wanted)]
    return math.inf if any(map(math.isnan, off)) else max(off)


class ByScores:
    """What kernels of slices compute, with all scores formed: what they are tried against."""

    def forward(self, given: Qkv, lengths: Lengths, rule: Rule) -> Merged:
        """As `SliceKernel.forward`."""
        query, key, value = (_heads(x) for x in given)
        seen = seen_by(lengths, rule.window, query.device)
        out, lse = flash.forward(query, key, value, rule, seen=seen)
        return _tokens(out).to(query.dtype), lse[0]

    def backward(
        self, gradient: torch.Tensor, given: Qkv, merged: Merged, lengths: Lengths, rule: Rule
    ) -> Qkv:
        """As `SliceKernel.backward`."""
        query, key, value = (_heads(x) for x in given)
        whole = (_heads(merged[0]), merged[1][None])
        seen = seen_by(lengths, rule.window, query.device)
        made = flash.backward(_heads(gradient), query, key, value, whole, rule, seen=seen)
        return Qkv(*(_tokens(x).to(query.dtype) for x in made))


BY_SCORES = ByScores()


def _heads(tokens: torch.Tensor) -> torch.Tensor:
    """View `[tokens, heads, dim]` as `[1, heads, tokens, dim]`."""
    return tokens.transpose(0, 1)[None]


def _tokens(heads: torch.Tensor) -> torch.Tensor:
    return heads[0].transpose(0, 1)
