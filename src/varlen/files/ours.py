"""Writing: files appear whole or not at all, and only what carries varlen's marker is replaced or removed.

Nothing is removed, truncated or replaced in a folder without a marker, and a link in its place is never followed. A
marker is a small JSON file that begins with varlen's version; when a folder is removed, the marker goes last. A
process may be killed between creating a folder and marking it, so a folder that is empty, or holds an empty marker
only, counts as unowned and may be used.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from varlen.errors import SettingError
from varlen.regular import open_regular

# Errors of network file systems without locks, where the user must avoid concurrent runs.
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
_MOST_NAMED = 3
_FREE = "varlen_free_bytes"


def is_there(path: Path) -> bool:
    """Whether anything has this name, including a broken link."""
    return os.path.lexists(path)


def refuse_link(path: Path, way_out: str) -> None:
    """Raise if the path is a link."""
    if path.is_symlink():
        raise SettingError(
            f"{path} is a link (to {path.readlink()}), and links aren't followed where varlen writes; {way_out}"
        )


def is_folder(path: Path, purpose: str, way_out: str) -> bool:
    """Whether a folder is there, by one look, since others may rename it; raise if it is a link or a file."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False
    if stat.S_ISLNK(mode):
        refuse_link(path, way_out)
    elif not stat.S_ISDIR(mode):
        raise SettingError(f"{path} is a file, and {purpose} a folder of that name; {way_out}")
    return True


def may_be_used(folder: Path, name: str, is_mark: Callable[[dict[str, Any]], object]) -> bool:
    """Whether a folder carries a marker, or holds only folders, empty files and an unfinished marker.

    Repeated if another process replaces the folder meanwhile.
    """
    path = folder / name
    while True:
        identity = _identity(folder)
        marker = _marker(path)
        if marker is None and _holds_nothing(folder, path.name):
            return True
        if marker is None:
            marker = _marker(path)  # written before anything else was
        if marker is not None:
            return isinstance(marker, dict) and bool(is_mark(marker))
        if identity == _identity(folder):
            return False


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _marker(path: Path) -> Any:
    """Return the content of a marker; None where it is absent or no readable file, as a link is."""
    try:
        with os.fdopen(open_regular(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            return json.load(file)
    except (OSError, ValueError, RecursionError):
        return None


def _holds_nothing(folder: Path, mark: str) -> bool:
    """Whether a folder holds nothing but folders, empty files and an unfinished marker."""
    making = re.compile(rf"\.{re.escape(mark)}\.[0-9a-f]{{12}}\.part")
    return all(
        stat.S_ISDIR(status.st_mode)
        or (stat.S_ISREG(status.st_mode) and (status.st_size == 0 or making.fullmatch(path.name)))
        for path, status in entries_below(folder)
    )


def entries_below(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield every entry below a folder and its status, without following links.

    Entries that other processes move or remove meanwhile are left out.
    """
    for parent, folders, names in os.walk(folder):
        for name in [*folders, *names]:
            path = Path(parent, name)
            try:
                status = path.lstat()
            except OSError:
                continue
            yield path, status


def check_names(folder: Path, is_ours: Callable[[Path], bool], way_out: str) -> None:
    """Raise if a folder that is to be cleared or replaced holds files of somebody else."""
    try:
        foreign = sorted(path.name for path in folder.iterdir() if not is_ours(path) and is_there(path))
    except FileNotFoundError:  # another run has just finished it
        return
    if foreign:
        shown = ", ".join(foreign[:_MOST_NAMED]) + (", ..." if len(foreign) > _MOST_NAMED else "")
        raise SettingError(
            f"{folder} holds {shown}, which {'is' if len(foreign) == 1 else 'are'} not varlen's and would be lost; "
            f"{way_out}"
        )


def remove_marked(folder: Path, *names: str) -> None:
    """Remove a folder of varlen's, these files last and in this order.

    With its marker last, an interrupted removal stays recognizable; a lock that is held goes after the marker.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    with suppress(OSError):  # another process may remove it too
        for entry in folder.iterdir():
            if entry.name not in names:
                remove_entry(entry)
        for name in names:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def remove_entry(path: Path) -> None:
    """Remove a file, a link itself, or a folder tree; whatever can't be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def open_own(path: Path, way_out: str) -> IO[bytes]:
    """Open a file for reading and writing, created if need be; links aren't followed, and nothing is truncated."""
    refuse_link(path, way_out)
    if is_there(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise SettingError(f"{path} is no file; {way_out}")
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), "r+b")


def unfinished(path: Path) -> Path:
    """Return a name for an unfinished file that no other process, on any machine, uses."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")


@contextmanager
def atomic_file(path: Path, *, is_synced: bool = True) -> Iterator[Path]:
    """Yield a temporary name to write a file under; rename it once it is complete, or remove it.

    Unless `is_synced`, a power failure may leave an empty file.
    """
    part = unfinished(path)
    try:
        yield part
        if is_synced:
            sync(part)
        part.replace(path)
    except OSError as error:
        note_free(error, path)
        raise
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically."""
    with atomic_file(path) as part:
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@contextmanager
def disk_faults(path: Path, *, keeps_work: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Turn write errors into a SettingError, which says whether finished work is kept."""
    try:
        yield
    except OSError as error:
        free = free_words(error, path)
        if free:
            raise SettingError(
                f"{path} can't be written: the disk is full{free}; make room and run the same "
                f"again{': what is finished is kept' if keeps_work() else ''}"
            ) from error
        raise SettingError(f"{path} can't be written: {error.strerror or error}") from error


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk, so that they survive a power failure."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def note_free(error: OSError, path: Path) -> int | None:
    """Record the free space when the disk is full, before the unfinished file is removed."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    if not hasattr(error, _FREE):
        setattr(error, _FREE, shutil.disk_usage(_existing(path)).free)
    return int(getattr(error, _FREE))


def free_words(error: OSError, path: Path) -> str:
    """Return the free space for the message of a full disk; arguments as in `note_free`."""
    free = note_free(error, path)
    return "" if free is None else f" ({free / 1e6:,.0f} MB free)"


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())
