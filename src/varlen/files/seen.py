"""The status of a local file when it was listed, and whether the file there now has the same content.

==========================  ======================================================================================
difference                  action
==========================  ======================================================================================
size                        raise
modification time           compare the content with its SHA-256, if that is known; else raise
inode, or inode change      compare the content with its SHA-256 or its samples, if known; else ignore, since some
time                        network file systems renumber files
==========================  ======================================================================================

Content is compared once for each such difference; the result is cached.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
from dataclasses import dataclass
from typing import Any, BinaryIO

from varlen.errors import SourceError

BLOCK_BYTES = 1 << 20
PIECE_BYTES = 64 << 10
PIECES = 64
WHOLE_MARK = "sha256:"  # prefix of a fingerprint of all of a file's bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A file's status, as far as it identifies the file."""

    size: int
    modified_ns: int
    device: int
    inode: int
    # Inode change time: also changed by a rename, by permissions, and by resetting `modified_ns`.
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Seen:
        """Return the identifying fields of a status."""
        return cls(
            size=status.st_size,
            modified_ns=status.st_mtime_ns,
            device=status.st_dev,
            inode=status.st_ino,
            changed_ns=status.st_ctime_ns,
        )


def whole_digest(stored: BinaryIO) -> str:
    """Return the SHA-256 of a stream."""
    digest = hashlib.sha256()
    while chunk := stored.read(BLOCK_BYTES):
        digest.update(chunk)
    return f"{WHOLE_MARK}{digest.hexdigest()}"


def sampled_digest(stored: BinaryIO, size: int) -> str:
    """Return the size and the SHA-256 of 64 pieces of a stream, or of all of one of up to 4 MB."""
    digest = hashlib.sha256()
    hash_samples(digest, stored, size)
    return f"size:{size} sampled:{digest.hexdigest()}"


def hash_samples(digest: Any, stored: BinaryIO, size: int) -> None:
    """Update a hash with 64 pieces of a stream spread from its beginning to its end, or all of one of up to 4 MB."""
    if size <= PIECES * PIECE_BYTES:
        digest.update(stored.read())
    else:
        for index in range(PIECES):
            stored.seek((size - PIECE_BYTES) * index // (PIECES - 1))
            digest.update(stored.read(PIECE_BYTES))


def is_of_all(fingerprint: str, size: int) -> bool:
    """Whether a fingerprint covers all bytes of a file."""
    return fingerprint.startswith(WHOLE_MARK) or size <= PIECES * PIECE_BYTES


_replaced: dict[tuple[str, object], str] = {}  # errors raised for replaced files, by path and listed status


def changed_file_error(path: str, seen: object, message: str) -> SourceError:
    """Return the error for a changed file, and remember it, so that `on_error="skip"` can't skip it."""
    _replaced[path, seen] = message
    return SourceError(message)


def forget_change(path: str, seen: object) -> None:
    """Forget the error of a file that is the listed one again."""
    _replaced.pop((path, seen), None)


def check_unchanged(path: str, seen: object) -> None:
    """Raise if the file was found to be replaced, even if that error was suppressed."""
    if (message := _replaced.get((path, seen))) is not None:
        raise SourceError(message)


_lock = threading.Lock()
_shown: dict[tuple[str, Seen], Seen] = {}  # last status with the same content, by path and listed status


def difference(path: str, was: Seen, now: Seen, fingerprint: str | None, opened: int) -> str | None:
    """Return how a file differs from the listed one; None if its content is the same.

    Cost: if the status differs and a fingerprint is known, reads the file once, or 4 MB of a large one.
    """
    if now == was:
        return None
    with _lock:
        if _shown.get((path, was)) == now:
            return None
        is_retimed = now.modified_ns != was.modified_ns
        if fingerprint is None:
            reason = (
                "its modification time has changed, and no fingerprint of its content is known"
                if is_retimed
                else None
            )
        else:
            reason = _differs(opened, now, fingerprint, is_retimed=is_retimed)
        if reason is None:
            _shown[path, was] = now
        return reason


class _Again(io.RawIOBase):
    """An open file, read from its beginning without moving its position."""

    def __init__(self, opened: int) -> None:
        self._opened, self._at = opened, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = offset + (self._at if whence == os.SEEK_CUR else 0)
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        content = os.pread(self._opened, len(buffer), self._at)
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def _differs(opened: int, now: Seen, fingerprint: str, *, is_retimed: bool) -> str | None:
    """Compare a file's content with a fingerprint."""
    with io.BufferedReader(_Again(opened), BLOCK_BYTES) as file:
        current = whole_digest(file) if fingerprint.startswith(WHOLE_MARK) else sampled_digest(file, now.size)
    after = os.fstat(opened)
    if (after.st_size, after.st_mtime_ns) != (now.size, now.modified_ns):
        return "it is being written"
    if current != fingerprint:
        return "its content has changed"
    if is_retimed and not is_of_all(fingerprint, now.size):
        return "its modification time has changed, and only samples of so large a file are known, which are the same"
    return None
