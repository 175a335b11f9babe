"""How long calls take and how many bytes they need, on a GPU or, to try the script out, on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from varlen.runtime.clock import TrackedBytes, bytes_meter

ROUNDS = 5


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], Any], device: torch.device, *, rounds: int = ROUNDS) -> float:
    """Return the median time of a call, after two calls that warm up."""
    return side_by_side([call], device, rounds=rounds)[0]


def side_by_side(
    calls: Sequence[Callable[[], Any]], device: torch.device, *, rounds: int = ROUNDS, warm: int = 2
) -> list[float]:
    """Return the median time of each call; calls take turns, so that all meet the same moods of the machine."""
    for call in [each for each in calls for _ in range(warm)]:
        call()
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, times in zip(calls, taken):
            wait(device)
            start = time.perf_counter()
            call()
            wait(device)
            times.append(time.perf_counter() - start)
    return [median(times) for times in taken]


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """Return the most bytes of tensors that a call needs beside those that are there when it begins."""
    with bytes_meter(device) as meter:
        before = meter.live
        meter.begin_peak()
        call()
        return int(meter.peak) - (0 if isinstance(meter, TrackedBytes) else before)
