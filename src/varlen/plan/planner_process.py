"""The process that plans ahead, seen from the trainer: requests, results, and two threads at its pipes.

::

    requests ──► writer ──► pipe ──► python -m varlen.plan.planner_worker
                                             │
    results ◄─── reader ◄───────── pipe ◄────┘

The reader starts the worker, and replaces it if it dies.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from varlen import errors
from varlen.errors import PlanError, VarlenError, WorkerDiedError
from varlen.plan.serialize import plan_fingerprint, plan_from_bytes
from varlen.step_plan import StepPlan
from varlen.workers.child import MOST_DEATHS, Child, start_thread, supervise

_log = logging.getLogger(__name__)
Result = tuple[StepPlan, str] | VarlenError
"""A plan and its fingerprint, or the error of planning."""


@dataclass(kw_only=True, slots=True, eq=False)
class PlannerProcess:
    """The worker and its threads; they don't refer to the `Planner`, so that it can be garbage-collected."""

    head: bytes
    """The planning function and its settings, sent to each new worker."""
    requests: dict[int, bytes] = field(default_factory=dict)
    """Steps that wait for their plan, with the message to the worker."""
    results: dict[int, Result] = field(default_factory=dict)
    """Results by step, until they are taken."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    child: Child | None = None
    has_head: bool = False
    """Whether the worker was sent the head."""
    busy_with: int | None = None
    """The step that was sent to the worker: one at a time, so that no unwanted step delays the next."""
    since_s: float = 0.0
    """When it was sent (monotonic clock)."""
    closing: bool = False
    deaths: int = 0
    is_alive: bool = True
    """False once workers died too often to be replaced."""

    def begin(self) -> list[threading.Thread]:
        """Start the threads, and with them the worker."""
        return [
            start_thread(self._write, "varlen plan write"),
            start_thread(self._read, "varlen plan read"),
        ]

    def request(self, step: int, message: bytes) -> None:
        """Request a plan."""
        with self.changed:
            self.requests[step] = message
            self.changed.notify_all()

    def knows(self, step: int) -> bool:
        """Return whether a step is requested or has a result."""
        with self.changed:
            return step in self.requests or step in self.results

    def forget_others(self, wanted: range) -> None:
        """Forget requests and results of other steps."""
        with self.changed:
            for step in [*self.requests, *self.results]:
                if step not in wanted:
                    self.requests.pop(step, None)
                    self.results.pop(step, None)

    def wait(self, step: int, deadline_s: float) -> Result | None:
        """Wait for a step's result; returns None after the deadline, or if there will be none."""
        with self.changed:
            self.changed.wait_for(
                lambda: step in self.results or not self.is_alive or self.closing, deadline_s
            )
            return self.results.pop(step, None)

    def end_if_stuck(self, deadline_s: float) -> None:
        """Kill a worker that has planned one step for longer than the deadline, so that it is replaced."""
        with self.changed:
            is_busy = self.busy_with is not None and self.child is not None
            if is_busy and time.monotonic() - self.since_s > deadline_s:
                _log.warning("the process that plans said nothing for %s s; it is ended", f"{deadline_s:g}")
                cast(Child, self.child).kill()
                self.busy_with = None

    def close(self) -> None:
        """End the worker and both threads."""
        with self.changed:
            self.closing = True
            if self.child is not None:
                self.child.kill()
            self.changed.notify_all()

    def _write(self) -> None:
        """Send requests to the worker, one step at a time."""
        broken: Child | None = None
        while True:
            with self.changed:
                self.changed.wait_for(
                    lambda: self.closing or not self.is_alive or self._can_send(broken)  # noqa: B023
                )
                if self.closing or self.child is None or not self.is_alive:
                    return
                child, message = self.child, b"head" + self.head
                if self.has_head:
                    self.busy_with, self.since_s = min(self.requests), time.monotonic()
                    message = b"step" + self.requests[self.busy_with]
                self.has_head = True
            try:
                child.send(message)
            except (OSError, ValueError):  # the reader notices it too, and starts another worker
                broken = child

    def _can_send(self, broken: Child | None) -> bool:
        """Whether there is a message, and a free worker whose pipe isn't broken."""
        is_free = self.child is not None and self.child is not broken and self.busy_with is None
        return is_free and (not self.has_head or bool(self.requests))

    def _read(self) -> None:
        """Start workers, and receive their results."""
        try:
            last = supervise(self._start, self._receive, self._report_death)
            if last is not None and not self.closing:
                _log.warning(
                    "the process that plans died %s times in a row; the quick answer alone plans now",
                    MOST_DEATHS,
                )
        except WorkerDiedError as error:
            _log.warning("steps are planned by the quick answer alone: %s", error)
        with self.changed:
            self.is_alive = False
            self.changed.notify_all()

    def _start(self) -> Child | None:
        with self.changed:
            if self.closing:
                return None
            self.child = Child("varlen.plan.planner_worker", threads=1)
            self.has_head, self.busy_with = False, None
            self.changed.notify_all()
            return self.child

    def _report_death(self, child: Child) -> None:
        if self.closing:
            return
        self.deaths += 1
        if self.deaths == 1:
            _log.warning(
                "the process that plans steps ahead %s; it is started again, and steps that it isn't ready for are "
                "planned by the quick answer",
                child.end,
            )

    def _receive(self, child: Child) -> bool:
        """Receive results until the worker ends; returns whether there was any."""
        has_received = False
        with suppress(EOFError, OSError, ValueError):
            while True:
                message = child.receive()
                step = int.from_bytes(message[4:12], "little")
                has_received = True
                result = _decoded(message)  # takes a while, so it is done outside of the lock
                with self.changed:
                    self.busy_with = None
                    if self.requests.pop(step, None) is not None:
                        self.results[step] = result
                    self.changed.notify_all()
        return has_received


def _decoded(message: bytes) -> Result:
    """Return the worker's plan, or the error of varlen that it raised."""
    try:
        if message[:4] == b"plan":
            plan = plan_from_bytes(message[12:])
            return plan, plan_fingerprint(plan)
        name, text = json.loads(message[12:])
    except VarlenError as error:
        return error
    kind = getattr(errors, name, PlanError)
    if isinstance(kind, type) and issubclass(kind, VarlenError) and kind is not PlanError:
        return kind(text)
    return PlanError(text if name == "PlanError" else f"planning failed with {name}: {text}")
