"""Builds a `TreeBatch`: a Forest and its Packing in, arrays out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.batch import kernels_trees as kernels
from varlen.batch.layout import as_number, as_pack_ids, check_layout
from varlen.batch.packed import Layout
from varlen.batch.tree_batch import TreeBatch
from varlen.errors import DocumentsError, SettingError
from varlen.forest import Forest
from varlen.types import IntArray, Packing


def collate_trees(
    forest: Any,
    packing: Packing,
    pack_ids: Any,
    layout: Layout,
    pad_id: int,
    pad_to_multiple_of: int,
    step_num_targets: int | None,
    *,
    is_beside: bool,
) -> TreeBatch:
    """Build the arrays of some packs of trees; arguments as of `collate`, not checked yet.

    `is_beside`: whether anything was given that belongs to documents, such as labels.
    """
    check_layout(layout)
    pad = as_number(pad_id, "pad_id", -(2**31))
    multiple = as_number(pad_to_multiple_of, "pad_to_multiple_of", 1)
    step = None if step_num_targets is None else as_number(step_num_targets, "step_num_targets", 0, 2**63 - 1)
    _check_same(forest, packing)
    if is_beside:
        raise SettingError(
            "labels, masks, columns or buffers were given beside a forest, which holds its targets and their values "
            "already; pass them to vl.fold(rows, columns=..., loss_mask=...)"
        )
    wanted = np.arange(packing.num_packs) if pack_ids is None else as_pack_ids(pack_ids)
    return _filled(forest, packing, wanted, layout, pad, multiple, step)


def _filled(
    forest: Forest,
    packing: Packing,
    wanted: IntArray,
    layout: Layout,
    pad: int,
    multiple: int,
    step: int | None,
) -> TreeBatch:
    """Fill the arrays."""
    pieces, counts = _pieces_of(packing, wanted)
    begins = forest.tree_offsets[packing.document_ids[pieces]] + packing.starts[pieces]
    sizes = (packing.stops[pieces] - packing.starts[pieces]).astype(np.int64)
    prefixes = _prefixes(packing)[pieces].astype(np.int64)
    rows, width, bases = _laid_out(sizes + prefixes, counts, packing.capacity, layout, multiple)
    arrays: dict[str, npt.NDArray[Any]] = {
        "input_ids": np.full((rows, width), pad, np.int32),
        "position_ids": np.zeros((rows, width), np.int32),
        "subtree_end": np.tile(np.arange(1, width + 1, dtype=np.int32), (rows, 1)),
        "forest_tokens": np.full((rows, width), -1, np.int32),
    }
    segment_of = np.searchsorted(forest.segment_offsets, begins, side="right") - 1
    kernels.lay_trees(
        forest.token_ids,
        forest.position_ids,
        forest.subtree_end,
        forest.segment_offsets,
        forest.segment_parents,
        begins,
        sizes,
        prefixes,
        bases,
        segment_of,
        width,
        *(array.reshape(-1) for array in arrays.values()),
    )
    here, sources = _occurrences(forest, begins, sizes, prefixes, bases)
    raw = forest.targets[here]
    owners = forest.target_rows[here]
    row_offsets = np.append(np.flatnonzero(np.diff(owners, prepend=-1)), len(owners))
    tokens = arrays["forest_tokens"]
    is_token = tokens >= 0
    return TreeBatch(
        **arrays,
        sources=sources,
        targets=forest.token_ids[forest.row_tokens[raw]],
        rows=owners,
        groups=forest.row_groups[owners],
        positions=raw - forest.row_offsets[owners],
        row_offsets=row_offsets,
        row_lengths=np.diff(forest.row_offsets)[owners[row_offsets[:-1]]],
        columns={name: column[here] for name, column in forest.columns.items()},
        token_columns={
            name: _spread(column, tokens, is_token) for name, column in forest.token_columns.items()
        },
        pack_ids=wanted,
        layout=layout,
        pad_id=pad,
        max_token_id=int(forest.token_ids[tokens[is_token]].max(initial=-1)),
        num_tokens=int(is_token.sum()),
        step_num_targets=len(raw) if step is None else step,
    )


def _check_same(forest: Any, packing: Packing) -> None:
    """Require a forest and its packing."""
    if not isinstance(forest, Forest):
        raise SettingError(
            "this packing is one of trees, and documents were given; pass the forest: vl.collate(forest, packing)"
        )
    if packing.prefixes is None:
        raise SettingError(
            "this packing is one of documents; pack a forest's trees by vl.pack_forest(forest, capacity)"
        )
    if packing.num_documents != forest.num_trees or packing.ledger.tokens_in != forest.num_tokens:
        raise DocumentsError(
            f"the packing is of {packing.num_documents:,} trees with {packing.ledger.tokens_in:,} tokens, and the "
            f"forest has {forest.num_trees:,} with {forest.num_tokens:,}; pack this forest"
        )


def _prefixes(packing: Packing) -> npt.NDArray[np.int32]:
    assert packing.prefixes is not None, "it was checked"
    return packing.prefixes


def _pieces_of(packing: Packing, pack_ids: IntArray) -> tuple[IntArray, IntArray]:
    """Return the pieces of packs, in their order, and how many each has."""
    if pack_ids.size and not (pack_ids.min() >= 0 and pack_ids.max() < packing.num_packs):
        wrong = pack_ids[(pack_ids < 0) | (pack_ids >= packing.num_packs)]
        raise SettingError(f"pack {wrong[0]:,} is none of the {packing.num_packs:,} packs")
    if np.unique(pack_ids).size != pack_ids.size:
        raise SettingError("a pack of trees was named twice in pack_ids; its targets would count twice")
    firsts, lasts = packing.offsets[pack_ids], packing.offsets[pack_ids + 1]
    counts = lasts - firsts
    before = np.cumsum(counts) - counts
    pieces: IntArray = np.repeat(firsts - before, counts) + np.arange(int(counts.sum()))
    return pieces, counts


def _laid_out(
    slots: IntArray, counts: IntArray, capacity: int, layout: Layout, multiple: int
) -> tuple[int, int, IntArray]:
    """Return rows, width, and where each piece begins in the flattened batch."""
    within = np.cumsum(slots) - slots
    if layout == "flat":
        width = -(-int(slots.sum()) // multiple) * multiple
        return 1, width, within
    if capacity % multiple:
        raise SettingError(
            f"rows are as wide as packs, {capacity:,}, which is no multiple of pad_to_multiple_of={multiple:,}; pack "
            f"with capacity={-(-capacity // multiple) * multiple:,}"
        )
    row = np.repeat(np.arange(len(counts)), counts)
    firsts = np.cumsum(counts) - counts
    begins_of_rows = within[np.minimum(firsts, max(len(within) - 1, 0))] if len(within) else within
    return len(counts), capacity, within - begins_of_rows[row] + row * capacity


def _occurrences(
    forest: Forest, begins: IntArray, sizes: IntArray, prefixes: IntArray, bases: IntArray
) -> tuple[IntArray, IntArray]:
    """Return which occurrences these pieces train, and where each is predicted in the flattened batch."""
    order = np.argsort(begins)
    predicted = forest.row_tokens[forest.targets]
    if len(order):
        piece = order[np.maximum(np.searchsorted(begins[order], predicted, side="right") - 1, 0)]
        is_here = (begins[piece] <= predicted) & (predicted < begins[piece] + sizes[piece])
    else:
        piece, is_here = np.zeros(len(predicted), np.int64), np.zeros(len(predicted), np.bool_)
    here = np.flatnonzero(is_here)
    piece = piece[here]
    source = forest.row_tokens[forest.targets[here] - 1].astype(np.int64)
    own = bases[piece] + prefixes[piece] + source - begins[piece]
    return here, np.where(source >= begins[piece], own, bases[piece] + forest.position_ids[source])


def _spread(column: npt.NDArray[Any], tokens: npt.NDArray[np.int32], is_token: Any) -> npt.NDArray[Any]:
    """Return values of the forest's tokens where they stand in the batch, 0 at padding."""
    found = np.zeros((*tokens.shape, *column.shape[1:]), column.dtype)
    found[is_token] = column[tokens[is_token]]
    return found
