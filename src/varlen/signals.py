"""Signals that ask a process to end: schedulers' SIGTERM and SIGUSR1, and Ctrl-C."""

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

# Sent before a kill; of several at once, the first in this order counts.
SCHEDULERS = (signal.SIGTERM, signal.SIGUSR1)
INTERRUPTED = 128 + signal.SIGINT  # exit code after Ctrl-C

_GRACE_S = 10.0  # seconds until a process that has nothing to save is ended
_raised: list[Stopped] = []
_interrupted = threading.Event()
_reported = threading.Event()


class Stopped(KeyboardInterrupt):
    """A scheduler's signal asked this process to end; handlers of Ctrl-C catch it too."""

    def __init__(self, number: int, message: str = "") -> None:
        super().__init__(number, message)
        self.number, self.message = number, message

    @property
    def name(self) -> str:
        """The signal's name, such as SIGTERM."""
        return signal.Signals(self.number).name

    def __str__(self) -> str:
        return f"{self.name}; {self.message}" if self.message else self.name

    @property
    def code(self) -> int:
        """The exit code of a process that the signal ends: 143 for SIGTERM, 138 for SIGUSR1 on Linux."""
        return 128 + self.number


def ignore() -> None:
    """Ignore further signals of schedulers: this process is ending."""
    for number in SCHEDULERS:
        # Python complains about a pending signal whose handler isn't a function any more.
        signal.signal(number, _passed)
        atexit.register(signal.signal, number, signal.SIG_IGN)  # otherwise Python restores the default


def _passed(_number: int, _frame: FrameType | None) -> None:
    """Do nothing."""


def end_soon(number: int) -> Callable[[], None]:
    """End this process with a signal's exit code after a delay; return a function that cancels this.

    `Stopped` may be lost: Python drops exceptions of finalizers, and libraries hold locks.
    """
    timer = threading.Timer(_GRACE_S, _end, (number,))
    timer.daemon = True
    timer.start()
    return timer.cancel


def _end(number: int) -> None:
    if not _reported.is_set():
        message = f"varlen: stopped by {signal.Signals(number).name}; run the same command again to go on\n"
        with suppress(OSError):
            os.write(2, message.encode())
    os._exit(128 + number)


def mark_reported() -> None:
    """Record that the user was informed of the signal."""
    _reported.set()


def _stop(number: int, _frame: FrameType | None) -> None:
    ignore()
    end_soon(number)
    _raised.append(Stopped(number))
    raise _raised[0]


def last_stopped() -> Stopped | None:
    """Return the exception of `install_handlers`, even if it was caught as Ctrl-C; None if there was none."""
    return _raised[-1] if _raised else None


def install_handlers() -> None:
    """Make schedulers' signals raise `Stopped` in the main thread, unless they are ignored.

    Ctrl-C still raises `KeyboardInterrupt`, and `was_interrupted` records it.
    """
    for number in SCHEDULERS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _stop)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    # Python reports and drops exceptions of finalizers. `Stopped` and Ctrl-C are recorded, and need no report.
    report = sys.unraisablehook
    sys.unraisablehook = lambda lost: None if isinstance(lost.exc_value, KeyboardInterrupt) else report(lost)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    _interrupted.set()
    raise KeyboardInterrupt


def end_at_interrupt() -> None:
    """Let Ctrl-C end this process at once: its last message is out, and only Python's exit is left."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or there is none
            stream.flush()
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))


def was_interrupted() -> bool:
    """Whether Ctrl-C came since `install_handlers`, even if its exception was lost."""
    return _interrupted.is_set()


@contextmanager
def held_back() -> Iterator[None]:
    """Block schedulers' signals in processes that this thread starts meanwhile.

    Some schedulers signal every process of a job at once, and a trainer that saves its last steps needs its workers
    until then.
    """
    before: Any = signal.pthread_sigmask(signal.SIG_BLOCK, SCHEDULERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_main_thread() -> bool:
    """Whether this is the thread in which Python handles signals."""
    return threading.current_thread() is threading.main_thread()
