"""Convert documents to flat values and offsets.

Documents can be (values, offsets), an Arrow list array, or a list of lists, arrays or tensors. Arrow and flat arrays
are used without a copy; of a list, only the documents that a batch needs are converted.
"""

from __future__ import annotations

import struct
import sys
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen.errors import DocumentsError
from varlen.types import IntArray

Documents: TypeAlias = Any
"""A list of lists, arrays or tensors; a tuple (values, offsets); or an Arrow list array, chunked or not."""


_ARROW_LISTS = {"ListArray", "LargeListArray", "FixedSizeListArray", "ListViewArray", "LargeListViewArray"}


@dataclass(frozen=True, slots=True)
class Ragged:
    """Values of many documents end to end."""

    values: npt.NDArray[Any]
    """`[num_values]`, one-dimensional and contiguous."""
    offsets: IntArray
    """int64 or int32 `[num_documents + 1]`: document d is `values[offsets[d]:offsets[d + 1]]`."""


_FLAT: dict[int, tuple[weakref.ref[Any], Ragged]] = {}
"""Flat values of Arrow arrays, by `id`, until the array is freed. Arrow arrays never change, and converting one takes
much of the time of a small batch."""


def count_documents(documents: Documents, name: str) -> int:
    """Return how many documents there are, without converting them."""
    if isinstance(documents, tuple):
        if len(documents) != 2 or np.ndim(documents[1]) != 1 or len(documents[1]) == 0:
            raise DocumentsError(
                f"{name} as a tuple must be (values, offsets) with one offset more than documents; got "
                f"{len(documents)} parts"
            )
        return len(documents[1]) - 1
    if (
        isinstance(documents, (str, bytes, set))
        or hasattr(documents, "keys")
        or not hasattr(documents, "__len__")
    ):
        raise DocumentsError(
            f"{name} must be a list of arrays, (values, offsets) or an Arrow list array; "
            f"got {type(documents).__name__}"
        )
    return len(documents)


def is_flat(values: Any) -> bool:
    """Return whether these are values of all documents end to end, without offsets of their own."""
    if isinstance(values, tuple) or not hasattr(values, "__len__"):
        return False
    if _is_arrow(values):
        return "list" not in str(values.type)
    if hasattr(values, "ndim") and hasattr(values, "dtype"):
        return bool(values.ndim == 1) and str(values.dtype) != "object"
    return (
        isinstance(values, Sequence) and len(values) > 0 and isinstance(values[0], int | float | np.generic)
    )


def _is_arrow(values: Any) -> bool:
    """Whether this is an Arrow array, chunked or not."""
    return hasattr(values, "null_count") and hasattr(values, "type")


def as_flat(documents: Documents, name: str) -> Ragged | None:
    """Return documents that are flat values already, or None if they must be converted."""
    if isinstance(documents, tuple):
        return _flat(documents[0], documents[1], name=name) if len(documents) == 2 else None
    seen = _FLAT.get(id(documents))
    if seen is not None and seen[0]() is documents:
        return seen[1]
    if not _is_arrow(documents) or getattr(documents, "num_chunks", 1) != 1:
        return None
    key = id(documents)
    flat = _from_arrow(documents.chunk(0) if hasattr(documents, "chunks") else documents, name)
    _FLAT[key] = weakref.ref(documents, lambda _: _FLAT.pop(key, None)), flat
    return flat


def as_ragged(
    documents: Documents, num_documents: int, wanted: Callable[[], IntArray], name: str
) -> tuple[Ragged, IntArray | None]:
    """Return documents as flat values, and the row of each wanted document in their offsets.

    The rows are None where they equal the documents' numbers. `wanted` returns the documents that the batch needs,
    perhaps repeated, and is called only if documents must be converted.
    """
    count = count_documents(documents, name)
    if count != num_documents:
        raise DocumentsError(
            f"{name}: {count:,} documents given, but {num_documents:,} lengths were packed; "
            "pass all documents, in the order of the lengths"
        )
    flat = as_flat(documents, name)
    if flat is not None:
        return flat, None
    needed = wanted()
    rows = np.arange(needed.size)
    if needed.size > 1 and not (needed[1:] > needed[:-1]).all():
        needed, rows = np.unique(needed, return_inverse=True)
    if _is_arrow(documents):
        parts = _from_chunks(documents, needed, name)
        if not parts and documents.num_chunks:  # an empty batch still needs the dtype of a chunk
            return Ragged(_from_arrow(documents.chunk(0), name).values[:0], np.zeros(1, np.int64)), rows
        return _from_list(parts, name), rows
    if not needed.size:  # likewise, of a document
        filled = [number for number, part in enumerate(documents) if len(part)][:1]
        needed = np.array(filled, np.int64)
    return _from_list([documents[index] for index in needed.tolist()], name), rows


