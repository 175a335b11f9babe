"""Planned steps of a real model on processes of one core each; what they take beside what the simulator says.

`run`: two stages. `run_merging`: a document of more work than a rank's share of a step, on one of two ranks and
shared by both (DP-Merge). `run_ahead`: what planning ahead costs a step. Calibration, on the cores that run the
steps and while all are busy, takes turns with the steps, round after round, so that both meet the same moods of the
machine. A time is the lower quartile of its rounds, on both sides.
"""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig

import varlen as vl
from benchmarks.gpu.models import llama
from benchmarks.running.processes import link_of, side_by_side, turns
from benchmarks.running.steps import CAPACITY, CONFIG, LEAST_ROWS, SETS, Step, lengths_of, source_of, steps
from varlen.cost.fit import mape
from varlen.cost.hardware import Hardware
from varlen.plan.search import Search
from varlen.runtime.calibrate import Bench, calibrate, quiet

ROUNDS = 7
BUDGET_S = 30.0
DOCUMENTS = 24
LEAST_LIMIT = 0.05
MESH = vl.Mesh(pp=2)


def decoder() -> Any:
    return llama(CONFIG, torch.device("cpu"), torch.float32)


def batch_of(lengths: np.ndarray) -> vl.PackedBatch:
    """Return the documents of a step, random tokens, one behind the other."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, CONFIG["vocab_size"], size, dtype=np.int32) for size in lengths.tolist()]
    return vl.collate(tokens, vl.pack(lengths, capacity=int(lengths.sum()), method="next_fit"))


class _Float32Cost(vl.CostModel):
    """Counts gradients of keys and values, which are float32, as wide as these are here, and not twice as wide."""

    def _exchanges(self, kv: float, queries: float, outputs: float, again: float) -> dict[str, Any]:
        found = super()._exchanges(kv, queries, outputs, again)
        return found | {"key_value_back_bytes": found["key_value_back_bytes"] - kv}


def cost_of(hardware: Hardware) -> vl.CostModel:
    """Return the model on this machine; messages are float32, and the cost model counts two bytes a number.

    The engine gathers what ranks share before it attends to it: none of that is hidden.
    """
    near = replace(hardware.intra, bytes_per_s=hardware.intra.bytes_per_s / 2)
    shape = vl.ModelShape.from_config(LlamaConfig(**CONFIG))
    fast = replace(hardware, intra=near)
    return _Float32Cost(model=shape, hardware=fast, recompute="full", kernels="eager", exchange_overlap=0.0)


def measured(rank: int, found: list[Step], rounds: int) -> dict[str, Any]:
    model = decoder()
    engine = vl.SliceEngine(model, mesh=found[0].plan.mesh, rank=rank)
    batches = [batch_of(step.plan.lengths) for step in found]
    shape = vl.ModelShape.from_config(LlamaConfig(**CONFIG))
    bench = Bench.of(shape, device=torch.device("cpu"), dtype=torch.float32, budget_s=BUDGET_S)
    spans: list[list[tuple[float, float]]] = [[] for _ in found]
    tasks: list[list[list[float]]] = [[] for _ in found]
    exchanges = []
    for number in range(rounds + 1):
        if number:
            dist.barrier()
            bench.run_round()
            exchanges.append(turns(rank))
        for index, step in enumerate(found):
            model.zero_grad(set_to_none=False)
            dist.barrier()
            begun = time.perf_counter()
            stats = engine.step(batches[index], step.plan)
            if number:
                spans[index].append((begun, time.perf_counter()))
                tasks[index].append(stats.places[0].seconds.tolist())
    engine.close()
    hardware = bench.calibration().hardware
    if rank < 2:
        near = {"gpus_per_node": dist.get_world_size(), "intra": link_of(exchanges)}
        hardware = replace(hardware, **near)
    return {"spans": spans, "tasks": tasks, "hardware": hardware}


def first_cost() -> vl.CostModel:
    """Return the model by a first calibration, so that planning sees what a user's would."""
    torch.set_num_threads(1)
    shape = vl.ModelShape.from_config(LlamaConfig(**CONFIG))
    return cost_of(calibrate(shape, device="cpu", budget_s=BUDGET_S / 2).hardware)


def planned(documents: int = DOCUMENTS) -> list[Step]:
    cost = first_cost()
    return [step for name in SETS for step in steps(source_of(name), lengths_of(name, documents), cost, MESH)]


