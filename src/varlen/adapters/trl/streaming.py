"""A stream of documents as a stream of packed rows, which datasets can shard, shuffle and resume like any other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Features, IterableDataset
from datasets.features.features import cast_to_python_objects
from datasets.iterable_dataset import _BaseExamplesIterable

from varlen.adapters.trl.columns import (
    METHODS,
    SEQ_LENGTHS,
    Strategy,
    in_trl_order,
    lengths_of,
    packed,
    schema_with_lengths,
    warn_of_truncation,
)
from varlen.arguments import as_count
from varlen.errors import DocumentsError
from varlen.pack.window import WindowPacker
from varlen.types import IntArray, Packing


def packed_stream(
    dataset: IterableDataset, capacity: int, strategy: Strategy, window: Any
) -> IterableDataset:
    """Return a stream of packed rows."""
    size = None if window in (None, -1) else as_count(window, "batch_size")
    documents = dataset._ex_iterable
    # `map` brings it into tables of `size` documents, in the types that the stream names.
    if documents.iter_arrow:
        documents = dataset.with_format("arrow").map(_as_they_are, batched=True, batch_size=size)._ex_iterable
    rows = _PackedRows(documents, capacity, strategy, size, dataset.features)
    info = dataset.info.copy()
    if info.features is not None and strategy != "wrapped":
        schema = schema_with_lengths(info.features.arrow_schema)
        info.features = Features(
            {**info.features, SEQ_LENGTHS: Features.from_arrow_schema(schema)[SEQ_LENGTHS]}
        )
    return IterableDataset(
        ex_iterable=rows,
        info=info,
        split=dataset.split,
        formatting=dataset._formatting,
        distributed=dataset._distributed,
        token_per_repo_id=dataset._token_per_repo_id,
    )


def _as_they_are(table: pa.Table) -> pa.Table:
    return table


class _PackedRows(_BaseExamplesIterable):  # type: ignore[misc]
    """Packed rows of documents that come as Arrow tables; sharded and shuffled where those are.

    Its state is the number of rows yielded; resuming packs the earlier rows again without yielding them.
    """

    def __init__(
        self,
        ex_iterable: _BaseExamplesIterable,
        capacity: int,
        strategy: Strategy,
        window: int | None,
        features: Features | None,
    ) -> None:
        super().__init__()
        self.ex_iterable = ex_iterable
        self._settings = (capacity, strategy, window, features)

    @property
    def iter_arrow(self) -> Any:
        return self._iter_arrow

    @property
    def num_shards(self) -> int:
        return int(self.ex_iterable.num_shards)

    def _init_state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"num_rows": 0, "type": type(self).__name__}
        self._state_dict = state
        return state

    def shuffle_data_sources(self, generator: np.random.Generator) -> _PackedRows:
        return _PackedRows(self.ex_iterable.shuffle_data_sources(generator), *self._settings)

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> _PackedRows:
        part = self.ex_iterable.shard_data_sources(num_shards, index, contiguous=contiguous)
        return _PackedRows(part, *self._settings)

    def reshard_data_sources(self) -> _PackedRows:
        return _PackedRows(self.ex_iterable.reshard_data_sources(), *self._settings)

    def __iter__(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        for key, table in self._tables():
            for number in range(table.num_rows):
                if self._state_dict:
                    self._state_dict["num_rows"] += 1
                yield f"{key}_{number}", {name: table[name][number].as_py() for name in table.column_names}

    def _iter_arrow(self) -> Iterator[tuple[Any, pa.Table]]:
        """Yield the rows of a window at a time."""
        for key, table in self._tables():
            if self._state_dict:
                self._state_dict["num_rows"] += table.num_rows
            yield key, table

    def _tables(self) -> Iterator[tuple[str, pa.Table]]:
        """Yield tables from the current state on."""
        skip = self._state_dict["num_rows"] if self._state_dict else 0
        for number, table in enumerate(_rows_of(self.ex_iterable, *self._settings)):
            if skip < table.num_rows:
                yield str(number), table.slice(skip)
            skip = max(skip - table.num_rows, 0)


def _rows_of(
    documents: _BaseExamplesIterable,
    capacity: int,
    strategy: Strategy,
    window: int | None,
    features: Features | None,
) -> Iterator[pa.Table]:
    """Yield a table of packed rows per window, and one of the rest."""
    method, overlong = METHODS[strategy]
    packer = WindowPacker(capacity=capacity, window=window or 2**31 - 1, method=method, overlong=overlong)
    pending = _Pending(with_lengths=strategy != "wrapped")
    documents._init_state_dict()  # from the first document on, whatever was read before
    for table in _tables_of(documents, window, features):
        lengths = pending.take_in(table)
        held = np.minimum(lengths, capacity) if overlong == "truncate" else lengths
        ready = packer.add(lengths)
        pending.note(held)
        if ready.num_packs:
            yield pending.packed_rows(ready)
    last = packer.flush()
    if last.num_packs:
        yield pending.packed_rows(last)
    warn_of_truncation(packer.ledger, capacity)


def _tables_of(
    documents: _BaseExamplesIterable, window: int | None, features: Features | None
) -> Iterator[pa.Table]:
    """Yield tables of documents, all of one schema."""
    schema: pa.Schema | None = None
    try:
        for table in (
            (table for _, table in documents.iter_arrow())
            if documents.iter_arrow
            else _tables_of_rows(documents, window, features)
        ):
            schema = schema or table.schema.remove_metadata()
            yield table.cast(schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise DocumentsError(
            f"the rows of this stream differ in type ({' '.join(str(error).split())}); make the stream with "
            "features=..., which name the type of each column"
        ) from None


def _tables_of_rows(
    documents: _BaseExamplesIterable, window: int | None, features: Features | None
) -> Iterator[pa.Table]:
    """Tables of documents that come as Python rows, a window at a time.

    datasets would make a table of every row, and an empty list has no element type.
    """
    rows = (row for _, row in documents)
    while part := list(itertools.islice(rows, window)):
        names = features or part[0]
        columns = {name: [row.get(name) for row in part] for name in names}
        if features:
            yield pa.Table.from_pydict(features.encode_batch(columns), schema=features.arrow_schema)
        else:
            yield pa.Table.from_pydict(cast_to_python_objects(columns))


class _Pending:
    """Documents of which tokens are still to be returned."""

    def __init__(self, *, with_lengths: bool) -> None:
        self._with_lengths = with_lengths
        self._batches: list[pa.RecordBatch] = []
        self._records: IntArray = np.empty(0, np.int64)
        self._left: IntArray = np.empty(0, np.int64)
        self._num_records = 0

    def take_in(self, table: pa.Table) -> IntArray:
        """Keep documents, and return their lengths."""
        schema = table.schema.remove_metadata()
        try:
            lengths = lengths_of(table.to_batches(), schema)
        except Exception as error:
            error.add_note(f"rows are counted from row {self._num_records:,} of the stream")
            raise
        self._schema = schema
        self._batches += table.to_batches()
        return lengths

    def note(self, held: IntArray) -> None:
        """Note how many tokens of the last documents taken in will be returned."""
        records = np.arange(self._num_records, self._num_records + held.size)
        self._records = np.concatenate([self._records, records])
        self._left = np.concatenate([self._left, held])
        self._num_records += held.size

    def packed_rows(self, packing: Packing) -> pa.Table:
        """Return packed rows, and drop documents that have been returned whole."""
        rows = in_trl_order(packing)
        first = int(self._records[0])
        stored_rows = np.full(self._num_records - first, -1, np.int64)
        stored_rows[self._records - first] = np.arange(self._records.size)
        rows = replace(rows, documents=rows.documents - first)
        table = packed(self._batches, stored_rows, rows, self._schema, with_lengths=self._with_lengths)
        np.subtract.at(self._left, stored_rows[rows.documents], rows.lengths)
        waiting = self._left > 0
        whole = pa.Table.from_batches(self._batches, self._schema).filter(pa.array(waiting))
        self._batches = whole.to_batches()
        self._records, self._left = self._records[waiting], self._left[waiting]
        return table
