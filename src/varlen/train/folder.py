"""What a run finds in its output folder before it begins: its own from before, or somebody else's, which stays."""

from __future__ import annotations

import json
from pathlib import Path

from varlen.cost.saved import load_hardware
from varlen.errors import SettingError
from varlen.files.ours import is_there, refuse_link
from varlen.train.checkpoint import remove_partial
from varlen.train.metrics import check_metrics
from varlen.train.model import clear_models
from varlen.train.plans import MEASURED, STATE
from varlen.train.settings import RunSettings

MODEL, CHECKPOINTS = "model", "checkpoints"
_OUT = "move it away, or choose another run.output"


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
