"""A hundred million lengths: seconds on one core, and the memory that packing takes beyond its input."""

from __future__ import annotations

from functools import partial

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
import json, os, resource, sys, time
from contextlib import suppress
from benchmarks.inputs import lognormal_lengths
import varlen as vl

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def peak():
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

with suppress(AttributeError, OSError):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
count, capacity = int(sys.argv[1]), int(sys.argv[2])
vl.pack(lognormal_lengths(1000), capacity=capacity)
lengths = lognormal_lengths(count)
try:
    before = resident()
except OSError:
    before = peak()
cpu, wall = time.process_time(), time.perf_counter()
packing = vl.pack(lengths, capacity=capacity)
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
print(json.dumps({"wall_s": wall, "cpu_s": cpu, "bytes": peak() - before, "fill": packing.fill_ratio}))
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
    fill = f"{100 * runs[0]['fill']:.3f} % full"
    return [
        Limit(
            section=SECTION,
            what=f"vl.pack of {count:,} lengths on one core",
            value=sorted(walls)[RUNS // 2],
            unit="s",
            limit=LIMIT_S if is_targeted else None,
            samples=walls,
            note=fill,
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
