"""What may be packed: lengths and settings checked at the door, once, with sentences that say what is wrong."""

from __future__ import annotations

import operator
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.errors import LengthsError, SettingError
from varlen.types import Int32Array

LARGEST = 2**31 - 1
"""Longest document, largest capacity and most documents in one call: what an int32 holds."""


def as_lengths(lengths: npt.ArrayLike) -> Int32Array:
    """Return lengths as int32, checked.

    Args:
        lengths: `[num_documents]` whole numbers from 0 to 2^31 - 1: a list, numpy array, Arrow array or torch
            tensor. Floats pass if every one is whole.

    Returns:
        int32 `[num_documents]`, C-contiguous; the caller's own array where it is that already.

    Raises:
        LengthsError: names the first offender and how many there are.
    """
    array = _as_array(lengths)
    if array.ndim != 1:
        raise LengthsError(f"lengths must have one dimension, one number a document; got shape {array.shape}")
    if array.size > LARGEST:
        raise LengthsError(
            f"{array.size:,} documents are more than one call takes ({LARGEST:,}); pack them in parts"
        )
    if array.dtype.kind == "f":
        array = array.astype(np.float64)  # a float32 can't tell 2^31 - 1 from 2^31
        _refuse(array, ~np.isfinite(array), "is not a finite number")
        _refuse(array, array != np.floor(array), "is not a whole number")
    elif array.dtype.kind not in "iu":
        whole = [isinstance(value, Integral) and not isinstance(value, bool) for value in array.tolist()]
        _refuse(array, ~np.array(whole, np.bool_), "is not a whole number")
    if array.size:
        if array.min() < 0:
            _refuse(array, array < 0, "is negative")
        if array.max() > LARGEST:
            _refuse(array, array > LARGEST, f"is over the longest possible document of {LARGEST:,} tokens")
    return np.ascontiguousarray(array, dtype=np.int32)


def _as_array(lengths: npt.ArrayLike) -> npt.NDArray[Any]:
    """Whatever the caller has as an array; an empty one counts as integers."""
    try:
        array = np.asarray(lengths)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise LengthsError(f"lengths can't be read as one number a document: {error}") from None
    return array.astype(np.int32) if array.size == 0 and array.ndim == 1 else array


def _refuse(array: npt.NDArray[Any], wrong: npt.NDArray[np.bool_], what: str) -> None:
    """Raise for the first of the wrong lengths, if there is one."""
    if wrong.any():
        first = int(np.argmax(wrong))
        raise LengthsError(
            f"length {array[first : first + 1].tolist()[0]!r} of document {first:,} {what} "
            f"({int(wrong.sum()):,} of {array.size:,} lengths are wrong in this way)"
        )


def as_count(value: object, name: str, least: int = 1, most: int = LARGEST) -> int:
    """Return a setting as a whole number from `least` to `most`.

    Raises:
        SettingError: it is not a whole number, too small or too large.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise SettingError(f"{name} must be a whole number of at least {least}, got {value!r}") from None
    if isinstance(value, bool) or not least <= number <= most:
        raise SettingError(f"{name} must be a whole number from {least} to {most:,}, got {value!r}")
    return number


def check_multiple(capacity: int, multiple: int, name: str) -> None:
    """Require that a capacity is a multiple, or name the nearest that are.

    Raises:
        SettingError: it isn't.
    """
    if capacity % multiple:
        below, above = capacity // multiple * multiple, (capacity // multiple + 1) * multiple
        near = f"{below:,} or {above:,}" if below else f"{above:,}"
        raise SettingError(
            f"capacity {capacity:,} is not a multiple of {name} {multiple:,}; the nearest: {near}"
        )
