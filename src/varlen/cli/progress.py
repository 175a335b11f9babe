"""Progress on standard error: a live bar on a terminal, a line every tenth of the way in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

OnProgress = Callable[[int, int, str], None]


@contextmanager
def progress() -> Iterator[OnProgress]:
    """Give a function to call with the work done, all work, and what is going on."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _log_lines(console)
        return
    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=32),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", style="dim"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total, description=text)

        yield show


def _log_lines(console: Console) -> OnProgress:
    last_tenth, last_text = -1, ""

    def write(done: int, total: int, text: str) -> None:
        nonlocal last_tenth, last_text
        tenth = 10 * done // max(total, 1)
        if tenth > last_tenth or text != last_text:
            last_tenth, last_text = tenth, text
            console.print(f"{10 * tenth:3} %  {text}", markup=False)

    return write
