"""Compile kernels with numba, lazily, in a way that can't fail because a folder is read-only.

`VARLEN_JIT=0` runs the plain-Python references instead of the kernels: slower by a factor of 100 to 1,000,
and the same results. numba itself is imported by the first kernel call, never by `import varlen`.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

_log = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def is_enabled() -> bool:
    """Return whether kernels are compiled; False where the environment says `VARLEN_JIT=0`."""
    return os.environ.get("VARLEN_JIT", "1") != "0"


def kernel(room: str, file: str, name: str) -> Callable[..., Any]:
    """Return a kernel by name, compiled, or its plain-Python reference where kernels are switched off.

    Args:
        room: the room's full name, such as "varlen.pack".
        file: the file within the room that holds the kernel.
        name: the kernel's name, the same in the room's `reference.py`.
    """
    home = file if is_enabled() else "reference"
    return getattr(importlib.import_module(f"{room}.{home}"), name)  # type: ignore[no-any-return]


def compiled(function: _Function) -> _Function:
    """Compile a kernel on its first call, and keep the machine code on disk where that is possible.

    numba looks for a folder it can write: beside the source, then in the user's cache folder. Where
    neither can be written (a read-only install run by a user without a home), the kernel is compiled
    once a process instead; a cache that breaks later (a full disk) is left aside in the same way.

    The GIL is released while the kernel runs.
    """
    import numba

    kernel = numba.njit(nogil=True, error_model="numpy")(function)
    try:
        kernel.enable_caching()
    except RuntimeError:
        _log.info("no folder can hold compiled kernels; %s is compiled once a process", function.__name__)
        return kernel  # type: ignore[no-any-return]
    kernel._cache.save_overload = _forgiving(kernel._cache.save_overload)
    return kernel  # type: ignore[no-any-return]


def _forgiving(save: Callable[..., None]) -> Callable[..., None]:
    """Wrap numba's cache writer so that a full or vanished disk costs a log line, not the call."""

    def save_or_log(*arguments: Any) -> None:
        try:
            save(*arguments)
        except OSError as error:
            _log.info("a compiled kernel could not be kept on disk: %s", error)

    return save_or_log
