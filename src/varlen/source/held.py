"""What keeps rows that were given in memory readable as a file, as long as somebody holds it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class Held:
    """Ends by itself when nobody holds it any more.

    In another process, which it is handed to, it is nothing: the process that handed it on outlives that one.
    """

    def __init__(self, end: Callable[..., None], *given: Any) -> None:
        """Hold.

        Args:
            end: called once, when it is let go of.
            given: to that.
        """
        self._end = weakref.finalize(self, end, *given)

    def release(self) -> None:
        """Let go of it."""
        self._end()

    def __reduce__(self) -> Any:
        """Be None elsewhere."""
        return _nothing, ()


def _nothing() -> None:
    return None
