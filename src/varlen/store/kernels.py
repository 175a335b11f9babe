"""The kernel that reads pieces of token files, whose oracle is in `tests/oracles/store.py`."""

# Kernels mix Python and numpy integers, which numba types by itself.
# mypy: disable-error-code="assignment,return-value,no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from varlen.jit import compiled

Int64 = NDArray[np.int64]
Values = NDArray[Any]

# The system's own, found by their names, so that the compiled kernel can be kept on disk.
_pread: Any = types.ExternalFunction("pread", types.intp(types.int32, types.intp, types.intp, types.int64))
_memcpy: Any = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))


@compiled
def read_pieces(
    shards: Int64,
    documents: Int64,
    starts: Int64,
    lengths: Int64,
    files: Int64,
    widths: Int64,
    offsets: Int64,
    first: int,
    values: Values,
) -> int:
    """Read pieces of documents end to end into an array; the oracle says how.

    Args:
        shards: int64 `[pieces]`.
        documents: int64 `[pieces]`: numbers within the shards.
        starts: int64 `[pieces]`: the first token of each piece within its document.
        lengths: int64 `[pieces]`: tokens of each.
        files: int64 `[shards]`: open files; -1 for none, -2 where nothing is to be read.
        widths: int64 `[shards]`: bytes of a value in the file: those of `values`, or 2 for uint16.
        offsets: int64 `[shards]`: where in memory the offsets of each shard's documents begin.
        first: pieces before it are there already.
        values: written.

    Returns:
        -1, or the first piece that can't be read.
    """
    narrow = np.empty(0, np.uint16)
    begin = np.zeros(1, np.int64)
    to = 0
    for piece in range(shards.size):
        shard, length = shards[piece], lengths[piece]
        if piece >= first and length > 0 and files[shard] != -2:
            if files[shard] < 0:
                return piece
            _memcpy(begin.ctypes.data, offsets[shard] + 8 * documents[piece], 8)
            is_narrow = widths[shard] != values.itemsize
            if is_narrow and narrow.size < length:
                narrow = np.empty(2 * length, np.uint16)
            target = narrow.ctypes.data if is_narrow else values.ctypes.data + to * values.itemsize
            place, rest, done = (begin[0] + starts[piece]) * widths[shard], length * widths[shard], 0
            while done < rest:
                got = _pread(files[shard], target + done, rest - done, place + done)
                if got <= 0:
                    return piece
                done += got
            if is_narrow:
                for number in range(length):
                    values[to + number] = narrow[number]
        to += length
    return -1
