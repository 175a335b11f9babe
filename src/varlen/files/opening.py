"""Open a file for reading, decompressed if need be; every error names the file.

A file's first bytes say whether it is compressed, whatever its name.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, BinaryIO, cast

from varlen.errors import SourceError, described
from varlen.files.contents import LOOKED_AT_BYTES, MARK_BYTES, OTHER_TEXT, mark_of, rows_in
from varlen.files.paths import FORMAT_NAMES, Compression, File, Format, LiveRows, is_text_name
from varlen.files.remote import BUFFER_BYTES, changed, open_remote, remote_faults, replaced_words
from varlen.files.seen import Seen, changed_file_error, difference, forget_change
from varlen.regular import open_with_status

_MAGIC: dict[bytes, Compression] = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
# Magic numbers of unsupported compressions, whose files would otherwise be reported as broken text.
_REFUSED = {
    b"\xfd7zXZ\x00": "xz",
    b"BZh91AY&SY": "bzip2",
    b"PK\x03\x04": "zip",
    b"Rar!\x1a\x07": "rar",
    b"\x04\x22\x4d\x18": "lz4",
    b"\xff\x06\x00\x00sNaPpY": "snappy",
}
HEAD_BYTES = 64 << 10  # read at a time where only a file's first row is needed
TRUNCATED = "the compressed file is truncated"  # part of the error for a compressed file that ends early
_MOST_MAGIC = max(map(len, [*_MAGIC, *_REFUSED]))
_BUFFER_BYTES = 1 << 20
_MOST_REMEMBERED = 1 << 16
# By what identifies a file's content: the server's ETag or checksum, or the local file's status.
_compressions: dict[tuple[object, ...], Compression | None] = {}


class _Stored(io.RawIOBase):
    """A local file that reports what is read, and detects if it isn't the file that was listed.

    Reads are positional (`preadv`), so that reading a stretch of a file takes five system calls; `io.FileIO` takes
    eight.
    """

    _descriptor = -1

    def __init__(self, file: File) -> None:
        self._descriptor, status = open_with_status(file.local_path)
        self._file, self._position = file, 0
        try:
            self._check_same(status)
        except BaseException:
            self.close()
            raise

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if whence == os.SEEK_END:
            offset += os.fstat(self._descriptor).st_size
        elif whence == os.SEEK_CUR:
            offset += self._position
        self._position = offset if offset >= 0 else os.lseek(self._descriptor, offset, os.SEEK_SET)  # raises
        return self._position

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._descriptor >= 0:
                os.close(self._descriptor)

    def _check_same(self, status: os.stat_result) -> None:
        """Raise unless the open file, which has this status, holds what was listed."""
        file, now = self._file, Seen.of(status)
        self._at = status.st_size, status.st_mtime_ns, status.st_ctime_ns
        if 0 <= file.size != now.size:
            raise changed_file_error(
                file.local_path, file.seen, changed(file.path, file.size, f"{now.size:,}")
            )
        if isinstance(file.seen, Seen):
            reason = difference(file.local_path, file.seen, now, file.known, self._descriptor)
            if reason is not None:
                raise changed_file_error(file.local_path, file.seen, replaced_words(file.path, reason))
        forget_change(file.local_path, file.seen)

    def readinto(self, buffer: Any, /) -> int:
        count = os.preadv(self._descriptor, [buffer], self._position)
        self._check(count, is_end=not count and len(buffer) > 0)
        return count

    def _check(self, count: int, *, is_end: bool) -> None:
        """Report the bytes read; raise if the file ends before the listed size or was written to meanwhile.

        A write changes the modification time before the content, so a status taken after the read covers what was
        read.
        """
        start, stop = self._position, self._position + count
        self._position = stop
        if is_end and stop < self._file.size:
            words = changed(self._file.path, self._file.size, f"{stop:,}")
            raise changed_file_error(self._file.local_path, self._file.seen, words)
        if self._file.seen is not None:
            status = os.fstat(self._descriptor)
            if (status.st_size, status.st_mtime_ns, status.st_ctime_ns) != self._at:
                self._check_same(status)
        if self._file.on_read is not None:
            self._file.on_read(self._file.path, start, stop)


def open_stored(file: File, buffer_bytes: int | None = None) -> BinaryIO:
    """Open a file's bytes as they are stored."""
    if file.live is not None:
        return cast(BinaryIO, LiveRows(file.path, file.local_path))
    if file.is_remote:
        seen = file.seen if isinstance(file.seen, str) else None
        return open_remote(file.path, file.size, file.retry, buffer_bytes or BUFFER_BYTES, seen)
    try:
        return io.BufferedReader(_Stored(file), buffer_bytes or _BUFFER_BYTES)
    except FileNotFoundError as error:
        if file.stored is not None:
            raise SourceError(
                f"{file.path} can't be read any more: the loader that it was given to is closed; make another"
            ) from error
        raise SourceError(
            f"{file.path} can't be read: it was there when the files were listed, and is gone now; put it back, or "
            "begin again without it"
        ) from error
    except OSError as error:
        raise SourceError(f"{file.path} can't be read: {error.strerror or error}") from error


