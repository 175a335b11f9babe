"""Kernels that compute the attention of many slices in one call on CUDA.

What they take is rows of several slices, one behind the other, and the keys of their documents up to each slice's
end: `cu_seqlens` of queries and of keys that differ, with the causal diagonal at the bottom right. So a slice with
earlier tokens is one call on its document's cache, nothing to merge, and all slices at the start of a document, as
short documents are, are one call together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch

from varlen.runtime.flash import Rule


class Lengths(NamedTuple):
    """Rows and keys of the slices of one call."""

    queries: tuple[int, ...]
    """Of each slice."""
    keys: tuple[int, ...]
    """Tokens of its document up to its end, so at least as many."""


class Qkv(NamedTuple):
    """Queries, keys and values, or the gradients of each."""

    query: torch.Tensor
    """`[rows, query_heads, dim]`."""
    key: torch.Tensor
    """`[tokens, key_heads, dim]`."""
    value: torch.Tensor
    """As `key`."""


Merged = tuple[torch.Tensor, torch.Tensor]
"""Output, `[rows, query_heads, dim]`, and its log-sum-exp, float32 or wider `[query_heads, rows]`."""


class SliceKernel(Protocol):
    """Causal attention of slices, `[tokens, heads, dim]`, with the diagonal at the bottom right."""

    def forward(self, given: Qkv, lengths: Lengths, rule: Rule) -> Merged:
        """Return the output and its log-sum-exp."""

    def backward(
        self, gradient: torch.Tensor, given: Qkv, merged: Merged, lengths: Lengths, rule: Rule
    ) -> Qkv:
        """Return the gradients of what was given; `merged` is what `forward` made of it, sinks merged in."""


class TorchVarlen:
    """PyTorch's own variable-length kernel, which `torch.nn.attention.varlen` calls; no soft caps."""

    def __init__(
        self,
        forward: Callable[..., Any] = torch.ops.aten._flash_attention_forward,
        backward: Callable[..., Any] = torch.ops.aten._flash_attention_backward,
    ) -> None:
        self._forward, self._backward = forward, backward

    def forward(self, given: Qkv, lengths: Lengths, rule: Rule) -> Merged:
        """As `SliceKernel.forward`."""
        places = _places(lengths, given.query.device)
        causal, sides = _sides(rule)
        out, lse, *_ = self._forward(
            *given,
            *places,
            0.0,
            causal,
            False,
            scale=rule.scale,
            window_size_left=sides[0],
            window_size_right=sides[1],
        )
        return out, lse

    def backward(
        self, gradient: torch.Tensor, given: Qkv, merged: Merged, lengths: Lengths, rule: Rule
    ) -> Qkv:
        """As `SliceKernel.backward`."""
        places = _places(lengths, gradient.device)
        seed = torch.zeros(2, dtype=torch.uint64, device=gradient.device)  # of a dropout of 0
        causal, sides = _sides(rule)
        made = self._backward(
            gradient,
            *given,
            *merged,
            *places,
            0.0,
            causal,
            seed,
            gradient.new_empty(0),
            scale=rule.scale,
            window_size_left=sides[0],
            window_size_right=sides[1],
        )
        return Qkv(*made)


class FlashAttn:
    """The variable-length kernel of the flash-attn package, 2.7 or later; it knows soft caps."""

    def __init__(
        self, forward: Callable[..., Any] | None = None, backward: Callable[..., Any] | None = None
    ) -> None:
        if forward is None or backward is None:
            from flash_attn import flash_attn_interface as package

            forward, backward = package._flash_attn_varlen_forward, package._flash_attn_varlen_backward
        self._forward, self._backward = forward, backward

    def forward(self, given: Qkv, lengths: Lengths, rule: Rule) -> Merged:
        """As `SliceKernel.forward`."""
        places = _places(lengths, given.query.device)
        out, lse, *_ = self._forward(*given, *places, 0.0, rule.scale, **self._sides(rule))
        return out, lse

    def backward(
        self, gradient: torch.Tensor, given: Qkv, merged: Merged, lengths: Lengths, rule: Rule
    ) -> Qkv:
        """As `SliceKernel.backward`."""
        found = Qkv(*(torch.empty_like(x) for x in given))
        both = (gradient, *given, *merged, *found, *_places(lengths, gradient.device))
        self._backward(*both, 0.0, rule.scale, **self._sides(rule), alibi_slopes=None, deterministic=False)
        return found

    def _sides(self, rule: Rule) -> dict[str, Any]:
        left = -1 if rule.window is None else rule.window - 1
        cap = 0.0 if rule.cap is None else rule.cap
        return {"causal": True, "window_size_left": left, "window_size_right": 0, "softcap": cap}


