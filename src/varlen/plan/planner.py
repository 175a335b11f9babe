"""`Planner`: plans steps ahead, in another process, while the trainer computes.

::

    lengths(step) ──► requests ──► worker plans ──► results ──► take(step)
                                                                   ▲
                                     quick plan, if it isn't ready yet

The first step waits for the worker, which loads kernels, and a replayed step waits for the plan that it had.
"""

from __future__ import annotations

import hashlib
import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Thread
from types import TracebackType
from typing import Any, Final

import numpy.typing as npt

from varlen.counts import many
from varlen.errors import PlanError, SettingError, StalledError, StateError, VarlenError, reading_state
from varlen.pack.lengths import as_lengths
from varlen.plan.planner_process import PlannerProcess, Result
from varlen.plan.search import Search
from varlen.plan.serialize import named, plan_fingerprint, to_json
from varlen.step_plan import StepPlan
from varlen.types import Int32Array

_log = logging.getLogger(__name__)
VERSION: Final = 1
MOST_CHOICES: Final = 256
"""Number of last steps in the state: more than a job runs between two checkpoints."""
_JOIN_S: Final = 5.0
_PLAN_STEP: Final = "varlen.plan.api:plan_step"
_Choice = tuple[str, StepPlan, str]
"""How a step was planned ("planned" or "quick"), its plan, and the plan's fingerprint."""
Lengths = Sequence[npt.ArrayLike] | Callable[[int], npt.ArrayLike | None]


