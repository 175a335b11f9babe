"""Slices of trees: where their rows stand, what they see, and what is kept of a path for the slices behind them.

A slice is a range of a tree's tokens, depth first, that doesn't leave the subtree of the token before it. So all of
its rows see the whole path before it, and the slices behind it continue one path of its own tokens. Slices run depth
first, each backward after those behind it: one path is alive, in one buffer of keys and values a layer, and what runs
later overwrites only what is done. Gradients of keys and values wait, slice by slice, for the backward of their own.

    tokens   0 1 2 3 4 5 6 7 8 9
    slices   [0  ) [1  ) [2    )      slices 1 and 2 continue slice 0
    tasks    F0  F1 B1  F2 B2  B0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from varlen.attention.rectangles import Pair
from varlen.attention.trees import TreeSpans
from varlen.batch.tree_batch import TreeSegments, segments_of
from varlen.types import IntArray


class Part(NamedTuple):
    """Tokens of a path that are a slice's own."""

    start: int  # of the slice: its first token
    low: int  # position of the first of them
    high: int  # one past the position of the last
    kept: int  # tokens that are kept of the slice; another path may go through fewer


class Tree:
    """One tree of a step, and its slices."""

    def __init__(self, subtree_end: IntArray, positions: IntArray, slices: Sequence[tuple[int, int]]) -> None:
        """Take what each token sees.

        Args:
            subtree_end: int64 `[tokens]`, within the tree.
            positions: int64 `[tokens]`.
            slices: start and stop of each, in the order of tokens.
        """
        self.positions = positions
        self.longest_row = int(positions.max(initial=-1)) + 1
        whole = np.ones((1, len(positions)), np.bool_)
        self.segments: TreeSegments = segments_of(subtree_end[None], positions[None], whole)
        self._slices = {start: self._slice(start, stop) for start, stop in slices}
        self.longest = max((each.behind for each in self._slices.values()), default=0)
        """Tokens of the longest path that is kept."""
        known: list[tuple[int, tuple[Part, ...]]] = []
        for start, each in sorted(self._slices.items()):
            while known and known[-1][0] <= start:
                known.pop()
            before = each.spans.before
            each.parts = tuple(
                part._replace(high=min(part.high, before))
                for part in (known[-1][1] if known else ())
                if part.low < before
            )
            if each.own:
                own = Part(start, before, each.behind, each.behind - before)
                known.append((limit_of(self.segments, start), (*each.parts, own)))

    def _slice(self, start: int, stop: int) -> SliceRows:
        segments = self.segments
        here = np.flatnonzero((segments.begins < stop) & (segments.ends > start))
        begins, ends = np.maximum(segments.begins[here], start), np.minimum(segments.ends[here], stop)
        spans = TreeSpans(
            begins - start,
            ends - start,
            np.minimum(segments.stops[here], stop) - start,
            segments.depths[here],
            self.positions[start:stop],
            before=int(self.positions[start]),
        )
        goes_on = segments.stops[here] > stop
        own = tuple(zip((begins - start)[goes_on].tolist(), (ends - start)[goes_on].tolist()))
        return SliceRows(spans, own, spans.before + sum(last - first for first, last in own))

    def rows(self, start: int) -> SliceRows:
        """Return the rows of the slice that begins at a token."""
        return self._slices[start]

    def whole(self) -> TreeSpans:
        """Return the spans of the tree as one slice."""
        return self._slices[0].spans


@dataclass(slots=True)
class SliceRows:
    """The rows of a slice."""

    spans: TreeSpans
    own: tuple[tuple[int, int], ...]
    """Ranges of its rows that the path of later slices goes through."""
    behind: int
    """Tokens of the path up to the last of them."""
    parts: tuple[Part, ...] = ()
    """Which slices own the path before it."""


def limit_of(segments: TreeSegments, start: int) -> int:
    """Return where the subtree of the token before a token ends: a slice from there goes no farther."""
    one = int(np.searchsorted(segments.begins, start, side="right")) - 1
    if segments.begins[one] < start:
        return int(segments.stops[one])
    parent = int(segments.parents[one])
    return int(segments.stops[parent if parent >= 0 else one])


