"""Order the tasks of candidates, and score them: the simulated makespan, or inf if they don't fit into memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from varlen.cost.model import CostModel
from varlen.plan.search import Candidate
from varlen.simulate.api import simulate
from varlen.simulate.dispatch import Dispatched, dispatch, loads_s, pipelines_of
from varlen.simulate.graph import durations, stage_costs
from varlen.simulate.schedules import fixed_schedule
from varlen.step_plan import Mesh, MicroPacks, PlanMethod, StepPlan, TaskArray
from varlen.types import Int32Array

ROUNDING = 1 + 1e-9
_LEAST_COUNTS = 8  # numbers of micro-batches that are always tried: up to 12 a stage
_PATIENCE = 3  # after so many further numbers without a faster plan, the search ends


def best_plan(
    candidates_of: Callable[[int], Iterable[Candidate]],
    counts: tuple[int, ...],
    lengths: Int32Array,
    cost: CostModel,
    mesh: Mesh,
    method: PlanMethod,
) -> StepPlan | None:
    """Return the fastest candidate that fits into memory, the first of equals; None if none fits.

    Candidates are dispatched, and the fastest is also tried with the fixed schedule. If ranks share documents, all of
    them must run one order, so only the fixed schedule is tried. Candidates whose work takes longer than the
    best plan are skipped.
    """
    best, least_s, without_gain = None, math.inf, 0
    for number, count in enumerate(counts):
        if number >= _LEAST_COUNTS and without_gain >= _PATIENCE:
            break
        without_gain += best is not None
        for candidate in candidates_of(count):
            faster = _faster(unordered(candidate, lengths, cost, mesh, method), cost, least_s)
            if faster:
                best, least_s = faster
                without_gain = 0
    if best is None or best.num_merged or mesh.sharding == "parameters":
        return best
    plain = _scheduled(best)
    return plain if score(plain, cost) < score(best, cost) else best


def as_scheduled(
    candidate: Candidate, lengths: Int32Array, cost: CostModel, mesh: Mesh, method: PlanMethod
) -> StepPlan:
    """Return a candidate as a plan with the fixed schedule, whether it fits or not."""
    return _scheduled(unordered(candidate, lengths, cost, mesh, method))


def score(plan: StepPlan, cost: CostModel) -> float:
    """Return the simulated seconds of a plan; inf if it doesn't fit into memory."""
    timeline = simulate(plan, cost)
    return timeline.makespan_s if timeline.peak_bytes <= cost.limit_bytes * ROUNDING else math.inf


def unordered(
    candidate: Candidate, lengths: Int32Array, cost: CostModel, mesh: Mesh, method: PlanMethod
) -> StepPlan:
    """Return a candidate as a plan that has no tasks yet."""
    multiple = mesh.pp if mesh.virtual_stages > 1 else 1
    return StepPlan(
        lengths=lengths,
        first_ranks=candidate.first_ranks,
        num_ranks=candidate.num_ranks,
        forward=_rounded(candidate.forward, multiple),
        backward=_rounded(candidate.backward, multiple),
        tasks=np.zeros(0, np.uint8),
        task_offsets=np.zeros(mesh.dp * mesh.pp + 1, np.int32),
        mesh=mesh,
        splits_backward=candidate.splits_backward,
        method=method,
        recompute=cost.recompute,
        recompute_share=cost.recompute_share,
        offload=cost.offload,
        answered_by=candidate.label,
    )


def _rounded(packs: MicroPacks, multiple: int) -> MicroPacks:
    """Add empty MicroPacks at each rank's end, up to a multiple: interleaved schedules run rounds of `pp`."""
    missing = -packs.counts % multiple
    sizes = np.insert(np.diff(packs.slice_offsets), np.repeat(packs.rank_offsets[1:], missing), 0)
    return replace(
        packs,
        rank_offsets=np.append(0, np.cumsum(packs.counts + missing)).astype(np.int32),
        slice_offsets=np.append(0, np.cumsum(sizes)).astype(np.int32),
    )


def _faster(plan: StepPlan, cost: CostModel, least_s: float) -> tuple[StepPlan, float] | None:
    """Order the tasks of a plan; returns it with its seconds, or None if it takes `least_s` or longer."""
    seconds, mesh = durations(plan, cost), plan.mesh
    loads = loads_s(plan, seconds)
    if loads.max() >= least_s * ROUNDING:
        return None
    if plan.num_merged or mesh.sharding == "parameters":
        plan = _scheduled(plan)
        step_s = score(plan, cost)
        return (plan, step_s) if step_s < least_s else None
    pipeline = pipelines_of(plan, stage_costs(cost, mesh, splits=plan.splits_backward), seconds)
    by_rank: dict[int, Dispatched] = {}
    for rank in np.argsort(-loads, kind="stable").tolist():  # the slowest first, to give up early
        by_rank[rank] = dispatch(pipeline(rank), limit_s=least_s)
        if by_rank[rank].makespan_s >= least_s:
            return None
    orders = [by_rank[rank] for rank in range(mesh.dp)]
    sizes = np.repeat([order.codes.shape[1] for order in orders], mesh.pp)
    ordered = _with_tasks(plan, [order.codes.ravel() for order in orders], sizes)
    return ordered, max(order.makespan_s for order in orders)


def _scheduled(plan: StepPlan) -> StepPlan:
    """Return the plan with the fixed schedule on every rank."""
    mesh = plan.mesh
    orders = [fixed_schedule(mesh, count) for count in plan.forward.counts.tolist()]
    return _with_tasks(
        plan, [order.tasks for order in orders], np.concatenate([np.diff(order.offsets) for order in orders])
    )


def _with_tasks(plan: StepPlan, tasks: list[TaskArray], sizes: npt.NDArray[np.integer]) -> StepPlan:
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return replace(plan, tasks=np.concatenate(tasks), task_offsets=offsets)
