"""Kernels that write given labels, masks and other per-token columns, compiled by numba; see `kernels.py`."""

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
Values = NDArray[Any]

IGNORE = -100


@compiled(in_python=in_python.mask_labels)
def mask_labels(
    values: Values,
    value_sources: Int64,
    mask: Values,
    mask_sources: Int64,
    lengths: Int32,
    places: Int64,
    labels: Int32,
    targets: Int32,
) -> None:
    """Write given labels where the mask is not 0, -100 elsewhere and at every segment's first token.

    Args:
        values: any integers, one-dimensional: the labels.
        value_sources: int64 `[segments]`: index of each segment's first label.
        mask: any numbers, one-dimensional; of size 0 where nothing is masked.
        mask_sources: int64 `[segments]`, read only with a mask.
        lengths: int32 `[segments]`.
        places: int64 `[segments]`: first position of each segment.
        labels: int32, one-dimensional, written where segments stand.
        targets: int32 `[segments]`, written: labels other than -100.
    """
    for segment in range(lengths.size):
        length = np.int64(lengths[segment])
        source = values[value_sources[segment] : value_sources[segment] + length]
        written = labels[places[segment] : places[segment] + length]
        if mask.size:
            kept = mask[mask_sources[segment] : mask_sources[segment] + length]
            for index in range(length):
                written[index] = np.int32(source[index]) if kept[index] else IGNORE
        else:
            for index in range(length):
                written[index] = np.int32(source[index])
        written[0] = IGNORE
        count = 0
        for index in range(length):
            count += written[index] != IGNORE
        targets[segment] = count


@compiled(in_python=in_python.copy_column)
def copy_column(
    values: Values, sources: Int64, lengths: Int32, places: Int64, pad: Values, column: Values
) -> None:
    """Fill any other per-token column, `pad[0]` at padding."""
    done = 0
    for segment in range(sources.size + 1):
        at = places[segment] if segment < sources.size else column.size
        column[done:at] = pad[0]
        if segment == sources.size:
            break
        length = np.int64(lengths[segment])
        source = values[sources[segment] : sources[segment] + length]
        written = column[at : at + length]
        for index in range(length):
            written[index] = source[index]
        done = at + length
