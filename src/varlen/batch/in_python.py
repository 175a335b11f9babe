"""NumPy versions of kernels, for runs without compilation, where they are faster than the kernels' own source.

Arguments and results are those of the kernels.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Values = NDArray[Any]

IGNORE = -100


def value_range(values: Values, sources: Int64, lengths: Int32) -> tuple[int, int]:
    """Return the smallest and largest value of all segments; 0 and -1 if there are none."""
    parts = [values[source : source + length].tolist() for source, length in zip(sources, lengths)]
    flat = [value for part in parts for value in part]
    return (min(flat), max(flat)) if flat else (0, -1)


def assemble(
    tokens: Values,
    sources: Int64,
    lengths: Int32,
    begins: Int64,
    pad_id: int,
    input_ids: Int32,
    labels: Int32,
    position_ids: Int32,
    segment_ids: Int32,
) -> int:
    """Fill ids, labels (every token but a segment's first), positions and segment ids.

    Returns the largest id as `kernels.assemble` does: as if it were unsigned.
    """
    outputs = (input_ids, labels, position_ids, segment_ids)
    for output, padding in zip(outputs, (pad_id, IGNORE, 0, -1)):
        output[...] = padding
    ids, targets, positions, owners = (output.reshape(-1) for output in outputs)
    rows = begins // max(input_ids.shape[1], 1)
    largest = -1
    for segment, (source, length, begin) in enumerate(zip(sources, lengths, begins)):
        here = slice(begin, begin + length)
        ids[here] = targets[here] = tokens[source : source + length]
        targets[begin] = IGNORE
        positions[here] = range(length)
        owners[here] = np.count_nonzero(rows[:segment] == rows[segment])
        largest = max(largest, int(ids[here].view(np.uint32).max()))
    return largest


def mask_labels(
    values: Values,
    value_sources: Int64,
    mask: Values,
    mask_sources: Int64,
    lengths: Int32,
    begins: Int64,
    labels: Int32,
    targets: Int32,
) -> None:
    """Write given labels where the mask is not 0, -100 elsewhere and at every segment's first token."""
    for segment, (length, begin) in enumerate(zip(lengths.tolist(), begins.tolist())):
        given = values[value_sources[segment] : value_sources[segment] + length].tolist()
        kept = [True] * length
        if mask.size:
            kept = mask[mask_sources[segment] : mask_sources[segment] + length].astype(bool).tolist()
        written = [value if keep else IGNORE for value, keep in zip(given, kept)]
        written[0] = IGNORE
        labels[begin : begin + length] = written
        targets[segment] = sum(value != IGNORE for value in written)


def copy_column(
    values: Values, sources: Int64, lengths: Int32, begins: Int64, pad: Values, column: Values
) -> None:
    """Fill any other per-token column, `pad[0]` at padding."""
    column[:] = pad[0]
    for source, length, begin in zip(sources, lengths, begins):
        column[begin : begin + length] = values[source : source + length]


def fill_flat_row(
    ids: Values,
    targets: Values,
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
    """Write labels, positions, segments and boundaries of documents end to end, then the padding."""
    done, width = ids.size, input_ids.size
    lengths = [size for size in sizes.tolist() if size]
    bounds = [0, *itertools.accumulate(lengths), *range(done + padding_segment, width, padding_segment)]
    bounds += [width] * (width > done)
    if with_ids:
        input_ids[:done] = ids
    if with_labels:
        labels[:done] = targets
    input_ids[done:], labels[done:] = pad_id, IGNORE
    ends[: len(bounds)] = bounds
    for number, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        if begin < done:
            labels[begin] = separator
        if position_ids.size:
            position_ids[begin:end] = [
                first_position + (i if begin < done else 0) for i in range(end - begin)
            ]
        if owners.size:
            owners[begin:end] = number
    return len(bounds) - 1, max(np.diff(bounds).tolist(), default=0), int((ids < 0).any())
