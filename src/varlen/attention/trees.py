"""Attention of whole trees over flattened tokens: every segment of a tree attends to the segments before it.

The tokens that see a segment are its own, causally, and those behind it up to the end of its subtree, which stand
side by side. So a segment takes two rectangles, and no key or value is copied to another place. Where a kernel takes
many slices, one call computes the diagonals of all segments, and one each depth: segments of one depth have keys, and
rows that see them, in ranges that are apart. Parts of a row are merged by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from varlen.attention import rectangles
from varlen.attention.choice import KernelChoice, chosen
from varlen.attention.kernels import Kernel, Lengths, Qkv, heads_of, tokens_of
from varlen.attention.rules import LayerRules
from varlen.errors import ModelError
from varlen.types import IntArray

PADDING = 128
"""Most positions of padding that attend to each other, which costs little and means nothing."""
ROWS = 512
"""Rows of a rectangle at once where a window cuts through it and scores are formed."""


@dataclass(frozen=True, eq=False)
class TreeSpans:
    """Where the segments of trees lie in flattened tokens; what lies between them is padding."""

    begins: IntArray
    """int64 `[segments]`, rising: first token."""
    ends: IntArray
    """int64 `[segments]`: one past the last token."""
    stops: IntArray
    """int64 `[segments]`: one past the last token behind the segment that sees it."""
    depths: IntArray
    """int64 `[segments]`: segments before it."""
    positions: IntArray
    """int64 `[tokens]`: by which windows are counted."""

    @cached_property
    def segments(self) -> list[tuple[int, int, int]]:
        """First token, end and stop of each segment, and of padding, in runs of at most `PADDING`."""
        found, at = list[tuple[int, int, int]](), 0
        of_each = (self.begins.tolist(), self.ends.tolist(), self.stops.tolist())
        for begin, end, stop in [*zip(*of_each), (len(self.positions),) * 3]:
            found += [(first, *[min(first + PADDING, begin)] * 2) for first in range(at, begin, PADDING)]
            if end > begin:
                found.append((begin, end, stop))
            at = end
        return found

    @cached_property
    def by_depth(self) -> list[Lengths]:
        """For each depth that anything lies behind: rows and keys of one call, in the order of the tokens.

        Ranges of rows and of keys make up all tokens: between those of segments lie rows without keys, and keys
        without rows.
        """
        calls = []
        for depth in range(int(self.depths.max(initial=-1)) + 1):
            here = (self.depths == depth) & (self.stops > self.ends)
            if here.any():
                calls.append(
                    _lengths(self.begins[here], self.ends[here], self.stops[here], len(self.positions))
                )
        return calls


def _lengths(begins: IntArray, ends: IntArray, stops: IntArray, tokens: int) -> Lengths:
    """Return rows and keys of a call in which each segment's descendants see the segment."""
    queries, keys, at_row, at_key = [], [], 0, 0
    for begin, end, stop in zip(begins.tolist(), ends.tolist(), stops.tolist()):
        queries += [end - at_row, 0, stop - end]
        keys += [0, begin - at_key, end - begin]
        at_row, at_key = stop, end
    return Lengths((*queries, tokens - at_row, 0), (*keys, 0, tokens - at_key), sees_all=True)


def attend_in_trees(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    spans: TreeSpans,
    rules: LayerRules,
    sinks: torch.Tensor | None = None,
    kernel: Kernel | None = None,
) -> torch.Tensor:
    """Attend from each token to the tokens before it in its rows.

    Args:
        query: `[tokens, query_heads, head_dim]`.
        key: `[tokens, key_heads, head_dim]`.
        value: `[tokens, key_heads, value_dim]`.
        spans: of these tokens.
        rules: of the layer; windows count positions.
        sinks: `[query_heads]`: a score per head that takes up weight and gives no value.
        kernel: that computes many slices at once; None for one chosen by device and dtype.

    Returns:
        `[tokens, query_heads, value_dim]`.
    """
    if rules.dropout or not rules.is_causal:
        what = "has dropout" if rules.dropout else "attends in both directions"
        raise ModelError(f"attention {what}, and of trees varlen computes causal attention without dropout")
    if torch.compiler.is_compiling():
        raise ModelError(
            "the \"varlen\" attention of trees isn't compiled, as its calls are those of each batch's trees; choose "
            'model.set_attn_implementation("flex_attention")'
        )
    if kernel is None and rules.window is None:
        kernel = chosen(*_heads(query, key, value), rules, KernelChoice())
    out: torch.Tensor = _TreeAttention.apply(query, key, value, sinks, spans, rules, kernel)  # type: ignore[no-untyped-call]
    return out


