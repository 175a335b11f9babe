"""Cells of the planning benchmark: every method plans the same step, and one simulator runs their plans.

And what each idea of the planner brings, taken away one by one (`ablated`); how long planning takes on one core
(`planning_times`); and how many tasks a second the simulator runs (`engine_speed`).
"""

from __future__ import annotations

import functools
import itertools
import resource
import time
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from benchmarks.checks import WrongResultError
from benchmarks.plan.grid import CAPACITIES, LEAST_ROWS, SETS, Cell, Int32Array
from varlen.cost.model import CostModel
from varlen.errors import PlanError
from varlen.plan.api import plan_step, repairs
from varlen.plan.bound import lower_bound
from varlen.plan.search import Search
from varlen.simulate import kernels
from varlen.simulate.api import simulate
from varlen.simulate.graph import build_graph, durations
from varlen.step_plan import StepPlan

METHODS = ("as_run", "packed", "balanced", "dynamic_cp", "sliced", "micropack")
"""`as_run`: packs at the capacity, round robin, 1F1B; all others at their best setting."""


def measured(cell: Cell, methods: tuple[str, ...] = METHODS) -> dict[str, Any]:
    warm_up(methods)
    lengths, told = cell.drawn()
    cost = cell.cost()
    record: dict[str, Any] = {"key": cell.key, "cell": asdict(cell), "is_large": cell.is_large, **told}
    record["methods"] = {name: of_method(name, lengths, cell, cost) for name in methods}
    return record


def of_method(
    name: str, lengths: Int32Array, cell: Cell, cost: CostModel, search: Search | None = None
) -> dict[str, Any]:
    """Plan a step by one method and simulate the plan; what doesn't fit is told with its sentence."""
    begun = time.perf_counter()
    try:
        plan = planned(name, lengths, cell, cost, search or Search())
    except PlanError as error:
        return {"refused": str(error), "planning_s": time.perf_counter() - begun}
    planning_s = time.perf_counter() - begun
    return {**figures(plan, cost, lengths), "planning_s": planning_s}


def planned(name: str, lengths: Int32Array, cell: Cell, cost: CostModel, search: Search) -> StepPlan:
    """Return the plan of a step by one method.

    Ours, and packs as users run them, come as a user gets them: more is recomputed where that fits or is faster.
    Others are planned with every context parallelism on the same GPUs, at every recomputation, and with keys and
    values offloaded; the fastest plan counts: some fit with little recomputation only in tiny packs.
    """
    if name == "as_run":
        return plan_step(
            lengths, mesh=cell.mesh, cost=cost, method="packed", capacity=cell.capacity, search=search
        )
    if name == "micropack":
        return plan_step(lengths, mesh=cell.mesh, cost=cost, search=search)
    settings: dict[str, Any] = {"method": name, "tuned": True, "search": replace(search, repairs=False)}
    settings |= {"capacity": cell.capacity} if name in ("packed", "dynamic_cp") else {}
    best, best_s, refusal = None, np.inf, PlanError("nothing was tried")
    for mesh, more in ((each, more) for each in cell.meshes for more in repairs(cost, each)):
        if lower_bound(lengths, more, mesh, least_rows=1).seconds >= best_s:
            continue  # what has to be recomputed takes longer than the whole step does with less of it
        try:
            plan = plan_step(lengths, mesh=mesh, cost=more, **settings)
        except PlanError as error:
            refusal = error
            continue
        taken_s = simulate(plan, cost).makespan_s
        if taken_s < best_s:
            best, best_s = plan, taken_s
    if best is None:
        raise refusal
    return best


def figures(plan: StepPlan, cost: CostModel, lengths: Int32Array) -> dict[str, Any]:
    """Simulate a plan and return its figures as plain data.

    The bound is that of what the plan recomputes: a plan that recomputes more has more to do.
    """
    used = cost.as_planned(plan)
    timeline = simulate(plan, used)
    bound = lower_bound(lengths, used, plan.mesh, least_rows=LEAST_ROWS)
    return {
        "step_s": timeline.makespan_s,
        "bound_s": bound.seconds,
        "work_bound_s": bound.work_s,
        "ratio": timeline.makespan_s / bound.seconds,
        "bubble": timeline.bubble_ratio,
        "imbalance": timeline.imbalance,
        "peak_gb": timeline.peak_bytes / 1e9,
        "fits": bool(timeline.peak_bytes <= used.limit_bytes * (1 + 1e-9)),
        "cp": plan.mesh.cp,
        "idle_ranks": int((plan.forward.counts == 0).sum()) if plan.method == "packed" else 0,
        "micropacks": int(plan.forward.counts.max()),
        "merged": plan.num_merged,
        "recompute": plan.recompute,
        "recompute_share": plan.recompute_share,
        "offload": plan.offload,
        "answered_by": plan.answered_by,
    }


@functools.cache
def warm_up(methods: tuple[str, ...]) -> None:
    """Compile what the methods call, so that the first cell's planning is timed like all others'."""
    cell = Cell(lengths="", capacity=4096, documents=64, model="llama-2-7b", dp=2, pp=2, tp=4, seed=0)
    lengths = np.random.default_rng(0).integers(16, 4096, 64).astype(np.int32)
    for name in methods:
        of_method(name, lengths, cell, cell.cost())


