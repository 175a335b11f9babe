"""The kernel that reads pieces of token files, compiled by numba; what it does stands in `reference.py`."""

# Kernels mix Python and numpy integers, which numba types by itself.
# mypy: disable-error-code="assignment,return-value,no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from varlen.jit import compiled

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Values = NDArray[Any]

# The system's own, found by its name, so that the compiled kernel can be kept on disk.
_pread: Any = types.ExternalFunction("pread", types.intp(types.int32, types.intp, types.intp, types.int64))


@compiled
def read_pieces(
    files: Int32, places: Int64, sizes: Int64, widths: Int64, targets: Int64, values: Values
) -> int:
    """Read pieces of files into an array; see the reference.

    Args:
        files: int32 `[pieces]`: open files.
        places: int64 `[pieces]`: the byte at which each piece begins.
        sizes: int64 `[pieces]`: values of each.
        widths: int64 `[pieces]`: bytes of a value in the file, those of `values` or 2.
        targets: int64 `[pieces]`: where each piece goes.
        values: written.

    Returns:
        -1, or the first piece that can't be read.
    """
    longest = 0
    for piece in range(sizes.size):
        if widths[piece] != values.itemsize:
            longest = max(longest, sizes[piece])
    narrow = np.empty(longest, np.uint16)
    for piece in range(sizes.size):
        is_narrow = widths[piece] != values.itemsize
        to = narrow.ctypes.data if is_narrow else values.ctypes.data + targets[piece] * values.itemsize
        rest, done = sizes[piece] * widths[piece], 0
        while done < rest:
            got = _pread(files[piece], to + done, rest - done, places[piece] + done)
            if got <= 0:
                return piece
            done += got
        if is_narrow:
            first = targets[piece]
            for number in range(sizes[piece]):
                values[first + number] = narrow[number]
    return -1
