"""Parquet, Arrow and Feather files: tables by column, cut at row groups or record batches."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, BinaryIO

from varlen.errors import SourceError, VarlenError, described
from varlen.files.columns import DOCUMENT_FIELDS
from varlen.files.formats import record_batches, row_groups
from varlen.files.formats.damage import is_damage
from varlen.files.formats.decoded import pieces
from varlen.files.formats.record_batches import MAGIC, blocks_of, stream_rows
from varlen.files.formats.row_groups import TooLarge
from varlen.files.losses import Losses
from varlen.files.opening import compression_of, open_seekable, other_content
from varlen.files.paths import File
from varlen.files.retry import is_outside
from varlen.files.rows import Fault, Rows, faulty, location


def column_names(file: File) -> list[str]:
    """Return the names of a table's columns."""
    with open_seekable(file) as stored, table_faults(file), _table(file, stored) as table:
        schema = table.schema_arrow if file.format == "parquet" else table.schema
        return list(schema.names)


def cut_points(file: File, target_bytes: int) -> list[int] | None:
    """Return the row groups or record batches to cut a file at; None where it can't, or needn't, be cut."""
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
    """Estimate the bytes of each row group or record batch, from the file's metadata."""
    if file.size < 0 or compression_of(file) is not None:
        return None
    with open_seekable(file) as stored, table_faults(file), _table(file, stored) as table:
        if file.format != "parquet":
            is_file = hasattr(table, "num_record_batches")
            return record_batches.sizes(table, stored, list(wanted), file.size) if is_file else None
        return row_groups.sizes(table, stored, wanted)


def count_rows(file: File, start: int, stop: int | None) -> int:
    """Count the rows of row groups, or record batches, [start, stop), by the file's metadata."""
    with open_seekable(file) as stored, table_faults(file), _table(file, stored) as table:
        if file.format == "parquet":
            groups = range(start, table.num_row_groups if stop is None else stop)
            return sum(table.metadata.row_group(group).num_rows for group in groups)
        if not hasattr(table, "num_record_batches"):
            raise SourceError(f"{file.path} is a stream, which doesn't say how many rows it holds")
        return sum(block.num_rows or 0 for block in blocks_of(stored, start, stop))


def read(file: File, wanted: Sequence[str], start: int = 0, stop: int | None = None) -> Iterator[Rows]:
    """Yield the rows of a table, a few megabytes at a time, as Arrow arrays.

    A damaged row group or record batch is a fault; those after it are read.
    """
    base = cache(lambda: count_rows(file, 0, start) if start else 0)  # for messages
    row = 0
    try:
        with open_seekable(file) as stored, table_faults(file), _table(file, stored) as table:
            if file.format == "parquet":
                batches = _parquet(table, stored, list(wanted), start, stop)
            else:
                batches = _arrow(table, stored, list(wanted), start, stop)
            for batch in batches:
                if isinstance(batch, _Damaged | TooLarge):
                    fault = batch.fault(file, base() + row)
                    yield faulty(fault, wanted)
                    row += fault.covers
                    continue
                yield _rows(_as_text(batch) if file.binary_as_text else batch, file, row, base)
                row += batch.num_rows
    except SourceError as error:
        after = base() + row
        raise SourceError(f"{error} (after row {after:,})" if after else str(error)) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Damaged:
    """A row group or record batch that can't be read, or the rest of one."""

    name: str
    error: Exception
    num_rows: int | None  # None if unknown
    num_bytes: int = 0
    is_cut: bool = False  # whether the file ends within it

    def fault(self, file: File, before: int) -> Fault:
        """Return the fault of its rows, given the number of rows before it."""
        why = f"can't be read, as it is damaged: {described(self.error)}"
        if self.num_rows is None:
            losses = Losses(num_bytes=max(self.num_bytes, 1), cut_files=int(self.is_cut))
            where, outside = f"{file.path} {self.name}", is_outside(self.error)
            return Fault(where=where, why=why, number=before + 1, losses=losses, is_outside=outside)
        rows = f"rows {before + 1:,} to {before + self.num_rows:,}"
        where = location(file.path, "row", before + 1) if self.num_rows == 1 else f"{file.path} {rows}"
        return Fault(
            where=where,
            why=f"({self.name}) {why}",
            number=before + 1,
            losses=Losses(rows=self.num_rows, cut_files=int(self.is_cut)),
            is_outside=is_outside(self.error),
        )


def _rows(batch: Any, file: File, before: int, base: Callable[[], int]) -> Rows:
    """Return the rows of a batch; those with invalid offsets or UTF-8 are faults."""
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
                sound.append(_validated(batch.slice(index, 1)))
                numbers.append(before + index + 1)
            except pa.ArrowException as error:
                message = described(error)
                why = "holds text that is not valid UTF-8" if "UTF8" in message else f"is damaged: {message}"
                faults.append(Fault(where=location(file.path, "row", number), why=why, number=number))
        columns = [pa.concat_arrays(pieces) for pieces in zip(*sound)]
    named = dict(zip(batch.schema.names, columns))
    return Rows(columns=named, numbers=numbers, path=file.path, base=base, faults=tuple(faults))


