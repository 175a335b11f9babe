"""JSON lines: one object per line. Files are cut at line ends, so that several processes can read one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache, partial
from hashlib import blake2b
from itertools import islice
from typing import Any, BinaryIO

from varlen.errors import SourceError
from varlen.files.columns import Fields
from varlen.files.opening import HEAD_BYTES, compression_of, faults, open_plain, open_stored
from varlen.files.paths import File
from varlen.files.remote import BUFFER_BYTES
from varlen.files.rows import ROW_HASHES, Found, Rows, gather, json_kind, listed, location
from varlen.parsed import json_fault

_BLANKS = b"\xef\xbb\xbf \t\r\n"
_LAST_LINE_BYTES = 64 << 10  # read past a stretch of a file, for the line that ends after it
_MOST_TRIED = 1000  # lines searched for a first row
_ROW_HASH_BYTES = 8
_LIVE_BYTES = 64 << 10  # Batch size of served rows: a slow row mustn't wait for many others
MOST_RECORD_BYTES = 256 << 20  # a longer line is a mistake (a file without line ends)


def row_names(file: File, most: int) -> list[tuple[str, ...]]:
    """Return the keys of the first readable rows; [] where there is no row."""
    with open_plain(file, HEAD_BYTES) as stream:
        lines = enumerate(_lines(stream, file.path), start=1)
        rows = (
            (location(file.path, _unit(file), number), _parse(line, _is_ours(file)))
            for number, line in lines
            if line.strip(_BLANKS)
        )
        return first_names(rows, file.path, most)


def first_names(
    rows: Iterator[tuple[str, dict[str, Any] | str]], path: str, most: int
) -> list[tuple[str, ...]]:
    """Return the keys of the first valid rows; [] where there is no row."""
    first_fault = ""
    names: list[tuple[str, ...]] = []
    try:
        for where, row in islice(rows, _MOST_TRIED):
            if row and not isinstance(row, str):
                names.append(tuple(row))
                if len(names) == most:
                    break
                continue
            why = f"{where} {row}" if row else f"{path} begins with an object without any field"
            first_fault = first_fault or why
    except SourceError:
        if not names:
            raise
    if first_fault and not names:
        raise SourceError(first_fault)
    return names


def cut_points(file: File, target_bytes: int) -> list[int] | None:
    """Return the offsets at which a file may be cut; None if it is compressed or of unknown size.

    Any byte would do, since `read` moves a cut to the next line end.
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
    """Return the buffer size for a stretch of a file, so that a short one takes a single request."""
    if stop is None:
        return None
    return min(stop - max(start - 1, 0) + _LAST_LINE_BYTES, BUFFER_BYTES)


def _read(stream: BinaryIO, file: File, fields: Fields, start: int, stop: int | None) -> Iterator[Rows]:
    base = cache(partial(_count_lines, file, start))
    if file.live is not None:
        return _read_live(stream, file, fields)
    rows = _rows(_lines(stream, file.path), fields, start, stop, _is_ours(file))
    return gather(rows, names=fields.names, path=file.path, unit=_unit(file), base=base)


def _read_live(stream: BinaryIO, file: File, fields: Fields) -> Iterator[Rows]:
    """Yield served rows, each with the hash of the lines up to it: see `documents/serving.py`."""
    last = [b""]

    def lines() -> Iterator[bytes]:
        for line in _lines(stream, file.path):
            last[0] = blake2b(last[0] + line, digest_size=_ROW_HASH_BYTES).digest()
            yield line

    rows = (
        (number, size, [*values, last[0].hex()] if isinstance(values, list) else values)
        for number, size, values in _rows(lines(), fields, 0, None, is_ours=True)
    )
    names = (*fields.names, ROW_HASHES)
    return gather(rows, names=names, path=file.path, unit=_unit(file), size=_LIVE_BYTES)


def _is_ours(file: File) -> bool:
    """Whether the lines are rows given in memory, where a string says why a row can't be used."""
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
        if taken is None and line.strip(_BLANKS):  # a byte order mark may be all
            taken = in_order(_parse(line, is_ours), fields)
        yield number, len(line), taken
        if stop is not None and at >= stop:
            return


def _take(line: bytes, fields: Fields) -> list[Any] | None:
    """Return the values of one line, or None where it isn't fully valid."""
    try:
        row = json.loads(line.decode())  # strict: json itself would accept surrogates
        taken = [row[name] for name in fields.needed]
        taken += [row.get(name) for name in fields.optional]
        return taken if fields.refused.isdisjoint(row) else None
    except (ValueError, RecursionError, KeyError, TypeError, IndexError):
        return None


def _parse(line: bytes, is_ours: bool = False) -> dict[str, Any] | str:
    """Return a row, or why a line isn't one."""
    try:
        row = json.loads(line.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n").decode())
    except UnicodeDecodeError as error:
        return f"is not valid UTF-8 (byte {error.start:,} of the line)"
    except json.JSONDecodeError as error:
        return f"is not valid JSON: {json_fault(error)} at column {error.colno:,}"
    except (ValueError, RecursionError):
        return "can't be read: a number of too many digits, or brackets nested too deeply"
    return row if is_ours and isinstance(row, str) else as_object(row)


def as_object(row: Any) -> dict[str, Any] | str:
    """Return a value if it is a row, or say that it isn't."""
    if isinstance(row, dict):
        return row
    return f"is a JSON {json_kind(row)}, not an object with named fields such as `text`"


def in_order(row: dict[str, Any] | str, fields: Fields) -> list[Any] | str:
    """Return the values of a row; or the needed fields that it lacks, or the fields that the first rows lack."""
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
    """Yield lines, limited in length."""
    while line := stream.readline(MOST_RECORD_BYTES):
        if len(line) >= MOST_RECORD_BYTES:
            raise SourceError(
                f"{path} holds a line of more than {MOST_RECORD_BYTES >> 20:,} MB; "
                "put one object on each line, or name the file .json if it is one array"
            )
        yield line


def _count_lines(file: File, stop: int) -> int:
    """Count the lines before an offset, for a message."""
    if stop == 0:
        return 0
    count = 0
    with open_stored(file) as stored:
        while stop > 0 and (chunk := stored.read(min(stop, 1 << 20))):
            count += chunk.count(b"\n")
            stop -= len(chunk)
    return count
