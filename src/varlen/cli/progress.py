"""Progress on standard error: one line on a terminal that fits its width, a line every tenth of the way in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task
from rich.table import Table
from rich.text import Text

from varlen.errors import MissingExtraError

OnProgress = Callable[[int, int, str], None]
_BAR = 24
_GAP = 2
_SPINNER = 2
_LEAST = 12
"""Columns of words that are cut, at least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A few words of a line, and how much they matter."""

    words: str
    rank: int
    """Where there is no room, those of the highest ranks are left out; those of rank 0 never."""
    style: str = ""
    may_be_cut: bool = False
    """Whether its beginning says something by itself."""


def fitted(parts: list[Part], width: int) -> list[Part]:
    """Return the parts that a line has room for, in their order.

    >>> words = [Part(words="step 7", rank=0), Part(words="1.00 % waiting", rank=2), Part(words="left 0:01", rank=1)]
    >>> [part.words for part in fitted(words, 20)]
    ['step 7', 'left 0:01']
    """
    there = [part for part in parts if part.words]
    room = width
    shown: dict[int, Part] = {}
    for index in sorted(range(len(there)), key=lambda index: there[index].rank):
        part, gap = there[index], _GAP if shown else 0
        needed = cell_len(part.words) + gap
        if part.rank and needed > room:
            if part.may_be_cut and room - gap >= _LEAST:
                shown[index] = replace(part, words=set_cell_size(part.words, room - gap - 1).rstrip() + "…")
            break  # what matters less doesn't take the place of what matters more
        room -= needed
        shown[index] = part
    return [shown[index] for index in sorted(shown)]


class FittedLine(ProgressColumn):
    """A spinner, a bar where there is room, and such words as fit; more words in a line below."""

    def __init__(
        self,
        console: Console,
        words: Callable[[Task], list[Part]],
        below: Callable[[Task], list[Part]] | None = None,
    ) -> None:
        """Take where it is drawn, what it says of a task, and what it says in the line below."""
        super().__init__()
        self._console, self._words, self._below = console, words, below
        self._spinner, self._bar = SpinnerColumn(), BarColumn(bar_width=_BAR)

    def render(self, task: Task) -> RenderableType:
        """Draw the line, or both."""
        room = self._console.width - _SPINNER - 1
        parts = self._words(task)
        shown = fitted(parts, room)
        used = sum(cell_len(part.words) + _GAP for part in shown)
        line = Table.grid(padding=(0, _GAP, 0, 0))
        cells = [Text(part.words, style=part.style, no_wrap=True, overflow="ellipsis") for part in shown]
        has_bar = len(shown) == sum(bool(part.words) for part in parts) and used + _BAR <= room
        line.add_row(self._spinner.render(task), *([self._bar.render(task)] if has_bar else []), *cells)
        more = [] if self._below is None else fitted(self._below(task), room)
        if not more:
            return line
        words = (" " * _GAP).join(part.words for part in more)
        return Group(line, Text(" " * (_SPINNER + 1) + words, no_wrap=True))


def clock(seconds: float | None) -> str:
    """Write a time as h:mm:ss, or dashes for none.

    >>> clock(3_725.4), clock(None)
    ('1:02:05', '-:--:--')
    """
    if seconds is None:
        return "-:--:--"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


@contextmanager
def progress() -> Iterator[OnProgress]:
    """Yield a function to call with the work done, all work, and what is going on."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _log_lines(console)
        return
    with Progress(FittedLine(console, _parts), console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total, description=text)

        yield show


def _parts(task: Task) -> list[Part]:
    return [
        Part(words=f"{task.percentage:3.0f} %" if task.total else "", rank=0),
        Part(words=f"left {clock(task.time_remaining)}" if task.total else "", rank=1),
        Part(words=task.description, rank=2, style="dim", may_be_cut=True),
        Part(words=f"{clock(task.finished_time if task.finished else task.elapsed)} so far", rank=3),
    ]


def _log_lines(console: Console) -> OnProgress:
    last_tenth, last_text = -1, ""

    def write(done: int, total: int, text: str) -> None:
        nonlocal last_tenth, last_text
        tenth = 10 * done // max(total, 1)
        if tenth > last_tenth or text != last_text:
            last_tenth, last_text = tenth, text
            console.print(f"{10 * tenth:3} %  {text}", markup=False)

    return write


# What some verbs need beyond a plain installation, and the sentence that says how to get it.


def wide_console() -> Console:
    """Return a console on standard output; in a file or pipe, wide enough for tables."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


def require_training(verb: str, does: str = "trains a model") -> None:
    """Refuse to start without the packages that train."""
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"varlen {verb} {does} and needs {' and '.join(missing)}, not installed here; "
            'run: pip install "varlen[train]"'
        )
