"""Packed Parquet files of every dialect, one or many, read at any row.

A row group can only be decoded whole. Ours hold some ten thousand tokens, so that a row in random order costs little
more than itself; the releases' hold 500 packs, and what was decoded last is kept, up to a number of bytes.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from varlen.adapters.megatron.files.reader import (
    COLUMNS,
    LENGTHS,
    MASK,
    PARQUET,
    PackedReader,
    Spec,
    between,
    from_flat,
    joined,
    resolve_packed_parquet_paths,
    taken,
    taken_from,
    with_lengths,
)
from varlen.adapters.megatron.files.writer import PackedWriter, write_dicts
from varlen.adapters.megatron.rows import PackedRows
from varlen.documents.pretokenized import flat_column
from varlen.errors import DocumentsError, SettingError, SourceError, VarlenError, described
from varlen.files.formats.row_groups import column_chunks
from varlen.files.ours import disk_faults
from varlen.files.rows import listed
from varlen.files.token_tables import list_column
from varlen.types import IntArray

_KEPT_BYTES = 256 << 20
_BATCH_TOKENS = 1 << 20
_MOST_OPEN = 64  # files at a time


class PackedParquet(PackedReader):
    """Packed rows of one or more Parquet files, in the order of their names.

    Reads what Megatron-Bridge 0.4 to 0.6 and varlen write: lists of 32- or 64-bit `input_ids`, a `loss_mask` of
    booleans or numbers, `seq_start_id`, and varlen's `seq_lengths` where it is there. Every file's columns are
    checked here, and every row when it is read.

    Several threads may use it, a forked process opens it again, and it can be pickled.
    """

    def __init__(
        self, spec: Spec, *, kept_bytes: int = _KEPT_BYTES, wait_s: float = 0.0, masks: bool = True
    ) -> None:
        """Read the files' metadata.

        Args:
            spec: a file, a glob, a folder, or several.
            kept_bytes: of decoded row groups that stay in memory; the last one does, however large.
            wait_s: seconds to wait for files that another node has just written to a network file system.
            masks: read `loss_mask`; else it need not be there, and is 1 throughout.

        Raises:
            SourceError: nothing is there, a file is damaged or has other columns, or none holds a row.
        """
        self.paths = resolve_packed_parquet_paths(spec, wait_s=wait_s)
        self._kept_bytes, self._masks = kept_bytes, masks
        self._sizes, self._metadata, self._has_lengths = [], [], []
        groups: list[IntArray] = []
        for path in self.paths:
            metadata, names = _described(path, masks=masks)
            self._sizes.append(Path(path).stat().st_size)
            self._metadata.append(metadata)
            self._has_lengths.append(LENGTHS in names)
            count = metadata.num_row_groups
            groups.append(np.array([metadata.row_group(g).num_rows for g in range(count)], dtype=np.int64))
        self._file_groups = np.cumsum([0, *map(len, groups)])
        self._bounds = np.cumsum(np.concatenate([[0], *groups]))  # rows before each row group, over all files
        self.num_rows = int(self._bounds[-1])
        if self.num_rows == 0:
            raise SourceError(f"{_named(self.paths)} with no row; was every file written completely?")
        self._reset()

    def _reset(self) -> None:
        """Start without open files and decoded rows."""
        self._process, self._lock = os.getpid(), threading.Lock()
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._kept: OrderedDict[int, PackedRows] = OrderedDict()
        self._held = 0

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is open or decoded."""
        own = ("_process", "_lock", "_open", "_kept", "_held")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the files again; they are opened by the first read."""
        self.__dict__.update(state)
        self._reset()

    @property
    def num_row_groups(self) -> int:
        """Row groups of all files."""
        return len(self._bounds) - 1

    def _rows_of(self, ids: IntArray) -> PackedRows:
        return taken_from(self._bounds, ids, lambda group, local: taken(self._group(group), local))

    def batches(self) -> Iterator[PackedRows]:
        """Yield all rows in order, up to a million tokens or one row at a time."""
        for number, path in enumerate(self.paths):
            first = 0
            with _faults(path):
                file = self._ready(number)
            with file:
                with _faults(path):
                    rows = _rows_at_a_time(file)
                batches = file.iter_batches(rows, columns=self._columns(number), use_threads=False)
                while True:
                    with _faults(path):
                        batch = next(batches, None)
                    if batch is None:
                        break
                    yield self._with_lengths_of_any(_decoded(batch, path, first))
                    first += batch.num_rows

    def _with_lengths_of_any(self, rows: PackedRows) -> PackedRows:
        """Add `seq_lengths` to the rows if any file has them."""
        return with_lengths(rows) if any(self._has_lengths) else rows

    def _columns(self, number: int) -> list[str]:
        read = _read_columns(masks=self._masks)
        return [*read, LENGTHS] if self._has_lengths[number] else read

    def close(self) -> None:
        """Close the files and forget what was decoded; the next read opens them again."""
        self._reset_after_fork()
        with self._lock:
            for file in self._open.values():
                file.close()
            self._open.clear()
            self._kept.clear()
            self._held = 0

    def _reset_after_fork(self) -> None:
        """Reset in a forked process, which can't share its parent's lock and open files."""
        if self._process != os.getpid():
            self._reset()

    def _group(self, group: int) -> PackedRows:
        """Return a row group's rows, decoded now or earlier."""
        self._reset_after_fork()
        with self._lock:
            if group in self._kept:
                self._kept.move_to_end(group)
                return self._kept[group]
            number = int(np.searchsorted(self._file_groups, group, side="right")) - 1
            first_group = int(self._file_groups[number])
            path = self.paths[number]
            with _faults(path):
                read = self._opened(number).read_row_group
                table = read(group - first_group, columns=self._columns(number), use_threads=False)
                batch = table.combine_chunks().to_batches()[0]
            first = int(self._bounds[group] - self._bounds[first_group])
            rows = self._with_lengths_of_any(_decoded(batch, path, first))
            self._keep(group, rows)
            return rows

    def _keep(self, group: int, rows: PackedRows) -> None:
        self._kept[group] = rows
        self._held += _bytes(rows)
        while self._held > self._kept_bytes and len(self._kept) > 1:
            self._held -= _bytes(self._kept.popitem(last=False)[1])

    def _opened(self, number: int) -> Any:
        """Return an open file; the least recently used ones are closed."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        self._open[number] = file = self._ready(number)
        while len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)[1].close()
        return file

    def _ready(self, number: int) -> Any:
        """Open a file, unless its size has changed."""
        import pyarrow.parquet as pq

        path = self.paths[number]
        size = Path(path).stat().st_size
        if size != self._sizes[number]:
            raise SourceError(
                f"{path} was replaced while it was read: it had {self._sizes[number]:,} bytes, and has {size:,}; "
                "open it again"
            )
        return pq.ParquetFile(
            path, metadata=self._metadata[number], pre_buffer=False, page_checksum_verification=True
        )


def _bytes(rows: PackedRows) -> int:
    """Return the approximate bytes of rows in memory."""
    return rows.input_ids.nbytes + rows.loss_mask.nbytes + 2 * rows.seq_start_id.nbytes + rows.offsets.nbytes


def _named(paths: list[str]) -> str:
    return f"{paths[0]} is a file" if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1:,} more are files"


@contextmanager
def _faults(path: str) -> Iterator[None]:
    """Turn errors of Arrow and the system into a SourceError that names the file."""
    try:
        yield
    except VarlenError:
        raise
    except FileNotFoundError as error:
        raise SourceError(f"{path} isn't there any more") from error
    except Exception as error:
        raise SourceError(f"{path} is not a Parquet file, or is damaged: {described(error)}") from error


def _read_columns(*, masks: bool) -> list[str]:
    return [name for name in COLUMNS if masks or name != MASK]


def _described(path: str, *, masks: bool = True) -> tuple[Any, list[str]]:
    """Return a file's metadata and its columns' names, if they are those of packed rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _faults(path), pq.ParquetFile(path) as file:
        metadata, schema = file.metadata, file.schema_arrow
    read = _read_columns(masks=masks)
    missing = [name for name in read if name not in schema.names]
    if missing:
        raise SourceError(
            f"{path} has no column {listed(missing)}; packed rows have {listed(read)}, and this file has "
            f"{listed(schema.names)}"
        )
    for name in (*read, *([LENGTHS] if LENGTHS in schema.names else [])):
        kind = schema.field(name).type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        is_bool = is_list and name == MASK and pa.types.is_boolean(kind.value_type)
        if not (is_list and (is_bool or pa.types.is_integer(kind.value_type))):
            raise SourceError(
                f"{path} holds {kind} in the column `{name}`, which must be a list of whole numbers"
                f"{' or booleans' if name == MASK else ''}"
            )
    return metadata, list(schema.names)