def _heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return heads_of(query), heads_of(key), heads_of(value)


class _Parts(NamedTuple):
    """What computes the attention of trees, in two ways."""

    spans: TreeSpans
    rules: LayerRules
    kernel: Kernel | None


class _TreeAttention(torch.autograd.Function):
    """Differentiated by hand: a part's backward needs only the merged output and log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        spans: TreeSpans,
        rules: LayerRules,
        kernel: Kernel | None,
    ) -> torch.Tensor:
        ctx.parts = _Parts(spans, rules, kernel)
        given = Qkv(query, key, value)
        out, lse = _by_depth(given, ctx.parts) if kernel is not None else _by_segment(given, ctx.parts)
        if sinks is not None:
            out, lse = rectangles.with_sinks((out, lse), sinks)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        return tokens_of(out).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        parts, given, merged = ctx.parts, Qkv(query, key, value), (out, lse)
        back = _back_by_segment if parts.kernel is None else _back_by_depth
        found = back(gradient, given, merged, parts)
        by_sinks = None if sinks is None else rectangles.sinks_backward(heads_of(gradient), merged, sinks)
        return *(x.to(query.dtype) for x in found), by_sinks, None, None, None


def _by_segment(given: Qkv, parts: _Parts) -> rectangles.Partial:
    """Attend segment by segment; returns output and log-sum-exp, `[1, query_heads, tokens, ...]`."""
    query, key, value = _heads(*given)
    wide = torch.promote_types(query.dtype, torch.float32)
    out = query.new_empty(*query.shape[:3], value.shape[3], dtype=wide)
    lse = query.new_empty(query.shape[:3], dtype=wide)
    # Tiles of rows' own segments come first, so each row has a part before others are merged with it.
    for rows, keys, sight in _tiles(parts.spans, parts.rules, query.device):
        part = rectangles.forward(query[:, :, rows], key[:, :, keys], value[:, :, keys], parts.rules, **sight)
        if keys.stop == rows.stop:
            out[:, :, rows], lse[:, :, rows] = part
        else:
            out[:, :, rows], lse[:, :, rows] = rectangles.merge((out[:, :, rows], lse[:, :, rows]), part)
    return out, lse


def _back_by_segment(gradient: torch.Tensor, given: Qkv, merged: rectangles.Partial, parts: _Parts) -> Qkv:
    """Return the gradients of queries, keys and values, float32 or wider."""
    query, key, value = _heads(*given)
    wide = torch.promote_types(query.dtype, torch.float32)
    found = Qkv(*(torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in given))
    by_query, by_key, by_value = (heads_of(x) for x in found)
    gradient, out = heads_of(gradient), merged[0].to(query.dtype)
    for rows, keys, sight in _tiles(parts.spans, parts.rules, query.device):
        each = rectangles.backward(
            gradient[:, :, rows],
            query[:, :, rows],
            key[:, :, keys],
            value[:, :, keys],
            (out[:, :, rows], merged[1][:, :, rows]),
            parts.rules,
            **sight,
        )
        for total, at, part in zip((by_query, by_key, by_value), (rows, keys, keys), each):
            total[:, :, at] += part
    return found


def _tiles(
    spans: TreeSpans, rules: LayerRules, device: torch.device
) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
    """Yield rows, keys, and what the rows see of them: every row's own segment first, then those before it."""
    for begin, end, _ in spans.segments:
        own = slice(begin, end)
        if rules.window is None or end - begin <= rules.window:
            yield own, own, {"causal": True}
        else:
            for first in range(begin, end, ROWS):
                rows = slice(first, min(first + ROWS, end))
                keys = slice(max(begin, first - rules.window + 1), rows.stop)
                yield rows, keys, {"seen": _near(spans, rows, keys, rules.window, device)}
    for begin, end, stop in spans.segments:
        if rules.window is None:
            if stop > end:
                yield slice(end, stop), slice(begin, end), {}
            continue
        last = int(spans.positions[end - 1])
        for first in range(end, stop, ROWS):
            rows = slice(first, min(first + ROWS, stop))
            at = spans.positions[rows]
            nearest, farthest = int(at.min()), int(at.max())
            seen_from = max(begin, end - (last - (nearest - rules.window)))
            if seen_from >= end:
                continue  # out of the window of all these rows
            keys = slice(seen_from, end)
            is_whole = farthest - int(spans.positions[seen_from]) < rules.window
            yield rows, keys, {} if is_whole else {"seen": _near(spans, rows, keys, rules.window, device)}


