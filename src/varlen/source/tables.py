"""Parquet, Arrow and Feather files: tables by column, cut at row groups or record batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

from varlen.errors import SourceError
from varlen.source.files import File
from varlen.source.opening import open_seekable
from varlen.source.rows import Rows

_BATCH_BYTES = 4 << 20
_MOST_BATCH_ROWS = 8192
_MAGIC = b"ARROW1"


def column_names(file: File) -> list[str]:
    """Return the names of a table's columns.

    Raises:
        SourceError: the file isn't such a table.
    """
    with _table_faults(file), open_seekable(file) as stored, _table(file, stored) as table:
        return list(table.schema_arrow.names if file.format == "parquet" else table.schema.names)


def cut_points(file: File, target_bytes: int) -> list[int] | None:
    """Return the row groups or record batches at which a file may be cut; None where it can't be.

    Raises:
        SourceError: the file isn't such a table.
    """
    if 0 <= file.size <= target_bytes:
        return None
    with _table_faults(file), open_seekable(file) as stored, _table(file, stored) as table:
        if file.format != "parquet":
            count = getattr(table, "num_record_batches", None)
            if count is None:
                return None
            step = max(int(count * target_bytes / max(file.size, 1)), 1)
            return [*range(0, count, step), count]
        cuts, filled = [0], 0
        for group in range(table.num_row_groups):
            if filled >= target_bytes:
                cuts.append(group)
                filled = 0
            filled += table.metadata.row_group(group).total_byte_size
        return [*cuts, table.num_row_groups]


def read(file: File, wanted: Sequence[str], start: int = 0, stop: int | None = None) -> Iterator[Rows]:
    """Yield the rows of a table, a few megabytes at a time, as Arrow arrays.

    Args:
        file: to be read.
        wanted: columns, of those that `column_names` gives.
        start: row group or record batch to begin with.
        stop: row group or record batch to end before; None for all.

    Raises:
        SourceError: the file isn't such a table, or can't be read any further.
    """
    row = 0
    try:
        with _table_faults(file), open_seekable(file) as stored, _table(file, stored) as table:
            parts = _parquet if file.format == "parquet" else _arrow
            for row, batch in parts(table, list(wanted), start, stop):
                columns = {name: batch.column(name) for name in wanted}
                numbers = range(row + 1, row + 1 + batch.num_rows)
                yield Rows(columns=columns, numbers=numbers, path=file.path)
                row += batch.num_rows
    except SourceError as error:
        after = f" (after row {row:,})" if row else ""
        raise SourceError(f"{error}{after}") from error


def _parquet(table: Any, wanted: list[str], start: int, stop: int | None) -> Iterator[tuple[int, Any]]:
    """Yield the row that each batch begins with, and the batch."""
    groups = range(start, table.num_row_groups if stop is None else stop)
    row = sum(table.metadata.row_group(group).num_rows for group in range(start))
    for group in groups:
        shape = table.metadata.row_group(group)
        if shape.num_rows == 0:
            continue
        row_bytes = shape.total_byte_size / shape.num_rows
        rows = max(min(int(_BATCH_BYTES / max(row_bytes, 1)), _MOST_BATCH_ROWS), 1)
        for batch in table.iter_batches(rows, row_groups=[group], columns=wanted, use_threads=False):
            yield row, batch
            row += batch.num_rows


def _arrow(table: Any, wanted: list[str], start: int, stop: int | None) -> Iterator[tuple[int, Any]]:
    """Yield the row that each batch begins with, and the batch, cut where it is large."""
    count = getattr(table, "num_record_batches", None)
    row = sum(table.get_batch(index).num_rows for index in range(start)) if count is not None else 0
    batches = (
        table
        if count is None
        else (table.get_batch(index) for index in range(start, count if stop is None else stop))
    )
    for batch in batches:
        chosen = batch.select(wanted)
        row_bytes = chosen.nbytes / max(batch.num_rows, 1)
        rows = max(min(int(_BATCH_BYTES / max(row_bytes, 1)), _MOST_BATCH_ROWS), 1)
        for at in range(0, batch.num_rows, rows):
            yield row + at, chosen.slice(at, rows)
        row += batch.num_rows


@contextmanager
def _table(file: File, stored: BinaryIO) -> Iterator[Any]:
    """Open a table; extension types are never rebuilt from code that a file carries."""
    import pyarrow as pa

    if file.format == "parquet":
        import pyarrow.parquet as pq

        # Column chunks are streamed through a small buffer: row groups may be larger than memory.
        with pq.ParquetFile(stored, pre_buffer=False, buffer_size=1 << 20) as table:
            yield table
        return
    is_file = stored.read(len(_MAGIC)) == _MAGIC
    stored.seek(0)
    with pa.ipc.open_file(stored) if is_file else pa.ipc.open_stream(stored) as table:
        yield table


@contextmanager
def _table_faults(file: File) -> Iterator[None]:
    """Turn what Arrow says of a broken file into a sentence."""
    import pyarrow as pa

    kind = "a Parquet" if file.format == "parquet" else "an Arrow"
    try:
        yield
    except (pa.ArrowException, ValueError, KeyError, IndexError, MemoryError) as error:
        if isinstance(error, SourceError):
            raise
        said = str(error).splitlines()[0].rstrip(". ") if str(error) else type(error).__name__
        why = (
            f"is not {kind} file, or is damaged: {said}"
            if file.size
            else f"is empty (0 bytes), not {kind} file"
        )
        raise SourceError(f"{file.path} {why}") from error
