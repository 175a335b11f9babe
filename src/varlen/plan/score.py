"""Candidates get an order of tasks and a score: the simulator's makespan, inf where they don't fit into memory."""

from __future__ import annotations

import functools
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
from varlen.simulate.schedules import Schedule, interleaved, one_f_one_b
from varlen.step_plan import Mesh, MicroPacks, PlanMethod, StepPlan, TaskArray
from varlen.types import Int32Array

ROOM_FOR_ROUNDING = 1 + 1e-9
_LEAST_COUNTS = 8
"""Numbers of micro-batches that are tried in any case: up to 12 a stage."""
_PATIENCE = 3
"""Numbers of micro-batches in a row that find nothing faster, after which more of them aren't tried."""
_KEPT_ORDERS = 4096
"""Of 1F1B, by stages, chunks and MicroPacks."""


def best_plan(
    candidates_of: Callable[[int], Iterable[Candidate]],
    counts: tuple[int, ...],
    lengths: Int32Array,
    cost: CostModel,
    mesh: Mesh,
    method: PlanMethod,
) -> StepPlan | None:
    """Return the fastest of some candidates that fits into memory; the first of equals, None if none fits.

    The first `_LEAST_COUNTS` numbers of micro-batches are looked at in any case, more as long as that helps: until
    `_PATIENCE` of them in a row have found nothing faster.

    Each is dispatched, and the fastest also run by plain 1F1B; where ranks share documents, 1F1B alone, which all
    of them run in one order. Candidates that compute for longer than the fastest so far takes are not run at all.

    Args:
        lengths: int32 `[num_documents]`.
    """
    best, least_s, in_vain = None, math.inf, 0
    for place, count in enumerate(counts):
        if place >= _LEAST_COUNTS and in_vain >= _PATIENCE:
            break
        in_vain += best is not None
        for candidate in candidates_of(count):
            found = _faster(unordered(candidate, lengths, cost, mesh, method), cost, least_s)
            if found:
                best, least_s = found
                in_vain = 0
    if best is None or best.num_merged or mesh.sharding == "parameters":
        return best
    plain = _one_f_one_b(best)
    return plain if score(plain, cost) < score(best, cost) else best


def as_run(
    candidate: Candidate, lengths: Int32Array, cost: CostModel, mesh: Mesh, method: PlanMethod
) -> StepPlan:
    """Return a candidate under 1F1B, interleaved where stages hold several chunks, whether it fits or not.

    Args:
        lengths: int32 `[num_documents]`.
    """
    plan = unordered(candidate, lengths, cost, mesh, method)
    return _one_f_one_b(plan)


def score(plan: StepPlan, cost: CostModel) -> float:
    """Return the simulated seconds of a plan; inf where it doesn't fit into memory.

    Args:
        plan: with an order of tasks.
        cost: what everything takes.
    """
    timeline = simulate(plan, cost)
    limit = cost.limit_bytes * ROOM_FOR_ROUNDING
    return timeline.makespan_s if timeline.peak_bytes <= limit else math.inf


def unordered(
    candidate: Candidate, lengths: Int32Array, cost: CostModel, mesh: Mesh, method: PlanMethod
) -> StepPlan:
    """Return a candidate as a plan that has no tasks yet.

    Args:
        lengths: int32 `[num_documents]`.
    """
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
    """Add empty MicroPacks at each rank's end, up to a multiple: interleaved orders go in rounds of the stages."""
    missing = -packs.counts % multiple
    sizes = np.insert(np.diff(packs.slice_offsets), np.repeat(packs.rank_offsets[1:], missing), 0)
    return replace(
        packs,
        rank_offsets=np.append(0, np.cumsum(packs.counts + missing)).astype(np.int32),
        slice_offsets=np.append(0, np.cumsum(sizes)).astype(np.int32),
    )


def _faster(plan: StepPlan, cost: CostModel, least_s: float) -> tuple[StepPlan, float] | None:
    """A plan that has no tasks yet with its tasks, and its seconds; None if it takes `least_s` or longer."""
    seconds, mesh = durations(plan, cost), plan.mesh
    loads = loads_s(plan, seconds)
    if loads.max() >= least_s * ROOM_FOR_ROUNDING:
        return None
    if plan.num_merged or mesh.sharding == "parameters":
        plan = _one_f_one_b(plan)
        taken_s = score(plan, cost)
        return (plan, taken_s) if taken_s < least_s else None
    pipeline = pipelines_of(plan, stage_costs(cost, mesh, splits=plan.splits_backward), seconds)
    found: list[Dispatched | None] = [None] * mesh.dp
    for rank in np.argsort(-loads, kind="stable").tolist():
        one = dispatch(pipeline(rank), limit_s=least_s)
        if one.makespan_s >= least_s:
            return None
        found[rank] = one
    made = [one for one in found if one]
    sizes = np.repeat([one.codes.shape[1] for one in made], mesh.pp)
    ordered = _with_tasks(plan, [one.codes.ravel() for one in made], sizes)
    return ordered, max(one.makespan_s for one in made)


@functools.lru_cache(maxsize=_KEPT_ORDERS)
def _order(pp: int, virtual: int, count: int) -> Schedule:
    """1F1B, interleaved where stages hold several chunks."""
    return one_f_one_b(pp, count) if virtual == 1 else interleaved(pp, virtual, count)


def _one_f_one_b(plan: StepPlan) -> StepPlan:
    """The plan with the tasks of 1F1B on every rank."""
    mesh = plan.mesh
    orders = [_order(mesh.pp, mesh.virtual_stages, count) for count in plan.forward.counts.tolist()]
    return _with_tasks(
        plan, [order.tasks for order in orders], np.concatenate([np.diff(order.offsets) for order in orders])
    )


def _with_tasks(plan: StepPlan, tasks: list[TaskArray], sizes: npt.NDArray[np.integer]) -> StepPlan:
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return replace(plan, tasks=np.concatenate(tasks), task_offsets=offsets)
