"""Choose the attention kernel, and name the reasons against the others.

Slices run in a kernel of whole slices, or as rectangles one by one. A kernel is used if it agrees with scores formed
here on a small case of the same kind, in both passes: versions of the libraries differ in the arguments they respect.
Whole packs run in one call on CUDA, or document by document.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Final, get_args

import torch

from varlen.arguments import in_words
from varlen.attention import rectangles
from varlen.attention.kernels import (
    MAKERS,
    FlashAttn,
    Kernel,
    Kernels,
    Lengths,
    Merged,
    Qkv,
    TorchVarlen,
    WholePacks,
    heads_of,
    seen_by,
    tokens_of,
)
from varlen.attention.rectangles import HALF, MAX_HEAD_DIM
from varlen.attention.rules import LayerRules
from varlen.errors import ModelError, SettingError, described


def check_kernels(name: str) -> None:
    """Refuse a name that isn't among `Kernels`."""
    if name not in get_args(Kernels):
        raise SettingError(f"kernels={name!r}; it must be {in_words(get_args(Kernels))}")


@dataclass(frozen=True, slots=True, eq=False)
class KernelChoice:
    """What shall compute the attention of slices, and what does."""

    name: Kernels = "auto"
    used: dict[str, int] = field(default_factory=dict)
    """How often each has been chosen, by name."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why others weren't, by name."""


SLOWER_THAN_CUDNN: Final = ("varlen", "flash_attn")
CUDNN_PAIRS: Final = 2**24
"""Pairs of a row and an earlier token from which cuDNN is faster than these, in both passes (H100)."""


@dataclass(frozen=True, slots=True)
class LongByCudnn:
    """Calls with many earlier tokens run in cuDNN, others in another kernel."""

    has_softcap: ClassVar = False
    has_window: ClassVar = False
    other: Kernel
    name: str  # of the other kernel
    cudnn: Kernel
    used: dict[str, int]  # as of `KernelChoice`

    def forward(self, given: Qkv, lengths: Lengths, rules: LayerRules) -> Merged:
        """As `Kernel.forward`."""
        name = "cudnn" if self._is_long(lengths) else self.name
        self.used[name] = self.used.get(name, 0) + 1
        return self._kernel(lengths).forward(given, lengths, rules)

    def backward(
        self, gradient: torch.Tensor, given: Qkv, merged: Merged, lengths: Lengths, rules: LayerRules
    ) -> Qkv:
        """As `Kernel.backward`, which takes what another kernel's forward pass made."""
        return self._kernel(lengths).backward(gradient, given, merged, lengths, rules)

    def _kernel(self, lengths: Lengths) -> Kernel:
        return self.cudnn if self._is_long(lengths) else self.other

    @staticmethod
    def _is_long(lengths: Lengths) -> bool:
        slices = zip(lengths.queries, lengths.keys)
        return sum(rows * (keys - rows * (not lengths.sees_all)) for rows, keys in slices) >= CUDNN_PAIRS


def chosen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: LayerRules, choice: KernelChoice
) -> Kernel | None:
    """Return the kernel that computes whole slices; None if they are computed rectangle by rectangle ("sdpa").

    Args:
        query: `[1, query_heads, rows, dim]`.
        key: `[1, key_heads, rows, dim]`.
        value: `[1, key_heads, rows, value_dim]`.
    """
    name = choice.name
    if name == "sdpa" or (name == "auto" and not query.is_cuda):
        choice.used["sdpa"] = choice.used.get("sdpa", 0) + 1
        return None
    heads = (query.shape[1], key.shape[1], query.shape[3], value.shape[3])
    given = (query.device, query.dtype, heads, rules.window is not None, rules.softcap is not None)
    for each in MAKERS if name == "auto" else (name,):
        kernel, fault = _tried(each, *given)
        if kernel is None:
            choice.refused[each] = fault
            continue
        if name == "auto" and each in SLOWER_THAN_CUDNN:
            faster, fault = _tried("cudnn", *given)
            if faster is not None:
                return LongByCudnn(kernel, each, faster, choice.used)
            choice.refused["cudnn"] = fault
        choice.used[each] = choice.used.get(each, 0) + 1
        return kernel
    if name == "auto":
        choice.used["sdpa"] = choice.used.get("sdpa", 0) + 1
        return None
    raise ModelError(
        f'kernels="{name}" doesn\'t compute this attention: {choice.refused[name]}; kernels="auto" finds one that '
        "does"
    )