def compression_of(file: File, stored: BinaryIO | None = None) -> Compression | None:
    """Return a file's compression by its first bytes, read from its open stream if there is one.

    Cost: one small request for a remote file, cached as long as the file doesn't change.
    """
    if file.live is not None:
        return None
    content = file.mark or file.seen
    if content is None:
        return _compression_of(file, stored)
    key = file.local_path, content, file.format, file.suffix_compression
    if key not in _compressions:
        compression = _compression_of(file, stored)  # errors are not cached
        if len(_compressions) >= _MOST_REMEMBERED:
            _compressions.clear()
        _compressions[key] = compression
    return _compressions[key]


def _compression_of(file: File, stored: BinaryIO | None) -> Compression | None:
    if isinstance(stored, io.BufferedReader):
        first = stored.peek(_MOST_MAGIC)[:_MOST_MAGIC]
    else:
        with faults(file), open_stored(replace(file, on_read=None), _MOST_MAGIC) as short:
            first = short.read(_MOST_MAGIC)
    for magic, compression in _MAGIC.items():
        if first.startswith(magic):
            return compression
    for magic, kind in _REFUSED.items():
        if first.startswith(magic) and file.format != "npz":
            raise SourceError(f"{file.path} is compressed ({kind}); unpack it, or use gzip or zstd")
    # With Content-Encoding, a web server reports no size, and the client has decompressed the file.
    may_be_decompressed = file.size < 0 and file.path.startswith("http")
    if file.suffix_compression and first and not may_be_decompressed:
        raise SourceError(
            f"{file.path} is not a {file.suffix_compression} file, though its name says so; rename it"
        )
    return None


@contextmanager
def open_plain(file: File, buffer_bytes: int | None = None) -> Iterator[BinaryIO]:
    """Open a file's bytes, decompressed, as a buffered stream to be read once from beginning to end."""
    with _unpacked(file, buffer_bytes) as stream:
        # Served rows are JSON lines, and peeking could block until enough of them arrive.
        is_given = file.live is not None
        kind = None if is_given else mark_of(cast(io.BufferedReader, stream).peek(MARK_BYTES)[:MARK_BYTES])
        if kind is not None:
            raise SourceError(_holds(file, kind))
        yield stream


@contextmanager
def _unpacked(file: File, buffer_bytes: int | None) -> Iterator[BinaryIO]:
    """Open a file's bytes, decompressed, whatever they are."""
    compression = compression_of(file) if file.is_remote else None
    with faults(file), open_stored(file, buffer_bytes) as stored:
        if not file.is_remote:
            compression = compression_of(file, stored)
        if compression is None:
            yield stored
            return
        with unpacker(stored, compression) as stream:
            whole = ToTheFault(stream, lambda: open_stored(replace(file, on_read=None)), compression)
            yield cast(BinaryIO, io.BufferedReader(whole, UNPACKED_BYTES))


