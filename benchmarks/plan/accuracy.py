"""`python -m benchmarks.plan.accuracy [FILE]`: a small real model's slices and packs, predicted and then timed.

The machine is calibrated on some shapes, and MicroPacks of others run one by one on a Llama with random weights:
slices behind long prefixes, their mixes with short documents, packs of short documents; with and without
recomputation, both passes cut alike and cut apart. Calibration and steps take turns, round after round, so that both
meet the same moods of the machine; a time is the lower quartile of its rounds on both sides. Predictions are those of
the cost model that planner and simulator ask. Peak memory is that of a step in bfloat16, by tracked tensor bytes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.models import llama, llama_sizes
from benchmarks.records import RESULTS, load, save, stamp
from benchmarks.running import pipelines
from benchmarks.running.processes import side_by_side
from benchmarks.running.steps import CAPACITY, LEAST_ROWS, SETS, Step, lengths_of, source_of
from varlen.cost import kernels
from varlen.cost.fit import mape
from varlen.cost.hardware import Hardware
from varlen.cost.memory import Saved
from varlen.cost.model import CostModel
from varlen.cost.rates import FORWARD_HEAD, FORWARD_LAYER, INPUT_HEAD, INPUT_LAYER, WEIGHT_HEAD, WEIGHT_LAYER
from varlen.cost.shape import ModelShape
from varlen.plan.api import plan_step
from varlen.plan.search import Search
from varlen.runtime.calibrate import Bench, quiet
from varlen.runtime.clock import bytes_meter
from varlen.runtime.stage_run import TaskRun
from varlen.runtime.step import run_step
from varlen.simulate.api import simulate
from varlen.step_plan import BACKWARD, FORWARD, Mesh, MicroPacks, Recompute, StepPlan, spread

CONFIG = llama_sizes(512, 1408, 8, 4, layers=3, vocab=4096, positions=8192)
MEMORY_CONFIG = {**CONFIG, "num_hidden_layers": 8, "vocab_size": 1024}
"""Deeper, so that what rows hold outweighs what passes, as in models that are trained."""
LENGTHS = (3000, 1500, 333, 90, 210, 60, 400, 150, 280)
SHORT = tuple((document, 0, LENGTHS[document]) for document in (5, 6, 7, 8))
FORWARD_PACKS = (
    *[((0, start, stop),) for start, stop in ((0, 700), (700, 1300), (1300, 1900), (1900, 2450))],
    ((0, 2450, 3000), (2, 0, 333), (3, 0, 90)),
    ((1, 0, 850),),
    ((1, 850, 1500), (4, 0, 210)),
    SHORT,
)
"""Slim slices, Mixes of a last slice with short documents, a Pack: document, start, stop."""
BACKWARD_PACKS = (
    SHORT,
    ((1, 1100, 1500), (4, 0, 210)),
    ((1, 600, 1100),),
    ((1, 0, 600),),
    ((0, 2300, 3000), (3, 0, 90)),
    ((0, 1500, 2300), (2, 0, 333)),
    ((0, 900, 1500),),
    ((0, 0, 900),),
)
"""The same documents cut elsewhere."""
BUDGET_S = 40.0
ROUNDS = 7
LEAST_LIMIT = 0.05
MEMORY_LIMIT = 0.02
TARGET_BYTES = 16
"""Of a token: its label and its weight, which the engine holds of a whole step and the simulator leaves out."""
Packs = Sequence[Sequence[tuple[int, int, int]]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One planned step that is predicted and run."""

    name: str
    plan: StepPlan


def one_gpu(packs: Packs) -> MicroPacks:
    slices = np.array([piece for pack in packs for piece in pack], np.int32)
    return MicroPacks(
        rank_offsets=np.array([0, len(packs)], np.int32),
        slice_offsets=np.cumsum([0, *(len(pack) for pack in packs)], dtype=np.int32),
        document_ids=slices[:, 0].copy(),
        starts=slices[:, 1].copy(),
        stops=slices[:, 2].copy(),
    )


def case(name: str, forward: Packs, backward: Packs, recompute: Recompute) -> Case:
    order = [FORWARD] * len(forward) + [BACKWARD] * len(backward)
    plan = StepPlan(
        lengths=np.array(LENGTHS, np.int32),
        first_ranks=np.zeros(len(LENGTHS), np.int32),
        num_ranks=np.ones(len(LENGTHS), np.int32),
        forward=one_gpu(forward),
        backward=one_gpu(backward),
        tasks=np.array(order, np.uint8),
        task_offsets=np.array([0, len(order)], np.int32),
        mesh=Mesh(),
        recompute=recompute,
    )
    return Case(name=name, plan=plan)


def cases() -> list[Case]:
    return [
        case("no recomputation", FORWARD_PACKS, FORWARD_PACKS[::-1], "none"),
        case("full recomputation, passes cut apart", FORWARD_PACKS, BACKWARD_PACKS, "full"),
    ]


