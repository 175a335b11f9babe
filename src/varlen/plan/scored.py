"""Candidates get an order of tasks and a score: the simulator's makespan, inf where they don't fit into memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from varlen.cost.model import CostModel
from varlen.plan.candidate import Candidate
from varlen.simulate.api import simulate
from varlen.simulate.dispatch import dispatch
from varlen.simulate.pipelines import pipelines_of
from varlen.simulate.schedules import interleaved, one_f_one_b
from varlen.step_plan import Mesh, MicroPacks, PlanMethod, StepPlan, TaskArray
from varlen.types import Int32Array

ROOM_FOR_ROUNDING = 1 + 1e-9


def best_plan(
    candidates: Iterable[Candidate], lengths: Int32Array, cost: CostModel, mesh: Mesh, method: PlanMethod
) -> StepPlan | None:
    """Return the fastest of some candidates that fits into memory; the first of equals, None if none fits.

    Each is dispatched, and the fastest also run by plain 1F1B; where ranks share documents, 1F1B alone, which all
    of them run in one order.

    Args:
        candidates: of one method.
        lengths: int32 `[num_documents]`.
        cost: what everything takes.
        mesh: the GPUs.
        method: what the plan says of itself.
    """
    best, least_s = None, math.inf
    for candidate in candidates:
        plan = unordered(candidate, lengths, cost, mesh, method)
        if plan.num_merged or mesh.sharding == "parameters":
            plan = _one_f_one_b(plan)
            taken_s = score(plan, cost)
        else:
            plan, taken_s = _dispatched(plan, cost)
        if taken_s < least_s:
            best, least_s = plan, taken_s
    if best is None or best.num_merged or mesh.sharding == "parameters":
        return best
    plain = _one_f_one_b(best)
    return plain if score(plain, cost) < score(best, cost) else best


def as_run(
    candidate: Candidate, lengths: Int32Array, cost: CostModel, mesh: Mesh, method: PlanMethod
) -> StepPlan:
    """Return a candidate under 1F1B, interleaved where stages hold several chunks, whether it fits or not.

    Args:
        candidate: of one method.
        lengths: int32 `[num_documents]`.
        cost: its recomputation and offload are the plan's.
        mesh: the GPUs.
        method: what the plan says of itself.
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
        candidate: of one method.
        lengths: int32 `[num_documents]`.
        cost: its recomputation and offload are the plan's.
        mesh: the GPUs.
        method: what the plan says of itself.
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


def _one_f_one_b(plan: StepPlan) -> StepPlan:
    """The plan with the tasks of 1F1B on every rank."""
    mesh = plan.mesh
    if mesh.virtual_stages == 1:
        orders = [one_f_one_b(mesh.pp, count) for count in plan.forward.counts.tolist()]
    else:
        orders = [interleaved(mesh.pp, mesh.virtual_stages, count) for count in plan.forward.counts.tolist()]
    return _with_tasks(
        plan, [order.tasks for order in orders], np.concatenate([np.diff(order.offsets) for order in orders])
    )


def _dispatched(plan: StepPlan, cost: CostModel) -> tuple[StepPlan, float]:
    """The plan with dispatched tasks, and the slowest rank's makespan, where ranks share nothing."""
    found = [dispatch(pipeline) for pipeline in pipelines_of(plan, cost)]
    sizes = np.repeat([one.codes.shape[1] for one in found], plan.mesh.pp)
    ordered = _with_tasks(plan, [one.codes.ravel() for one in found], sizes)
    return ordered, max(one.makespan_s for one in found)


def _with_tasks(plan: StepPlan, tasks: list[TaskArray], sizes: npt.NDArray[np.integer]) -> StepPlan:
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return replace(plan, tasks=np.concatenate(tasks), task_offsets=offsets)