WITHOUT: dict[str, dict[str, Any]] = {
    "slicing": {"slices": False},
    "graded sizes": {"grades": False},
    "zero-bubble": {"splits_backward": False},
    "DP-Merge": {"merges": False},
    "asymmetry": {"asymmetric": False},
    "order": {"orders": False},
}
"""Ideas that are on, and the setting that takes each away."""
WITH: dict[str, dict[str, Any]] = {"exact solving": {"exact": True}}
"""Ideas that are off, and the setting that adds each."""
PEERS = ("as_run", "packed", "balanced")
SETTINGS: dict[str, dict[str, Any]] = {
    "calibrated": {},
    "FLOPs": {"mode": "flops"},
    "full recomputation": {"recompute": "full"},
    "tight memory": {"memory_fraction": 0.6},
    "published rates": {"rates": "published"},
}
"""What is changed of a cell."""
_CELLS = [
    Cell(lengths=name, capacity=capacity, documents=512, model="llama-2-7b", dp=dp, pp=pp, tp=8, seed=1)
    for name, capacity, (dp, pp) in itertools.product(SETS, (131_072, 262_144), ((4, 4), (8, 8)))
]
_SETTING_OF = {replace(cell, **changed): name for name, changed in SETTINGS.items() for cell in _CELLS}
ABLATION_CELLS = list(_SETTING_OF)
"""Each idea in each setting: 24 cells."""
EXACT_CELLS = frozenset(_CELLS[::4])
"""In which exact solving is tried, which takes longer than all else together."""


def ablated(cell: Cell) -> dict[str, Any]:
    """Plan a cell with everything, with each idea taken away or added, and by peers; return plain data."""
    warm_up(("micropack", *PEERS))
    lengths, _ = cell.drawn()
    cost = cell.cost()
    tried = WITHOUT | (WITH if cell in EXACT_CELLS else {})
    named = {name: Search(**changed) for name, changed in tried.items()}
    plans = {
        name: of_method("micropack", lengths, cell, cost, search)
        for name, search in {"everything": Search(), **named}.items()
    }
    plans |= {name: of_method(name, lengths, cell, cost) for name in PEERS}
    return {"cell": asdict(cell), "setting": _SETTING_OF[cell], "plans": plans}


SMALL, LARGE, HUGE = "512 on 4x4", "8192 on 64x16", "100,000 on 64x16"
"""Documents, and dp x pp."""
_SMALL_TPS = {"llama-2-7b": (4, 8), "llama-2-13b": (4, 8), "llama-30b": (4,), "llama-2-70b": (4, 8)}
"""Those that the grid has on 4x4; the 52 heads of 30B can't be divided by 8."""


TIMED = {
    (SMALL, model, tp): [
        Cell(name, capacity, 512, model, 4, 4, tp, seed=1)
        for name, capacity in itertools.product(SETS, CAPACITIES)
    ]
    for model, tps in _SMALL_TPS.items()
    for tp in tps
} | {
    (LARGE, model, 8): [Cell(name, 131_072, 8192, model, 64, 16, 8, seed=1) for name in SETS]
    for model in ("llama-2-7b", "llama-2-70b")
}
TIMED[HUGE, "llama-2-70b", 8] = [
    Cell(name, 131_072, 100_000, "llama-2-70b", 64, 16, 8, seed=1) for name in SETS[:3]
]
"""Steps of one size, model and tp; other meshes are part of the grid, where planning is timed beside other work."""


def planning_times(size: str, model: str, tp: int, rounds: int) -> dict[str, Any]:
    """Time `plan_step` with its default search, on one core; return plain data.

    Seconds are those of the processor: planning runs in one thread and waits for nothing, and what else the machine
    does isn't counted.
    """
    warm_up(("micropack",))
    steps = []
    for place, cell in enumerate(TIMED[size, model, tp]):
        lengths, told = cell.drawn()
        cost = cell.cost()
        seconds = []
        for _ in range(rounds + (place == 0)):
            begun = time.process_time()
            plan = planned("micropack", lengths, cell, cost, Search())
            seconds.append(time.process_time() - begun)
        found = {"cell": cell.key, "tokens": told["tokens"], "recompute": plan.recompute}
        steps.append({**found, "seconds": seconds[-rounds:]})
    most = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"size": size, "model": model, "tp": tp, "steps": steps, "most_bytes": most}


def engine_speed(rounds: int) -> dict[str, Any]:
    """Simulate the plan of a large step and time it; return plain data."""
    cell = next(one for one in TIMED[LARGE, "llama-2-7b", 8] if one.lengths == "pub_distca_prolong")
    lengths, _ = cell.drawn()
    plan = planned("micropack", lengths, cell, cell.cost(), Search())
    cost = cell.cost().as_planned(plan)
    graph = build_graph(plan, durations(plan, cost), np.ones(plan.mesh.dp * plan.mesh.pp), True, True)
    count = len(graph.kinds)
    starts, stops, deciders = np.empty(count), np.empty(count), np.empty(count, np.int32)
    engine_s, whole_s = [], []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        kernels.run_tasks(
            graph.stream_offsets,
            graph.afters,
            graph.lags_s,
            graph.lengths_s,
            graph.groups,
            graph.num_groups,
            starts,
            stops,
            deciders,
        )
        engine_s.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        timeline = simulate(plan, cost)
        whole_s.append(time.perf_counter() - begun)
        if not np.array_equal(timeline.stops_s, stops):
            raise WrongResultError(f"{cell.key}: the engine alone ends tasks at other times than vl.simulate")
    return {"cell": asdict(cell), "tasks": count, "engine_s": engine_s[1:], "seconds": whole_s[1:]}