def tokens(settings: dict[str, Any]) -> torch.Tensor:
    return torch.randint(
        0, settings["vocab_size"], (sum(LENGTHS),), generator=torch.Generator().manual_seed(0)
    )


def predicted_s(cost: CostModel, plan: StepPlan) -> np.ndarray:
    """Return the cost model's seconds of each task in the plan's order.

    `run_step` runs all of the head, its forward too, in backward tasks.
    """
    price, rates, layers = kernels.price, cost.rates(Mesh()), cost.model.layers
    forward, backward = (
        price(p.slice_offsets, p.starts, p.stops, np.ones(len(p.starts), np.int32), rates)
        for p in (plan.forward, plan.backward)
    )
    whole = layers * (backward[:, INPUT_LAYER] + backward[:, WEIGHT_LAYER])
    head = backward[:, [FORWARD_HEAD, INPUT_HEAD, WEIGHT_HEAD]].sum(axis=1)
    return np.concatenate([layers * forward[:, FORWARD_LAYER], whole + head])


def timed(found: list[Case], device: torch.device) -> dict[str, Any]:
    model, ids = llama(CONFIG, device, torch.float32), tokens(CONFIG).to(device)
    shape = ModelShape.from_config(model.config)
    bench = Bench.of(shape, device=device, dtype=torch.float32, budget_s=BUDGET_S)
    runs: dict[str, list[TaskRun]] = {each.name: [] for each in found}
    for each in found:
        run_step(model, ids, each.plan)
    rounds = max(ROUNDS, bench.num_rounds)
    for number in range(rounds):
        bench.run_round()
        for each in found if number < ROUNDS else ():
            runs[each.name].append(run_step(model, ids, each.plan).task_runs[0])
    calibration = bench.calibration()
    steps = [
        _compared(
            each, CostModel(model=shape, hardware=calibration.hardware, recompute=each.plan.recompute), runs
        )
        for each in found
    ]
    return {
        "calibration": {
            "source": calibration.hardware.source,
            "rounds": calibration.rounds,
            "repeat_mape": calibration.repeat_mape,
            "held_out_mape_attention": calibration.mape_attention,
            "held_out_mape_layer_without_attention": calibration.mape_gemm,
            "held_out": calibration.table(),
        },
        "steps": steps,
        **_summary(steps),
    }


def _compared(each: Case, cost: CostModel, runs: dict[str, list[TaskRun]]) -> dict[str, Any]:
    rounds = np.stack([run.seconds for run in runs[each.name]])
    packs = {FORWARD: each.plan.forward, BACKWARD: each.plan.backward}
    tasks = []
    for kind, index, predicted, measured in zip(
        each.plan.tasks.tolist(),
        runs[each.name][0].micropacks.tolist(),
        predicted_s(cost, each.plan).tolist(),
        quiet(rounds).tolist(),
    ):
        bounds = slice(*packs[kind].slice_offsets[index : index + 2].tolist())
        spans = zip(packs[kind].starts[bounds].tolist(), packs[kind].stops[bounds].tolist())
        tasks.append(
            {
                "pass": "forward" if kind == FORWARD else "backward",
                "slices": [f"{start}-{stop}" for start, stop in spans],
                "predicted_s": predicted,
                "measured_s": measured,
                "error": predicted / measured - 1.0,
            }
        )
    return {"name": each.name, "tasks": tasks, "rounds_s": rounds.tolist()}


def _summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors over all tasks, and what the machine's own unrest allows."""
    tasks = [task for step in steps for task in step["tasks"]]
    rounds = np.concatenate([np.array(step["rounds_s"]) for step in steps], axis=1)
    predicted, measured = (np.array([task[name] for task in tasks]) for name in ("predicted_s", "measured_s"))
    repeat = mape(quiet(rounds[1::2]), quiet(rounds[::2]))
    error, limit = mape(predicted, measured), max(LEAST_LIMIT, 1.5 * repeat)
    is_forward = np.array([task["pass"] == "forward" for task in tasks])
    return {
        "tasks": len(tasks),
        "mape": error,
        "mape_forward": mape(predicted[is_forward], measured[is_forward]),
        "mape_backward": mape(predicted[~is_forward], measured[~is_forward]),
        "whole_steps": [
            sum(t["predicted_s"] for t in step["tasks"]) / sum(t["measured_s"] for t in step["tasks"]) - 1.0
            for step in steps
        ],
        "repeat_mape": repeat,
        "repeat_mape_of_single_runs": float(np.mean(np.abs(np.diff(rounds, axis=0)) / rounds[:-1])),
        "limit": limit,
        "met": bool(error <= limit),
    }


