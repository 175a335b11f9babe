"""Files behind URLs, opened by fsspec: s3://, gs://, https://, memory:// and any other installed protocol."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from glob import has_magic
from operator import itemgetter
from typing import Any, BinaryIO, Literal, cast

from varlen.errors import SourceError, VarlenError, described
from varlen.files.retry import Retry, as_os_error, is_nothing_there, missing_package, response_of, retried
from varlen.files.seen import Seen, changed_file_error, forget_change

_MARKS = ("ETag", "etag", "md5Hash", "content_md5", "checksum", "crc32c", "blob_id", "xet_hash")
_TIMES = (
    "generation",
    "version_id",
    "VersionId",
    "Last-Modified",
    "LastModified",
    "last_modified",
    "mtime",
    "created",
)
_S3 = ("s3://", "s3a://")
Kind = Literal["file", "folder", "glob"]  # what a URL names


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """A file in a listing."""

    path: str  # its URL
    name: str  # relative to the URL that was listed
    size: int  # bytes, or -1 where the server doesn't report it
    mark: str | None = None  # ETag or checksum, which changes with the content
    seen: Seen | str | None = None  # detects a replacement: inode and times, or all that the server reports


@contextmanager
def remote_faults(url: str) -> Iterator[None]:
    """Turn any error of a file system, including those of cloud libraries, into a SourceError that names the URL."""
    try:
        yield
    except VarlenError:
        raise
    except ImportError as error:
        raise missing_package(url, error) from error
    except Exception as error:
        raise SourceError(f"{url} can't be read: {described(error)}") from as_os_error(error)


def file_system(url: str, retry: Retry) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it.

    For S3 it is an instance of our own, so that its settings affect no other: without retries, or each of our tries
    would be 25 (5 of s3fs times 5 of botocore), and without cached listings. The user's configuration of s3fs takes
    precedence. Call it in the thread that reads, not in one that lives for a single call: some versions of fsspec
    keep a file system, with its own connections, per thread.
    """
    import fsspec

    with remote_faults(url):
        fs, path = fsspec.core.url_to_fs(url, **(_of_s3(retry) if url.startswith(_S3) else {}))
        if url.startswith(_S3):
            fs.retries = 1
        return fs, path


def _of_s3(retry: Retry) -> dict[str, Any]:
    """Return the options for s3fs."""
    import fsspec

    # The client times out a little before we do, so that it closes its connection.
    quiet_s = 0.8 * retry.silence_s
    ours = {
        "connect_timeout": min(quiet_s, 10.0),
        "read_timeout": quiet_s,
        "retries": {"total_max_attempts": 1},
        "max_pool_connections": 64,
    }
    configured = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
    return {"config_kwargs": ours | configured, "use_listings_cache": False}


def list_remote(url: str, retry: Retry) -> tuple[list[Listed], Kind]:
    """List the files behind a URL, sorted, and say what it names.

    A URL with wildcards is a glob only where no file has that literal name. A glob doesn't match hidden files.
    """
    fs, path = file_system(url, retry)
    # Long listings take many requests, each with the client's own timeout.
    return retried(lambda: _list(fs, path, url), url, retry, silence_s=retry.deadline_s)


def _list(fs: Any, path: str, url: str) -> tuple[list[Listed], Kind]:
    is_web = url.startswith("http")
    entries: dict[str, dict[str, Any]] = {}
    if has_magic(path) and not is_web:
        entries, info = _glob(fs, path)
    else:
        info = _info(fs, path)
    if info is None and has_magic(path):
        entries = fs.glob(path, detail=True) if is_web else entries
        fixed = "/".join(_before_magic(path))
        files = [entry for entry in entries.items() if entry[1]["type"] == "file"]
        listing = [listed for listed in _listed(fs, files, fixed) if not is_hidden(listed.name)]
        if not listing:
            raise SourceError(f"no file matches {url}")
        return listing, "glob"
    if info is None:
        raise SourceError(f"{url} does not exist")
    if info["type"] == "directory" and not is_web:
        return _listed(fs, fs.find(path, detail=True).items(), path), "folder"
    name = path.rstrip("/").rsplit("/", 1)[-1].split("?")[0]
    return [Listed(path=url, name=name, size=_size(info), mark=_mark(info), seen=report_of(info))], "file"


