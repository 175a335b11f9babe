"""`flatten`: whole documents, in the order given, as one flat row of int64, as data collators return them.

Unlike `collate`, it takes no Packing, and copies values directly into the arrays that frameworks expect.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from varlen.batch import kernels
from varlen.batch.documents import as_document, as_flat, check_integers, read_int_lists, refuse_negative
from varlen.batch.layout import padding_segment
from varlen.errors import DocumentsError, SettingError
from varlen.types import Int32Array, IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatRow:
    """One row of documents end to end, followed by padding; arrays have one dimension."""

    input_ids: IntArray
    """int64 `[width]`."""
    labels: IntArray
    """int64 `[width]`: not shifted; the separator at the first token of every document, -100 at padding."""
    position_ids: IntArray | None
    """int64 `[width]`, rising from the first position in every document; the first position at padding, so that
    boundaries inferred from positions separate padding from documents."""
    owners: Int32Array | None
    """int32 `[width]`: the number of each token's segment, padding segments included."""
    cu_seqlens: Int32Array
    """int32 `[segments + 1]`: documents that hold a token, then padding in segments of at most 128."""
    max_seqlen: int
    """Longest segment, padding included, as attention kernels need it."""
    columns: Mapping[str, npt.NDArray[Any]]
    """`[width]` each, in a dtype of its own."""
    empty_documents: int
    """Documents without a token, which have no segment."""


