"""Exposed data time by the difference: the last steps again from memory, and what the real ones took longer.

Waiting in `next` isn't enough: a loader that keeps the CPU busy makes the steps themselves slower, and on a GPU the
host waits at no cost while kernels are queued. So the same batches are trained twice (DS-Analyzer, arXiv:2007.06775),
and the stall is `1 - cached / real`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
import torch

from varlen.batch.packed import PackedBatch
from varlen.feed.loader import PackedLoader
from varlen.train.parallel import Ranks
from varlen.train.step import StepDone, Take


class Steps(Protocol):
    """What trains a step: `Stepper`, or `PlannedStepper`."""

    def step(self, number: int, learning_rate: float, take: Take) -> StepDone | None:
        """Train one step; None where the data is at its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exposed:
    """What data cost."""

    steps: int
    real_s: float
    """Of the steps as they were trained, the slowest rank's."""
    cached_s: float
    """Of the same steps from memory."""
    waited_s: float
    """What the host stood still for batches in the real ones."""

    @property
    def stall(self) -> float:
        """Share of time that data cost; noise can make it negative."""
        return 1 - self.cached_s / self.real_s


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    before: Mapping[str, Any]
    """Where the loader stood."""
    seconds: float
    waited_s: float


@dataclass(slots=True)
class Replay:
    """Notes the last steps, to train them again."""

    most: int
    """Steps that are kept."""
    _steps: deque[_Step] = field(default_factory=deque)
    _seen: int = 0

    def note(self, before: Mapping[str, Any], seconds: float, waited_s: float) -> None:
        """Enter a step."""
        self._seen += 1
        if self._seen == 1:
            return  # whose batches weren't made ahead yet, and whose kernels weren't warm
        self._steps.append(_Step(before=before, seconds=seconds, waited_s=waited_s))
        while len(self._steps) > self.most:
            self._steps.popleft()

    def measure(
        self, loader: PackedLoader, stepper: Steps, ranks: Ranks, number: int, say: Callable[[str], None]
    ) -> Exposed | None:
        """Train the noted steps again, from memory; the weights are none of a run's afterwards."""
        if not self._steps:
            return None
        count = len(self._steps)
        say(f"training the last {count:,} steps again from memory")
        loader.load_state_dict(self._steps[0].before)
        batches = [_copied(next(loader)) for _ in range(count * loader.micro_batches)]
        here = loader.micro_batches
        _seconds(stepper, batches[:here], number)  # warms up
        cached_s = sum(
            _seconds(stepper, batches[first : first + here], number) for first in range(0, len(batches), here)
        )
        mine = [sum(step.seconds for step in self._steps), cached_s, sum(s.waited_s for s in self._steps)]
        real_s, cached_s, waited_s = ranks.gather(mine).amax(dim=0).tolist()
        return Exposed(steps=count, real_s=real_s, cached_s=cached_s, waited_s=waited_s)


def _seconds(stepper: Steps, batches: list[PackedBatch], number: int) -> float:
    """Train one step that changes no weight, and return what it took."""
    here = iter(batches)
    done = stepper.step(number, 0.0, lambda: next(here))
    assert done is not None, "batches come from memory"
    return done.watch.seconds()


def _copied(batch: PackedBatch) -> PackedBatch:
    """Return a batch in memory of its own, so that the loader's slots are free."""
    copies = {
        one.name: _copy(getattr(batch, one.name))
        for one in fields(batch)
        if _is_array(getattr(batch, one.name))
    }
    return batch.replace(**copies, columns={name: _copy(column) for name, column in batch.columns.items()})


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | torch.Tensor)


def _copy(array: Any) -> Any:
    return array.clone() if isinstance(array, torch.Tensor) else array.copy()