def remembered(found: list[Case], device: torch.device) -> list[dict[str, Any]]:
    """Run the steps in bfloat16 with every tensor counted, beside the cost model's peaks."""
    model, ids = llama(MEMORY_CONFIG, device, torch.bfloat16), tokens(MEMORY_CONFIG).to(device)
    shape = ModelShape.from_config(model.config)
    rows = []
    for each in found:
        with bytes_meter(device) as meter:
            before = meter.live
            run = run_step(model, ids, each.plan, meter=meter).task_runs[0]
        measured = int(run.peak_bytes.max()) - before - TARGET_BYTES * each.plan.num_tokens
        predicted = predicted_bytes(shape, each.plan)
        rows.append(
            {
                "name": each.name,
                "predicted_bytes": predicted,
                "measured_bytes": measured,
                "error": predicted / measured - 1.0,
                "limit": MEMORY_LIMIT,
                "met": bool(abs(predicted / measured - 1.0) <= MEMORY_LIMIT),
            }
        )
    return rows


def predicted_bytes(shape: ModelShape, plan: StepPlan, saved: Saved = "layers") -> float:
    """Return the simulator's peak of a step, parameters, gradients, optimizer states and tokens left out."""
    cost = CostModel(model=shape, hardware=Hardware.named("h100"), kernels="eager", saved=saved)
    states = cost.as_planned(plan).memory(plan.mesh).state_bytes
    return float((simulate(plan, cost).peaks_bytes - states).max())


MESHES = {"two stages": Mesh(pp=2), "two ranks": Mesh(dp=2)}
"""Of the processes, one core each, that run the steps of every method."""
COMPARED = ("as_run", "packed", "balanced", "dynamic_cp", "sliced", "micropack")
METHOD_ROUNDS = 4
LONGEST = 2048
"""Tokens of the longest document of two ranks, which is more than a rank's share of the step."""


def of_methods(name: str, is_quick: bool = False) -> dict[str, Any]:
    """Run steps by every method's plan on two processes, beside what the simulator says; return plain data.

    Messages, waits and the sums of gradients are all part of it, which `timed` leaves out.
    """
    torch.set_num_threads(1)
    cost, mesh, found = pipelines.first_cost(), MESHES[name], []
    for source in SETS[: 1 if is_quick else 2]:
        lengths = lengths_of(source, 12 if mesh.dp > 1 else pipelines.DOCUMENTS)
        if mesh.dp > 1:
            lengths = np.append(np.minimum(lengths, LONGEST // 4), LONGEST).astype(np.int32)
        found += [
            Step(documents=source_of(source), method=method, plan=_best(method, lengths, cost, mesh))
            for method in COMPARED
        ]
    ranks = side_by_side(pipelines.measured, mesh.num_gpus, found, 2 if is_quick else METHOD_ROUNDS)
    compared = pipelines.compared(found, ranks, first="as_run")
    return {"mesh": name, **compared}


def _best(method: str, lengths: np.ndarray, cost: CostModel, mesh: Mesh) -> StepPlan:
    """Return a method's fastest plan with any context parallelism, whose documents ranks share as ranks of dp."""
    search = Search(least_rows=LEAST_ROWS, repairs=False, asymmetric=False)
    if method == "as_run":
        return plan_step(lengths, cost=cost, mesh=mesh, method="packed", capacity=CAPACITY)
    narrow = [replace(mesh, dp=mesh.dp // cp, cp=cp) for cp in (1, 2) if mesh.dp % cp == 0]
    plans = [
        plan_step(lengths, cost=cost, mesh=each, method=method, tuned=True, search=search)  # type: ignore[arg-type]
        for each in (narrow if method != "micropack" else narrow[:1])
    ]
    best = min(plans, key=lambda plan: simulate(plan, cost).makespan_s)
    return spread(best, mesh.dp // best.mesh.dp)


def main() -> int:
    torch.set_num_threads(1)
    device, begun, before = torch.device("cpu"), time.perf_counter(), load()
    found = cases()
    times, memory = timed(found, device), remembered(found, device)
    result = {
        **stamp(),
        "load": [before, load()],
        "seconds": round(time.perf_counter() - begun),
        "model": CONFIG,
        "model_of_memory": MEMORY_CONFIG,
        "lengths": LENGTHS,
        "times": times,
        "memory": memory,
    }
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "plan" / f"accuracy-{result['date']}.json"
    save(result, out)
    for step in times["steps"]:
        print(step["name"])
        for task in step["tasks"]:
            predicted, measured = (1e3 * task[of] for of in ("predicted_s", "measured_s"))
            spans = ", ".join(task["slices"])
            print(f"  {task['pass']:9}{spans:42}{predicted:9.1f} ms{measured:9.1f} ms{task['error']:+8.1%}")
    print(
        f"MAPE {times['mape']:.1%} (forward {times['mape_forward']:.1%}, backward {times['mape_backward']:.1%}), "
        f"repeat to repeat {times['repeat_mape']:.1%}, limit {times['limit']:.1%}; "
        f"single runs repeat to {times['repeat_mape_of_single_runs']:.1%}"
    )
    for row in memory:
        print(
            f"peak memory, {row['name']}: {row['predicted_bytes'] / 2**20:.1f} MiB predicted, "
            f"{row['measured_bytes'] / 2**20:.1f} MiB measured, {row['error']:+.2%}"
        )
    return int(not (times["met"] and all(row["met"] for row in memory)))


if __name__ == "__main__":
    sys.exit(main())
