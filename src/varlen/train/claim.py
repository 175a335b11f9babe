"""One run at a time in an output folder: a second one would replace the first one's checkpoints."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from varlen.errors import SettingError

_NAME = ".running"
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
"""What file systems say that have no locks: then it is up to the user."""


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder; the claim ends with this process, however that ends.

    Args:
        folder: of the run; made if need be.

    Raises:
        SettingError: another process trains there, or the folder can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / _NAME).open("a+")
    except OSError as error:
        raise SettingError(
            f"{folder} can't be written: {error.strerror or error}; choose another run.output"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            who = file.read().strip() or "another process"
            raise SettingError(
                f"{who} trains into {folder}; wait for it, stop it (processes outlive a torchrun that was killed), "
                "or choose another run.output"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        file.truncate(0)
        file.write(f"process {os.getpid()}\n")
        file.flush()
        yield
