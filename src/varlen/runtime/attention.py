"""Attention of slices: rows attend to their document's earlier slices in a cache, and causally to their own slice.

It is called through transformers' registry, so no model is patched. On CUDA a kernel computes whole slices; elsewhere
the tokens before a slice and its own rows are two calls, merged by log-sum-exp, without a mask or a copy of keys. The
backward adds the gradients of earlier tokens to the cache, where the backward of their own slice finds them. So one
ordinary `backward` per MicroPack, last to first, gives the exact gradient of the uncut document. Documents that are
whole in one MicroPack need no cache: the graph keeps their keys and values, and a kernel computes all of them in one
call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface

from varlen.attention import rectangles, tiles, trees
from varlen.attention.choice import KernelChoice, chosen
from varlen.attention.kernels import Kernel, Lengths, Qkv, heads_of, tokens_of
from varlen.attention.rectangles import Pair, Partial, joined
from varlen.attention.rules import LayerRules, rules_of_call
from varlen.attention.trees import TreeCall, kernel_of_trees
from varlen.errors import ModelError
from varlen.runtime.casting import lowered, uncast
from varlen.runtime.kv_cache import CachedSlice, DocumentCache, Slices, WholeDocuments, contiguous_tokens
from varlen.runtime.mesh.shared_documents import Attended, Kept, OwnRows, Span
from varlen.runtime.tree_slices import TreeSlice

NAME = "varlen_slices"


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
    *,
    s_aux: torch.Tensor | None = None,
    slices: Slices | None = None,
    choice: KernelChoice | None = None,
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
    layer, name = getattr(module, "layer_idx", None), type(module).__name__
    if slices is None or attention_mask is not None or layer is None:
        raise ModelError(
            f'the "{NAME}" attention is called by varlen.runtime with slices and no mask, and {name} was called '
            'without; for the model as a whole choose model.set_attn_implementation("sdpa")'
        )
    rules = rules_of_call(module, query, NAME, dropout=dropout, scaling=scaling, **rest)
    if rules.dropout:
        raise ModelError(
            f"{name} passes dropout={rules.dropout}, which the attention of slices doesn't compute"
        )
    query, key, value = lowered(query), lowered(key), lowered(value)
    if width := chunk_width(module):
        if of_trees(slices):
            rules = rules._replace(chunk=width)
        else:
            slices = chunked(slices, width)
    with uncast(query):
        out = attend(query, key, value, slices, layer=layer, rules=rules, sinks=s_aux, choice=choice)
    return out.transpose(1, 2).contiguous(), None


def chunk_width(layer: Any) -> int:
    """Return into how many tokens each a layer's attention cuts documents (Llama 4); 0 where it doesn't."""
    config: Any = getattr(layer, "config", None)
    index = getattr(layer, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    return (
        int(config.attention_chunk_size)
        if kinds and index is not None and kinds[index] == "chunked_attention"
        else 0
    )


def chunked(slices: Slices, width: int) -> list[CachedSlice | WholeDocuments]:
    """Cut slices where a layer's chunks begin: each chunk is a document of its own there, with its own cache."""
    if any(isinstance(piece, CachedSlice) and piece.own_rows is not None for piece in slices):
        raise refused_sharing(width)
    whole = [piece for piece in slices if not isinstance(piece, TreeSlice)]
    return [part for piece in whole for part in _chunks(piece, width)]


def refused_sharing(width: int) -> ModelError:
    """Return the error that says why a model whose layers attend within chunks runs no document that ranks share."""
    return ModelError(
        f"layers with chunks of {width:,} tokens don't attend to documents that ranks share; take cp=1, and plan "
        "with Search(merges=False)"
    )


