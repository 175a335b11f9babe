"""Packed rows one by one, as data sets give them and collate functions take them, and as flat arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.adapters.megatron.rows import PackedRows
from varlen.counts import many
from varlen.errors import DocumentsError
from varlen.types import IntArray

Item = dict[str, Any]
"""One packed row: `input_ids`, `seq_boundaries`, `loss_mask`, and what the file knows besides."""


def rows_of_items(batch: Sequence[Mapping[str, Any]]) -> PackedRows:
    """Return rows that came one by one as packed rows."""
    if not len(batch):
        raise DocumentsError("a batch needs at least one packed row, got none")
    ids, masks, bounds = zip(*[_parts(number, item) for number, item in enumerate(batch)])
    lengths = [each for item in batch if (each := item.get("seq_lengths")) is not None]
    return PackedRows(
        input_ids=_joined(ids),
        loss_mask=_joined(masks),
        offsets=_summed([len(tokens) for tokens in ids]),
        seq_start_id=_joined([ends[:-1] for ends in bounds]),
        document_offsets=_summed([len(ends) - 1 for ends in bounds]),
        seq_lengths=_joined(
            [_lengths(number, each, len(bounds[number]) - 1) for number, each in enumerate(lengths)]
        )
        if len(lengths) == len(batch)
        else None,
    )


def _parts(
    number: int, item: Mapping[str, Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Return a row's tokens, its mask, and where its documents begin and the last one ends, from 0."""
    try:
        tokens, mask = np.asarray(item["input_ids"]), np.asarray(item["loss_mask"])
        ends = np.asarray(item["seq_boundaries"])
    except KeyError as error:
        raise DocumentsError(
            f"row {number:,} of the batch has no {error}; a packed row has input_ids, loss_mask "
            "and seq_boundaries"
        ) from None
    except (TypeError, ValueError, RuntimeError) as error:
        raise DocumentsError(f"row {number:,} of the batch is no packed row of numbers: {error}") from None
    if tokens.ndim != 1 or mask.shape != tokens.shape:
        seen = f"{len(mask):,} values" if tokens.ndim == mask.ndim == 1 else f"the shape {mask.shape}"
        stored = f"{len(tokens):,}" if tokens.ndim == 1 else f"the shape {tokens.shape} in"
        raise DocumentsError(f"row {number:,} of the batch has {stored} input_ids, but {seen} of loss_mask")
    is_bounds = ends.ndim == 1 and len(ends) > 1 and ends.dtype.kind in "iu"
    begin, end = (int(ends[0]), int(ends[-1])) if is_bounds else (0, -1)
    if not 0 <= begin <= end <= len(tokens):
        raise DocumentsError(
            f"row {number:,} of the batch has {len(tokens):,} input_ids, but seq_boundaries "
            f"{ends.reshape(-1)[:8].tolist()}; they must be at least two whole numbers that rise within these"
        )
    if begin > 0:
        ends = ends - begin
    if end - begin < len(tokens):
        tokens, mask = tokens[begin:end], mask[begin:end]
    return tokens, mask, ends


def _lengths(number: int, lengths: npt.ArrayLike, documents: int) -> npt.NDArray[np.int32]:
    """Return the real inputs of a row's documents."""
    found = np.asarray(lengths)
    if found.shape != (documents,) or found.dtype.kind not in "iu" or int(found.max()) >= 2**31:
        raise DocumentsError(
            f"row {number:,} of the batch has {many(documents, 'document')}, but seq_lengths {str(lengths)[:80]}; "
            "they must be whole numbers, one a document"
        )
    return found.astype(np.int32, copy=False)


def _joined(pieces: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return arrays end to end; one array as it is."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def named_row(batch: Sequence[Mapping[str, Any]], place: int) -> str:
    """Return the name of a row for messages: as files number them, from 1, where it is known."""
    number = batch[place].get("row")
    return f"row {place:,} of the batch" if number is None else f"row {number + 1:,}"


def item_of(rows: PackedRows, place: int, number: int, is_padding: bool) -> Item:
    """Return one of some rows: views of their arrays."""
    here = slice(int(rows.offsets[place]), int(rows.offsets[place + 1]))
    documents = slice(int(rows.document_offsets[place]), int(rows.document_offsets[place + 1]))
    item: Item = {
        "input_ids": rows.input_ids[here],
        "seq_boundaries": [*rows.seq_start_id[documents].tolist(), here.stop - here.start],
        "loss_mask": rows.loss_mask[here],
        "row": number,
    }
    if rows.seq_lengths is not None:
        item["seq_lengths"] = rows.seq_lengths[documents]
    if is_padding:
        item["loss_mask"], item["is_padding"] = np.zeros_like(item["loss_mask"]), True
    return item


def _summed(sizes: Iterable[int]) -> IntArray:
    """Return int64 `[sizes + 1]`: the sums of sizes before each, from 0."""
    return np.array([0, *accumulate(sizes)], np.int64)