def chosen_for_packs(
    query: torch.Tensor, value: torch.Tensor, rules: LayerRules, *, has_sinks: bool
) -> WholePacks | None:
    """Return what computes all documents of a pack in one call; None if each is computed by itself.

    Args:
        query: `[tokens, query_heads, dim]`.
        value: `[tokens, key_heads, value_dim]`.
    """
    if has_sinks or _shape_fault(query.device, query.dtype, query.shape[-1], value.shape[-1]):
        return None
    if rules.softcap is None and rules.dropout == 0:
        return TorchVarlen().whole
    return FlashAttn.whole if importlib.util.find_spec("flash_attn") is not None else None


def _shape_fault(device: torch.device, dtype: torch.dtype, width: int, value_width: int) -> str:
    """Return why no kernel of many documents takes these heads; "" if one may."""
    if device.type != "cuda" or dtype not in HALF:
        return f"it takes half precision on CUDA, and this is {dtype} on {device.type}"
    if width != value_width or width % 8 or width > MAX_HEAD_DIM:
        return f"heads are {width} and {value_width} wide; it takes one multiple of 8 up to {MAX_HEAD_DIM}"
    return ""


@lru_cache(maxsize=64)
def _tried(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int, int, int],
    windowed: bool,
    capped: bool,
) -> tuple[Kernel | None, str]:
    """Return the kernel if it computes a small case correctly; else None, and the reason."""
    query_heads, key_heads, width, value_width = heads
    if fault := _shape_fault(device, dtype, width, value_width):
        return None, fault
    if capped and not MAKERS[name].has_softcap:
        return None, "it knows no soft cap"
    if windowed and not MAKERS[name].has_window:
        return None, "it is slow with windows"
    rules = LayerRules(width**-0.5, 3 if windowed else None, 5.0 if capped else None)
    try:
        kernel = MAKERS[name]()
        off = error_on_a_small_case(kernel, (query_heads, key_heads, width), rules, device, dtype)
    except Exception as error:  # if it fails to build, another kernel runs
        return None, described(error, kind=True)
    return (kernel, "") if off < 0.05 else (None, f"it is off by {off:.2g} on a small case")


def error_on_a_small_case(
    kernel: Kernel, heads: tuple[int, int, int], rules: LayerRules, device: torch.device, dtype: torch.dtype
) -> float:
    """Return the largest `error_of`: slices with and without earlier tokens, whole documents, rows that see all."""
    cases = [Lengths((4, 9), (11, 9)), Lengths((4, 9), (4, 9))]
    cases += [Lengths((4,), (11,), sees_all=True)] * (rules.window is None)
    return max(error_of(kernel, lengths, heads, rules, device, dtype) for lengths in cases)


def error_of(
    kernel: Kernel,
    lengths: Lengths,
    heads: tuple[int, int, int],
    rules: LayerRules,
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    """Return the largest error of a kernel in both passes, against `BY_SCORES`, relative to the largest value."""
    query_heads, key_heads, width = heads
    made = torch.Generator().manual_seed(0)
    rows, keys = sum(lengths.queries), sum(lengths.keys)
    sizes = [(rows, query_heads), (keys, key_heads), (keys, key_heads), (rows, query_heads)]
    *tokens, gradient = (torch.randn(*size, width, generator=made).to(device, dtype) for size in sizes)
    given, exact = Qkv(*tokens), Qkv(*(x.double() for x in tokens))
    merged, known = kernel.forward(given, lengths, rules), BY_SCORES.forward(exact, lengths, rules)
    found = (*merged, *kernel.backward(gradient, given, merged, lengths, rules))
    wanted = (*known, *BY_SCORES.backward(gradient.double(), exact, known, lengths, rules))
    off = [float((one - two).abs().max() / two.abs().max()) for one, two in zip(found, wanted)]
    return math.inf if any(map(math.isnan, off)) else max(off)


class ByScores:
    """The reference for kernels of slices: forms all scores."""

    has_softcap: ClassVar = True
    has_window: ClassVar = True

    def forward(self, given: Qkv, lengths: Lengths, rules: LayerRules) -> Merged:
        """As `Kernel.forward`."""
        query, key, value = (heads_of(x) for x in given)
        seen = seen_by(lengths, rules.window, query.device)
        out, lse = rectangles.forward(query, key, value, rules, seen=seen)
        return tokens_of(out).to(query.dtype), lse[0]

    def backward(
        self, gradient: torch.Tensor, given: Qkv, merged: Merged, lengths: Lengths, rules: LayerRules
    ) -> Qkv:
        """As `Kernel.backward`."""
        query, key, value = (heads_of(x) for x in given)
        whole = (heads_of(merged[0]), merged[1][None])
        seen = seen_by(lengths, rules.window, query.device)
        made = rectangles.backward(heads_of(gradient), query, key, value, whole, rules, seen=seen)
        return Qkv(*(tokens_of(x).to(query.dtype) for x in made))


BY_SCORES = ByScores()
