"""Pretokenized rows: token ids, with labels, masks or boundaries, validated and flattened."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.files.rows import as_list, json_kind
from varlen.files.token_tables import flat_values
from varlen.text.loss_masks import ALLOWED, OPTION, Mask
from varlen.types import Int32Array, IntArray

_Values = npt.NDArray[Any]
_Flat = dict[str, tuple[_Values, IntArray]]  # values and offsets by role
_MOST_ID = 2**31 - 1
_MASKS = ("loss_mask", "attention_mask")
_WEIGHTS = "loss_weights"
_MOST = 10**300  # of integers as weights, before validation


def ready_documents(
    columns: Mapping[str, Any], num_rows: int, vocab_size: int | None, *, weighs: bool = False
) -> tuple[Int32Array, IntArray, Mask | None, dict[int, str]]:
    """Turn rows of token ids into documents.

    Tokens with an `attention_mask` of 0 are padding and are left out. `seq_lengths` cuts a packed row into its
    documents; without them, `position_ids` that restart at 0 do. A token is supervised unless its label is -100 or
    its `loss_mask` or `loss_weights` is 0. Rows with `seq_start_id` are Megatron's; their masks and lengths are read
    as `without_starts` says.
    """
    wrong: dict[int, str] = {}
    flat: _Flat = {role: _flat(column, role, num_rows, wrong) for role, column in columns.items()}
    rows = np.arange(num_rows)
    if wrong:
        flat, rows = _without(flat, rows, wrong)
    if "seq_lengths" in flat or STARTS in flat:
        flat.pop("position_ids", None)
    checks: list[Callable[[_Flat], dict[int, str]]] = [
        _lengths_differ,
        lambda flat: _ids_out_of_range(flat, vocab_size),
        _labels_differ,
        _masks_out_of_range,
        lambda flat: _weights_out_of_range(flat, weighs=weighs),
        *([starts_differ] if STARTS in flat else [_boundaries_differ, _positions_jump]),
    ]
    for check in checks:  # each relies on the previous ones, whose faulty rows were removed
        faulty = check(flat)
        if faulty:
            wrong.update({int(rows[index]): why for index, why in faulty.items()})
            flat, rows = _without(flat, rows, faulty)
    return *_assembled(without_starts(flat) if STARTS in flat else flat), wrong


def _flat(column: Any, role: str, num_rows: int, wrong: dict[int, str]) -> tuple[_Values, IntArray]:
    """Return a column's concatenated values and offsets; rows without numbers become empty faults."""
    if not isinstance(column, list):
        import pyarrow as pa

        kind = column.type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        is_mask = role in _MASKS and is_list and pa.types.is_boolean(kind.value_type)
        if is_mask or (is_list and pa.types.is_integer(kind.value_type)):
            return flat_column(column, role, wrong)
        if role == _WEIGHTS and is_list and pa.types.is_floating(kind.value_type):
            return flat_column(column, role, wrong)
    values = [_numbers(value, role, index, wrong) for index, value in enumerate(as_list(column))]
    offsets = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    dtype = np.float64 if role == _WEIGHTS else np.int64
    return np.fromiter(chain.from_iterable(values), dtype=dtype, count=int(offsets[-1])), offsets


def flat_column(column: Any, role: str, wrong: dict[int, str]) -> tuple[_Values, IntArray]:
    """Return the values and offsets of an Arrow list array of numbers or booleans, without copying if possible."""
    import pyarrow as pa

    if not pa.types.is_fixed_size_list(column.type) and not pa.types.is_boolean(column.type.value_type):
        flat = flat_values(column)
        if flat is not None:
            return flat
    import pyarrow.compute as pc

    values, lengths = column.flatten(), pc.list_value_length(column)
    if column.null_count:
        for index in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist():
            wrong.setdefault(index, f"holds null in `{role}`, {_must_be(role)}")
        lengths = pc.fill_null(lengths, 0)
    offsets = np.zeros(len(column) + 1, dtype=np.int64)
    np.cumsum(lengths.to_numpy(zero_copy_only=False), out=offsets[1:])
    if values.null_count:
        nulls = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))
        for index in _owners(nulls, offsets):
            wrong.setdefault(index, f"holds a null among its `{role}`")
        values = pc.fill_null(values, 0)
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.uint8())
    return values.to_numpy(zero_copy_only=False), offsets


def _must_be(role: str) -> str:
    """Return what a column must hold, for a message."""
    return f"which must be a list of {'numbers' if role == _WEIGHTS else 'whole numbers'}"


def _owners(positions: IntArray, offsets: IntArray) -> dict[int, int]:
    """Return the rows that contain positions, and the first position in each."""
    owners = np.searchsorted(offsets, positions, side="right") - 1
    rows, first = np.unique(owners, return_index=True)
    return dict(zip(rows.tolist(), positions[first].tolist()))


