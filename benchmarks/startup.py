"""What a user waits for first: the import, the first packing call, and `varlen demo`.

Section `startup`: the import, the first call of 1,000 and 100,000 lengths with kernels on disk, and the first ever
without, in fresh interpreters. Section `demo`: how much faster flattened batches train than padded ones, at which
loss.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.rows import Contestant, Limit, Race, Row, Samples, Step
from benchmarks.stopwatch import every_core, measure, output

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


def startup_steps() -> list[Step]:
    calls = [Step(f"first call of {count:,} lengths", partial(_first_calls, count)) for count in COUNTS]
    return [Step("import varlen", _import), *calls]


def _import() -> list[Row]:
    measure(_IMPORT)
    times = [measure(_IMPORT) for _ in range(RUNS)]
    return [Limit.of_times("import varlen", times, IMPORT_LIMIT_S)]


def _first_calls(count: int) -> list[Row]:
    cold = []
    for _ in range(FIRST_EVER_RUNS):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(measure(_FIRST_CALL, count, environment={"NUMBA_CACHE_DIR": folder}))
    with tempfile.TemporaryDirectory() as folder:
        place = {"NUMBA_CACHE_DIR": folder}
        for _ in range(2):  # what isn't compiled by the first process may be by the second
            measure(_FIRST_CALL, count, environment=place)
        warm = [measure(_FIRST_CALL, count, environment=place) for _ in range(RUNS)]
    what = f"of {count:,} lengths"
    return [
        Limit.of_times(f"first vl.pack {what} in a process, kernels on disk", warm, WARM_LIMIT_S, _NOTE),
        Limit.of_times(f"first vl.pack {what} ever, no kernels on disk", cold, COLD_LIMIT_S, _NOTE),
    ]


DEMO_TARGET = 4.7
DEMO_LIMIT_S = 180.0
LIMIT_NATS = 1e-5
"""Rounding of a mean over some thousand targets in float32."""


def demo_steps() -> list[Step]:
    return [Step("varlen demo on the interpreter's sources", _run_demo)]


def _run_demo() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["-m", "varlen", "demo", "--json", "--output", Path(folder, "report.html")]
        return rows_of(json.loads(output(arguments, every_core())))


def rows_of(figures: dict[str, Any]) -> list[Row]:
    methods = {method["name"]: method for method in figures["methods"]}
    flattened = methods["flattened"]
    what = (
        f"train {flattened['num_documents']:,} documents, {flattened['num_tokens']:,} tokens, in "
        f"{flattened['steps']} steps on {figures['threads']} threads"
    )
    races: list[Row] = [
        Race(
            what=what,
            ours=_contestant(flattened),
            peer=_contestant(peer),
            tokens=flattened["num_tokens"],
            target=DEMO_TARGET if name.startswith("padded") else None,
            note=f"{peer['num_slots'] / peer['num_tokens']:.2f} positions a token",
        )
        for name, peer in methods.items()
        if peer["role"] == "baseline"
    ]
    apart = max(abs(a - b) for a, b in zip(flattened["step_losses"], methods["padded"]["step_losses"]))
    return [
        *races,
        _demo_limit("largest difference of a step's loss, flattened and padded", apart, "nats", LIMIT_NATS),
        _demo_limit("the whole demo", figures["total_s"], "s", DEMO_LIMIT_S),
    ]


def _contestant(method: dict[str, Any]) -> Contestant:
    """Return one way of training as a side of a race; its one sample is the sum of its steps."""
    samples = Samples(wall_s=[method["wall_s"]], cpu_s=[method["user_s"] + method["system_s"]])
    return Contestant(
        name=method["title"], call=f"loss {method['step_losses'][-1]:.6f} in the last step", samples=samples
    )


def _demo_limit(what: str, value: float, unit: str, limit: float) -> Limit:
    return Limit(what=what, value=value, unit=unit, limit=limit)


SECTIONS = {"startup": startup_steps, "demo": demo_steps}
