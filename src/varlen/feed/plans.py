"""The plans of a loader's steps: decided once, before any worker reads the step, and equal on all ranks.

::

    worker                     trainer's process                      job's store
      step, lengths,    ──►  the rank that decides: plan, or error ──► "…/plan/7"
      those of the next      other ranks                           ◄──
      its own pieces    ◄──  the plan, held until `PackedLoader.__next__` puts it on the step's batch

Plans travel through the exchange of the feed's run (`exchange.py`), never through the trainer's process group.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from varlen import errors
from varlen.errors import PlanError, SettingError, StalledError, StateError, VarlenError, reading_state
from varlen.feed.exchange import PLAN, Exchange, OpenNumbered, Solo
from varlen.parsed import parse_json
from varlen.plan.planner import MOST_CHOICES, Planner
from varlen.plan.serialize import plan_fingerprint, plan_from_bytes, plan_to_bytes
from varlen.step_plan import StepPlan
from varlen.types import Int32Array

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlansOfAnotherRank:
    """Given as plans on ranks that can't plan: another rank does."""

    ahead: int
    """How many steps the rank that plans reads ahead. All ranks read as many: what begins an epoch is agreed upon
    by all of them, and one that waited for a plan would keep the planning rank waiting there."""


GivenPlans = (
    Mapping[int, StepPlan]
    | Sequence[StepPlan]
    | Callable[[int, Int32Array], StepPlan]
    | Planner
    | PlansOfAnotherRank
)
"""By step, from the step and its lengths, or by a planner that was made without lengths."""
_GIVEN = "given"
"""`belongs_to` of a state's choices where no planner makes the plans."""
_PAUSE_S = 0.005
_PLAN, _FAULT = b"p", b"e"


def check_given(given: Any) -> None:
    """Refuse a `plan` argument that gives no plans."""
    if isinstance(given, Planner) and not given.is_supplied:
        raise SettingError(
            "the loader supplies the lengths of its steps; make the planner without lengths: "
            "plan=vl.Planner(cost=..., mesh=...)"
        )
    if isinstance(given, str | bytes) or not (
        isinstance(given, Planner | Mapping | Sequence | PlansOfAnotherRank) or callable(given)
    ):
        raise SettingError(
            f"plan={type(given).__name__}; it takes plans by step, a function of the step and its lengths, or a "
            "vl.Planner made without lengths"
        )


def ahead_of(given: Any) -> int:
    """Return for how many steps ahead a planner takes lengths."""
    return given.ahead if isinstance(given, Planner | PlansOfAnotherRank) else 0


