"""Parquet, Arrow and Feather files: tables by column, cut at row groups or record batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, BinaryIO

from varlen.errors import SourceError, VarlenError
from varlen.source.files import File
from varlen.source.opening import compression_of, open_seekable
from varlen.source.retry import first_line
from varlen.source.rows import Fault, Rows, place

_BATCH_BYTES = 4 << 20
_MOST_BATCH_ROWS = 8192
_MAGIC = b"ARROW1"


def column_names(file: File) -> list[str]:
    """Return the names of a table's columns.

    Raises:
        SourceError: the file isn't such a table.
    """
    with open_seekable(file) as stored, table_faults(file), _table(file, stored) as table:
        return list(table.schema_arrow.names if file.format == "parquet" else table.schema.names)


def cut_points(file: File, target_bytes: int) -> list[int] | None:
    """Return the row groups or record batches at which a file may be cut; None where it can't be.

    Raises:
        SourceError: the file isn't such a table.
    """
    if 0 <= file.size <= target_bytes or compression_of(file) is not None:
        return None
    with open_seekable(file) as stored, table_faults(file), _table(file, stored) as table:
        if file.format != "parquet":
            count = getattr(table, "num_record_batches", None)
            if count is None:
                return None
            step = max(int(count * target_bytes / max(file.size, 1)), 1)
            return [0, *range(step, count, step), count]
        cuts, filled = [0], 0
        for group in range(table.num_row_groups):
            if filled >= target_bytes:
                cuts.append(group)
                filled = 0
            filled += table.metadata.row_group(group).total_byte_size
        return [*cuts, table.num_row_groups]


def stretch_sizes(file: File, wanted: Sequence[str]) -> list[int] | None:
    """Estimate the bytes of each row group or record batch, from the file's description of itself alone.

    Args:
        file: to be read.
        wanted: columns; others aren't counted where the description tells them apart.

    Returns:
        None where the file can't be cut.

    Raises:
        SourceError: the file isn't such a table.
    """
    if file.size < 0 or compression_of(file) is not None:
        return None
    with open_seekable(file) as stored, table_faults(file), _table(file, stored) as table:
        if file.format != "parquet":
            count = getattr(table, "num_record_batches", None)
            return None if count is None else [file.size // max(count, 1)] * count
        sizes = []
        for group in range(table.num_row_groups):
            described = table.metadata.row_group(group)
            chunks = (described.column(index) for index in range(described.num_columns))
            sizes.append(
                sum(
                    chunk.total_uncompressed_size
                    for chunk in chunks
                    if chunk.path_in_schema.split(".")[0] in wanted
                )
            )
        return sizes


def count_rows(file: File, start: int, stop: int) -> int:
    """Count the rows of row groups, or record batches, [start, stop); of Arrow files they must be read.

    Raises:
        SourceError: the file isn't such a table, or is damaged.
    """
    with open_seekable(file) as stored, table_faults(file), _table(file, stored) as table:
        if file.format == "parquet":
            return sum(table.metadata.row_group(group).num_rows for group in range(start, stop))
        return sum(table.get_batch(index).num_rows for index in range(start, stop))


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
    base = cache(lambda: _rows_before(file, start))
    row = 0
    try:
        with open_seekable(file) as stored, table_faults(file), _table(file, stored) as table:
            batches = (_parquet if file.format == "parquet" else _arrow)(table, list(wanted), start, stop)
            for batch in batches:
                yield _rows(batch, file, row, base)
                row += batch.num_rows
    except SourceError as error:
        after = base() + row
        raise SourceError(f"{error} (after row {after:,})" if after else str(error)) from error


def _rows(batch: Any, file: File, before: int, base: Callable[[], int]) -> Rows:
    """Return the rows of a batch. Rows that point to where there is nothing, or aren't UTF-8, are faults."""
    import pyarrow as pa

    numbers: Sequence[int] = range(before + 1, before + 1 + batch.num_rows)
    columns, faults = batch.columns, []
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        sound, numbers = [batch.slice(0, 0).columns], []
        for index in range(batch.num_rows):
            number = base() + before + index + 1
            try:
                sound.append(_alone(batch.slice(index, 1)))
                numbers.append(before + index + 1)
            except pa.ArrowException as error:
                said = first_line(error)
                why = "holds text that is not valid UTF-8" if "UTF8" in said else f"is damaged: {said}"
                faults.append(Fault(where=place(file.path, "row", number), why=why, number=number))
        columns = [pa.concat_arrays(pieces) for pieces in zip(*sound)]
    named = dict(zip(batch.schema.names, columns))
    return Rows(columns=named, numbers=numbers, path=file.path, base=base, faults=tuple(faults))


def _alone(row: Any) -> list[Any]:
    """Return a row's columns with nothing behind them but the row itself, checked."""
    import pyarrow as pa

    row.validate()  # or copying could reach out of the file
    columns = [pa.concat_arrays([column]) for column in row.columns]
    for column in columns:
        column.validate(full=True)
    return columns


def _rows_before(file: File, start: int) -> int:
    """Count the rows before a row group or record batch, for a message: of Arrow files all must be read."""
    return count_rows(file, 0, start) if start else 0


def _parquet(table: Any, wanted: list[str], start: int, stop: int | None) -> Iterator[Any]:
    """Yield batches of a few megabytes."""
    for group in range(start, table.num_row_groups if stop is None else stop):
        shape = table.metadata.row_group(group)
        if shape.num_rows == 0:
            continue
        row_bytes = shape.total_byte_size / shape.num_rows
        rows = max(min(int(_BATCH_BYTES / max(row_bytes, 1)), _MOST_BATCH_ROWS), 1)
        yield from table.iter_batches(rows, row_groups=[group], columns=wanted, use_threads=False)


def _arrow(table: Any, wanted: list[str], start: int, stop: int | None) -> Iterator[Any]:
    """Yield batches, cut where they are large."""
    count = getattr(table, "num_record_batches", None)
    batches = (
        table
        if count is None
        else (table.get_batch(index) for index in range(start, count if stop is None else stop))
    )
    for batch in batches:
        chosen = batch.select(wanted)
        chosen.validate()
        row_bytes = chosen.nbytes / max(batch.num_rows, 1)
        rows = max(min(int(_BATCH_BYTES / max(row_bytes, 1)), _MOST_BATCH_ROWS), 1)
        for at in range(0, batch.num_rows, rows):
            yield chosen.slice(at, rows)


@contextmanager
def _table(file: File, stored: BinaryIO) -> Iterator[Any]:
    """Open a table; extension types are never rebuilt from code that a file carries."""
    import pyarrow as pa

    if file.format == "parquet":
        import pyarrow.parquet as pq

        # Column chunks are streamed through a small buffer: row groups may be larger than memory.
        with pq.ParquetFile(
            stored, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
        ) as table:
            yield table
        return
    is_file = stored.read(len(_MAGIC)) == _MAGIC
    stored.seek(0)
    with pa.ipc.open_file(stored) if is_file else pa.ipc.open_stream(stored) as table:
        yield table


@contextmanager
def table_faults(file: File) -> Iterator[None]:
    """Turn what Arrow says of a broken file into a sentence; the disk's own errors are left as they are.

    Raises:
        SourceError: Arrow can't read it.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, VarlenError) or getattr(error, "errno", None) is not None:
            raise
        kind = "a Parquet" if file.format == "parquet" else "an Arrow"
        why = f"is not {kind} file, or is damaged: {first_line(error)}"
        raise SourceError(
            f"{file.path} {why if file.size else f'is empty (0 bytes), not {kind} file'}"
        ) from error
