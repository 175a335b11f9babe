"""What lies where varlen writes: ours, by a mark that was written first; or somebody else's, which stays as it is.

Nothing is cleared, cut or replaced without a mark in it, and a link at such a place is never followed. A mark is a
small file of JSON that begins with the version, and the last of a folder that is removed. Between making a folder and
marking it a process may be killed, so an empty folder, and an empty mark in it, are nobody's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from varlen.errors import SettingError

_MOST_NAMED = 3


def is_there(path: Path) -> bool:
    """Return whether anything has this name, a link that leads nowhere among it."""
    return os.path.lexists(path)


def refuse_link(path: Path, way_out: str) -> None:
    """Refuse a link."""
    if path.is_symlink():
        raise SettingError(
            f"{path} is a link (to {path.readlink()}), and links aren't followed where varlen writes; {way_out}"
        )


def mark_of_folder(folder: Path, name: str, is_mark: Callable[[dict[str, Any]], object]) -> bool:
    """Return whether a folder carries a mark, or nothing that anybody could miss."""
    place = folder / name
    try:
        if not stat.S_ISREG(place.lstat().st_mode):  # a link, or a pipe that a read would wait for
            return False
        found = json.loads(place.read_bytes())
    except (OSError, ValueError, RecursionError):
        return _holds_nothing(folder, place.name)
    return isinstance(found, dict) and bool(is_mark(found))


def _holds_nothing(folder: Path, mark: str) -> bool:
    """Return whether a folder holds nothing but folders, empty files and the mark in the making."""
    making = re.compile(rf"\.{re.escape(mark)}\.[0-9a-f]{{12}}\.part")
    return all(
        stat.S_ISDIR(status.st_mode)
        or (stat.S_ISREG(status.st_mode) and (status.st_size == 0 or making.fullmatch(path.name)))
        for path, status in entries_below(folder)
    )


def entries_below(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Give every entry below a folder and its status, links not followed.

    Other processes may write there: what they move or remove meanwhile is left out.
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
    """Refuse to clear or replace a folder in which somebody has laid something of theirs."""
    try:
        foreign = sorted(path.name for path in folder.iterdir() if not is_ours(path) and is_there(path))
    except FileNotFoundError:  # another run has finished it just now
        return
    if foreign:
        shown = ", ".join(foreign[:_MOST_NAMED]) + (", ..." if len(foreign) > _MOST_NAMED else "")
        raise SettingError(
            f"{folder} holds {shown}, which {'is' if len(foreign) == 1 else 'are'} not varlen's and would be lost; "
            f"{way_out}"
        )


def remove_marked(folder: Path, name: str) -> None:
    """Remove a folder of ours, its mark last, so that half of it is still known as ours."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for entry in folder.iterdir():
        if entry.name != name:
            remove_entry(entry)
    with suppress(OSError):
        (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def remove_entry(path: Path) -> None:
    """Remove a file, a link itself, or a folder with all that is in it; what can't be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def open_own(path: Path, way_out: str) -> IO[bytes]:
    """Open a file to read and write it, and make it if need be; a link isn't followed, and nothing is cut."""
    refuse_link(path, way_out)
    if is_there(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise SettingError(f"{path} is no file; {way_out}")
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), "r+b")


def unfinished(path: Path) -> Path:
    """Return a name for a file in the making that no other process, on any machine, gives it."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")


def sync(path: Path) -> None:
    """Have a file's content, or a folder's names, on the disk before going on: a power cut takes neither."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
