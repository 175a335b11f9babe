"""What a run reports, and the callbacks that it reports to: displays, trackers, and those of `varlen.train.train`.

    run ──► Callbacks ──► display, trackers, your own
              └─ one asks to stop ──► all ranks end after the same step

Begin in `Callback`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from varlen.errors import SettingError, VarlenError, described

if TYPE_CHECKING:
    from varlen.train.evaluate import Best, Evaluation
    from varlen.train.metrics import StepMetrics
    from varlen.train.parallel import Ranks

EndedBy = Literal["steps", "data", "patience", "callback"]


class Callback:
    """What a run calls with its records; a subclass overrides the methods that it needs.

    Of several processes only rank 0 calls, so that a callback may print and write. `on_step`, `on_evaluate` and
    `on_checkpoint` may return True to ask the run to stop: then it ends as after its last step, with an evaluation, a
    checkpoint and the exported model. The same configuration goes on from there. An exception ends the run.
    """

    may_stop: bool = True
    """Whether what methods return counts. Without such a callback, processes don't agree on it after each step."""

    def on_begin(self, overview: RunOverview) -> None:
        """Called once, when everything is built and before the first step."""

    def on_step(self, metrics: StepMetrics) -> bool | None:
        """Called after every step, with its line of metrics.jsonl; on a GPU, while the next step runs."""

    def on_evaluate(self, evaluation: Evaluation) -> bool | None:
        """Called after every evaluation, with its line of evaluations.jsonl."""

    def on_checkpoint(self, step: int, folder: Path) -> bool | None:
        """Called when the checkpoint of a step is whole on the disk; with `save_in_background`, some steps later."""

    def on_note(self, sentence: str) -> None:
        """Called with anything else that the run says, such as a setting that has changed since the checkpoint."""

    def on_end(self, summary: TrainSummary) -> None:
        """Called once, when the model is exported; not if the run fails or a signal stops it."""


class Callbacks:
    """The callbacks of a run, on its first rank; other ranks only learn that one asks to stop."""

    def __init__(self, given: Callback | Sequence[Callback], ranks: Ranks) -> None:
        every = [given] if isinstance(given, Callback) else list(given)
        for number, one in enumerate(every):
            if not isinstance(one, Callback):
                raise SettingError(
                    f"callbacks[{number}] is {one!r:.60}; it must be an object of a subclass of varlen.train.Callback"
                )
        self._ranks, self._asked = ranks, False
        self._every = every if ranks.is_first else []
        self._may_stop = bool(ranks.gather([any(one.may_stop for one in self._every)])[0, 0])

    def add(self, one: Callback) -> None:
        """Add a callback of this rank that never asks to stop, before those that may fail."""
        self._every.insert(0, one)

    def call(self, method: str, *about: Any) -> None:
        """Call a method of all callbacks."""
        for one in self._every:
            try:
                asks = bool(getattr(one, method)(*about))
            except Exception as error:
                raise VarlenError(
                    f"{type(one).__qualname__}.{method} failed with {described(error, kind=True)}; mend it, and the "
                    "same call goes on from the newest checkpoint"
                ) from error
            self._asked = self._asked or (one.may_stop and asks)

    def note(self, sentence: str) -> None:
        """Pass a sentence on."""
        self.call("on_note", sentence)

    def ask_to_stop(self) -> bool:
        """Return whether a callback has asked the run to stop; all ranks call it together."""
        return self._may_stop and bool(self._ranks.gather([self._asked])[0, 0])


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOverview:
    """What is about to be trained."""

    steps: int | None
    """Of the whole run; None where it ends with the data."""
    resumed_from: int
    """Step of the checkpoint that it resumes from; 0 for a new run."""
    num_parameters: int
    num_trained: int
    """Parameters that are trained; of an adapter, few."""
    model: str
    attention: str
    world_size: int
    parallel: str
    device: str
    precision: str
    plans: str | None = None
    """Mesh, method and rates of the plans; None where steps aren't planned."""
    cross_entropy: str | None = None
    """What computes losses of whole packs: "torch", "liger" or "cut"; None where steps are planned."""


@dataclass(kw_only=True, slots=True)
class Totals:
    """Sums over the steps of one call."""

    steps: int = 0
    tokens: int = 0
    """Of documents."""
    supervised_tokens: int = 0
    seconds: float = 0.0
    data_wait_s: float = 0.0
    """Part of `seconds` spent waiting for batches, on the slowest rank of each step; the first batch not counted."""
    first_batch_s: float = 0.0
    """Seconds until the first batch was ready."""
    plan_wait_s: float = 0.0
    """Part of `seconds` spent waiting for plans; the first plan not counted."""
    first_plan_s: float = 0.0
    """Seconds until the first plan was ready."""
    quick_plans: int = 0
    """Steps whose plan wasn't ready in time, so that a quick one was made."""
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
class Exposed:
    """What data cost."""

    steps: int
    real_s: float
    """Of the steps as they were trained, on the slowest rank."""
    cached_s: float
    """Of the same steps from memory."""
    waited_s: float
    """Seconds of `real_s` for which the host waited for batches."""

    @property
    def stall(self) -> float:
        """Share of the time that data cost; noise can make it negative."""
        return 1 - self.cached_s / self.real_s


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSummary:
    """What was trained."""

    overview: RunOverview
    steps: int
    """Of the whole run, including those before it was resumed."""
    ended_by: EndedBy
    """What ended it: its last step, the end of the data, `eval.patience` or a callback."""
    total_tokens: int
    """Of these steps."""
    totals: Totals
    """Of this call."""
    checkpoint: str
    model_folder: str
    metrics: str
    exposed: Exposed | None = None
    best: Best | None = None
    """The lowest loss on documents that aren't trained; None without `[eval]`."""

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        values = {"plan" if name == "overview" else name: each for name, each in asdict(self).items()}
        values["totals"]["tokens_per_s"] = self.totals.tokens_per_s
        if self.exposed is not None:
            values["exposed"]["stall"] = self.exposed.stall
        return values