@dataclass(slots=True)
class TreeCache:
    """Keys and values of the path that is alive, and the gradients that slices have sent to their ancestors."""

    longest: int
    pairs: dict[int, Pair] = field(default_factory=dict)
    """By layer: `[1, key_heads, longest, dim]`, of the path by positions."""
    gradients: dict[tuple[int, int], Pair] = field(default_factory=dict)
    """By slice and layer: of its own part of paths, float32 or wider."""

    def path(self, layer: int, tokens: int) -> Pair | None:
        """Return the keys and values of the path's first tokens; None of none."""
        if not tokens:
            return None
        keys, values = self.pairs[layer]
        return keys[:, :, :tokens], values[:, :, :tokens]

    def write(self, layer: int, rows: SliceRows, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep those rows of a slice that later paths go through."""
        if not rows.own:
            return
        if layer not in self.pairs:
            self.pairs[layer] = _room(key, self.longest, key.dtype), _room(value, self.longest, value.dtype)
        at = rows.spans.before
        for first, last in rows.own:
            for into, of in zip(self.pairs[layer], (key, value)):
                into[:, :, at : at + last - first] = of[:, :, first:last]
            at += last - first

    def add(self, layer: int, rows: SliceRows, low: int, found: Pair) -> None:
        """Add gradients of keys and values of the path before a slice, from position `low` on, to their owners'."""
        high = low + found[0].shape[2]
        for owner in rows.parts:
            begin, end = max(owner.low, low), min(owner.high, high)
            if begin >= end:
                continue
            totals = self._gradients(owner.start, layer, owner.kept, found)
            for total, part in zip(totals, found):
                total[:, :, begin - owner.low : end - owner.low] += part[:, :, begin - low : end - low]

    def _gradients(self, start: int, layer: int, tokens: int, like: Pair) -> Pair:
        """Return the gradients of a slice's own part of paths, zeros at first."""
        if (start, layer) not in self.gradients:
            wide = torch.promote_types(like[0].dtype, torch.float32)
            keys, values = (_room(x, tokens, wide).zero_() for x in like)
            self.gradients[start, layer] = keys, values
        return self.gradients[start, layer]

    def take(self, layer: int, start: int, rows: SliceRows, into: Pair) -> None:
        """Add what later slices have sent to a slice's own keys and values, and release it."""
        totals = self.gradients.pop((start, layer), None)
        if totals is None:
            return
        at = 0
        for first, last in rows.own:
            for gradient, total in zip(into, totals):
                gradient[:, :, first:last] += total[:, :, at : at + last - first]
            at += last - first


def _room(like: torch.Tensor, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate `[1, heads, tokens, dim]` with contiguous tokens."""
    _, heads, _, dim = like.shape
    return torch.empty(1, tokens, heads, dim, dtype=dtype, device=like.device).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class TreeSlice:
    """Rows of a MicroPack: a slice of a tree, or trees that are whole in it."""

    spans: TreeSpans
    longest_row: int
    start: int = 0
    held: SliceRows | None = None
    """None of whole trees, which nothing is kept of."""
    cache: TreeCache | None = None

    @property
    def rows(self) -> int:
        """Rows in all."""
        return len(self.spans.positions)

    def path(self, layer: int) -> Pair | None:
        """Return the keys and values of the path before it; None of none."""
        return None if self.cache is None else self.cache.path(layer, self.spans.before)

    def keep(self, layer: int, pair: Pair) -> None:
        """Keep the keys and values that later slices see."""
        if self.cache is not None and self.held is not None:
            self.cache.write(layer, self.held, *pair)

    def add(self, layer: int, low: int, found: Pair) -> None:
        """Send gradients of the path before it, from position `low` on, to the slices that own it."""
        assert self.cache is not None
        assert self.held is not None
        self.cache.add(layer, self.held, low, found)

    def take(self, layer: int, into: Pair) -> None:
        """Add what later slices have sent to its keys and values."""
        if self.cache is not None and self.held is not None:
            self.cache.take(layer, self.start, self.held, into)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The positions of its rows, segment by segment."""
        spans = self.spans
        firsts = spans.positions[spans.begins].tolist()
        return [(at, at + size) for at, size in zip(firsts, (spans.ends - spans.begins).tolist())]

    @property
    def ends(self) -> list[tuple[int, int]]:
        """Its rows, and the tokens of the longest row of its trees."""
        return [(self.rows, self.longest_row)]


def joined_trees(trees: Sequence[Tree]) -> TreeSlice:
    """Return trees that are whole in one MicroPack as one slice."""
    spans = [tree.whole() for tree in trees]
    firsts = np.cumsum([0, *(len(each.positions) for each in spans[:-1])])
    begins, ends, stops = (
        np.concatenate([getattr(each, name) + first for each, first in zip(spans, firsts)])
        for name in ("begins", "ends", "stops")
    )
    return TreeSlice(
        TreeSpans(
            begins,
            ends,
            stops,
            np.concatenate([each.depths for each in spans]),
            np.concatenate([each.positions for each in spans]),
        ),
        max(tree.longest_row for tree in trees),
    )
