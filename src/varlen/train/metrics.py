"""What is written of every step, a line of JSON each, in a file that reads as if no run had ever been stopped."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from varlen.errors import SettingError

TIMINGS = ("tokens_per_s", "data_wait_s", "step_s", "plan_wait_s")
"""What differs between two runs of the same steps; everything else is equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One optimizer step, over all ranks."""

    step: int
    """From 1."""
    loss: float
    """Mean over the step's targets, in nats, before its update."""
    learning_rate: float
    grad_norm: float
    """Before clipping."""
    tokens: int
    """Of documents, padding not counted."""
    supervised_tokens: int
    fill: float
    """Tokens over the slots of all packs."""
    total_tokens: int
    """Of all steps so far."""
    epoch: int | None
    """From 0; None where the loader has no epochs."""
    position: dict[str, Any]
    """Where the loader stands after the step."""
    tokens_per_s: float
    """Effective: tokens of documents that reached the optimizer, over the step's seconds."""
    data_wait_s: float
    """The longest that a rank waited for its batches; on a GPU, of the host, which runs ahead of it."""
    step_s: float
    """The slowest rank's, waiting included."""
    plan_method: str | None = None
    """Of the plan that was run; None where steps aren't planned, here and below."""
    plan_answered_by: str | None = None
    """Which of the method's candidates it is; begins with "quick" where the plan made ahead wasn't there."""
    plan_wait_s: float | None = None
    """The longest that a rank waited for the plan."""
    plan_simulated_s: float | None = None
    """What the cost model says of the step, the optimizer's part not counted; None without one."""

    @property
    def is_quick(self) -> bool:
        """Whether the step's plan wasn't there in time."""
        return (self.plan_answered_by or "").startswith("quick")


class MetricsFile:
    """A file of steps, written by the first rank."""

    def __init__(self, path: Path, after: int) -> None:
        """Open the file, and cut off what stands in it of later steps.

        Args:
            path: of the file.
            after: the step that the run goes on from.

        Raises:
            SettingError: it can't be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            end = _end_of(path, after)
            self._file = path.open("r+b")
            self._file.truncate(end)
            self._file.seek(end)
        except OSError as error:
            raise SettingError(
                f"{path} can't be written: {error.strerror}; choose another run.output"
            ) from None

    def write(self, metrics: StepMetrics) -> None:
        """Add a step."""
        self._file.write(json.dumps(asdict(metrics)).encode() + b"\n")
        self._file.flush()

    def sync(self) -> None:
        """Bring it to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _end_of(path: Path, after: int) -> int:
    """Return where the last whole line of a step up to `after` ends."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            try:
                step = int(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError):
                break
            if step > after or not line.endswith(b"\n"):
                break
            end += len(line)
    return end