class Plans:
    """Decides plans, or receives them from the rank that does, and holds each until its step is taken."""

    def __init__(
        self, given: GivenPlans, *, rank: int, num_ranks: int, job: Any, name: str, patience_s: float
    ) -> None:
        if job is None and num_ranks > 1 and isinstance(given, Planner):
            raise SettingError(
                f"a planner decides the steps of {num_ranks:,} ranks on one of them, and there is no process group "
                "to tell the others; call torch.distributed.init_process_group before the loader is made, or pass a "
                "function that gives the same plans on every rank"
            )
        self._given, self._rank, self._num_ranks = given, rank, num_ranks
        self._job, self._name, self._patience_s = job, name, patience_s
        self._belongs_to = given.belongs_to if isinstance(given, Planner) else f"{_GIVEN}, dp={num_ranks}"
        self._lock = threading.Lock()
        self._restarts = 0
        """Number of calls of `go_on`; requests from before the last one have no effect."""
        self._held: dict[int, StepPlan] = {}
        self._times: dict[int, tuple[float, float]] = {}
        """When a plan was requested, and when it was ready, by `time.perf_counter`."""
        self._choices: dict[int, list[str]] = {}
        self._replayed: dict[int, list[str]] = {}
        self._is_planner: bool | None = None

    def opening(self, inner: OpenNumbered | None) -> OpenNumbered:
        """Return what opens the exchange of a run, in which workers request plans too."""
        return lambda run: _PlanExchange(self, run, self._restarts, Solo() if inner is None else inner(run))

    def take(self, step: int, requested_s: float) -> tuple[StepPlan, float]:
        """Return the plan of a step whose batch is taken, and the seconds that the batch waited for it.

        Forgets the plan and those before.

        Args:
            step: that was taken.
            requested_s: when the batch was requested, by `time.perf_counter`.
        """
        with self._lock:
            plan = self._held.pop(step)
            asked, came = self._times.pop(step)
            for number in [number for number in self._held if number < step]:
                del self._held[number], self._times[number]
        return plan, max(came - max(asked, requested_s), 0.0)

    def state(self, step: int) -> dict[str, Any]:
        """Return, for JSON, how the steps from `step` on were decided, as far as they were read."""
        with self._lock:
            known = {**self._replayed, **self._choices}
        choices = {str(number): known[number] for number in sorted(known) if number >= step}
        return {"belongs_to": self._belongs_to, "choices": choices}

    def go_on(self, state: Mapping[str, Any] | None = None) -> None:
        """Begin a run. Steps that are read again get the same plans: those of `state`, or if None those made here.

        Raises:
            StateError: this is no such state; nothing has changed.
        """
        if state and not isinstance(state, Mapping):
            raise StateError(f"this is no state of a loader's plans: {str(state)[:80]!r}")
        is_ours = bool(state) and state is not None and state.get("belongs_to") == self._belongs_to
        choices = _choices_in(state) if is_ours and state is not None else {}
        with self._lock:
            self._restarts += 1
            self._held.clear()
            self._times.clear()
            if state is None:
                self._replayed |= self._choices
            else:
                self._replayed = choices
            self._choices = {}
            replayed = {str(number): choice for number, choice in self._replayed.items()}
        if state and not is_ours and not isinstance(self._given, PlansOfAnotherRank):
            _log.info("the state is of steps that were planned otherwise; those read ahead are planned anew")
        if isinstance(self._given, Planner):
            self._given.load_state_dict({"version": 1, "belongs_to": self._belongs_to, "choices": replayed})

    def plan_of(
        self, exchange: _PlanExchange, step: int, lengths: Int32Array, soon: Mapping[int, Int32Array]
    ) -> StepPlan:
        """Return the plan of a step, which never changes afterwards."""
        with self._lock:
            plan = self._held.get(step)
        if plan is None or not np.array_equal(plan.lengths, lengths):
            start_s = time.perf_counter()
            plan, choice = self._own_or_received(exchange, step, lengths, soon)
            with self._lock:
                if exchange.restarts == self._restarts:
                    self._held[step], self._choices[step] = plan, choice
                    self._times[step] = start_s, time.perf_counter()
                while len(self._choices) > MOST_CHOICES:
                    del self._choices[min(self._choices)]
        return plan

    def close(self) -> None:
        """End the planner's process."""
        if isinstance(self._given, Planner):
            self._given.close()

    def _own_or_received(
        self, exchange: _PlanExchange, step: int, lengths: Int32Array, soon: Mapping[int, Int32Array]
    ) -> tuple[StepPlan, list[str]]:
        """Return a plan and its choice; an error of the rank that plans is raised on all ranks at once."""
        if self._job is None:
            plan = self._made(step, lengths, soon)
            return plan, self._checked_choice(step, lengths, plan)
        key = f"{self._name}/{exchange.run}/{PLAN}/{step}"
        if self._is_planning_rank():
            try:
                plan = self._made(step, lengths, soon)
                choice = self._checked_choice(step, lengths, plan)
                content = _PLAN + plan_to_bytes(plan)
            except Exception as error:
                self._job.set(key, _FAULT + json.dumps(_named(error)).encode())
                raise
            self._job.set(key, content)
            self._job.delete_key(f"{self._name}/{exchange.run}/{PLAN}/{step - MOST_CHOICES}")
            return plan, choice
        end = time.monotonic() + self._patience_s
        while not self._job.check([key]):
            if exchange.closed.is_set():
                raise StalledError(f"the loader was closed while it waited for the plan of step {step:,}")
            if time.monotonic() > end:
                raise StalledError(
                    f"data-parallel rank {self._rank} has waited {self._patience_s:,.0f} s for the plan of step "
                    f"{step:,}; the rank that plans is gone, or its loader has other settings; look at the log of "
                    "data-parallel rank 0, or pass a larger deadline_s"
                )
            time.sleep(_PAUSE_S)
        content = self._job.get(key)
        if content[:1] == _FAULT:
            kind, message = parse_json(content[1:])
            raise getattr(errors, kind, PlanError)(message)
        plan = plan_from_bytes(content[1:])
        return plan, self._checked_choice(step, lengths, plan)

    def _is_planning_rank(self) -> bool:
        """Whether this process plans: the first to ask, of those with data-parallel rank 0."""
        if self._is_planner is None:
            mine = f"{time.time_ns()} {id(self)}"
            can = self._rank == 0 and not isinstance(self._given, PlansOfAnotherRank)
            self._is_planner = (
                can and self._job.compare_set(f"{self._name}/decides", "", mine) == mine.encode()
            )
        return self._is_planner

    def _made(self, step: int, lengths: Int32Array, soon: Mapping[int, Int32Array]) -> StepPlan:
        given = self._given
        if isinstance(given, PlansOfAnotherRank):
            raise SettingError(
                "this rank can't plan, and there is no process group that brings plans of others; call "
                "torch.distributed.init_process_group before the loader is made"
            )
        if isinstance(given, Planner):
            given.supply({step: lengths, **soon})
            return given.take(step)
        if not isinstance(given, Mapping | Sequence):
            return given(step, lengths)
        if (isinstance(given, Mapping) and step in given) or (
            isinstance(given, Sequence) and step < len(given)
        ):
            return given[step]
        raise PlanError(f"there is no plan of step {step:,} among the {len(given):,} that were given; add it")

    def _checked_choice(self, step: int, lengths: Int32Array, plan: object) -> list[str]:
        """Return the choice of a plan; refuse one of other documents or ranks, or another than the step had."""
        if not isinstance(plan, StepPlan):
            raise PlanError(
                f"what was given for step {step:,} is a {type(plan).__name__}, and must be a StepPlan, as "
                "vl.plan_step makes it"
            )
        if plan.mesh.dp != self._num_ranks:
            raise PlanError(
                f"the plan of step {step:,} is for dp={plan.mesh.dp:,}, and the loader has dp_world_size="
                f"{self._num_ranks:,}; plan for as many data-parallel ranks as read"
            )
        if len(plan.lengths) != len(lengths) or (plan.lengths != lengths).any():
            raise PlanError(
                f"the plan of step {step:,} is of {len(plan.lengths):,} documents with {plan.num_tokens:,} tokens, "
                f"and the step holds {len(lengths):,} with {int(lengths.sum(dtype=np.int64)):,}; plan the lengths "
                "that the loader gives (loader.lengths(step))"
            )
        choice = choice_of(plan)
        before = self._replayed.get(step)
        if before is not None and before[1] != choice[1]:
            raise StateError(
                f"step {step:,} was read by another plan than the one that it gets now: the planner, the "
                "data or varlen has changed since the state was saved; go on from a state without plans"
            )
        return choice