def _chunks(piece: CachedSlice | WholeDocuments, width: int) -> list[CachedSlice | WholeDocuments]:
    if isinstance(piece, WholeDocuments):
        lengths = (
            min(width, length - first) for length in piece.lengths for first in range(0, length, width)
        )
        return [WholeDocuments(tuple(lengths))]
    return [
        CachedSlice(
            cache=piece.cache.chunk(first, width),
            start=max(piece.start - first, 0),
            stop=min(piece.stop - first, width),
        )
        for first in range(piece.start - piece.start % width, piece.stop, width)
    ]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slices: Slices,
    *,
    layer: int,
    rules: LayerRules,
    sinks: torch.Tensor | None = None,
    choice: KernelChoice | None = None,
) -> torch.Tensor:
    """Attend from every slice to its document up to itself, and keep its keys and values in the document's cache.

    Slices of a document must come first to last here, and go last to first through the backward. Whole documents
    come before all slices.

    Args:
        query: `[1, query_heads, rows, dim]`.
        key: `[1, key_heads, rows, dim]`.
        value: `[1, key_heads, rows, value_dim]`.
        sinks: `[query_heads]`: scores that all rows see and that have nothing to give; None for none.
        choice: of the kernel, which is noted there.

    Returns:
        `[1, query_heads, rows, value_dim]`; heads of one row lie side by side in memory.

    Cost: the work of causal attention cut to the slices; memory linear in rows and tokens.
    """
    if of_trees(slices):
        kernel = kernel_of_trees(query, key, value, rules, choice or KernelChoice())
        return _TreeSliceAttention.apply(query, key, value, sinks, slices, layer, rules, kernel)  # type: ignore[no-any-return, no-untyped-call]
    kernel = chosen(query, key, value, rules, choice or KernelChoice())
    call = Call(slices, layer, rules, kernel)
    return _SliceAttention.apply(query, key, value, sinks, call)  # type: ignore[no-any-return, no-untyped-call]


def of_trees(slices: Slices) -> bool:
    """Return whether slices are of trees."""
    return bool(slices) and isinstance(slices[0], TreeSlice)


