"""JSON lines: one object a line. A file is cut at line ends, so that several processes can read it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache, partial
from hashlib import blake2b
from itertools import islice
from typing import Any, BinaryIO

from varlen.errors import SourceError
from varlen.files.columns import Fields
from varlen.files.formats.gather import Found, gather
from varlen.files.opening import HEAD_BYTES, compression_of, faults, open_plain, open_stored
from varlen.files.paths import File
from varlen.files.remote import BUFFER_BYTES
from varlen.files.rows import PRINT, Rows, json_kind, listed, place

_BLANKS = b"\xef\xbb\xbf \t\r\n"
_LAST_LINE_BYTES = 64 << 10
"""Fetched beyond a stretch of a file, for the line that ends after it."""
_MOST_TRIED = 1000
"""Lines in which a first row is looked for."""
_PRINT_BYTES = 8
_LIVE_BYTES = 64 << 10
"""Of rows that are given while they are read: of those that come slowly, none is to wait for many others."""
MOST_RECORD_BYTES = 256 << 20
"""A line longer than this is a mistake (a file without line ends), and would fill the memory."""


def row_names(file: File, most: int) -> list[tuple[str, ...]]:
    """Return the names that the first rows have, of those that can be read; none where there is no row."""
    with open_plain(file, HEAD_BYTES) as stream:
        lines = enumerate(_lines(stream, file.path), start=1)
        rows = (
            (place(file.path, _unit(file), number), _parse(line, _is_ours(file)))
            for number, line in lines
            if line.strip(_BLANKS)
        )
        return first_names(rows, file.path, most)


def first_names(
    rows: Iterator[tuple[str, dict[str, Any] | str]], path: str, most: int
) -> list[tuple[str, ...]]:
    """Return the names that the first rows in order have; none where there is no row."""
    first_fault = ""
    found: list[tuple[str, ...]] = []
    try:
        for where, row in islice(rows, _MOST_TRIED):
            if row and not isinstance(row, str):
                found.append(tuple(row))
                if len(found) == most:
                    break
                continue
            said = f"{where} {row}" if row else f"{path} begins with an object without any field"
            first_fault = first_fault or said
    except SourceError:
        if not found:
            raise
    if first_fault and not found:
        raise SourceError(first_fault)
    return found


def cut_points(file: File, target_bytes: int) -> list[int] | None:
    """Return the bytes at which a file may be cut, or None where it can't be: a compressed one.

    A cut is moved to the next line end by `read`, so any byte would do.
    """
    if file.size < 0 or compression_of(file) is not None:
        return None
    return [*range(0, max(file.size, 1), target_bytes), file.size]


def read(file: File, fields: Fields, start: int = 0, stop: int | None = None) -> Iterator[Rows]:
    """Yield the rows of the lines that begin in [start, stop), about a megabyte at a time."""
    if start == 0 and stop is None:
        with open_plain(file) as stream:
            yield from _read(stream, file, fields, 0, stop)
        return
    with faults(file), open_stored(file, _stretch_bytes(start, stop)) as stream:
        if start > 0:
            stream.seek(start - 1)
            start -= 1
            while piece := stream.readline(1 << 20):
                start += len(piece)
                if piece.endswith(b"\n"):
                    break
        if stop is None or start < stop:
            yield from _read(stream, file, fields, start, stop)


def _stretch_bytes(start: int, stop: int | None) -> int | None:
    """Return what to fetch at a time of a stretch of a file, so that a short one takes one request, and no more."""
    if stop is None:
        return None
    return min(stop - max(start - 1, 0) + _LAST_LINE_BYTES, BUFFER_BYTES)


def _read(stream: BinaryIO, file: File, fields: Fields, start: int, stop: int | None) -> Iterator[Rows]:
    base = cache(partial(_count_lines, file, start))
    if file.live is not None:
        return _read_live(stream, file, fields)
    found = _rows(_lines(stream, file.path), fields, start, stop, _is_ours(file))
    return gather(found, names=fields.names, path=file.path, unit=_unit(file), base=base)


def _read_live(stream: BinaryIO, file: File, fields: Fields) -> Iterator[Rows]:
    """Yield rows as they are given, each with the hash of the lines up to it: see `live`."""
    last = [b""]

    def lines() -> Iterator[bytes]:
        for line in _lines(stream, file.path):
            last[0] = blake2b(last[0] + line, digest_size=_PRINT_BYTES).digest()
            yield line

    found = (
        (number, size, [*values, last[0].hex()] if isinstance(values, list) else values)
        for number, size, values in _rows(lines(), fields, 0, None, is_ours=True)
    )
    names = (*fields.names, PRINT)
    return gather(found, names=names, path=file.path, unit=_unit(file), size=_LIVE_BYTES)


def _is_ours(file: File) -> bool:
    """Whether lines are rows that were given in memory, and those that are strings say why a row can't be used."""
    return file.stored is not None


def _unit(file: File) -> str:
    return "row" if _is_ours(file) else "line"


def _rows(
    lines: Iterator[bytes], fields: Fields, start: int, stop: int | None, is_ours: bool
) -> Iterator[Found]:
    at = start
    for number, line in enumerate(lines, start=1):
        at += len(line)
        taken: list[Any] | str | None = _take(line, fields)
        if taken is None and line.strip(_BLANKS):
            taken = _slowly(line, fields, is_ours)
        yield number, len(line), taken
        if stop is not None and at >= stop:
            return


def _take(line: bytes, fields: Fields) -> list[Any] | None:
    """Return the values of one line, or None where it isn't all in order."""
    try:
        row = json.loads(line.decode())  # strictly; json by itself would let halves of characters pass
        taken = [row[name] for name in fields.needed]
        taken += [row.get(name) for name in fields.optional]
        return taken if fields.refused.isdisjoint(row) else None
    except (ValueError, RecursionError, KeyError, TypeError, IndexError):
        return None


def _slowly(line: bytes, fields: Fields, is_ours: bool) -> list[Any] | str:
    """Return the values of a line, or what is wrong with it."""
    return in_order(_parse(line, is_ours), fields)  # a byte order mark may be all


def _parse(line: bytes, is_ours: bool = False) -> dict[str, Any] | str:
    """Return a row, or what keeps a line from being one."""
    try:
        row = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode())
    except UnicodeDecodeError as error:
        return f"is not valid UTF-8 (byte {error.start:,} of the line)"
    except json.JSONDecodeError as error:
        return f"is not valid JSON: {error.msg} at column {error.colno:,}"
    except (ValueError, RecursionError):
        return "can't be read: a number of too many digits, or brackets nested too deeply"
    return row if is_ours and isinstance(row, str) else as_object(row)


def as_object(row: Any) -> dict[str, Any] | str:
    """Return a value if it is a row, or say that it isn't."""
    if isinstance(row, dict):
        return row
    return f"is a JSON {json_kind(row)}, not an object with named fields such as `text`"


def in_order(row: dict[str, Any] | str, fields: Fields) -> list[Any] | str:
    """Return the values of a row, or which needed fields it lacks, or has though the first rows have none."""
    if isinstance(row, str):
        return row
    absent = [name for name in fields.needed if name not in row]
    if absent:
        return f"has no {listed(absent)}; it has {listed(list(row))}"
    extra = [name for name in row if name in fields.refused]
    if extra:
        return f"has {listed(extra)}, which the file's first row has not; give it to all rows or to none"
    return [row.get(name) for name in fields.names]


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