def _numbers(value: Any, role: str, index: int, wrong: dict[int, str]) -> Sequence[float]:
    """Return one row's numbers; anything else is a fault."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            wrong.setdefault(index, f"holds text in `{role}`, {_must_be(role)}")
            return []
    if not isinstance(value, list):
        wrong.setdefault(index, f"holds {json_kind(value)} in `{role}`, {_must_be(role)}")
        return []
    allowed = {int, float, bool} if role == _WEIGHTS else {int, bool} if role in _MASKS else {int}
    if not set(map(type, value)) <= allowed:
        odd = next(position for position, number in enumerate(value) if type(number) not in allowed)
        kind = json_kind(value[odd])
        numbers = "numbers" if role == _WEIGHTS else "whole numbers"
        wrong.setdefault(index, f"holds {kind} at place {odd:,} of `{role}`, which must be {numbers}")
        return []
    if role == _WEIGHTS:
        return [
            weight if isinstance(weight, float) else float(max(min(weight, _MOST), -_MOST))
            for weight in value
        ]
    if value and not -(2**62) < min(value) <= max(value) < 2**62:
        wrong.setdefault(index, f"holds a number in `{role}` of more than 62 bits")
        return []
    return value


def _without(flat: _Flat, rows: IntArray, wrong: Mapping[int, str]) -> tuple[_Flat, IntArray]:
    """Remove faulty rows."""
    is_sound = np.ones(len(rows), dtype=bool)
    is_sound[list(wrong)] = False
    left: _Flat = {}
    for role, (values, offsets) in flat.items():
        lengths = np.diff(offsets)
        bounds = np.concatenate([[0], np.cumsum(lengths[is_sound])]).astype(np.int64)
        left[role] = values[np.repeat(is_sound, lengths)], bounds
    return left, rows[is_sound]


def _lengths_differ(flat: _Flat) -> dict[int, str]:
    """Find rows whose columns differ in length."""
    faults: dict[int, str] = {}
    ids = np.diff(flat["input_ids"][1])
    for role, (_, offsets) in flat.items():
        others = np.diff(offsets)
        if role not in ("seq_lengths", STARTS):
            for index in np.flatnonzero(ids != others).tolist():
                faults.setdefault(index, f"has {ids[index]:,} `input_ids` but {others[index]:,} `{role}`")
    return faults


def _ids_out_of_range(flat: _Flat, vocab_size: int | None) -> dict[int, str]:
    """Find rows with ids outside the vocabulary."""
    ids, offsets = flat["input_ids"]
    most = _MOST_ID if vocab_size is None else vocab_size - 1
    if len(ids) == 0 or (ids.min() >= 0 and ids.max() <= most):
        return {}
    limit = "ids are from 0 to 2^31 - 1" if vocab_size is None else f"the vocabulary has {vocab_size:,} ids"
    wrong = _owners(np.flatnonzero((ids < 0) | (ids > most)), offsets)
    return {
        row: f"holds the id {int(ids[at])} at token {at - int(offsets[row]):,} ({limit})"
        for row, at in wrong.items()
    }


def _labels_differ(flat: _Flat) -> dict[int, str]:
    """Find rows with a label that is neither -100 nor its token's id."""
    if "labels" not in flat:
        return {}
    (ids, offsets), (labels, _) = flat["input_ids"], flat["labels"]
    wrong = _owners(np.flatnonzero((labels != -100) & (labels != ids)), offsets)
    return {
        row: f"has the label {int(labels[at])} for the id {int(ids[at])} at token {at - int(offsets[row]):,} "
        "(a label is its own token's id, not the next one's, or -100)"
        for row, at in wrong.items()
    }


def _masks_out_of_range(flat: _Flat) -> dict[int, str]:
    """Find rows with masks other than 0 and 1."""
    faults: dict[int, str] = {}
    for role in _MASKS:
        if role in flat:
            mask, offsets = flat[role]
            hint = (
                "; boundaries of packed documents go into `seq_lengths`" if role == "attention_mask" else ""
            )
            for row, at in _owners(np.flatnonzero((mask < 0) | (mask > 1)), offsets).items():
                why = f"holds {int(mask[at])} at token {at - int(offsets[row]):,} of `{role}` (0 or 1{hint})"
                faults.setdefault(row, why)
    return faults


