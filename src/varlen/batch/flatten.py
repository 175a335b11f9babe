"""`flatten`: whole documents, in the order given, as one flat row of int64, as data collators return them.

Unlike `collate`, it takes no Packing, and copies values directly into the arrays that frameworks expect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.batch import kernels
from varlen.batch.layout import padding_segment
from varlen.errors import DocumentsError, SettingError
from varlen.ragged import Joined, as_whole, join, refuse_negative
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


def holds_ones_only(documents: Any) -> bool:
    """Return whether these are lists of ones, in half the time of reading them."""
    if type(documents) is not list or set(map(type, documents)) != {list}:
        return False
    ones = [1] * max(map(len, documents))
    return all(part == ones[: len(part)] for part in documents)
