"""`python -m benchmarks.gpu FILE [PART ...]`: what needs a CUDA device, in ten minutes at most.

Each part runs in a process of its own with a time limit, what is most worth knowing first, so that one that fails,
hangs or runs out of memory costs itself alone; its traceback stands in its place. One JSON file holds all of it,
written anew after each part. Without a CUDA device the program says so and writes nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import engine, gradients, several, slices, training
from benchmarks.records import machine, versions


@dataclass(frozen=True)
class Part:
    """One thing measured."""

    run: Callable[[torch.device], Any]
    limit_s: float
    """After which its process is killed."""


PARTS: dict[str, Part] = {
    "gradients": Part(gradients.gradients, 120),
    "waits": Part(engine.waits, 60),
    "ways": Part(engine.ways, 90),
    "attention": Part(engine.rates, 45),
    "steps": Part(training.steps, 75),
    "overhead": Part(slices.overhead, 60),
    "kernels": Part(engine.kernels, 60),
    "transfer": Part(lambda _: training.transfer(), 30),
    "several": Part(several.several, 600),
    "longest": Part(slices.longest, 120),
    "isolation": Part(lambda device: gradients.isolation(device.type), 240),
}
"""In the order run, what is most worth knowing first."""


def run(parts: Sequence[str], file: Path, device: str) -> dict[str, Any]:
    result: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {**machine(), "gpu": torch.cuda.get_device_name() if device == "cuda" else "none"},
        "versions": {**versions(), "cuda": torch.version.cuda},
        "seconds": {},
    }
    for name in parts:
        begun = time.perf_counter()
        result[name] = _apart(name, device)
        result["seconds"][name] = round(time.perf_counter() - begun, 1)
        file.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{name}: {result['seconds'][name]} s", flush=True)
    return result


def _apart(name: str, device: str) -> Any:
    """Run a part in a process of its own, and return what it measured, or how it failed."""
    with tempfile.TemporaryDirectory() as folder:
        found, log = Path(folder, "found.json"), Path(folder, "log")
        command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, str(found), device]
        with log.open("w") as out:
            try:
                limit_s = PARTS[name].limit_s
                code = subprocess.run(
                    command, stdout=out, stderr=out, timeout=limit_s, check=False
                ).returncode
                why = f"exit code {code}"
            except subprocess.TimeoutExpired:
                code, why = -1, f"stopped after {PARTS[name].limit_s:.0f} s"
        said = json.loads(found.read_text()) if found.exists() else []
        if code != 0:
            failed = {"failed": why, "log": log.read_text(errors="replace")[-3000:]}
            return [*said, failed] if said else failed
        return said


def run_part(name: str, file: Path, device: torch.device) -> int:
    """Run one part here, and write what it measured; rows that it yields one by one are written as they come."""
    rows: list[Any] = []
    try:
        found = PARTS[name].run(device)
        if isinstance(found, Iterator):
            for row in found:
                rows.append(row)
                file.write_text(json.dumps(rows))
            found = rows
    except Exception as error:
        trace = traceback.format_exc()
        failed = {"failed": f"{type(error).__name__}: {error}"[:500], "log": trace[-3000:]}
        found = [*rows, failed] if rows else failed
    file.write_text(json.dumps(found))
    return 0


def _rows(found: Any) -> list[dict[str, Any]]:
    return [found] if isinstance(found, dict) else found or []


def main() -> int:
    if sys.argv[1:2] == ["--part"]:
        return run_part(sys.argv[2], Path(sys.argv[3]), torch.device(sys.argv[4]))
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was run and nothing was written", file=sys.stderr)
        return 2
    result = run(sys.argv[2:] or list(PARTS), Path(sys.argv[1] if len(sys.argv) > 1 else "gpu.json"), "cuda")
    rows = [(name, row) for name in PARTS for row in _rows(result.get(name))]
    failed = [(name, row) for name, row in rows if "failed" in row]
    leaks = [row for _, row in rows if row.get("verdict") == "leaks"]
    for name, row in failed:
        print(f"{name} failed: {row['failed']}\n{row.get('log', '')}", file=sys.stderr)
    for row in leaks:
        print(f"{row['family']} leaks with {row['attention']}", file=sys.stderr)
    return int(bool(failed or leaks))


if __name__ == "__main__":
    sys.exit(main())
