"""Every format by its name: which columns a file has, where it may be cut, and its rows."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from varlen.errors import SourceError
from varlen.source.columns import Columns, Fields, find_columns
from varlen.source.files import File
from varlen.source.formats import arrays, delimited, json_values, jsonl, plain_text, tables
from varlen.source.formats.plain_text import Cut
from varlen.source.rows import Fault, Rows, as_list


def rows_of(
    file: File, named: Mapping[str, str], text_cut: Cut, start: int = 0, stop: int | None = None
) -> Iterator[tuple[Rows, Columns]]:
    """Yield the rows of a file, or a stretch of it, and what they hold.

    Raises:
        SourceError: the file can't be read, or has no column of documents.
    """
    columns = columns_of(file, named)
    if columns is not None:
        for rows in rows_in(file, columns, text_cut, start, stop):
            yield rows, columns


def columns_of(file: File, named: Mapping[str, str]) -> Columns | None:
    """Return what a file's rows hold, and in which columns; None where it has no row to tell.

    Raises:
        SourceError: the file can't be read, or has no column of documents.
    """
    names = column_names(file)
    if not names and file.format in ("jsonl", "json", "csv", "tsv"):
        return None  # without a row there is no name of a column
    return find_columns(
        names,
        named,
        file.path,
        are_fields=file.format in ("jsonl", "json"),
        are_a_line=file.format in ("csv", "tsv"),
    )


def rows_in(
    file: File, columns: Columns, text_cut: Cut, start: int = 0, stop: int | None = None
) -> Iterator[Rows]:
    """Yield the rows of a file, or of a stretch of it, whose columns are known.

    Raises:
        SourceError: the file can't be read any further.
    """
    if file.format == "text":
        return _placed(plain_text.read(file, text_cut))
    return _read(file, columns.fields, start, stop)


def all_columns(file: File) -> Iterator[tuple[dict[str, list[Any]], tuple[Fault, ...]]]:
    """Yield every column of a file's rows as Python values, whatever they hold, and the rows that can't be read.

    Raises:
        SourceError: the file can't be read any further.
    """
    names = column_names(file)
    if not names:
        return
    is_text = file.format == "text"
    for rows in (
        _placed(plain_text.read(file, "line"))
        if is_text
        else _read(file, Fields(needed=tuple(names)), 0, None)
    ):
        yield {name: as_list(rows.columns[name]) for name in names}, rows.faults


def _read(file: File, fields: Fields, start: int, stop: int | None) -> Iterator[Rows]:
    """Yield what is wanted of a file of rows."""
    if file.format in ("parquet", "arrow"):
        return tables.read(file, fields.names, start, stop)
    if file.format == "jsonl":
        return _placed(jsonl.read(file, fields, start, stop))
    if file.format == "json":
        return _placed(json_values.read(file, fields))
    if file.format == "npz":
        return _placed(arrays.read(file, fields.names))
    return _placed(delimited.read(file, fields.names))


def _placed(read: Iterator[Rows]) -> Iterator[Rows]:
    """Yield rows; where a file can't be unpacked or read on, say how far it was read.

    Raises:
        SourceError: it can't.
    """
    last: Rows | None = None
    try:
        for rows in read:
            last = rows if len(rows) else last
            yield rows
    except SourceError as error:
        if last is None or not isinstance(error.__cause__, EOFError | OSError | zlib.error):
            raise
        after = last.where(len(last) - 1).removeprefix(last.path).strip()
        raise SourceError(f"{error} (after {after})" if after else str(error)) from error


def column_names(file: File) -> list[str]:
    """Return the names of a file's columns.

    Raises:
        SourceError: the file can't be read.
    """
    if file.mark is None:
        return _column_names(file)
    return list(_column_names_by_mark(replace(file, on_read=None)))


def _column_names(file: File) -> list[str]:
    readers = {
        "jsonl": jsonl.column_names,
        "json": json_values.column_names,
        "parquet": tables.column_names,
        "arrow": tables.column_names,
        "npz": arrays.column_names,
        "csv": delimited.column_names,
        "tsv": delimited.column_names,
    }
    return readers[file.format](file) if file.format in readers else ["text"]


@lru_cache(maxsize=1 << 14)
def _column_names_by_mark(file: File) -> tuple[str, ...]:
    """Remember a remote file's columns by the server's mark of its content: each of its parts asks for them."""
    return tuple(_column_names(file))


def cut_points(file: File, target_bytes: int) -> list[int] | None:
    """Return where a large file can be cut, in units of its format, or None.

    Raises:
        SourceError: the file can't be opened.
    """
    if 0 <= file.size <= target_bytes:
        return None
    if file.format == "jsonl":
        return jsonl.cut_points(file, target_bytes)
    return tables.cut_points(file, target_bytes) if file.format in ("parquet", "arrow") else None
