"""CSV and TSV files: a line of names, then rows of text; quoted fields may contain line ends."""

from __future__ import annotations

import csv
import io
import re
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from varlen.errors import SourceError
from varlen.files.losses import Losses
from varlen.files.opening import HEAD_BYTES, open_plain
from varlen.files.paths import File
from varlen.files.rows import Found, Lost, Rows, gather, listed, location

_MOST_FIELD_CHARACTERS = 256 << 20
_JUDGED = 16  # lines inspected to decide whether those consumed by an open quote are rows
_ODD = re.compile("[\udc80-\udcff]")  # surrogates that stand for bytes that aren't UTF-8


def column_names(file: File) -> list[str]:
    """Return the names in the first line; none where the file is empty."""
    with open_plain(file, HEAD_BYTES) as stream:
        return _names(_Reader(stream, file))


def read(file: File, wanted: Sequence[str]) -> Iterator[Rows]:
    """Yield the rows of a file, about a megabyte at a time."""
    with open_plain(file) as stream:
        rows = _rows(_Reader(stream, file), wanted)
        # A row of nothing but commas has size 0.
        yield from gather(rows, names=wanted, path=file.path, unit="line", count_faults=True)


def _rows(reader: _Reader, wanted: Sequence[str]) -> Iterator[Found]:
    names = _names(reader)
    indices = [names.index(name) for name in wanted]
    reader.width = len(names)
    for line, row in reader:
        if isinstance(row, str):
            yield line, len(row), row
            continue
        characters = sum(map(len, row))
        if len(row) != len(names):
            why = f"has {len(row):,} fields, but the first line names {len(names):,}: {listed(names)}"
            yield line, characters, why
        elif reader.is_odd and (odd := _ODD.search("".join(row))) is not None:
            yield line, characters, f"is not valid UTF-8 (byte 0x{ord(odd[0]) & 0xFF:02x})"
        else:
            yield line, characters, [row[index] for index in indices]


class _Reader:
    """Iterates over (line, fields) without blank lines; `line` is the one that the row begins on.

    For a row that isn't CSV, a message takes the place of its fields. An open quote consumes the lines that follow.
    They are parsed again if they are rows by themselves, as when a stray quote stands in a row, but not if a text of
    several lines is truncated.
    """

    def __init__(self, stream: BinaryIO, file: File) -> None:
        csv.field_size_limit(_MOST_FIELD_CHARACTERS)
        self._delimiter = "\t" if file.format == "tsv" else ","
        self.path, self._stream = file.path, stream
        self.width = 0  # fields of a row, once known
        self.is_odd = False  # whether bytes weren't UTF-8, and became surrogates
        self._row_lines: list[str] = []
        self._lines, self._spans_lines, self._begins = self._decoded(), False, 1
        self._again: deque[str] = deque()  # lines to be parsed again
        self._rows = self._reader(self._lines)

    def _reader(self, lines: Iterator[str]) -> Any:
        return csv.reader(lines, delimiter=self._delimiter, strict=True)

    def _replayed(self) -> Iterator[str]:
        """Yield the lines to be parsed again, and those after them; all are recorded for the current row."""
        keep, again = self._row_lines.append, self._again
        while True:
            while again:
                line = again.popleft()
                keep(line)
                yield line
            for line in self._lines:
                yield line
                if again:
                    break
            else:
                return

    def __iter__(self) -> Iterator[tuple[int, list[str] | str]]:
        held = self._row_lines
        while True:
            held.clear()
            try:
                row: list[str] | str | None = next(self._rows, None)
            except csv.Error as error:
                row = f"is not valid CSV: {error}"
            count = len(held)
            if row is None:
                return
            if count > 1:
                if isinstance(row, str):
                    row, count = self._cut(row)
                elif len(row) == self.width:
                    self._spans_lines = True
            begins, self._begins = self._begins, self._begins + count
            if row:
                yield begins, row

    def _cut(self, error: str) -> tuple[str, int]:
        """Return the message for a damaged row of several lines, and how many it takes; the rest is parsed again."""
        lines = list(self._row_lines)
        # The last line of an error may be damaged too: it holds a misplaced quote.
        judged = lines[1:] if "end of data" in error else lines[1:-1]
        self._rows = self._reader(self._replayed())
        if self.width and self._are_rows(judged):
            self._again.extendleft(reversed(lines[1:]))
            return error, 1
        size = sum(len(line.encode("utf-8", "surrogateescape")) for line in lines)
        why = f"{error} (a quote is open over {len(lines):,} lines)"
        return Lost.of(why, Losses(num_bytes=size)), len(lines)

    def _are_rows(self, lines: Sequence[str]) -> bool:
        """Whether the lines consumed by an open quote are rows by themselves, judged by the first ones."""
        if self.width == 1:  # any line is a row
            return not self._spans_lines
        judged = lines[:_JUDGED]
        return sum(map(self._is_row, judged)) * 2 > len(judged) - (not judged)

    def _is_row(self, line: str) -> bool:
        """Whether a line by itself is a row of as many fields as the others."""
        if line.count('"') % 2:  # it holds the quote that another line opens, or opens one
            return False
        try:
            return len(next(csv.reader([line], delimiter=self._delimiter, strict=True), [])) == self.width
        except csv.Error:
            return False

    def _decoded(self) -> Iterator[str]:
        """Yield decoded lines with their line ends, which quoted fields may contain."""
        mark, stream, keep = "\ufeff", self._stream, self._row_lines.append
        while line := stream.readline(_MOST_FIELD_CHARACTERS):
            if len(line) >= _MOST_FIELD_CHARACTERS:
                raise SourceError(
                    f"{self.path} holds a line of more than {_MOST_FIELD_CHARACTERS >> 20:,} MB; is it CSV?"
                )
            try:
                text = line.decode()
            except UnicodeDecodeError:
                self.is_odd = True
                text = line.decode(errors="surrogateescape")
            text = text.removeprefix(mark)
            mark = ""
            if text.count("\r") > text.endswith("\r\n"):  # old Mac line ends, or ones within quotes
                for part in io.StringIO(text, newline=""):
                    keep(part)
                    yield part
            else:
                keep(text)
                yield text


def _names(reader: _Reader) -> list[str]:
    """Read the first row as column names."""
    for line, names in reader:
        if isinstance(names, str):
            raise SourceError(f"{location(reader.path, 'line', line)} {names}; it must name the columns")
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise SourceError(
                f"{reader.path} has {names.count(twice[0]):,} columns called `{twice[0]}`; rename all but one"
            )
        return names
    return []
