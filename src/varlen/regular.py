"""Open only regular files: a FIFO, a socket or a device raises an error instead of blocking."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

from varlen.errors import NoFileError

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
MOST_JSON_BYTES = 1 << 30  # for metadata: more than any run writes, less than exhausts memory


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Return the descriptor of an open regular file; usable as the opener of `open`."""
    return open_with_status(path, flags)[0]


def open_with_status(path: str | Path, flags: int = os.O_RDONLY) -> tuple[int, os.stat_result]:
    """Return an open regular file and its status; arguments and errors as in `open_regular`."""
    # Without O_NONBLOCK, opening a FIFO waits for a writer. Reads of regular files ignore it.
    opened = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(opened)
        require_regular(status.st_mode)
    except OSError:
        os.close(opened)
        raise
    return opened, status


def require_regular(mode: int) -> None:
    """Raise unless a mode is that of a regular file."""
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        raise NoFileError(f"it is {kind} and not a file")


def read_regular_text(path: str | Path) -> str:
    """Return the UTF-8 text of a regular file, with universal newlines."""
    with io.TextIOWrapper(io.BytesIO(read_regular(path)), encoding="utf-8") as text:
        return text.read()


def read_regular(path: str | Path, most_bytes: int = MOST_JSON_BYTES) -> bytes:
    """Return all bytes of a regular file."""
    with open(path, "rb", opener=open_regular) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise NoFileError(f"it has {size:,} bytes, at most {most_bytes:,} are read")
        return file.read()
