"""One step of a benchmark: a title for the progress bar and the call that measures its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.rows import Row


@dataclass(frozen=True)
class Step:
    """Something to measure; nothing is imported or drawn before `run` is called."""

    title: str
    run: Callable[[], list[Row]]