def _as_text(batch: Any) -> Any:
    """View the bytes of a batch as text without copying; invalid UTF-8 is found by validation."""
    import pyarrow as pa

    columns = [column.view(_text_type(column.type)) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _text_type(kind: Any) -> Any:
    """Return a type with text in place of bytes, at any depth."""
    import pyarrow as pa

    texts = {
        pa.binary(): pa.string(),
        pa.large_binary(): pa.large_string(),
        pa.binary_view(): pa.string_view(),
    }
    if kind in texts:
        return texts[kind]
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_text_type(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_text_type(kind.key_type), _text_type(kind.item_type))
    for is_it, made in ((pa.types.is_list, pa.list_), (pa.types.is_large_list, pa.large_list)):
        if is_it(kind):
            return made(kind.value_field.with_type(_text_type(kind.value_type)))
    return kind


def _validated(row: Any) -> list[Any]:
    """Return a row's columns as validated arrays of their own."""
    import pyarrow as pa

    row.validate()  # otherwise copying could read beyond the buffers
    columns = [pa.concat_arrays([column]) for column in row.columns]
    for column in columns:
        column.validate(full=True)
    return columns


def _parquet(table: Any, stored: BinaryIO, wanted: list[str], start: int, stop: int | None) -> Iterator[Any]:
    """Yield batches, and the unread rest of each damaged row group."""
    columns = row_groups.columns_of(table, wanted)
    for group in range(start, table.num_row_groups if stop is None else stop):
        done = 0
        try:
            for batch in row_groups.batches(table, stored, wanted, columns, group):
                yield batch
                done += batch.num_rows
            failed: Exception = SourceError("it holds fewer rows than its metadata states")
        except Exception as error:
            if not is_damage(error):
                raise
            failed = error
        left = table.metadata.row_group(group).num_rows - done
        if left > 0:
            yield _Damaged(name=f"row group {group + 1:,}", error=failed, num_rows=left)


def _arrow(table: Any, stored: BinaryIO, wanted: list[str], start: int, stop: int | None) -> Iterator[Any]:
    """Yield batches, cut where they are large, and damaged ones."""
    is_file = hasattr(table, "num_record_batches")
    for batch in _file_batches(table, stored, start, stop) if is_file else _stream_batches(table, stored):
        if isinstance(batch, _Damaged):
            yield batch
            continue
        chosen = batch.select(wanted)
        try:
            chosen.validate()
        except Exception as error:
            yield _Damaged(name="a record batch", error=error, num_rows=batch.num_rows)
            continue
        yield from pieces(chosen)


def _file_batches(table: Any, stored: BinaryIO, start: int, stop: int | None) -> Iterator[Any]:
    """Yield the record batches of a file."""
    for index in range(start, table.num_record_batches if stop is None else stop):
        try:
            batch = table.get_batch(index)
        except Exception as error:
            blocks = blocks_of(stored, index, index + 1)
            if not is_damage(error) or not blocks:
                raise
            yield _Damaged(
                name=f"record batch {index + 1:,}",
                error=error,
                num_rows=blocks[0].num_rows,
                num_bytes=blocks[0].num_bytes,
            )
        else:
            yield batch


def _stream_batches(table: Any, stored: BinaryIO) -> Iterator[Any]:
    """Yield the record batches of a stream; a batch of which only the values are damaged is reported."""
    for number in itertools.count(1):
        before = stored.tell()
        try:
            batch = table.read_next_batch()
        except StopIteration:
            return
        except Exception as error:
            if not is_damage(error):
                raise
            num_rows = stream_rows(stored, before)
            if num_rows is None:  # the beginning of the next one is unknown
                left = stored.seek(0, os.SEEK_END) - before
                yield _Damaged(
                    name=f"all from record batch {number:,} on", error=error, num_rows=None, num_bytes=left
                )
                return
            name, passed = f"record batch {number:,}", stored.tell() - before
            is_cut = any(words in str(error) for words in ("to be able to read", "but only read"))
            yield _Damaged(name=name, error=error, num_rows=num_rows, num_bytes=passed, is_cut=is_cut)
            if is_cut:
                return
        else:
            yield batch


@contextmanager
def _table(file: File, stored: BinaryIO) -> Iterator[Any]:
    """Open a table; extension types are never rebuilt from code in the file."""
    import pyarrow as pa

    if file.format == "parquet":
        import pyarrow.parquet as pq

        with pq.ParquetFile(stored, **row_groups.OPENED) as table:
            yield table
        return
    is_file = stored.read(len(MAGIC)) == MAGIC
    stored.seek(0)
    with pa.ipc.open_file(stored) if is_file else pa.ipc.open_stream(stored) as table:
        yield table


@contextmanager
def table_faults(file: File) -> Iterator[None]:
    """Turn Arrow's errors about a broken file into a SourceError; the disk's own errors are left as they are."""
    try:
        yield
    except Exception as error:
        if isinstance(error, VarlenError) or getattr(error, "errno", None) is not None:
            raise
        if not isinstance(error, MemoryError) and (other := _other_content(file)) is not None:
            raise SourceError(other) from error
        kind = "a Parquet" if file.format == "parquet" else "an Arrow"
        why = f"is not {kind} file, or is damaged: {described(error)}"
        raise SourceError(
            f"{file.path} {why if file.size else f'is empty (0 bytes), not {kind} file'}"
        ) from error


def _other_content(file: File) -> str | None:
    """Return the error message if the file is of another kind; None if it may be a damaged table."""
    try:
        return other_content(file, DOCUMENT_FIELDS) if file.size else None
    except SourceError:
        return None
