"""Attention of trees over flattened tokens: every segment of a tree attends to the segments before it.

The tokens that see a segment are its own, causally, and those behind it up to the end of its subtree, which stand
side by side. So a segment takes two rectangles, and no key or value is copied to another place. Where a kernel takes
many slices, one call computes the diagonals of all segments, and one each depth: segments of one depth have keys, and
rows that see them, in ranges that are apart. Parts of a row are merged by their log-sum-exp. Of a slice of a tree,
all rows also see the path of tokens before it, whose keys and values stand in a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from varlen.attention import rectangles
from varlen.attention.choice import KernelChoice, chosen
from varlen.attention.kernels import Kernel, Lengths, Qkv, heads_of, tokens_of
from varlen.attention.rectangles import Pair, Partial
from varlen.attention.rules import LayerRules
from varlen.attention.tiles import BACKWARD_KEYS
from varlen.errors import ModelError
from varlen.types import IntArray

PADDING = 128
"""Most positions of padding that attend to each other, which costs little and means nothing."""
ROWS = 512
"""Rows of a rectangle at once where a window or a chunk cuts through it and scores are formed."""
Tile = tuple[slice, slice, dict[str, Any]]
"""Rows, keys, and what the rows see of them, as arguments of `rectangles`."""


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
    """int64 `[tokens]`: by which windows and chunks are counted."""
    before: int = 0
    """Tokens of the path before these, at the positions from 0 on; all of these tokens see them."""

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

    def lowest(self, rows: slice, rules: LayerRules) -> IntArray:
        """Return the lowest position that each row sees, int64 `[rows]`."""
        at = self.positions[rows]
        found = np.zeros_like(at)
        if rules.window is not None:
            found = np.maximum(found, at - rules.window + 1)
        if rules.chunk is not None:
            found = np.maximum(found, at - at % rules.chunk)
        return found


def _lengths(begins: IntArray, ends: IntArray, stops: IntArray, tokens: int) -> Lengths:
    """Return rows and keys of a call in which each segment's descendants see the segment."""
    queries, keys, at_row, at_key = list[int](), list[int](), 0, 0
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
    q, k, v = heads_of(query), heads_of(key), heads_of(value)
    kernel = kernel or kernel_of_trees(q, k, v, rules, KernelChoice())
    out: torch.Tensor = _TreeAttention.apply(q, k, v, sinks, TreeCall(spans, rules, kernel))  # type: ignore[no-untyped-call]
    return tokens_of(out)


def kernel_of_trees(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: LayerRules, choice: KernelChoice
) -> Kernel | None:
    """Return the kernel that computes many slices of such tensors; None where rectangles are computed one by one.

    Windows of kernels count the places of keys, which aren't the positions of tokens in a tree.
    """
    return chosen(query, key, value, rules, choice) if rules.window is None and rules.chunk is None else None


class TreeCall(NamedTuple):
    """The arguments of one call of attention that aren't tensors."""

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
        call: TreeCall,
    ) -> torch.Tensor:
        ctx.call = call
        out, lse = forward(query, (key, value), None, call)
        if sinks is not None:
            out, lse = rectangles.with_sinks((out, lse), sinks)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        found = backward(gradient, query, (key, value), None, (out, lse), ctx.call)
        by_sinks = None if sinks is None else rectangles.sinks_backward(gradient, (out, lse), sinks)
        return *(x.to(query.dtype) for x in found), by_sinks, None


