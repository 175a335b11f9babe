"""Every batch kernel in plain Python: the specification that tests hold kernels against.

Written to be read. Arguments and results are those of the kernels.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from varlen.batch.in_python import assemble, copy_column, fill_flat_row, mask_labels, value_range  # noqa: F401

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Values = NDArray[Any]

IGNORE = -100


def _slot(length: int, multiple: int) -> int:
    """A length rounded up to a multiple."""
    return -(-length // multiple) * multiple


def measure(
    document_ids: Int64,
    starts: Int32,
    stops: Int32,
    offsets: Int64,
    pack_ids: Int64,
    width: int,
    multiple: int,
    pad_multiple: int,
    padding_segment: int,
    num_documents: int,
) -> tuple[int, int, int, int, int, int]:
    """Count segments, entries of cu_seqlens, positions; the longest and shortest segment; a bad pack id or -1."""
    packs, used = [], []
    for index, pack in enumerate(pack_ids.tolist()):
        if not 0 <= pack < len(offsets) - 1:
            return 0, 0, 0, 0, 0, index
        here = slice(offsets[pack], offsets[pack + 1])
        documents, pieces = document_ids[here], list(zip(starts[here].tolist(), stops[here].tolist()))
        known = ((documents >= 0) & (documents < num_documents)).all()
        inside = 0 <= here.start <= here.stop <= len(stops)
        if not (inside and known and all(0 <= start < stop for start, stop in pieces)):
            return 0, 0, 0, 0, 0, index
        packs.append([stop - start for start, stop in pieces])
        used.append(sum(_slot(length, multiple) for length in packs[-1]))
        if width and used[-1] > width:
            return 0, 0, 0, 0, 0, index
    lengths = [length for pack in packs for length in pack]
    paddings = [width - row for row in used] if width else [_slot(sum(used), pad_multiple) - sum(used)]
    entries = 1 + len(lengths) + sum(-(-padding // padding_segment) for padding in paddings)
    longest, shortest = max(lengths, default=0), min([*lengths, 2**31])
    return len(lengths), entries, sum(used) + sum(paddings), longest, shortest, -1


def lay_segments(
    document_ids: Int64,
    starts: Int32,
    stops: Int32,
    offsets: Int64,
    pack_ids: Int64,
    width: int,
    positions_in_all: int,
    multiple: int,
    padding_segment: int,
    homes: Int64,
    token_offsets: Values,
    num_values: int,
    capacity: int,
    whole: int,
    wide: Int64,
    narrow: Int32,
    cu_seqlens: Int32,
    cu_slots: Int32,
) -> tuple[int, int, int]:
    """Place every segment of a batch, write its boundaries and find its tokens; see the kernel for the arguments."""
    documents: list[int] = []
    begins: list[int] = []
    columns: list[tuple[int, int, int]] = []
    logical, physical, packs = [0], [0], [0]
    for index, pack in enumerate(pack_ids.tolist()):
        for piece in range(int(offsets[pack]), int(offsets[pack + 1])):
            start, length = int(starts[piece]), int(stops[piece]) - int(starts[piece])
            documents.append(int(document_ids[piece]))
            begins.append(physical[-1])
            columns.append((start, length, length - 1))
            logical.append(logical[-1] + length)
            physical.append(physical[-1] + _slot(length, multiple))
        packs.append(len(columns))
        last = index == len(pack_ids) - 1
        row_end = (index + 1) * width if width else positions_in_all if last else physical[-1]
        while physical[-1] < row_end:
            padding = min(padding_segment, row_end - physical[-1])
            logical.append(logical[-1] + padding)
            physical.append(physical[-1] + padding)
    narrow[:] = np.array(columns, np.int32).reshape(-1, 3).T
    cu_seqlens[:], cu_slots[:] = logical, physical
    sources = np.empty(len(columns), np.int64)
    found = homes if homes.size else np.array(documents, np.int64)
    located = locate(found, narrow[0], narrow[1], token_offsets, num_values, capacity, whole, sources)
    wide[:] = documents + begins + sources.tolist() + packs
    return (sum(targets for _, _, targets in columns), *located)


def locate(
    documents: Int64,
    first_tokens: Int32,
    lengths: Int32,
    token_offsets: Values,
    num_values: int,
    capacity: int,
    whole: int,
    sources: Int64,
) -> tuple[int, int]:
    """Find each segment's first value; returns how many segments don't match, and the first of them or -1."""
    wrong = []
    for segment, document in enumerate(documents.tolist()):
        begin, end = int(token_offsets[document]), int(token_offsets[document + 1])
        length = int(lengths[segment])
        stop = int(first_tokens[segment]) + length
        ends = stop == end - begin
        inside = begin >= 0 and stop <= end - begin and end <= num_values
        allowed = whole == 0 or ends or (whole == 1 and length == capacity)
        if not (inside and allowed):
            wrong.append(segment)
        sources[segment] = begin + first_tokens[segment]
    return len(wrong), wrong[0] if wrong else -1


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
    """Do what `measure`, `lay_segments` and `assemble` do, one after the other; see the kernel for the results."""
    packed = (document_ids, starts, stops, offsets, pack_ids, width)
    sizes = measure(*packed, multiple, pad_multiple, padding_segment, token_offsets.size - 1)
    count, entries, positions, longest, shortest, bad = sizes
    none, no_block = np.empty((0, 0), np.int32), np.empty((4, 0, 0), np.int32)
    wrong = (False, np.empty(0, np.int64), none, none, no_block, 0, longest, shortest, -1)
    if bad >= 0 or positions >= 2**31:
        return wrong
    wide, narrow = np.empty(3 * count + len(pack_ids) + 1, np.int64), np.empty((3, count), np.int32)
    bounds = np.empty((2, entries), np.int32)
    plan = (*packed, positions, multiple, padding_segment)
    found = (np.empty(0, np.int64), token_offsets, tokens.size, capacity, whole)
    targets, num_wrong, _ = lay_segments(*plan, *found, wide, narrow, bounds[0], bounds[1])
    _, begins, sources = wide[: 3 * count].reshape(3, count)
    low, high = value_range(tokens, sources, narrow[1]) if is_wide and not num_wrong else (0, 0)
    if num_wrong or low < -(2**31) or high >= 2**31:
        return wrong
    block = np.empty((4, len(pack_ids) if width else 1, width or positions), np.int32)
    largest = assemble(tokens, sources, narrow[1], begins, pad_id, *block)
    if largest >= 2**31:
        return wrong
    rows = 2 if multiple > 1 else 1
    return True, wide, narrow, bounds[:rows], block, targets, longest, shortest, largest


def lay_trees(
    token_ids: Int32, positions: Int32, ends: Int32, segment_offsets: Int64, parents: Int32, begins: Int64,
    sizes: Int64, prefixes: Int64, bases: Int64, segment_of: Int64, width: int, input_ids: Int32,
    position_ids: Int32, subtree_end: Int32, forest_tokens: Int32,
) -> None:  # fmt: skip
    """Write each piece of a tree after the tokens that it repeats: those that its first token sees."""
    for begin, size, prefix, base in zip(begins, sizes, prefixes, bases):
        before = [k for k in range(begin) if begin < ends[k]]
        assert len(before) == prefix
        tokens = [*before, *range(begin, begin + size)]
        for at, token in enumerate(tokens):
            behind = [place for place, other in enumerate(tokens) if token <= other < ends[token]]
            input_ids[base + at], position_ids[base + at] = token_ids[token], positions[token]
            subtree_end[base + at] = base % width + behind[-1] + 1
            forest_tokens[base + at] = token
