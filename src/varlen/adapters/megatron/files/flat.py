"""Packed rows in memory: from lists and back, some of them, and several sets end to end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.adapters.megatron.rows import PackedRows
from varlen.errors import DocumentsError
from varlen.types import IntArray

COLUMNS = ("input_ids", "loss_mask", "seq_start_id")
"""What every packed row has, by the name that files and the releases' code give it."""
MASK = "loss_mask"
"""The one of them that statistics of lengths don't read."""
LENGTHS = "seq_lengths"
"""Our own column: positions of input of each document that aren't padding."""
ROWS_AT_A_TIME = 64
"""Rows given as dictionaries that are made flat at once."""
_MOST_ID = 2**31 - 1


def bounds_of(lengths: Iterable[int] | npt.NDArray[np.integer[Any]]) -> IntArray:
    """Return the offsets of stretches of these lengths."""
    sizes = np.asarray(lengths if isinstance(lengths, np.ndarray) else list(lengths), dtype=np.int64)
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def with_lengths(rows: PackedRows) -> PackedRows:
    """Return rows that know their `seq_lengths`; where nobody wrote them, none of a document is padding."""
    if rows.seq_lengths is not None:
        return rows
    return replace(rows, seq_lengths=(rows.stored_lengths - 1).astype(np.int32))


def joined(parts: Sequence[PackedRows]) -> PackedRows:
    """Return several sets of rows as one."""
    if len(parts) == 1:
        return parts[0]
    if any(part.seq_lengths is not None for part in parts):
        parts = [with_lengths(part) for part in parts]
    lengths = [part.seq_lengths for part in parts if part.seq_lengths is not None]
    return PackedRows(
        input_ids=np.concatenate([part.input_ids for part in parts]),
        loss_mask=np.concatenate([part.loss_mask for part in parts]),
        offsets=bounds_of(np.concatenate([np.diff(part.offsets) for part in parts])),
        seq_start_id=np.concatenate([part.seq_start_id for part in parts]),
        document_offsets=bounds_of(np.concatenate([np.diff(part.document_offsets) for part in parts])),
        seq_lengths=np.concatenate(lengths) if lengths else None,
    )


def between(rows: PackedRows, start: int, stop: int) -> PackedRows:
    """Return the rows [start, stop), over the same memory."""
    a, b = int(rows.offsets[start]), int(rows.offsets[stop])
    first, last = int(rows.document_offsets[start]), int(rows.document_offsets[stop])
    return PackedRows(
        input_ids=rows.input_ids[a:b],
        loss_mask=rows.loss_mask[a:b],
        offsets=rows.offsets[start : stop + 1] - a,
        seq_start_id=rows.seq_start_id[first:last],
        document_offsets=rows.document_offsets[start : stop + 1] - first,
        seq_lengths=None if rows.seq_lengths is None else rows.seq_lengths[first:last],
    )


def taken(rows: PackedRows, indices: IntArray) -> PackedRows:
    """Return some rows, in the order asked for, in memory of their own.

    Args:
        indices: int64, from 0.
    """

    def of(values: npt.NDArray[Any], offsets: IntArray) -> npt.NDArray[Any]:
        starts, stops = offsets[indices].tolist(), offsets[indices + 1].tolist()
        pieces = [values[a:b] for a, b in zip(starts, stops)]
        return np.concatenate(pieces) if pieces else values[:0].copy()

    return PackedRows(
        input_ids=of(rows.input_ids, rows.offsets),
        loss_mask=of(rows.loss_mask, rows.offsets),
        offsets=bounds_of(rows.offsets[indices + 1] - rows.offsets[indices]),
        seq_start_id=of(rows.seq_start_id, rows.document_offsets),
        document_offsets=bounds_of(rows.document_offsets[indices + 1] - rows.document_offsets[indices]),
        seq_lengths=None if rows.seq_lengths is None else of(rows.seq_lengths, rows.document_offsets),
    )


def as_dict(rows: PackedRows, index: int) -> dict[str, list[int]]:
    """Return one row as lists."""
    one = between(rows, index, index + 1)
    starts = one.seq_start_id.tolist()
    found = {
        "input_ids": one.input_ids.tolist(),
        "loss_mask": one.loss_mask.tolist(),
        "seq_start_id": starts,
        "seq_boundaries": [*starts, len(one.input_ids)],
    }
    if one.seq_lengths is not None:
        found[LENGTHS] = one.seq_lengths.tolist()
    return found