def is_hidden(name: str) -> bool:
    """Whether a name, or a folder in it, begins with a dot."""
    return any(part.startswith(".") for part in name.split("/"))


def _info(fs: Any, path: str) -> dict[str, Any] | None:
    """Return the information on a path; None where nothing exists. fsspec's `exists` hides other failures."""
    try:
        return dict(fs.info(path))
    except FileNotFoundError as error:
        if is_nothing_there(error):
            return None
        raise


def _glob(fs: Any, path: str) -> tuple[dict[str, dict[str, Any]], dict[str, Any] | None]:
    """Return what matches, and the entry with the literal name of the pattern, or None.

    fsspec's own glob silently leaves out folders whose listing failed.
    """
    from fsspec.utils import glob_translate

    parts = path.split("/")
    fixed = _before_magic(path)
    if "**" in path:
        wanted = re.compile(glob_translate(path))
        every = fs.find("/".join(fixed), detail=True)
        return {name: info for name, info in every.items() if wanted.match(name)}, every.get(path)
    level: dict[str, dict[str, Any]] = {"/".join(fixed): {"type": "directory"}}
    itself: dict[str, Any] | None = None
    for depth in range(len(fixed) + 1, len(parts) + 1):
        so_far = "/".join(parts[:depth])
        wanted = re.compile(glob_translate(so_far))
        inside: dict[str, dict[str, Any]] = {}
        folders = {name for name, info in level.items() if info["type"] == "directory"}
        if itself is not None and itself["type"] == "directory":
            folders.add("/".join(parts[: depth - 1]))
        for folder in sorted(folders):
            inside |= {info["name"].rstrip("/"): info for info in _entries(fs, folder)}
        itself = inside.get(so_far)
        # A folder with the pattern's literal name was listed too, but may not match.
        level = {n: i for n, i in inside.items() if wanted.match(n) and n.rpartition("/")[0] in level}
    return level, itself


def _entries(fs: Any, folder: str) -> list[dict[str, Any]]:
    """List a folder; [] where it doesn't exist."""
    try:
        return list(fs.ls(folder, detail=True))
    except FileNotFoundError:
        return []


def _before_magic(path: str) -> list[str]:
    parts = path.split("/")
    return parts[: next(i for i, part in enumerate(parts) if has_magic(part))]


def _listed(fs: Any, entries: Any, folder: str) -> list[Listed]:
    """Return files with names relative to a folder, sorted."""
    return [
        Listed(
            path=fs.unstrip_protocol(path),
            name=path[len(folder) :].lstrip("/"),
            size=_size(info),
            mark=_mark(info),
            seen=report_of(info),
        )
        for path, info in sorted(entries, key=itemgetter(0))
    ]


def _size(info: dict[str, Any]) -> int:
    size = info.get("size")
    return -1 if size is None else int(size)


def _mark(info: dict[str, Any]) -> str | None:
    """Return the ETag or checksum, which changes with the content, or None."""
    return next((f"{key.lower()}:{info[key]}" for key in _MARKS if info.get(key)), None)


def report_of(info: Mapping[str, Any]) -> str | None:
    """Return everything a server reports of a file that changes when it is replaced, as JSON; None for nothing.

    It identifies a file within a run. A listing and a request for one file may report different properties, so only
    those that both have are compared.
    """
    report = {
        kind: {name.lower(): _spelled(info[name]) for name in names if info.get(name)}
        for kind, names in (("mark", _MARKS), ("time", _TIMES))
    }
    return json.dumps(report, sort_keys=True) if any(report.values()) else None