def _weights_out_of_range(flat: _Flat, *, weighs: bool) -> dict[int, str]:
    """Find rows with weights that are invalid, or not accepted."""
    if _WEIGHTS not in flat:
        return {}
    weights, offsets = flat[_WEIGHTS]
    if STARTS in flat:
        why = (
            f"has `{_WEIGHTS}` beside `{STARTS}`, whose marks stand one token before; give it `seq_lengths` "
            f"instead of `{STARTS}`"
        )
        return dict.fromkeys(range(len(offsets) - 1), why)
    with np.errstate(over="ignore"):
        single = weights.astype(np.float32)
    wrong = ~((weights >= 0) & np.isfinite(single) & ((single > 0) | (weights == 0)))
    faults: dict[int, str] = {}
    for row, at in _owners(np.flatnonzero(wrong), offsets).items():
        seen = f"{float(weights[at]):g} at token {at - int(offsets[row]):,}"
        faults[row] = f"holds {seen} of `{_WEIGHTS}` ({ALLOWED})"
    if weighs:
        return faults
    for row, at in _owners(np.flatnonzero((weights != 0) & (weights != 1)), offsets).items():
        seen = f"{float(weights[at]):g} at token {at - int(offsets[row]):,}"
        why = f"holds {seen} of `{_WEIGHTS}`; only 0 and 1 can be kept: {OPTION}, or leave the column out"
        faults.setdefault(row, why)
    return faults


def _boundaries_differ(flat: _Flat) -> dict[int, str]:
    """Find packed rows whose document lengths don't add up to their length."""
    faults: dict[int, str] = {}
    if "seq_lengths" not in flat:
        return faults
    (_, offsets), (lengths, owners) = flat["input_ids"], flat["seq_lengths"]
    running = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    sums, widths = np.diff(running[owners]), np.diff(offsets)
    limits = np.repeat(widths, np.diff(owners))  # none above, so that no sum can overflow
    for row, at in _owners(np.flatnonzero((lengths < 0) | (lengths > limits)), owners).items():
        faults[row] = f"holds {int(lengths[at])} in `seq_lengths`, but {widths[row]:,} `input_ids`"
    for row in np.flatnonzero(sums != widths).tolist():
        why = f"has `seq_lengths` that add up to {sums[row]:,}, but {widths[row]:,} `input_ids`"
        faults.setdefault(row, why)
    return faults


def _real(flat: _Flat) -> npt.NDArray[np.bool_]:
    """Return which tokens aren't padding."""
    if "attention_mask" not in flat:
        return np.ones(len(flat["input_ids"][0]), dtype=bool)
    real: npt.NDArray[np.bool_] = flat["attention_mask"][0] == 1
    return real


def _positions_jump(flat: _Flat) -> dict[int, str]:
    """Find rows whose positions neither continue nor restart at 0, so that document boundaries are unknown."""
    if "position_ids" not in flat:
        return {}
    positions, offsets = flat["position_ids"]
    before = np.concatenate([[-1], positions[:-1]])
    before[offsets[:-1][offsets[:-1] < len(positions)]] = -1
    odd = (positions != 0) & (positions != before + 1) & _real(flat)
    return {
        row: f"has the position {int(positions[at]):,} at token {at - int(offsets[row]):,} of `position_ids`, which "
        "must begin at 0 and run on, or begin again at 0 with the next document; give `seq_lengths` instead"
        for row, at in _owners(np.flatnonzero(odd), offsets).items()
    }


def _document_bounds(flat: _Flat) -> IntArray:
    """Return the bounds of documents: from lengths, from positions, or those of rows."""
    bounds = flat["input_ids"][1]
    if "seq_lengths" in flat:
        return np.concatenate([[0], np.cumsum(flat["seq_lengths"][0], dtype=np.int64)]).astype(np.int64)
    if "position_ids" not in flat:
        return bounds
    begins = np.flatnonzero((flat["position_ids"][0] == 0) & _real(flat))
    return np.sort(np.concatenate([begins, bounds[1:][np.diff(bounds) == 0], bounds[-1:]])).astype(np.int64)


def _assembled(flat: _Flat) -> tuple[Int32Array, IntArray, Mask | None]:
    """Cut packed rows, remove padding, and combine masks of validated rows."""
    ids, bounds = flat["input_ids"][0], _document_bounds(flat)
    supervised: npt.NDArray[np.bool_] | None = None
    if "labels" in flat:
        supervised = flat["labels"][0] != -100
    if "loss_mask" in flat:
        masked = flat["loss_mask"][0] == 1
        supervised = masked if supervised is None else supervised & masked
    weights: npt.NDArray[np.float32] | None = None
    if _WEIGHTS in flat:
        weights = flat[_WEIGHTS][0].astype(np.float32)
        supervised = weights != 0 if supervised is None else supervised & (weights != 0)
    if "attention_mask" in flat and not (real := flat["attention_mask"][0] == 1).all():
        before = np.concatenate([[0], np.cumsum(real)])
        ids, bounds = ids[real], before[bounds].astype(np.int64)
        supervised = None if supervised is None else supervised[real]
        weights = None if weights is None else weights[real]
    mask: Mask | None
    if weights is not None and supervised is not None and bool((weights[supervised] != 1).any()):
        mask = np.where(supervised, weights, np.float32(0))
        return ids.astype(np.int32, copy=False), bounds, mask
    mask = None if supervised is None or bool(supervised.all()) else supervised.astype(np.uint8)
    return ids.astype(np.int32, copy=False), bounds, mask


