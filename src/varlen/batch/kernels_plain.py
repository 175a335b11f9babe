"""The kernel that builds a whole batch in one call, where nothing but the documents' tokens goes in."""

# Kernels mix Python and numpy integers, which numba types by itself.
# mypy: disable-error-code="assignment,return-value,no-any-return"

from __future__ import annotations

import numpy as np

from varlen.batch.kernels import Int32, Int64, Values, assemble, lay_segments, measure, value_range
from varlen.jit import compiled


@compiled
def plain_batch(
    document_ids: Int64,
    starts: Int32,
    stops: Int32,
    offsets: Int64,
    pack_ids: Int64,
    width: int,
    multiple: int,
    pad_multiple: int,
    padding_segment: int,
    tokens: Values,
    token_offsets: Values,
    capacity: int,
    whole: int,
    is_wide: bool,
    pad_id: int,
) -> tuple[bool, Int64, Int32, Int32, Int32, int, int, int, int]:
    """Do what `measure`, `lay_segments` and `assemble` do, one after the other.

    Arrays made here cost a third of what they cost made one by one in Python, and the rest of a small batch is
    little else.

    Args:
        document_ids: int64 `[num_pieces]`, of the packing; as are starts, stops and offsets.
        starts: int32 `[num_pieces]`.
        stops: int32 `[num_pieces]`.
        offsets: int64 `[num_packs + 1]`.
        pack_ids: int64 `[packs]`: which packs.
        width: width of a row, or 0 for one flat row.
        multiple: slots are lengths rounded up to it.
        pad_multiple: the flat row's length is rounded up to it.
        padding_segment: most positions in one padding segment.
        tokens: any integers but uint64, one-dimensional.
        token_offsets: int32 or int64 `[documents + 1]`: where each document's tokens begin.
        capacity: of the packing.
        whole: where pieces may end, as `locate` takes it.
        is_wide: whether tokens may be no int32; they are looked through then.
        pad_id: value of the ids at padding.

    Returns:
        Whether all is right, else nothing that follows is to be used; the segments' int64 and int32 numbers
        and the boundaries as `lay_segments` writes them (one row of boundaries where `multiple` is 1); int32
        `[4, rows, width]`: ids, labels, positions and segment ids; the targets; the longest and the shortest
        segment; the largest id.
    """
    packed = (document_ids, starts, stops, offsets, pack_ids, width)
    sizes = measure(*packed, multiple, pad_multiple, padding_segment, token_offsets.size - 1)
    count, entries, positions, longest, shortest, bad = sizes
    fits = bad < 0 and positions < 2**31
    if not fits:
        count, entries, positions = 0, 0, 0
    wide = np.empty(3 * count + pack_ids.size + 1, np.int64)
    narrow = np.empty((3, count), np.int32)
    boundaries = np.empty((2 if multiple > 1 else 1, entries), np.int32)
    rows = pack_ids.size if width > 0 else 1
    block = np.empty((4, rows if fits else 0, width if width > 0 else positions), np.int32)
    targets = 0
    largest = -1
    if fits:
        plan = (*packed, positions, multiple, padding_segment)
        found = (np.empty(0, np.int64), token_offsets, tokens.size, capacity, whole)
        written = (wide, narrow, boundaries[0], boundaries[boundaries.shape[0] - 1])
        targets, wrong, _ = lay_segments(*plan, *found, *written)
        fits = wrong == 0
    sources, places = wide[2 * count : 3 * count], wide[count : 2 * count]
    if fits and is_wide:
        low, high = value_range(tokens, sources, narrow[1])
        fits = low >= -(2**31) and high < 2**31
    if fits:
        arrays = (block[0], block[1], block[2], block[3])
        largest = assemble(tokens, sources, narrow[1], places, pad_id, *arrays)
    return fits, wide, narrow, boundaries, block, targets, longest, shortest, largest
