"""`flatten`: whole documents, in the order given, as one flat row of int64: what a data collator is asked for.

`collate` takes the pieces of a Packing to wherever they belong; here there is nothing to decide, and values go
from where they lie to where frameworks want them, without a stop in between.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen import jit
from varlen.batch.layout import padding_segment
from varlen.batch.ragged import as_parts, join_parts
from varlen.errors import DocumentsError, SettingError
from varlen.types import Int32Array, IntArray

_kernel = functools.partial(jit.kernel, "varlen.batch", "kernels_flat")
_NOWHERE64, _NOWHERE32 = np.empty(0, np.int64), np.empty(0, np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatRow:
    """One row of documents end to end, padding after them; arrays have one dimension."""

    input_ids: IntArray
    """int64 `[width]`."""
    labels: IntArray
    """int64 `[width]`: not shifted; the separator at the first token of every document, -100 at padding."""
    position_ids: IntArray | None
    """int64 `[width]`, rising from the first position in every document; the first position at padding, so that
    nothing that reads boundaries from positions joins padding to a document."""
    owners: Int32Array | None
    """int32 `[width]`: the number of each token's segment, those of padding counted on."""
    cu_seqlens: Int32Array
    """int32 `[segments + 1]`: documents that hold a token, then padding in segments of at most 128."""
    max_seqlen: int
    """Longest segment, padding included: a kernel must not be told less."""
    columns: Mapping[str, npt.NDArray[Any]]
    """`[width]` each, in a dtype of its own."""
    empty_documents: int
    """Documents without a token, which no segment stands for."""


def flatten(
    documents: Sequence[Any],
    labels: Sequence[Any] | None = None,
    keep: Sequence[Any] | None = None,
    columns: Mapping[str, Sequence[Any]] | None = None,
    *,
    lengths: Sequence[Any] | None = None,
    separator: int = -100,
    first_position: int = 0,
    pad_id: int = 0,
    pad_to_multiple_of: int = 1,
    column_pads: Mapping[str, Any] | None = None,
    positions: bool = True,
    owners: bool = True,
) -> FlatRow:
    """Lay whole documents end to end.

    Args:
        documents: token ids of each: lists of ints, arrays or tensors of whole numbers.
        labels: as many for each document; None takes the tokens themselves.
        keep: as many numbers for each document; tokens where it is 0 are left out, with all that is theirs.
        columns: other values a token.
        lengths: lists of lengths where an entry of `documents` holds several end to end; None for one each.
        separator: the first label of every document, which nothing before it may predict.
        first_position: position of every first token.
        pad_id: id at padding.
        pad_to_multiple_of: the width is rounded up to it.
        column_pads: values of the columns at padding, 0 where not named.
        positions: whether positions are asked for.
        owners: whether segment numbers are asked for.

    Returns:
        The row; a document without tokens has no segment, and is counted.

    Raises:
        DocumentsError: no token at all, values that aren't whole numbers, or of which there aren't as many.
        SettingError: more positions than int32 boundaries can count.

    Cost: one pass over the tokens; from lists, 4 ns for each int.

    >>> row = flatten([[11, 12, 13], [], [21, 22]], pad_to_multiple_of=4)
    >>> row.input_ids.tolist(), row.labels.tolist()
    ([11, 12, 13, 21, 22, 0, 0, 0], [-100, 12, 13, -100, 22, -100, -100, -100])
    >>> row.cu_seqlens.tolist(), row.owners.tolist()
    ([0, 3, 5, 8], [0, 0, 0, 1, 1, 2, 2, 2])
    """
    parts, sizes = as_parts(documents, "input_ids")
    beside = {name: as_parts(values, name) for name, values in (columns or {}).items()}
    target_parts = None if labels is None else as_parts(labels, "labels")
    kept = None if keep is None else _kept(*as_parts(keep, "attention_mask"), sizes)
    for name, (_, counts) in {**beside, **({} if target_parts is None else {"labels": target_parts})}.items():
        _check_counts(counts, sizes, name)
    pieces = sizes if lengths is None else _pieces(lengths, sizes)
    if kept is not None:
        pieces = _kept_lengths(kept, pieces)
    filled = pieces[pieces > 0]
    offsets = np.zeros(filled.size + 1, np.int64)
    np.cumsum(filled, out=offsets[1:])
    width = _width(int(offsets[-1]), pad_to_multiple_of, len(parts))

    block = np.empty((3 if positions else 2, width), np.int64)
    join_parts(parts, sizes, block[0], kept, "input_ids")
    if target_parts is not None:
        join_parts(*target_parts, block[1], kept, "labels")
    numbers = np.empty(width, np.int32) if owners else _NOWHERE32
    place = block[2] if positions else _NOWHERE64
    each = padding_segment(1)
    _kernel("fill_flat_row")(
        offsets,
        separator,
        first_position,
        pad_id,
        each,
        labels is not None,
        block[0],
        block[1],
        place,
        numbers,
    )
    ends = np.concatenate([offsets, np.arange(offsets[-1] + each, width, each), [width]])
    ends = ends[: ends.size - (offsets[-1] == width)].astype(np.int32)
    return FlatRow(
        input_ids=block[0],
        labels=block[1],
        position_ids=place if positions else None,
        owners=numbers if owners else None,
        cu_seqlens=ends,
        max_seqlen=int(np.diff(ends).max()),
        columns={
            name: _column(*values, kept, width, (column_pads or {}).get(name, 0), name)
            for name, values in beside.items()
        },
        empty_documents=int(pieces.size - filled.size),
    )


