"""Compressed files as what they unpack to; of a damaged one, all that stands before the damage.

Unpackers give what they have in pieces, and nothing of the piece in which they fail. Where one fails, the file is
unpacked once more, and its last piece byte by byte.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any, BinaryIO, cast

from varlen.source.files import Compression

UNPACKED_BYTES = 1 << 16
"""Unpacked at a time."""
_STORED_BYTES = 1 << 13
_WITH_HEADER = 31
"""For zlib: gzip, with its header and checksum."""


def unpacker(stored: BinaryIO, compression: Compression) -> AbstractContextManager[Any]:
    """Return what unpacks a stream.

    Args:
        stored: compressed bytes, which it doesn't close.
        compression: theirs.
    """
    if compression == "gzip":
        return gzip.GzipFile(fileobj=stored, mode="rb")
    import pyarrow as pa

    return cast(
        AbstractContextManager[Any], pa.CompressedInputStream(pa.PythonFile(stored, mode="r"), "zstd")
    )


class ToTheFault(io.RawIOBase):
    """Gives what an unpacker gives; where that fails, first what stands before the fault, and then its error."""

    def __init__(self, stream: Any, reopen: Callable[[], BinaryIO], compression: Compression) -> None:
        super().__init__()
        self._stream, self._reopen, self._compression = stream, reopen, compression
        self._at = 0
        self._error: Exception | None = None
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Read some bytes; returns how many, 0 at the end."""
        if self._error is None:
            try:
                count: int = self._stream.readinto(buffer)
            except (EOFError, OSError, zlib.error) as error:
                if isinstance(error, OSError) and not is_damage(error):
                    raise  # of the disk or the network
                self._error = error
                self._rest = memoryview(_before_fault(self._reopen, self._compression, self._at))
            else:
                self._at += count
                return count
        if not self._rest:
            raise self._error
        given = self._rest[: len(buffer)]
        buffer[: len(given)] = given
        self._rest = self._rest[len(given) :]
        return len(given)


def is_damage(error: OSError) -> bool:
    """Whether an error says that compressed bytes are damaged, and not that they can't be read."""
    return isinstance(error, gzip.BadGzipFile) or "compress" in str(error).lower()


def _before_fault(reopen: Callable[[], BinaryIO], compression: Compression, start: int) -> bytes:
    """Return what can be unpacked from an offset on, of bytes that were found to be damaged soon after it."""
    found = bytearray()
    with suppress(Exception), reopen() as stored:
        give = _gzip_pieces(stored, start) if compression == "gzip" else _zstd_pieces(stored, start)
        for piece in give:
            found += piece
            if len(found) >= UNPACKED_BYTES:
                break
    return bytes(found)


def _gzip_pieces(stored: BinaryIO, start: int) -> Iterator[bytes]:
    """Yield what is unpacked from an offset on, from single bytes: a checksum's fault takes no byte with it."""
    unpacking, at = zlib.decompressobj(_WITH_HEADER), 0
    while packed := stored.read(_STORED_BYTES):
        while True:
            if unpacking.eof:  # another member follows, or zeros that fill the file
                packed = packed.lstrip(b"\0")
                if packed:
                    unpacking = zlib.decompressobj(_WITH_HEADER)
            given, most = (1, 1) if at >= start else (len(packed), min(start - at, UNPACKED_BYTES))
            piece = unpacking.decompress(packed[:given], most)
            packed = (unpacking.unused_data if unpacking.eof else unpacking.unconsumed_tail) + packed[given:]
            if at >= start:
                yield piece
            at += len(piece)
            if not piece and not packed:
                break


def _zstd_pieces(stored: BinaryIO, start: int) -> Iterator[bytes]:
    """Yield what is unpacked from an offset on, byte by byte."""
    with unpacker(stored, "zstd") as stream:
        while start > 0:
            start -= len(stream.read(min(start, UNPACKED_BYTES))) or start
        while piece := stream.read(1):
            yield piece


def fault_of_gzip(stored: BinaryIO) -> int:
    """Return the byte at which compressed bytes are found to be damaged; their number where they aren't.

    Args:
        stored: from its beginning.
    """
    unpacking, at, member = zlib.decompressobj(_WITH_HEADER), 0, 0
    while packed := stored.read(_STORED_BYTES):
        stop = at + len(packed)
        while at < stop:
            if unpacking.eof:
                packed = packed.lstrip(b"\0")
                at = member = stop - len(packed)
                if not packed:
                    break
                unpacking = zlib.decompressobj(_WITH_HEADER)
            before = unpacking.copy()
            try:
                unpacking.decompress(packed)
            except zlib.error as error:
                return member if "header" in str(error) else at + _sound(before, packed)
            packed = unpacking.unused_data
            at = stop - len(packed)
    return at


def _sound(unpacking: Any, packed: bytes) -> int:
    """Return how many bytes can be given to an unpacker before it fails."""
    for index in range(len(packed)):
        try:
            unpacking.decompress(packed[index : index + 1])
        except zlib.error:
            return index
    return len(packed)
