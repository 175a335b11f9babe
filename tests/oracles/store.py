"""The kernel of this room in plain Python, to be read and believed; `kernels.py` must give the same."""

import ctypes
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Values = NDArray[Any]


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
    """Read pieces of documents end to end into an array.

    Args:
        shards: int64 `[pieces]`.
        documents: int64 `[pieces]`: numbers within the shards.
        starts: int64 `[pieces]`: the first token of each piece within its document.
        lengths: int64 `[pieces]`: tokens of each, none beyond its document.
        files: int64 `[shards]`: open files; -1 for none, -2 where nothing is to be read.
        widths: int64 `[shards]`: bytes of a value in the file: those of `values`, or 2 for uint16, which is widened.
        offsets: int64 `[shards]`: where in memory the int64 offsets of each shard's documents begin.
        first: pieces before it are there already.
        values: written.

    Returns:
        -1, or the first piece that can't be read: of a shard without a file, or because the file ends before or the
        system says so; why, it may be asked once more.
    """
    to = 0
    pieces = zip(shards.tolist(), documents.tolist(), starts.tolist(), lengths.tolist())
    for piece, (shard, document, start, length) in enumerate(pieces):
        if piece >= first and length and files[shard] != -2:
            if files[shard] < 0:
                return piece
            begin = ctypes.c_int64.from_address(int(offsets[shard]) + 8 * document).value
            width = int(widths[shard])
            try:
                content = os.pread(int(files[shard]), length * width, (begin + start) * width)
            except OSError:
                return piece
            if len(content) < length * width:
                return piece
            dtype = values.dtype if width == values.itemsize else np.dtype(np.uint16)
            values[to : to + length] = np.frombuffer(content, dtype)
        to += length
    return -1