# Megatron's packed rows, whose `seq_start_id` gives the beginnings of documents, converted to the common columns.
#
# Each document is stored with its last target, and the mask belongs to the input of a target, one token before it.
# `seq_lengths`, where such a row has them, are the inputs of each document that aren't padding.

STARTS = "seq_start_id"
_Column = tuple[npt.NDArray[np.integer[Any]], IntArray]


def starts_differ(flat: Mapping[str, _Column]) -> dict[int, str]:
    """Find rows whose document starts don't begin at 0, rise and stay within the row."""
    faults: dict[int, str] = {}
    (_, offsets), (starts, owners) = flat["input_ids"], flat[STARTS]
    widths, counts = np.diff(offsets), np.diff(owners)
    for row in np.flatnonzero(counts == 0).tolist():
        if widths[row]:
            faults[row] = f"has no `{STARTS}`, but {widths[row]:,} `input_ids`"
    of = np.repeat(np.arange(len(counts)), counts)
    is_first = np.zeros(len(starts), dtype=bool)
    is_first[owners[:-1][counts > 0]] = True
    before = np.concatenate([[-1], starts[:-1]])
    wrong = np.where(is_first, starts != 0, starts <= before) | (starts >= widths[of])
    for at in np.flatnonzero(wrong)[::-1].tolist():  # the first of a row is reported
        row = int(of[at])
        faults[row] = (
            f"holds {int(starts[at]):,} at place {at - int(owners[row]):,} of `{STARTS}`, which must begin at "
            f"0, rise, and stay below its {widths[row]:,} `input_ids`"
        )
    if "seq_lengths" in flat and not faults:
        lengths, length_owners = flat["seq_lengths"]
        for row in np.flatnonzero(np.diff(length_owners) != counts).tolist():
            faults[row] = (
                f"has {int(np.diff(length_owners)[row]):,} `seq_lengths` but {counts[row]:,} `{STARTS}`"
            )
        if not faults:
            stored = _stored(flat)
            for at in np.flatnonzero((lengths < 0) | (lengths >= stored))[::-1].tolist():
                row = int(of[at])
                faults[row] = (
                    f"holds {int(lengths[at]):,} at place {at - int(owners[row]):,} of `seq_lengths`, but stores "
                    f"{int(stored[at]):,} tokens of that document, the last target among them"
                )
    return faults


def without_starts(flat: Mapping[str, _Column]) -> dict[str, _Column]:
    """Return equivalent columns with `seq_lengths`, a `loss_mask` per token, and an `attention_mask`.

    The mark of a document's first token, which nothing predicts and such files don't store, is that of its second.
    """
    same = {name: column for name, column in flat.items() if name not in (STARTS, "position_ids")}
    (ids, offsets), (_, owners) = flat["input_ids"], flat[STARTS]
    stored = _stored(flat)
    begins = np.cumsum(stored) - stored
    if "loss_mask" in flat:
        marks = flat["loss_mask"][0]
        rolled = np.concatenate([marks[:1], marks[:-1]])
        rolled[begins] = marks[begins]
        same["loss_mask"] = rolled, offsets
    if "seq_lengths" in flat:
        within = np.arange(len(ids)) - np.repeat(begins, stored)
        is_real = within <= np.repeat(flat["seq_lengths"][0], stored)
        if "attention_mask" in flat:
            is_real &= flat["attention_mask"][0] == 1
        same["attention_mask"] = is_real.astype(np.uint8), offsets
    same["seq_lengths"] = stored, owners
    return same


def _stored(flat: Mapping[str, _Column]) -> IntArray:
    """Return the number of stored tokens of each document, int64 `[documents]`."""
    (_, offsets), (starts, owners) = flat["input_ids"], flat[STARTS]
    counts = np.diff(owners)
    begins = starts.astype(np.int64) + np.repeat(offsets[:-1], counts)
    ends = np.concatenate([begins[1:], offsets[-1:]])
    ends[owners[1:][counts > 0] - 1] = offsets[1:][counts > 0]
    stored: IntArray = ends[: len(begins)] - begins
    return stored
