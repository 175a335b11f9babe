"""A file behind a URL as a stream: read range by range, each range again where it fails; no byte twice or never."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Any, BinaryIO, cast

from varlen.source.remote import etag_of, file_system, replaced, said_of
from varlen.source.retry import Retry, answer_of, retried
from varlen.source.seen import told, untold

_MOST_FETCHED = 4 << 20
"""Bytes of one request: what is lost where it fails, and what must come within `silence_s`."""
BUFFER_BYTES = 4 << 20
_NOT_THAT_ONE = 412
"""What a server answers that has no file with the ETag that is asked for."""
_BY_REQUEST = ("s3://", "s3a://", "memory://")
"""Where a range is a request by itself; streams of S3 ask for the size first, those of memory are shared."""


def open_remote(
    url: str, size: int, retry: Retry, buffer_bytes: int = BUFFER_BYTES, seen: str | None = None
) -> BinaryIO:
    """Open a file behind a URL for reading, seekable where its size is known.

    Args:
        url: of the file.
        size: bytes as it was listed, or -1 where the server doesn't say.
        retry: how often and how long a read is tried.
        buffer_bytes: fetched at a time.
        seen: what the server said of it when it was listed.

    Raises:
        SourceError: it can't be opened, or isn't what it was when it was listed.
        MissingExtraError: the file system's package isn't installed.
    """
    fs, path = file_system(url, retry)
    by_request = size >= 0 and url.startswith(_BY_REQUEST)
    kind = _Ranges
    if by_request:
        kind = _Objects if seen is not None and hasattr(fs, "call_s3") else _Requests
    ranges = kind(url, fs, path, size, seen)
    if not by_request:
        retried(ranges.open, url, retry)
    return cast(BinaryIO, io.BufferedReader(_Remote(url, ranges, retry), min(buffer_bytes, _MOST_FETCHED)))


def changed(path: str, size: int, now: str) -> str:
    """Say that a file isn't the one that was listed."""
    return (
        f"{path} has changed since the files were listed: it had {size:,} bytes then, now {now}; "
        "let it be written to the end, and begin again"
    )


def replaced_words(path: str, why: str) -> str:
    """Say that a file of the same size isn't the one that was listed."""
    return (
        f"{path} was replaced or rewritten since the files were listed: {why}; put back what was there and go on "
        "from a saved state, or begin again"
    )


class _Ranges:
    """Ranges of a file, by the stream that its file system gives; whatever fails, the next fetch begins anew."""

    def __init__(self, url: str, fs: Any, path: str, size: int, seen: str | None = None) -> None:
        self._url, self._fs, self._path, self.seen = url, fs, path, seen
        self._stream: Any = None
        self.size = size

    def open(self) -> Any:
        """Return the stream, opened if need be.

        Raises:
            SourceError: the file has another size than when it was listed, or opened before.
        """
        if self._stream is None:
            # Ranges come at the size that is wanted: read ahead would be fetched twice.
            stream = self._fs.open(self._path, "rb", cache_type="none", **self._conditions())
            self.check(getattr(stream, "details", None))
            now = getattr(stream, "size", None)
            if isinstance(now, int):
                if 0 <= self.size != now:
                    raise told(self._url, self.seen, changed(self._url, self.size, f"{now:,}"))
                self.size = now
            self._stream = stream
        return self._stream

    def _conditions(self) -> dict[str, Any]:
        """Look at the file of a web server, and return how it is opened: with its ETag alone, or not at all."""
        if self.seen is None or not self._url.startswith("http"):
            return {}
        info = self._fs.info(self._path)
        self.check(info)
        # Opening would look again to know the size.
        asked = {"size": info["size"]} if info.get("size") and info.get("partial", True) else {}
        etag = etag_of(self.seen)
        if etag is None or etag.startswith("W/"):
            return asked
        # What is passed takes the place of what the file system was made with.
        return {**asked, "headers": {**getattr(self._fs, "kwargs", {}).get("headers", {}), "If-Match": etag}}

    def check(self, details: Any) -> None:
        """Require that the file is the one that was listed, as far as what is said of it tells.

        Raises:
            SourceError: it isn't.
        """
        name = replaced(self.seen, said_of(details)) if isinstance(details, Mapping) else None
        if name is not None:
            raise told(self._url, self.seen, replaced_words(self._url, f"the server names another {name}"))
        untold(self._url, self.seen)

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
        content = bytes(self._fs.cat_file(self._path, start=start, end=stop))
        if self.seen is not None and self._url.startswith("memory://"):  # the one that is asked for nothing
            info = self._fs.info(self._path)
            if info["size"] == self.size:
                self.check(info)
        return content


class _Objects(_Ranges):
    """Ranges of an object of S3, each by a request of its own that names the ETag: no other object answers it."""

    def fetch(self, start: int, stop: int) -> bytes:
        from fsspec.asyn import sync

        bucket, key, version = self._fs.split_path(self._path)
        etag = etag_of(self.seen)
        asked = {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{stop - 1}"}
        asked |= {} if version is None else {"VersionId": version}
        given = self._fs.call_s3(
            "get_object", **asked, **({} if etag is None else {"IfMatch": _quoted(etag)})
        )
        with closing(given["Body"]) as body:
            self.check(given)  # some servers don't heed what they are asked
            return bytes(sync(self._fs.loop, body.read))


def _quoted(etag: str) -> str:
    return etag if etag.startswith('"') else f'"{etag}"'


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
            try:
                content = self._ranges.fetch(start, stop + more)
            except Exception as error:
                if answer_of(error)[0] == _NOT_THAT_ONE:
                    raise told(self._url, self._ranges.seen, self._not_that_one()) from error
                raise
            if size >= 0 and not content:
                now = self._ranges.size_now()
                if now not in (-1, size):
                    raise told(self._url, self._ranges.seen, changed(self._url, size, f"{now:,}"))
                raise ConnectionError(f"nothing came, though the file has {size:,} bytes")
            return content

        content = retried(fetch, self._url, self._retry, place=f"byte {start:,}")
        if more and len(content) > stop - start:
            raise told(self._url, self._ranges.seen, changed(self._url, size, "more"))
        return content

    def _not_that_one(self) -> str:
        """Say what has become of a file that a server has under another ETag only."""
        now = self._ranges.size_now()
        if now not in (-1, self._size):
            return changed(self._url, self._size, f"{now:,}")
        return replaced_words(self._url, "the server names another etag")

    def close(self) -> None:
        if not self.closed:
            self._ranges.close()
        super().close()
