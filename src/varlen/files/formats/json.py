"""JSON files: an array of objects, or concatenated objects; read piece by piece, never whole.

Many `.json` files hold one object a line, and many a pretty-printed array: both are a run of objects between
optional brackets and commas, and are read as that.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, BinaryIO

from varlen.errors import SourceError
from varlen.files.columns import Fields
from varlen.files.formats.jsonl import MOST_RECORD_BYTES, as_object, first_names, in_order
from varlen.files.losses import Losses
from varlen.files.opening import HEAD_BYTES, open_plain
from varlen.files.paths import File
from varlen.files.rows import Found, Lost, Rows, gather, location
from varlen.parsed import json_fault

_CHUNK_BYTES = 1 << 20
_CUT_SHORT = 64  # a fault this close to the end of the buffer may be due to the text not read yet
_BLANKS = re.compile(r"[ \t\r\n]*")
_ODD = re.compile("[\udc80-\udcff]")  # surrogates that stand for bytes that aren't UTF-8


def row_names(file: File, most: int) -> list[tuple[str, ...]]:
    """Return the keys of the first objects; [] where there is no value."""
    with open_plain(file, HEAD_BYTES) as stream:
        values = enumerate(_Values(stream, file.path), start=1)
        rows = (
            (
                location(file.path, "value", number),
                str(value) if isinstance(value, _Bad | Lost) else as_object(value),
            )
            for number, value in values
        )
        return first_names(rows, file.path, most)


def read(file: File, fields: Fields) -> Iterator[Rows]:
    """Yield the objects of a file, about a megabyte at a time."""
    with open_plain(file) as stream:
        rows = _rows(_Values(stream, file.path), fields)
        yield from gather(rows, names=fields.names, path=file.path, unit="value")


def _rows(values: _Values, fields: Fields) -> Iterator[Found]:
    consumed = 0
    for number, value in enumerate(values, start=1):
        row: Any = value
        if type(value) is dict or not isinstance(value, _Bad | Lost):
            row = in_order(as_object(value), fields)
        yield number, values.consumed - consumed, row
        consumed = values.consumed


class _Bad(str):
    """Why a value can't be read."""

    __slots__ = ()


