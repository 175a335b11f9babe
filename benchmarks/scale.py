"""A hundred million lengths: seconds on one core, and the memory that packing takes beyond its input."""

from __future__ import annotations

from functools import partial
from statistics import median

from benchmarks.child import measure
from benchmarks.inputs import CAPACITY
from benchmarks.rows import Limit, Row
from benchmarks.step import Step

SECTION = "scale"
COUNTS = (1_000_000, 10_000_000, 100_000_000)
TARGETED = 100_000_000
LIMIT_S = 5.0
LIMIT_GB = 2.0
RUNS = 3

_PROGRAM = """
import json, os, sys, time
from contextlib import suppress
from benchmarks.inputs import lognormal_lengths
from benchmarks.memory import forget_peak, peak_bytes, resident_bytes
import varlen as vl

with suppress(AttributeError, OSError):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
count, capacity = int(sys.argv[1]), int(sys.argv[2])
vl.pack(lognormal_lengths(1_000_000), capacity=capacity)  # enough for kernels to be worth loading
lengths = lognormal_lengths(count)
forget_peak()
before = resident_bytes()
cpu, wall = time.process_time(), time.perf_counter()
packing = vl.pack(lengths, capacity=capacity)
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
print(json.dumps({"wall_s": wall, "cpu_s": cpu, "bytes": peak_bytes() - before, "fill": packing.fill_ratio}))
"""


def steps() -> list[Step]:
    """Return what this section measures."""
    return [Step(f"{count:,} lengths", partial(_measure, count)) for count in COUNTS]


def _measure(count: int) -> list[Row]:
    """Pack so many lengths in fresh processes on one core; memory is what the peak adds to the input."""
    runs = [measure(_PROGRAM, str(count), str(CAPACITY)) for _ in range(RUNS)]
    is_targeted = count == TARGETED
    walls = [run["wall_s"] for run in runs]
    peaks = [run["bytes"] / 1e9 for run in runs]
    cpu_s = median(run["cpu_s"] for run in runs)
    return [
        Limit(
            section=SECTION,
            what=f"vl.pack of {count:,} lengths on one core",
            value=median(walls),
            unit="s",
            limit=LIMIT_S if is_targeted else None,
            samples=walls,
            note=f"{cpu_s:.3g} s of processor time, {100 * runs[0]['fill']:.3f} % full",
        ),
        Limit(
            section=SECTION,
            what=f"peak memory of that beyond the input of {count * 4 / 1e9:.3g} GB",
            value=max(peaks),
            unit="GB",
            limit=LIMIT_GB if is_targeted else None,
            samples=peaks,
            note="the result included",
        ),
    ]
