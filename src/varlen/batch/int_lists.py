"""Lists of Python ints end to end as int32, the slowest part of a batch made from lists."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.types import IntArray

_UNSIGNED = "I"
"""How `array` calls unsigned numbers of 32 bits."""


def read_int_lists(parts: Sequence[Any], offsets: IntArray) -> npt.NDArray[np.int32] | None:
    """Lists of ints end to end, their offsets written, or None where they hold anything else.

    Converting Python ints one by one costs more than all the rest of a batch. An array of unsigned numbers reads
    a list in about half of struct's time, and that takes half of `np.array`'s. A list with a negative int, as
    labels have them, is left to struct.
    """
    tokens = array(_UNSIGNED)
    if tokens.itemsize != 4:
        return None
    for part in parts:
        if part and type(part[0]) is bool:
            return None
        try:
            tokens.fromlist(part)  # all of it or nothing
        except OverflowError:
            try:
                tokens.frombytes(struct.pack(f"{len(part)}i", *part))
            except (struct.error, TypeError, OverflowError):
                return None
        except TypeError:
            return None
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    if not tokens:
        return np.empty(0, np.int32)
    read = np.frombuffer(tokens, np.int32)
    return None if _is_too_large(read, parts, offsets) else read


def _is_too_large(read: npt.NDArray[np.int32], parts: Sequence[Any], offsets: IntArray) -> bool:
    """Whether a number came out negative because it takes all 32 bits."""
    if int(read.min()) >= 0:
        return False
    negative = np.flatnonzero(read < 0)
    owners = np.searchsorted(offsets, negative, side="right") - 1
    # The sign of one of them tells: struct wrote all of its list, or the array did.
    _, firsts = np.unique(owners, return_index=True)
    return any(
        parts[owner][at - int(offsets[owner])] >= 0
        for owner, at in zip(owners[firsts].tolist(), negative[firsts].tolist())
    )
