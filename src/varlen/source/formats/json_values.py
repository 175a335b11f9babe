"""JSON files: an array of objects, or objects one after the other; read piece by piece, never whole.

Many `.json` files hold one object a line, and many a pretty-printed array: both are a run of objects between
optional brackets and commas, and are read as that.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from varlen.errors import SourceError
from varlen.source.columns import Fields
from varlen.source.files import File
from varlen.source.formats.gather import Found, gather
from varlen.source.formats.jsonl import MOST_RECORD_BYTES, as_object, first_names, in_order
from varlen.source.opening import HEAD_BYTES, open_plain
from varlen.source.rows import Rows, place

_CHUNK_BYTES = 1 << 20
_CUT_SHORT = 64
"""A fault this near to the end of what has been read may be one of what is still missing."""
_BLANKS = re.compile(r"[ \t\r\n]*")


def column_names(file: File) -> list[str]:
    """Return the names that the first object has; none where there is no value.

    Raises:
        SourceError: the file can't be read, or none of its first values is an object.
    """
    with open_plain(file, HEAD_BYTES) as stream:
        values = enumerate(_Values(stream, file.path), start=1)
        rows = ((place(file.path, "value", number), as_object(value)) for number, value in values)
        return first_names(rows, file.path)


def read(file: File, fields: Fields) -> Iterator[Rows]:
    """Yield the objects of a file, about a megabyte at a time.

    Args:
        file: to be read.
        fields: to be taken; an object without one that is needed is a fault.

    Raises:
        SourceError: the file can't be read any further.
    """
    with open_plain(file) as stream:
        found = _rows(_Values(stream, file.path), fields)
        yield from gather(found, names=fields.names, path=file.path, unit="value")


def _rows(values: _Values, fields: Fields) -> Iterator[Found]:
    consumed = 0
    for number, value in enumerate(values, start=1):
        yield number, values.consumed - consumed, in_order(as_object(value), fields)
        consumed = values.consumed


class _Values:
    """Iterates over the JSON values of a stream; an array at the top counts as its entries."""

    def __init__(self, stream: BinaryIO, path: str) -> None:
        self.consumed = 0
        """Characters taken from the stream and not needed any more."""
        self._stream, self._path = stream, path
        self._decoder = json.JSONDecoder()
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")()
        self._bad: UnicodeDecodeError | None = None
        self._buffer, self._at, self._is_over, self._count = "", 0, False, 0

    def __iter__(self) -> Iterator[Any]:
        in_array = self._next() == "["
        if in_array:
            self._at += 1
        while (next_ := self._next()) != "":
            if in_array and next_ == "]":
                self._at += 1
                if self._next() != "":
                    raise SourceError(f"{self._path} goes on after the end of its array; {self._ways_out()}")
                return
            if self._count and next_ == ",":
                self._at += 1
                self._next()
            self._count += 1
            yield self._value()
            self._drop()
        if in_array:
            raise SourceError(
                f"{self._path} ends after value {self._count:,} without the ] of its array: it is truncated"
            )

    def _ways_out(self) -> str:
        return "name it .jsonl if it holds one object a line"

    def _next(self) -> str:
        """Skip blanks and return the next character, or nothing at the end; it isn't taken."""
        while True:
            self._at = _BLANKS.match(self._buffer, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            self._drop()
            if not self._more():
                return ""

    def _value(self) -> Any:
        """Decode the value at hand, reading on where it isn't whole yet."""
        wanted = _CHUNK_BYTES
        while True:
            try:
                value, stop = self._decoder.raw_decode(self._buffer, self._at)
                self._at = stop
                return value
            except json.JSONDecodeError as error:
                cut_short = "Unterminated" in error.msg or error.pos >= len(self._buffer) - _CUT_SHORT
                too_long = len(self._buffer) - self._at > MOST_RECORD_BYTES
                if not cut_short or too_long or not self._more(wanted):
                    said = f"longer than {MOST_RECORD_BYTES >> 20:,} MB" if too_long else error.msg
                    raise self._fault(f"is not valid JSON: {said}", error.pos) from error
                wanted *= 2
            except (ValueError, RecursionError) as error:
                said = "can't be read: a number of too many digits, or brackets nested too deeply"
                raise self._fault(said, self._at) from error

    def _fault(self, said: str, position: int) -> SourceError:
        where = f"(character {self.consumed + position + 1:,} of the file); nothing after it can be read"
        return SourceError(f"{place(self._path, 'value', self._count)} {said} {where}")

    def _more(self, wanted: int = _CHUNK_BYTES) -> bool:
        """Read on; returns whether there was anything. What stands before a fault is read first."""
        if self._bad is not None:
            where = place(self._path, "value", self._count) if self._count else self._path
            said = f"or what follows it is not valid UTF-8 (byte 0x{self._bad.object[self._bad.start]:02x})"
            raise SourceError(f"{where} {said}; nothing after it can be read") from self._bad
        if self._is_over:
            return False
        chunk = self._stream.read(wanted)
        self._is_over = not chunk
        try:
            self._buffer += self._utf8.decode(chunk, final=self._is_over)
        except UnicodeDecodeError as error:
            self._buffer += error.object[: error.start].decode()
            self._bad = error
            return True
        return not self._is_over

    def _drop(self) -> None:
        """Forget what has been decoded, now and then: cutting the text at every value would copy it each time."""
        if self._at > max(_CHUNK_BYTES, len(self._buffer) // 2) or self._at == len(self._buffer):
            self.consumed += self._at
            self._buffer, self._at = self._buffer[self._at :], 0
