"""Run tasks side by side: in this process, over fresh processes of this machine, or over a Ray cluster.

Every task is a plain function of (what all share, its own arguments), and what it writes depends on those alone, so
that the bytes are the same whoever runs it and however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from varlen.errors import SettingError
from varlen.offline.cluster import over_ray
from varlen.offline.processes import Workers

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Crew:
    """Who runs tasks."""

    processes: int = 1
    """Processes on this machine; 1: this one."""
    ray: bool = False
    """Over the Ray cluster that RAY_ADDRESS names, or one on this machine. Its machines must share the folders of the
    data, of the output and of the tokens."""

    def __post_init__(self) -> None:
        """Refuse a crew of nobody."""
        if self.processes < 1:
            raise SettingError(f"processes must be at least 1, got {self.processes}")

    @contextmanager
    def hired(self) -> Iterator[Team]:
        """Give those who run tasks; the processes stay for all the work in between."""
        workers = Workers(self.processes) if self.processes > 1 and not self.ray else None
        try:
            yield Team(self, workers)
        finally:
            if workers is not None:
                workers.close()

    def run(
        self, function: Callable[[Any, Any], Result], shared: Any, tasks: Iterable[Any]
    ) -> Iterator[Result]:
        """Hire, run all tasks as `Team.run` does, and let go."""
        with self.hired() as team:
            yield from team.run(function, shared, tasks)


class Team:
    """A crew at work."""

    def __init__(self, crew: Crew, workers: Workers | None) -> None:
        self._crew, self._workers = crew, workers

    def start(self) -> None:
        """Start all processes now: there will be work for them."""
        if self._workers is not None:
            self._workers.start()

    def is_here(self, *, is_one: bool) -> bool:
        """Return whether this process does the tasks itself; `is_one` as in `run`."""
        return not self._crew.ray and (self._workers is None or is_one)

    def run(
        self,
        function: Callable[[Any, Any], Result],
        shared: Any,
        tasks: Iterable[Any],
        *,
        is_one: bool = False,
    ) -> Iterator[Result]:
        """Yield the results of all tasks as they are done, in any order."""
        if self._crew.ray:
            return over_ray(function, shared, tasks)
        if self._workers is not None and not is_one:
            return self._workers.run(function, shared, tasks)
        return (function(shared, task) for task in tasks)