def _width(tokens: int, multiple: int, num_documents: int) -> int:
    """Positions of the row.

    Raises:
        DocumentsError: no token.
        SettingError: too many positions.
    """
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
    """Require as many values as tokens.

    Raises:
        DocumentsError: other counts.
    """
    if counts.size != sizes.size:
        raise DocumentsError(f"{name} are given for {counts.size:,} of {sizes.size:,} documents")
    wrong = counts != sizes
    if wrong.any():
        first = int(np.argmax(wrong))
        raise DocumentsError(
            f"{name}: document {first:,} has {counts[first]:,} values for {sizes[first]:,} tokens; one a token is "
            f"needed ({int(wrong.sum()):,} of {sizes.size:,} documents don't match)"
        )


def _kept(parts: Sequence[Any], counts: IntArray, sizes: IntArray) -> npt.NDArray[np.bool_] | None:
    """Which tokens stay, or None where all do."""
    _check_counts(counts, sizes, "attention_mask")
    if not counts.sum():
        return None
    kept: npt.NDArray[np.bool_] = join_parts(parts, counts, None, None, "attention_mask") != 0
    return None if kept.all() else kept


def _kept_lengths(kept: npt.NDArray[np.bool_], pieces: IntArray) -> IntArray:
    """How many tokens of each piece stay."""
    before = np.zeros(kept.size + 1, np.int64)
    np.cumsum(kept, out=before[1:])
    ends = np.cumsum(pieces)
    counts: IntArray = before[ends] - before[ends - pieces]
    return counts


def _pieces(lengths: Sequence[Any], sizes: IntArray) -> IntArray:
    """Lengths of all documents, where rows hold several.

    Raises:
        DocumentsError: lengths that don't add up to their row, or are negative.
    """
    parts, counts = as_parts(lengths, "seq_lengths")
    if counts.size != sizes.size:
        raise DocumentsError(f"seq_lengths are given for {counts.size:,} of {sizes.size:,} rows")
    flat = join_parts(parts, counts, np.empty(int(counts.sum()), np.int64), None, "seq_lengths")
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


def _column(
    parts: Sequence[Any],
    counts: IntArray,
    kept: npt.NDArray[np.bool_] | None,
    width: int,
    pad: Any,
    name: str,
) -> npt.NDArray[Any]:
    """A column as wide as the row."""
    values = join_parts(parts, counts, None, kept, name)
    if values.dtype.kind not in "biuf":
        raise DocumentsError(f"column {name!r} must hold numbers or booleans, got dtype {values.dtype}")
    column = np.full(width, pad, values.dtype)
    column[: values.size] = values
    return column
