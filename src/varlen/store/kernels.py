"""The kernel that reads pieces of token files; its oracle is in `tests/oracles/store.py`."""

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

# The C library's own, looked up by name, so that the compiled kernel can be cached on disk.
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
    """Read pieces of documents into one array; return -1, or the first piece that can't be read.

    Arrays: `shards`, `documents` (numbers within the shards), `starts` (first tokens within the documents) and
    `lengths` are int64 `[pieces]`. Of each shard, int64 `[shards]`: `files` are open files, -1 for none, -2 where
    nothing is to be read; `widths` are bytes of a value in the file, those of `values` or 2 for uint16; `offsets` are
    addresses of the documents' offsets. Pieces before `first` are already in `values`.
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
            at, rest, done = (begin[0] + starts[piece]) * widths[shard], length * widths[shard], 0
            while done < rest:
                got = _pread(files[shard], target + done, rest - done, at + done)
                if got <= 0:
                    return piece
                done += got
            if is_narrow:
                for number in range(length):
                    values[to + number] = narrow[number]
        to += length
    return -1
