"""The attention of slices: rows attend to their document's earlier slices in a cache, and causally to themselves.

It goes through transformers' registry, so that no model is patched. On CUDA a kernel computes slices whole; elsewhere
the tokens before a slice and the slice's own rows are two calls, merged by log-sum-exp: no mask is formed and no key
copied. The backward adds to the gradients of earlier tokens in the cache itself, and a slice takes up there what its
later ones have left; so one ordinary `backward` per MicroPack, last to first, is the exact gradient of the uncut
document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface

from varlen.errors import ModelError
from varlen.runtime import flash, merged, tiles
from varlen.runtime.casting import lowered, uncast
from varlen.runtime.choice import Kernels, chosen
from varlen.runtime.flash import Rule
from varlen.runtime.kernels import Lengths, Qkv, SliceKernel
from varlen.runtime.kv_cache import Pair
from varlen.runtime.tiles import CachedSlice as CachedSlice

NAME = "varlen_slices"
UNKNOWN_PATTERNS = ("position_bias", "indices", "block_indices")
"""Arguments by which some families change who is attended to or how much, which slices don't compute."""


def register() -> str:
    """Make `attn_implementation="varlen_slices"` known to transformers; calling it twice changes nothing."""
    AttentionInterface.register(NAME, slice_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    return NAME


def slice_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    slices: Sequence[CachedSlice] | None = None,
    kernels: Kernels = "auto",
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within documents; transformers' calling convention.

    Args:
        query: `[1, query_heads, rows, dim]`, rows of all slices of a MicroPack, one slice behind the other.
        key: `[1, key_heads, rows, dim]`; `query_heads` is a multiple of `key_heads`.
        value: `[1, key_heads, rows, value_dim]`.
        s_aux: `[query_heads]`: sinks, a score of each head that all its rows see and that has nothing to give.

    Returns:
        `[1, rows, query_heads, value_dim]`, and None for the weights, which are never formed.
    """
    layer = getattr(module, "layer_idx", None)
    name = type(module).__name__
    given = [word for word in UNKNOWN_PATTERNS if rest.get(word) is not None]
    if slices is None or attention_mask is not None or layer is None:
        raise ModelError(
            f'the "{NAME}" attention is called by varlen.runtime with slices and no mask, and {name} was called '
            'without; for the model as a whole choose model.set_attn_implementation("sdpa")'
        )
    if given or dropout:
        what = ", ".join(given) or f"dropout={dropout}"
        raise ModelError(f"{name} passes {what}, which the attention of slices doesn't compute")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = Rule(scale, sliding_window, softcap)
    query, key, value = lowered(query), lowered(key), lowered(value)
    with uncast(query):
        out = attend(query, key, value, slices, layer=layer, rule=rule, sinks=s_aux, kernels=kernels)
    return out.transpose(1, 2), None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slices: Sequence[CachedSlice],
    *,
    layer: int,
    rule: Rule,
    sinks: torch.Tensor | None = None,
    kernels: Kernels = "auto",
) -> torch.Tensor:
    """Attend from every slice to its document up to itself, and keep its keys and values in the document's cache.

    Slices of a document must come first to last here, and go last to first through the backward.

    Args:
        query: `[1, query_heads, rows, dim]`.
        key: `[1, key_heads, rows, dim]`.
        value: `[1, key_heads, rows, value_dim]`.
        sinks: `[query_heads]`: scores that all rows see and that have nothing to give; None for none.

    Returns:
        `[1, query_heads, rows, value_dim]`; heads of one row lie side by side in memory.

    Cost: the work of causal attention cut to the slices; memory linear in rows and tokens.
    """
    kernel = chosen(query, key, value, rule, kernels)
    call = Call(slices, layer, rule, kernel)
    return _SliceAttention.apply(query, key, value, sinks, call)  # type: ignore[no-any-return, no-untyped-call]


class Call(NamedTuple):
    """What one call of attention is about, its tensors apart."""

    slices: Sequence[CachedSlice]
    layer: int
    rule: Rule
    kernel: SliceKernel | None

    def groups(self) -> Iterator[Sequence[CachedSlice]]:
        """Yield slices that are computed together: with a kernel, neighbours that begin their documents."""
        group: list[CachedSlice] = []
        for piece in self.slices:
            if group and (self.kernel is None or self._is_apart(piece) or self._is_apart(group[0])):
                yield group
                group = []
            group.append(piece)
        if group:
            yield group

    def _is_apart(self, piece: CachedSlice) -> bool:
        return piece.start > 0 or piece.share is not None

    def forward(self, query: torch.Tensor, pair: Pair, group: Sequence[CachedSlice]) -> flash.Partial:
        """Attend from the rows of a group.

        Args:
            query: `[1, query_heads, rows, dim]`, of the group.
        """
        if self.kernel is None:
            return tiles.forward(query, pair, group[0], self.rule)
        return _forward_whole(query, pair, group, self.rule, self.kernel)

    def backward(
        self,
        gradient: torch.Tensor,
        query: torch.Tensor,
        whole: flash.Partial,
        group: Sequence[CachedSlice],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of a group's queries, keys and values; those of earlier tokens go to its cache."""
        if self.kernel is None:
            return tiles.backward(gradient, query, whole, group[0], self.layer, self.rule)
        return _backward_whole(gradient, query, whole, group, self)


class _SliceAttention(torch.autograd.Function):
    """Forward and backward of `attend`; caches are written in both."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        call: Call,
    ) -> torch.Tensor:
        parts, row = [], 0
        for group in call.groups():
            first, pairs = row, []
            if group[0].share is not None:
                rows = slice(row, row + group[0].rows)
                given = (query[:, :, rows], key[:, :, rows], value[:, :, rows], group[0])
                parts.append(merged.forward(*given, call.layer, call.rule.window, call.forward))
                row = rows.stop
                continue
            for piece in group:
                rows = slice(row, row + piece.rows)
                pairs.append(piece.cache.write(call.layer, piece.start, key[:, :, rows], value[:, :, rows]))
                row = rows.stop
            rows = slice(first, row)
            of_rows = call.kernel is not None and not group[0].start
            pair = (key[:, :, rows], value[:, :, rows]) if of_rows else pairs[0]
            parts.append(call.forward(query[:, :, rows], pair, group))
        out, lse = _joined([x for x, _ in parts]), torch.cat([x for _, x in parts], 2)
        if sinks is not None:
            out, lse = flash.with_sinks((out, lse), sinks)
        ctx.save_for_backward(query, out, lse, sinks)
        ctx.call, ctx.none = call, merged.none_of(key, value)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, out, lse, sinks = ctx.saved_tensors
        call: Call = ctx.call
        by_sinks = None
        if ctx.needs_input_grad[3]:
            by_sinks = flash.sinks_backward(gradient, (out, lse), sinks)
        parts, stop = [], query.shape[2]
        for group in reversed(list(call.groups())):
            rows = slice(stop - sum(piece.rows for piece in group), stop)
            given = (gradient[:, :, rows], query[:, :, rows], (out[:, :, rows], lse[:, :, rows]))
            stop = rows.start
            if group[0].share is not None:
                of_piece = (group[0], call.layer, call.rule.window)
                parts.append(merged.backward(*given, *of_piece, ctx.none, call.backward))
                continue
            parts.append(call.backward(*given, group))
            for piece in reversed(group):
                piece.cache.release(call.layer, piece.start)
        by_query, by_key, by_value = (_joined(each) for each in zip(*parts[::-1]))
        return by_query, by_key, by_value, by_sinks, None


def _forward_whole(
    query: torch.Tensor, pair: Pair, group: Sequence[CachedSlice], rule: Rule, kernel: SliceKernel
) -> flash.Partial:
    """Attend from the rows of a group in one call.

    Args:
        query: `[1, query_heads, rows, dim]`, of the group.
    """
    first = _first_key(group, rule)
    given = Qkv(_tokens(query), *(_tokens(x)[first:] for x in pair))
    out, lse = kernel.forward(given, _lengths(group, first), rule)
    return out.transpose(0, 1)[None], lse[None]


def _backward_whole(
    gradient: torch.Tensor,
    query: torch.Tensor,
    merged: flash.Partial,
    group: Sequence[CachedSlice],
    call: Call,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of a group's queries, keys and values; those of earlier tokens go to their cache."""
    layer, first = call.layer, _first_key(group, call.rule)
    assert call.kernel is not None
    pairs = [piece.cache.read(layer, piece.stop) for piece in group]
    given = Qkv(_tokens(query), *(_tokens(_joined(each))[first:] for each in zip(*pairs)))
    whole = (_tokens(merged[0]), merged[1][0].contiguous())
    by_query, *by_pair = call.kernel.backward(
        _tokens(gradient), given, whole, _lengths(group, first), call.rule
    )
    found = [x.transpose(0, 1)[None] for x in by_pair]
    if before := group[0].start - first:
        earlier = group[0].cache.earlier_gradients(layer, group[0].start)
        assert earlier is not None
        for total, part in zip(earlier, found):
            total[:, :, first:].add_(part[:, :, :before])
        found = [x[:, :, before:] for x in found]
    row = 0
    for piece in group:
        later = piece.cache.own_gradients(layer, piece.start, piece.stop)
        for total, part in zip(later or (), found):
            part[:, :, row : row + piece.rows].add_(total)
        row += piece.rows
    return by_query.transpose(0, 1)[None], found[0], found[1]


def _first_key(group: Sequence[CachedSlice], rule: Rule) -> int:
    """Return the first token that a group's rows see, of its one document; 0 where it has several."""
    return 0 if rule.window is None else max(0, group[0].start - rule.window + 1)


def _lengths(group: Sequence[CachedSlice], first: int) -> Lengths:
    return Lengths(tuple(piece.rows for piece in group), tuple(piece.stop - first for piece in group))


def _tokens(heads: torch.Tensor) -> torch.Tensor:
    """View `[1, heads, tokens, dim]` as `[tokens, heads, dim]`."""
    return heads[0].transpose(0, 1)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join rows, so that heads of a row lie side by side and the output projection needs no copy."""
    return parts[0] if len(parts) == 1 else torch.cat([x.transpose(1, 2) for x in parts], 1).transpose(1, 2)


def _no_mask(*_: Any, **__: Any) -> None:
    """Build no mask: slices say who is attended to."""
