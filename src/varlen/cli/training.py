"""What a run shows on standard error: a live line on a terminal, a line every few steps in a log."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress, Task, TaskID

from varlen.cli.progress import FittedLine, Part, clock

if TYPE_CHECKING:
    from varlen.train.metrics import StepMetrics
    from varlen.train.summary import RunPlan, Watcher


@contextmanager
def watching(every: int) -> Iterator[Watcher]:
    """Give what shows a run, until it ends.

    Args:
        every: steps between two lines where there is no terminal.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal or os.environ.get("RANK", "0") != "0":
        yield Lines(console, every)
        return
    with Progress(FittedLine(console, live_parts), console=console, transient=True) as bar:
        yield Live(console, bar)


def plan_words(plan: RunPlan) -> str:
    """Say what is about to be trained."""
    processes = "1 process" if plan.world_size == 1 else f"{plan.world_size:,} processes ({plan.parallel})"
    steps = "to the end of the data" if plan.steps is None else f"{plan.steps:,} steps"
    since = f", going on after step {plan.resumed_from:,}" if plan.resumed_from else ""
    how = f'attention "{plan.attention}"' if plan.plans is None else f"in slices by plans: {plan.plans}"
    return (
        f"{plan.model}, {plan.num_parameters:,} parameters, {plan.precision} on {processes} of {plan.device}, "
        f"{how}; {steps}{since}"
    )


def step_words(metrics: StepMetrics) -> str:
    """Say how a step went."""
    waiting = 100 * metrics.data_wait_s / metrics.step_s if metrics.step_s else 0.0
    return (
        f"loss {metrics.loss:.4f}  {metrics.tokens_per_s:,.0f} tokens/s  {100 * metrics.fill:.1f} % full  "
        f"{waiting:.1f} % waiting"
    )


class Lines:
    """Writes a line every few steps."""

    def __init__(self, console: Console, every: int) -> None:
        """Take where to write, and the steps between two lines."""
        self._console, self._every, self._steps = console, every, 0

    def begin(self, plan: RunPlan) -> None:
        """Say what is about to be trained."""
        self._console.print(plan_words(plan), markup=False, soft_wrap=True)
        self._steps, self._last = plan.resumed_from, plan.steps

    def step(self, metrics: StepMetrics) -> None:
        """Say how a step went, if it is time."""
        is_first, self._steps = metrics.step == self._steps + 1, -2
        if is_first or metrics.step % self._every == 0 or metrics.step == self._last:
            self._console.print(f"step {metrics.step:,}  {step_words(metrics)}", markup=False, soft_wrap=True)

    def say(self, sentence: str) -> None:
        """Say something else."""
        self._console.print(sentence, markup=False, soft_wrap=True)


def live_parts(task: Task) -> list[Part]:
    """Return what is drawn of a run: step and time left whatever the width, the last step as far as it fits."""
    metrics: StepMetrics | None = task.fields.get("metrics")
    total = "" if task.total is None else f"/{task.total:,.0f}"
    if task.total is None and not task.completed:
        return [Part(words=task.description, rank=0)]
    parts = [
        Part(words=f"step {task.completed:,.0f}{total}", rank=0),
        Part(words="" if task.total is None else f"left {clock(task.time_remaining)}", rank=0),
    ]
    if metrics is None:
        return [*parts, Part(words=task.description, rank=1)]
    waiting = 100 * metrics.data_wait_s / metrics.step_s if metrics.step_s else 0.0
    return [
        *parts,
        Part(words=f"loss {metrics.loss:.4f}", rank=1),
        Part(words=f"{metrics.tokens_per_s:,.0f} tokens/s", rank=2),
        Part(words=f"{waiting:.1f} % waiting", rank=3),
        Part(words=f"{100 * metrics.fill:.1f} % full", rank=4),
        Part(words=f"{clock(task.elapsed)} so far", rank=5),
    ]


class Live:
    """Draws a bar with how the last step went."""

    def __init__(self, console: Console, bar: Progress) -> None:
        """Take where to draw."""
        self._console, self._bar = console, bar
        self._task: TaskID = bar.add_task("building the model", total=None)

    def begin(self, plan: RunPlan) -> None:
        """Say what is about to be trained, and draw the bar."""
        self._console.print(plan_words(plan), markup=False)
        self._bar.update(self._task, total=plan.steps, completed=plan.resumed_from, description="first batch")

    def step(self, metrics: StepMetrics) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=metrics.step, metrics=metrics)

    def say(self, sentence: str) -> None:
        """Say something else, above the bar, where nothing is cut."""
        self._console.print(sentence, markup=False)
