"""Seconds of work: of the host, or of the GPU between two marks in its queue, which the host runs ahead of."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """Runs from when it is made until `stop`."""

    def __init__(self, device: torch.device) -> None:
        """Begin.

        Args:
            device: whose work is measured.
        """
        self._is_gpu = device.type == "cuda"
        self._begin = self._mark()
        self._end: Any = None

    def stop(self) -> None:
        """End; on a GPU, where its queue gets to here."""
        self._end = self._mark()

    def seconds(self) -> float:
        """Return what passed; on a GPU, wait until its queue got there."""
        if self._is_gpu:
            self._end.synchronize()
            return float(self._begin.elapsed_time(self._end)) / 1000
        return float(self._end - self._begin)

    def _mark(self) -> Any:
        if not self._is_gpu:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
