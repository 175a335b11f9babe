"""The kernel of this room in plain Python, to be read and believed; `kernels.py` must give the same."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Values = NDArray[Any]


def read_pieces(
    files: Int32, places: Int64, sizes: Int64, widths: Int64, targets: Int64, values: Values
) -> int:
    """Read pieces of files into an array, one after the other.

    Args:
        files: int32 `[pieces]`: open files.
        places: int64 `[pieces]`: the byte at which each piece begins.
        sizes: int64 `[pieces]`: values of each.
        widths: int64 `[pieces]`: bytes of a value in the file: those of `values`, or 2 for uint16 that is widened.
        targets: int64 `[pieces]`: where each piece goes; pieces don't overlap.
        values: written.

    Returns:
        -1, or the first piece that can't be read, because its file ends before or the system says so; why, it may be
        asked once more.
    """
    pieces = zip(files.tolist(), places.tolist(), sizes.tolist(), widths.tolist(), targets.tolist())
    for piece, (file, place, size, width, target) in enumerate(pieces):
        try:
            content = os.pread(file, size * width, place)
        except OSError:
            return piece
        if len(content) < size * width:
            return piece
        dtype = values.dtype if width == values.itemsize else np.dtype(np.uint16)
        values[target : target + size] = np.frombuffer(content, dtype)
    return -1
