"""Open a file for reading, unpacked where it is compressed; every fault names the file.

A file's first bytes say whether it is compressed, whatever its name.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, BinaryIO, cast

from varlen.errors import SourceError
from varlen.source.files import Compression, File
from varlen.source.remote import first_line, open_remote, remote_faults, remote_mark

_MAGIC: dict[bytes, Compression] = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_REFUSED = {b"\xfd7zXZ\x00": "xz", b"BZh91AY&SY": "bzip2", b"PK\x03\x04": "zip", b"Rar!\x1a\x07": "rar"}
"""First bytes of compressed files that aren't unpacked here, and would otherwise be called broken text."""
_BUFFER_BYTES = 1 << 20
_UNPACKED_BYTES = 1 << 16
"""Unpacked at a time, and lost where a compressed file turns out to be damaged."""


class _Watched(io.FileIO):
    """A local file that tells what is read of it."""

    def __init__(self, path: str, on_read: Callable[[str, int, int], None]) -> None:
        super().__init__(path)
        self._path, self._on_read = path, on_read

    def readinto(self, buffer: Any, /) -> int | None:
        start = self.tell()
        count = super().readinto(buffer)
        self._on_read(self._path, start, start + (count or 0))
        return count


def open_stored(file: File) -> BinaryIO:
    """Open a file's bytes as they are stored.

    Raises:
        SourceError: it can't be opened.
    """
    if file.is_remote:
        return open_remote(file.path)
    try:
        if file.on_read is not None:
            return io.BufferedReader(_Watched(file.path, file.on_read), _BUFFER_BYTES)
        return open(file.path, "rb", buffering=_BUFFER_BYTES)  # noqa: PTH123 - paths may be no valid Path text
    except OSError as error:
        raise SourceError(f"{file.path} can't be read: {error.strerror or error}") from error


def compression_of(file: File) -> Compression | None:
    """Return how a file is compressed, by its first bytes.

    Raises:
        SourceError: it can't be opened, or is compressed in a way that isn't read, or its name says that it is
            compressed and it isn't.
    """
    with faults(file), open_stored(file) as stored:
        first = stored.read(max(map(len, _REFUSED)))
    for magic, compression in _MAGIC.items():
        if first.startswith(magic):
            return compression
    for magic, kind in _REFUSED.items():
        if first.startswith(magic) and file.format != "npz":
            raise SourceError(f"{file.path} is compressed ({kind}); unpack it, or use gzip or zstd")
    if file.suffix_compression and first:
        raise SourceError(
            f"{file.path} is not a {file.suffix_compression} file, though its name says so; rename it"
        )
    return None


@contextmanager
def open_plain(file: File) -> Iterator[BinaryIO]:
    """Give a file's bytes, unpacked, as a buffered stream to be read once from beginning to end.

    Raises:
        SourceError: it can't be opened, read or unpacked, while the stream is in use too.
    """
    compression = compression_of(file)
    with faults(file), open_stored(file) as stored:
        if compression == "gzip":
            with gzip.GzipFile(fileobj=stored, mode="rb") as stream:
                yield cast(BinaryIO, io.BufferedReader(stream, _UNPACKED_BYTES))
        elif compression == "zstd":
            import pyarrow as pa

            with pa.CompressedInputStream(pa.PythonFile(stored, mode="r"), "zstd") as unpacked:
                yield cast(BinaryIO, io.BufferedReader(unpacked, _UNPACKED_BYTES))
        else:
            yield stored


@contextmanager
def open_seekable(file: File) -> Iterator[BinaryIO]:
    """Give a file's bytes, unpacked, as a stream that can be read at any place.

    What is compressed is unpacked into a nameless temporary file first: memory stays bounded, disk is needed.

    Raises:
        SourceError: it can't be opened, read or unpacked, while the stream is in use too.
    """
    if compression_of(file) is None:
        with faults(file), open_stored(file) as stored:
            yield stored
        return
    with faults(file), tempfile.TemporaryFile() as unpacked:
        with open_plain(file) as stream:
            shutil.copyfileobj(stream, unpacked, _BUFFER_BYTES)
        unpacked.seek(0)
        yield cast(BinaryIO, unpacked)


@contextmanager
def faults(file: File) -> Iterator[None]:
    """Turn faults of reading and unpacking into a sentence that names the file.

    Raises:
        SourceError: reading failed.
    """
    with remote_faults(file.path) if file.is_remote else nullcontext():
        try:
            yield
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise SourceError(f"{file.path} {_broken(str(error))}") from error
        except OSError as error:
            said = error.strerror or first_line(error)
            if "compress" in said.lower():
                raise SourceError(f"{file.path} {_broken(said)}") from error
            raise SourceError(f"{file.path} can't be read: {said}") from error


def _broken(said: str) -> str:
    """Say of a compressed file that it ends too early, or is damaged."""
    if "truncated" in said.lower() or "end-of-stream" in said.lower():
        return "ends too early: the compressed file is truncated; copy it again"
    return f"is damaged: {said.splitlines()[0] if said else 'it does not unpack'}"


def fingerprint(file: File) -> str:
    """Return a text that changes whenever a file's content does: its SHA-256, or a server's mark for it.

    Cost: reads a local file whole, about a second a GB.

    Raises:
        SourceError: it can't be read.
    """
    if file.is_remote and (mark := remote_mark(file.path)) is not None:
        return mark
    digest = hashlib.sha256()
    with faults(file), open_stored(file) as stored:
        while chunk := stored.read(_BUFFER_BYTES):
            digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"
