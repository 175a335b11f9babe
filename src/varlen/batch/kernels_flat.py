"""The kernel that fills one flat row of whole documents, compiled by numba; see `kernels.py`."""

# Kernels mix Python and numpy integers, which numba types by itself.
# mypy: disable-error-code="assignment,return-value,no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from varlen.batch import in_python
from varlen.jit import compiled

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Whole = NDArray[Any]

IGNORE = -100


@compiled(in_python=in_python.fill_flat_row)
def fill_flat_row(
    ids: Whole,
    targets: Whole,
    sizes: Int64,
    separator: int,
    first_position: int,
    pad_id: int,
    padding_segment: int,
    with_ids: bool,
    with_labels: bool,
    input_ids: Int64,
    labels: Int64,
    position_ids: Int64,
    owners: Int32,
    ends: Int32,
) -> tuple[int, int, int]:
    """Write labels, positions, the number of each segment and the boundaries of documents end to end, then padding.

    Args:
        ids: int32 or int64 `[tokens]`.
        targets: int32 or int64 `[tokens]`; the ids where nobody gave labels.
        sizes: int64 `[documents]`, none below 0, that add up to the tokens.
        separator: the first label of every document.
        first_position: position of every document's first token, and at padding.
        pad_id: value of the ids at padding.
        padding_segment: most positions in one segment of padding.
        with_ids: write the ids; else they stand there.
        with_labels: write the labels; else they stand there, their separators apart.
        input_ids: int64 `[width]`.
        labels: int64 `[width]`.
        position_ids: int64 `[width]`, written; of size 0 where nobody asked for it.
        owners: int32 `[width]`, written: 0 for the first segment; of size 0 where nobody asked for it.
        ends: int32, written: where each segment ends, from 0; of a size that is enough for all.

    Returns:
        Segments, the longest of them, padding included, and whether an id is below 0.
    """
    tokens, width = ids.size, input_ids.size
    # Plain loops over whole arrays run at the speed of memory; a loop a document takes half as long again.
    if with_ids:
        for index in range(tokens):
            input_ids[index] = ids[index]
    if with_labels:
        for index in range(tokens):
            labels[index] = targets[index]
    bits = np.int64(0)  # the sign of all ids is that of any
    begin, segments, longest = 0, 0, 0
    ends[0] = 0
    for size in sizes:
        if size == 0:
            continue
        labels[begin] = separator
        if position_ids.size:
            positions, own = position_ids[begin : begin + size], ids[begin : begin + size]
            for index in range(size):  # bound by what it writes, so that it reads for nothing
                positions[index] = first_position + index
                bits |= np.int64(own[index])
        else:
            for index in range(begin, begin + size):
                bits |= np.int64(ids[index])
        if owners.size:
            owners[begin : begin + size] = segments
        begin += size
        segments += 1
        ends[segments] = begin
        longest = max(longest, size)
    input_ids[tokens:] = pad_id
    labels[tokens:] = IGNORE
    if position_ids.size:
        position_ids[tokens:] = first_position
    while begin < width:
        end = min(begin + padding_segment, width)
        if owners.size:
            owners[begin:end] = segments
        longest = max(longest, end - begin)
        begin = end
        segments += 1
        ends[segments] = end
    return segments, longest, int(bits < 0)