def _near(spans: TreeSpans, rows: slice, keys: slice, window: int, device: torch.device) -> torch.Tensor:
    """Return which of these keys lie before or at a row, within its window; bool `[rows, keys]`."""
    distance = spans.positions[rows][:, None] - spans.positions[keys]
    return torch.from_numpy((distance >= 0) & (distance < window)).to(device)


def _by_depth(given: Qkv, parts: _Parts) -> rectangles.Partial:
    """Attend in one call for all diagonals, and one for each depth; returns as `_by_segment`."""
    assert parts.kernel is not None
    sizes = tuple(end - begin for begin, end, _ in parts.spans.segments)
    out, lse = parts.kernel.forward(given, Lengths(sizes, sizes), parts.rules)
    wide = torch.promote_types(out.dtype, torch.float32)
    merged = heads_of(out).to(wide), lse[None].to(wide)
    for lengths in parts.spans.by_depth:
        out, lse = parts.kernel.forward(given, lengths, parts.rules)
        # What a kernel writes for rows without keys differs from kernel to kernel.
        seen = _has_keys(lengths, lse.device)
        part = heads_of(out).masked_fill(~seen[:, None], 0.0), lse[None].masked_fill(~seen, -torch.inf)
        merged = rectangles.merge(merged, part)
    return merged


def _back_by_depth(gradient: torch.Tensor, given: Qkv, merged: rectangles.Partial, parts: _Parts) -> Qkv:
    """Return the gradients of queries, keys and values, float32 or wider."""
    assert parts.kernel is not None
    sizes = tuple(end - begin for begin, end, _ in parts.spans.segments)
    known = tokens_of(merged[0]).to(given.query.dtype).contiguous(), merged[1][0]
    gradient = gradient.contiguous()
    wide = torch.promote_types(gradient.dtype, torch.float32)
    found = [
        x.to(wide) for x in parts.kernel.backward(gradient, given, known, Lengths(sizes, sizes), parts.rules)
    ]
    for lengths in parts.spans.by_depth:
        seen = _has_keys(lengths, gradient.device)
        sees = [seen, *[_has_rows(lengths, gradient.device)] * 2]
        made = parts.kernel.backward(gradient, given, known, lengths, parts.rules)
        for total, part, mask in zip(found, made, sees):
            total += part.masked_fill(~mask[:, None, None], 0.0)
    return Qkv(*found)


def _has_keys(lengths: Lengths, device: torch.device) -> torch.Tensor:
    """Return which rows see any key; bool `[rows]`."""
    return torch.from_numpy(np.repeat(np.array(lengths.keys) > 0, lengths.queries)).to(device)


def _has_rows(lengths: Lengths, device: torch.device) -> torch.Tensor:
    """Return which keys any row sees; bool `[keys]`."""
    return torch.from_numpy(np.repeat(np.array(lengths.queries) > 0, lengths.keys)).to(device)
