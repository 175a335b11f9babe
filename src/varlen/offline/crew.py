"""Run tasks concurrently: in this process, in fresh processes of this machine, or on a Ray cluster.

Every task is a function of (shared arguments, its own arguments), and its output depends only on these, so that the
bytes are the same with any number of processes.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from varlen.errors import MissingExtraError, SettingError, WorkerDiedError, described
from varlen.workers.pool import Workers
from varlen.workers.task_worker import KEPT, outcome

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Crew:
    """Where tasks run."""

    processes: int = 1  # on this machine; 1: this one
    # On the Ray cluster at RAY_ADDRESS, or a local one. Its machines must share the folders of the data, of the
    # output and of the tokens.
    ray: bool = False

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise SettingError(f"processes must be at least 1, got {self.processes}")

    @contextmanager
    def started(self) -> Iterator[Team]:
        """Start processes for the duration of the context."""
        workers = Workers(self.processes) if self.processes > 1 and not self.ray else None
        try:
            yield Team(self, workers)
        finally:
            if workers is not None:
                workers.close()

    def run(
        self, function: Callable[[Any, Any], Result], shared: Any, tasks: Iterable[Any]
    ) -> Iterator[Result]:
        """Run all tasks as `Team.run` does, with processes of their own."""
        with self.started() as team:
            yield from team.run(function, shared, tasks)


class Team:
    """Running processes of a crew."""

    def __init__(self, crew: Crew, workers: Workers | None) -> None:
        self._crew, self._workers = crew, workers

    def start(self) -> None:
        """Start all processes in advance."""
        if self._workers is not None:
            self._workers.start()

    def is_here(self, *, is_one: bool) -> bool:
        """Whether this process runs the tasks itself; `is_one` as in `run`."""
        return not self._crew.ray and (self._workers is None or is_one)

    def run(
        self,
        function: Callable[[Any, Any], Result],
        shared: Any,
        tasks: Iterable[Any],
        *,
        is_one: bool = False,
    ) -> Iterator[Result]:
        """Yield the results of all tasks as they complete, in any order; `is_one`: there is a single task."""
        if self._crew.ray:
            return over_ray(function, shared, tasks)
        if self._workers is not None and not is_one:
            return self._workers.run(function, shared, tasks)
        return (function(shared, task) for task in tasks)


# Ray: the cluster at RAY_ADDRESS, or a local one.


def over_ray(function: Callable[[Any, Any], Result], shared: Any, tasks: Iterable[Any]) -> Iterator[Result]:
    """Yield the results of all tasks as they complete, in any order."""
    ray = _connected()
    common = ray.put((Path.cwd(), function, shared))
    remote = ray.remote(_task)
    most = 2 * max(int(ray.cluster_resources().get("CPU", 1)), 1)
    waiting = iter(tasks)
    running: list[Any] = []
    try:
        while True:
            while len(running) < most and (task := next(waiting, None)) is not None:
                running.append(remote.remote(common, task))
            if not running:
                return
            done, running = ray.wait(running, num_returns=1)
            try:
                is_done, value = ray.get(done[0])
            except ray.exceptions.RayError as error:
                words = described(error, kind=True)
                raise WorkerDiedError(f"Ray lost a part ({words}); {KEPT}") from error
            if not is_done:
                raise value
            yield value
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _connected() -> Any:
    """Return Ray, connected to the cluster at RAY_ADDRESS, or to one that it starts here."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError(
            '--ray takes Ray, not installed here; run: pip install "varlen[ray]"'
        ) from error
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # don't report usage to Ray's developers
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = os.environ.get("RAY_ADDRESS", "this machine")
            reason = str(error).strip().partition("\n")[0]
            raise SettingError(
                f"no Ray cluster at {where} ({reason}); set RAY_ADDRESS to one, or leave --ray out"
            ) from error
    return ray


def _task(common: Any, task: Any) -> tuple[bool, Any]:
    """Run a task on a cluster's machine, with one processor."""
    folder, function, shared = common
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        os.chdir(folder)  # paths are relative to it
    except OSError:
        return False, SettingError(
            f"{folder} isn't there on {platform.node()}; over Ray, all machines must share the folders of the data "
            "and of the output"
        )
    return outcome(function, shared, task)
