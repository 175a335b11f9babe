"""Every kernel of these batches in plain Python: the specification that tests hold kernels against.

Written to be read. Arguments and results are those of the kernels.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Values = NDArray[Any]


def _documents(
    row: int, offsets: Int64, starts: Int64, document_offsets: Int64
) -> list[tuple[int, int, int]]:
    """Number, first stored token and inputs of each document of a row."""
    first, last = int(document_offsets[row]), int(document_offsets[row + 1])
    begin = int(offsets[row])
    bounds = [begin + int(start) for start in starts[first:last]] + [int(offsets[row + 1])]
    return [(first + n, bounds[n], bounds[n + 1] - bounds[n] - 1) for n in range(last - first)]


def measure_rows(
    input_ids: Values,
    loss_mask: Values,
    offsets: Int64,
    starts: Int64,
    document_offsets: Int64,
    given: Int64,
    keep_supervised: int,
    eos_id: int,
    lengths: Int64,
    used: Int64,
) -> tuple[int, int]:
    """Find each document's real inputs; returns the first row that is none or -1, and whether any is padded."""
    differs = False
    for row in range(len(offsets) - 1):
        begin, end = int(offsets[row]), int(offsets[row + 1])
        first, last = int(document_offsets[row]), int(document_offsets[row + 1])
        inside = 0 <= begin <= end <= min(len(input_ids), len(loss_mask))
        if not (inside and 0 <= first < last <= len(starts) and starts[first] == 0):
            return row, 0
        if (np.diff([*starts[first:last], end - begin]) < 1).any():
            return row, 0
        documents = _documents(row, offsets, starts, document_offsets)
        for document, place, size in documents:
            real = size
            if len(given):
                real = int(given[document])
            elif keep_supervised < 2:
                kept = input_ids[place : place + size] != eos_id
                if keep_supervised == 1:
                    kept = kept | (loss_mask[place : place + size] != 0)
                real = int(np.flatnonzero(kept)[-1]) + 1 if kept.any() else 0
            if not 0 <= real <= size:
                return row, 0
            lengths[document] = real
            differs = differs or real != size
        used[row] = sum(size for _, _, size in documents)
    return -1, int(differs)


def fill_rows(
    input_ids: Values,
    loss_mask: Values,
    offsets: Int64,
    starts: Int64,
    document_offsets: Int64,
    lengths: Int64,
    silent: Values,
    answer_only: int,
    eos_in_loss: int,
    eos_id: int,
    pad_id: int,
    tokens: Int64,
    labels: Int64,
    mask: Values,
    positions: Int64,
) -> None:
    """Write tokens, labels, loss mask and positions of checked rows; see the kernel for the arguments."""
    tokens[:], labels[:], mask[:], positions[:] = pad_id, pad_id, 0, 0
    for row in range(len(offsets) - 1):
        at = 0
        for document, place, size in _documents(row, offsets, starts, document_offsets):
            here, source = slice(at, at + size), slice(place, place + size)
            tokens[row, here] = input_ids[source]
            labels[row, here] = input_ids[place + 1 : place + size + 1]
            positions[row, here] = np.arange(size)
            trained = loss_mask[source] if answer_only else np.ones(size)
            counts = np.arange(size) < lengths[document]
            if not eos_in_loss:
                counts &= input_ids[source] != eos_id
            if len(silent) and silent[row]:
                counts[:] = False
            mask[row, here] = np.where(counts, trained, 0)
            at += size


def lay_boundaries(
    offsets: Int64,
    starts: Int64,
    document_offsets: Int64,
    lengths: Int64,
    width: int,
    tail: int,
    multiple: int,
    tail_is_real: int,
    most: int,
    logical: Int32,
    physical: Int32,
    counts: Int64,
    longest: Int64,
) -> None:
    """Write where documents and the padding behind them end; see the kernel for the arguments."""
    for row in range(len(offsets) - 1):
        reals, places = [0], [0]
        for document, _, size in _documents(row, offsets, starts, document_offsets):
            reals.append(reals[-1] + int(lengths[document]))
            places.append(places[-1] + size)
        gap = width - places[-1]
        if gap > 0:
            segments = max(1, min(-(-gap // tail) if tail else 1, most - len(places)))
            unit = -(-gap // segments)
            unit = -(-unit // multiple) * multiple
            while places[-1] < width:
                size = min(unit, width - places[-1])
                reals.append(reals[-1] + size * tail_is_real)
                places.append(places[-1] + size)
        counts[row], longest[row] = len(places), max(np.diff(places), default=0)
        repeats = logical.shape[1] - len(places)
        logical[row] = reals + reals[-1:] * repeats
        physical[row] = places + places[-1:] * repeats
