"""JSON lines: one object a line. A file is cut at line ends, so that several processes can read it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from typing import Any, BinaryIO

from varlen.errors import SourceError
from varlen.source.columns import Fields
from varlen.source.files import File
from varlen.source.opening import compression_of, faults, open_plain, open_stored
from varlen.source.rows import Fault, Rows, json_kind, listed, place

_BATCH_BYTES = 1 << 20
_BATCH_ROWS = 4096
_BLANKS = b"\xef\xbb\xbf \t\r\n"
_MOST_TRIED = 1000
"""Lines in which a first row is looked for."""
MOST_RECORD_BYTES = 256 << 20
"""A line longer than this is a mistake (a file without line ends), and would fill the memory."""


def column_names(file: File) -> list[str]:
    """Return the names that the first row has, of those that can be read; none where there is no row.

    Raises:
        SourceError: the file can't be read, or none of its first rows is an object.
    """
    with open_plain(file) as stream:
        lines = enumerate(_lines(stream, file.path), start=1)
        rows = (
            parse(line, place(file.path, "line", number)) for number, line in lines if line.strip(_BLANKS)
        )
        return first_names(rows, file.path)


def first_names(rows: Iterator[tuple[dict[str, Any], Fault | None]], path: str) -> list[str]:
    """Return the names that the first row in order has; none where there is no row.

    Raises:
        SourceError: none of the first thousand is in order and has a field; says what is wrong with the first.
    """
    first_fault: Fault | None = None
    for row, fault in islice(rows, _MOST_TRIED):
        if row:
            return list(row)
        first_fault = first_fault or fault or Fault(where=path, why="begins with an object without any field")
    if first_fault is not None:
        raise SourceError(str(first_fault))
    return []


def cut_points(file: File, target_bytes: int) -> list[int] | None:
    """Return the bytes at which a file may be cut, or None where it can't be: a compressed one.

    A cut is moved to the next line end by `read`, so any byte would do.
    """
    if file.size < 0 or compression_of(file) is not None:
        return None
    return [*range(0, max(file.size, 1), target_bytes), file.size]


def read(file: File, fields: Fields, start: int = 0, stop: int | None = None) -> Iterator[Rows]:
    """Yield the rows of the lines that begin in [start, stop), about a megabyte at a time.

    Args:
        file: to be read.
        fields: to be taken; a row without one that is needed is a fault.
        start: byte; the line that it stands in belongs to the part before, unless it is the line's first.
        stop: byte, or None for the file's end.

    Raises:
        SourceError: the file can't be read any further.
    """
    if start == 0 and stop is None:
        with open_plain(file) as stream:
            yield from _read(stream, file, fields, 0, stop)
        return
    with faults(file), open_stored(file) as stream:
        if start > 0:
            stream.seek(start - 1)
            start -= 1
            while piece := stream.readline(_BATCH_BYTES):
                start += len(piece)
                if piece.endswith(b"\n"):
                    break
        if stop is None or start < stop:
            yield from _read(stream, file, fields, start, stop)


def _read(stream: BinaryIO, file: File, fields: Fields, start: int, stop: int | None) -> Iterator[Rows]:
    base = cache(partial(_count_lines, file, start))
    values: list[list[Any]] = [[] for _ in fields.names]
    numbers: list[int] = []
    wrong: list[Fault] = []
    at, batch_bytes = start, 0

    def rows() -> Rows:
        return Rows(
            columns=dict(zip(fields.names, values)),
            numbers=numbers,
            path=file.path,
            unit="line",
            base=base,
            faults=tuple(wrong),
        )

    try:
        for number, line in enumerate(_lines(stream, file.path), start=1):
            at += len(line)
            batch_bytes += len(line)
            taken = _take(line, fields)
            if taken is None and line.strip(_BLANKS):
                taken, fault = _slowly(line, place(file.path, "line", base() + number), fields)
                if fault is not None:
                    wrong.append(replace(fault, number=base() + number))
            if taken is not None:
                numbers.append(number)
                for column, value in zip(values, taken):
                    column.append(value)
            if batch_bytes >= _BATCH_BYTES or len(numbers) >= _BATCH_ROWS:
                yield rows()
                values, numbers, wrong, batch_bytes = [[] for _ in fields.names], [], [], 0
            if stop is not None and at >= stop:
                break
    except Exception:  # what was read before it is whole
        if numbers or wrong:
            yield rows()
        raise
    if numbers or wrong:
        yield rows()


def _take(line: bytes, fields: Fields) -> list[Any] | None:
    """Return the values of one line, or None where it isn't all in order."""
    try:
        row = json.loads(line.decode())  # strictly; json by itself would let halves of characters pass
        taken = [row[name] for name in fields.needed]
        taken += [row.get(name) for name in fields.optional]
        return taken if fields.refused.isdisjoint(row) else None
    except (ValueError, RecursionError, KeyError, TypeError, IndexError):
        return None


def _slowly(line: bytes, where: str, fields: Fields) -> tuple[list[Any] | None, Fault | None]:
    """Return the values of a line, or what is wrong with it."""
    row, fault = parse(line, where)
    fault = fault or misfit(row, fields, where)
    if fault is not None:
        return None, fault
    return [row.get(name) for name in fields.names], None  # a byte order mark was all


def parse(line: bytes, where: str) -> tuple[dict[str, Any], Fault | None]:
    """Return a row, or what keeps a line from being one."""
    try:
        row = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode())
    except UnicodeDecodeError as error:
        return {}, Fault(where=where, why=f"is not valid UTF-8 (byte {error.start:,} of the line)")
    except json.JSONDecodeError as error:
        return {}, Fault(where=where, why=f"is not valid JSON: {error.msg} at column {error.colno:,}")
    except (ValueError, RecursionError):
        why = "can't be read: a number of too many digits, or brackets nested too deeply"
        return {}, Fault(where=where, why=why)
    return as_object(row, where)


def as_object(row: Any, where: str) -> tuple[dict[str, Any], Fault | None]:
    """Return a value if it is a row, or say that it isn't."""
    if isinstance(row, dict):
        return row, None
    why = f"is a JSON {json_kind(row)}, not an object with named fields such as `text`"
    return {}, Fault(where=where, why=why)


def misfit(row: dict[str, Any], fields: Fields, where: str) -> Fault | None:
    """Say which of the needed fields a row lacks, or has though the first row has none."""
    absent = [name for name in fields.needed if name not in row]
    if absent:
        return Fault(where=where, why=f"has no {listed(absent)}; it has {listed(list(row))}")
    extra = [name for name in row if name in fields.refused]
    if extra:
        why = f"has {listed(extra)}, which the file's first row has not; give it to all rows or to none"
        return Fault(where=where, why=why)
    return None


def _lines(stream: BinaryIO, path: str) -> Iterator[bytes]:
    """Yield lines, none of them so long that it would fill the memory."""
    while line := stream.readline(MOST_RECORD_BYTES):
        if len(line) >= MOST_RECORD_BYTES:
            raise SourceError(
                f"{path} holds a line of more than {MOST_RECORD_BYTES >> 20:,} MB; "
                "put one object on each line, or name the file .json if it is one array"
            )
        yield line


def _count_lines(file: File, stop: int) -> int:
    """Count the lines before a byte, for a message."""
    if stop == 0:
        return 0
    count = 0
    with open_stored(file) as stored:
        while stop > 0 and (chunk := stored.read(min(stop, 1 << 20))):
            count += chunk.count(b"\n")
            stop -= len(chunk)
    return count
