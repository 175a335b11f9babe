"""One cell of the planning benchmark: every method plans the same step, and one simulator runs their plans."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.plan_grid import LEAST_ROWS, Cell, Int32Array
from varlen.cost.model import CostModel
from varlen.errors import PlanError
from varlen.plan.api import plan_step, repairs
from varlen.plan.bound import lower_bound
from varlen.plan.search import Search
from varlen.simulate.api import simulate
from varlen.step_plan import StepPlan

METHODS = ("as_run", "packed", "balanced", "dynamic_cp", "sliced", "micropack")
"""`as_run`: packs at the capacity, round robin, 1F1B; all others at their best setting."""


def measured(cell: Cell, methods: tuple[str, ...] = METHODS) -> dict[str, Any]:
    """Plan a cell by every method and simulate the plans.

    Args:
        cell: which step, on what.
        methods: of `METHODS`.

    Returns:
        Plain data: the step, its bound, and of each method the seconds, ratios and bytes.
    """
    warm_up(methods)
    lengths, told = cell.drawn()
    cost = cell.cost()
    record: dict[str, Any] = {"key": cell.key, "cell": cell.to_json(), "is_large": cell.is_large, **told}
    record["methods"] = {name: of_method(name, lengths, cell, cost) for name in methods}
    return record


def of_method(
    name: str, lengths: Int32Array, cell: Cell, cost: CostModel, search: Search | None = None
) -> dict[str, Any]:
    """Plan a step by one method and simulate the plan; what doesn't fit is told with its sentence.

    Args:
        name: of `METHODS`.
        lengths: int32 `[documents]`.
        cell: the mesh and capacity.
        cost: of the cell.
        search: what may be tried; None for everything.
    """
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
    Others are planned at every recomputation, and with keys and values offloaded; the fastest plan counts: some fit
    with little recomputation only in tiny packs.

    Raises:
        PlanError: memory holds no plan.
    """
    call = functools.partial(plan_step, lengths, mesh=cell.mesh)
    if name == "as_run":
        return call(cost=cost, method="packed", capacity=cell.capacity, search=search)
    if name in ("sliced", "micropack"):
        return call(cost=cost, method=name, search=search)
    tuned = functools.partial(
        call, method=name, capacity=cell.capacity, tuned=True, search=replace(search, repairs=False)
    )
    best, best_s, refusal = None, np.inf, PlanError("nothing was tried")
    for more in repairs(cost, cell.mesh):
        if lower_bound(lengths, more, cell.mesh, least_rows=1).seconds >= best_s:
            break  # what has to be recomputed takes longer than the whole step does with less of it
        try:
            plan = tuned(cost=more)
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
