"""Signals that ask a process to end: SIGTERM and SIGUSR1, which schedulers send, and Ctrl-C."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

SCHEDULERS = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send before they kill; of several that came, the first here counts."""

_PATIENCE_S = 10.0
"""How long a process that has nothing to save may take to end in good order."""
_raised: list[Stopped] = []
_interrupted = threading.Event()
_said = threading.Event()


class Stopped(KeyboardInterrupt):
    """A scheduler's signal asked this process to end. Whatever handles Ctrl-C handles it."""

    def __init__(self, number: int, said: str = "") -> None:
        """Say which, and what is kept."""
        super().__init__(number, said)
        self.number, self.said = number, said

    @property
    def name(self) -> str:
        """The signal's name, such as SIGTERM."""
        return signal.Signals(self.number).name

    def __str__(self) -> str:
        """Return both."""
        return f"{self.name}; {self.said}" if self.said else self.name

    @property
    def code(self) -> int:
        """The exit code of a process that the signal ends: 143 for SIGTERM, 138 for SIGUSR1 on Linux."""
        return 128 + self.number


def ignore() -> None:
    """Let further signals of schedulers pass: this process ends already."""
    for number in SCHEDULERS:
        # Python complains where a signal has come whose handler isn't a function any more.
        signal.signal(number, _passed)
        atexit.register(
            signal.signal, number, signal.SIG_IGN
        )  # else the end of Python brings back the default


def _passed(_number: int, _frame: FrameType | None) -> None:
    """Do nothing."""


def end_soon(number: int) -> Callable[[], None]:
    """End this process by a signal's exit code in a while, whatever it does then; returns what takes that back.

    `Stopped` may be lost: Python drops what is raised in a finalizer, and libraries hold locks of their own.
    """
    timer = threading.Timer(_PATIENCE_S, _end, (number,))
    timer.daemon = True
    timer.start()
    return timer.cancel


def _end(number: int) -> None:
    if not _said.is_set():
        said = f"varlen: stopped by {signal.Signals(number).name}; the same command goes on\n"
        with suppress(OSError):
            os.write(2, said.encode())
    os._exit(128 + number)


def is_said() -> None:
    """Note that whoever watches knows of the signal."""
    _said.set()


def _stop(number: int, _frame: FrameType | None) -> None:
    ignore()
    end_soon(number)
    _raised.append(Stopped(number))
    raise _raised[0]


def last_stopped() -> Stopped | None:
    """Return what `raise_stopped` had raised, also where somebody has caught it as Ctrl-C; None for nothing."""
    return _raised[-1] if _raised else None


def raise_stopped() -> None:
    """Have the first signal of a scheduler raise `Stopped` in the main thread; those that are ignored stay so.

    Ctrl-C raises `KeyboardInterrupt` as before, and `was_interrupted` remembers it.
    """
    for number in SCHEDULERS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _stop)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    # Python reports an exception of a finalizer and drops it. These two are remembered, and need no report.
    report = sys.unraisablehook
    sys.unraisablehook = lambda lost: None if isinstance(lost.exc_value, KeyboardInterrupt) else report(lost)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    _interrupted.set()
    raise KeyboardInterrupt


def was_interrupted() -> bool:
    """Return whether Ctrl-C came since `raise_stopped`, also where its exception was lost."""
    return _interrupted.is_set()


@contextmanager
def held_back() -> Iterator[None]:
    """Hold back signals of schedulers from the processes that this thread starts meanwhile.

    Some schedulers signal every process of a job at once, and a trainer that is to save its last steps needs its
    workers until then.
    """
    before: Any = signal.pthread_sigmask(signal.SIG_BLOCK, SCHEDULERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_main_thread() -> bool:
    """Return whether this thread is the one in which Python handles signals."""
    return threading.current_thread() is threading.main_thread()
