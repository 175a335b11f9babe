"""The attention of documents that several data-parallel ranks share (DP-Merge): each has some of the rows.

A rank keeps the keys and values of its own rows alone. In each layer the group gathers those of all tokens that a
slice sees, each rank attends with its own rows, and in the backward the gradients of keys and values are summed where
those are kept (as context parallelism does it in Llama 3; Grattafiori et al. 2024, arXiv 2407.21783, §3.3.2). What is
gathered is there for one layer at a time, as a document of which the rank's rows are ordinary slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from varlen.runtime import flash
from varlen.runtime.kv_cache import DocumentCache, Pair
from varlen.runtime.mesh.shared_documents import Share, Span
from varlen.runtime.tiles import CachedSlice

Attend = Callable[[torch.Tensor, Pair, Sequence[CachedSlice]], flash.Partial]
"""Attends from the rows of one slice, given keys and values up to its end."""
AttendBackward = Callable[
    [torch.Tensor, torch.Tensor, flash.Partial, Sequence[CachedSlice]],
    tuple[torch.Tensor, torch.Tensor, torch.Tensor],
]
"""Gives the gradients of one slice's queries, keys and values; those of earlier tokens go to its cache."""


class _GatheredCache(DocumentCache):
    """What is gathered of a document, for one slice in one layer; gradients are added up from outside."""

    def own_gradients(self, layer: int, start: int, stop: int) -> Pair | None:  # noqa: ARG002
        """Return None, so that what comes back is of this slice alone."""
        return None


