"""Documents in whatever form the caller has them, as flat values and offsets.

A caller may hold (values, offsets), an Arrow list array, or a list of lists, arrays or tensors. Arrow and flat
arrays are used where they lie; of a list, only the documents that a batch needs are converted.
"""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen import jit
from varlen.errors import DocumentsError
from varlen.types import IntArray

Documents: TypeAlias = Any
"""A list of lists, arrays or tensors; a tuple (values, offsets); or an Arrow list array, chunked or not."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """Values of many documents end to end."""

    values: npt.NDArray[Any]
    """`[num_values]`, one-dimensional and contiguous."""
    offsets: npt.NDArray[Any]
    """int32 or int64 `[num_documents + 1]`: document d is `values[offsets[d]:offsets[d + 1]]`."""


def count_documents(documents: Documents, name: str) -> int:
    """Return how many documents there are, without converting them.

    Raises:
        DocumentsError: not a form that holds documents.
    """
    if isinstance(documents, Ragged):
        return len(documents.offsets) - 1
    if isinstance(documents, tuple):
        if len(documents) != 2 or np.ndim(documents[1]) != 1 or len(documents[1]) == 0:
            raise DocumentsError(
                f"{name} as a tuple must be (values, offsets) with one offset more than documents; got "
                f"{len(documents)} parts"
            )
        return len(documents[1]) - 1
    if isinstance(documents, (str, bytes)) or not hasattr(documents, "__len__"):
        raise DocumentsError(
            f"{name} must be a list of arrays, (values, offsets) or an Arrow list array; "
            f"got {type(documents).__name__}"
        )
    return len(documents)


def as_ragged(documents: Documents, wanted: IntArray, name: str) -> tuple[Ragged, IntArray]:
    """Return documents as flat values, and where each wanted one stands in them.

    Args:
        documents: any of the forms above.
        wanted: int64 `[segments]`: documents that the batch needs, in range; may repeat.
        name: what to call them in errors.

    Returns:
        The values, and int64 `[segments]`, the index of each wanted document in their offsets.

    Raises:
        DocumentsError: values that aren't numbers, or a form that holds no documents.
    """
    if isinstance(documents, Ragged):
        return documents, wanted
    if isinstance(documents, tuple):
        return _flat(documents[0], documents[1], name=name), wanted
    if hasattr(documents, "combine_chunks") or hasattr(documents, "value_lengths"):
        if getattr(documents, "num_chunks", 1) != 1:  # joining all chunks would copy all documents
            return _from_arrow(documents.take(wanted).combine_chunks(), name), np.arange(wanted.size)
        return _from_arrow(documents, name), wanted
    if wanted.size > 1 and not (wanted[1:] > wanted[:-1]).all():
        needed, places = np.unique(wanted, return_inverse=True)
    else:
        needed, places = wanted, np.arange(wanted.size)
    return _from_list([documents[index] for index in needed.tolist()], name), places


def _flat(values: Any, offsets: Any, *, name: str) -> Ragged:
    """Values and offsets as given, checked for their form; each document is checked where it is used."""
    array = np.asarray(values)
    bounds = np.asarray(offsets)
    if array.ndim != 1 or bounds.dtype.kind not in "iu":
        raise DocumentsError(
            f"{name} as (values, offsets) need one-dimensional values and whole-number offsets; got values of "
            f"shape {array.shape} and offsets of dtype {bounds.dtype}"
        )
    if bounds.dtype not in (np.int32, np.int64):
        bounds = bounds.astype(np.int64)
    return Ragged(np.ascontiguousarray(array), np.ascontiguousarray(bounds))


def _from_arrow(array: Any, name: str) -> Ragged:
    """An Arrow list array of at most one chunk: its own buffers, no copy."""
    if hasattr(array, "num_chunks"):
        array = array.chunk(0) if array.num_chunks else array.combine_chunks()
    kind = str(array.type)
    if not kind.startswith(("list<", "large_list<", "fixed_size_list<")):
        raise DocumentsError(f"{name} as an Arrow array must be of a list type, got {kind}")
    if array.null_count:
        raise DocumentsError(
            f"{name} hold {array.null_count:,} nulls in place of documents; drop those rows first"
        )
    if kind.startswith("fixed_size_list"):
        size = array.type.list_size
        offsets = np.arange(len(array) + 1, dtype=np.int64) * size
        values = array.flatten()
    else:
        offsets = array.offsets.to_numpy(zero_copy_only=False)
        values = array.values
    if values.null_count:
        raise DocumentsError(
            f"{name} hold {values.null_count:,} nulls in place of values; fill or drop them first"
        )
    return _flat(values.to_numpy(zero_copy_only=False), offsets, name=name)


def _from_list(parts: list[Any], name: str) -> Ragged:
    """Python lists, numpy arrays, tensors and other sequences, each a document, end to end."""
    offsets = np.zeros(len(parts) + 1, np.int64)
    if not parts:
        return Ragged(np.empty(0, np.int32), offsets)
    if all(type(part) is list for part in parts):
        read = _read_int_lists(parts, offsets)
        if read is not None:
            return Ragged(read, offsets)
    arrays = [_as_document(part, index, name) for index, part in enumerate(parts)]
    np.cumsum([array.size for array in arrays], out=offsets[1:])
    filled = [array for array in arrays if array.size] or arrays[:1]
    return Ragged(np.concatenate(filled), offsets)


def _read_int_lists(parts: list[list[int]], offsets: IntArray) -> npt.NDArray[np.int32] | None:
    """Lists of ints by way of marshal, or None where they hold anything else.

    Converting Python ints one by one costs more than all the rest of a batch. marshal writes a list of them in
    one C loop, five bytes each, twice as fast as any conversion to an array (benchmarks: collating).
    """
    try:
        data = np.frombuffer(marshal.dumps(parts, 2), np.uint8)
    except ValueError:
        return None
    tokens = np.empty(sum(map(len, parts)), np.int32)
    read = jit.kernel("varlen.batch", "kernels", "read_lists")
    return tokens if read(data, 5, tokens, offsets) else None


def _as_document(part: Any, index: int, name: str) -> npt.NDArray[Any]:
    """One document of a list as an array."""
    try:
        array = np.asarray(part)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise DocumentsError(f"{name}: entry {index:,} can't be read as an array: {error}") from None
    if array.ndim != 1:
        raise DocumentsError(f"{name}: entry {index:,} must have one dimension, got shape {array.shape}")
    return array if array.size else array.astype(np.int32)


def check_integers(values: npt.NDArray[Any], name: str) -> None:
    """Require whole numbers.

    Raises:
        DocumentsError: floats, booleans, text or objects.
    """
    if values.dtype.kind not in "iu":
        raise DocumentsError(f"{name} must be whole numbers, got dtype {values.dtype}")


def as_sequence(values: Sequence[int] | npt.ArrayLike) -> IntArray:
    """Return pack numbers as int64, one-dimensional.

    Raises:
        DocumentsError: not whole numbers.
    """
    array = np.atleast_1d(np.asarray(values))
    if array.size and (array.dtype.kind not in "iu" or array.ndim != 1):
        raise DocumentsError(
            f"pack_ids must be whole numbers in one dimension, got {array.dtype} {array.shape}"
        )
    return array.astype(np.int64)