def from_dicts(
    rows: Iterable[Mapping[str, Any]], where: Callable[[int], str] = "row {:,}".format
) -> PackedRows:
    """Return rows given as mappings with `input_ids`, `loss_mask`, `seq_start_id` and perhaps `seq_lengths`."""
    found: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in (*COLUMNS, LENGTHS)}
    for count, row in enumerate(rows, 1):
        missing = [name for name in COLUMNS if name not in row]
        if missing:
            raise DocumentsError(
                f"{where(count - 1)} has no {missing[0]!r}; a packed row has {', '.join(map(repr, COLUMNS))}"
            )
        for name in COLUMNS:
            found[name].append(_whole(row[name], name, count - 1, where))
        if LENGTHS in row:
            found[LENGTHS].append(_whole(row[LENGTHS], LENGTHS, count - 1, where))
        if len(found[LENGTHS]) not in (0, count):
            raise DocumentsError(
                f"{where(count - 1)}: some rows have {LENGTHS!r} and others don't; give all or none"
            )
    return from_lists(found, where)


def from_lists(columns: Mapping[str, Sequence[npt.NDArray[Any]]], where: Callable[[int], str]) -> PackedRows:
    """Return rows whose values are arrays, one a row, by column; `seq_lengths` may have none."""
    flat = {
        name: (np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64), bounds_of(map(len, arrays)))
        for name, arrays in columns.items()
    }
    return from_flat(flat, where)


def from_flat(
    flat: Mapping[str, tuple[npt.NDArray[Any], IntArray]], where: Callable[[int], str]
) -> PackedRows:
    """Return checked rows made of each column's values and offsets, from 0."""
    (ids, offsets), (mask, mask_offsets) = flat["input_ids"], flat["loss_mask"]
    starts, document_offsets = flat["seq_start_id"]
    _refuse_uneven(offsets, mask_offsets, "`input_ids`", "values of `loss_mask`", where)
    _refuse_outside(ids, offsets, "input_ids", _MOST_ID, where)
    _refuse_outside(mask, mask_offsets, "loss_mask", 1, where)
    _refuse_outside(starts, document_offsets, "seq_start_id", _MOST_ID, where)
    lengths, length_offsets = flat.get(LENGTHS, (starts[:0], offsets[:1]))
    if len(length_offsets) > 1:
        _refuse_uneven(document_offsets, length_offsets, "`seq_start_id`", f"values of `{LENGTHS}`", where)
        _refuse_outside(lengths, length_offsets, LENGTHS, _MOST_ID, where)
    return PackedRows(
        input_ids=ids.astype(np.int32, copy=False),
        loss_mask=mask.astype(np.int8, copy=False),
        offsets=offsets,
        seq_start_id=starts.astype(np.int64, copy=False),
        document_offsets=document_offsets,
        seq_lengths=lengths.astype(np.int32, copy=False) if len(length_offsets) > 1 else None,
    ).check(where)


def as_stored(rows: PackedRows, before: int = 0) -> PackedRows:
    """Return rows of the types that files hold, if they are packed rows."""
    flat = {
        "input_ids": (rows.input_ids, rows.offsets),
        "loss_mask": (rows.loss_mask, rows.offsets),
        "seq_start_id": (rows.seq_start_id, rows.document_offsets),
    }
    if rows.seq_lengths is not None:
        flat[LENGTHS] = rows.seq_lengths, rows.document_offsets
    return from_flat(flat, lambda row: f"row {before + row:,}")


def _whole(value: Any, name: str, index: int, where: Callable[[int], str]) -> npt.NDArray[Any]:
    """Return one row's numbers."""
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        array = np.zeros(0, dtype=object)
    if array.ndim == 1 and array.dtype.kind in "iub":
        return array
    if array.size == 0 and array.ndim == 1 and array.dtype.kind == "f":  # of an empty list
        return np.zeros(0, dtype=np.int64)
    raise DocumentsError(
        f"{where(index)}: {name!r} must be a list of whole numbers, got {type(value).__name__} of {array.dtype}"
    )


def _refuse_uneven(
    ours: IntArray, theirs: IntArray, one: str, other: str, where: Callable[[int], str]
) -> None:
    """Refuse rows of which two columns differ in length."""
    differ = np.flatnonzero(np.diff(ours) != np.diff(theirs))
    if len(differ):
        row = int(differ[0])
        raise DocumentsError(
            f"{where(row)}: {int(np.diff(ours)[row]):,} {one}, but {int(np.diff(theirs)[row]):,} {other}; "
            "pack the data again"
        )


def _refuse_outside(
    values: npt.NDArray[Any], offsets: IntArray, name: str, most: int, where: Callable[[int], str]
) -> None:
    """Refuse values below 0 or above the most."""
    if not len(values) or values.dtype.kind == "b":
        return
    is_whole = values.dtype.kind in "iu"
    if is_whole and values.min() >= 0 and values.max() <= most:
        return
    wrong = np.flatnonzero(~((values >= 0) & (values <= most) & (is_whole or values == np.rint(values))))
    if not len(wrong):
        return
    row = int(np.searchsorted(offsets, wrong[0], side="right")) - 1
    place = int(wrong[0] - offsets[row])
    raise DocumentsError(
        f"{where(row)}: `{name}` holds {values[wrong[0]]} at place {place:,} (0 to {most:,}); pack the data again"
    )