def choice_of(plan: StepPlan) -> list[str]:
    """Return "planned" or "quick", and the fingerprint of a plan."""
    return ["quick" if plan.answered_by.startswith("quick") else "planned", plan_fingerprint(plan)]


def _choices_in(state: Mapping[str, Any]) -> dict[int, list[str]]:
    """Return the choices in a state of `Plans.state`."""
    with reading_state("a loader's plans"):
        found = {int(step): [str(how), str(print_)] for step, (how, print_) in state["choices"].items()}
    if wrong := [how for how, _ in found.values() if how not in ("planned", "quick")]:
        raise StateError(
            f"the state says that a step was planned {wrong[0]!r}; it was changed. Load it as it was saved"
        )
    return found


def _named(error: Exception) -> tuple[str, str]:
    """Return the class and the message by which other processes raise an error."""
    if isinstance(error, VarlenError):
        return type(error).__name__, str(error)
    return PlanError.__name__, f"planning failed with {error!r}"


class _PlanExchange:
    """The exchange of one run, with plans."""

    def __init__(self, plans: Plans, run: int, restarts: int, inner: Exchange) -> None:
        self._plans, self._inner = plans, inner
        self.run, self.restarts = run, restarts
        self.closed = threading.Event()

    def all(self, key: str, mine: Mapping[int, Any]) -> Mapping[int, Any]:
        """Return the values of all ranks, or the indices of the documents that a step's plan gives this rank."""
        if key != PLAN:
            return self._inner.all(key, mine)
        ((rank, (step, lengths, soon)),) = mine.items()
        later = {int(number): np.array(some, np.int32) for number, some in soon.items()}
        try:
            plan = self._plans.plan_of(self, step, np.array(lengths, np.int32), later)
        except Exception as error:
            kind, message = _named(error)
            return {rank: {"error": kind, "message": message}}
        return {rank: {"mine": np.flatnonzero(plan.documents_of(rank)).tolist()}}

    def close(self) -> None:
        """Let waiting threads fail."""
        self.closed.set()
        self._inner.close()