def _spelled(value: Any) -> str:
    """Return a property as text; times come as numbers in some responses and as dates in others."""
    return str(value.timestamp() if isinstance(value, datetime) else value)


def etag_of(report: str | None) -> str | None:
    """Return the ETag in a report of `report_of`, or None."""
    tag: str | None = None if report is None else json.loads(report)["mark"].get("etag")
    return tag


def replaced(was: str | None, now: str | None) -> str | None:
    """Return the name of the first property that differs between two reports of a file, or None."""
    if was is None or now is None:
        return None
    before, after = json.loads(was), json.loads(now)
    for kind in ("mark", "time"):  # times may differ in precision; an ETag or checksum takes precedence
        common = [name for name in before[kind] if name in after[kind]]
        if common:
            return next((name for name in common if before[kind][name] != after[kind][name]), None)
    return None


def remote_mark(url: str, retry: Retry) -> str | None:
    """Return the ETag or checksum of the file behind a URL, or None."""
    fs, path = file_system(url, retry)
    return retried(lambda: _mark(fs.info(path)), url, retry)


def read_remote(url: str, retry: Retry) -> bytes:
    """Return the whole content of a small file behind a URL."""
    fs, path = file_system(url, retry)
    return retried(lambda: bytes(fs.cat_file(path)), url, retry)


# A file behind a URL as a stream: read range by range, each range retried on failure; every byte exactly once.

_MOST_FETCHED = 4 << 20  # bytes per request: the most that a failure loses; must arrive in `silence_s`
BUFFER_BYTES = 4 << 20
_NOT_THAT_ONE = 412  # HTTP status "precondition failed": the file has another ETag
# Protocols where each range is a request: streams of S3 ask for the size first, those of memory are shared.
_BY_REQUEST = ("s3://", "s3a://", "memory://")


def open_remote(
    url: str, size: int, retry: Retry, buffer_bytes: int = BUFFER_BYTES, seen: str | None = None
) -> BinaryIO:
    """Open a file behind a URL for reading, seekable if its size is known."""
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
    """Return the error message for a file whose size isn't the listed one."""
    return (
        f"{path} has changed since the files were listed: it had {size:,} bytes then, now {now}; "
        "let it be written to the end, and begin again"
    )


def replaced_words(path: str, why: str) -> str:
    """Return the error message for a file that was replaced by one of the same size."""
    return (
        f"{path} was replaced or rewritten since the files were listed: {why}; put back what was there and go on "
        "from a saved state, or begin again"
    )


