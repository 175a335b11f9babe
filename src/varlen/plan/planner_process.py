"""The line to the process that plans: what is asked, what was answered, and two threads that wait for its pipes.

::

    asked ──► writer ──► pipe ──► python -m varlen.plan.planner_worker
                                          │
    answers ◄── reader ◄──────── pipe ◄───┘

The reader starts the worker, and another one if it dies.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from varlen import errors
from varlen.errors import PlanError, VarlenError, WorkerDiedError
from varlen.plan.serialize import plan_fingerprint, plan_from_bytes
from varlen.step_plan import StepPlan
from varlen.workers.child import MOST_DEATHS, Child, start_thread, supervise

_log = logging.getLogger(__name__)
Answer = tuple[StepPlan, str] | VarlenError
"""A plan and its fingerprint, or why there is none."""


@dataclass(kw_only=True, slots=True, eq=False)
class PlannerProcess:
    """What the threads share; none of it knows the planner, so that the planner can die."""

    head: bytes
    asked: dict[int, bytes] = field(default_factory=dict)
    """Steps that wait for their plan, and what the worker is told of each."""
    answers: dict[int, Answer] = field(default_factory=dict)
    """What the worker said of a step, until it is taken."""
    came: threading.Condition = field(default_factory=threading.Condition)
    process: Child | None = None
    is_greeted: bool = False
    """Whether the worker was told how to plan."""
    busy_with: int | None = None
    """The step that the worker was told: one at a time, so that it doesn't plan what nobody wants any more."""
    since_s: float = 0.0
    """When it was told that (monotonic clock)."""
    closing: bool = False
    deaths: int = 0
    is_alive: bool = True
    """Whether there will be a worker."""

    def begin(self) -> list[threading.Thread]:
        """Start the threads, and with them the worker."""
        return [_at_work(_write, self), _at_work(_read, self)]

    def ask(self, step: int, told: bytes) -> None:
        """Have a step planned."""
        with self.came:
            self.asked[step] = told
            self.came.notify_all()

    def knows(self, step: int) -> bool:
        """Return whether a step was asked for, or is answered already."""
        with self.came:
            return step in self.asked or step in self.answers

    def keep(self, wanted: range) -> None:
        """Forget what was asked or answered of all steps but some."""
        with self.came:
            for step in [*self.asked, *self.answers]:
                if step not in wanted:
                    self.asked.pop(step, None)
                    self.answers.pop(step, None)

    def awaited(self, step: int, deadline_s: float) -> Answer | None:
        """Return what the worker says of a step; None if it says nothing in time, or there is no worker any more."""
        with self.came:
            self.came.wait_for(lambda: step in self.answers or not self.is_alive or self.closing, deadline_s)
            return self.answers.pop(step, None)

    def end_if_stuck(self, deadline_s: float) -> None:
        """Kill a worker that has planned one step for so long; another one takes its place."""
        with self.came:
            is_busy = self.busy_with is not None and self.process is not None
            if is_busy and time.monotonic() - self.since_s > deadline_s:
                _log.warning("the process that plans said nothing for %s s; it is ended", f"{deadline_s:g}")
                cast(Child, self.process).kill()
                self.busy_with = None

    def close(self) -> None:
        """End the worker and both threads."""
        with self.came:
            self.closing = True
            if self.process is not None:
                self.process.kill()
            self.came.notify_all()


def _answered(content: bytes) -> Answer:
    """The plan that the worker made; or why it made none, as the error of varlen that it met."""
    try:
        if content[:4] == b"plan":
            plan = plan_from_bytes(content[12:])
            return plan, plan_fingerprint(plan)
        kind, said = json.loads(content[12:])
    except VarlenError as error:
        return error
    known = getattr(errors, kind, PlanError)
    if isinstance(known, type) and issubclass(known, VarlenError) and known is not PlanError:
        return known(said)
    return PlanError(said if kind == "PlanError" else f"planning failed with {kind}: {said}")


def _at_work(what: Callable[[PlannerProcess], None], line: PlannerProcess) -> threading.Thread:
    return start_thread(partial(what, line), f"varlen plan {what.__name__.strip('_')}")


def _write(line: PlannerProcess) -> None:
    """Tell the worker what is asked, one step after the other; the only thread that writes to it."""
    gone: Child | None = None
    while True:
        with line.came:
            line.came.wait_for(
                lambda: line.closing or not line.is_alive or _has_news(line, gone)  # noqa: B023
            )
            if line.closing or line.process is None or not line.is_alive:
                return
            process, message = line.process, b"head" + line.head
            if line.is_greeted:
                line.busy_with, line.since_s = min(line.asked), time.monotonic()
                message = b"step" + line.asked[line.busy_with]
            line.is_greeted = True
        try:
            process.send(message)
        except (OSError, ValueError):  # the reader sees that too, and starts another
            gone = process


def _has_news(line: PlannerProcess, gone: Child | None) -> bool:
    """Whether there is something to tell the worker, and it is none that is gone."""
    is_free = line.process is not None and line.process is not gone and line.busy_with is None
    return is_free and (not line.is_greeted or bool(line.asked))


def _read(line: PlannerProcess) -> None:
    """Start workers, and keep what they say."""
    try:
        last = supervise(partial(_hired, line), partial(_listen, line), partial(_died, line))
        if last is not None and not line.closing:
            _log.warning(
                "the process that plans died %s times in a row; the quick answer alone plans now", MOST_DEATHS
            )
    except WorkerDiedError as error:
        _log.warning("steps are planned by the quick answer alone: %s", error)
    with line.came:
        line.is_alive = False
        line.came.notify_all()


def _hired(line: PlannerProcess) -> Child | None:
    with line.came:
        if line.closing:
            return None
        line.process = Child("varlen.plan.planner_worker", threads=1)
        line.is_greeted, line.busy_with = False, None
        line.came.notify_all()
        return line.process


def _died(line: PlannerProcess, worker: Child) -> None:
    if line.closing:
        return
    line.deaths += 1
    if line.deaths == 1:
        _log.warning(
            "the process that plans steps ahead %s; it is started again, and steps that it isn't ready for are "
            "planned by the quick answer",
            worker.end,
        )


def _listen(line: PlannerProcess, worker: Child) -> bool:
    """Keep what a worker says until it is gone; returns whether it answered anything."""
    heard = False
    with suppress(EOFError, OSError, ValueError):
        while True:
            message = worker.receive()
            step = int.from_bytes(message[4:12], "little")
            heard = True
            answer = _answered(message)  # read here, which takes a while, so that nobody who takes it waits
            with line.came:
                line.busy_with = None
                if line.asked.pop(step, None) is not None:
                    line.answers[step] = answer
                line.came.notify_all()
    return heard
