"""Compare two checkouts of varlen: fifteen benchmarks, each run by turns with either source.

    python -m benchmarks.pairs ../before                      # ../before/src beside this checkout's src
    python -m benchmarks.pairs ../before plan simulate        # some of them
    python -m benchmarks.pairs ../before --pairs 20 --json pairs.json

A run is a fresh interpreter with one of the two sources on its path and everything else alike. A warm benchmark does
its work once unmeasured, then reports the least of a few repetitions; a cold one reports the whole call. Pairs
alternate which source goes first. The table gives the median of the ratios (this checkout over the other, below 1 is
faster), their quartiles, and the limit; the exit code is 1 where the median is above it. Only public names are used,
so that the one script measures both checkouts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent.parent
PAIRS = 10
LIMIT = 1.05

Work = Callable[[], object]


@dataclass(frozen=True)
class Benchmark:
    """One measurement: `prepare` imports and builds, what it returns is timed."""

    prepare: Callable[[Path], Work]
    repeat: int = 0
    """Repetitions of a warm benchmark; 0: cold, the first call is the measurement."""
    limit: float = LIMIT
    environment: tuple[tuple[str, str], ...] = ()


def lengths_of(count: int) -> np.ndarray:
    """Return log-normal lengths, mean about 680, at most 8,192."""
    return np.clip(np.random.default_rng(0).lognormal(6, 1, count), 1, 8192).astype(np.int64)


def _pack(count: int, **settings: Any) -> Work:
    import varlen as vl

    lengths = lengths_of(count)
    return lambda: vl.pack(lengths, capacity=8192, **settings)


def _collate_flat(_: Path) -> Work:
    import varlen as vl

    lengths = lengths_of(2_000)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.random.default_rng(1).integers(0, 50_000, offsets[-1]).astype(np.int32)
    packing = vl.pack(lengths, capacity=8192)
    return lambda: vl.collate((tokens, offsets), packing)


def _collate_lists(_: Path) -> Work:
    import varlen as vl

    lengths = lengths_of(400)
    random = np.random.default_rng(1)
    documents = [random.integers(0, 50_000, length).tolist() for length in lengths]
    packing = vl.pack(lengths, capacity=8192)
    return lambda: vl.collate(documents, packing)


def _read(source: Path, batches: int | None = None, **settings: Any) -> None:
    import varlen as vl

    with vl.PackedLoader(source, capacity=4096, global_batch_size=8, **settings) as loader:
        for _ in itertools.islice(loader, batches):
            pass


def _plan(method: str) -> Any:
    import varlen as vl

    cost = vl.CostModel(
        model=vl.ModelShape.named("llama-3-8b"), hardware=vl.Hardware.named("h100"), recompute="full"
    )
    lengths = np.clip(lengths_of(256) * 8, 1, 65_536)
    return vl.plan_step(lengths, cost=cost, mesh=vl.Mesh(dp=4, pp=4, tp=8), method=method), cost


def _simulate(_: Path) -> Work:
    import varlen as vl

    step, cost = _plan("micropack")
    return lambda: vl.simulate(step, cost)


def _read_npy(inputs: Path) -> Work:
    from varlen.adapters.megatron import read_packed_npy

    return lambda: read_packed_npy(inputs / "rows.npy")


def _first_import() -> None:
    import varlen

    varlen.pack  # noqa: B018


def _demo(inputs: Path) -> Work:
    from varlen.cli import main

    def work() -> None:
        sys.argv = ["varlen", "demo", "--quick", "--data", str(inputs / "texts.jsonl")]
        sys.argv += ["--output", str(Path(tempfile.mkdtemp()) / "report.html")]
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise

    return work


def _first_batch(inputs: Path) -> Work:
    import varlen as vl  # noqa: F401 - imported before the call is timed

    return lambda: _read(inputs / "store", batches=1)


BENCHMARKS = {
    "pack_decreasing": Benchmark(lambda _: _pack(1_000_000, method="best_fit_decreasing"), repeat=7),
    "pack_best_fit": Benchmark(lambda _: _pack(200_000, method="best_fit"), repeat=7),
    "pack_without_jit": Benchmark(lambda _: _pack(1_000), limit=1.5, environment=(("VARLEN_JIT", "0"),)),
    "first_pack": Benchmark(lambda _: _pack(100_000)),
    "collate_flat": Benchmark(_collate_flat, repeat=15),
    "collate_lists": Benchmark(_collate_lists, repeat=15),
    "loader_store": Benchmark(lambda inputs: lambda: _read(inputs / "store", mode="indexed"), repeat=3),
    "loader_text": Benchmark(
        lambda inputs: lambda: _read(inputs / "texts.jsonl", mode="streaming", tokenizer="bytes"), repeat=3
    ),
    "first_batch": Benchmark(_first_batch),
    "plan": Benchmark(lambda _: lambda: _plan("micropack"), repeat=5),
    "plan_packed": Benchmark(lambda _: lambda: _plan("balanced"), repeat=5),
    "simulate": Benchmark(_simulate, repeat=15),
    "read_npy": Benchmark(_read_npy, repeat=5, limit=1.6),
    "first_import": Benchmark(lambda _: _first_import),
    "demo": Benchmark(_demo),
}


def write_inputs(folder: Path) -> None:
    """Write what the benchmarks read, by this checkout: a store, texts, and packed rows as NumPy pickles them."""
    random = np.random.default_rng(2)
    with (folder / "texts.jsonl").open("w") as file:
        for length in np.clip(random.lognormal(6, 1, 8_000), 1, 20_000).astype(int):
            print(json.dumps({"text": bytes(random.integers(97, 123, length)).decode()}), file=file)
    arguments = ["index", folder / "texts.jsonl", "-o", folder / "store", "--processes", "1"]
    command = [sys.executable, "-m", "varlen", *map(str, arguments)]
    subprocess.run(command, env=_environment(HERE), check=True, capture_output=True)
    ids = (random.integers(0, 50_000, 4096).tolist() for _ in range(500))
    rows = [{"input_ids": one, "loss_mask": [1] * 4096, "seq_start_id": [0, 1000, 3000]} for one in ids]
    np.save(folder / "rows.npy", np.array(rows, object), allow_pickle=True)


def _environment(checkout: Path, more: tuple[tuple[str, str], ...] = ()) -> dict[str, str]:
    path = os.pathsep.join([str(checkout / "src"), str(HERE)])
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **dict(more)}


def run_one(name: str, inputs: Path) -> float:
    chosen = BENCHMARKS[name]
    work = chosen.prepare(inputs)
    if chosen.repeat:
        work()
    times = []
    for _ in range(max(chosen.repeat, 1)):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def run_apart(name: str, checkout: Path, inputs: Path) -> float:
    command = [sys.executable, "-m", "benchmarks.pairs", "--one", name, "--inputs", str(inputs)]
    done = subprocess.run(
        command,
        env=_environment(checkout, BENCHMARKS[name].environment),
        cwd=inputs,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{name} failed with the source of {checkout}:\n{done.stderr}")
    return float(done.stdout.splitlines()[-1])


def compare(name: str, other: Path, inputs: Path, pairs: int) -> dict[str, Any]:
    checkouts = {"here": HERE, "other": other}
    for checkout in checkouts.values():  # compiled files and kernels come to be on disk
        run_apart(name, checkout, inputs)
    times: dict[str, list[float]] = {"here": [], "other": []}
    for number in range(pairs):
        for which in ("here", "other") if number % 2 else ("other", "here"):
            times[which].append(run_apart(name, checkouts[which], inputs))
    ratios = [here / there for here, there in zip(times["here"], times["other"], strict=True)]
    low, _, high = quantiles(ratios, n=4)
    limit = BENCHMARKS[name].limit
    return {"name": name, **times, "ratio": median(ratios), "quartiles": [low, high], "limit": limit}


def commit_of(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", nargs="?", type=Path, help="the checkout to compare with")
    parser.add_argument("names", nargs="*", metavar="BENCHMARK", help=", ".join(BENCHMARKS))
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--json", type=Path, help="write all times here")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--inputs", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(run_one(given.one, given.inputs))
        return
    if given.other is None or not (given.other / "src/varlen").is_dir():
        parser.error("name the checkout to compare with: a folder that holds src/varlen")
    if given.pairs < 2:
        parser.error(f"--pairs must be at least 2, got {given.pairs}")
    if unknown := set(given.names) - set(BENCHMARKS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; benchmarks are {', '.join(BENCHMARKS)}")
    sys.exit(_table(given.other.resolve(), given.names or list(BENCHMARKS), given.pairs, given.json))


def _table(other: Path, names: list[str], pairs: int, output: Path | None) -> int:
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        write_inputs(Path(scratch))
        for name in names:
            row = compare(name, other, Path(scratch), pairs)
            rows.append(row)
            low, high = row["quartiles"]
            verdict = "" if row["ratio"] <= row["limit"] else f"  above {row['limit']}"
            here, there = min(row["here"]), min(row["other"])
            print(
                f"{name:18} {here:9.4f} s {there:9.4f} s  {row['ratio']:.3f} ({low:.3f} to {high:.3f}){verdict}"
            )
    if output:
        found = {
            "python": platform.python_version(),
            "cpu_count": os.cpu_count(),
            "date": time.strftime("%F"),
            "here": commit_of(HERE),
            "other": commit_of(other),
            "pairs": pairs,
            "rows": rows,
        }
        output.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(row["ratio"] > row["limit"] for row in rows))


if __name__ == "__main__":
    main()