def most_tokens_at_once(path: str | Path) -> int:
    """Return how many tokens must be decoded at worst to read one row; 0 where every row group is one row."""
    import pyarrow.parquet as pq

    metadata, _ = _described(str(path))
    groups = [g for g in range(metadata.num_row_groups) if metadata.row_group(g).num_rows > 1]
    with _faults(str(path)), pq.ParquetFile(path, metadata=metadata) as file:
        return max((_values_in(file, group) for group in groups), default=0)


def _values_in(file: Any, group: int) -> int:
    paths = [file.schema.column(index).path for index in range(len(file.schema))]
    wanted = [index for index, path in enumerate(paths) if path.startswith(f"{COLUMNS[0]}.")]
    return sum(chunk.num_values for chunk in column_chunks(file, group, wanted))


def _rows_at_a_time(file: Any) -> int:
    """Return how many rows of a file to decode at once when all are read in order."""
    groups = range(min(file.num_row_groups, 8))
    rows = sum(file.metadata.row_group(group).num_rows for group in groups)
    values = sum(_values_in(file, group) for group in groups)
    return max(1, _BATCH_TOKENS * max(int(rows), 1) // max(values, 1))


def _decoded(batch: Any, path: str, first: int) -> PackedRows:
    wrong: dict[int, str] = {}
    flat = {}
    for name in batch.schema.names:
        flat[name] = flat_column(batch.column(name), name, wrong)
    if wrong:
        row = min(wrong)
        raise SourceError(f"{path} row {first + row + 1:,} {wrong[row]}")
    if MASK not in flat:
        ids, offsets = flat[COLUMNS[0]]
        flat[MASK] = np.ones(len(ids), np.int8), offsets
    return from_flat(flat, lambda row: f"{path} row {first + row + 1:,}")


# Write packed rows to Parquet as Megatron-Bridge 0.6 has it, in row groups made for reading in any order.

ROW_GROUP_TOKENS = 1 << 14
"""Tokens that are decoded to read one of them, unless a row has more."""

Compression = Literal["zstd", "snappy", "none"]


class PackedParquetWriter(PackedWriter):
    """Write packed rows to one Parquet file, streamed, whole or not at all.

    The columns are those that Megatron-Bridge 0.6 writes, of its types: `input_ids` list<int64>, `loss_mask`
    list<int8>, `seq_start_id` list<int64>. Rows that know their `seq_lengths`, the positions of input of each
    document that aren't padding, have them in a column list<int32>, which the releases' readers ignore. Row groups
    hold `row_group_tokens` instead of 500 rows, and columns are stored with BYTE_STREAM_SPLIT encoding under zstd;
    pages have checksums, which our reader verifies.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        row_group_tokens: int = ROW_GROUP_TOKENS,
        row_group_rows: int | None = None,
        compression: Compression = "zstd",
    ) -> None:
        """Begin a file.

        Args:
            path: that ends in `.parquet` or `.pq`; the releases look for `.idx.parquet` in most places.
            row_group_tokens: stored tokens of a row group at most, and one row at least.
            row_group_rows: rows of a row group at most; None for as many as its tokens allow.
            compression: of pages.

        Raises:
            SettingError: the name ends otherwise, a number is below 1, or the place can't be written.
        """
        if not str(path).lower().endswith(PARQUET):
            raise SettingError(f"{path} must end in .parquet or .pq (Megatron-Bridge looks for .idx.parquet)")
        for name, value in (("row_group_tokens", row_group_tokens), ("row_group_rows", row_group_rows)):
            if value is not None and value < 1:
                raise SettingError(f"{name} must be at least 1, got {value}")
        super().__init__(Path(path), Path(path))
        self._tokens, self._rows, self._compression = row_group_tokens, row_group_rows, compression
        self._waiting: list[PackedRows] = []
        self._waiting_tokens = self._waiting_rows = 0
        self._writer: Any = None

    def _add(self, rows: PackedRows) -> None:
        self._waiting.append(rows)
        self._waiting_tokens += len(rows.input_ids)
        self._waiting_rows += rows.num_rows
        is_full = self._rows is not None and self._waiting_rows >= self._rows
        if is_full or self._waiting_tokens >= self._tokens:
            self._flush(is_last=False)

    def _flush(self, *, is_last: bool) -> None:
        """Write the row groups that are full, or all that is left."""
        if not self._waiting:
            return
        rows, start = joined(self._waiting), 0
        while start < rows.num_rows:
            limit = int(rows.offsets[start]) + self._tokens
            stop = max(int(np.searchsorted(rows.offsets, limit, side="right")) - 1, start + 1)
            stop = min(stop, start + (self._rows or rows.num_rows))
            is_open = int(rows.offsets[stop] - rows.offsets[start]) < self._tokens and stop == rows.num_rows
            if is_open and not is_last and stop - start < (self._rows or stop + 1):
                break  # the next rows may go with it
            self._write_group(between(rows, start, stop))
            start = stop
        left = between(rows, start, rows.num_rows)
        self._waiting = [left] if left.num_rows else []
        self._waiting_tokens, self._waiting_rows = len(left.input_ids), left.num_rows

    def _write_group(self, rows: PackedRows) -> None:
        import pyarrow as pa

        starts = rows.seq_start_id.astype(np.int64, copy=False)
        columns = {
            "input_ids": list_column(rows.input_ids.astype(np.int64, copy=False), rows.offsets),
            "loss_mask": list_column(rows.loss_mask.astype(np.int8, copy=False), rows.offsets),
            "seq_start_id": list_column(starts, rows.document_offsets),
        }
        if rows.seq_lengths is not None:
            columns[LENGTHS] = list_column(rows.seq_lengths, rows.document_offsets)
        table = pa.table(columns)
        with disk_faults(self.path):
            if self._writer is None:
                self._writer = _opened(self._partial[0], table.schema, self._compression)
            self._writer.write_table(table, row_group_size=rows.num_rows)

    def _finish(self) -> None:
        if self.num_rows == 0:
            raise DocumentsError(f"no rows were written to {self.path}; a packed file needs one at least")
        self._flush(is_last=True)
        self._writer.close()

    def _give_up(self) -> None:
        self._waiting = []
        if self._writer is not None:
            self._writer.close()


def _opened(path: Path, schema: Any, compression: Compression) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetWriter(
        path,
        schema,
        compression=compression,
        compression_level=1 if compression == "zstd" else None,
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
        use_byte_stream_split=[f"{name}.list.element" for name in schema.names],
    )


def write_packed_parquet(
    rows: Sequence[Mapping[str, Any]], output_path: str | Path, row_group_size: int = 500
) -> None:
    """Write packed rows given as dictionaries, as `write_packed_parquet` of Megatron-Bridge 0.6 does.

    The values and the types of the three columns are the same, also where masks of booleans and of numbers are
    mixed, which 0.4 and 0.5 refuse. What differs: row groups are small, so that rows can be read in any order; rows
    may have `seq_lengths`; boundaries are checked; the file appears when it is whole.

    Args:
        rows: with `input_ids`, `loss_mask` and `seq_start_id`, and perhaps `seq_lengths`; what the releases'
            `fill_packing_strategy` returns.
        output_path: ends in `.parquet` or `.pq`.
        row_group_size: rows of a row group at most.

    Raises:
        DocumentsError: a row isn't a packed row, or there is none.
        SettingError: the place can't be written.
    """
    with PackedParquetWriter(output_path, row_group_rows=row_group_size) as writer:
        write_dicts(writer, rows)
