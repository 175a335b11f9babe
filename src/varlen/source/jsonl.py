"""JSON lines: one object a line. A file is cut at line ends, so that several processes can read it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import islice
from typing import Any, BinaryIO

from varlen.errors import SourceError
from varlen.source.files import File
from varlen.source.opening import compression_of, open_plain, open_stored
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
    first_fault: Fault | None = None
    with open_plain(file) as stream:
        lines = islice(_lines(stream, file.path), _MOST_TRIED)
        for number, line in enumerate(lines, start=1):
            if line.strip(_BLANKS):
                row, fault = parse(line, place(file.path, "line", number))
                if fault is None:
                    return list(row)
                first_fault = first_fault or fault
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


def read(file: File, wanted: Sequence[str], start: int = 0, stop: int | None = None) -> Iterator[Rows]:
    """Yield the rows of the lines that begin in [start, stop), about a megabyte at a time.

    Args:
        file: to be read.
        wanted: columns; a row without one of them is a fault.
        start: byte; the line that it stands in belongs to the part before, unless it is the line's first.
        stop: byte, or None for the file's end.

    Raises:
        SourceError: the file can't be read any further.
    """
    if start == 0 and stop is None:
        with open_plain(file) as lines:
            yield from _read(lines, file, wanted, 0, stop)
        return
    with open_stored(file) as lines:
        if start > 0:
            lines.seek(start - 1)
            start += len(lines.readline()) - 1
        yield from _read(lines, file, wanted, start, stop)


def _read(lines: BinaryIO, file: File, wanted: Sequence[str], start: int, stop: int | None) -> Iterator[Rows]:
    base = cache(partial(_count_lines, file, start))
    values: list[list[Any]] = [[] for _ in wanted]
    numbers: list[int] = []
    faults: list[Fault] = []
    at, batch_bytes, number = start, 0, 0

    def rows() -> Rows:
        return Rows(
            columns=dict(zip(wanted, values)),
            numbers=numbers,
            path=file.path,
            unit="line",
            base=base,
            faults=tuple(faults),
        )

    for number, line in enumerate(_lines(lines, file.path), start=1):
        if stop is not None and at >= stop:
            break
        at += len(line)
        batch_bytes += len(line)
        fault = _take(line, file.path, number, base, wanted, values, numbers)
        if fault is not None:
            faults.append(fault)
        if batch_bytes >= _BATCH_BYTES or len(numbers) >= _BATCH_ROWS:
            yield rows()
            values, numbers, faults, batch_bytes = [[] for _ in wanted], [], [], 0
    if numbers or faults:
        yield rows()


def _take(
    line: bytes,
    path: str,
    number: int,
    base: Any,
    wanted: Sequence[str],
    values: list[list[Any]],
    numbers: list[int],
) -> Fault | None:
    """Add one line's values to the columns; returns what is wrong with it, if anything."""
    try:
        row = json.loads(line)
        taken = [row[name] for name in wanted]
    except (ValueError, RecursionError, KeyError, TypeError, IndexError):
        if not line.strip(_BLANKS):
            return None
        return _fault(line, place(path, "line", base() + number), wanted, values, numbers, number)
    for column, value in zip(values, taken):
        column.append(value)
    numbers.append(number)
    return None


def _fault(
    line: bytes, where: str, wanted: Sequence[str], values: list[list[Any]], numbers: list[int], number: int
) -> Fault | None:
    """Say what is wrong with a line, the slow way."""
    row, fault = parse(line, where)
    fault = fault or missing(row, wanted, where)
    if fault is None:  # a byte order mark was all
        for column, name in zip(values, wanted):
            column.append(row[name])
        numbers.append(number)
    return fault


def parse(line: bytes | str, where: str) -> tuple[dict[str, Any], Fault | None]:
    """Return a row, or what keeps a text from being one."""
    try:
        row = json.loads(line.removeprefix(b"\xef\xbb\xbf") if isinstance(line, bytes) else line)
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


def missing(row: dict[str, Any], wanted: Sequence[str], where: str) -> Fault | None:
    """Say which of the wanted fields a row lacks, if any."""
    absent = [name for name in wanted if name not in row]
    if not absent:
        return None
    return Fault(where=where, why=f"has no {listed(absent)}; it has {listed(list(row))}")


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
