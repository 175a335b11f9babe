"""The folder of rows given in memory: files named by content, removed when no process reads them any more.

::

    ~/.cache/varlen/rows/         or the cache folder that was named, else the temporary folder
      3f9a...c2/                  rows with this content, shared by all processes of this machine
        rows.jsonl                or rows.arrow
        lock                      locked, shared, by each process that reads
        varlen.json               our marker: nothing without it is removed
      .making-5d1c.../            the same while it is written, locked by its writer; one rename makes it appear

A killed process loses its lock, so the next process recognizes and removes stale folders: the cache holds only the
rows of running processes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from varlen import __version__
from varlen.documents.resource import Resource
from varlen.errors import SettingError
from varlen.regular import read_regular

_log = logging.getLogger(__name__)
TEXT_ROWS, TABLE = "rows.jsonl", "rows.arrow"
_LOCK, _MARK = "lock", "varlen.json"
_OURS = {TEXT_ROWS, TABLE, _LOCK, _MARK}
_MAKING, _LEAVING = ".making-", ".leaving-"
_NAME_DIGITS = 40
_TRIES, _PAUSE_S = (100, 0.02)  # to get a folder that another process is removing
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spooled:
    """A file of the spool."""

    path: Path
    size: int
    content: str  # its fingerprint, as `fingerprints.fingerprint` computes for a file of the same bytes
    hold: Resource  # the file is removed when the last hold on it, of any process, is released


class Sink:
    """A file that is hashed while it is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._hash = file, hashlib.sha256()
        self.size = 0
        self.closed = False

    def write(self, content: Any) -> int:
        """Write bytes, or any buffer; return how many."""
        self._hash.update(content)
        self._file.write(content)
        written = memoryview(content).nbytes
        self.size += written
        return written

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.size

    def flush(self) -> None:
        """Do nothing: reading begins later."""

    def close(self) -> None:
        """Mark the file as closed."""
        self.closed = True

    @property
    def content(self) -> str:
        """The fingerprint of what was written so far."""
        return f"sha256:{self._hash.hexdigest()}"


def cache_folder(cache: str | Path | None) -> Path | None:
    """Return varlen's cache folder: the given one, else the user's; None without a home folder."""
    if cache is not None:
        return Path(cache)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "varlen"
    except RuntimeError:  # a user without a home folder
        return None


def spool(write: Callable[[Sink], None], name: str, cache: str | Path | None) -> Spooled:
    """Write a file into the spool, or find the same bytes there.

    Concurrent processes each write a file; the first one finished is used by all.
    """
    making, lock = _begun(cache)
    try:
        try:
            with (making / name).open("wb") as file:
                sink = Sink(file)
                write(sink)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            free = shutil.disk_usage(making).free
            raise SettingError(
                f"rows that are given in memory are written to {making.parent} for the processes that read them, and "
                f"the disk is full ({free / 1e6:,.0f} MB free); make room, or name a folder on another disk (cache=)"
            ) from error
        folder, lock = _published(making, lock, name, sink)
    except BaseException:
        lock.close()
        shutil.rmtree(making, ignore_errors=True)
        raise
    return Spooled(
        path=folder / name,
        size=sink.size,
        content=sink.content,
        hold=Resource(_release, folder, lock, os.getpid()),
    )


def _begun(cache: str | Path | None) -> tuple[Path, IO[bytes]]:
    """Return a new folder to write in, and its held lock; remove stale ones beside it."""
    named = cache_folder(cache)
    faults: list[str] = []
    for candidate in _candidates(named):
        making: Path | None = None
        try:
            base = candidate()
            base.mkdir(parents=True, exist_ok=True)
            _remove_stale(base)
            making = base / f"{_MAKING}{uuid.uuid4().hex}"
            making.mkdir()
            lock = (making / _LOCK).open("wb")
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            (making / _MARK).write_text(json.dumps({"varlen": __version__, "kind": "rows"}) + "\n")
        except OSError as error:  # read-only, forbidden, full, or without locks
            if making is not None:
                shutil.rmtree(making, ignore_errors=True)
            faults.append(f"{error.filename or named}: {error.strerror or error}")
            continue
        if faults:
            _log.info("rows that are given in memory are written to %s, since %s", base, faults[0])
        return making, lock
    raise SettingError(
        "rows that are given in memory can't be written to a file for the processes that read them "
        f"({'; '.join(faults)}); name a folder that can be written (cache=)"
    )


def _candidates(named: Path | None) -> Iterator[Callable[[], Path]]:
    if named is not None:
        yield lambda: named.absolute() / "rows"
    yield _temporary


def _temporary() -> Path:
    """Return this user's folder below the temporary folder, or a new one if another user could write there."""
    own = Path(tempfile.gettempdir()) / f"varlen-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    status = own.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        own = Path(tempfile.mkdtemp(prefix="varlen-"))
    return own / "rows"


def _published(making: Path, lock: IO[bytes], name: str, sink: Sink) -> tuple[Path, IO[bytes]]:
    """Rename a finished folder to the name of its content, or use the existing one; return folder and lock."""
    target = making.with_name(sink.content.removeprefix("sha256:")[:_NAME_DIGITS])
    for _ in range(_TRIES):
        try:
            making.rename(target)
            return target, lock
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        theirs = _shared(target)
        if theirs is not None:
            if _size_of(target / name) == sink.size:
                shutil.rmtree(making, ignore_errors=True)
                lock.close()
                return target, theirs
            theirs.close()
        time.sleep(_PAUSE_S)
    unique = making.with_name(f"{target.name}-{uuid.uuid4().hex}")  # another file has the name
    making.rename(unique)
    return unique, lock


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _shared(folder: Path) -> IO[bytes] | None:
    """Return the held lock of one of our folders; None where it isn't ours, or is being removed."""
    lock = _locked(folder, fcntl.LOCK_SH)
    if lock is not None and not _is_ours(folder):
        lock.close()
        return None
    return lock


def _locked(folder: Path, how: int) -> IO[bytes] | None:
    """Return the held lock of a folder; None where it conflicts with others, or is gone."""
    try:
        lock = (folder / _LOCK).open("r+b")  # network file systems need write access for exclusive locks
    except OSError:
        return None
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock.fileno()), (folder / _LOCK).stat()):
            return lock
    except OSError:
        pass
    lock.close()
    return None


def _is_ours(folder: Path) -> bool:
    try:
        mark = json.loads(read_regular(folder / _MARK))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(mark, dict) and "varlen" in mark and mark.get("kind") == "rows"


def _remove_stale(base: Path) -> None:
    """Remove folders of processes that have ended."""
    for folder in list(base.iterdir()):
        if folder.is_symlink() or not _is_ours(folder):
            continue
        lock = _locked(folder, fcntl.LOCK_EX)
        if lock is not None:
            _remove(folder, lock)


def _remove(folder: Path, lock: IO[bytes]) -> None:
    """Remove a folder whose exclusive lock is held; it is renamed first, so that readers never see a part of it."""
    leaving = folder.with_name(f"{_LEAVING}{uuid.uuid4().hex}")
    with suppress(OSError):
        if _OURS.issuperset(path.name for path in folder.iterdir()):  # keep folders with foreign files
            folder.rename(leaving)
            shutil.rmtree(leaving, ignore_errors=True)
    lock.close()


def _release(folder: Path, lock: IO[bytes], process: int) -> None:
    """Release a shared lock; the last holder removes the folder."""
    if os.getpid() != process:  # a fork shares the lock with its parent
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, ValueError):
        lock.close()
        return
    _remove(folder, lock)
