"""Columns of lists in Arrow memory: their lengths, without reading tokens, and pieces of them as new rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from varlen.errors import DocumentsError
from varlen.types import Int32Array, IntArray, Ledger, Method, Overlong, Packing

SEQ_LENGTHS = "seq_lengths"  # the column in which TRL keeps the lengths of a row's documents


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Which pieces of which documents are in which row, in TRL's order."""

    documents: IntArray
    """int64 `[num_pieces]`."""
    starts: Int32Array
    """int32 `[num_pieces]`: first value of each piece within its document."""
    lengths: Int32Array
    """int32 `[num_pieces]`: values of each piece."""
    offsets: IntArray
    """int64 `[num_rows + 1]`: where each row's pieces begin."""

    def part(self, first: int, last: int) -> Rows:
        """Return the rows from `first` up to `last`."""
        begin, end = self.offsets[first], self.offsets[last]
        return Rows(
            documents=self.documents[begin:end],
            starts=self.starts[begin:end],
            lengths=self.lengths[begin:end],
            offsets=self.offsets[first : last + 1] - begin,
        )


def in_trl_order(packing: Packing) -> Rows:
    """Return the packs of a Packing in TRL's order.

    Packs are opened, and pieces placed in them, from the longest piece to the shortest. Equal lengths keep input
    order, as in TRL. What `wrapped` made is in that order already.
    """
    lengths = packing.lengths
    if packing.method == "wrapped" or not packing.num_packs:
        return Rows(
            documents=packing.document_ids, starts=packing.starts, lengths=lengths, offsets=packing.offsets
        )
    rank = np.empty(lengths.size, np.int64)
    rank[np.lexsort((packing.starts, packing.document_ids, -lengths))] = np.arange(lengths.size)
    opened = np.minimum.reduceat(rank, packing.offsets[:-1])
    sizes = np.diff(packing.offsets)
    order = np.lexsort((rank, np.repeat(opened, sizes)))
    offsets = np.zeros_like(packing.offsets)
    np.cumsum(sizes[np.argsort(opened)], out=offsets[1:])
    return Rows(
        documents=packing.document_ids[order],
        starts=packing.starts[order],
        lengths=lengths[order],
        offsets=offsets,
    )


