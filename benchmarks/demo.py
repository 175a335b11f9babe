"""The demo, `varlen demo`: how much faster flattened batches train than padded ones, and at which loss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.rows import Contestant, Limit, Race, Row
from benchmarks.step import Step
from benchmarks.stopwatch import Samples

SECTION = "demo"
TARGET = 4.7
LIMIT_S = 180.0
LIMIT_NATS = 1e-5
"""Rounding of a mean over some thousand targets in float32."""
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def steps() -> list[Step]:
    """Return what this section measures."""
    return [Step("varlen demo on the interpreter's sources", _run)]


def _run() -> list[Row]:
    """Run the demo as a user would, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name not in _ONE_THREAD}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "varlen", "demo", "--json", "--output", str(Path(folder, "report.html"))],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise RuntimeError(f"varlen demo ended with code {done.returncode}:\n{done.stderr}")
    return rows_of(json.loads(done.stdout))


def rows_of(figures: dict[str, Any]) -> list[Row]:
    """Return the rows for what the demo printed: flattened against every baseline, the loss, and its length."""
    methods = {method["name"]: method for method in figures["methods"]}
    flattened = methods["flattened"]
    what = (
        f"train {flattened['num_documents']:,} documents, {flattened['num_tokens']:,} tokens, in "
        f"{flattened['steps']} steps on {figures['threads']} threads"
    )
    races: list[Row] = [
        Race(
            section=SECTION,
            what=what,
            ours=_contestant(flattened),
            peer=_contestant(peer),
            tokens=flattened["num_tokens"],
            target=TARGET if name.startswith("padded") else None,
            note=f"{peer['num_slots'] / peer['num_tokens']:.2f} positions a token",
        )
        for name, peer in methods.items()
        if peer["role"] == "baseline"
    ]
    apart = max(abs(a - b) for a, b in zip(flattened["step_losses"], methods["padded"]["step_losses"]))
    return [
        *races,
        _limit("largest difference of a step's loss, flattened and padded", apart, "nats", LIMIT_NATS),
        _limit("the whole demo", figures["total_s"], "s", LIMIT_S),
    ]


def _contestant(method: dict[str, Any]) -> Contestant:
    """Return one way of training as a side of a race; its one sample is the sum of its steps."""
    samples = Samples(wall_s=[method["wall_s"]], cpu_s=[method["user_s"] + method["system_s"]])
    return Contestant(
        name=method["title"], call=f"loss {method['step_losses'][-1]:.6f} in the last step", samples=samples
    )


def _limit(what: str, value: float, unit: str, limit: float) -> Limit:
    return Limit(section=SECTION, what=what, value=value, unit=unit, limit=limit)
