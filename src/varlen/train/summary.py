"""What a run says of itself: before its first step, and after its last."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

from varlen.train.exposed import Exposed
from varlen.train.metrics import StepMetrics


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """What is about to be trained."""

    steps: int | None
    """Of the whole run; None where the end of the data will say."""
    resumed_from: int
    """Steps of the checkpoint that it goes on from; 0 where it begins."""
    num_parameters: int
    model: str
    attention: str
    world_size: int
    parallel: str
    device: str
    precision: str
    plans: str | None = None
    """Mesh, method and rates of the plans; None where steps aren't planned."""


@dataclass(kw_only=True, slots=True)
class Totals:
    """Sums over the steps of one call."""

    steps: int = 0
    tokens: int = 0
    """Of documents."""
    supervised_tokens: int = 0
    seconds: float = 0.0
    data_wait_s: float = 0.0
    """Of these seconds, the slowest rank's at each step; the first batch's not counted."""
    first_batch_s: float = 0.0
    """Until the first batch was there."""
    plan_wait_s: float = 0.0
    """Of these seconds, waiting for plans; the first one's not counted."""
    first_plan_s: float = 0.0
    """Until the first plan was there."""
    quick_plans: int = 0
    """Steps whose plan wasn't there in time, so that a quick one was made."""
    loss: float | None = None
    """Of the last step."""

    def add(self, metrics: StepMetrics) -> None:
        """Add a step."""
        if self.steps == 0:
            self.first_batch_s, self.first_plan_s = metrics.data_wait_s, metrics.plan_wait_s or 0.0
        else:
            self.data_wait_s += metrics.data_wait_s
            self.plan_wait_s += metrics.plan_wait_s or 0.0
        self.quick_plans += metrics.is_quick
        self.steps += 1
        self.tokens += metrics.tokens
        self.supervised_tokens += metrics.supervised_tokens
        self.seconds += metrics.step_s
        self.loss = metrics.loss

    @property
    def tokens_per_s(self) -> float:
        """Effective tokens of these steps a second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSummary:
    """What was trained."""

    plan: RunPlan
    steps: int
    """Of the whole run, those before it was resumed included."""
    total_tokens: int
    """In these steps."""
    totals: Totals
    """Of this call."""
    checkpoint: str
    model_folder: str
    metrics: str
    exposed: Exposed | None = None

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        told = asdict(self)
        told["totals"]["tokens_per_s"] = self.totals.tokens_per_s
        if self.exposed is not None:
            told["exposed"]["stall"] = self.exposed.stall
        return told


class Watcher(Protocol):
    """Is told what goes on; of the first rank alone."""

    def begin(self, plan: RunPlan) -> None:
        """Hear what is about to be trained."""

    def step(self, metrics: StepMetrics) -> None:
        """Hear of a step."""

    def say(self, sentence: str) -> None:
        """Hear of something else."""