def rows_at(file: File, fields: Collection[str]) -> Format | None:
    """Return the format of a file's rows by its first bytes; None where it holds no rows.

    Cost: reads 64 KB, by one request if remote, cached as long as the file doesn't change.
    """
    head, is_whole = _head(file) if file.mark is None else _head_by_mark(replace(file, on_read=None))
    return rows_in(head, fields, is_whole=is_whole)


def _head(file: File) -> tuple[bytes, bool]:
    """Return a file's first bytes, decompressed, and whether they are the whole file."""
    with faults(file), open_stored(file, LOOKED_AT_BYTES) as stored:
        first = stored.read(LOOKED_AT_BYTES)
    is_whole = len(first) < LOOKED_AT_BYTES
    compression = next((kind for magic, kind in _MAGIC.items() if first.startswith(magic)), None)
    if compression is None:
        return first, is_whole
    if compression == "gzip":
        unpacking = zlib.decompressobj(wbits=31)
        with suppress(zlib.error):
            return unpacking.decompress(first, LOOKED_AT_BYTES), is_whole and unpacking.eof
        return b"", False
    import pyarrow as pa

    unpacked = bytearray()
    with suppress(OSError), pa.CompressedInputStream(pa.BufferReader(first), "zstd") as stream:
        while len(unpacked) < LOOKED_AT_BYTES and (more := stream.read(1 << 12)):
            unpacked += more
    return bytes(unpacked), is_whole and len(unpacked) < LOOKED_AT_BYTES


_head_by_mark = lru_cache(maxsize=1 << 7)(_head)  # cached by ETag or checksum; errors are not cached
_READABLE: dict[str, Format] = {
    "a Parquet file": "parquet",
    "an Arrow file": "arrow",
    "an Arrow stream": "arrow",
    "JSON lines": "jsonl",
    "JSON": "json",
}


def other_content(file: File, fields: Collection[str]) -> str | None:
    """Return the error message if a file's first bytes contradict its name or format; else None."""
    with _unpacked(file, None) as stream:
        head = stream.read(LOOKED_AT_BYTES)
    kind = mark_of(head[:MARK_BYTES])
    if kind is None:
        rows = rows_in(head, fields, is_whole=len(head) < LOOKED_AT_BYTES)
        is_binary = file.format not in ("parquet", "arrow", "npz") and b"\0" in head
        kind = FORMAT_NAMES[rows] if rows else "binary data" if is_binary else None
    same = kind is None or _READABLE.get(kind) == file.format
    return None if kind is None or same else _holds(file, kind)


def _holds(file: File, kind: str) -> str:
    """Return the error message: what a file holds, what was expected, and the way out."""
    should = f"though --read-as (format=) says {FORMAT_NAMES[file.format]}" if file.is_format_given else ""
    if not should:
        named = file.format != "text" or is_text_name(file.name)
        should = f"though its name says {FORMAT_NAMES[file.format]}" if named else ""
    if kind in OTHER_TEXT.values():  # text in another encoding doesn't contradict the name
        should = ""
    if kind in _READABLE:
        format_ = _READABLE[kind]
        out = f'rename it, or say what it is: --read-as {format_} (format="{format_}")'
    elif "tar" in kind:
        out = "unpack it, and name the files in it"
    elif kind in OTHER_TEXT.values():
        out = "convert it to UTF-8"
    else:
        out = "leave it out, or convert it to something that is read"
    return f"{file.path} holds {kind}{should and ', '}{should}; {out}"


@contextmanager
def open_seekable(file: File) -> Iterator[BinaryIO]:
    """Open a file's bytes, decompressed, as a seekable stream.

    A compressed file is decompressed into an unnamed temporary file first, which takes disk space instead of memory.
    """
    if compression_of(file) is None:
        # Tables and archives are read at scattered positions, in small pieces.
        with faults(file), open_stored(file, _BUFFER_BYTES) as stored:
            yield stored
        return
    with faults(file), tempfile.TemporaryFile() as unpacked:
        with _unpacked(file, None) as stream:
            shutil.copyfileobj(stream, unpacked, _BUFFER_BYTES)
        unpacked.seek(0)
        yield cast(BinaryIO, unpacked)


