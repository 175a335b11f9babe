"""Starting up: the import, the first packing call with kernels on disk, and the first ever without."""

from __future__ import annotations

import tempfile
from statistics import median

from benchmarks.child import measure
from benchmarks.rows import Limit, Row
from benchmarks.step import Step

SECTION = "startup"
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
_FIRST_CALL = """
import json, time
import varlen as vl
lengths = [300, 5000, 120, 8192, 64] * 200
start = time.perf_counter()
vl.pack(lengths, capacity=8192)
print(json.dumps(time.perf_counter() - start))
"""


def steps() -> list[Step]:
    """Return what this section measures."""
    return [Step("import varlen", _import), Step("first packing calls", _first_calls)]


def _import() -> list[Row]:
    """Time `import varlen` in fresh interpreters, the first of them not counted."""
    measure(_IMPORT)
    times = [measure(_IMPORT) for _ in range(RUNS)]
    return [_limit("import varlen", times, IMPORT_LIMIT_S, "")]


def _first_calls() -> list[Row]:
    """Time the first packing call of a process, with the compiled kernels on disk and without."""
    cold = []
    for _ in range(FIRST_EVER_RUNS):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(measure(_FIRST_CALL, environment={"NUMBA_CACHE_DIR": folder}))
    with tempfile.TemporaryDirectory() as folder:
        place = {"NUMBA_CACHE_DIR": folder}
        measure(_FIRST_CALL, environment=place)
        warm = [measure(_FIRST_CALL, environment=place) for _ in range(RUNS)]
    note = "numba's import included"
    return [
        _limit("first vl.pack of a process, kernels on disk", warm, WARM_LIMIT_S, note),
        _limit("first vl.pack ever, kernels compiled", cold, COLD_LIMIT_S, note),
    ]


def _limit(what: str, times: list[float], limit: float, note: str) -> Limit:
    """Return the median of some times beside its limit."""
    return Limit(
        section=SECTION, what=what, value=median(times), unit="s", limit=limit, samples=times, note=note
    )
