"""The attention of slices: rows attend to their document's earlier slices in a cache, and causally to themselves.

It goes through transformers' registry, so that no model is patched. The tokens before a slice and the slice's own
rows are two calls, merged by log-sum-exp: no mask is formed and no key copied. The backward adds to the gradients of
earlier tokens in the cache itself, and a slice takes up there what its later ones have left; so one ordinary
`backward` per MicroPack, last to first, is the exact gradient of the uncut document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface

from varlen.errors import ModelError
from varlen.runtime import flash
from varlen.runtime.cache import DocumentCache, Pair

NAME = "varlen_slices"
UNKNOWN_PATTERNS = ("position_bias", "softcap", "s_aux", "sinks", "indices", "block_indices")
"""Arguments by which some families change who is attended to or how much, which slices don't compute."""
BLOCK = 512
"""Rows of a sliding window computed at once, so that memory is linear in the slice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedSlice:
    """The rows `start:stop` of a document, which stand in a MicroPack behind those of the slices before it."""

    cache: DocumentCache
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Tokens of the slice."""
        return self.stop - self.start


class Tile(NamedTuple):
    """A rectangle of attention: some rows of a slice over some tokens of its document."""

    first_row: int
    stop_row: int
    first_key: int
    stop_key: int
    causal: bool
    window: int | None
    """Only the last this many tokens are seen; None where `causal` says it all."""


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
    slices: Sequence[CachedSlice] | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within documents; transformers' calling convention.

    Args:
        module: the attention layer that calls.
        query: `[1, query_heads, rows, dim]`, rows of all slices of a MicroPack, one slice behind the other.
        key: `[1, key_heads, rows, dim]`; `query_heads` is a multiple of `key_heads`.
        value: as `key`.
        attention_mask: must be None.
        dropout: of attention weights; must be 0.
        scaling: of scores; None for `dim ** -0.5`.
        sliding_window: attend to the last this many tokens, the token itself included.
        slices: whose rows these are.
        rest: ignored, apart from patterns that slices don't compute.

    Returns:
        `[1, rows, query_heads, dim]`, and None for the weights, which are never formed.

    Raises:
        ModelError: no slices, a mask, dropout, or a pattern that slices don't compute.
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
    out = attend(query, key, value, slices, layer=layer, scale=scale, window=sliding_window)
    return out.transpose(1, 2), None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slices: Sequence[CachedSlice],
    *,
    layer: int,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attend from every slice to its document up to itself, and keep its keys and values in the document's cache.

    Slices of a document must come first to last here, and go last to first through the backward.

    Args:
        query: `[1, query_heads, rows, dim]`.
        key: `[1, key_heads, rows, dim]`.
        value: as `key`.
        slices: whose rows these are, in order; their lengths add up to `rows`.
        layer: the index under which caches keep this layer.
        scale: of scores.
        window: attend to the last this many tokens, the token itself included; None for all.

    Returns:
        `[1, query_heads, rows, dim]`; heads of one row lie side by side in memory.

    Cost: the work of causal attention cut to the slices; memory linear in rows and tokens.
    """
    return _SliceAttention.apply(query, key, value, slices, layer, scale, window)  # type: ignore[no-any-return, no-untyped-call]


def tiles_of(start: int, stop: int, window: int | None = None) -> Iterator[Tile]:
    """Yield the rectangles that a slice is computed in; those without a window share all its rows.

    >>> [tuple(tile)[:5] for tile in tiles_of(10, 14)]
    [(0, 4, 0, 10, False), (0, 4, 10, 14, True)]
    """
    rows = stop - start
    if window is None or stop <= window:
        if start:
            yield Tile(0, rows, 0, start, False, None)
        yield Tile(0, rows, start, stop, True, None)
        return
    for first in range(0, rows, BLOCK):
        last = min(first + BLOCK, rows)
        yield Tile(first, last, max(0, start + first - window + 1), start + last, False, window)


class _SliceAttention(torch.autograd.Function):
    """Forward and backward of `attend`; caches are written in both."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slices: Sequence[CachedSlice],
        layer: int,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        outs, sums, row = [], [], 0
        for piece in slices:
            rows = slice(row, row + piece.rows)
            pair = piece.cache.write(layer, piece.start, key[:, :, rows], value[:, :, rows])
            out, lse = _forward(query[:, :, rows], pair, piece, scale, window)
            outs.append(out)
            sums.append(lse)
            row = rows.stop
        # Joined by rows, so that heads of a row lie side by side and the output projection needs no copy.
        out = outs[0] if len(outs) == 1 else torch.cat([x.transpose(1, 2) for x in outs], 1).transpose(1, 2)
        ctx.save_for_backward(query, out, *sums)
        ctx.slices, ctx.layer, ctx.scale, ctx.window = slices, layer, scale, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, out, *sums = ctx.saved_tensors
        parts, stop = [], query.shape[2]
        for piece, lse in zip(reversed(ctx.slices), reversed(sums), strict=True):
            rows = slice(stop - piece.rows, stop)
            given = (gradient[:, :, rows], query[:, :, rows], (out[:, :, rows], lse))
            parts.append(_backward(*given, piece, ctx.layer, ctx.scale, ctx.window))
            piece.cache.release(ctx.layer, piece.start)
            stop = rows.start
        if len(parts) == 1:
            return *parts[0], None, None, None, None
        joined = (
            torch.cat([x.transpose(1, 2) for x in group], 1).transpose(1, 2) for group in zip(*parts[::-1])
        )
        return *joined, None, None, None, None