@contextmanager
def faults(file: File) -> Iterator[None]:
    """Turn errors of reading and decompressing into a SourceError that names the file."""
    with remote_faults(file.path) if file.is_remote else nullcontext():
        try:
            yield
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise SourceError(f"{file.path} {_broken(str(error))}") from error
        except OSError as error:
            message = error.strerror or described(error)
            if "compress" in message.lower():
                raise SourceError(f"{file.path} {_broken(message)}") from error
            raise SourceError(f"{file.path} can't be read: {message}") from error


def _broken(message: str) -> str:
    if "truncated" in message.lower() or "end-of-stream" in message.lower():
        return f"ends too early: {TRUNCATED}; copy it again"
    return f"is damaged: {message.splitlines()[0] if message else 'it does not unpack'}"


# Decompression. Of a damaged file, everything before the damage is returned.
#
# Decompressors return whole pieces, and nothing of the piece in which they fail. After a failure, the file is
# decompressed once more, and its last piece byte by byte.

UNPACKED_BYTES = 1 << 16  # decompressed at a time
_STORED_BYTES = 1 << 13
_WITH_HEADER = 31  # zlib's `wbits` for gzip, with header and checksum


def unpacker(stored: BinaryIO, compression: Compression) -> AbstractContextManager[Any]:
    """Return a decompressing stream."""
    if compression == "gzip":
        return gzip.GzipFile(fileobj=stored, mode="rb")
    import pyarrow as pa

    return cast(
        AbstractContextManager[Any], pa.CompressedInputStream(pa.PythonFile(stored, mode="r"), "zstd")
    )


class ToTheFault(io.RawIOBase):
    """Returns decompressed bytes; if decompressing fails, first those before the fault, then raises the error."""

    def __init__(self, stream: Any, reopen: Callable[[], BinaryIO], compression: Compression) -> None:
        super().__init__()
        self._stream, self._reopen, self._compression = stream, reopen, compression
        self._at = 0
        self._error: Exception | None = None
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Read into a buffer; return the number of bytes, 0 at the end."""
        if self._error is None:
            try:
                count: int = self._stream.readinto(buffer)
            except (EOFError, OSError, zlib.error) as error:
                if isinstance(error, OSError) and not _is_unpacking_error(error):
                    raise  # a disk or network error
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


def _is_unpacking_error(error: OSError) -> bool:
    """Whether decompressing failed, and not the disk or the network."""
    return isinstance(error, gzip.BadGzipFile) or "compress" in str(error).lower()


def _before_fault(reopen: Callable[[], BinaryIO], compression: Compression, start: int) -> bytes:
    """Return what can be decompressed from an offset on, of bytes known to be damaged soon after it."""
    content = bytearray()
    with suppress(Exception), reopen() as stored:
        pieces = _gzip_pieces(stored, start) if compression == "gzip" else _zstd_pieces(stored, start)
        for piece in pieces:
            content += piece
            if len(content) >= UNPACKED_BYTES:
                break
    return bytes(content)


def _gzip_pieces(stored: BinaryIO, start: int) -> Iterator[bytes]:
    """Yield decompressed bytes from an offset on, one at a time, so that a wrong checksum loses none."""
    unpacking, at = zlib.decompressobj(_WITH_HEADER), 0
    while packed := stored.read(_STORED_BYTES):
        while True:
            if unpacking.eof:  # another gzip member follows, or padding zeros
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
    """Yield decompressed bytes from an offset on, one at a time."""
    with unpacker(stored, "zstd") as stream:
        while start > 0:
            start -= len(stream.read(min(start, UNPACKED_BYTES))) or start
        while piece := stream.read(1):
            yield piece


def fault_of_gzip(stored: BinaryIO) -> int:
    """Return the compressed byte at which damage is detected; the total number where there is none."""
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
    """Return how many bytes a decompressor accepts before it fails."""
    for index in range(len(packed)):
        try:
            unpacking.decompress(packed[index : index + 1])
        except zlib.error:
            return index
    return len(packed)
