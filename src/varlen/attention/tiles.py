"""One slice's attention as rectangles, forward and backward, if no kernel computes whole slices.

Without a window and a soft cap there are two: the tokens before the slice, which all its rows see, and its own.
Otherwise rows and keys go in blocks, so that formed scores take constant memory; keys that a whole block of rows sees
are left to the kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch

from varlen.attention import rectangles
from varlen.attention.rectangles import Pair
from varlen.attention.rules import LayerRules
from varlen.cost import memory

BLOCK = 512  # rows computed at once, and keys if scores are formed
BACKWARD_KEYS = memory.BACKWARD_KEYS
"""Keys before a slice whose gradients a kernel returns at once: fewer than a document, whose gradients in one layer
would double the memory of those that are gathered, and enough for the kernel's full rate."""


class Tile(NamedTuple):
    """A rectangle of attention: some rows of a slice over some tokens of its document."""

    first_row: int
    stop_row: int
    first_key: int
    stop_key: int
    sight: Literal["all", "causal", "band"]
    """Which keys a row sees: all; those up to its own token, row r at key r; or those within the window."""


def tiles_of(start: int, stop: int, rules: LayerRules) -> Iterator[Tile]:
    """Yield a slice's rectangles; every row sees a key in the first of those with the same rows.

    >>> [tuple(tile) for tile in tiles_of(10, 14, LayerRules(1.0))]
    [(0, 4, 10, 14, 'causal'), (0, 4, 0, 10, 'all')]
    """
    window = stop if rules.window is None else rules.window
    rows = stop - start
    if rules.softcap is None and window >= stop:
        yield Tile(0, rows, start, stop, "causal")
        if start:
            yield Tile(0, rows, 0, start, "all")
        return
    for first in range(0, rows, BLOCK):
        last = min(first + BLOCK, rows)
        low, high = start + first, start + last
        lowest, whole = max(0, low - window + 1), max(0, high - window)
        if high - low > window:
            yield Tile(first, last, lowest, high, "band")
            continue
        yield Tile(first, last, low, high, "causal")
        # Formed scores go in blocks of keys; a kernel takes all keys that every row sees at once.
        for key in range(whole, low, BLOCK if rules.softcap is not None else max(1, low - whole)):
            end = min(low, key + BLOCK) if rules.softcap is not None else low
            yield Tile(first, last, key, end, "all")
        if lowest < whole:
            yield Tile(first, last, lowest, whole, "band")


def forward(query: torch.Tensor, pair: Pair, start: int, rules: LayerRules) -> rectangles.Partial:
    """Attend from a slice's rows to its document up to itself.

    Args:
        query: `[1, query_heads, rows, dim]`, of the slice, whose first row is token `start`.
        pair: keys and values of the document up to the slice's end.
    """
    outs: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    block: rectangles.Partial | None = None
    tiles = list(tiles_of(start, start + query.shape[2], rules))
    for tile, following in zip(tiles, [*tiles[1:], None]):
        part = rectangles.forward(*_of_tile(query, pair, tile), rules, **_sight(tile, start, rules, query))
        block = part if block is None else rectangles.merge(block, part)
        if following is None or following.first_row != tile.first_row:
            outs.append(block[0].to(query.dtype))
            sums.append(block[1])
            block = None
    return rectangles.joined(outs), torch.cat(sums, 2)


def backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    pair: Pair,
    merged: rectangles.Partial,
    start: int,
    rules: LayerRules,
    *,
    earlier: Pair | None,
    own: Pair | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of a slice's queries, keys and values.

    Args:
        gradient: of the output, `[1, query_heads, rows, value_dim]`.
        pair: as `forward` took it.
        merged: what `forward` gave, sinks merged in.
        earlier: gradients of the tokens before the slice, to which theirs are added; None where there are none.
        own: what later slices have sent to the slice's own keys and values, added to in place; None for nothing.
    """
    rows_of_slice = query.shape[2]
    tiles = list(chain.from_iterable(map(_backward_tiles, tiles_of(start, start + rows_of_slice, rules))))
    left = Counter(tile.first_row for tile in tiles)
    many = {row for row, count in left.items() if count > 2}
    by_queries: dict[int, torch.Tensor] = {}
    for tile in tiles:
        rows = slice(tile.first_row, tile.stop_row)
        by_query, *by_pair = rectangles.backward(
            gradient[:, :, rows],
            *_of_tile(query, pair, tile),
            (merged[0][:, :, rows], merged[1][:, :, rows]),
            rules,
            **_sight(tile, start, rules, query),
        )
        if tile.first_row in by_queries:
            # Sums of many are wide, and of two as wide as the kernel gives them.
            wide = torch.promote_types(query.dtype, torch.float32) if tile.first_row in many else query.dtype
            by_query = by_queries[tile.first_row].to(wide).add_(by_query)
        left[tile.first_row] -= 1
        by_queries[tile.first_row] = by_query if left[tile.first_row] else by_query.to(query.dtype)
        before = max(0, min(start, tile.stop_key) - tile.first_key)
        if earlier is not None and before:
            for total, part in zip(earlier, by_pair):
                total[:, :, tile.first_key : tile.first_key + before].add_(part[:, :, :before])
        if tile.stop_key > start:
            first = max(tile.first_key, start) - start
            own = _added(own, [x[:, :, before:] for x in by_pair], first, rows_of_slice)
    assert own is not None
    parts = list(by_queries.values())
    by_query = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    return by_query, own[0].to(query.dtype), own[1].to(query.dtype)


def _backward_tiles(tile: Tile) -> Iterator[Tile]:
    """Cut a tile that all rows see wholly into blocks of keys."""
    step = BACKWARD_KEYS if tile.sight == "all" else tile.stop_key - tile.first_key
    for first in range(tile.first_key, tile.stop_key, step):
        yield tile._replace(first_key=first, stop_key=min(first + step, tile.stop_key))


def _added(own: Pair | None, parts: list[torch.Tensor], first: int, rows: int) -> Pair:
    """Add, to a slice's own gradients, those of its keys and values from row `first` on."""
    if own is None:
        if parts[0].shape[2] == rows:
            return parts[0], parts[1]
        wide = torch.promote_types(parts[0].dtype, torch.float32)
        key, value = (x.new_zeros(1, x.shape[1], rows, x.shape[3], dtype=wide) for x in parts)
        own = (key, value)
    for total, part in zip(own, parts):
        total[:, :, first : first + part.shape[2]].add_(part)
    return own


def _of_tile(query: torch.Tensor, pair: Pair, tile: Tile) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    keys = slice(tile.first_key, tile.stop_key)
    return query[:, :, tile.first_row : tile.stop_row], pair[0][:, :, keys], pair[1][:, :, keys]


def _sight(tile: Tile, start: int, rules: LayerRules, like: torch.Tensor) -> dict[str, Any]:
    """Return a tile's visibility as arguments of a rectangle."""
    if tile.sight != "band":
        return {"causal": tile.sight == "causal"}
    rows = torch.arange(start + tile.first_row, start + tile.stop_row, device=like.device)
    keys = torch.arange(tile.first_key, tile.stop_key, device=like.device)
    distance = rows[:, None] - keys
    assert rules.window is not None
    return {"seen": (distance >= 0) & (distance < rules.window)}
