"""Long runs: the whole, files larger than memory, a million batches, and thousands of random plans."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.support.distances import EXACT
from tests.support.pipelines import DISTANCES, JOB, LIBRARIES
from tests.support.planning import METHODS, cost_of, long_tailed, until
from tests.support.random_plans import large_plan
from tests.support.ranks import as_ranks
from tests.support.stores import content, drained, loader_of, random_store

import varlen as vl
from varlen.plan.check import check_plan

ROUNDING = 1e-4


def test_a_hundred_million_lengths_are_packed_to_the_bound():
    rng = np.random.default_rng(0)
    parts = [rng.lognormal(6.0, 1.0, 10_000_000).clip(1, 8192).astype(np.int32) for _ in range(10)]
    lengths = np.concatenate(parts)

    packing = vl.pack(lengths, capacity=8192)

    assert packing.num_tokens == int(lengths.sum(dtype=np.int64))
    assert packing.num_pieces == lengths.size
    assert packing.num_packs <= vl.lower_bound(lengths, capacity=8192) * 1.0001


def test_the_whole_demo_trains_padded_and_flattened_to_the_same_loss(tmp_path):
    command = [sys.executable, "-m", "varlen", "demo", "--json", "--output", str(tmp_path / "report.html")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)

    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout)
    methods = {method["name"]: method for method in figures["methods"]}
    assert figures["isolation"]["is_proved"]
    assert methods["padded"]["flattened_step_loss_difference"] < ROUNDING
    assert methods["padded_with_mask"]["flattened_step_loss_difference"] < ROUNDING
    assert methods["padded"]["slots_per_token"] > methods["flattened"]["slots_per_token"]
    assert "</html>" in (tmp_path / "report.html").read_text(encoding="utf-8")


FILE_BYTES = 20 * 10**9
MEMORY_BYTES = 10**9
DISK_BYTES = 3.3 * FILE_BYTES
"""The file, its tokens at two bytes each, and rows that compress well."""
CHUNK_ROWS = 20_000


def chunk() -> bytes:
    """Return about 40 MB of rows, long and short."""
    words = " ".join(f"{number} bottles of water on the wall" for number in range(400))
    lengths = [200 + 37 * number % 3_800 for number in range(CHUNK_ROWS)]
    return b"".join(
        json.dumps({"text": words[number % 900 :][:length]}).encode() + b"\n"
        for number, length in enumerate(lengths)
    )


def resident_bytes(process: int) -> int:
    """Return what a process and those it started hold, pages that they share counted once."""
    try:
        status = Path(f"/proc/{process}/smaps_rollup").read_text()
        children = [
            int(child)
            for thread in Path(f"/proc/{process}/task").iterdir()
            for child in (thread / "children").read_text().split()
        ]
    except OSError:  # it has just ended
        return 0
    (line,) = [line for line in status.splitlines() if line.startswith("Pss:")]
    return int(line.split()[1]) * 1024 + sum(map(resident_bytes, children))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is counted by Linux alone")
def test_a_file_of_20_gb_is_packed_in_1_gb_of_memory(tmp_path):
    if shutil.disk_usage(tmp_path).free < DISK_BYTES:
        pytest.skip(f"takes {DISK_BYTES / 1e9:.0f} GB of disk, the file's and its tokens', which aren't free")
    rows = chunk()
    copies = -(-FILE_BYTES // len(rows))
    data, output = tmp_path / "data.jsonl", tmp_path / "packed"
    with data.open("wb") as file:
        for _ in range(copies):
            file.write(rows)
    command = [sys.executable, "-m", "varlen", "pack", str(data), "-o", str(output), "--capacity", "8192"]
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
        peak = 0
        while process.poll() is None:
            peak = max(peak, resident_bytes(process.pid))
            time.sleep(0.2)

    assert process.returncode == 0, (tmp_path / "said").read_text()
    assert os.path.getsize(data) >= FILE_BYTES  # noqa: PTH202
    manifest = json.loads((output / ".manifest.json").read_bytes())
    texts = [json.loads(line)["text"] for line in rows.splitlines()]
    assert manifest["ledger"]["documents_in"] == copies * CHUNK_ROWS
    assert manifest["num_tokens"] == copies * sum(len(text) + 1 for text in texts)
    assert manifest["fill_ratio"] > 0.995
    assert peak <= MEMORY_BYTES, f"{peak / 1e9:.2f} GB at most"
    print(f"{peak / 1e9:.2f} GB at most")
    shutil.rmtree(tmp_path)


pytestmark = pytest.mark.soak
BATCHES = int(os.environ.get("VARLEN_SOAK_BATCHES", 10**6))
GROWTH_BYTES = 8 << 20


def resident(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_nothing_grows_over_a_million_batches(tmp_path):
    store = random_store(tmp_path)
    seen = []
    with loader_of(store, micro_batch_size=1, epochs=None, worker="process") as loader:
        for number, _ in enumerate(loader):
            if number % (BATCHES // 20) == 0:
                descriptors = len(list(Path("/proc/self/fd").iterdir()))
                seen.append((resident(os.getpid()), resident(loader._worker.pid), descriptors))
            if number == BATCHES:
                break
    half = len(seen) // 4
    growth = np.array(seen[-1]) - np.array(seen[half])
    assert growth[0] < GROWTH_BYTES, seen
    assert growth[1] < GROWTH_BYTES, seen
    assert growth[2] <= 0, seen


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
def test_states_of_a_longer_run_give_the_rest_at_every_world_size(tmp_path, world):
    store = random_store(tmp_path, shards=8, documents=300)

    def rows(state=None, size=1):
        found = {}
        for rank in range(size):
            with loader_of(store, micro_batch_size=1, dp_rank=rank, dp_world_size=size) as loader:
                if state is not None:
                    loader.load_state_dict(json.loads(json.dumps(state)))
                for batch in loader:
                    found.setdefault(int(batch.pack_ids[0]) // 24, []).append(content(batch))
        return {step: sorted(taken) for step, taken in found.items()}

    whole = rows()
    with loader_of(store, micro_batch_size=24) as loader:
        states = [state for state in drained(loader)[1] if state["micro_batch"] == 0]
    for state in states[:: max(len(states) // 12, 1)]:
        assert rows(state, world) == {s: taken for s, taken in whole.items() if s >= state["step"]}


STEPS = 5_000
KILLS = 50
SEEDS = 4


@pytest.mark.parametrize("dp_pp", [(4, 4), (8, 2), (2, 8), (8, 8)])
@pytest.mark.parametrize("mode", ["calibrated", "flops"])
def test_micropacks_are_slower_than_no_other_method_on_any_of_many_steps(dp_pp, mode):
    mesh, cost = vl.Mesh(dp=dp_pp[0], pp=dp_pp[1], tp=4), cost_of(mode=mode)
    for seed in range(SEEDS):
        lengths = long_tailed(64 * mesh.dp, 100_000, seed)
        took = {}
        for method in METHODS:
            plan = vl.plan_step(lengths, cost=cost, mesh=mesh, method=method)
            check_plan(plan, cost)
            took[method] = vl.simulate(plan, cost).makespan_s
        assert took["micropack"] <= min(took.values()) * 1.02, (seed, took)


def test_a_million_tasks_a_second_are_simulated():
    plan, took = large_plan(), []
    plain = cost_of()
    cost = plain.replace(model=dataclasses.replace(plain.model, max_positions=None))
    for _ in range(6):
        begun = time.perf_counter()
        tasks = len(vl.simulate(plan, cost).kinds)
        took.append(time.perf_counter() - begun)

    assert tasks > 200_000
    assert tasks / min(took) >= 1e6


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_planner_killed_at_random_moments_answers_every_step_and_leaves_nothing():
    dice, threads = random.Random(0), set(threading.enumerate())
    kills, ahead, struck = set(dice.sample(range(STEPS - 1), KILLS)), 4, False
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    function = "tests.support.planner_jobs:one_by_one"
    with vl.Planner(lambda step: [1 + step % 99, 5], function=function, ahead=ahead) as planner:
        for step in range(STEPS):
            assert planner.take(step).lengths.tolist() == [1 + step % 99, 5]
            # What was asked after a kill is answered by another process, which may be killed in turn.
            if struck:
                until(lambda known=step + ahead: known in planner._process.results)
            time.sleep(dice.random() * 0.002)
            struck = step in kills
            if struck:
                os.kill(planner._process.child.pid, signal.SIGKILL)
        assert planner.restarts == KILLS
        assert len(planner._known) <= ahead
    until(lambda: set(threading.enumerate()) <= threads)
    assert len(list(Path("/proc/self/fd").iterdir())) <= open_before + 1


PLANS = 1_000
AT_ONCE = 125
"""Of a job, so that each stays within the time that a job may take."""


@pytest.mark.parametrize("ranks", [2, 4])
def test_random_plans_come_to_an_end_with_exact_gradients(tmp_path, ranks):
    seen = 0
    for first in range(0, PLANS // 2, AT_ONCE):
        as_ranks(JOB, "random", tmp_path, first, first + AT_ONCE, ranks=ranks, libraries=LIBRARIES)
        for rank in range(ranks):
            found = json.loads((tmp_path / f"{rank}.json").read_text())["random"]
            far = [
                (first + at, {n: one[n] for n in DISTANCES if not one[n] <= max(EXACT, 2 * one["rounding"])})
                for at, one in enumerate(found)
            ]
            assert [(seed, names) for seed, names in far if names] == []
            # Roundings to float32 that fall otherwise are as rare as they should be.
            assert sum(one["rounding"] > 0 for one in found) <= 2
            seen += len(found)

    assert seen == PLANS // 2 * ranks