def _flat(values: Any, offsets: Any, *, name: str) -> Ragged:
    """Check the form of values and offsets; each document is checked where it is used."""
    if _is_plain(values) and _is_plain(offsets) and offsets.dtype in (np.int64, np.int32):
        return Ragged(values, offsets)
    if _is_arrow(values) and values.null_count:
        raise DocumentsError(
            f"{name} hold {values.null_count:,} nulls in place of values; fill or drop them first"
        )
    try:
        array, bounds = np.asarray(values), np.asarray(offsets)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise DocumentsError(f"{name} can't be read as arrays of values and offsets: {error}") from None
    if array.ndim != 1 or bounds.ndim != 1 or bounds.dtype.kind not in "iu":
        raise DocumentsError(
            f"{name} as (values, offsets) need one-dimensional values and whole-number offsets; got values of "
            f"shape {array.shape} and offsets {bounds.dtype} of shape {bounds.shape}"
        )
    # Arrow's offsets aren't converted, since they may be those of a whole data set.
    narrow = bounds.dtype == np.int32
    return Ragged(_native(array), np.ascontiguousarray(bounds, dtype=np.int32 if narrow else np.int64))


def _is_plain(values: Any) -> bool:
    """Whether kernels can read this array without conversion."""
    return (
        type(values) is np.ndarray
        and values.ndim == 1
        and values.flags.c_contiguous
        and values.dtype.isnative
    )


def _native(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a contiguous array in this machine's byte order, without a copy where possible."""
    if _is_plain(array):
        return array
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))


def _from_arrow(array: Any, name: str) -> Ragged:
    """Return the buffers of an Arrow list array, without a copy."""
    form = type(array).__name__  # cheaper than array.type
    if form not in _ARROW_LISTS:
        raise DocumentsError(f"{name} as an Arrow array must be of a list type, got {array.type}")
    if array.null_count:
        raise DocumentsError(
            f"{name} hold {array.null_count:,} nulls in place of documents; drop those rows first"
        )
    if form in ("ListArray", "LargeListArray"):
        values, offsets = array.values, array.offsets.to_numpy(zero_copy_only=False)
        if values.null_count:  # perhaps outside of this slice, in which case flatten() leaves them out
            values, offsets = array.flatten(), offsets - offsets[0]
    elif form == "FixedSizeListArray":
        values = array.flatten()
        offsets = np.arange(len(array) + 1, dtype=np.int64) * array.type.list_size
    else:
        values, offsets = array.flatten(), np.zeros(len(array) + 1, np.int64)
        np.cumsum(array.value_lengths().to_numpy(zero_copy_only=False), out=offsets[1:])
    if values.null_count:
        raise DocumentsError(
            f"{name} hold {values.null_count:,} nulls in place of values; fill or drop them first"
        )
    return Ragged(_native(values.to_numpy(zero_copy_only=False)), offsets)


def _from_chunks(array: Any, needed: IntArray, name: str) -> list[npt.NDArray[Any]]:
    """Return documents of a chunked Arrow array, by rising numbers, as views of the chunks."""
    ends = np.cumsum([len(chunk) for chunk in array.chunks])
    chunk_of = np.searchsorted(ends, needed, side="right")
    parts = []
    for number in np.unique(chunk_of).tolist():
        chunk = _from_arrow(array.chunk(number), name)
        local = needed[chunk_of == number] - (ends[number] - len(array.chunk(number)))
        begins, stops = chunk.offsets[local].tolist(), chunk.offsets[local + 1].tolist()
        parts += [chunk.values[begin:stop] for begin, stop in zip(begins, stops)]
    return parts


def _from_list(parts: list[Any], name: str) -> Ragged:
    """Concatenate Python lists, numpy arrays, tensors and other sequences, each a document."""
    offsets = np.zeros(len(parts) + 1, np.int64)
    if not parts:
        return Ragged(np.empty(0, np.int32), offsets)
    if all(type(part) is list for part in parts):
        read = read_int_lists(parts, offsets)
        if read is not None:
            return Ragged(read, offsets)
    arrays = [as_document(part, index, name) for index, part in enumerate(parts)]
    np.cumsum([array.size for array in arrays], out=offsets[1:])
    filled = [array for array in arrays if array.size] or arrays[:1]
    return Ragged(_native(np.concatenate(filled)), offsets)