def lengths_of(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> IntArray:
    """Return the length of every document, int64 `[num_documents]`, the same in all columns."""
    _check_types(schema)
    parts, done = [np.empty(0, np.int64)], 0
    for batch in batches:
        first, *others = (
            _lengths(column, name, done) for name, column in zip(batch.schema.names, batch.columns)
        )
        for name, lengths in zip(batch.schema.names[1:], others):
            if not np.array_equal(first, lengths):
                row = int(np.argmax(first != lengths))
                raise DocumentsError(
                    f"row {done + row:,} has {first[row]:,} values in {batch.schema.names[0]!r} but {lengths[row]:,} "
                    f"in {name!r} ({int((first != lengths).sum()):,} of {first.size:,} rows looked at differ); a row "
                    "needs one value per token in every column: remove the other columns, or correct them"
                )
        parts.append(first)
        done += first.size
    return np.concatenate(parts)


def _check_types(schema: pa.Schema) -> None:
    """Refuse columns that aren't lists, and rows that are packed already."""
    if not len(schema):
        raise DocumentsError("the data set has no columns; it needs one with lists of token ids")
    wrong = [
        field.name
        for field in schema
        if not (pa.types.is_list(field.type) or pa.types.is_large_list(field.type))
    ]
    if wrong:
        rest = [field.name for field in schema if field.name not in wrong]
        way = (
            f"keep the others with dataset.select_columns({rest})" if rest else "tokenize the data set first"
        )
        raise DocumentsError(
            f"column {wrong[0]!r} holds {schema.field(wrong[0]).type}, not lists of any length "
            f"({len(wrong):,} of {len(schema):,} columns are no lists); {way}"
        )
    if SEQ_LENGTHS in schema.names:
        raise DocumentsError(
            f"the data set has a column {SEQ_LENGTHS!r}, so it is packed already; pack the documents themselves, "
            f"or remove that column to pack rows as if they were documents"
        )


def _lengths(column: pa.Array, name: str, done: int) -> IntArray:
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise DocumentsError(
            f"row {done + row:,} has no list in {name!r} ({column.null_count:,} of {len(column):,} rows looked at "
            "have none); drop those rows first"
        )
    return np.asarray(pc.list_value_length(column).to_numpy(zero_copy_only=False), np.int64)


def packed(
    batches: list[pa.RecordBatch], stored_rows: IntArray, rows: Rows, schema: pa.Schema, *, with_lengths: bool
) -> pa.Table:
    """Return rows of packed documents, every column in its type.

    `stored_rows`: int64 `[num_documents]`: where each document stands among the rows of `batches`.
    """
    wanted = stored_rows[rows.documents]
    firsts = np.cumsum([0, *(batch.num_rows for batch in batches)])
    home = np.searchsorted(firsts, wanted, side="right") - 1
    homes = np.unique(home).tolist()
    lengths = rows.lengths.astype(np.int64)
    row_offsets = np.concatenate([[0], np.cumsum(lengths)])[rows.offsets]
    columns = []
    for number, field in enumerate(schema):
        parts = [
            _pieces(
                batches[at].column(number),
                wanted[home == at] - firsts[at],
                rows.starts[home == at],
                lengths[home == at],
            )
            for at in homes
        ]
        values = pa.concat_arrays(parts) if parts else pa.array([], field.type.value_type)
        if len(homes) > 1:  # by batch so far
            order = np.argsort(home, kind="stable")
            begins = np.empty(lengths.size, np.int64)
            begins[order] = np.cumsum(lengths[order]) - lengths[order]
            values = _gathered(values, begins, lengths)
        columns.append(_lists(row_offsets, values, field.type))
    if not with_lengths:
        return pa.Table.from_arrays(columns, schema=schema)
    seq = pa.array(rows.lengths, seq_type(schema).value_type)
    columns.append(_lists(rows.offsets, seq, seq_type(schema)))
    return pa.Table.from_arrays(columns, schema=schema_with_lengths(schema))


def seq_type(schema: pa.Schema) -> pa.DataType:
    """Return the type of `seq_lengths`, as wide as the first column's offsets: that is what TRL writes."""
    return pa.list_(pa.int64() if pa.types.is_large_list(schema.field(0).type) else pa.int32())


def schema_with_lengths(schema: pa.Schema) -> pa.Schema:
    """Return a schema with `seq_lengths`, and without the columns' earlier metadata."""
    return pa.schema([*schema, pa.field(SEQ_LENGTHS, seq_type(schema))])


def _lists(offsets: IntArray, values: pa.Array, kind: pa.DataType) -> pa.Array:
    form = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
    wide = pa.int64() if pa.types.is_large_list(kind) else pa.int32()
    return form.from_arrays(pa.array(offsets, wide), values, type=kind)


def _pieces(column: pa.Array, documents: IntArray, starts: Int32Array, lengths: IntArray) -> pa.Array:
    offsets = column.offsets.to_numpy(zero_copy_only=False)
    return _gathered(column.values, offsets[documents] + starts.astype(np.int64), lengths)


def _gathered(values: pa.Array, begins: IntArray, lengths: IntArray) -> pa.Array:
    """Return runs of values end to end: a view if they are adjacent already, else a copy."""
    if begins.size and (begins[1:] == begins[:-1] + lengths[:-1]).all():
        return values.slice(int(begins[0]), int(lengths.sum()))
    kind = values.type
    if values.null_count or not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        wide = pa.int64()
        views = pa.LargeListViewArray.from_arrays(pa.array(begins, wide), pa.array(lengths, wide), values)
        return views.flatten()
    before = np.cumsum(lengths) - lengths
    index: npt.NDArray[np.int64] = np.repeat(begins - before, lengths)
    index += np.arange(index.size)
    plain: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return pa.array(plain[index], kind)


# TRL's strategies of packing in varlen's words, and the warning where one loses tokens.

_log = logging.getLogger(__name__)

Strategy = Literal["bfd", "bfd_split", "bfd-requeue", "wrapped"]
METHODS: dict[Strategy, tuple[Method, Overlong]] = {
    "bfd": ("best_fit_decreasing", "truncate"),
    "bfd_split": ("best_fit_decreasing", "split"),
    "bfd-requeue": ("best_fit_decreasing", "split"),
    "wrapped": ("wrapped", "split"),
}
"""varlen's method and policy for each of TRL's strategies."""


def warn_of_truncation(ledger: Ledger, capacity: int) -> None:
    """Log the tokens that were cut off, if any were."""
    if ledger.truncated:
        _log.warning(
            "%s of %s tokens (%.2f %%) were cut off the ends of %s documents longer than %s tokens and will not be "
            'trained on; strategy="bfd_split" keeps them, and so does a larger seq_length',
            f"{ledger.truncated:,}",
            f"{ledger.tokens_in:,}",
            100 * ledger.truncated / ledger.tokens_in,
            f"{ledger.truncated_documents:,}",
            f"{capacity:,}",
        )
