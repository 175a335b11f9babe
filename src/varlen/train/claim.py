"""One run at a time in an output folder: a second one would replace the first one's checkpoints."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from varlen.cost.hardware import load_hardware
from varlen.errors import SettingError
from varlen.files.ours import is_there, open_own, refuse_link
from varlen.offline.outputs import NO_LOCKS
from varlen.train.checkpoint import remove_partial
from varlen.train.metrics import check_metrics
from varlen.train.model import clear_models
from varlen.train.plans import MEASURED, STATE
from varlen.train.settings import RunSettings

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


# What a run finds in its output folder before it begins: its own from before, or somebody else's, which stays.

MODEL, CHECKPOINTS = "model", "checkpoints"


def prepare(run: RunSettings, metrics: str) -> None:
    """Remove what runs that were killed have left, and refuse what isn't a run's where this one will write.

    The folder itself may be a link; what is in it may not.
    """
    folder = run.folder
    for name in (CHECKPOINTS, STATE, MEASURED):
        refuse_link(folder / name, _OUT)
    check_metrics(folder / metrics)
    _check_plans(folder / STATE)
    if is_there(folder / MEASURED):
        if not (folder / MEASURED).is_file():
            raise SettingError(f"{folder / MEASURED} is no file; {_OUT}")
        load_hardware(folder / MEASURED)
    if is_there(folder / CHECKPOINTS) and not (folder / CHECKPOINTS).is_dir():
        raise SettingError(
            f"{folder / CHECKPOINTS} is a file, and checkpoints go to a folder of that name; {_OUT}"
        )
    clear_models(folder / MODEL)
    remove_partial(folder / CHECKPOINTS)


def _check_plans(path: Path) -> None:
    """Refuse a file that doesn't hold how steps were planned."""
    if not is_there(path):
        return
    try:
        is_ours = path.is_file() and {"belongs_to", "planner"} == set(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        is_ours = False
    if not is_ours:
        raise SettingError(f"{path} isn't varlen's, which notes there how steps were planned; {_OUT}")
