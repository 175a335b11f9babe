"""`python -m benchmarks.gpu FILE [PART ...]`: what needs a CUDA device, in ten minutes at most.

Attention's rates, what slices cost and save, padded and packed steps, isolation of small models under every
attention, and how fast batches reach the device. One JSON file holds all of it, written anew after each part; without
a CUDA device the program says so and writes nothing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import attention, isolation, slices, training
from benchmarks.machine import machine, versions

PARTS: dict[str, Callable[[torch.device], Any]] = {
    "attention": attention.rates,
    "slices": slices.overhead,
    "longest": slices.longest,
    "steps": training.steps,
    "transfer": lambda _: training.transfer(),
    "isolation": lambda device: isolation.isolation(device.type),
}
"""In the order run, what is new first."""


def run(parts: Sequence[str], file: Path, device: torch.device) -> dict[str, Any]:
    """Run parts one by one; one that fails says why in its place, and the others run."""
    result: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {**machine(), "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "none"},
        "versions": {**versions(), "cuda": torch.version.cuda},
        "seconds": {},
    }
    for name in parts:
        begun = time.perf_counter()
        try:
            result[name] = PARTS[name](device)
        except Exception as error:  # a part that a device can't run must not cost the others
            result[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
        if device.type == "cuda":
            torch.cuda.empty_cache()
        result["seconds"][name] = round(time.perf_counter() - begun, 1)
        file.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{name}: {result['seconds'][name]} s", flush=True)
    return result


def main() -> int:
    """Run the parts named on the command line, or all, and write the file named first."""
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was run and nothing was written", file=sys.stderr)
        return 2
    file = Path(sys.argv[1] if len(sys.argv) > 1 else "gpu.json")
    result = run(sys.argv[2:] or list(PARTS), file, torch.device("cuda"))
    failed = [name for name in PARTS if "failed" in (result.get(name) or {})]
    for name in failed:
        print(f"{name} failed: {result[name]['failed']}", file=sys.stderr)
    leaks = [
        row for row in result.get("isolation", ()) if isinstance(row, dict) and row["verdict"] == "leaks"
    ]
    for row in leaks:
        print(f"{row['family']} leaks with {row['attention']}", file=sys.stderr)
    return int(bool(failed or leaks))


if __name__ == "__main__":
    sys.exit(main())
