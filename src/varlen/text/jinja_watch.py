"""Watch what runs programs of strangers: one that computes for long, or takes much memory, is stopped, in any thread.

A thread looks several times a second at what runs, and raises an exception in a thread whose program is over its
limit. Beside that, programs say what they make (`account`), so that a few large values don't wait for the next look.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident
from typing import TypeVar

Result = TypeVar("Result")

LONGEST_S = 10.0
"""Seconds of computing after which a program is stopped."""
_LONGEST_WALL_S = 40.0
"""The same where other threads take the processor meanwhile."""
MOST_BYTES = 2**29
"""Memory by which the process may grow while a program runs; with several of them, each may take so much."""
_LOOK_S = 0.1
_LONGEST_LOOK_S = 1.0
"""A look that comes later than that came late for another reason, such as a process that was halted."""
_IDLE_LOOKS = 100
_ACCOUNT_BYTES = 2**26
"""What programs make between two looks at the memory."""
_MOST_OVERDUE = 3
"""How often a program may be stopped for its time before it isn't run again."""
_SLOW_S = 0.5
_MOST_SLOW_S = 30.0
"""Seconds of its slow runs together after which a program isn't run again, if its runs are slow in the mean."""


class StoppedError(BaseException):
    """A program was stopped; no handler of errors within it is to go on."""


class Run:
    """One run of a program."""

    why = ""
    """Why it is stopped, once it is."""
    is_overdue = False
    is_compiling = False
    """It computes nothing yet but what is constant."""
    made = 0
    looked = 0
    grown_from: int | None = None
    began: float | None = None
    waited = 0.0
    known: dict[int, tuple[object, int, int]] | None = None
    """Containers that it made, and how much stands in each."""


_running: dict[int, Run] = {}
_overdue: Counter[str] = Counter()
"""How often each program was stopped for its time."""
_runs: Counter[str] = Counter()
_slow_s: dict[str, float] = {}
"""How often each program was run, and seconds of computing of its slow runs."""
_lock = threading.Lock()
_watcher: threading.Thread | None = None


def current() -> Run | None:
    """Return the run of this thread."""
    return _running.get(get_ident())


def watched(program: str, call: Callable[..., Result], *arguments: object) -> Result:
    """Run a program of a stranger."""
    if _watcher is None:
        _begin()
    if _overdue and _overdue[program] >= _MOST_OVERDUE:
        raise StoppedError(
            f"it was stopped {_MOST_OVERDUE} times after {LONGEST_S:.0f} s of computing, and isn't run again"
        )
    if _slow_s and (slow_s := _slow_s.get(program, 0.0)) > max(_MOST_SLOW_S, _SLOW_S * _runs[program]):
        raise StoppedError(
            f"{_runs[program]:,} runs of it took {slow_s:.0f} s of computing; {_MOST_SLOW_S:.0f} s at most where a "
            f"run takes over {_SLOW_S} s in the mean, and it isn't run again"
        )
    ident = get_ident()
    if ident in _running:
        return call(*arguments)
    run, began = Run(), time.thread_time()
    try:
        _running[ident] = run
        try:
            return call(*arguments)
        finally:
            del _running[ident]
            if run.why:
                _settle(ident)
    except StoppedError as error:  # it may come anywhere above
        _running.pop(ident, None)
        _settle(ident)
        if run.is_overdue:
            _overdue[program] += 1
        raise StoppedError(run.why or str(error)) from None
    finally:
        _runs[program] += 1
        if (took := time.thread_time() - began) > _SLOW_S:
            _slow_s[program] = _slow_s.get(program, 0.0) + took


def account(size: int) -> None:
    """Say that the program of this thread has made something large."""
    run = _running.get(get_ident())
    if run is None:
        return
    run.made += size
    if run.grown_from is None:
        run.grown_from = _memory() - size
    if run.made - run.looked > _ACCOUNT_BYTES:
        run.looked = run.made
        if why := _too_large(run):
            raise StoppedError(why)


def _too_large(run: Run) -> str:
    grown = _memory() - (run.grown_from or 0)
    if grown <= MOST_BYTES * max(len(_running), 1):
        return ""
    return f"it takes {grown / 1e6:,.0f} MB of memory; {MOST_BYTES / 1e6:,.0f} MB at most"


def _settle(ident: int) -> None:
    """Take back an exception that was raised in this thread and hasn't come yet."""
    while True:
        try:
            with _lock:
                _raise_in(ident, None)
            return
        except StoppedError:
            continue


def _raise_in(ident: int, error: type[BaseException] | None) -> None:
    import ctypes

    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), raised)


def _begin() -> None:
    """Start the thread that looks."""
    global _watcher
    with _lock:
        if _watcher is None:
            _watcher = threading.Thread(target=_watch, name="varlen watches programs", daemon=True)
            _watcher.start()


def _forked() -> None:
    """Begin anew in a fork, where there is no such thread."""
    global _watcher, _lock
    _watcher, _lock = None, threading.Lock()
    _running.clear()


os.register_at_fork(after_in_child=_forked)


def _watch() -> None:
    global _watcher
    last, idle = time.monotonic(), 0
    while idle < _IDLE_LOOKS:
        time.sleep(_LOOK_S)
        now = time.monotonic()
        passed, last = min(now - last, _LONGEST_LOOK_S), now
        idle = 0 if _running else idle + 1
        for ident, run in list(_running.items()):
            _look(ident, run, passed)
    _watcher = None  # the next program starts another one


def _look(ident: int, run: Run, passed: float) -> None:
    with _lock:
        if _running.get(ident) is not run:
            return
        computed = _computed(ident)
        if run.began is None:  # it may have run for one look already
            run.began = computed
            if run.grown_from is None:
                run.grown_from = _memory()
            return
        run.waited += passed
        if not run.why:
            run.is_overdue = computed - run.began > LONGEST_S or run.waited > _LONGEST_WALL_S
            run.why = (
                f"it computes for more than {min(LONGEST_S, run.waited):.0f} s; {LONGEST_S:.0f} s at most"
                if run.is_overdue
                else _too_large(run)
            )
        if run.why and _running.get(ident) is run:
            _raise_in(ident, StoppedError)


def _computed(ident: int) -> float:
    """Return the seconds that a thread has computed; where the system can't tell, the time."""
    if hasattr(time, "pthread_getcpuclockid"):
        with suppress(OSError):
            return time.clock_gettime(time.pthread_getcpuclockid(ident))
    return time.monotonic()


def _memory() -> int:
    """Return the bytes that this process holds; where the system can't tell, the most that it held."""
    try:
        # No file object, which a thread that is stopped in the midst would leave open, with a warning.
        place = os.open("/proc/self/statm", os.O_RDONLY)
        try:
            return int(os.read(place, 128).split()[1]) * os.sysconf("SC_PAGE_SIZE")
        finally:
            os.close(place)
    except (OSError, ValueError, IndexError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