class Planner:
    """Plans steps ahead in a worker process; if a step's plan isn't ready when it is taken, a quick one is made.

    Each of the two plans depends only on lengths and settings, but the choice between them depends on timing:
    `state_dict` stores it. `PackedLoader(plan=...)` supplies lengths, plans on one rank of a job, and sends plans to
    the others. Without a loader, `varlen.plan.serialize.broadcast_plan` sends plans to other ranks.
    """

    def __init__(
        self,
        lengths: Lengths | None = None,
        *,
        quick: Mapping[str, Any] | None = None,
        ahead: int = 2,
        first_step: int = 0,
        deadline_s: float = 300.0,
        function: str = _PLAN_STEP,
        **settings: Any,
    ) -> None:
        """Begin to plan the first steps.

        Args:
            lengths: document lengths of each step: a sequence by step, or a function of the step that returns None
                after the last one, such as `PackedLoader.lengths`. The function is called up to `ahead` steps early,
                by the thread that takes plans, and must be deterministic. None if they are supplied later, as
                `PackedLoader(plan=...)` does on the rank that plans; the process then starts with the first of them.
            quick: settings of the quick plan that differ. By default, "micropack" with `Search(closely=False)`, which
                takes some ten milliseconds; for another function, `{"method": "sliced"}`.
            ahead: number of steps after the current one to plan.
            first_step: the step that is taken first; for a resumed run, the loader's.
            deadline_s: how long a first or replayed step waits for its plan, and how long the process may work on one
                step before it is replaced.
            function: the planning function, as "module:function". It is called with lengths (int32) and the settings,
                in the other process or, for a quick plan, in this one.
            settings: of the function: cost, mesh, method and so on; numbers, strings and dataclasses of varlen.

        Raises:
            SettingError: settings that can't be sent to a process, a function that can't be found, or numbers out of
                range.
            VarlenError: `lengths` raises it for the first steps.
        """
        if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 1:
            raise SettingError(f"ahead must be a whole number of at least 1, got {ahead!r}")
        if not isinstance(deadline_s, int | float) or not 0 < deadline_s < math.inf:
            raise SettingError(f"deadline_s must be a number of seconds above 0, got {deadline_s!r}")
        self._function = named(function)
        self._lengths, self._ahead, self._settings = lengths, ahead, settings
        self._deadline_s, self._has_begun = deadline_s, False
        self._known: dict[int, Int32Array | None] = {}
        self._quick = {**settings, **(_quick(function, settings) if quick is None else quick)}
        self._belongs_to = _digest(to_json([function, settings, self._quick]))
        self._choices: dict[int, tuple[str, str]] = {}
        self._replayed: dict[int, tuple[str, str]] = {}
        self._process = PlannerProcess(head=to_json([function, settings]).encode())
        self._threads: list[Thread] = []
        self._end = weakref.finalize(self, self._process.close)
        if lengths is not None:
            self._threads = self._process.begin()
            self._request_from(first_step)

    @property
    def ahead(self) -> int:
        """Number of steps after the current one to plan."""
        return self._ahead

    @property
    def belongs_to(self) -> str:
        """A digest of the function and its settings; a state is only loaded if it is the same."""
        return self._belongs_to

    @property
    def is_supplied(self) -> bool:
        """Whether lengths come from `supply`."""
        return self._lengths is None

    def supply(self, lengths: Mapping[int, npt.ArrayLike]) -> None:
        """Add lengths of steps to plan, for a planner that was made without lengths.

        Args:
            lengths: document lengths by step.

        Raises:
            SettingError: the planner has lengths of its own.
        """
        if self._lengths is not None:
            raise SettingError("this planner was made with lengths, and none can be supplied; leave them out")
        if not self._threads:
            self._threads = self._process.begin()
        for step, values in lengths.items():
            self._known[step] = as_lengths(values)
            self._request(step)

    def take(self, step: int) -> StepPlan:
        """Return the plan of a step, and request those after it.

        The first call waits for the worker's plan, and makes a quick plan once to compile or load its kernels. Later
        calls wait only for a replayed step that had the worker's plan, and if no quick plan fits into memory.

        Args:
            step: any; steps in a row are planned ahead.

        Returns:
            A plan whose `answered_by` begins with "quick" if it is the quick plan.

        Raises:
            PlanError: no plan fits; the planning function's message.
            StateError: a replayed step has another plan now, since its lengths or varlen changed.
            StalledError: a replayed step's plan didn't come within `deadline_s`.
            SettingError: there is no such step, or the planner is closed; or the function refuses its settings.

        Cost: microseconds if the plan is ready, else that of the quick plan; and `lengths` of one step.
        """
        if self._process.closing:
            raise SettingError("the planner is closed; make another one")
        lengths = self._lengths_of(step)
        if lengths is None:
            raise SettingError(f"there is no step {step:,} to plan; its lengths are missing")
        before = self._replayed.get(step, ("", ""))[0]
        if before == "quick":
            how, plan, fingerprint = self._plan_quickly(lengths)
        elif before == "planned":
            how, plan, fingerprint = self._replan(step, lengths)
        else:
            how, plan, fingerprint = self._first_available(step, lengths)
        self._check_replayed(step, fingerprint)
        self._has_begun = True
        self._choices[step] = (how, fingerprint)
        while len(self._choices) > MOST_CHOICES:
            self._choices.pop(min(self._choices))
        self._request_from(step + 1)
        self._process.end_if_stuck(self._deadline_s)
        return plan

    def state_dict(self) -> dict[str, Any]:
        """Return how the last steps were planned, for JSON: "planned" or "quick", and the plan's fingerprint."""
        chosen = {**self._replayed, **self._choices}
        return {
            "version": VERSION,
            "belongs_to": self._belongs_to,
            "choices": {str(step): list(chosen[step]) for step in sorted(chosen)[-MOST_CHOICES:]},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replay steps with the same plans.

        Args:
            state: what `state_dict` returned, perhaps back from JSON.

        Raises:
            StateError: this is no such state, or one of other settings.
        """
        if not isinstance(state, Mapping) or state.get("version") != VERSION:
            raise StateError(f"this is no state of a planner of version {VERSION}: {str(state)[:80]}")
        if state.get("belongs_to") != self._belongs_to:
            raise StateError(
                "the state was saved by a planner with another cost, mesh, method or quick settings; make the "
                "planner with those, or begin without its state: steps are planned anew then"
            )
        with reading_state("a planner"):
            choices = state["choices"].items()
            replayed = {int(step): (str(how), str(digest)) for step, (how, digest) in choices}
        if wrong := [step for step, (how, _) in replayed.items() if how not in ("planned", "quick")]:
            raise StateError(
                f"the state says that step {wrong[0]:,} was planned {replayed[wrong[0]][0]!r} "
                f'({many(len(wrong), "step")} with neither "planned" nor "quick"); it was changed. Load it as it was '
                "saved"
            )
        self._replayed, self._choices = replayed, {}

    @property
    def restarts(self) -> int:
        """Workers that died and were replaced."""
        return self._process.deaths

    def close(self) -> None:
        """End the process and the threads."""
        self._end()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def __enter__(self) -> Planner:
        """Return this planner."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def _lengths_of(self, step: int) -> Int32Array | None:
        """Return the lengths of a step; None if there is no such step."""
        if step not in self._known:
            if self._lengths is None:
                return None
            if callable(self._lengths):
                lengths = self._lengths(step)
            else:
                lengths = self._lengths[step] if 0 <= step < len(self._lengths) else None
            self._known[step] = None if lengths is None else as_lengths(lengths)
        return self._known[step]

    def _request_from(self, first: int) -> None:
        """Request the steps from `first` on, and forget all others."""
        wanted = range(first, first + self._ahead)
        self._process.forget_others(wanted)
        self._known = {step: lengths for step, lengths in self._known.items() if step in wanted}
        for step in wanted:
            self._request(step)

    def _request(self, step: int) -> None:
        """Request a step, unless it has been requested or will be replayed with a quick plan."""
        if self._process.knows(step) or self._replayed.get(step, ("",))[0] == "quick":
            return
        lengths = self._lengths_of(step)
        if lengths is not None:
            self._process.request(step, step.to_bytes(8, "little") + lengths.tobytes())

    def _first_available(self, step: int, lengths: Int32Array) -> _Choice:
        """Return the worker's plan if it is ready, else the quick plan; the first call waits for the worker."""
        result: Result | None
        if self._has_begun:
            with self._process.changed:
                result = self._process.results.pop(step, None)
        else:
            result = self._wait(step)
            with suppress(PlanError):
                self._function(lengths, **self._quick)
        if result is not None:
            return _planned(result)
        try:
            return self._plan_quickly(lengths)
        except PlanError:
            if (result := self._wait(step)) is None:
                raise
        return _planned(result)

    def _replan(self, step: int, lengths: Int32Array) -> _Choice:
        """Wait for the worker's plan of a replayed step; without a worker, make it here."""
        result = self._wait(step)
        if result is not None:
            return _planned(result)
        if self._process.is_alive:
            raise StalledError(
                f"step {step:,} was run by a plan made ahead, which didn't come again within "
                f"{self._deadline_s:g} s; pass a larger deadline_s, or go on from the checkpoint without the "
                "planner's state"
            )
        plan = self._function(lengths, **self._settings)
        return "planned", plan, plan_fingerprint(plan)

    def _plan_quickly(self, lengths: Int32Array) -> _Choice:
        plan = self._function(lengths, **self._quick)
        plan = replace(plan, answered_by=f"quick, its plan was not there: {plan.answered_by}")
        return "quick", plan, plan_fingerprint(plan)

    def _wait(self, step: int) -> Result | None:
        """Wait for the worker's result; returns None after the deadline, or without a worker."""
        if not self._process.knows(step):
            self._request_from(step)
        result = self._process.wait(step, self._deadline_s)
        if result is None and self._process.is_alive:
            _log.warning("the plan of step %s didn't come within %s s", f"{step:,}", f"{self._deadline_s:g}")
        return result

    def _check_replayed(self, step: int, fingerprint: str) -> None:
        """Require that a replayed step has the plan that it had."""
        if step in self._replayed and self._replayed[step][1] != fingerprint:
            raise StateError(
                f"step {step:,} was run with another plan than the one that its lengths give now; the data "
                "or varlen has changed since the state was saved. Go on from a checkpoint without this state"
            )


def _quick(function: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default settings of the quick plan."""
    if function != _PLAN_STEP:
        return {"method": "sliced"}
    search = settings.get("search")
    if not isinstance(search, Search | None):
        return {}  # the planning function reports the wrong setting
    return {"method": "micropack", "search": replace(search or Search(), closely=False)}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _planned(result: Result) -> _Choice:
    """Return the worker's plan, or raise its error."""
    if isinstance(result, VarlenError):
        raise result
    return "planned", *result
