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


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One measurement: `prepare` imports and builds, what it returns is timed."""

    prepare: Callable[[Path], Work]
    repeat: int = 0
    """Repetitions of a warm benchmark; 0: cold, the first call is the measurement."""
    limit: float = LIMIT
    environment: tuple[tuple[str, str], ...] = ()


BENCHMARKS: dict[str, Benchmark] = {}


def benchmark(**settings: Any) -> Callable[[Callable[[Path], Work]], Callable[[Path], Work]]:

    def add(function: Callable[[Path], Work]) -> Callable[[Path], Work]:
        BENCHMARKS[function.__name__] = Benchmark(prepare=function, **settings)
        return function

    return add


def lengths_of(count: int) -> np.ndarray:
    """Return log-normal lengths, mean about 680, at most 8,192."""
    return np.clip(np.random.default_rng(0).lognormal(6, 1, count), 1, 8192).astype(np.int64)


@benchmark(repeat=7)
def pack_decreasing(inputs: Path) -> Work:
    import varlen as vl

    lengths = lengths_of(1_000_000)
    return lambda: vl.pack(lengths, capacity=8192, method="best_fit_decreasing")


@benchmark(repeat=7)
def pack_best_fit(inputs: Path) -> Work:
    import varlen as vl

    lengths = lengths_of(200_000)
    return lambda: vl.pack(lengths, capacity=8192, method="best_fit")


@benchmark(limit=1.5, environment=(("VARLEN_JIT", "0"),))
def pack_without_jit(inputs: Path) -> Work:
    import varlen as vl

    lengths = lengths_of(1_000)
    return lambda: vl.pack(lengths, capacity=8192)


@benchmark()
def first_pack(inputs: Path) -> Work:
    import varlen as vl

    lengths = lengths_of(100_000)
    return lambda: vl.pack(lengths, capacity=8192)


@benchmark(repeat=15)
def collate_flat(inputs: Path) -> Work:
    import varlen as vl

    lengths = lengths_of(2_000)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.random.default_rng(1).integers(0, 50_000, offsets[-1]).astype(np.int32)
    packing = vl.pack(lengths, capacity=8192)
    return lambda: vl.collate((tokens, offsets), packing)


@benchmark(repeat=15)
def collate_lists(inputs: Path) -> Work:
    import varlen as vl

    lengths = lengths_of(400)
    random = np.random.default_rng(1)
    documents = [random.integers(0, 50_000, length).tolist() for length in lengths]
    packing = vl.pack(lengths, capacity=8192)
    return lambda: vl.collate(documents, packing)


@benchmark(repeat=3)
def loader_store(inputs: Path) -> Work:
    return lambda: _read(inputs / "store", mode="indexed")


@benchmark(repeat=3)
def loader_text(inputs: Path) -> Work:
    return lambda: _read(inputs / "texts.jsonl", mode="streaming", tokenizer="bytes")


def _read(source: Path, **settings: Any) -> None:
    import varlen as vl

    with vl.PackedLoader(source, capacity=4096, global_batch_size=8, **settings) as loader:
        for _ in loader:
            pass


@benchmark()
def first_batch(inputs: Path) -> Work:
    import varlen as vl

    def work() -> None:
        with vl.PackedLoader(inputs / "store", capacity=4096, global_batch_size=8) as loader:
            next(loader)

    return work


@benchmark(repeat=5)
def plan(inputs: Path) -> Work:
    return lambda: _plan("micropack")


@benchmark(repeat=5)
def plan_packed(inputs: Path) -> Work:
    return lambda: _plan("balanced")


def _plan(method: str) -> Any:
    import varlen as vl

    cost = vl.CostModel(
        model=vl.ModelShape.named("llama-3-8b"), hardware=vl.Hardware.named("h100"), recompute="full"
    )
    lengths = np.clip(lengths_of(256) * 8, 1, 65_536)
    return vl.plan_step(lengths, cost=cost, mesh=vl.Mesh(dp=4, pp=4, tp=8), method=method), cost


@benchmark(repeat=15)
def simulate(inputs: Path) -> Work:
    import varlen as vl

    step, cost = _plan("micropack")
    return lambda: vl.simulate(step, cost)


@benchmark(repeat=5, limit=1.6)
def read_npy(inputs: Path) -> Work:
    from varlen.adapters.megatron import PackedRows

    def work() -> None:
        rows = PackedRows(inputs / "rows.npy")
        for index in range(len(rows)):
            rows[index]

    return work


@benchmark()
def first_import(inputs: Path) -> Work:
    def work() -> None:
        import varlen

        varlen.pack  # noqa: B018

    return work


@benchmark()
def demo(inputs: Path) -> Work:
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


def write_inputs(folder: Path) -> None:
    """Write what the benchmarks read, by this checkout: a store, texts, and packed rows as NumPy pickles them."""
    random = np.random.default_rng(2)
    with (folder / "texts.jsonl").open("w") as file:
        for length in np.clip(random.lognormal(6, 1, 8_000), 1, 20_000).astype(int):
            print(json.dumps({"text": bytes(random.integers(97, 123, length)).decode()}), file=file)
    arguments = ["index", folder / "texts.jsonl", "-o", folder / "store", "--processes", "1"]
    command = [sys.executable, "-m", "varlen", *map(str, arguments)]
    subprocess.run(command, env=_environment(HERE), check=True, capture_output=True)
    rows = [
        {
            "input_ids": random.integers(0, 50_000, 4096).tolist(),
            "loss_mask": [1] * 4096,
            "seq_start_id": [0, 1000, 3000],
        }
        for _ in range(500)
    ]
    np.save(folder / "rows.npy", np.array(rows, object), allow_pickle=True)


def _environment(checkout: Path, more: tuple[tuple[str, str], ...] = ()) -> dict[str, str]:
    path = os.pathsep.join([str(checkout / "src"), str(HERE)])
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **dict(more)}


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
        machine = {
            "python": platform.python_version(),
            "cpu_count": os.cpu_count(),
            "date": time.strftime("%F"),
        }
        commits = {"here": commit_of(HERE), "other": commit_of(other)}
        output.write_text(json.dumps({**machine, **commits, "pairs": pairs, "rows": rows}, indent=1) + "\n")
    return int(any(row["ratio"] > row["limit"] for row in rows))


if __name__ == "__main__":
    main()
