"""Files behind URLs, by fsspec: s3://, gs://, https://, memory:// and whatever else is installed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from glob import has_magic
from operator import itemgetter
from typing import Any, Literal

from varlen.errors import SourceError, VarlenError
from varlen.source.retry import Retry, as_os_error, first_line, is_nothing_there, missing_package, retried
from varlen.source.seen import Seen

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
Kind = Literal["file", "folder", "glob"]
"""What a URL names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """A file that a server lists."""

    path: str
    """Its URL."""
    name: str
    """Relative to the URL that was listed."""
    size: int
    """Bytes, or -1 where the server doesn't say."""
    mark: str | None = None
    """What changes whenever its content does: an ETag or a checksum."""
    seen: Seen | str | None = None
    """What tells, as long as a run reads it, that it was replaced: inode and times, or all that a server says."""


@contextmanager
def remote_faults(url: str) -> Iterator[None]:
    """Turn whatever a file system raises into a sentence that names the URL; clouds have errors of their own.

    Raises:
        SourceError: the file system failed.
        MissingExtraError: its package isn't installed.
    """
    try:
        yield
    except VarlenError:
        raise
    except ImportError as error:
        raise missing_package(url, error) from error
    except Exception as error:
        raise SourceError(f"{url} can't be read: {first_line(error)}") from as_os_error(error)


def file_system(url: str, retry: Retry) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it.

    Of S3 it is one of our own, so that what is set for it changes no other: it doesn't try again by itself, or
    each of our tries would be 25 (5 of s3fs by 5 of botocore), and doesn't remember listings. What the user has
    configured for s3fs goes first. To be called by the thread that reads, not by one that lives for one call: some
    versions of fsspec keep a file system, with connections of its own, for each thread.

    Raises:
        SourceError: there is none for such a URL.
        MissingExtraError: its package isn't installed.
    """
    import fsspec

    with remote_faults(url):
        fs, path = fsspec.core.url_to_fs(url, **(_of_s3(retry) if url.startswith(_S3) else {}))
        if url.startswith(_S3):
            fs.retries = 1
        return fs, path


def _of_s3(retry: Retry) -> dict[str, Any]:
    """Return what s3fs is told."""
    import fsspec

    # The client gives up a little earlier than we do, and so closes its connection.
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
    """List the files that a URL stands for, sorted, and say what it names.

    A name with the characters of a glob is a glob only where nothing is called so. Of a glob, what is hidden isn't
    listed.

    Raises:
        SourceError: nothing is there, or the file system failed.
        MissingExtraError: the file system's package isn't installed.
    """
    fs, path = file_system(url, retry)
    # Long listings take many requests, each with the client's own limit.
    return retried(lambda: _list(fs, path, url), url, retry, silence_s=retry.deadline_s)


def _list(fs: Any, path: str, url: str) -> tuple[list[Listed], Kind]:
    is_web = url.startswith("http")
    found: dict[str, dict[str, Any]] = {}
    if has_magic(path) and not is_web:
        found, info = _glob(fs, path)
    else:
        info = _info(fs, path)
    if info is None and has_magic(path):
        found = fs.glob(path, detail=True) if is_web else found
        fixed = "/".join(_before_magic(path))
        files = [entry for entry in found.items() if entry[1]["type"] == "file"]
        listing = [one for one in _listed(fs, files, fixed) if not is_hidden(one.name)]
        if not listing:
            raise SourceError(f"no file matches {url}")
        return listing, "glob"
    if info is None:
        raise SourceError(f"{url} does not exist")
    if info["type"] == "directory" and not is_web:
        return _listed(fs, fs.find(path, detail=True).items(), path), "folder"
    name = path.rstrip("/").rsplit("/", 1)[-1].split("?")[0]
    return [Listed(path=url, name=name, size=_size(info), mark=_mark(info), seen=said_of(info))], "file"


def is_hidden(name: str) -> bool:
    """Whether a name, or a folder in it, begins with a dot."""
    return any(part.startswith(".") for part in name.split("/"))


def _info(fs: Any, path: str) -> dict[str, Any] | None:
    """Return what a file system says of a path, or None where nothing is; its `exists` hides other failures."""
    try:
        return dict(fs.info(path))
    except FileNotFoundError as error:
        if is_nothing_there(error):
            return None
        raise


def _glob(fs: Any, path: str) -> tuple[dict[str, dict[str, Any]], dict[str, Any] | None]:
    """Return what matches, and what is called so itself, or None.

    fsspec's own leaves out, without a word, folders whose listing failed.
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
        level = {
            name: info for name, info in inside.items() if wanted.match(name) and _is_within(name, level)
        }
    return level, itself


