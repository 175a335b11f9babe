"""A file behind a URL as a stream: read range by range, each range again where it fails; no byte twice or never."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import Any, BinaryIO, cast

from varlen.errors import SourceError
from varlen.source.remote import file_system
from varlen.source.retry import Retry, retried

_MOST_FETCHED = 4 << 20
"""Bytes of one request: what is lost where it fails, and what must come within `silence_s`."""
BUFFER_BYTES = 4 << 20
_BY_REQUEST = ("s3://", "s3a://", "memory://")
"""Where a range is a request by itself; streams of S3 ask for the size first, those of memory are shared."""


def open_remote(url: str, size: int, retry: Retry, buffer_bytes: int = BUFFER_BYTES) -> BinaryIO:
    """Open a file behind a URL for reading, seekable where its size is known.

    Args:
        url: of the file.
        size: bytes as it was listed, or -1 where the server doesn't say.
        retry: how often and how long a read is tried.
        buffer_bytes: fetched at a time.

    Raises:
        SourceError: it can't be opened, or has another size than when it was listed.
        MissingExtraError: the file system's package isn't installed.
    """
    fs, path = file_system(url, retry)
    by_request = size >= 0 and url.startswith(_BY_REQUEST)
    ranges = (_Requests if by_request else _Ranges)(url, fs, path, size)
    if not by_request:
        retried(ranges.open, url, retry)
    return cast(BinaryIO, io.BufferedReader(_Remote(url, ranges, retry), min(buffer_bytes, _MOST_FETCHED)))


def changed(path: str, size: int, now: str) -> str:
    """Say that a file isn't the one that was listed."""
    return (
        f"{path} has changed since the files were listed: it had {size:,} bytes then, now {now}; "
        "let it be written to the end, and begin again"
    )


class _Ranges:
    """Ranges of a file, by the stream that its file system gives; whatever fails, the next fetch begins anew."""

    def __init__(self, url: str, fs: Any, path: str, size: int) -> None:
        self._url, self._fs, self._path = url, fs, path
        self._stream: Any = None
        self.size = size

    def open(self) -> Any:
        """Return the stream, opened if need be.

        Raises:
            SourceError: the file has another size than when it was listed, or opened before.
        """
        if self._stream is None:
            # Ranges come at the size that is wanted: read ahead would be fetched twice.
            stream = self._fs.open(self._path, "rb", cache_type="none")
            now = getattr(stream, "size", None)
            if isinstance(now, int):
                if 0 <= self.size != now:
                    raise SourceError(changed(self._url, self.size, f"{now:,}"))
                self.size = now
            self._stream = stream
        return self._stream

    def fetch(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop), or fewer but not none where there are any."""
        # Out of reach while it is used: a fetch that was given up may still go on with the stream.
        stream, self._stream = self.open(), None
        if stream.tell() != start:
            if stream.seekable():
                stream.seek(start)
            else:
                _skip(stream, start)
        content = bytes(stream.read(stop - start))
        self._stream = stream
        return content

    def size_now(self) -> int:
        """Ask for the file's size; -1 where the server doesn't say."""
        size = self._fs.info(self._path).get("size")
        return -1 if size is None else int(size)

    def close(self) -> None:
        """Let go of the stream."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(Exception):
                stream.close()


class _Requests(_Ranges):
    """Ranges of a file, each by a request of its own."""

    def fetch(self, start: int, stop: int) -> bytes:
        return bytes(self._fs.cat_file(self._path, start=start, end=stop))


def _skip(stream: Any, start: int) -> None:
    """Read up to a place in a stream that can only be read on."""
    if stream.tell() > start:
        raise io.UnsupportedOperation("the server sends the file from its beginning only")
    while (missing := start - stream.tell()) > 0:
        if not stream.read(min(missing, _MOST_FETCHED)):
            raise ConnectionError(f"the file ended at byte {stream.tell():,}")


class _Remote(io.RawIOBase):
    """A file whose reads are tried again where they stopped."""

    def __init__(self, url: str, ranges: _Ranges, retry: Retry) -> None:
        super().__init__()
        self._url, self._ranges, self._retry = url, ranges, retry
        self._size = ranges.size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._size >= 0

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence == io.SEEK_END and self._size < 0:
            raise io.UnsupportedOperation("the server doesn't say how long the file is")
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(begin + offset, 0)
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        count = min(len(buffer), _MOST_FETCHED)
        content = self._fetch(count)
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)

    def readall(self) -> bytes:
        pieces = []
        while piece := self._fetch(_MOST_FETCHED):
            pieces.append(piece)
            self._at += len(piece)
        return b"".join(pieces)

    def _fetch(self, count: int) -> bytes:
        """Return what comes next, at most `count` bytes; none at the end alone.

        Raises:
            SourceError: it can't be read, or the file has another size than when it was listed.
        """
        start, size = self._at, self._size
        if 0 <= size <= start:
            return b""
        stop = start + count if size < 0 else min(start + count, size)
        # A byte more than there should be tells, without a request more, whether the file has grown.
        more = int(stop == size)

        def fetch() -> bytes:
            content = self._ranges.fetch(start, stop + more)
            if size >= 0 and not content:
                now = self._ranges.size_now()
                if now not in (-1, size):
                    raise SourceError(changed(self._url, size, f"{now:,}"))
                raise ConnectionError(f"nothing came, though the file has {size:,} bytes")
            return content

        content = retried(fetch, self._url, self._retry, place=f"byte {start:,}")
        if more and len(content) > stop - start:
            raise SourceError(changed(self._url, size, "more"))
        return content

    def close(self) -> None:
        if not self.closed:
            self._ranges.close()
        super().close()
