"""The output folder: one run at a time may use it, and finds only what runs wrote.

::

    run/
      .running         locked while a run works
      checkpoints/     one folder a step, `checkpoint.py`
      model/           the trained model with its tokenizer, `model.py`
      metrics.jsonl    one line a step, `metrics.py`
      evaluations.jsonl   one line an evaluation, `evaluate.py`
      samples.jsonl    one line a text, `samples.py`
      trackers.json    the run's names in trackers, `trackers.py`
      tensorboard/     files of TensorBoard, which it writes
      wandb/           files of Weights & Biases, which it writes
      plans.json       how steps were planned, `plans.py`
      hardware.json    rates of this machine, where they were measured
"""

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
from varlen.files.ours import NO_LOCKS, is_folder, is_there, open_own, refuse_link
from varlen.train.checkpoint import remove_partial
from varlen.train.evaluate import EVALUATIONS, Evaluation
from varlen.train.metrics import check_lines
from varlen.train.model import clear_models
from varlen.train.plans import MEASURED, STATE
from varlen.train.samples import SAMPLES, Sample
from varlen.train.settings import RunSettings
from varlen.train.trackers import RECORDS, check_records

_NAME = ".running"
_WRITTEN, _MOST_BYTES = re.compile(rb"process \d+\n?"), 64
_OUT = "move it away, or choose another run.output"


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Lock a folder against other runs until the block ends, or this process in whatever way.

    A folder in which nothing else was written is removed again.
    """
    with _locked(folder) as file:
        file.seek(0)
        found = file.read(_MOST_BYTES)
        if found and not _WRITTEN.fullmatch(found):
            raise SettingError(
                f"{folder / _NAME} wasn't written by varlen, which uses a file of that name as a lock; {_OUT}"
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
                with suppress(OSError):  # another process has just written there
                    folder.rmdir()


def _locked(folder: Path) -> IO[bytes]:
    """Return the locked file of a folder."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = open_own(folder / _NAME, _OUT)
        except OSError as error:
            reason = error.strerror or error
            raise SettingError(f"{folder} can't be written: {reason}; choose another run.output") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read(_MOST_BYTES).decode(errors="replace").strip() or "another process"
            file.close()
            raise SettingError(
                f"{owner} trains into {folder}; wait for it, stop it (processes outlive a torchrun that was killed), "
                "or choose another run.output"
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                file.close()
                raise
        # The previous run may have removed the file meanwhile.
        if (folder / _NAME).exists() and os.path.samestat(os.fstat(file.fileno()), (folder / _NAME).stat()):
            return file
        file.close()


# What a run finds in its output folder before it begins: files of runs, or others, which it never replaces.

MODEL, CHECKPOINTS = "model", "checkpoints"


def prepare(run: RunSettings, metrics: str) -> None:
    """Remove partial files of killed runs, and refuse files that no run wrote where this one would write.

    The folder itself may be a link; what is in it may not.
    """
    folder = run.folder
    is_folder(folder / CHECKPOINTS, "checkpoints go to", _OUT)
    for name in (STATE, MEASURED, RECORDS):
        refuse_link(folder / name, _OUT)
    check_lines(folder / metrics)
    check_lines(folder / EVALUATIONS, Evaluation)
    check_lines(folder / SAMPLES, Sample)
    _check_plans(folder / STATE)
    check_records(folder / RECORDS)
    if is_there(folder / MEASURED):
        if not (folder / MEASURED).is_file():
            raise SettingError(f"{folder / MEASURED} is no file; {_OUT}")
        load_hardware(folder / MEASURED)
    clear_models(folder / MODEL)
    remove_partial(folder / CHECKPOINTS)


def _check_plans(path: Path) -> None:
    """Refuse a file that isn't a record of plans."""
    if not is_there(path):
        return
    try:
        is_ours = path.is_file() and {"belongs_to", "planner"} == set(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        is_ours = False
    if not is_ours:
        raise SettingError(f"{path} wasn't written by varlen, which records the plans of steps there; {_OUT}")
