"""`python -m benchmarks.running [PART ...]`: what runs, measured; writes benchmarks/results/run/DATE.json.

Parts: overhead, pipelines, merging, waits, ahead, longest. A part that isn't named keeps what the day's file has.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu import slices
from benchmarks.gpu.models import llama_sizes
from benchmarks.records import RESULTS, load, machine, save, today, versions
from benchmarks.running import longest, pipelines, waits

SMALL = llama_sizes(512, 1408, 8, 4, layers=3, vocab=4096)
"""A Llama whose step of 8,192 tokens takes ten seconds on one core."""


def overhead() -> dict[str, Any]:
    """Slices beside the unsliced step, one core, float32."""
    torch.set_num_threads(1)
    found = slices.overhead(
        torch.device("cpu"),
        sizes=SMALL,
        tokens=8192,
        slice_tokens=(2048, 4096),
        dtype=torch.float32,
        rounds=3,
    )
    return {"model": SMALL, **found}


PARTS: dict[str, Callable[[], Any]] = {
    "overhead": overhead,
    "pipelines": pipelines.run,
    "merging": pipelines.run_merging,
    "waits": waits.run,
    "ahead": pipelines.run_ahead,
    "longest": longest.run,
}


def main() -> int:
    date = today()
    file = RESULTS / "run" / f"{date}.json"
    result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"date": date, "parts": {}}
    result["machine"] = machine()
    for name in sys.argv[1:] or list(PARTS):
        before, begun = load(), time.perf_counter()
        result[name] = PARTS[name]()
        result["parts"][name] = {
            "date": date,
            "versions": versions(),
            "load": [before, load()],
            "seconds": round(time.perf_counter() - begun),
        }
        save(result, file)
        print(f"{name}: {result['parts'][name]['seconds']} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