def _forward(
    query: torch.Tensor, pair: Pair, piece: CachedSlice, scale: float, window: int | None
) -> flash.Partial:
    tiles = list(tiles_of(piece.start, piece.stop, window))
    parts = [
        flash.forward(*_of_tile(query, pair, tile), scale=scale, **_sight(tile, piece, query))
        for tile in tiles
    ]
    if len(parts) == 1:
        return parts[0]
    if tiles[0].window is None:
        return flash.merge(parts[1], parts[0])
    out = torch.cat([x.transpose(1, 2) for x, _ in parts], 1).transpose(1, 2)
    return out, torch.cat([lse for _, lse in parts], 2)


def _backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    merged: flash.Partial,
    piece: CachedSlice,
    layer: int,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of a slice's queries, keys and values; those of earlier tokens go to its cache."""
    start, cache = piece.start, piece.cache
    pair, earlier = cache.read(layer, piece.stop), cache.earlier_gradients(layer, start)
    own = cache.own_gradients(layer, start, piece.stop)
    by_queries: list[torch.Tensor] = []
    for tile in tiles_of(start, piece.stop, window):
        rows = slice(tile.first_row, tile.stop_row)
        part = (merged[0][:, :, rows], merged[1][:, :, rows])
        by_query, *by_pair = flash.backward(
            gradient[:, :, rows],
            *_of_tile(query, pair, tile),
            part,
            scale=scale,
            **_sight(tile, piece, query),
        )
        if tile.window is None and by_queries:
            by_queries[0] += by_query
        else:
            by_queries.append(by_query)
        before = max(0, min(start, tile.stop_key) - tile.first_key)
        if earlier is not None and before:
            for total, part_of_it in zip(earlier, by_pair):
                # `+=` would copy the sum onto itself once more.
                total[:, :, tile.first_key : tile.first_key + before].add_(part_of_it[:, :, :before])
        if tile.stop_key > start:
            first = max(tile.first_key, start) - start
            own = _added(own, [x[:, :, before:] for x in by_pair], first, piece.rows)
    assert own is not None
    by_query = by_queries[0] if len(by_queries) == 1 else torch.cat(by_queries, 2)
    return by_query, own[0].to(query.dtype), own[1].to(query.dtype)


def _added(own: Pair | None, parts: Sequence[torch.Tensor], first: int, rows: int) -> Pair:
    """Add gradients of the keys and values from row `first` on to a slice's own."""
    if own is None:
        if parts[0].shape[2] == rows:
            return parts[0], parts[1]
        wide = torch.promote_types(parts[0].dtype, torch.float32)
        own = tuple(x.new_zeros(1, x.shape[1], rows, x.shape[3], dtype=wide) for x in parts)  # type: ignore[assignment]
        assert own is not None
    for total, part in zip(own, parts):
        total[:, :, first : first + part.shape[2]].add_(part)
    return own


def _of_tile(query: torch.Tensor, pair: Pair, tile: Tile) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    keys = slice(tile.first_key, tile.stop_key)
    return query[:, :, tile.first_row : tile.stop_row], pair[0][:, :, keys], pair[1][:, :, keys]


def _sight(tile: Tile, piece: CachedSlice, like: torch.Tensor) -> dict[str, Any]:
    """Return which keys a tile's rows see, as the kernels take it."""
    if tile.window is None:
        return {"causal": tile.causal}
    rows = torch.arange(piece.start + tile.first_row, piece.start + tile.stop_row, device=like.device)
    keys = torch.arange(tile.first_key, tile.stop_key, device=like.device)
    distance = rows[:, None] - keys
    return {"seen": (distance >= 0) & (distance < tile.window)}


def _no_mask(*_: Any, **__: Any) -> None:
    """Build no mask: slices say who is attended to."""