def _is_within(name: str, level: dict[str, Any]) -> bool:
    """Whether a name lies in a folder that matches so far, and not only in one that is called as the pattern."""
    return name.rpartition("/")[0] in level


def _entries(fs: Any, folder: str) -> list[dict[str, Any]]:
    """List a folder; one that isn't there holds nothing."""
    try:
        return list(fs.ls(folder, detail=True))
    except FileNotFoundError:
        return []


def _before_magic(path: str) -> list[str]:
    parts = path.split("/")
    return parts[: next(i for i, part in enumerate(parts) if has_magic(part))]


def _listed(fs: Any, found: Any, folder: str) -> list[Listed]:
    """Return files as they are named from a folder, sorted."""
    return [
        Listed(
            path=fs.unstrip_protocol(path),
            name=path[len(folder) :].lstrip("/"),
            size=_size(info),
            mark=_mark(info),
            seen=said_of(info),
        )
        for path, info in sorted(found, key=itemgetter(0))
    ]


def _size(info: dict[str, Any]) -> int:
    size = info.get("size")
    return -1 if size is None else int(size)


def _mark(info: dict[str, Any]) -> str | None:
    """Return what changes whenever the file's content does, or None."""
    return next((f"{key.lower()}:{info[key]}" for key in _MARKS if info.get(key)), None)


def said_of(info: Mapping[str, Any]) -> str | None:
    """Return all that a server says of a file that changes when it is replaced, times among it; None for nothing.

    It tells files apart within a run. A listing and a look at one file may say different things of it, so that only
    what both say counts.
    """
    said = {
        kind: {name.lower(): _spelled(info[name]) for name in names if info.get(name)}
        for kind, names in (("mark", _MARKS), ("time", _TIMES))
    }
    return json.dumps(said, sort_keys=True) if any(said.values()) else None


def _spelled(value: Any) -> str:
    """Return what is said as text; a time is told as a number by some answers, and as a date by others."""
    return str(value.timestamp() if isinstance(value, datetime) else value)


def etag_of(said: str | None) -> str | None:
    """Return the ETag among what a server says of a file, or None."""
    tag: str | None = None if said is None else json.loads(said)["mark"].get("etag")
    return tag


def replaced(was: str | None, now: str | None) -> str | None:
    """Return the name of the first thing that is said otherwise of a file than before, or None."""
    if was is None or now is None:
        return None
    before, after = json.loads(was), json.loads(now)
    for kind in ("mark", "time"):  # times may be told more or less finely; where there is a mark, it decides
        both = [name for name in before[kind] if name in after[kind]]
        if both:
            return next((name for name in both if before[kind][name] != after[kind][name]), None)
    return None


def remote_mark(url: str, retry: Retry) -> str | None:
    """Return what changes whenever the file behind a URL does (its ETag or checksum), or None.

    Raises:
        SourceError: the file system failed.
    """
    fs, path = file_system(url, retry)
    return retried(lambda: _mark(fs.info(path)), url, retry)


def read_remote(url: str, retry: Retry) -> bytes:
    """Return all bytes of a small file behind a URL.

    Raises:
        SourceError: the file system failed.
    """
    fs, path = file_system(url, retry)
    return retried(lambda: bytes(fs.cat_file(path)), url, retry)
