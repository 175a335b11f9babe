"""Starting up: the import, the first packing call with kernels on disk, and the first ever without."""

from __future__ import annotations

import tempfile
from functools import partial
from statistics import median

from benchmarks.child import measure
from benchmarks.rows import Limit, Row
from benchmarks.step import Step

SECTION = "startup"
COUNTS = (1_000, 100_000)
"""A first look, and a data set: a few lengths may be packed without kernels, many may not."""
RUNS = 7
FIRST_EVER_RUNS = 3
IMPORT_LIMIT_S = 0.15
WARM_LIMIT_S = 0.5
COLD_LIMIT_S = 3.0

_IMPORT = """
import json, time
start = time.perf_counter()
import varlen
print(json.dumps(time.perf_counter() - start))
"""
_NOTE = "any import or compilation that the call needs included"
_FIRST_CALL = """
import json, sys, time
from benchmarks.inputs import lognormal_lengths
import varlen as vl
lengths = lognormal_lengths(int(sys.argv[1]))
start = time.perf_counter()
vl.pack(lengths, capacity=8192)
print(json.dumps(time.perf_counter() - start))
"""


def steps() -> list[Step]:
    """Return what this section measures."""
    calls = [Step(f"first call of {count:,} lengths", partial(_first_calls, count)) for count in COUNTS]
    return [Step("import varlen", _import), *calls]


def _import() -> list[Row]:
    """Time `import varlen` in fresh interpreters, the first of them not counted."""
    measure(_IMPORT)
    times = [measure(_IMPORT) for _ in range(RUNS)]
    return [_limit("import varlen", times, IMPORT_LIMIT_S, "")]


def _first_calls(count: int) -> list[Row]:
    """Time the first packing call of a process, with the compiled kernels on disk and without."""
    cold = []
    for _ in range(FIRST_EVER_RUNS):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(measure(_FIRST_CALL, str(count), environment={"NUMBA_CACHE_DIR": folder}))
    with tempfile.TemporaryDirectory() as folder:
        place = {"NUMBA_CACHE_DIR": folder}
        for _ in range(2):  # what isn't compiled by the first process may be by the second
            measure(_FIRST_CALL, str(count), environment=place)
        warm = [measure(_FIRST_CALL, str(count), environment=place) for _ in range(RUNS)]
    what = f"of {count:,} lengths"
    return [
        _limit(f"first vl.pack {what} in a process, kernels on disk", warm, WARM_LIMIT_S, _NOTE),
        _limit(f"first vl.pack {what} ever, no kernels on disk", cold, COLD_LIMIT_S, _NOTE),
    ]


def _limit(what: str, times: list[float], limit: float, note: str) -> Limit:
    """Return the median of some times beside its limit."""
    return Limit(
        section=SECTION, what=what, value=median(times), unit="s", limit=limit, samples=times, note=note
    )
