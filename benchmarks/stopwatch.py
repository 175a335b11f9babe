"""Time two contestants in alternating rounds (A B A B), so that both meet the same moods of the machine."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from statistics import median

BLOCK_S = 0.02
"""A call shorter than this is repeated back to back until the block takes as long; a sample is the mean."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Samples:
    """Seconds a call took in each round, by the clock on the wall and by the process's processor time."""

    wall_s: list[float]
    cpu_s: list[float]

    @property
    def median_s(self) -> float:
        """The middle of the wall-clock times, in seconds."""
        return median(self.wall_s)


def alternate(ours: Call, peer: Call, *, rounds: int) -> tuple[Samples, Samples]:
    """Run both calls once unmeasured, then measure them in turns, on one core; afterwards all are free again.

    What stands in memory by then is frozen for the garbage collector, and automatic collection is off, as in
    `timeit`. Both help the peers: they make many Python objects, and one of them calls `gc.collect()` itself.

    Args:
        ours: varlen's call.
        peer: the other's call, on the same input.
        rounds: measurements of each.

    Returns:
        Both contestants' samples; sample i of one was taken right beside sample i of the other.
    """
    with _one_core():
        calls = (ours, peer)
        repeats = [_repeats(call) for call in calls]
        samples = (Samples([], []), Samples([], []))
        gc.collect()
        gc.freeze()
        gc.disable()
        for _ in range(rounds):
            for call, repeat, taken in zip(calls, repeats, samples):
                wall, cpu = _block(call, repeat)
                taken.wall_s.append(wall)
                taken.cpu_s.append(cpu)
                gc.collect()
        gc.enable()
        gc.unfreeze()
    return samples


@contextmanager
def _one_core() -> Iterator[None]:
    """Keep the process on one core meanwhile, with one thread in the libraries that would start more."""
    cores: set[int] = set()
    with suppress(AttributeError, OSError):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(cores)})
    with suppress(ImportError):
        import pyarrow as pa

        pa.set_cpu_count(1)
    with suppress(ImportError):
        import torch

        torch.set_num_threads(1)
    try:
        yield
    finally:
        if cores:  # processes that are started later begin where this one may run
            os.sched_setaffinity(0, cores)


def _repeats(call: Call) -> int:
    """Warm a call up, and return how often it fits into a block."""
    wall, _ = _block(call, 1)
    if wall < 1.0:  # a longer call needs no second one to be known as longer than a block
        wall, _ = _block(call, 1)
    return max(1, round(BLOCK_S / wall))


def _block(call: Call, repeat: int) -> tuple[float, float]:
    """Return the mean wall and processor seconds of one call out of `repeat` back to back."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - wall) / repeat, (time.process_time() - cpu) / repeat