class _Gathered(NamedTuple):
    cache: DocumentCache
    slices: list[tuple[CachedSlice, slice]]
    """This rank's rows, as neighbours that are slices of what is gathered, and where they stand among queries."""
    span: Span


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    piece: CachedSlice,
    layer: int,
    window: int | None,
    attend: Attend,
) -> flash.Partial:
    """Attend from this rank's rows of a slice to the document up to themselves, and keep their keys and values.

    All ranks of the group call it together.

    Args:
        query: `[1, query_heads, rows, dim]`, of this rank's rows.
        key: `[1, key_heads, rows, dim]`.
        value: `[1, key_heads, rows, value_dim]`.

    Cost: the work of attention on the rows given; the keys and values of all tokens seen are gathered, and once more
    put in their order.
    """
    share = _share_of(piece)
    if share.rows:
        piece.cache.write(layer, share.first, key, value)
    gathered = _gathered(piece, layer, window, none_of(key, value))
    parts = [
        attend(query[:, :, rows], gathered.cache.read(layer, own.stop), [own])
        for own, rows in gathered.slices
    ]
    if not parts:
        wide = torch.promote_types(query.dtype, torch.float32)
        none = query.new_empty(1, 0, query.shape[1], value.shape[3]).transpose(1, 2)
        return none, query.new_empty(query.shape[:3], dtype=wide)
    return _joined([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 2)


def backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    whole: flash.Partial,
    piece: CachedSlice,
    layer: int,
    window: int | None,
    none: Pair,
    attend_backward: AttendBackward,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of this rank's queries, keys and values of a slice.

    What its rows and those of the peers send to keys and values is summed where these are kept: that of earlier
    slices in caches, whose memory of this slice is given back. All ranks of the group call it together.

    Cost: as `forward`; two copies of the gradients of all tokens seen, float32 or wider, are summed and scattered.
    """
    gathered = _gathered(piece, layer, window, none)
    cache, span = gathered.cache, gathered.span
    wide = torch.promote_types(none[0].dtype, torch.float32)
    joint = none[0].new_zeros(span.stop - span.start, *_shape(none), dtype=wide)
    totals = cache.gradients[layer] = _parted(joint, none)
    by_queries = []
    for own, rows in reversed(gathered.slices):
        part = (whole[0][:, :, rows], whole[1][:, :, rows])
        by_query, *by_pair = attend_backward(gradient[:, :, rows], query[:, :, rows], part, [own])
        by_queries.append(by_query)
        for total, of_rows in zip(totals, by_pair):
            total[:, :, own.start : own.stop].add_(of_rows)
    by_query = _joined(by_queries[::-1]) if by_queries else torch.empty_like(query)
    mine = _scattered(joint, _share_of(piece), span, none)
    return by_query, *_taken(mine, piece, layer, span, none)


def none_of(key: torch.Tensor, value: torch.Tensor) -> Pair:
    """Return keys and values of no row, which hold nothing of those given but their heads, widths and dtype.

    Args:
        key: `[1, key_heads, rows, dim]`.
        value: `[1, key_heads, rows, value_dim]`.
    """
    none = (x.new_empty(1, x.shape[1], 0, x.shape[3]) for x in (key, value))
    return next(none), next(none)


def _share_of(piece: CachedSlice) -> Share:
    assert piece.share is not None
    return piece.share


def _gathered(piece: CachedSlice, layer: int, window: int | None, none: Pair) -> _Gathered:
    """Gather the keys and values of the tokens of a span, in their order."""
    share = _share_of(piece)
    span = share.span(window)
    mine = none[0].new_empty(span.width, *_shape(none))
    if share.last:
        for into, kept in zip(_parted(mine, none), piece.cache.read(layer, share.last)):
            into[:, :, : share.last - span.first] = kept[:, :, span.first :]
    everyone = share.document.peers.all_gather(mine).flatten(0, 1)
    cache = _GatheredCache(span.stop - span.start)
    # Keys and values of a token stay side by side: both are put in order at once, many times faster than each alone.
    cache.pairs[layer] = _parted(everyone.index_select(0, share.order(span)), none)
    slices, row = [], 0
    for start, stop in share.ranges:
        own = CachedSlice(cache=cache, start=start - span.start, stop=stop - span.start)
        slices.append((own, slice(row, row + own.rows)))
        row += own.rows
    return _Gathered(cache, slices, span)


def _scattered(totals: torch.Tensor, share: Share, span: Span, none: Pair) -> Pair:
    """Sum gradients over ranks, `[tokens, heads, widths]`, and return those of this rank's rows of a span."""
    size, order = share.document.peers.size, share.order(span)
    padded = totals.new_zeros(size * span.width, *_shape(none))
    padded.index_copy_(0, order, totals)
    summed = share.document.peers.reduce_scatter(padded.view(size, span.width, *_shape(none)))
    return _parted(summed[: share.last - span.first], none)


def _taken(
    mine: Pair, piece: CachedSlice, layer: int, span: Span, none: Pair
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add gradients of earlier rows to the cache; return those of the slice's rows, which are then done with."""
    share, cache = _share_of(piece), piece.cache
    if not share.last:
        return none  # and the cache of this layer, which holds no row yet or none anymore, is left alone
    before = share.first - span.first
    earlier = cache.earlier_gradients(layer, share.first)
    for total, part in zip(earlier or (), mine):
        total[:, :, span.first :].add_(part[:, :, :before])
    own = cache.own_gradients(layer, share.first, share.last)
    parts = [x[:, :, before:] for x in mine]
    if own is not None:
        parts = [part + later for part, later in zip(parts, own)]
    cache.release(layer, share.first)
    return parts[0].to(none[0].dtype), parts[1].to(none[1].dtype)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join rows, so that heads of a row lie side by side."""
    return parts[0] if len(parts) == 1 else torch.cat([x.transpose(1, 2) for x in parts], 1).transpose(1, 2)


def _shape(none: Pair) -> tuple[int, int]:
    """Heads, and the widths of a key and a value side by side."""
    return none[0].shape[1], none[0].shape[3] + none[1].shape[3]


def _parted(joint: torch.Tensor, none: Pair) -> Pair:
    """View `[tokens, heads, widths]` as keys and values, each `[1, heads, tokens, dim]`."""
    keys, values = joint[None].transpose(1, 2).split_with_sizes([none[0].shape[3], none[1].shape[3]], -1)
    return keys, values
