"""Two functions in one process whose calls of the file system are interleaved as a test says."""

import fcntl
import io
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

OF_OS = "stat lstat open mkdir rmdir unlink rename replace listdir scandir readlink"
CALLS = [*((os, name) for name in OF_OS.split()), (io, "open"), (fcntl, "flock")]


class _Turns:
    """Decides before every call of the file system which of two threads goes on."""

    def __init__(self, turns: Iterable[int]) -> None:
        self._turns = iter(turns)
        self._changed = threading.Condition()
        self._name = threading.local()
        self._running = [True, True]
        self._whose, self._left = 0, next(self._turns, None)

    def run(self, name: int, function: Callable[[], Any], results: list[Any]) -> None:
        """Run a function when it is its turn, and keep its result or its exception."""
        self._name.of = name
        self._wait(name)
        try:
            results[name] = function()
        except Exception as error:
            results[name] = error
        finally:
            with self._changed:
                self._running[name], self._whose = False, 1 - name
                self._changed.notify_all()

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self._before_call()
            return function(*arguments, **named)

        return call

    def _before_call(self) -> None:
        """Count a call of the thread whose turn it is, and hand over where its turn ends."""
        name = getattr(self._name, "of", None)  # None in threads that one of the two started
        if name is None:
            return
        with self._changed:
            if self._left == 0 and self._running[1 - name]:
                self._whose, self._left = 1 - name, next(self._turns, None)
                self._changed.notify_all()
            elif self._left:
                self._left -= 1
        self._wait(name)

    def _wait(self, name: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._whose == name)


def interleaved(first: Callable[[], Any], second: Callable[[], Any], turns: Iterable[int]) -> list[Any]:
    """Run two functions, which change places after as many calls of the file system as `turns` says in turn.

    Returns their results, or exceptions. When the turns are used up, whoever runs then runs to its end.
    """
    order = _Turns(turns)
    results: list[Any] = [None, None]
    threads = [
        threading.Thread(target=order.run, args=(name, function, results), daemon=True)
        for name, function in enumerate((first, second))
    ]
    with pytest.MonkeyPatch.context() as patched:
        for module, name in CALLS:
            patched.setattr(module, name, order.counted(getattr(module, name)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "two functions wait for each other"
    return results
