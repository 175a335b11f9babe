"""Every format by name: a file's columns, where it may be cut, and its rows.

A reader is a file beside this one: `column_names(file)` returns names, and `read(file, wanted)` yields `Rows` of some
megabytes. A row that can't be read is a `Fault`; where the rest of a file can't be read, it raises a `SourceError`.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from varlen.errors import SourceError
from varlen.files.columns import DOCUMENT_FIELDS, Columns, Fields, find_columns
from varlen.files.formats import csv, json, jsonl, npz, tables, text
from varlen.files.formats.lost import rest_of
from varlen.files.formats.text import Cut
from varlen.files.opening import other_content
from varlen.files.paths import File
from varlen.files.rows import Fault, Rows, as_list, faulty

_LOOKED_AT = (3, 16, 1000)  # rows inspected for columns: more if they differ, the most if none is usable


def rows_of(
    file: File, named: Mapping[str, str], text_cut: Cut, start: int = 0, stop: int | None = None
) -> Iterator[tuple[Rows, Columns | None]]:
    """Yield the rows of a file, or a stretch of it, and what they hold.

    Where nothing more can be read, or there is no column of documents, the last batch is empty and has a fault; in
    the second case there are no columns either.
    """
    try:
        columns = columns_of(file, named)
    except SourceError as error:
        yield faulty(rest_of(file, error, start=start, stop=stop)), None
        return
    if columns is not None:
        for rows in rows_in(file, columns.fields, text_cut, start, stop):
            yield rows, columns


def columns_of(file: File, named: Mapping[str, str]) -> Columns | None:
    """Return what a file's rows hold, and in which columns; None where it has no rows.

    Rows that are objects may differ. The columns of most of the first rows apply to the whole file; rows with others
    are faults.
    """
    try:
        return _columns_of(file, named)
    except SourceError as error:
        # Under the name of another text format, JSON would be reported as broken.
        if file.format in ("csv", "tsv", "jsonl") and (other := _rows_otherwise(file)) is not None:
            raise SourceError(other) from error
        raise


def _rows_otherwise(file: File) -> str | None:
    """Return the error message if the file holds rows of another format; else None."""
    try:
        return None if file.live is not None else other_content(file, DOCUMENT_FIELDS)
    except SourceError:
        return None


def _columns_of(file: File, named: Mapping[str, str]) -> Columns | None:
    if file.format in ("jsonl", "json"):
        for most in _LOOKED_AT:
            rows = _row_names(file, most)
            columns = _columns_of_most_rows(
                rows, named, file.path, is_last=most == _LOOKED_AT[-1] or len(rows) < most
            )
            if not rows or (columns is not None and (most > _LOOKED_AT[0] or len(set(rows)) == 1)):
                return columns
    names = column_names(file)
    if not names and file.format in ("csv", "tsv"):
        return None  # without a row, the columns have no names
    columns = find_columns(names, named, file.path, are_a_line=file.format in ("csv", "tsv"))
    _refuse_twice(names, columns, file.path)
    return columns


def _columns_of_most_rows(
    rows: Sequence[tuple[str, ...]], named: Mapping[str, str], path: str, *, is_last: bool
) -> Columns | None:
    """Return the columns of most rows, the first on a tie; None where none can be used."""
    by_form: dict[str, tuple[int, Columns]] = {}
    first: tuple[str, ...] = ()
    for names, count in Counter(rows).items():  # in order of first occurrence
        try:
            columns = _columns_of_names(names, tuple(sorted(named.items())))
        except SourceError:
            first = first or names
            continue
        key = repr((columns.kind, sorted(columns.names.items())))
        before, columns = by_form.get(key, (0, columns))
        by_form[key] = before + count, columns
    if by_form:
        return max(by_form.values(), key=lambda candidate: candidate[0])[1]
    return find_columns(first, named, path, are_fields=True) if first and is_last else None


@lru_cache(maxsize=1 << 10)
def _columns_of_names(names: tuple[str, ...], named: tuple[tuple[str, str], ...]) -> Columns:
    """Return the columns of a row with these keys; cached, as thousands of files mostly have the same."""
    return find_columns(names, dict(named), "", are_fields=True)


def _refuse_twice(names: Sequence[str], columns: Columns, path: str) -> None:
    """Raise if several columns have the name of one that is read."""
    twice = [name for name in columns.fields.names if names.count(name) > 1]
    if twice:
        raise SourceError(
            f"{path} has {names.count(twice[0]):,} columns called `{twice[0]}`; rename all but one"
        )


def rows_in(
    file: File, fields: Fields, text_cut: Cut, start: int = 0, stop: int | None = None
) -> Iterator[Rows]:
    """Yield the rows of a file, or of a stretch of it; instead of raising, yield the fault of what can't be read."""
    covered = read_to = at = 0

    def note(path: str, first: int, last: int) -> None:
        nonlocal at
        at = max(at, last)
        if file.on_read is not None:
            file.on_read(path, first, last)

    noted = file if file.is_remote else replace(file, on_read=note)
    try:
        for rows in _read(noted, fields, text_cut, start, stop):
            yield rows
            covered, read_to = covered + rows.covers, at
    except SourceError as error:
        yield faulty(
            rest_of(file, error, rows=covered, read_to=read_to, start=start, stop=stop), fields.names
        )


