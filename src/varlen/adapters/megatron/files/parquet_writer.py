"""Write packed rows to Parquet as Megatron-Bridge 0.6 has it, in row groups made for reading in any order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from varlen.adapters.megatron.files.flat import (
    LENGTHS,
    ROWS_AT_A_TIME,
    as_stored,
    between,
    from_dicts,
    joined,
)
from varlen.adapters.megatron.files.paths import PARQUET
from varlen.adapters.megatron.rows import PackedRows
from varlen.errors import DocumentsError, SettingError
from varlen.files.token_tables import list_column, sync, unfinished
from varlen.offline.outputs import disk_faults

ROW_GROUP_TOKENS = 1 << 14
"""Tokens that are decoded to read one of them, unless a row has more."""

Compression = Literal["zstd", "snappy", "none"]


class PackedParquetWriter:
    """Write packed rows to one Parquet file, streamed, whole or not at all.

    The columns are those that Megatron-Bridge 0.6 writes, of its types: `input_ids` list<int64>, `loss_mask`
    list<int8>, `seq_start_id` list<int64>. Rows that know their `seq_lengths`, the positions of input of each
    document that aren't padding, have them in a column list<int32>, which the releases' readers leave aside. Row
    groups hold `row_group_tokens` instead of 500 rows, and bytes of the same rank lie together under zstd; pages have
    checksums, which our reader verifies.

    The file appears under its name when `close` returns, or at the end of a `with` block that didn't raise.
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
        self.path = Path(path)
        if not str(self.path).lower().endswith(PARQUET):
            raise SettingError(
                f"{self.path} must end in .idx.parquet: Megatron-Bridge knows packed Parquet by its name"
            )
        for name, value in (("row_group_tokens", row_group_tokens), ("row_group_rows", row_group_rows)):
            if value is not None and value < 1:
                raise SettingError(f"{name} must be at least 1, got {value}")
        self._tokens, self._rows, self._compression = row_group_tokens, row_group_rows, compression
        self._waiting: list[PackedRows] = []
        self._waiting_tokens = self._waiting_rows = 0
        self._writer: Any = None
        self._is_done = self._has_lengths = False
        self.num_rows = self.num_tokens = 0
        with disk_faults(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._partial = unfinished(self.path)

    def write(self, rows: PackedRows) -> None:
        """Add rows.

        Args:
            rows: in the order in which they are to be read.

        Raises:
            DocumentsError: a row isn't a packed row; says which, counted over all that was written.
            SettingError: the disk is full, or the file is closed already.
        """
        if self._is_done:
            raise SettingError(f"{self.path} is closed; open another writer")
        if rows.num_rows == 0:
            return
        rows = as_stored(rows, self.num_rows)
        has_lengths = rows.seq_lengths is not None
        if self.num_rows and has_lengths != self._has_lengths:
            raise DocumentsError(
                f"{self.path}: the rows from {self.num_rows:,} on have {'' if has_lengths else 'no '}`seq_lengths`, "
                f"and those before have {'none' if has_lengths else 'them'}; give all or none"
            )
        self._has_lengths = has_lengths
        self.num_rows += rows.num_rows
        self.num_tokens += len(rows.input_ids)
        self._waiting.append(rows)
        self._waiting_tokens += len(rows.input_ids)
        self._waiting_rows += rows.num_rows
        if self._waiting_tokens >= self._tokens or self._waiting_rows >= (
            self._rows or self._waiting_rows + 1
        ):
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

        columns = {
            "input_ids": list_column(rows.input_ids.astype(np.int64, copy=False), rows.offsets),
            "loss_mask": list_column(rows.loss_mask.astype(np.int8, copy=False), rows.offsets),
            "seq_start_id": list_column(
                rows.seq_start_id.astype(np.int64, copy=False), rows.document_offsets
            ),
        }
        if rows.seq_lengths is not None:
            columns[LENGTHS] = list_column(rows.seq_lengths, rows.document_offsets)
        table = pa.table(columns)
        with disk_faults(self.path):
            if self._writer is None:
                self._writer = _opened(self._partial, table.schema, self._compression)
            self._writer.write_table(table, row_group_size=rows.num_rows)

    def close(self) -> None:
        """Write what is left and let the file appear under its name.

        Raises:
            DocumentsError: no row was written.
            SettingError: the disk is full.
        """
        if self._is_done:
            return
        try:
            if self.num_rows == 0:
                raise DocumentsError(f"no rows were written to {self.path}; a packed file needs one at least")
            self._flush(is_last=True)
            with disk_faults(self.path):
                self._writer.close()
                sync(self._partial)
                self._partial.replace(self.path)
                sync(self.path.absolute().parent)
            self._is_done = True
        finally:
            self.abort()

    def abort(self) -> None:
        """Leave nothing, unless the file was closed."""
        if not self._is_done and self._writer is not None:
            self._writer.close()
        self._is_done, self._waiting = True, []
        self._partial.unlink(missing_ok=True)

    def __enter__(self) -> PackedParquetWriter:
        """Return the writer."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close the file, or leave none if the block raised."""
        if kind is None:
            self.close()
        else:
            self.abort()


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
        for start in range(0, len(rows), ROWS_AT_A_TIME):
            some = rows[start : start + ROWS_AT_A_TIME]
            writer.write(from_dicts(some, lambda row, start=start: f"row {start + row:,}"))  # type: ignore[misc]
