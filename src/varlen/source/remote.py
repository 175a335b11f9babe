"""Files behind URLs, by fsspec: s3://, gs://, https://, memory:// and whatever else is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from glob import has_magic
from operator import itemgetter
from typing import Any, BinaryIO, cast

from varlen.errors import MissingExtraError, SourceError, VarlenError

_MOST_CHARACTERS = 200
"""Of what a library says that a sentence repeats: some say all that they have read."""


def first_line(error: Exception) -> str:
    """Return what an error says, short enough for a sentence; its kind where it says nothing."""
    said = next(iter(str(error).splitlines()), "").rstrip(". ")
    return (said if len(said) <= _MOST_CHARACTERS else said[:_MOST_CHARACTERS] + "…") or type(error).__name__


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
        raise MissingExtraError(f"{url} can't be opened: {error}") from error
    except Exception as error:
        raise SourceError(f"{url} can't be read: {first_line(error)}") from error


def list_remote(url: str) -> list[tuple[str, str, int]]:
    """List the files that a URL stands for, sorted: path, name relative to the URL, and size (-1: unknown).

    Raises:
        SourceError: nothing is there, or the file system failed.
        MissingExtraError: the file system's package isn't installed.
    """
    import fsspec

    with remote_faults(url):
        fs, path = fsspec.core.url_to_fs(url)
        if has_magic(path) and not (url.startswith("http") and fs.exists(path)):
            files = [(p, i) for p, i in fs.glob(path, detail=True).items() if i["type"] == "file"]
            found = sorted(files, key=itemgetter(0))
            fixed = "/".join(_before_magic(path))
            if not found:
                raise SourceError(f"no file matches {url}")
            return [(fs.unstrip_protocol(p), p[len(fixed) :].lstrip("/"), _size(i)) for p, i in found]
        if not url.startswith("http") and fs.isdir(path):
            found = sorted(fs.find(path, detail=True).items(), key=itemgetter(0))
            return [(fs.unstrip_protocol(p), p[len(path) :].lstrip("/"), _size(i)) for p, i in found]
        if not fs.exists(path):
            raise SourceError(f"{url} does not exist")
        return [(url, path.rstrip("/").rsplit("/", 1)[-1].split("?")[0], _size(fs.info(path)))]


def _before_magic(path: str) -> list[str]:
    parts = path.split("/")
    return parts[: next(i for i, part in enumerate(parts) if has_magic(part))]


def _size(info: dict[str, Any]) -> int:
    size = info.get("size")
    return -1 if size is None else int(size)


def open_remote(url: str) -> BinaryIO:
    """Open a file behind a URL for reading, seekable where the server allows it.

    Raises:
        SourceError: it can't be opened.
        MissingExtraError: the file system's package isn't installed.
    """
    import fsspec

    with remote_faults(url):
        fs, path = fsspec.core.url_to_fs(url)
        return cast(BinaryIO, fs.open(path, "rb"))


def remote_mark(url: str) -> str | None:
    """Return what changes whenever the file behind a URL does (its ETag or checksum), or None.

    Raises:
        SourceError: the file system failed.
    """
    import fsspec

    with remote_faults(url):
        fs, path = fsspec.core.url_to_fs(url)
        info = fs.info(path)
        for key in ("ETag", "etag", "md5Hash", "content_md5", "checksum", "crc32c"):
            if info.get(key):
                return f"{key.lower()}:{info[key]}"
        return None
