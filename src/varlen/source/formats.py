"""Every format by its name: which columns a file has, where it may be cut, and its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from varlen.source import arrays, delimited, json_values, jsonl, plain_text, tables
from varlen.source.columns import Columns, find_columns
from varlen.source.files import File
from varlen.source.plain_text import Cut
from varlen.source.rows import Rows


def rows_of(
    file: File, named: Mapping[str, str], text_cut: Cut, start: int = 0, stop: int | None = None
) -> Iterator[tuple[Rows, Columns]]:
    """Yield the rows of a file, or a stretch of it, and what they hold.

    Raises:
        SourceError: the file can't be read, or has no column of documents.
    """
    if file.format == "text":
        columns = find_columns(["text"], named, file.path)
        yield from ((rows, columns) for rows in plain_text.read(file, text_cut))
        return
    names = column_names(file)
    if not names and file.format in ("jsonl", "json", "csv", "tsv"):
        return  # without a row there is no name of a column
    columns = find_columns(names, named, file.path, are_fields=file.format in ("jsonl", "json"))
    wanted = list(dict.fromkeys(columns.names.values()))
    if file.format == "jsonl":
        rows = jsonl.read(file, columns.fields, start, stop)
    elif file.format == "json":
        rows = json_values.read(file, columns.fields)
    elif file.format in ("parquet", "arrow"):
        rows = tables.read(file, wanted, start, stop)
    else:
        rows = (arrays if file.format == "npz" else delimited).read(file, wanted)
    for some in rows:
        yield some, columns


def column_names(file: File) -> list[str]:
    """Return the names of a file's columns.

    Raises:
        SourceError: the file can't be read.
    """
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