def all_columns(file: File) -> Iterator[tuple[dict[str, list[Any]], tuple[Fault, ...]]]:
    """Yield every column of a file's rows as Python values, and the unreadable rows."""
    names = column_names(file)
    if not names:
        return
    for rows in rows_in(file, Fields(needed=tuple(names)), "line"):
        yield {name: as_list(rows.columns[name]) for name in names}, rows.faults


def _read(file: File, fields: Fields, text_cut: Cut, start: int, stop: int | None) -> Iterator[Rows]:
    """Yield the wanted fields of a file's rows."""
    if file.format == "text":
        return _located(text.read(file, text_cut))
    if file.format in ("parquet", "arrow"):
        return tables.read(file, fields.names, start, stop)
    if file.format == "jsonl":
        return _located(jsonl.read(file, fields, start, stop))
    if file.format == "json":
        return _located(json.read(file, fields))
    if file.format == "npz":
        return _located(npz.read(file, fields.names))
    assert file.format in ("csv", "tsv"), file.format
    return _located(csv.read(file, fields.names))


def _located(read: Iterator[Rows]) -> Iterator[Rows]:
    """Yield rows; if decompressing or reading fails, the error says how far the file was read."""
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
    """Return the names of a file's columns."""
    if file.mark is None:
        return _column_names(file)
    return list(_column_names_by_mark(replace(file, on_read=None)))


def _column_names(file: File) -> list[str]:
    if file.format in ("jsonl", "json"):
        rows = _read_row_names(file, _LOOKED_AT[1])
        return list(max(rows, key=rows.count)) if rows else []
    if file.format == "text":
        return ["text"]
    if file.format in ("parquet", "arrow"):
        return tables.column_names(file)
    return {"npz": npz.column_names, "csv": csv.column_names, "tsv": csv.column_names}[file.format](file)


@lru_cache(maxsize=1 << 14)
def _column_names_by_mark(file: File) -> tuple[str, ...]:
    """Cache a remote file's columns by its ETag or checksum: each of its parts asks for them."""
    return tuple(_column_names(file))


def _row_names(file: File, most: int) -> tuple[tuple[str, ...], ...]:
    """Return the keys of the first rows that are objects."""
    if file.live is not None:
        return file.live.names
    if file.mark is None:
        return _read_row_names(file, most)
    return _row_names_by_mark(replace(file, on_read=None), most)


def _read_row_names(file: File, most: int) -> tuple[tuple[str, ...], ...]:
    return tuple((jsonl if file.format == "jsonl" else json).row_names(file, most))


_row_names_by_mark = lru_cache(maxsize=1 << 14)(_read_row_names)


def cut_points(file: File, target_bytes: int) -> list[int] | None:
    """Return where a large file can be cut, in units of its format, or None."""
    if 0 <= file.size <= target_bytes:
        return None
    if file.format == "jsonl":
        return jsonl.cut_points(file, target_bytes)
    return tables.cut_points(file, target_bytes) if file.format in ("parquet", "arrow") else None