class _Ranges:
    """Ranges of a file, read from the stream of its file system; after a failure, the next fetch opens a new one."""

    def __init__(self, url: str, fs: Any, path: str, size: int, seen: str | None = None) -> None:
        self._url, self._fs, self._path, self.seen = url, fs, path, seen
        self._stream: Any = None
        self.size = size

    def open(self) -> Any:
        """Return the stream, opened if need be."""
        if self._stream is None:
            # Ranges come in the size that is needed: readahead would be fetched twice.
            stream = self._fs.open(self._path, "rb", cache_type="none", **self._conditions())
            self.check(getattr(stream, "details", None))
            now = getattr(stream, "size", None)
            if isinstance(now, int):
                if 0 <= self.size != now:
                    raise changed_file_error(self._url, self.seen, changed(self._url, self.size, f"{now:,}"))
                self.size = now
            self._stream = stream
        return self._stream

    def _conditions(self) -> dict[str, Any]:
        """Check the file on a web server; return arguments that open it only if its ETag is unchanged."""
        if self.seen is None or not self._url.startswith("http"):
            return {}
        info = self._fs.info(self._path)
        self.check(info)
        # Without a size, opening would send the request again.
        asked = {"size": info["size"]} if info.get("size") and info.get("partial", True) else {}
        etag = etag_of(self.seen)
        if etag is None or etag.startswith("W/"):
            return asked
        # The argument replaces the headers that the file system was created with.
        return {**asked, "headers": {**getattr(self._fs, "kwargs", {}).get("headers", {}), "If-Match": etag}}

    def check(self, details: Any) -> None:
        """Raise if the file isn't the one that was listed, as far as the reported properties show."""
        name = replaced(self.seen, report_of(details)) if isinstance(details, Mapping) else None
        if name is not None:
            raise changed_file_error(
                self._url, self.seen, replaced_words(self._url, f"the server names another {name}")
            )
        forget_change(self._url, self.seen)

    def fetch(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop), or fewer, but none only at the end."""
        # Detached while in use: a fetch that was given up on may still be reading from the stream.
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
        """Request the file's size; -1 where the server doesn't report it."""
        size = self._fs.info(self._path).get("size")
        return -1 if size is None else int(size)

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(Exception):
                stream.close()


class _Requests(_Ranges):
    """Ranges of a file, one request each."""

    def fetch(self, start: int, stop: int) -> bytes:
        content = bytes(self._fs.cat_file(self._path, start=start, end=stop))
        # memory:// has no conditional requests.
        if self.seen is not None and self._url.startswith("memory://"):
            info = self._fs.info(self._path)
            if info["size"] == self.size:
                self.check(info)
        return content


class _Objects(_Ranges):
    """Ranges of an S3 object, each requested with the expected ETag, so that no other object is returned."""

    def fetch(self, start: int, stop: int) -> bytes:
        from fsspec.asyn import sync

        bucket, key, version = self._fs.split_path(self._path)
        etag = etag_of(self.seen)
        asked = {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{stop - 1}"}
        asked |= {} if version is None else {"VersionId": version}
        if etag is not None:
            asked["IfMatch"] = etag if etag.startswith('"') else f'"{etag}"'
        given = self._fs.call_s3("get_object", **asked)
        with closing(given["Body"]) as body:
            self.check(given)  # some servers ignore the condition
            return bytes(sync(self._fs.loop, body.read))


def _skip(stream: Any, start: int) -> None:
    """Read up to a position in a stream that can't seek."""
    if stream.tell() > start:
        raise io.UnsupportedOperation("the server sends the file from its beginning only")
    while (missing := start - stream.tell()) > 0:
        if not stream.read(min(missing, _MOST_FETCHED)):
            raise ConnectionError(f"the file ended at byte {stream.tell():,}")


class _Remote(io.RawIOBase):
    """A file whose reads are retried from where they stopped."""

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
        """Return the next bytes, at most `count`; b"" only at the end."""
        start, size = self._at, self._size
        if 0 <= size <= start:
            return b""
        stop = start + count if size < 0 else min(start + count, size)
        # Requesting one byte more than there should be shows, without another request, whether the file has grown.
        more = int(stop == size)

        def fetch() -> bytes:
            try:
                content = self._ranges.fetch(start, stop + more)
            except Exception as error:
                if response_of(error)[0] == _NOT_THAT_ONE:
                    raise changed_file_error(self._url, self._ranges.seen, self._not_that_one()) from error
                raise
            if size >= 0 and not content:
                now = self._ranges.size_now()
                if now not in (-1, size):
                    raise changed_file_error(
                        self._url, self._ranges.seen, changed(self._url, size, f"{now:,}")
                    )
                raise ConnectionError(f"nothing came, though the file has {size:,} bytes")
            return content

        content = retried(fetch, self._url, self._retry, where=f"byte {start:,}")
        if more and len(content) > stop - start:
            raise changed_file_error(self._url, self._ranges.seen, changed(self._url, size, "more"))
        return content

    def _not_that_one(self) -> str:
        """Describe a file that the server has under another ETag."""
        now = self._ranges.size_now()
        if now not in (-1, self._size):
            return changed(self._url, self._size, f"{now:,}")
        return replaced_words(self._url, "the server names another etag")

    def close(self) -> None:
        if not self.closed:
            self._ranges.close()
        super().close()