class _Values:
    """Iterates over the JSON values of a stream, or over the entries of an array at the top level.

    A message takes the place of an unreadable value.
    """

    def __init__(self, stream: BinaryIO, path: str) -> None:
        self.consumed = 0  # characters taken from the stream and dropped from the buffer
        self._stream, self._path = stream, path
        self._decoder = json.JSONDecoder()
        self._undecoded, self._is_odd = b"", False
        self._buffer, self._at, self._is_over, self._count = "", 0, False, 0
        self._last: Any = None  # the last readable value

    def __iter__(self) -> Iterator[Any]:
        in_array = self._next() == "["
        if in_array:
            self._at += 1
        while (next_ := self._next()) != "":
            if in_array and next_ == "]":
                self._at += 1
                if self._next() != "":
                    yield self._behind_array()
                return
            if self._count and next_ == ",":
                self._at += 1
                self._next()
            self._count += 1
            value = self._value()
            yield value
            if isinstance(value, Lost):
                return
            self._drop()
        if in_array:
            why = "is missing, and so is the ] of its array: the file is truncated"
            yield Lost.of(why, Losses(cut_files=1))

    def _behind_array(self) -> Lost:
        """Return the fault of what follows a top-level array, counted to the end of the file."""
        num_bytes = 0
        while self._at < len(self._buffer) or self._more():
            num_bytes += len(self._buffer[self._at :].encode("utf-8", "surrogateescape"))
            self._at = len(self._buffer)
            self._drop()
        why = "can't be read: the file goes on after the end of its array"
        return Lost.of(f"{why}; name it .jsonl if it holds one object a line", Losses(num_bytes=num_bytes))

    def _next(self) -> str:
        """Skip blanks and return the next character without consuming it; "" at the end."""
        while True:
            self._at = _BLANKS.match(self._buffer, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            self._drop()
            if not self._more():
                return ""

    def _value(self) -> Any:
        """Decode the next value, reading on if it is incomplete; or say why it is invalid."""
        wanted, start = _CHUNK_BYTES, self._at
        while True:
            try:
                value, stop = self._decoder.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                cut_short = "Unterminated" in error.msg or error.pos >= len(self._buffer) - _CUT_SHORT
                too_long = len(self._buffer) - self._at > MOST_RECORD_BYTES
                if not cut_short or too_long or not self._more(wanted):
                    why = f"longer than {MOST_RECORD_BYTES >> 20:,} MB" if too_long else json_fault(error)
                    return self._after_fault(f"is not valid JSON: {why}", error.pos)
                wanted *= 2
            except (ValueError, RecursionError):
                why = "can't be read: a number of too many digits, or brackets nested too deeply"
                return self._after_fault(why, self._at)
            else:
                if self._buffer[stop : stop + 1] != ",":
                    odd, is_same_line = self._behind(stop)
                    is_extra = odd not in ",]{[" and is_same_line if isinstance(value, dict) else odd in ":}"
                    if odd and is_extra:
                        return self._after_fault(f"is not valid JSON: Extra data {odd!r}", stop)
                self._at = stop
                if self._is_odd and (wrong := _ODD.search(self._buffer, start, stop)) is not None:
                    return _Bad(f"is not valid UTF-8 (byte 0x{ord(wrong[0]) & 0xFF:02x})")
                self._last = value
                return value

    def _behind(self, stop: int) -> tuple[str, bool]:
        """Return the character after a value, "" at the end, and whether it is on the same line."""
        while True:
            at = _BLANKS.match(self._buffer, stop).end()  # type: ignore[union-attr]
            if at < len(self._buffer) or not self._more():
                return self._buffer[at : at + 1], "\n" not in self._buffer[stop:at]

    def _after_fault(self, why: str, position: int) -> _Bad | Lost:
        """Skip to the record after an invalid value, if it is clear where that begins."""
        where = f"(character {self.consumed + position + 1:,} of the file)"
        wanted = _CHUNK_BYTES
        while (following := self._next_record()) is None:
            left = len(self._buffer) - self._at
            if self._is_over:
                rest = self._buffer[self._at :].encode("utf-8", "surrogateescape")
                return Lost.of(f"{why} {where}; nothing after it can be read", Losses(num_bytes=len(rest)))
            if left > MOST_RECORD_BYTES:
                raise SourceError(
                    f"{location(self._path, 'value', self._count)} {why} {where}; nothing after it can be read"
                )
            self._more(wanted)
            wanted *= 2  # the text read so far is scanned again
        self._at = following
        return _Bad(f"{why} {where}")

    def _next_record(self) -> int | None:
        key = next(iter(self._last), "") if isinstance(self._last, dict) else ""
        return next_record(self._buffer, self._at, key, is_begun=self.consumed > 0, is_all=self._is_over)

    def _more(self, wanted: int = _CHUNK_BYTES) -> bool:
        """Read on; return whether there was anything. Bytes that aren't UTF-8 become surrogates."""
        if self._is_over:
            return False
        chunk = self._stream.read(wanted)
        self._is_over = not chunk
        content = self._undecoded + chunk
        try:
            text, used = codecs.utf_8_decode(content, "strict", self._is_over)
        except UnicodeDecodeError:
            self._is_odd = True
            text, used = codecs.utf_8_decode(content, "surrogateescape", self._is_over)
        if not self.consumed and not self._buffer:
            text = text.removeprefix("\ufeff")
        self._undecoded = content[used:]
        self._buffer += text
        return bool(text) or not self._is_over

    def _drop(self) -> None:
        """Drop decoded text from time to time: dropping it after each value would copy the rest each time."""
        if self._at > max(_CHUNK_BYTES, len(self._buffer) // 2) or self._at == len(self._buffer):
            self.consumed += self._at
            self._buffer, self._at = self._buffer[self._at :], 0


# Resynchronization: find where the record after a damaged one begins, if that is clear.
#
# ::
#
#     [\n  {"text": "a"},\n  {"text": "b},\n  {"text": "c"}]    a line that begins like that of the damaged record
#     [{"text": "a"}, {"text": nul}, {"text": "c"}]             after the bracket that closes it
#     [{"text": "a"}, {"text": "b}, {"text": "c"}]              an object whose first key is the usual one
#
# The first of these that exists is taken. The record found may turn out to be damaged too.

_LINE = re.compile(r"(?:\A|\n)([ \t]*),?[ \t]*\[?[ \t]*\Z")
# Without the closing quote. Possessive, since a match with backtracking takes 60 bytes per character.
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+'
_PARTS = re.compile(rf'{_STRING}(?P<close>"?)|[{{}}\[\]]', re.DOTALL)
_BRACKETS = re.compile(r"[{}\[\]]")
_BLANK = r"[ \t\r\n]*"
_BEHIND = re.compile(rf"{_BLANK}(?:,{_BLANK}[{{\]]|\{{|\]{_BLANK}\Z)")
_FIRST_NAME = re.compile(rf'\{{{_BLANK}({_STRING}"){_BLANK}:', re.DOTALL)
_DECODER = json.JSONDecoder()
_MOST_SCANNED, _MOST_PARTS = 64 << 20, 1 << 20  # characters, and parts, searched for a closing bracket
_BEFORE = 256  # characters before a record that are searched for the beginning of its line


def next_record(text: str, start: int, key: str, *, is_begun: bool, is_all: bool) -> int | None:
    """Return where to continue after a damaged record, before a comma or at a record; None if unclear."""
    before = _LINE.search(text, max(start - _BEFORE, 0), start)
    if before is not None and is_begun and before.start() == 0 and text[:1] != "\n":
        before = None
    line = None if before is None else _next_line(text, start, before[1])
    limit = len(text) if line is None else line
    end = _closing(text, start, min(limit, start + _MOST_SCANNED), is_all=is_all)
    alike = None
    if line is None and (before is None or is_all or end is not None):
        own = _FIRST_NAME.match(text, start)
        name = own[1] if own is not None and not key else json.dumps(key, ensure_ascii=False) if key else ""
        alike = _next_alike(text, start, end, name) if name else None
    return next((position for position in (alike, end, line) if position is not None), None)


def _next_line(text: str, start: int, indent: str) -> int | None:
    """Return the next record whose line begins like this one's; None where none follows."""
    match = re.compile(rf"\n{indent}(?:,[ \t]*)?\{{").search(text, start)
    return None if match is None else match.end() - 1


def _closing(text: str, start: int, stop: int, *, is_all: bool) -> int | None:
    """Return the position after a record's closing bracket, if a record or the end may follow there."""
    if text[start : start + 1] not in ("{", "["):  # the text may end there
        return None
    depth = 0
    for at in islice(_brackets(text, start, stop), _MOST_PARTS):
        if text[at] in "{[":
            depth += 1
        elif text[at] in "}]":
            depth -= 1
            if depth == 0:
                end = at + 1
                is_last = is_all and not text[end:].strip(" \t\r\n")
                return end if is_last or _BEHIND.match(text, end) else None
    return None


def _brackets(text: str, start: int, stop: int) -> Iterator[int]:
    """Yield the positions of brackets and strings; within an unclosed string, those of brackets."""
    for part in _PARTS.finditer(text, start, stop):
        if part["close"] == "":  # nor are strings that begin within it
            yield from (bracket.start() for bracket in _BRACKETS.finditer(text, part.start(), stop))
            return
        yield part.start()


def _next_alike(text: str, start: int, end: int | None, name: str) -> int | None:
    """Return the next valid object before `end` that begins with the given key."""
    begins = re.compile(rf"[,}}]{_BLANK}(\{{{_BLANK}{re.escape(name)}{_BLANK}:)")
    for match in begins.finditer(text, start + 1, len(text) if end is None else end):
        try:
            _DECODER.raw_decode(text, match.start(1))
        except (ValueError, RecursionError):
            continue
        return match.start(1)
    return None