class Flex:
    """FlexAttention, compiled: windows and soft caps where flash-attn is absent.

    Its backward runs the forward once more, so that nothing of it is kept between the passes.
    """

    def __init__(self, attention: Callable[..., Any] | None = None) -> None:
        if attention is None:
            from torch.nn.attention.flex_attention import flex_attention

            attention = torch.compile(flex_attention, dynamic=True)
        self._attention = attention
        self._caps: dict[float, torch.Tensor] = {}

    def forward(self, given: Qkv, lengths: Lengths, rule: Rule) -> Merged:
        """As `SliceKernel.forward`."""
        out, lse = self._run(given, lengths, rule)
        return out[0].transpose(0, 1), lse[0]

    def backward(
        self, gradient: torch.Tensor, given: Qkv, merged: Merged, lengths: Lengths, rule: Rule
    ) -> Qkv:
        """As `SliceKernel.backward`. Sinks add to the log-sum-exp here, and so only to what the output is of."""
        with torch.enable_grad():
            leaves = Qkv(*(x.detach().requires_grad_() for x in given))
            out, lse = self._run(leaves, lengths, rule)
            # What sinks took away: `out` of all keys alone is `merged` times this.
            share = (lse.detach() - merged[1][None]).exp()
            # d(out * share) = share * d(out) + out * share * (1 - share) * d(lse), the sink's score being fixed.
            wide = gradient.transpose(0, 1)[None].to(lse.dtype)
            by_lse = (wide * out.detach()).sum(-1) * share * (1 - share)
            by_out = (wide * share.unsqueeze(-1)).to(out.dtype)
            return Qkv(*torch.autograd.grad((out, lse), leaves, (by_out, by_lse)))

    def _run(self, given: Qkv, lengths: Lengths, rule: Rule) -> Merged:
        heads = [x.transpose(0, 1)[None] for x in given]
        if rule.cap is not None and rule.cap not in self._caps:
            self._caps[rule.cap] = torch.tensor(rule.cap, device=given.query.device)
        # A number would become symbolic under dynamic shapes, which the kernel doesn't take.
        cap = None if rule.cap is None else self._caps[rule.cap]

        def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            return score if cap is None else cap * torch.tanh(score / cap)

        from torch.nn.attention.flex_attention import AuxRequest

        out, aux = self._attention(
            *heads,
            score_mod=None if cap is None else capped,
            block_mask=_block_mask(lengths, rule.window, given.query.device),
            scale=rule.scale,
            enable_gqa=given.query.shape[1] != given.key.shape[1],
            return_aux=AuxRequest(lse=True),
            # The kernel for few queries takes at most 128 rows times query heads of a key head.
            kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        )
        return out, aux.lse


def seen_by(lengths: Lengths, window: int | None, device: torch.device) -> torch.Tensor:
    """Return which keys the rows of a call see, bool `[rows, keys]`."""
    row_slice, row_at, key_slice, key_at = positions(lengths, device)
    distance = row_at[:, None] - key_at
    near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return near & (row_slice[:, None] == key_slice)


@lru_cache(maxsize=256)
def _places(lengths: Lengths, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Return `cu_seqlens` of queries and keys, int32, and the longest of each, as kernels take them.

    Kept, since the layers of a MicroPack ask for the same.
    """
    ends = [list(accumulate(each, initial=0)) for each in lengths]
    queries, keys = (torch.tensor(each, dtype=torch.int32).to(device, non_blocking=True) for each in ends)
    return queries, keys, max(lengths.queries), max(lengths.keys)


def _sides(rule: Rule) -> tuple[bool, tuple[int | None, int | None]]:
    """Return whether a call is causal, and how many tokens to the left and right count where it has a window."""
    return (True, (None, None)) if rule.window is None else (False, (rule.window - 1, 0))


def positions(
    lengths: Lengths, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the slice and the position in its document of each row, and of each key; int64."""
    found = []
    for each in lengths:
        count = torch.tensor(each)
        owner = torch.repeat_interleave(torch.arange(len(each)), count)
        first = torch.tensor(lengths.keys) - count - (count.cumsum(0) - count)
        found += [owner.to(device), (torch.arange(sum(each)) + first[owner]).to(device)]
    return found[0], found[1], found[2], found[3]


@lru_cache(maxsize=32)
def _block_mask(lengths: Lengths, window: int | None, device: torch.device) -> Any:
    """Return FlexAttention's own form of `seen_by`."""
    from torch.nn.attention.flex_attention import create_block_mask

    row_slice, row_at, key_slice, key_at = positions(lengths, device)

    def sees(_batch: Any, _head: Any, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        distance = row_at[row] - key_at[key]
        near = (distance >= 0) & (row_slice[row] == key_slice[key])
        return near if window is None else near & (distance < window)

    return create_block_mask(sees, None, None, sum(lengths.queries), sum(lengths.keys), device=device)
