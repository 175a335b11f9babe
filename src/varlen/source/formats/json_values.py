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
from varlen.source.formats.gather import Found, Lost, gather
from varlen.source.formats.json_records import next_record
from varlen.source.formats.jsonl import MOST_RECORD_BYTES, as_object, first_names, in_order
from varlen.source.losses import Losses
from varlen.source.opening import HEAD_BYTES, open_plain
from varlen.source.rows import Rows, place

_CHUNK_BYTES = 1 << 20
_CUT_SHORT = 64
"""A fault this near to the end of what has been read may be one of what is still missing."""
_BLANKS = re.compile(r"[ \t\r\n]*")
_ODD = re.compile("[\udc80-\udcff]")
"""What is made of bytes that aren't UTF-8."""


def row_names(file: File, most: int) -> list[tuple[str, ...]]:
    """Return the names that the first objects have; none where there is no value.

    Args:
        file: to be looked into.
        most: objects that are wanted.

    Raises:
        SourceError: the file can't be read, or none of its first values is an object.
    """
    with open_plain(file, HEAD_BYTES) as stream:
        values = enumerate(_Values(stream, file.path), start=1)
        rows = (
            (
                place(file.path, "value", number),
                str(value) if isinstance(value, _Bad | Lost) else as_object(value),
            )
            for number, value in values
        )
        return first_names(rows, file.path, most)


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
        row: Any = value
        if type(value) is dict or not isinstance(value, _Bad | Lost):
            row = in_order(as_object(value), fields)
        yield number, values.consumed - consumed, row
        consumed = values.consumed


class _Bad(str):
    """Why a value is none."""

    __slots__ = ()


class _Values:
    """Iterates over the JSON values of a stream; an array at the top counts as its entries.

    In place of one that can't be read stands what is wrong with it.
    """

    def __init__(self, stream: BinaryIO, path: str) -> None:
        self.consumed = 0
        """Characters taken from the stream and not needed any more."""
        self._stream, self._path = stream, path
        self._decoder = json.JSONDecoder()
        self._undecoded, self._is_odd = b"", False
        self._buffer, self._at, self._is_over, self._count = "", 0, False, 0
        self._last: Any = None
        """The last value that could be read."""

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
            why = "is the last, without the ] of its array behind it: the file is truncated"
            yield Lost.of(why, Losses(cut_files=1))

    def _behind_array(self) -> Lost:
        """Return the fault of what follows an array at the top, counted as far as the file goes."""
        num_bytes = 0
        while self._at < len(self._buffer) or self._more():
            num_bytes += len(self._buffer[self._at :].encode("utf-8", "surrogateescape"))
            self._at = len(self._buffer)
            self._drop()
        said = "can't be read: the file goes on after the end of its array"
        return Lost.of(f"{said}; name it .jsonl if it holds one object a line", Losses(num_bytes=num_bytes))

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
        """Decode the value at hand, reading on where it isn't whole yet; or say why it can't be."""
        wanted, start = _CHUNK_BYTES, self._at
        while True:
            try:
                value, stop = self._decoder.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                cut_short = "Unterminated" in error.msg or error.pos >= len(self._buffer) - _CUT_SHORT
                too_long = len(self._buffer) - self._at > MOST_RECORD_BYTES
                if not cut_short or too_long or not self._more(wanted):
                    said = f"longer than {MOST_RECORD_BYTES >> 20:,} MB" if too_long else error.msg
                    return self._after_fault(f"is not valid JSON: {said}", error.pos)
                wanted *= 2
            except (ValueError, RecursionError):
                said = "can't be read: a number of too many digits, or brackets nested too deeply"
                return self._after_fault(said, self._at)
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
        """Return what follows a value that ends there, nothing at the end, and whether it is on the same line."""
        while True:
            at = _BLANKS.match(self._buffer, stop).end()  # type: ignore[union-attr]
            if at < len(self._buffer) or not self._more():
                return self._buffer[at : at + 1], "\n" not in self._buffer[stop:at]

    def _after_fault(self, said: str, position: int) -> _Bad | Lost:
        """Go on with the record after a value that can't be read, where it is plain where that begins.

        Raises:
            SourceError: it isn't, and the rest is too long to be looked through.
        """
        where = f"(character {self.consumed + position + 1:,} of the file)"
        wanted = _CHUNK_BYTES
        while (found := self._next_record()) is None:
            left = len(self._buffer) - self._at
            if self._is_over:
                rest = self._buffer[self._at :].encode("utf-8", "surrogateescape")
                return Lost.of(f"{said} {where}; nothing after it can be read", Losses(num_bytes=len(rest)))
            if left > MOST_RECORD_BYTES:
                raise SourceError(
                    f"{place(self._path, 'value', self._count)} {said} {where}; nothing after it can be read"
                )
            self._more(wanted)
            wanted *= 2  # what was read is looked through again
        self._at = found
        return _Bad(f"{said} {where}")

    def _next_record(self) -> int | None:
        key = next(iter(self._last), "") if isinstance(self._last, dict) else ""
        return next_record(self._buffer, self._at, key, is_begun=self.consumed > 0, is_all=self._is_over)

    def _more(self, wanted: int = _CHUNK_BYTES) -> bool:
        """Read on; returns whether there was anything. Bytes that aren't UTF-8 become halves of characters."""
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
        """Forget what has been decoded, now and then: cutting the text at every value would copy it each time."""
        if self._at > max(_CHUNK_BYTES, len(self._buffer) // 2) or self._at == len(self._buffer):
            self.consumed += self._at
            self._buffer, self._at = self._buffer[self._at :], 0
