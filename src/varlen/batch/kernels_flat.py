"""The kernel that fills one flat row of whole documents, compiled by numba; see `kernels.py`."""

# Kernels mix Python and numpy integers, which numba types by itself.
# mypy: disable-error-code="assignment,return-value,no-any-return"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from varlen.jit import compiled

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

IGNORE = -100


@compiled
def fill_flat_row(
    offsets: Int64,
    separator: int,
    first_position: int,
    pad_id: int,
    padding_segment: int,
    is_labelled: bool,
    input_ids: Int64,
    labels: Int64,
    position_ids: Int64,
    owners: Int32,
) -> None:
    """Write labels, positions and the number of each segment beside ids that stand there, then the padding.

    Args:
        offsets: int64 `[documents + 1]`, rising: where each document stands; what follows the last is padding.
        separator: the first label of every document.
        first_position: position of every document's first token, and at padding.
        pad_id: value of the ids at padding.
        padding_segment: most positions in one segment of padding.
        is_labelled: the labels stand there too; else they are the ids.
        input_ids: int64 `[width]`; the padding is written.
        labels: int64 `[width]`, written.
        position_ids: int64 `[width]`, written; of size 0 where nobody asked for it.
        owners: int32 `[width]`, written: 0 for the first segment; of size 0 where nobody asked for it.
    """
    count = offsets.size - 1
    for document in range(count):
        begin, end = offsets[document], offsets[document + 1]
        if not is_labelled:
            for index in range(begin, end):
                labels[index] = input_ids[index]
        labels[begin] = separator
        if position_ids.size:
            positions = position_ids[begin:end]
            for index in range(end - begin):
                positions[index] = first_position + index
        if owners.size:
            owners[begin:end] = document
    done = offsets[count]
    input_ids[done:] = pad_id
    labels[done:] = IGNORE
    if position_ids.size:
        position_ids[done:] = first_position
    if owners.size:
        for index in range(done, owners.size):
            owners[index] = count + (index - done) // padding_segment
