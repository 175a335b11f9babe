"""A resource that is released once, on request or when the last reference to it is gone."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class Held:
    """Releases a resource on request, or when it is garbage collected.

    It pickles to None: the process that made the resource outlives those that use it, and releases it alone.
    """

    def __init__(self, end: Callable[..., None], *given: Any) -> None:
        """Take the function that releases the resource."""
        self._end = weakref.finalize(self, end, *given)

    def release(self) -> None:
        """Release the resource now; later calls do nothing."""
        self._end()

    def __reduce__(self) -> Any:
        """Pickle to None."""
        return _nothing, ()


def _nothing() -> None:
    return None
