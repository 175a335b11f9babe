"""Validate lengths, with messages that name what was passed by mistake."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.arguments import LARGEST
from varlen.errors import LengthsError
from varlen.types import Int32Array


def as_lengths(lengths: npt.ArrayLike) -> Int32Array:
    """Return validated lengths as contiguous int32, without a copy where possible; floats pass if all are whole."""
    if isinstance(lengths, Iterator):
        raise _lengths_error(lengths, "it gives its values once; pass list(lengths)")
    array = _as_array(lengths)
    if array.ndim != 1:
        out = "; of padded rows, pass attention_mask.sum(1)" if array.ndim > 1 else ""
        raise _lengths_error(lengths, f"it has the shape {array.shape}{out}")
    if array.size > LARGEST:
        raise LengthsError(
            f"{array.size:,} documents are more than one call takes ({LARGEST:,}); pack them in parts"
        )
    if array.dtype.kind == "f":
        array = array.astype(np.float64)  # a float32 can't tell 2^31 - 1 from 2^31
        _refuse(array, ~np.isfinite(array), "is not a finite number")
        _refuse(array, array != np.floor(array), "is not a whole number")
    elif array.dtype.kind not in "iu":
        if (documents := _documents_error(lengths) or _documents_error(array.tolist())) is not None:
            raise documents
        whole = [isinstance(value, Integral) and not isinstance(value, bool) for value in array.tolist()]
        _refuse(array, ~np.array(whole, np.bool_), "is not a whole number")
    if array.size:
        if array.min() < 0:
            _refuse(array, array < 0, "is negative")
        if array.max() > LARGEST:
            _refuse(array, array > LARGEST, f"is over the longest possible document of {LARGEST:,} tokens")
    return np.ascontiguousarray(array, dtype=np.int32)


def _as_array(lengths: npt.ArrayLike) -> npt.NDArray[Any]:
    """Convert to numpy; an empty array counts as integers."""
    try:
        array = np.asarray(lengths)
    except (ValueError, TypeError, OverflowError, RuntimeError):
        if getattr(lengths, "is_nested", False):
            raise _lengths_error(lengths, "it is nested; pass [len(d) for d in lengths.unbind()]") from None
        raise _lengths_error(lengths, "numpy can't read it; for a GPU tensor, pass lengths.cpu()") from None
    return array.astype(np.int32) if array.size == 0 and array.ndim == 1 else array


_FOR_DOCUMENTS = (
    "pass [len(d) for d in documents] here, and the documents to vl.collate; or give them to vl.PackedLoader, which "
    "packs and collates by itself"
)
_FOR_TEXTS = (
    "texts become tokens first: vl.PackedLoader(rows, tokenizer) or varlen pack tokenizes and packs them"
)


def _lengths_error(lengths: object, why: str) -> LengthsError:
    """Return the error for input that isn't one number per document."""
    return _documents_error(lengths) or LengthsError(
        f"lengths must be a list or array of one whole number per document; a {_kind(lengths)} was given, and {why}"
    )


def _documents_error(data: object) -> LengthsError | None:
    """Return the error for documents passed in place of their lengths, or None if they aren't documents."""
    if isinstance(data, str | bytes | PathLike):
        return LengthsError(
            f"lengths are one whole number per document, and {str(data)[:60]!r} is a text; {_FOR_TEXTS}"
        )
    if isinstance(data, Mapping) or hasattr(data, "column_names") or hasattr(data, "columns"):
        return LengthsError(
            f"lengths are one whole number per document, and a {_kind(data)} of columns was given; {_FOR_DOCUMENTS}"
        )
    if isinstance(data, tuple) and len(data) == 2 and all(map(_is_document, data)) and _are_offsets(*data):
        return LengthsError(
            "lengths are one whole number per document, and (tokens, offsets) was given; pass np.diff(offsets) here, "
            "and the pair to vl.collate"
        )
    if not isinstance(data, Sequence):
        return None
    which = [index for index, entry in enumerate(data) if isinstance(entry, Mapping) or _is_document(entry)]
    if 2 * len(which) <= len(data):  # mostly numbers: a few wrong entries are reported as such
        return None
    first = data[which[0]]
    is_text = isinstance(first, str | bytes | Mapping) and not (
        isinstance(first, Mapping) and "input_ids" in first
    )
    what = f"a list of {len(first):,}" if isinstance(first, Sequence) and not is_text else f"a {_kind(first)}"
    return LengthsError(
        f"lengths are one whole number per document, and documents were given: entry {which[0]:,} is {what} "
        f"({len(which):,} of {len(data):,} are no numbers); {_FOR_TEXTS if is_text else _FOR_DOCUMENTS}"
    )


def _is_document(value: object) -> bool:
    """Whether a value is a document: a list, a text, or an array with a dimension."""
    if isinstance(value, str | bytes):
        return not value.strip().isdigit()  # "12" is a wrong length, not a document
    return isinstance(value, list | tuple) or (hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0)


def _are_offsets(tokens: Any, offsets: Any) -> bool:
    """Whether `offsets` are the boundaries of documents in `tokens`."""
    ends = [offsets[0], offsets[-1]] if len(offsets) else []
    return len(offsets) > 1 and all(getattr(end, "ndim", 0) == 0 for end in ends) and ends == [0, len(tokens)]


def _kind(given: object) -> str:
    return type(given).__name__


def _refuse(array: npt.NDArray[Any], wrong: npt.NDArray[np.bool_], what: str) -> None:
    """Raise if any length is wrong, naming the first."""
    if wrong.any():
        first = int(np.argmax(wrong))
        raise LengthsError(
            f"length {array[first : first + 1].tolist()[0]!r} of document {first:,} {what} "
            f"({int(wrong.sum()):,} of {array.size:,} lengths are wrong in this way)"
        )