class _TreeSliceAttention(torch.autograd.Function):
    """Attention of slices of trees; both passes write caches."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        slices: Sequence[TreeSlice],
        layer: int,
        rules: LayerRules,
        kernel: Kernel | None,
    ) -> torch.Tensor:
        parts, row = [], 0
        for piece in slices:
            rows = slice(row, row + piece.rows)
            row, pair = rows.stop, (key[:, :, rows], value[:, :, rows])
            path = piece.path(layer)
            parts.append(trees.forward(query[:, :, rows], pair, path, TreeCall(piece.spans, rules, kernel)))
            piece.keep(layer, pair)
        out, lse = joined([x for x, _ in parts]), torch.cat([x for _, x in parts], 2)
        if sinks is not None:
            out, lse = rectangles.with_sinks((out, lse), sinks)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse, sinks)
        ctx.call = slices, layer, rules, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse, sinks = ctx.saved_tensors
        slices, layer, rules, kernel = ctx.call
        by_sinks = None
        if ctx.needs_input_grad[3]:
            by_sinks = rectangles.sinks_backward(gradient, (out, lse), sinks)
        parts, row = [], query.shape[2]
        for piece in reversed(slices):
            rows = slice(row - piece.rows, row)
            row = rows.start
            merged, pair = (out[:, :, rows], lse[:, :, rows]), (key[:, :, rows], value[:, :, rows])
            call, add = TreeCall(piece.spans, rules, kernel), partial(piece.add, layer)
            given = (gradient[:, :, rows], query[:, :, rows], pair, piece.path(layer), merged)
            found = trees.backward(*given, call, add)
            piece.take(layer, (found[1], found[2]))
            parts.append(found)
        by_query, by_key, by_value = (joined(list(each)[::-1]) for each in zip(*parts))
        dtype = query.dtype
        return by_query.to(dtype), by_key.to(dtype), by_value.to(dtype), by_sinks, None, None, None, None


class Call(NamedTuple):
    """The arguments of one call of attention that aren't tensors."""

    slices: Slices
    layer: int
    rules: LayerRules
    kernel: Kernel | None

    @property
    def whole(self) -> WholeDocuments | None:
        """The documents that need no cache, whose rows come first."""
        first = self.slices[0] if self.slices else None
        return first if isinstance(first, WholeDocuments) else None

    def groups(self) -> Iterator[Sequence[CachedSlice]]:
        """Yield slices that are computed in one call: with a kernel, neighbours that begin their documents."""
        group: list[CachedSlice] = []
        for piece in self.slices:
            if not isinstance(piece, CachedSlice):
                continue
            if group and (self.kernel is None or self._is_apart(piece) or self._is_apart(group[0])):
                yield group
                group = []
            group.append(piece)
        if group:
            yield group

    def _is_apart(self, piece: CachedSlice) -> bool:
        return piece.start > 0 or piece.own_rows is not None

    def forward(self, query: torch.Tensor, pair: Pair, group: Sequence[CachedSlice]) -> Partial:
        """Attend from the rows of a group.

        Args:
            query: `[1, query_heads, rows, dim]`, of the group.
        """
        if self.kernel is None:
            return tiles.forward(query, pair, group[0].start, self.rules)
        return _forward_whole(query, pair, group, self.rules, self.kernel)

    def backward(
        self,
        gradient: torch.Tensor,
        query: torch.Tensor,
        whole: Partial,
        group: Sequence[CachedSlice],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of a group's queries, keys and values; those of earlier tokens go to its cache."""
        if self.kernel is None:
            return _backward_in_tiles(gradient, query, whole, group[0], self)
        return _backward_whole(gradient, query, whole, group, self)


class _SliceAttention(torch.autograd.Function):
    """Forward and backward of `attend`; both write caches."""

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
        kept: tuple[torch.Tensor, ...] = ()
        if call.whole is not None:
            row, pair = call.whole.rows, _first_rows(call.whole.rows, key, value)
            parts += _forward_documents(query[:, :, :row], pair, call.whole, call)
            kept = tuple(map(_alone, pair)) if any(ctx.needs_input_grad) else ()
        for group in call.groups():
            first, pairs = row, []
            if group[0].own_rows is not None:
                rows = slice(row, row + group[0].rows)
                given = (query[:, :, rows], key[:, :, rows], value[:, :, rows], group[0])
                parts.append(_forward_shared(*given, call))
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
        out, lse = joined([x for x, _ in parts]), torch.cat([x for _, x in parts], 2)
        if sinks is not None:
            out, lse = rectangles.with_sinks((out, lse), sinks)
        ctx.save_for_backward(query, out, lse, sinks, *kept)
        ctx.call, ctx.none = call, _none_of(key, value)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, out, lse, sinks, *kept = ctx.saved_tensors
        call: Call = ctx.call
        by_sinks = None
        if ctx.needs_input_grad[3]:
            by_sinks = rectangles.sinks_backward(gradient, (out, lse), sinks)
        parts, stop = [], query.shape[2]
        for group in reversed(list(call.groups())):
            rows = slice(stop - sum(piece.rows for piece in group), stop)
            given = (gradient[:, :, rows], query[:, :, rows], (out[:, :, rows], lse[:, :, rows]))
            stop = rows.start
            if group[0].own_rows is not None:
                parts.append(_backward_shared(*given, group[0], ctx.none, call))
                continue
            parts.append(call.backward(*given, group))
            for piece in reversed(group):
                piece.cache.release(call.layer, piece.start)
        if call.whole is not None:
            given = (gradient[:, :, :stop], query[:, :, :stop], (out[:, :, :stop], lse[:, :, :stop]))
            parts += _backward_documents(*given, (kept[0], kept[1]), call.whole, call)
        by_query, by_key, by_value = (joined(each) for each in zip(*parts[::-1]))
        return by_query, by_key, by_value, by_sinks, None


def _first_rows(count: int, key: torch.Tensor, value: torch.Tensor) -> Pair:
    return key[:, :, :count], value[:, :, :count]


def _alone(rows: torch.Tensor) -> torch.Tensor:
    """Return rows that keep no other bytes alive, such as the rest of a projection that they are a part of."""
    is_alone = rows.untyped_storage().nbytes() == rows.numel() * rows.element_size()
    return rows if is_alone else contiguous_tokens(rows, rows.shape[2])


def _forward_documents(query: torch.Tensor, pair: Pair, whole: WholeDocuments, call: Call) -> list[Partial]:
    """Attend within whole documents, whose keys and values are those of the rows: in one call with a kernel."""
    if call.kernel is not None:
        given = Qkv(*map(tokens_of, (query, *pair)))
        out, lse = call.kernel.forward(given, Lengths(whole.lengths, whole.lengths), call.rules)
        return [(heads_of(out), lse[None])]
    parts = (x.split_with_sizes(whole.lengths, 2) for x in (query, *pair))
    return [tiles.forward(rows, (keys, values), 0, call.rules) for rows, keys, values in zip(*parts)]


def _backward_documents(
    gradient: torch.Tensor,
    query: torch.Tensor,
    merged: Partial,
    pair: Pair,
    whole: WholeDocuments,
    call: Call,
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return the gradients of the queries, keys and values of `_forward_documents`, those of the last rows first."""
    if call.kernel is not None:
        given = Qkv(*map(tokens_of, (query, *pair)))
        before = (tokens_of(merged[0]), merged[1][0].contiguous())
        lengths = Lengths(whole.lengths, whole.lengths)
        found = call.kernel.backward(tokens_of(gradient), given, before, lengths, call.rules)
        return [(heads_of(found.query), heads_of(found.key), heads_of(found.value))]
    parts = [x.split_with_sizes(whole.lengths, 2) for x in (gradient, query, *pair, *merged)]
    return [
        tiles.backward(by_out, rows, (keys, values), (out, lse), 0, call.rules, earlier=None, own=None)
        for by_out, rows, keys, values, out, lse in reversed(list(zip(*parts)))
    ]


def _backward_in_tiles(
    gradient: torch.Tensor, query: torch.Tensor, whole: Partial, piece: CachedSlice, call: Call
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    cache, layer, start = piece.cache, call.layer, piece.start
    pair, earlier = cache.read(layer, piece.stop), cache.earlier_gradients(layer, start)
    own = cache.own_gradients(layer, start, piece.stop)
    return tiles.backward(gradient, query, pair, whole, start, call.rules, earlier=earlier, own=own)


def _forward_whole(
    query: torch.Tensor, pair: Pair, group: Sequence[CachedSlice], rules: LayerRules, kernel: Kernel
) -> Partial:
    """As `Call.forward`, with a kernel of whole slices."""
    first = _first_key(group, rules)
    given = Qkv(tokens_of(query), *(tokens_of(x)[first:] for x in pair))
    out, lse = kernel.forward(given, _lengths(group, first), rules)
    return heads_of(out), lse[None]


def _backward_whole(
    gradient: torch.Tensor, query: torch.Tensor, merged: Partial, group: Sequence[CachedSlice], call: Call
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `Call.backward`, with a kernel of whole slices; many earlier keys are taken some at a time."""
    layer, first, start = call.layer, _first_key(group, call.rules), group[0].start
    assert call.kernel is not None
    pairs = [joined(each) for each in zip(*(piece.cache.read(layer, piece.stop) for piece in group))]
    whole = (tokens_of(merged[0]), merged[1][0].contiguous())
    blocks = _key_blocks(first, start, call.rules)
    rows, stop = query.shape[2], pairs[0].shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    by_query: torch.Tensor | None = None
    for low in blocks:
        high = min(low + tiles.BACKWARD_KEYS, start)
        lengths = Lengths((rows,), (high - low,), sees_all=True)
        given = Qkv(tokens_of(query), *(tokens_of(x[:, :, low:high]) for x in pairs))
        of_rows, *found = call.kernel.backward(tokens_of(gradient), given, whole, lengths, call.rules)
        by_query = of_rows.to(wide) if by_query is None else by_query.add_(of_rows)
        _add_earlier(group[0], layer, low, [heads_of(x) for x in found])
    first = start if blocks else first
    given = Qkv(tokens_of(query), *(tokens_of(x[:, :, first:stop]) for x in pairs))
    of_rows, *last = call.kernel.backward(
        tokens_of(gradient), given, whole, _lengths(group, first), call.rules
    )
    of_rows = of_rows if by_query is None else by_query.add_(of_rows).to(query.dtype)
    found = [heads_of(x) for x in last]
    if before := start - first:
        _add_earlier(group[0], layer, first, [x[:, :, :before] for x in found])
        found = [x[:, :, before:] for x in found]
    row = 0
    for piece in group:
        later = piece.cache.own_gradients(layer, piece.start, piece.stop)
        for total, part in zip(later or (), found):
            part[:, :, row : row + piece.rows].add_(total)
        row += piece.rows
    return heads_of(of_rows), found[0], found[1]


def _key_blocks(first: int, start: int, rules: LayerRules) -> range:
    """Return where blocks of the keys before a slice begin; empty if all are taken at once, with the slice's own."""
    is_whole = rules.window is not None or start - first <= tiles.BACKWARD_KEYS
    return range(0) if is_whole else range(first, start, tiles.BACKWARD_KEYS)


def _add_earlier(piece: CachedSlice, layer: int, low: int, parts: Sequence[torch.Tensor]) -> None:
    """Add gradients of keys and values before a slice, those from token `low` on, to those of its cache."""
    earlier = piece.cache.earlier_gradients(layer, piece.start)
    assert earlier is not None
    for total, part in zip(earlier, parts):
        total[:, :, low : low + part.shape[2]].add_(part)


def _first_key(group: Sequence[CachedSlice], rules: LayerRules) -> int:
    """Return the first token that the group's rows see; 0 for groups of several documents."""
    return 0 if rules.window is None else max(0, group[0].start - rules.window + 1)


def _lengths(group: Sequence[CachedSlice], first: int) -> Lengths:
    return Lengths(tuple(piece.rows for piece in group), tuple(piece.stop - first for piece in group))


def _no_mask(*_: Any, **__: Any) -> None:
    """Build no mask: slices define which keys are attended to."""


# The attention of documents that several data-parallel ranks share (DP-Merge): each has some of the rows.
#
# A rank keeps the keys and values of its own rows alone. In each layer the group gathers those of all tokens that a
# slice sees, each rank attends with its own rows, and in the backward the gradients of keys and values are summed
# where stored (as context parallelism does it in Llama 3; Grattafiori et al. 2024, arXiv 2407.21783, §3.3.2).
# What is gathered is there for one layer at a time, as a document of which the rank's rows are ordinary slices.
#
# Before a layer's attention runs, the gather for the task's next visit to a layer begins, as far as its tokens are
# known: those before the slice in the forward pass, and all in the backward pass. `gathered_ahead` names the slices.


class _GatheredCache(DocumentCache):
    """The gathered tokens of a document, for one slice in one layer; the caller adds up gradients."""

    def own_gradients(self, layer: int, start: int, stop: int) -> Pair | None:  # noqa: ARG002
        """Return None: what comes back is of this slice alone."""
        return None


class _Gathered(NamedTuple):
    cache: DocumentCache
    slices: list[tuple[CachedSlice, slice]]
    """This rank's rows as slices of the gathered tokens, and their indices among queries."""


def _forward_shared(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    piece: CachedSlice,
    call: Call,
) -> Partial:
    """Attend from this rank's rows of a slice to the document up to themselves, and keep their keys and values.

    All ranks of the group call it together.

    Args:
        query: `[1, query_heads, rows, dim]`, of this rank's rows.
        key: `[1, key_heads, rows, dim]`.
        value: `[1, key_heads, rows, value_dim]`.

    Cost: the work of attention on the rows given; the keys and values of all tokens seen are gathered, and once more
    put in their order.
    """
    own_rows = _own_rows(piece)
    if own_rows.count:
        piece.cache.write(call.layer, own_rows.first, key, value)
    gathered = _gathered(piece, call, _none_of(key, value), is_backward=False)
    parts = [
        call.forward(query[:, :, rows], gathered.cache.read(call.layer, own.stop), [own])
        for own, rows in gathered.slices
    ]
    if not parts:
        wide = torch.promote_types(query.dtype, torch.float32)
        none = query.new_empty(1, 0, query.shape[1], value.shape[3]).transpose(1, 2)
        return none, query.new_empty(query.shape[:3], dtype=wide)
    return joined([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 2)


def _backward_shared(
    gradient: torch.Tensor,
    query: torch.Tensor,
    whole: Partial,
    piece: CachedSlice,
    none: Pair,
    call: Call,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of this rank's queries, keys and values of a slice.

    What its rows and those of the peers send to keys and values is summed where these are stored: that of earlier
    slices in caches, whose memory of this slice is given back. All ranks of the group call it together.

    Cost: as `forward`; two copies of the gradients of all tokens seen, float32 or wider, are summed and scattered.
    """
    gathered = _gathered(piece, call, none, is_backward=True)
    cache, (span,) = gathered.cache, _own_rows(piece).spans(call.rules.window, is_backward=True)
    wide = torch.promote_types(none[0].dtype, torch.float32)
    joint = none[0].new_zeros(span.stop - span.start, *_shape(none), dtype=wide)
    totals = cache.gradients[call.layer] = _parted(joint, none)
    by_queries = []
    for own, rows in reversed(gathered.slices):
        part = (whole[0][:, :, rows], whole[1][:, :, rows])
        by_query, *by_pair = call.backward(gradient[:, :, rows], query[:, :, rows], part, [own])
        by_queries.append(by_query)
        for total, of_rows in zip(totals, by_pair):
            total[:, :, own.start : own.stop].add_(of_rows)
    by_query = joined(by_queries[::-1]) if by_queries else torch.empty_like(query)
    cache.pairs.clear()  # makes room for what is gathered ahead
    mine = _scattered(joint, _own_rows(piece), span, none)
    return by_query, *_taken(mine, piece, call.layer, span, none)


def _none_of(key: torch.Tensor, value: torch.Tensor) -> Pair:
    """Return keys and values without rows, with the same heads, widths and dtype."""
    none = (x.new_empty(1, x.shape[1], 0, x.shape[3]) for x in (key, value))
    return next(none), next(none)


def _own_rows(piece: CachedSlice) -> OwnRows:
    assert piece.own_rows is not None
    return piece.own_rows


def _gathered(piece: CachedSlice, call: Call, none: Pair, *, is_backward: bool) -> _Gathered:
    """Gather the keys and values of the tokens that a slice sees, in their order, and begin with the next visit's."""
    own_rows = _own_rows(piece)
    own_rows.document.kept[call.layer] = Kept(none, call.rules.window)
    spans = own_rows.spans(call.rules.window, is_backward=is_backward)
    first = spans[0].start
    cache = _GatheredCache(spans[-1].stop - first)
    cache.pairs[call.layer] = _parted(_arrived(piece, Attended(call.layer, is_backward), spans, none), none)
    _begin_next(piece)
    slices, row = [], 0
    for start, stop in own_rows.ranges:
        own = CachedSlice(cache=cache, start=start - first, stop=stop - first)
        slices.append((own, slice(row, row + own.rows)))
        row += own.rows
    return _Gathered(cache, slices)


def _arrived(piece: CachedSlice, visit: Attended, spans: Sequence[Span], none: Pair) -> torch.Tensor:
    """Gather what isn't on its way yet, and return all in token order, `[tokens, heads, widths]`."""
    own_rows, first = _own_rows(piece), spans[0].start
    coming = None if own_rows.gathers is None else own_rows.gathers.arrive(visit)
    coming = coming or _begin_gather(piece, visit.layer, spans[0], none)
    waits = [coming, *(_begin_gather(piece, visit.layer, span, none) for span in spans[1:])]
    given = [wait().flatten(0, 1) for wait in waits]
    # Keys and values of a token stay side by side: both are put in order at once, many times faster than each alone.
    joint = none[0].new_empty(spans[-1].stop - first, *_shape(none))
    for span, rows in zip(spans, given):
        into = joint[span.start - first : span.stop - first]
        torch.index_select(rows, 0, own_rows.order(span), out=into)
    return joint


def _begin_next(piece: CachedSlice) -> None:
    """Begin the gather of the next visit, as far as its tokens are known."""
    own_rows = _own_rows(piece)
    gathers = own_rows.gathers
    if gathers is None or not gathers.visits:
        return
    visit = gathers.visits[0]
    if (span := own_rows.known(visit)) is not None:
        gathers.begin(_begin_gather(piece, visit.layer, span, own_rows.document.kept[visit.layer].none))


def _begin_gather(piece: CachedSlice, layer: int, span: Span, none: Pair) -> Callable[[], torch.Tensor]:
    """Begin to gather the keys and values of a span's tokens, rank after rank."""
    mine = none[0].new_empty(span.width, *_shape(none))
    if span.first < span.last:
        for into, stored in zip(_parted(mine, none), piece.cache.read(layer, span.last)):
            into[:, :, : span.last - span.first] = stored[:, :, span.first :]
    return _own_rows(piece).document.peers.begin_all_gather(mine)


def _scattered(totals: torch.Tensor, own_rows: OwnRows, span: Span, none: Pair) -> Pair:
    """Sum gradients over ranks, `[tokens, heads, widths]`, and return those of this rank's rows of the span."""
    size, order = own_rows.document.peers.size, own_rows.order(span)
    padded = totals.new_zeros(size * span.width, *_shape(none))
    padded.index_copy_(0, order, totals)
    summed = own_rows.document.peers.reduce_scatter(padded.view(size, span.width, *_shape(none)))
    return _parted(summed[: own_rows.last - span.first], none)


def _taken(
    mine: Pair, piece: CachedSlice, layer: int, span: Span, none: Pair
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add gradients of earlier rows to the cache; return those of the slice's rows, and release these."""
    own_rows, cache = _own_rows(piece), piece.cache
    if not own_rows.last:
        return none  # and the cache of this layer, which holds no row yet or none anymore, is left alone
    before = own_rows.first - span.first
    earlier = cache.earlier_gradients(layer, own_rows.first)
    for total, part in zip(earlier or (), mine):
        total[:, :, span.first :].add_(part[:, :, :before])
    own = cache.own_gradients(layer, own_rows.first, own_rows.last)
    parts = [x[:, :, before:] for x in mine]
    if own is not None:
        parts = [part + later for part, later in zip(parts, own)]
    cache.release(layer, own_rows.first)
    return parts[0].to(none[0].dtype), parts[1].to(none[1].dtype)


def _shape(none: Pair) -> tuple[int, int]:
    """Return the number of heads, and the summed widths of a key and a value."""
    return none[0].shape[1], none[0].shape[3] + none[1].shape[3]


def _parted(joint: torch.Tensor, none: Pair) -> Pair:
    """View `[tokens, heads, widths]` as keys and values, each `[1, heads, tokens, dim]`."""
    keys, values = joint[None].transpose(1, 2).split_with_sizes([none[0].shape[3], none[1].shape[3]], -1)
    return keys, values
