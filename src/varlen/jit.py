"""Compile kernels with numba, lazily, in a way that can't fail because a folder is read-only.

`VARLEN_JIT=0` runs the kernels' own source in Python: slower by a factor of 10 to 1,000, with the same results.
numba itself is imported by the first kernel call that is worth it, never by `import varlen`.
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
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast, overload

import numpy as np

from varlen import kernel_cache

_log = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])


PYTHON_BUDGET_S = 0.5  # a process runs kernels in Python for at most this long before it imports numba

_in_python: ContextVar[bool] = ContextVar("varlen_in_python", default=False)
_spent_s = 0.0


_is_enabled = os.environ.get("VARLEN_JIT", "1") != "0"


def is_enabled() -> bool:
    """Whether kernels are compiled; False if `VARLEN_JIT=0` was set at import."""
    return _is_enabled


def in_python() -> bool:
    """Whether a kernel called now runs in Python."""
    return _in_python.get() or not _is_enabled


def load() -> None:
    """Import numba in advance, while the process waits for something else."""
    if is_enabled():
        _apart(importlib.import_module, "numba")


def _apart(call: Callable[..., Any], *arguments: Any) -> Any:
    """Import or compile in a separate thread, so that Ctrl-C interrupts the wait but not the work.

    A half-finished import or registration can't be repeated in the same process.
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
    """Within this context, run small work in Python unless numba is loaded; the results are the same.

    So a script that packs a few documents never waits for the compiler. `VARLEN_JIT=1` compiles whatever the size.
    """
    global _spent_s
    loaded = "numba" in sys.modules or "VARLEN_JIT" in os.environ
    small = not loaded and _spent_s + expected_s <= PYTHON_BUDGET_S
    token, begun = _in_python.set(small), time.perf_counter()
    try:
        yield
    finally:
        _in_python.reset(token)
        if small:
            _spent_s += min(time.perf_counter() - begun, expected_s)


_kernels: defaultdict[str, dict[str, _Kernel]] = defaultdict(dict)  # kernels of each module, by name


class _Kernel:
    """A named kernel: a call compiles it, or runs its source in Python.

    Numba and plain Python each get a copy of the kernel's module in which the names of other kernels are bound to
    their compiled or plain functions.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        in_python: Callable[..., Any] | None = None,
        is_inlined: bool = False,
    ) -> None:
        functools.update_wrapper(self, function)
        self.name = function.__name__
        self.function, self.python_form, self.is_inlined = function, in_python, is_inlined
        self.dispatcher: Any = None  # numba's, after the first call
        self._is_compiled = False
        _kernels[self.__module__][self.name] = self

    def __call__(self, *arguments: Any) -> Any:
        # Called thousands of times a second, where microseconds count: the first call's work is in `_first`.
        if not self._is_compiled or _in_python.get() or not _is_enabled:
            return self._first(arguments)
        try:
            return self.dispatcher(*arguments)
        except SystemError as error:
            raise _cause_of(error) from None

    def _first(self, arguments: tuple[Any, ...]) -> Any:
        """Run the source in Python, or compile the kernel (or load it from disk) and run it."""
        if in_python():
            with np.errstate(over="ignore"):  # hashes wrap around
                return _boxed(_functions(self.__module__, compiled=False)[self.name](*arguments))
        if self.dispatcher is None:
            names = _apart(functools.partial(_functions, compiled=True), self.__module__)
            self.dispatcher = names[self.name]
        try:
            result = _apart(self.dispatcher, *arguments)
        except SystemError as error:
            raise _cause_of(error) from None
        self._is_compiled = True
        return result


def _cause_of(error: SystemError) -> BaseException:
    """Return what a signal handler raised during a kernel call, such as KeyboardInterrupt.

    numba calls Python to load, box and unbox. An exception raised there leaves numba's code as a SystemError
    ("returned a result with an exception set") with the exception as its cause.
    """
    raised: BaseException | None = error
    while isinstance(raised, SystemError):
        raised = raised.__cause__ or raised.__context__
    return raised or error


def _boxed(result: Any) -> Any:
    """Convert NumPy scalars to Python numbers, as numba does."""
    if isinstance(result, np.generic):
        return result.item()
    if type(result) is tuple:
        return tuple(map(_boxed, result))
    return result


@functools.cache
def _functions(module: str, *, compiled: bool) -> dict[str, Any]:
    """Return the namespace of a module with all its kernels rebuilt, so that they call each other directly."""
    kernels = _kernels[module]
    names = dict(next(iter(kernels.values())).function.__globals__)
    for name, kernel in kernels.items():
        function = kernel.function
        copy = types.FunctionType(function.__code__, names, name, function.__defaults__)
        names[name] = _dispatcher(copy, kernel.is_inlined) if compiled else kernel.python_form or copy
    return names


def _dispatcher(function: types.FunctionType, is_inlined: bool) -> Any:
    """Return numba's dispatcher of a kernel; it compiles on its first call."""
    import numba

    if is_inlined:
        return numba.njit(inline="always", error_model="numpy")(function)
    # Kernels are called only from Python and contain no array expressions; without the options for those, compiling
    # takes a fifth less time.
    options: Any = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, "no_rewrites": True}
    made: Any = numba.njit(**options)(function)
    if made is not function:  # equal under NUMBA_DISABLE_JIT=1, which runs kernels in Python for a debugger
        if kernel_cache.keep(made, inspect.getfile(function)):
            _forgive(made._cache)
        else:
            _log.info("no folder can hold compiled kernels; each process compiles %s", function.__name__)
    return made


@overload
def compiled(function: _Function) -> _Function: ...
@overload
def compiled(*, in_python: Callable[..., Any]) -> Callable[[_Function], _Function]: ...
def compiled(function: Any = None, *, in_python: Callable[..., Any] | None = None) -> Any:
    """Make a function a kernel, which is compiled on its first call.

    Machine code is cached on disk if possible: beside the source, or in the user's cache folder, or in a private
    folder, whichever only this user can write (see `kernel_cache`). A cache that breaks later (a full disk, a
    truncated file) is ignored or rebuilt: that costs time and a log line, but doesn't fail.

    The GIL is released while the kernel runs. Under `VARLEN_JIT=0` and within `sized`, its source runs in Python.
    """
    if function is None:
        return functools.partial(_Kernel, in_python=in_python)
    return _Kernel(function)


def inlined(function: _Function) -> _Function:
    """Inline a function into each kernel of its file that calls it.

    Worthwhile for functions that take many arrays and do little: a call would cost more than the work.
    """
    return cast(_Function, _Kernel(function, is_inlined=True))


def _forgive(cache: Any) -> None:
    """Make a numba cache report a miss instead of raising."""
    load, save = cache.load_overload, cache.save_overload

    def load_or_miss(*arguments: Any) -> Any:
        try:
            return load(*arguments)
        except Exception as error:  # unpickling a damaged file can raise almost anything
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
