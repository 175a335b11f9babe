"""Compile kernels with numba, lazily, in a way that can't fail because a folder is read-only.

`VARLEN_JIT=0` runs the plain-Python references instead of the kernels: slower by a factor of 10 to 1,000,
and the same results. numba itself is imported by the first kernel call that is worth it, never by
`import varlen`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

from varlen import kernel_cache

_log = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])


PATIENCE_S = 0.5
"""Seconds that a process packs by references before numba is worth its import, which takes about as long."""

_in_python: ContextVar[bool] = ContextVar("varlen_in_python", default=False)
_spent_s = 0.0


def is_enabled() -> bool:
    """Return whether kernels are compiled; False where the environment says `VARLEN_JIT=0`."""
    return os.environ.get("VARLEN_JIT", "1") != "0"


def load() -> None:
    """Import numba now, in a process that will need it, while it waits for something else."""
    if is_enabled():
        _apart(importlib.import_module, "numba")


def _apart(call: Callable[..., Any], *arguments: Any) -> Any:
    """Import or compile in a thread of its own, so that Ctrl-C interrupts the wait for it and not the work.

    What is imported or registered by half can't be done again in the same process.
    """
    if threading.current_thread() is not threading.main_thread():
        return call(*arguments)
    results: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call(*arguments))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="varlen compiles", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


@contextmanager
def sized(expected_s: float) -> Iterator[None]:
    """Within this block, do small work by the references as long as numba isn't loaded; the results are the same.

    So a script that packs some documents never waits for the compiler. `VARLEN_JIT=1` compiles whatever the
    size.

    Args:
        expected_s: what the references take for it, at most.
    """
    global _spent_s
    loaded = "numba" in sys.modules or "VARLEN_JIT" in os.environ
    small = not loaded and _spent_s + expected_s <= PATIENCE_S
    token, begun = _in_python.set(small), time.perf_counter()
    try:
        yield
    finally:
        _in_python.reset(token)
        if small:
            _spent_s += min(time.perf_counter() - begun, expected_s)


def kernel(room: str, file: str, name: str) -> Callable[..., Any]:
    """Return a kernel by name, compiled, or its plain-Python reference where kernels are switched off.

    `VARLEN_JIT` is read when a kernel is first asked for.

    Args:
        room: the room's full name, such as "varlen.pack".
        file: the file within the room that holds the kernel.
        name: the kernel's name, the same in the room's `reference.py`.
    """
    return _found(room, "reference" if _in_python.get() else file, name)


@functools.cache
def _found(room: str, file: str, name: str) -> Callable[..., Any]:
    home = file if is_enabled() else "reference"
    if home == "reference":
        return getattr(importlib.import_module(f"{room}.{home}"), name)  # type: ignore[no-any-return]
    return _interruptible(getattr(_apart(importlib.import_module, f"{room}.{home}"), name))


def _interruptible(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Let what a signal raises during a call leave it as it is.

    numba calls Python to load, box and unbox. What a signal's handler raises there, such as KeyboardInterrupt, comes
    out of numba's own code as SystemError ("returned a result with an exception set"), whose cause it is. The first
    call, which compiles the kernel or loads it from disk, is made apart.
    """
    is_compiled = False

    @functools.wraps(kernel)
    def called(*arguments: Any) -> Any:
        nonlocal is_compiled
        try:
            if is_compiled:
                return kernel(*arguments)
            result = _apart(kernel, *arguments)
            is_compiled = True
            return result
        except SystemError as error:
            raised: BaseException | None = error
            while isinstance(raised, SystemError):
                raised = raised.__cause__ or raised.__context__
            if raised is None:
                raise
        raise raised

    return called


def compiled(function: _Function) -> _Function:
    """Compile a kernel on its first call, and keep the machine code on disk where that is possible.

    It is kept beside the source, or in the user's cache folder, or in a folder of the user's own, whichever can be
    written by this user and by nobody else (see `kernel_cache`). A cache that breaks later (a full disk, a file cut
    short) is left aside or begun anew: it costs time and a log line, never the call.

    The GIL is released while the kernel runs.

    Args:
        function: the kernel in plain Python; it takes and returns arrays and numbers.

    Returns:
        The kernel, called as `function` is. `function` itself under `NUMBA_DISABLE_JIT=1`, which runs
        kernels in Python for a debugger.
    """
    import numba

    # Kernels are called from Python alone and hold no array expressions; leaving out what serves those saves
    # a fifth of the compile time.
    options: Any = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, "no_rewrites": True}
    kernel: Any = numba.njit(**options)(function)
    if kernel is not function:
        if kernel_cache.keep(kernel, inspect.getfile(function)):
            _forgive(kernel._cache)
        else:
            _log.info("no folder can hold compiled kernels; %s is compiled once a process", function.__name__)
    return cast(_Function, kernel)


def inlined(function: _Function) -> _Function:
    """Compile a part of a kernel into each kernel of its file that calls it.

    Worth it where it takes many arrays and does little with them: a call costs more than the work then.

    Args:
        function: as for `compiled`.
    """
    import numba

    return cast(_Function, numba.njit(inline="always", error_model="numpy")(function))


def _forgive(cache: Any) -> None:
    """Let a numba cache miss where it would raise."""
    load, save = cache.load_overload, cache.save_overload

    def load_or_miss(*arguments: Any) -> Any:
        try:
            return load(*arguments)
        except Exception as error:  # a damaged file can raise almost anything when it is unpickled
            _log.info("a compiled kernel could not be read from disk: %r; compiling it again", error)
            try:
                cache.flush()
            except OSError:
                cache.disable()
            return None

    def save_or_log(*arguments: Any) -> None:
        try:
            save(*arguments)
        except OSError as error:
            _log.info("a compiled kernel could not be kept on disk: %r", error)

    cache.load_overload, cache.save_overload = load_or_miss, save_or_log