def compared(
    found: list[Step], ranks: list[dict[str, Any]], first: str = "packed, as users run it"
) -> dict[str, Any]:
    """Compare steps with the simulator, and their gains over those of the method `first`."""
    cost = cost_of(ranks[0]["hardware"])
    rows, rounds = [], []
    for index, step in enumerate(found):
        spans = np.array([rank["spans"][index] for rank in ranks])  # [ranks, rounds, 2]
        taken = spans[:, :, 1].max(axis=0) - spans[:, :, 0].min(axis=0)
        rounds.append(taken)
        timeline = vl.simulate(step.plan, cost)
        rows.append(
            {
                "documents": step.documents,
                "method": step.method,
                "tokens": step.plan.num_tokens,
                "micropacks": [step.plan.forward.num_micropacks, step.plan.backward.num_micropacks],
                "predicted_s": timeline.makespan_s,
                "measured_s": float(quiet(taken)),
                "rounds_s": taken.tolist(),
                "bubble": timeline.bubble_ratio,
            }
        )
    every = np.stack(rounds, axis=1)
    for row in rows:
        row["error"] = row["predicted_s"] / row["measured_s"] - 1
        whole = next(x for x in rows if (x["documents"], x["method"]) == (row["documents"], first))
        for kind in ("predicted_s", "measured_s"):
            row[f"gain_{kind[:-2]}"] = whole[kind] / row[kind]
    error = mape(*(np.array([row[kind] for row in rows]) for kind in ("predicted_s", "measured_s")))
    repeat = mape(quiet(every[::2]), quiet(every[1::2]))
    limit = max(LEAST_LIMIT, 1.5 * repeat)
    return {"steps": rows, "mape": error, "repeat_mape": repeat, "limit": limit, "met": bool(error <= limit)}


def run(rounds: int = ROUNDS) -> dict[str, Any]:
    found = planned()
    return {"model": CONFIG, **compared(found, side_by_side(measured, MESH.num_gpus, found, rounds))}


MERGED_ROUNDS = 5
MERGED_DOCUMENTS = 12
RANKS = replace(MESH, dp=2, pp=1)


def merged_plans(cost: vl.CostModel, documents: int = MERGED_DOCUMENTS) -> list[Step]:
    """Plan steps of one longest document beside short ones: packed, in slices, and shared."""
    found = []
    alone = Search(
        splits_backward=False, asymmetric=False, least_rows=LEAST_ROWS, repairs=False, merges=False
    )
    for name in SETS:
        short = np.minimum(lengths_of(name, documents), CAPACITY // 8)
        lengths = np.append(short, CAPACITY).astype(np.int32)
        given: dict[str, Any] = {"cost": cost, "mesh": RANKS}
        packed = vl.plan_step(lengths, method="packed", capacity=CAPACITY, **given)
        whole = vl.plan_step(lengths, search=alone, **given)
        shared = vl.plan_step(lengths, search=replace(alone, merges=True), **given)
        assert shared.num_merged >= 1
        ways = {"packed, as users run it": packed, "on one rank": whole, "shared": shared}
        told = f"one of {CAPACITY:,} tokens beside {source_of(name)}"
        found += [Step(documents=told, method=way, plan=plan) for way, plan in ways.items()]
    return found


def run_merging(rounds: int = MERGED_ROUNDS) -> dict[str, Any]:
    found = merged_plans(first_cost())
    return {"model": CONFIG, **compared(found, side_by_side(measured, RANKS.num_gpus, found, rounds))}


STEPS = 12
AHEAD_DOCUMENTS = 24
AHEAD_SET = "mix_pretrain_docs"


def run_ahead(num_steps: int = STEPS, documents: int = AHEAD_DOCUMENTS) -> dict[str, Any]:
    """Take steps with plans made ahead and with plans made before; seconds of both, and waited for plans."""
    torch.set_num_threads(1)
    # On one GPU nothing is exchanged, and the process that plans takes no class of this file.
    cost = vl.CostModel(
        model=vl.ModelShape.from_config(LlamaConfig(**CONFIG)),
        hardware=vl.Hardware.named("h100"),
        recompute="full",
        kernels="eager",
    )
    mesh = vl.Mesh()
    lengths = [lengths_of(AHEAD_SET, documents, seed) for seed in range(num_steps)]
    search = Search(least_rows=LEAST_ROWS)
    given: dict[str, Any] = {"cost": cost, "mesh": mesh, "search": search}
    before = [vl.plan_step(each, **given) for each in lengths]
    model, batches = decoder(), [batch_of(each) for each in lengths]
    engine = vl.SliceEngine(model)
    engine.step(batches[0], before[0])
    apart: list[float] = []
    together: list[float] = []
    waited: list[float] = []
    answers: list[str] = []
    with vl.Planner(lengths, **given) as planner:
        for step in range(num_steps):
            model.zero_grad(set_to_none=False)
            begun = time.perf_counter()
            plan = planner.take(step)
            taken = time.perf_counter()
            engine.step(batches[step], plan)
            together.append(time.perf_counter() - taken)
            waited.append(taken - begun)
            answers.append("quick" if plan.answered_by.startswith("quick") else "ahead")
    for step in range(num_steps):
        model.zero_grad(set_to_none=False)
        begun = time.perf_counter()
        engine.step(batches[step], before[step])
        apart.append(time.perf_counter() - begun)
    return {
        "documents": source_of(AHEAD_SET),
        "steps": num_steps,
        "tokens": [int(each.sum()) for each in lengths],
        "first_wait_s": waited[0],
        "wait_s": median(waited[1:]),
        "longest_wait_s": max(waited[1:]),
        "step_s": median(together),
        "step_s_without_planner": median(apart),
        "wait_over_step": float(np.sum(waited[1:]) / np.sum(together[1:])),
        "answered": {word: answers.count(word) for word in ("ahead", "quick")},
    }