def as_document(part: Any, index: int, name: str) -> npt.NDArray[Any]:
    """Return one document of a list as an array."""
    try:
        array = np.asarray(part)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise DocumentsError(f"{name}: entry {index:,} can't be read as an array: {error}") from None
    if array.ndim != 1:
        raise DocumentsError(
            f"{name}: entry {index:,} must have one dimension, got shape {array.shape}; pass each "
            "document whose length was packed, as token ids"
        )
    return array if array.size else array.astype(np.int32)


def check_integers(values: npt.NDArray[Any], name: str) -> None:
    """Require whole numbers."""
    if values.dtype.kind not in "iu":
        raise DocumentsError(f"{name} must be whole numbers, got dtype {values.dtype}")


def refuse_negative(
    values: npt.NDArray[Any], starts: IntArray, lengths: npt.NDArray[Any], documents: IntArray
) -> NoReturn:
    """Raise the error for token ids below 0."""
    sizes = np.asarray(lengths, np.int64)
    owners = np.repeat(np.arange(sizes.size), sizes)
    at = np.arange(owners.size) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    wrong = np.flatnonzero(values[at] < 0)
    first = int(wrong[0])
    raise DocumentsError(
        f"document {int(documents[owners[first]]):,} has the token id {int(values[at[first]])}; ids are 0 or "
        f"more ({wrong.size:,} of {owners.size:,} tokens are below 0). Labels may be -100 where nothing is trained; "
        "ids may not"
    )


def read_int_lists(parts: Sequence[Any], offsets: IntArray) -> npt.NDArray[np.int32] | None:
    """Concatenate lists of ints as int32 and write their offsets; returns None if they hold anything else.

    Converting Python ints is the slowest part of a batch made from lists. An `array` of unsigned numbers reads a list
    in about half of struct's time, which takes half of `np.array`'s. Lists with negative ints (labels) go to struct.
    """
    tokens = array("I")  # unsigned, 32 bits on all usual platforms
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
    """Whether a number of 2^31 or more was read as a negative one."""
    if int(read.min()) >= 0:
        return False
    negative = np.flatnonzero(read < 0)
    owners = np.searchsorted(offsets, negative, side="right") - 1
    # One number per list is enough: struct or the array read the whole list.
    _, firsts = np.unique(owners, return_index=True)
    return any(
        parts[owner][at - int(offsets[owner])] >= 0
        for owner, at in zip(owners[firsts].tolist(), negative[firsts].tolist())
    )


# `join` takes most of the time of flattening a batch, and its cost per document in Python counts as much as the
# tokens: reading an attribute of a tensor takes 50 ns, copying 200 token ids takes 30. So if all documents are of one
# kind, one call converts all of them, and cheap checks show that it did so correctly; otherwise they are converted
# one by one.

_dtype = attrgetter("dtype")


class Joined(NamedTuple):
    """Values of all documents end to end, and the size of each document."""

    values: npt.NDArray[Any]
    """`[values]`, contiguous."""
    sizes: IntArray
    """int64 `[documents]`."""
    is_fresh: bool
    """Whether nothing else refers to the values, so that they may be overwritten."""


def join(documents: Any, name: str) -> Joined:
    """Concatenate the values of documents in their own dtype."""
    if isinstance(documents, tuple) or hasattr(documents, "null_count"):
        return _from_flat(documents, name)
    values = documents if type(documents) is list else list(documents)
    first = values[0] if values else None
    joined = None
    if isinstance(first, np.ndarray):
        joined = _from_arrays(values)
    elif type(first) is list:
        joined = _from_lists(values)
    elif "torch" in sys.modules and isinstance(first, sys.modules["torch"].Tensor):
        joined = _from_tensors(values)
    return joined or _one_by_one(values, name)


def as_whole(joined: Joined, name: str) -> Joined:
    """Convert values to int32 or int64."""
    values = joined.values
    if values.dtype in (np.int64, np.int32):
        return joined
    if values.size:  # else the dtype means nothing: torch makes floats of an empty list
        check_integers(values, name)
    if values.dtype == np.uint64 and values.size and int(values.max()) >= 2**63:
        raise DocumentsError(
            f"{name} run up to {int(values.max()):,}, outside of int64; these are no token ids"
        )
    return Joined(values.astype(np.int64), joined.sizes, is_fresh=True)


