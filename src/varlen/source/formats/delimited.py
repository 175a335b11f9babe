"""CSV and TSV files: a line of names, then rows of text; quotes may hold line ends."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from varlen.errors import SourceError
from varlen.source.files import File
from varlen.source.formats.gather import Found, gather
from varlen.source.opening import HEAD_BYTES, open_plain
from varlen.source.rows import Rows, listed, place

_MOST_FIELD_CHARACTERS = 256 << 20


def column_names(file: File) -> list[str]:
    """Return the names in the first line; none where the file is empty.

    Raises:
        SourceError: the file can't be read, or two columns have the same name.
    """
    with open_plain(file, HEAD_BYTES) as stream:
        return _names(_Reader(stream, file))


def read(file: File, wanted: Sequence[str]) -> Iterator[Rows]:
    """Yield the rows of a file, about a megabyte at a time.

    Args:
        file: to be read.
        wanted: columns, of those that `column_names` gives.

    Raises:
        SourceError: the file can't be read any further.
    """
    with open_plain(file) as stream:
        found = _rows(_Reader(stream, file), wanted)
        # A row of nothing but commas has no size.
        yield from gather(found, names=wanted, path=file.path, unit="line", count_faults=True)


def _rows(reader: _Reader, wanted: Sequence[str]) -> Iterator[Found]:
    names = _names(reader)
    places = [names.index(name) for name in wanted]
    for line, row in reader:
        characters = sum(map(len, row))
        if len(row) == len(names):
            yield line, characters, [row[index] for index in places]
        else:
            why = f"has {len(row):,} fields, but the first line names {len(names):,}: {listed(names)}"
            yield line, characters, why


class _Reader:
    """Iterates over (line, fields), blank lines left out; `line` is the one that the row begins on."""

    def __init__(self, stream: BinaryIO, file: File) -> None:
        csv.field_size_limit(_MOST_FIELD_CHARACTERS)
        lines = _lines(stream, file.path)
        self._rows = csv.reader(lines, delimiter="\t" if file.format == "tsv" else ",", strict=True)
        self._path = file.path

    def __iter__(self) -> Iterator[tuple[int, list[str]]]:
        while True:
            begins = self._rows.line_num + 1
            try:
                row = next(self._rows, None)
            except UnicodeDecodeError as error:
                bad = error.object[error.start]
                where = place(self._path, "line", begins)
                raise SourceError(
                    f"{where} is not valid UTF-8 (byte 0x{bad:02x}); nothing after it can be read"
                ) from error
            except csv.Error as error:
                where = place(self._path, "line", begins)
                raise SourceError(
                    f"{where} is not valid CSV: {error}; nothing after it can be read"
                ) from error
            if row is None:
                return
            if row:
                yield begins, row


def _lines(stream: BinaryIO, path: str) -> Iterator[str]:
    """Yield lines with their ends as they are, since quotes may hold them; decoded one by one, to name the row."""
    mark = "\ufeff"
    while line := stream.readline(_MOST_FIELD_CHARACTERS):
        if len(line) >= _MOST_FIELD_CHARACTERS:
            raise SourceError(
                f"{path} holds a line of more than {_MOST_FIELD_CHARACTERS >> 20:,} MB; is it CSV?"
            )
        text = line.decode().removeprefix(mark)
        mark = ""
        if text.count("\r") > text.endswith("\r\n"):  # line ends of old, or within quotes
            yield from io.StringIO(text, newline="")
        else:
            yield text


def _names(reader: _Reader) -> list[str]:
    """Take the first row as names."""
    for _, names in reader:
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise SourceError(
                f"{reader._path} has {names.count(twice[0]):,} columns called `{twice[0]}`; rename all but one"
            )
        return names
    return []
