"""Signals that end a run: Ctrl-C, and SIGTERM and SIGUSR1 of schedulers.

While a run is built, they end it at once: nothing has been trained. From the first step on, they ask it to stop where
a step ends; a second Ctrl-C, later, stops it at once.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

from varlen.signals import SCHEDULERS, Stopped, end_soon, is_main_thread

_AT_ONCE_S = 1.0
"""A terminal and torchrun both hand on the same Ctrl-C; signals within this time are one."""
_ORDER = (*SCHEDULERS, signal.SIGINT)


class Interrupt:
    """Within it, signals that end a run are a wish, read in `asked`; outside, they are what they were."""

    def __init__(self) -> None:
        self.asked = 0
        """The signal that came first; 0 for none."""
        self._defers = False
        self._first_s = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._take_back: Callable[[], None] = lambda: None

    def __enter__(self) -> Interrupt:
        """Take the signals over, where that is possible: in the main thread, and those that aren't ignored."""
        if is_main_thread():
            for number in _ORDER:
                before = signal.getsignal(number)
                if before is not signal.SIG_IGN and before is not None:
                    self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give them back; what a signal has raised has arrived."""
        self._take_back()
        for number, before in self._before.items():
            signal.signal(number, before)

    def defer(self) -> None:
        """Note signals from now on, until a step ends; one that came before and was lost is among them."""
        self._defers = True
        self._take_back()

    def _heard(self, number: int, _frame: FrameType | None) -> None:
        is_first, self.asked = not self.asked, self.asked or number
        if is_first:
            self._first_s = time.monotonic()
            if not self._defers:
                if number != signal.SIGINT:
                    self._take_back = end_soon(number)
                raise raised(number)
        elif number == signal.SIGINT and time.monotonic() - self._first_s > _AT_ONCE_S:
            raise KeyboardInterrupt


def agreed(asked: Iterable[float]) -> int:
    """Return the one signal that all ranks follow; 0 where none has come.

    Args:
        asked: of each rank, `Interrupt.asked`.
    """
    came = set(map(int, asked))
    return next((number for number in _ORDER if number in came), 0)


def raised(number: int, said: str = "") -> KeyboardInterrupt:
    """Return what ends a run by a signal.

    Args:
        number: of the signal.
        said: what is kept, in words.
    """
    if number == signal.SIGINT:
        return KeyboardInterrupt(*([said] if said else []))
    return Stopped(number, said)
