"""The attention of documents that several data-parallel ranks share (DP-Merge): each has some of the rows.

A rank keeps the keys and values of its own rows alone. In each layer the group gathers those of all tokens that a
slice sees, each rank attends with its own rows, and in the backward the gradients of keys and values are summed where
those are kept (as context parallelism does it in Llama 3; Grattafiori et al. 2024, arXiv 2407.21783, §3.3.2). What is
gathered is there for one layer at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from varlen.runtime import flash
from varlen.runtime.cache import DocumentCache, Pair
from varlen.runtime.dealing import Ranges
from varlen.runtime.shared import Share, Span

BLOCK = 512
"""Rows of a sliding window computed at once, so that memory is linear in the slice."""


class Tile(NamedTuple):
    """A rectangle of attention: some of a rank's rows over neighbouring tokens."""

    row: int
    """The first of the rows."""
    stop_row: int
    token: int
    """That of the first row; they are neighbours wherever a window asks for it."""
    start: int
    """The first token seen."""
    stop: int
    causal: bool = False
    window: int | None = None


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: DocumentCache,
    share: Share,
    *,
    layer: int,
    scale: float,
    window: int | None,
) -> flash.Partial:
    """Attend from this rank's rows of a slice to the document up to themselves, and keep their keys and values.

    All ranks of the group call it together.

    Args:
        query: `[1, query_heads, rows, dim]`, of this rank's rows.
        key: `[1, key_heads, rows, dim]`.
        value: as `key`.
        cache: of this rank's rows of the document.
        share: which rows these are.
        layer: the index under which the cache keeps this layer.
        scale: of scores.
        window: tokens that a row sees, itself included; None for all.

    Cost: the work of attention on the rows given; the keys and values of all tokens seen are gathered, and once more
    put in their order.
    """
    if share.rows:
        cache.write(layer, share.first, key, value)
    window = share.narrowed(window)
    keys, values = _gathered(cache, share, layer, window, none_of(key, value))
    start = share.span(window).start
    done, row = [], 0
    for tile in tiles_of(share.ranges, window):
        rows = slice(tile.row, tile.stop_row)
        part = flash.forward(
            query[:, :, rows], *_seen(keys, values, tile, start), scale=scale, **_sight(tile, query)
        )
        if tile.row == row:
            done.append(part)
            row = tile.stop_row
            continue
        if rows == slice(0, row):
            done = [_joined(done)]
        done[-1] = flash.merge(done[-1], part)
    if not done:
        wide = torch.promote_types(query.dtype, torch.float32)
        return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=wide)
    return _joined(done)


def backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    merged: flash.Partial,
    none: Pair,
    cache: DocumentCache,
    share: Share,
    *,
    layer: int,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of this rank's queries, keys and values of a slice.

    What its rows and those of the peers send to keys and values is summed where these are kept: that of earlier
    slices in caches, whose memory of this slice is given back. All ranks of the group call it together.

    Args:
        gradient: of what `forward` returned first, in its shape.
        query: as in `forward`.
        merged: what `forward` returned.
        none: by `none_of`.
        cache: as in `forward`.
        share: as in `forward`.
        layer: as in `forward`.
        scale: as in `forward`.
        window: as in `forward`.

    Cost: as `forward`; two copies of the gradients of all tokens seen, float32 or wider, are summed and scattered.
    """
    window = share.narrowed(window)
    keys, values = _gathered(cache, share, layer, window, none)
    span = share.span(window)
    by_query, by_tokens = torch.zeros_like(query), _zeros(span.stop - span.start, none)
    by_pair = _parted(by_tokens, none)
    for tile in tiles_of(share.ranges, window):
        rows = slice(tile.row, tile.stop_row)
        part = (merged[0][:, :, rows], merged[1][:, :, rows])
        given = (gradient[:, :, rows], query[:, :, rows], *_seen(keys, values, tile, span.start), part)
        more, *of_pair = flash.backward(*given, scale=scale, **_sight(tile, query))
        by_query[:, :, rows] += more
        for total, of_tile in zip(by_pair, of_pair):
            total[:, :, tile.start - span.start : tile.stop - span.start] += of_tile
    mine = _parted(_scattered(by_tokens, share, span), none)
    return by_query, *_taken(mine, cache, share, span, layer, none)


def tiles_of(ranges: Ranges, window: int | None = None) -> Iterator[Tile]:
    """Yield the rectangles that a rank's rows are computed in.

    Those that begin rows come first to last, each before others of the same rows. What stands before all rows is one
    rectangle, the last.

    Args:
        ranges: tokens of the rows.
        window: that some row reaches beyond; None for none.

    >>> [tuple(tile)[:6] for tile in tiles_of(((10, 12), (16, 18)))]
    [(0, 2, 10, 10, 12, True), (2, 4, 16, 16, 18, True), (2, 4, 16, 10, 16, False), (0, 4, 10, 0, 10, False)]
    """
    row = 0
    for start, stop in ranges:
        if window is None:
            last = row + stop - start
            yield Tile(row, last, start, start, stop, causal=True)
            if start > ranges[0][0]:
                yield Tile(row, last, start, ranges[0][0], start)
            row = last
            continue
        for first in range(start, stop, BLOCK):
            end = min(first + BLOCK, stop)
            yield Tile(row, row + end - first, first, max(0, first - window + 1), end, window=window)
            row += end - first
    if window is None and ranges and ranges[0][0]:
        yield Tile(0, row, ranges[0][0], 0, ranges[0][0])


def none_of(key: torch.Tensor, value: torch.Tensor) -> Pair:
    """Return keys and values of no row, which hold nothing of those given but their heads, widths and dtype.

    Args:
        key: `[1, key_heads, rows, dim]`.
        value: as `key`.
    """
    none = (x.new_empty(1, x.shape[1], 0, x.shape[3]) for x in (key, value))
    return next(none), next(none)


def _gathered(cache: DocumentCache, share: Share, layer: int, window: int | None, none: Pair) -> Pair:
    """Return the keys and values of the tokens of a span, in their order."""
    span = share.span(window)
    mine = none[0].new_empty(span.width, *_shape(none))
    if share.last > span.first:
        for into, kept in zip(_parted(mine, none), cache.read(layer, share.last)):
            into[:, :, : share.last - span.first] = kept[:, :, span.first :]
    everyone = share.document.peers.all_gather(mine).flatten(0, 1)
    return _parted(everyone.index_select(0, share.order(span)), none)


def _scattered(by_tokens: torch.Tensor, share: Share, span: Span) -> torch.Tensor:
    """Sum gradients over ranks, and return those of this rank's rows of a span, `[rows, heads, widths]`."""
    size = share.document.peers.size
    padded = by_tokens.new_zeros(size * span.width, *by_tokens.shape[1:])
    padded[share.order(span)] = by_tokens
    summed = share.document.peers.reduce_scatter(padded.view(size, span.width, *by_tokens.shape[1:]))
    return summed[: share.last - span.first]


def _taken(
    mine: Pair, cache: DocumentCache, share: Share, span: Span, layer: int, none: Pair
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add gradients of earlier rows to the cache; return those of the slice's rows, which are then done with."""
    before = share.first - span.first
    earlier = cache.earlier_gradients(layer, share.first) if share.first else None
    if earlier is not None:
        for total, part in zip(earlier, mine):
            total[:, :, span.first :] += part[:, :, :before]
    if not share.rows:
        return none
    own = cache.own_gradients(layer, share.first, share.last)
    parts = [x[:, :, before:] for x in mine]
    if own is not None:
        parts = [part + later for part, later in zip(parts, own)]
    cache.release(layer, share.first)
    return parts[0].to(none[0].dtype), parts[1].to(none[1].dtype)


def _joined(parts: Sequence[flash.Partial]) -> flash.Partial:
    if len(parts) == 1:
        return parts[0]
    # Joined by rows, so that heads of a row lie side by side.
    out = torch.cat([x.transpose(1, 2) for x, _ in parts], 1).transpose(1, 2)
    return out, torch.cat([lse for _, lse in parts], 2)


def _seen(keys: torch.Tensor, values: torch.Tensor, tile: Tile, start: int) -> Pair:
    seen = slice(tile.start - start, tile.stop - start)
    return keys[:, :, seen], values[:, :, seen]


def _sight(tile: Tile, like: torch.Tensor) -> dict[str, Any]:
    """Return which tokens a tile's rows see, as the kernels take it."""
    if tile.window is None:
        return {"causal": tile.causal}
    rows = torch.arange(tile.token, tile.token + tile.stop_row - tile.row, device=like.device)
    distance = rows[:, None] - torch.arange(tile.start, tile.stop, device=like.device)
    return {"seen": (distance >= 0) & (distance < tile.window)}


def _shape(none: Pair) -> tuple[int, int]:
    """Heads, and the widths of a key and a value side by side."""
    return none[0].shape[1], none[0].shape[3] + none[1].shape[3]


def _zeros(tokens: int, none: Pair) -> torch.Tensor:
    wide = torch.promote_types(none[0].dtype, torch.float32)
    return none[0].new_zeros(tokens, *_shape(none), dtype=wide)


def _parted(joint: torch.Tensor, none: Pair) -> Pair:
    """View `[tokens, heads, widths]` as keys and values, each `[1, heads, tokens, dim]`."""
    keys, values = joint[None].transpose(1, 2).split_with_sizes([none[0].shape[3], none[1].shape[3]], -1)
    return keys, values
