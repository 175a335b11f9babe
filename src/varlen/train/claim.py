"""One run at a time in an output folder: a second one would replace the first one's checkpoints."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from varlen.errors import SettingError
from varlen.files.ours import open_own
from varlen.offline.outputs import NO_LOCKS

_NAME = ".running"
_WRITTEN, _MOST_BYTES = re.compile(rb"process \d+\n?"), 64
_OUT = "move it away, or choose another run.output"


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder; the claim ends with this process, however that ends.

    A folder in which nothing else was written is removed again.
    """
    with _locked(folder) as file:
        file.seek(0)
        found = file.read(_MOST_BYTES)
        if found and not _WRITTEN.fullmatch(found):
            raise SettingError(
                f"{folder / _NAME} isn't varlen's, which keeps other runs out by a file of that name; {_OUT}"
            )
        file.seek(0)
        file.truncate(0)
        file.write(f"process {os.getpid()}\n".encode())
        file.flush()
        try:
            yield
        finally:
            if [path.name for path in folder.iterdir()] == [_NAME]:
                (folder / _NAME).unlink()
                with suppress(OSError):  # somebody has written there just now
                    folder.rmdir()


def _locked(folder: Path) -> IO[bytes]:
    """Return the open lock of a folder."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = open_own(folder / _NAME, _OUT)
        except OSError as error:
            said = error.strerror or error
            raise SettingError(f"{folder} can't be written: {said}; choose another run.output") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            who = file.read(_MOST_BYTES).decode(errors="replace").strip() or "another process"
            file.close()
            raise SettingError(
                f"{who} trains into {folder}; wait for it, stop it (processes outlive a torchrun that was killed), "
                "or choose another run.output"
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                file.close()
                raise
        # The run before may have removed it since.
        if (folder / _NAME).exists() and os.path.samestat(os.fstat(file.fileno()), (folder / _NAME).stat()):
            return file
        file.close()
