"""Ctrl-C: the first asks the run to stop where a step ends, a second one, later, stops it at once."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_AT_ONCE_S = 1.0
"""A terminal and torchrun both hand on the same Ctrl-C; signals within this time are one."""


class Interrupt:
    """Within it, SIGINT is a wish, read in `asked`; outside, it is what it was."""

    def __init__(self) -> None:
        self.asked = False
        self._first_s = 0.0
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        """Take the signal over, where that is possible: in the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._heard)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back."""
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _heard(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked and time.monotonic() - self._first_s > _AT_ONCE_S:
            raise KeyboardInterrupt
        if not self.asked:
            self.asked, self._first_s = True, time.monotonic()
