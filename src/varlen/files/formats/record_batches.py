"""The sizes of record batches of Arrow files, which may be compressed, or share values between rows."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from varlen.files.formats.damage import is_damage
from varlen.files.formats.decoded import batch_sizes, shares

_AMPLIFIED = 8  # multiple of its share of the file above which a batch's decoded size is used


def sizes(table: Any, stored: BinaryIO, wanted: list[str], file_bytes: int) -> list[int]:
    """Estimate the bytes of each record batch: its share of the file, unless it decodes to many times as much.

    Deterministic for a file. Where batches are compressed or share values, the first, the middle and the last are
    decoded, and all of them if one decodes to more.
    """
    count = table.num_record_batches
    share = file_bytes // max(count, 1)
    kinds = (table.schema.field(name).type for name in wanted)
    if not count or not (any(map(shares, kinds)) or any(b.is_compressed for b in blocks_of(stored, stop=1))):
        return [share] * count

    def look(numbers: Sequence[int]) -> dict[int, int]:
        decoded = {number: _decoded_bytes(table, wanted, number) for number in numbers}
        return {number: size for number, size in decoded.items() if size > _AMPLIFIED * share}

    decoded = look(sorted({0, count // 2, count - 1}))
    if decoded:
        decoded |= look([number for number in range(count) if number not in decoded])
    return [decoded.get(number, share) for number in range(count)]


def _decoded_bytes(table: Any, wanted: list[str], number: int) -> int:
    """Return the decoded bytes of a record batch; 0 if unreadable, which reading reports."""
    try:
        chosen = table.get_batch(number).select(wanted)
        chosen.validate()
    except Exception as error:
        if not is_damage(error):
            raise
        return 0
    return int(batch_sizes(chosen).sum())


# The metadata of an Arrow file, parsed without decoding: offset and number of rows of each record batch.
#
# pyarrow reports the number of rows only of batches that it can decode. For others, the number is read from the
# header of the message, in the layout of https://arrow.apache.org/docs/format/Columnar.html.

MAGIC = b"ARROW1"
_CONTINUES = b"\xff\xff\xff\xff"
_BLOCK = struct.Struct("<qi4xq")
_BATCH = 3  # type of a message's header: a record batch
_MOST_HEADER = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A record batch as stored in a file."""

    num_bytes: int  # of its header and its values
    num_rows: int | None  # None where its header is damaged
    is_compressed: bool = False


def blocks_of(stored: BinaryIO, start: int = 0, stop: int | None = None) -> list[Block]:
    """Return the record batches that an Arrow file's footer lists; [] where it is damaged.

    Cost: one read for the footer, and one for each batch.
    """
    try:
        size = stored.seek(0, os.SEEK_END)
        stored.seek(size - 10)
        (length,) = struct.unpack("<i", stored.read(4))
        stored.seek(size - 10 - length)
        footer = stored.read(length)
        vector = _table(footer).offset(3)
        (count,) = struct.unpack_from("<I", footer, vector)
        blocks = (
            _BLOCK.unpack_from(footer, vector + 4 + _BLOCK.size * number)
            for number in range(count)[start:stop]
        )
        return [_block(stored, *block) for block in blocks]
    except (struct.error, ValueError, OSError, LookupError):
        return []


def _block(stored: BinaryIO, start: int, header_bytes: int, body_bytes: int) -> Block:
    num_rows, is_compressed = None, False
    if start >= 0 and 8 < header_bytes < _MOST_HEADER:
        try:
            stored.seek(start)
            num_rows, is_compressed = _described(stored.read(header_bytes))
        except (struct.error, ValueError, LookupError):
            pass
    return Block(
        num_bytes=max(header_bytes, 0) + max(body_bytes, 0), num_rows=num_rows, is_compressed=is_compressed
    )


def _described(header: bytes) -> tuple[int | None, bool]:
    """Return the rows of a record batch's message, and whether its values are compressed."""
    header = header[8:] if header.startswith(_CONTINUES) else header[4:]
    message = _table(header)
    if header[message.field(1)] != _BATCH:
        return None, False
    batch = _Table(header, message.offset(2))
    (rows,) = struct.unpack_from("<q", header, batch.field(0))
    return (rows if 0 <= rows < 1 << 40 else None), batch.has(3)


def stream_rows(stored: BinaryIO, start: int) -> int | None:
    """Return the rows of the message at an offset of a stream; None where it is no batch, or damaged."""
    now = stored.tell()
    try:
        stored.seek(start)
        before = stored.read(8)
        marked = before.startswith(_CONTINUES)
        (length,) = struct.unpack_from("<i", before, 4 if marked else 0)
        if not 8 < length < _MOST_HEADER:
            return None
        stored.seek(start)
        return _described(stored.read(length + (8 if marked else 4)))[0]
    except (struct.error, ValueError, OSError, LookupError):
        return None
    finally:
        stored.seek(now)


def _table(content: bytes) -> _Table:
    """Return the root table of a flatbuffer."""
    (at,) = struct.unpack_from("<I", content, 0)
    return _Table(content, at)


class _Table:
    def __init__(self, content: bytes, at: int) -> None:
        if not 0 <= at < len(content):
            raise LookupError(at)
        (back,) = struct.unpack_from("<i", content, at)
        self._content, self._at, self._fields = content, at, at - back
        if not 0 <= self._fields < len(content):
            raise LookupError(back)

    def field(self, number: int) -> int:
        """Return the position of a field."""
        (size,) = struct.unpack_from("<H", self._content, self._fields)
        slot = 4 + 2 * number
        at = struct.unpack_from("<H", self._content, self._fields + slot)[0] if slot < size else 0
        if not at or self._at + at >= len(self._content):
            raise LookupError(number)
        return int(self._at + at)

    def has(self, number: int) -> bool:
        """Whether a field is present."""
        try:
            return self.field(number) > 0
        except LookupError:
            return False

    def offset(self, number: int) -> int:
        """Return the position that a field refers to."""
        at = self.field(number)
        return int(at + struct.unpack_from("<I", self._content, at)[0])
