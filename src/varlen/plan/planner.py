"""`Planner`: the plans of coming steps, made in a process of their own while the trainer computes.

::

    lengths(step) ──► asked ──► the worker plans ──► answers ──► take(step)
                                                                    ▲
                                       quick answer, if it isn't there yet

A first step waits for the worker, which has kernels to load, and a replayed one for the plan that it had.
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

from varlen.errors import PlanError, SettingError, StalledError, StateError, VarlenError
from varlen.pack.lengths import as_lengths
from varlen.plan.planner_process import Answer, PlannerProcess
from varlen.plan.search import Search
from varlen.plan.serialize import named, plan_fingerprint, to_json
from varlen.step_plan import StepPlan
from varlen.types import Int32Array

_log = logging.getLogger(__name__)
VERSION: Final = 1
KEPT: Final = 256
"""Steps of which the state says how they were answered: more than a job takes between two checkpoints of it."""
_PATIENCE_S: Final = 5.0
_PLANS: Final = "varlen.plan.api:plan_step"
_Found = tuple[str, StepPlan, str]
"""How a step was answered, its plan, and the plan's fingerprint."""
Lengths = Sequence[npt.ArrayLike] | Callable[[int], npt.ArrayLike | None]


class Planner:
    """Plans steps ahead, and has a plan for each step when it starts: the worker's if it is there, else a quick one.

    What a plan says depends on lengths and settings alone; which of the two answers does not: `state_dict` keeps it.
    `PackedLoader(plan=...)` supplies lengths, asks on one rank of a job, and tells the others. Without a loader,
    `varlen.plan.serialize.broadcast_plan` hands plans to other ranks.
    """

    def __init__(
        self,
        lengths: Lengths | None = None,
        *,
        quick: Mapping[str, Any] | None = None,
        ahead: int = 2,
        first_step: int = 0,
        deadline_s: float = 300.0,
        function: str = _PLANS,
        **settings: Any,
    ) -> None:
        """Begin to plan the first steps.

        Args:
            lengths: of the documents of each step: a sequence by step, or a function of the step that returns None
                behind the last one, such as `PackedLoader.lengths`. It is asked up to `ahead` steps early, by the
                thread that takes plans, and must say the same of a step again. None where they are supplied, as
                `PackedLoader(plan=...)` does on the rank that plans; the process starts with the first of them.
            quick: settings of the quick answer in place of those of the others. If not said, "micropack" with
                `Search(closely=False)`, some ten milliseconds; of another function, `{"method": "sliced"}`.
            ahead: steps after the current one that are planned.
            first_step: which is taken first; where a run goes on, the loader's.
            deadline_s: how long a first or replayed step waits for its plan, and how long the other process may say
                nothing before another one takes its place.
            function: what plans, as "module:function": called with lengths (int32) and the settings, in the other
                process or, for a quick answer, in this one.
            settings: of the function: cost, mesh, method and so on; numbers, words and dataclasses of varlen.

        Raises:
            SettingError: settings that can't cross processes, a function that can't be found, or numbers out of
                their ranges.
            VarlenError: what `lengths` raises of the first steps.
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
        self._line = PlannerProcess(head=to_json([function, settings]).encode())
        self._threads: list[Thread] = []
        self._end = weakref.finalize(self, self._line.close)
        if lengths is not None:
            self._threads = self._line.begin()
            self._ask_from(first_step)

    @property
    def ahead(self) -> int:
        """Steps after the current one that are planned."""
        return self._ahead

    @property
    def belongs_to(self) -> str:
        """A digest of the function and its settings: states are loaded by planners with the same one."""
        return self._belongs_to

    @property
    def is_supplied(self) -> bool:
        """Whether lengths are given by `supply`."""
        return self._lengths is None

    def supply(self, lengths: Mapping[int, npt.ArrayLike]) -> None:
        """Have steps planned whose lengths are known now, for a planner that was made without lengths.

        Args:
            lengths: of the documents of each step, by step.

        Raises:
            SettingError: the planner has lengths of its own.
        """
        if self._lengths is not None:
            raise SettingError("this planner was made with lengths, and none can be supplied; leave them out")
        if not self._threads:
            self._threads = self._line.begin()
        for step, found in lengths.items():
            self._known[step] = as_lengths(found)
            self._ask(step)

    def take(self, step: int) -> StepPlan:
        """Return the plan of a step, and have those after it planned.

        The first call is part of starting up: it waits for the worker's plan, and makes one quick answer for nothing,
        so that no later one waits for kernels to be compiled or loaded. From then on a step waits only if it was
        planned by the worker before the state was loaded, until it is planned again, or if no quick plan holds it.

        Args:
            step: any; steps in a row are planned ahead.

        Returns:
            A plan whose `answered_by` begins with "quick" where the quick answer was taken.

        Raises:
            PlanError: no plan holds the step; as the planning function says it.
            StateError: a step that was run before has other lengths now, or settings plan it otherwise.
            StalledError: a replayed step's plan didn't come within `deadline_s`.
            SettingError: there is no such step, or the planner is closed; or the function's, of its settings.

        Cost: microseconds if the plan is there, else the quick answer; and `lengths` of one step.
        """
        if self._line.closing:
            raise SettingError("the planner is closed; make another one")
        lengths = self._of(step)
        if lengths is None:
            raise SettingError(f"there is no step {step:,} to plan; its lengths are missing")
        before = self._replayed.get(step, ("", ""))[0]
        if before == "quick":
            found = self._quickly(lengths)
        elif before == "planned":
            found = self._again(step, lengths)
        else:
            found = self._sooner(step, lengths)
        how, plan, fingerprint = found
        self._check_replayed(step, fingerprint)
        self._has_begun = True
        self._choices[step] = (how, fingerprint)
        while len(self._choices) > KEPT:
            self._choices.pop(min(self._choices))
        self._ask_from(step + 1)
        self._line.end_if_stuck(self._deadline_s)
        return plan

    def state_dict(self) -> dict[str, Any]:
        """Return how the last steps were answered, as JSON can hold it: the method and the plan's fingerprint."""
        chosen = {**self._replayed, **self._choices}
        return {
            "version": VERSION,
            "belongs_to": self._belongs_to,
            "choices": {str(step): list(chosen[step]) for step in sorted(chosen)[-KEPT:]},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have steps that are run again answered as they were.

        Args:
            state: of `state_dict`, perhaps back from JSON.

        Raises:
            StateError: it is no such state, or of other settings.
        """
        if not isinstance(state, Mapping) or state.get("version") != VERSION:
            raise StateError(f"this is no state of a planner of version {VERSION}: {str(state)[:80]}")
        if state.get("belongs_to") != self._belongs_to:
            raise StateError(
                "the state was saved by a planner with another cost, mesh, method or quick answer; make the planner "
                "with those, or begin without its state: steps are planned anew then"
            )
        try:
            replayed = {int(step): (str(how), str(said)) for step, (how, said) in state["choices"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"this is no state of a planner: {type(error).__name__} {error}") from None
        if wrong := [step for step, (how, _) in replayed.items() if how not in ("planned", "quick")]:
            raise StateError(
                f"the state says that step {wrong[0]:,} was answered {replayed[wrong[0]][0]!r} ({len(wrong):,} steps "
                "are so); it was changed. Load it as it was saved"
            )
        self._replayed, self._choices = replayed, {}

    @property
    def restarts(self) -> int:
        """Workers that died and were replaced."""
        return self._line.deaths

    def close(self) -> None:
        """Leave neither a process nor a thread behind."""
        self._end()
        for thread in self._threads:
            thread.join(_PATIENCE_S)

    def __enter__(self) -> Planner:
        """Return this planner."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def _of(self, step: int) -> Int32Array | None:
        """The lengths of a step; None where there is none."""
        if step not in self._known:
            if self._lengths is None:
                return None
            if callable(self._lengths):
                found = self._lengths(step)
            else:
                found = self._lengths[step] if 0 <= step < len(self._lengths) else None
            self._known[step] = None if found is None else as_lengths(found)
        return self._known[step]

    def _ask_from(self, first: int) -> None:
        """Have some steps planned that aren't, and forget what is known of others."""
        line, wanted = self._line, range(first, first + self._ahead)
        line.keep(wanted)
        self._known = {step: known for step, known in self._known.items() if step in wanted}
        for step in wanted:
            self._ask(step)

    def _ask(self, step: int) -> None:
        """Have a step planned, unless it is already, or is answered quickly."""
        if self._line.knows(step) or self._replayed.get(step, ("",))[0] == "quick":
            return
        lengths = self._of(step)
        if lengths is not None:
            self._line.ask(step, step.to_bytes(8, "little") + lengths.tobytes())

    def _sooner(self, step: int, lengths: Int32Array) -> _Found:
        """The worker's plan if it is there, else the quick answer; the first time the worker's, waited for."""
        answer: Answer | None
        if self._has_begun:
            with self._line.came:
                answer = self._line.answers.pop(step, None)
        else:
            answer = self._awaited(step)
            with suppress(PlanError):
                self._function(lengths, **self._quick)
        if answer is not None:
            return _planned(answer)
        try:
            return self._quickly(lengths)
        except PlanError:
            if (answer := self._awaited(step)) is None:
                raise
        return _planned(answer)

    def _again(self, step: int, lengths: Int32Array) -> _Found:
        """The plan that the worker made of a step before, made again."""
        answer = self._awaited(step)
        if answer is not None:
            return _planned(answer)
        if self._line.is_alive:
            raise StalledError(
                f"step {step:,} was run by a plan made ahead, which didn't come again within "
                f"{self._deadline_s:g} s; pass a larger deadline_s, or go on from the checkpoint without the "
                "planner's state"
            )
        plan = self._function(lengths, **self._settings)
        return "planned", plan, plan_fingerprint(plan)

    def _quickly(self, lengths: Int32Array) -> _Found:
        """The quick answer."""
        plan = self._function(lengths, **self._quick)
        plan = replace(plan, answered_by=f"quick, its plan was not there: {plan.answered_by}")
        return "quick", plan, plan_fingerprint(plan)

    def _awaited(self, step: int) -> Answer | None:
        """What the worker says of a step; None if that takes too long, or there is no worker any more."""
        if not self._line.knows(step):
            self._ask_from(step)
        answer = self._line.awaited(step, self._deadline_s)
        if answer is None and self._line.is_alive:
            _log.warning("the plan of step %s didn't come within %s s", f"{step:,}", f"{self._deadline_s:g}")
        return answer

    def _check_replayed(self, step: int, fingerprint: str) -> None:
        """Require that a step that is run again has the plan it had."""
        if step in self._replayed and self._replayed[step][1] != fingerprint:
            raise StateError(
                f"step {step:,} was run by another plan before than the one that its lengths lead to now; the data "
                "or varlen has changed since the state was saved. Go on from a checkpoint without this state"
            )


def _quick(function: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the quick answer, if none are said."""
    if function != _PLANS:
        return {"method": "sliced"}
    search = settings.get("search")
    if not isinstance(search, Search | None):
        return {}  # what plans says what is wrong
    return {"method": "micropack", "search": replace(search or Search(), closely=False)}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _planned(answer: Answer) -> _Found:
    """What the worker answered."""
    if isinstance(answer, VarlenError):
        raise answer
    return "planned", *answer