def forward(query: torch.Tensor, pair: Pair, path: Pair | None, call: TreeCall) -> Partial:
    """Attend from each token to those before it.

    Args:
        query: `[1, query_heads, tokens, dim]`.
        pair: keys and values of the same tokens.
        path: keys and values of the `spans.before` tokens before them; None where there are none.
        call: spans, rules and kernel.

    Returns:
        Output and log-sum-exp, float32 or wider, `[1, query_heads, tokens, ...]`.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    if call.kernel is not None:
        merged = _by_depth(query, pair, call)
    else:
        merged = (
            query.new_empty(*query.shape[:3], pair[1].shape[3], dtype=wide),
            query.new_empty(query.shape[:3], dtype=wide),
        )
        # Tiles of rows' own segments come first, so each row has a part before others are merged with it.
        for tile in _tiles(call.spans, call.rules, query.device):
            _merge_tile(merged, query, pair, tile, call.rules, is_first=tile[0].stop == tile[1].stop)
    if path is None:
        return merged
    if call.kernel is not None:
        lengths = Lengths((query.shape[2],), (call.spans.before,), sees_all=True)
        out, lse = call.kernel.forward(Qkv(*map(tokens_of, (query, *path))), lengths, call.rules)
        return rectangles.merge(merged, (heads_of(out), lse[None]))
    for tile in _path_tiles(call.spans, call.rules, query.device):
        _merge_tile(merged, query, path, tile, call.rules, is_first=False)
    return merged


def _merge_tile(
    merged: Partial, query: torch.Tensor, pair: Pair, tile: Tile, rules: LayerRules, *, is_first: bool
) -> None:
    """Compute a tile and merge it with what its rows have."""
    rows, keys, sight = tile
    out, lse = (x[:, :, rows] for x in merged)
    part = rectangles.forward(query[:, :, rows], pair[0][:, :, keys], pair[1][:, :, keys], rules, **sight)
    part = part if is_first else rectangles.merge((out, lse), part)
    for into, found in zip((out, lse), part):
        if into is not found:
            into.copy_(found)


def backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    pair: Pair,
    path: Pair | None,
    merged: Partial,
    call: TreeCall,
    add: Callable[[int, Pair], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values, float32 or wider.

    Args:
        gradient: of the output.
        query: as `forward` took it, as are `pair`, `path` and `call`.
        pair: see there.
        path: see there.
        merged: output, in the dtype of queries, and log-sum-exp, sinks merged in.
        call: see there.
        add: takes the gradients of keys and values of the path, from a token on.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    if call.kernel is not None:
        found = _back_by_depth(gradient, query, pair, merged, call)
    else:
        found = tuple(_zeros(x, wide) for x in (query, *pair))  # type: ignore[assignment]
        for tile in _tiles(call.spans, call.rules, query.device):
            rows, keys, _ = tile
            parts = _back_tile(gradient, query, pair, merged, tile, call.rules)
            for total, at, part in zip(found, (rows, keys, keys), parts):
                total[:, :, at] += part
    if path is None or add is None:
        return found
    for rows, keys, sight in _path_blocks(query, call):
        if call.kernel is not None:
            given = Qkv(*map(tokens_of, (query, path[0][:, :, keys], path[1][:, :, keys])))
            lengths = Lengths((query.shape[2],), (keys.stop - keys.start,), sees_all=True)
            known = (tokens_of(merged[0]), merged[1][0].contiguous())
            made = call.kernel.backward(tokens_of(gradient), given, known, lengths, call.rules)
            by_query, *by_path = map(heads_of, made)
        else:
            by_query, *by_path = _back_tile(gradient, query, path, merged, (rows, keys, sight), call.rules)
        found[0][:, :, rows] += by_query
        add(keys.start, (by_path[0], by_path[1]))
    return found


def _zeros(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros `[1, heads, tokens, dim]`, in which heads of a token lie side by side."""
    _, heads, tokens, dim = like.shape
    return like.new_zeros(1, tokens, heads, dim, dtype=dtype).transpose(1, 2)


