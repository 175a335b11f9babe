"""A resource that is released once, explicitly or by garbage collection."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class Resource:
    """Releases a resource once, explicitly or when garbage collected.

    It pickles to None: the process that made the resource outlives those that use it, and releases it.
    """

    def __init__(self, end: Callable[..., None], *given: Any) -> None:
        self._end = weakref.finalize(self, end, *given)

    def release(self) -> None:
        """Release the resource; later calls do nothing."""
        self._end()

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> None:
    return None