def _from_flat(documents: Any, name: str) -> Joined:
    """Join an Arrow list array, or values with offsets."""
    # Rows that were taken one by one are a chunk each.
    if hasattr(documents, "num_chunks") and documents.num_chunks != 1:
        documents = documents.combine_chunks()
    flat = as_flat(documents, name)
    if flat is None:
        return _one_by_one(list(documents), name)
    offsets = flat.offsets.astype(np.int64, copy=False)
    sizes = offsets[1:] - offsets[:-1]
    if sizes.size and (int(sizes.min()) < 0 or offsets[0] < 0 or offsets[-1] > flat.values.size):
        raise DocumentsError(
            f"{name}: offsets from {offsets[0]:,} to {offsets[-1]:,} must rise, and lie within {flat.values.size:,} "
            "values"
        )
    values = flat.values[offsets[0] : offsets[-1]]
    _check_numbers(values, name)
    return Joined(values, sizes, is_fresh=False)


def _from_lists(lists: list[Any]) -> Joined | None:
    """Join lists of ints, or of floats; returns None if there is anything else."""
    if set(map(type, lists)) != {list}:
        return None
    offsets = np.zeros(len(lists) + 1, np.int64)
    first = next((part[0] for part in lists if part), 0)
    values = _read_float_lists(lists, offsets) if type(first) is float else read_int_lists(lists, offsets)
    return None if values is None else Joined(values, offsets[1:] - offsets[:-1], is_fresh=True)


def _read_float_lists(parts: Sequence[Any], offsets: IntArray) -> npt.NDArray[np.float64] | None:
    """Concatenate lists of numbers as float64 and write their offsets; returns None if they hold anything else.

    An `array` reads a list in a quarter of `np.array`'s time.
    """
    numbers = array("d")
    try:
        for part in parts:
            numbers.fromlist(part)
    except TypeError:
        return None
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return np.frombuffer(numbers, np.float64) if numbers else np.empty(0)


def _from_arrays(arrays: list[Any]) -> Joined | None:
    """Join arrays of one dtype and one dimension; returns None if any differs."""
    try:
        dtypes = set(map(_dtype, arrays))
        sizes = np.fromiter(map(len, arrays), np.int64, len(arrays))
        joined = bytearray().join(arrays)  # takes a quarter of `np.concatenate`'s time per array
    except (AttributeError, TypeError, ValueError, BufferError):  # no arrays, no dimension, or strides
        return None
    dtype = dtypes.pop()
    if dtypes or dtype.kind not in "biuf" or not dtype.isnative:
        return None
    values = np.frombuffer(joined, dtype)
    if values.size != int(sizes.sum()):  # some array has more than one dimension
        return None
    return Joined(values, sizes, is_fresh=True)


def _from_tensors(tensors: list[Any]) -> Joined | None:
    """Join tensors of one dtype and one dimension in host memory; returns None if any differs.

    If `cat` widens a dtype or skips a tensor, the number of bytes changes.
    """
    try:
        num_bytes = np.fromiter([tensor.nbytes for tensor in tensors], np.int64, len(tensors))
        values: npt.NDArray[Any] = sys.modules["torch"].cat(tensors).numpy()
    except (AttributeError, RuntimeError, TypeError):
        return None
    if values.ndim != 1 or int(num_bytes.sum()) != values.nbytes:
        return None
    return Joined(values, num_bytes // values.itemsize, is_fresh=True)


def _one_by_one(values: Sequence[Any], name: str) -> Joined:
    """Join documents that numpy can convert, one at a time."""
    arrays = [as_document(part, index, name) for index, part in enumerate(values)]
    sizes = np.fromiter(map(len, arrays), np.int64, len(arrays))
    filled = [array for array in arrays if array.size] or arrays[:1]
    if not filled:
        return Joined(np.empty(0, np.int64), sizes, is_fresh=True)
    joined = np.concatenate(filled)
    if joined.dtype.kind in "iu" and any(array.dtype.kind == "b" for array in filled):
        raise DocumentsError(f"{name} must be whole numbers, got dtype bool in some documents")
    _check_numbers(joined, name)
    return Joined(joined.astype(joined.dtype.newbyteorder("="), copy=False), sizes, is_fresh=True)


def _check_numbers(values: npt.NDArray[Any], name: str) -> None:
    """Require numbers or booleans."""
    if values.dtype.kind not in "biuf":
        raise DocumentsError(f"{name} must hold numbers or booleans, got dtype {values.dtype}")