def _back_tile(
    gradient: torch.Tensor,
    query: torch.Tensor,
    pair: Pair,
    merged: Partial,
    tile: Tile,
    rules: LayerRules,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, keys, sight = tile
    return rectangles.backward(
        gradient[:, :, rows],
        query[:, :, rows],
        pair[0][:, :, keys],
        pair[1][:, :, keys],
        (merged[0][:, :, rows], merged[1][:, :, rows]),
        rules,
        **sight,
    )


def _path_blocks(query: torch.Tensor, call: TreeCall) -> Iterator[Tile]:
    """Yield the tiles of a path, cut into blocks of keys, whose gradients are made at once."""
    whole: Tile = (slice(0, query.shape[2]), slice(0, call.spans.before), {})
    tiles = [whole] if call.kernel is not None else _path_tiles(call.spans, call.rules, query.device)
    for rows, keys, sight in tiles:
        if "seen" in sight:
            yield rows, keys, sight
            continue
        for first in range(keys.start, keys.stop, BACKWARD_KEYS):
            yield rows, slice(first, min(first + BACKWARD_KEYS, keys.stop)), sight


def _tiles(spans: TreeSpans, rules: LayerRules, device: torch.device) -> Iterator[Tile]:
    """Yield rows, keys, and what the rows see of them: every row's own segment first, then those before it."""
    is_limited = rules.window is not None or rules.chunk is not None
    for begin, end, _ in spans.segments:
        own = slice(begin, end)
        if not is_limited or int(spans.lowest(own, rules).max()) <= spans.positions[begin]:
            yield own, own, {"causal": True}
        else:
            for first in range(begin, end, ROWS):
                rows = slice(first, min(first + ROWS, end))
                least = int(spans.lowest(rows, rules).min())
                keys = slice(begin + max(0, least - int(spans.positions[begin])), rows.stop)
                at = spans.positions[keys]
                yield rows, keys, {"seen": _near(spans, rows, at, rules, device)}
    for begin, end, stop in spans.segments:
        if stop > end and not is_limited:
            yield slice(end, stop), slice(begin, end), {}
        elif stop > end:
            yield from _limited(spans, rules, (end, stop), begin, spans.positions[begin:end], device)


def _path_tiles(spans: TreeSpans, rules: LayerRules, device: torch.device) -> Iterator[Tile]:
    """Yield what all rows see of the path before them."""
    rows = len(spans.positions)
    if rules.window is None and rules.chunk is None:
        yield slice(0, rows), slice(0, spans.before), {}
    else:
        yield from _limited(spans, rules, (0, rows), 0, np.arange(spans.before), device)


def _limited(
    spans: TreeSpans,
    rules: LayerRules,
    rows: tuple[int, int],
    first_key: int,
    at: IntArray,
    device: torch.device,
) -> Iterator[Tile]:
    """Yield what rows see of keys that all stand before them, at neighbouring positions `at`, by window or chunk."""
    for first in range(*rows, ROWS):
        block = slice(first, min(first + ROWS, rows[1]))
        lowest = spans.lowest(block, rules)
        skipped = max(0, int(lowest.min()) - int(at[0]))
        if skipped >= len(at):
            continue  # out of sight of all these rows
        keys = slice(first_key + skipped, first_key + len(at))
        is_whole = int(lowest.max()) <= at[skipped]
        yield block, keys, {} if is_whole else {"seen": _near(spans, block, at[skipped:], rules, device)}


def _near(
    spans: TreeSpans, rows: slice, at: IntArray, rules: LayerRules, device: torch.device
) -> torch.Tensor:
    """Return which keys at some positions lie before or at a row and within its sight; bool `[rows, keys]`."""
    queries = spans.positions[rows][:, None]
    seen = (at <= queries) & (at >= spans.lowest(rows, rules)[:, None])
    return torch.from_numpy(seen).to(device)


def _diagonals(spans: TreeSpans) -> Lengths:
    sizes = tuple(end - begin for begin, end, _ in spans.segments)
    return Lengths(sizes, sizes)


def _by_depth(query: torch.Tensor, pair: Pair, call: TreeCall) -> Partial:
    """Attend in one call for all diagonals, and one for each depth."""
    assert call.kernel is not None
    given = Qkv(*map(tokens_of, (query, *pair)))
    out, lse = call.kernel.forward(given, _diagonals(call.spans), call.rules)
    wide = torch.promote_types(out.dtype, torch.float32)
    merged = heads_of(out).to(wide), lse[None].to(wide)
    for lengths in call.spans.by_depth:
        out, lse = call.kernel.forward(given, lengths, call.rules)
        # What a kernel writes for rows without keys differs from kernel to kernel.
        seen = _has_keys(lengths, lse.device)
        part = heads_of(out).masked_fill(~seen[:, None], 0.0), lse[None].masked_fill(~seen, -torch.inf)
        merged = rectangles.merge(merged, part)
    return merged


def _back_by_depth(
    gradient: torch.Tensor, query: torch.Tensor, pair: Pair, merged: Partial, call: TreeCall
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values, float32 or wider."""
    assert call.kernel is not None
    given, gradient = Qkv(*map(tokens_of, (query, *pair))), tokens_of(gradient).contiguous()
    known = tokens_of(merged[0]).contiguous(), merged[1][0].contiguous()
    wide = torch.promote_types(gradient.dtype, torch.float32)
    made = call.kernel.backward(gradient, given, known, _diagonals(call.spans), call.rules)
    found = [x.to(wide) for x in made]
    for lengths in call.spans.by_depth:
        has_rows = _has_rows(lengths, gradient.device)
        sees = (_has_keys(lengths, gradient.device), has_rows, has_rows)
        made = call.kernel.backward(gradient, given, known, lengths, call.rules)
        for total, part, mask in zip(found, made, sees):
            total += part.masked_fill(~mask[:, None, None], 0.0)
    return heads_of(found[0]), heads_of(found[1]), heads_of(found[2])


def _has_keys(lengths: Lengths, device: torch.device) -> torch.Tensor:
    """Return which rows see any key; bool `[rows]`."""
    return torch.from_numpy(np.repeat(np.array(lengths.keys) > 0, lengths.queries)).to(device)


def _has_rows(lengths: Lengths, device: torch.device) -> torch.Tensor:
    """Return which keys any row sees; bool `[keys]`."""
    return torch.from_numpy(np.repeat(np.array(lengths.queries) > 0, lengths.keys)).to(device)