def flatten(
    documents: Any,
    labels: Any = None,
    keep: Any = None,
    columns: Mapping[str, Any] | None = None,
    *,
    lengths: Any = None,
    separator: int = -100,
    first_position: int = 0,
    pad_id: int = 0,
    pad_to_multiple_of: int = 1,
    column_pads: Mapping[str, Any] | None = None,
    positions: bool = True,
    owners: bool = True,
) -> FlatRow:
    """Concatenate whole documents into one row; tokens where `keep` is 0 are left out.

    >>> row = flatten([[11, 12, 13], [], [21, 22]], pad_to_multiple_of=4)
    >>> row.input_ids.tolist(), row.labels.tolist()
    ([11, 12, 13, 21, 22, 0, 0, 0], [-100, 12, 13, -100, 22, -100, -100, -100])
    >>> row.cu_seqlens.tolist(), row.owners.tolist()
    ([0, 3, 5, 8], [0, 0, 0, 1, 1, 2, 2, 2])
    """
    ids = as_whole(join(documents, "input_ids"), "input_ids")
    targets = None if labels is None else as_whole(join(labels, "labels"), "labels")
    beside = {name: join(values, name) for name, values in columns.items()} if columns else {}
    if targets is not None:
        _check_counts(targets.sizes, ids.sizes, "labels")
    for name, joined in beside.items():
        _check_counts(joined.sizes, ids.sizes, name)
    pieces = ids.sizes if lengths is None else _pieces(lengths, ids.sizes)
    mask = None if keep is None else _as_mask(keep, ids.sizes)
    if mask is not None:
        pieces = _masked_lengths(mask, pieces)
        ids = _masked(ids, mask)
        targets = None if targets is None else _masked(targets, mask)
    tokens = ids.values.size
    width = _width(tokens, pad_to_multiple_of, ids.sizes.size)

    each = padding_segment(1)
    input_ids, label_row = _output(ids, width), _output(targets, width)
    position_ids = np.empty(width if positions else 0, np.int64)
    segment_ids = np.empty(width if owners else 0, np.int32)
    ends = np.empty(pieces.size + 1 - (tokens - width) // each, np.int32)
    segments, longest, is_negative = kernels.fill_flat_row(
        ids.values,
        ids.values if targets is None else targets.values,
        pieces,
        separator,
        first_position,
        pad_id,
        each,
        input_ids is not ids.values,
        targets is None or label_row is not targets.values,
        input_ids,
        label_row,
        position_ids,
        segment_ids,
        ends,
    )
    if is_negative:
        refuse_negative(ids.values, np.cumsum(ids.sizes) - ids.sizes, ids.sizes, np.arange(ids.sizes.size))
    ends = ends[: segments + 1]
    return FlatRow(
        input_ids=input_ids,
        labels=label_row,
        position_ids=position_ids if positions else None,
        owners=segment_ids if owners else None,
        cu_seqlens=ends,
        max_seqlen=longest,
        columns={
            name: _column(joined, mask, width, (column_pads or {}).get(name, 0))
            for name, joined in beside.items()
        },
        empty_documents=pieces.size - segments - (tokens - width) // each,
    )


def _output(joined: Joined | None, width: int) -> IntArray:
    """Return the array for the row: the values' own array if it can be used, else a new one."""
    if (
        joined is None
        or not joined.is_fresh
        or joined.values.dtype != np.int64
        or joined.values.size != width
    ):
        return np.empty(width, np.int64)
    return joined.values


def _masked(joined: Joined, mask: npt.NDArray[np.bool_]) -> Joined:
    return joined._replace(values=joined.values[mask], is_fresh=True)


def _width(tokens: int, multiple: int, num_documents: int) -> int:
    """Return the positions of the row."""
    if not tokens:
        raise DocumentsError(
            f"no token in this batch of {num_documents:,} documents, so there is nothing to train on; leave empty "
            "documents out of the data set, and batches of none out of the sampler"
        )
    width = -(-tokens // multiple) * multiple
    if width >= 2**31:
        raise SettingError(
            f"{width:,} positions in one batch are more than int32 boundaries can count (2^31 - 1); "
            "put fewer documents into a batch"
        )
    return width


def _check_counts(counts: IntArray, sizes: IntArray, name: str) -> None:
    """Require as many values as tokens."""
    if counts.size != sizes.size:
        raise DocumentsError(f"{name} are given for {counts.size:,} of {sizes.size:,} documents")
    wrong = counts != sizes
    if wrong.any():
        first = int(np.argmax(wrong))
        raise DocumentsError(
            f"{name}: document {first:,} has {counts[first]:,} values for {sizes[first]:,} tokens; one a token is "
            f"needed ({int(wrong.sum()):,} of {sizes.size:,} documents don't match)"
        )


def _as_mask(keep: Any, sizes: IntArray) -> npt.NDArray[np.bool_] | None:
    """Return which tokens to keep, or None for all."""
    if holds_ones_only(keep):
        _check_counts(np.fromiter(map(len, keep), np.int64, len(keep)), sizes, "attention_mask")
        return None
    joined = join(keep, "attention_mask")
    _check_counts(joined.sizes, sizes, "attention_mask")
    if np.count_nonzero(joined.values) == joined.values.size:
        return None
    mask: npt.NDArray[np.bool_] = joined.values != 0
    return mask


def _masked_lengths(mask: npt.NDArray[np.bool_], pieces: IntArray) -> IntArray:
    """Return how many tokens of each piece are kept."""
    before = np.zeros(mask.size + 1, np.int64)
    np.cumsum(mask, out=before[1:])
    ends = np.cumsum(pieces)
    counts: IntArray = before[ends] - before[ends - pieces]
    return counts


def _pieces(lengths: Any, sizes: IntArray) -> IntArray:
    """Return the lengths of all documents, if rows hold several."""
    flat, counts, _ = as_whole(join(lengths, "seq_lengths"), "seq_lengths")
    flat = flat.astype(np.int64, copy=False)
    if counts.size != sizes.size:
        raise DocumentsError(f"seq_lengths are given for {counts.size:,} of {sizes.size:,} rows")
    before = np.zeros(flat.size + 1, np.int64)
    np.cumsum(flat, out=before[1:])
    ends = np.cumsum(counts)
    wrong = before[ends] - before[ends - counts] != sizes
    if wrong.any() or (flat.size and flat.min() < 0):
        first = int(np.argmax(wrong))
        raise DocumentsError(
            f"seq_lengths of row {first:,} add up to {int((before[ends] - before[ends - counts])[first]):,}, and the "
            f"row has {sizes[first]:,} tokens ({int(wrong.sum()):,} of {sizes.size:,} rows; "
            f"{int((flat < 0).sum()):,} lengths are negative); they must be the lengths of the row's documents"
        )
    return flat


def _column(joined: Joined, mask: npt.NDArray[np.bool_] | None, width: int, pad: Any) -> npt.NDArray[Any]:
    """Return a column padded to the row's width."""
    values = joined.values if mask is None else joined.values[mask]
    column = np.full(width, pad, values.dtype)
    column[: values.size] = values
    return column


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


def holds_ones_only(documents: Any) -> bool:
    """Return whether these are lists of ones, in half the time of reading them."""
    if type(documents) is not list or set(map(type, documents)) != {list}:
        return False
    ones = [1] * max(map(len, documents))
    return all(part == ones[: len(part)] for part in documents)


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
    """Join lists of ints; returns None if there is anything else."""
    if set(map(type, lists)) != {list}:
        return None
    offsets = np.zeros(len(lists) + 1, np.int64)
    values = read_int_lists(lists, offsets)
    return None if values is None else Joined(values, offsets[1:] - offsets[:-1], is_fresh=True)


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
