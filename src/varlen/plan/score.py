"""Order the tasks of candidates, and score them: the simulated makespan, or inf if they don't fit into memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from varlen.cost.model import CostModel
from varlen.plan.search import Candidate, Families
from varlen.simulate.api import simulate
from varlen.simulate.dispatch import (
    Dispatched,
    bound_s,
    dispatch,
    loads_s,
    pipeline_of_all,
    pipelines_of,
    seconds_in_step,
)
from varlen.simulate.graph import Durations, StageCosts, durations_of_prices, prices_of, stage_costs
from varlen.simulate.schedules import fixed_schedule
from varlen.step_plan import Mesh, MicroPacks, PlanMethod, StepPlan, TaskArray
from varlen.types import Int32Array

ROUNDING = 1 + 1e-9
_LEAST_COUNTS = 8  # numbers of micro-batches that are always tried: up to 12 a stage
_WAITING = 1.25  # an order of the slowest rank's tasks is scored up to this multiple of the limit
_USUAL = (
    6  # micro-batches per stage from which a search with a limit begins; fewer where stages are interleaved
)
_FEWER = (
    3  # where those take far too long, it begins again from fewer by this factor, unless documents are many
)
_USUAL_ROWS = 2048  # rows of a GPU in each of them, or more
# With a limit, the search ends if the best count takes at least this multiple of it; the fewer the documents, the
# farther a usual count may be from the best.
_FAR_OF_FEW, _FAR, _FAR_OF_MANY = 1.5, 1.2, 1.1
# Documents times ranks: up to the first number all counts are tried, over the second hardly any.
_FEW, _MANY = 256, 1024
_PATIENCE = 3  # after so many further numbers without a faster plan, the search ends


def best_plan(
    families_of: Callable[[int], Families],
    counts: tuple[int, ...],
    lengths: Int32Array,
    costs: Sequence[CostModel],
    mesh: Mesh,
    method: PlanMethod,
    *,
    splits: bool = False,
    limit_s: float = math.inf,
) -> tuple[StepPlan, float] | None:
    """Return the fastest candidate that fits into memory, the first of equals, and its seconds.

    `costs` are levels of recomputation, each more than the one before: a candidate is tried with all of them.
    Candidates of a family differ only in the order of their MicroPacks, so they have one lower bound. They are
    dispatched, with separate weight gradients if `splits` (see `weights_apart_first`); the fastest is also tried
    without them, and with the fixed schedule. Families that can't take less than `limit_s` or the best are skipped.
    With a limit, only the counts around a usual one are tried, as far as they promise to be faster, unless
    documents `are_few`.
    """
    fastest: Candidate | None = None
    best: StepPlan | None = None
    least_s, tried = limit_s, dict[int, float]()
    are_many = lengths.size * mesh.dp > _MANY
    far, counts_limit_s = _FAR_OF_MANY if are_many else _FAR, limit_s
    if are_few(lengths.size, mesh):
        far, counts_limit_s = _FAR_OF_FEW, math.inf
    starts = _starts(counts, lengths, mesh, (1,) if are_many else (1, _FEWER))
    patience = 0 if are_many else _PATIENCE
    while (number := _next(tried, len(counts), starts, patience, far * counts_limit_s)) is not None:
        tried[number], is_full = math.inf, False
        for family in families_of(counts[number]):
            for candidate in family:
                plan, step_s = _fastest(candidate, lengths, costs, mesh, method, splits, least_s, far)
                tried[number], is_full = min(tried[number], step_s), is_full or step_s == math.inf
                if plan and step_s < least_s:
                    fastest, best, least_s = candidate, plan, step_s
                if step_s >= far * least_s:  # another order gains less
                    break
        if is_full and tried[number] >= far * least_s:  # what would be fast doesn't fit
            tried[number] = math.inf
    if best is None or fastest is None:
        return None
    cost = costs[0].as_planned(best)
    others = [_scheduled(unordered(fastest, lengths, cost, mesh, method))]
    if best.splits_backward:
        whole = _fastest(fastest, lengths, [cost], mesh, method, False, least_s, far)[0]
        others += [whole] if whole else []
    for plan in others:
        step_s = score(plan, cost)
        if step_s < least_s:
            best, least_s = plan, step_s
    return best, least_s


def are_few(num_documents: int, mesh: Mesh) -> bool:
    """Whether a step is so small that everything can be tried."""
    return num_documents * mesh.dp * mesh.cp <= _FEW


def weights_apart_first(mesh: Mesh) -> bool:
    """Whether plans without separate weight gradients are tried only where those with them don't fit.

    They fill gaps of pipelines. Without a pipeline there are hardly any, and where parameters are sharded each task
    gathers them again.
    """
    return mesh.num_chunks > 1 and mesh.sharding != "parameters"


def _starts(counts: tuple[int, ...], lengths: Int32Array, mesh: Mesh, parts: tuple[int, ...]) -> list[int]:
    """Return the indices of the counts that are nearest to a usual count divided by each of `parts`."""
    rows = int(lengths.sum(dtype=np.int64)) / (mesh.dp * mesh.cp)
    # One stage has no pipeline to fill: it takes as few as memory allows.
    usual = min(_USUAL * mesh.pp / mesh.virtual_stages, rows / _USUAL_ROWS) if mesh.num_chunks > 1 else 1
    return [min(range(len(counts)), key=lambda each: abs(counts[each] - usual / part)) for part in parts]


def _next(
    tried: dict[int, float], num_counts: int, starts: list[int], patience: int, limit_s: float
) -> int | None:
    """Return the index of the next count to try, given the seconds of those tried; None to end the search.

    With a limit, up to `patience` more counts are tried while none fits.
    """
    if limit_s == math.inf:
        number = len(tried)
        best = min(tried, key=lambda each: tried[each], default=0)
        is_over = number >= _LEAST_COUNTS and tried[best] < math.inf and number - best > _PATIENCE
        return None if is_over or number == num_counts else number
    best = min(tried, key=lambda each: tried[each], default=-1)
    if not tried or math.inf > tried[best] >= limit_s:
        # The count between one that didn't fit and one that is slow was jumped over.
        around = [*starts, best - 1] if tried.get(best - 2) == math.inf else starts
    elif tried[best] < math.inf:
        around = [best + 1, best - 1]
    else:  # nothing fits yet: more micro-batches take less memory
        around = [max(tried) + 2] if len(tried) <= patience else []
    return next((each for each in around if 0 <= each < num_counts and each not in tried), None)


def _fastest(
    candidate: Candidate,
    lengths: Int32Array,
    costs: Sequence[CostModel],
    mesh: Mesh,
    method: PlanMethod,
    splits: bool,
    limit_s: float,
    far: float,
) -> tuple[StepPlan | None, float]:
    """Return the plan of a candidate and its seconds; None and more than the limit if its bound is above the limit.

    It is dispatched up to `far` times the limit, which tells how far it is from it. It is tried with the most
    recomputation first: with less, it takes more memory, and is taken to be as slow in relation to its bound.
    """
    ways = [(False,)] if not splits else [(True, False)] if weights_apart_first(mesh) else [(False,), (True,)]
    best, best_s = None, math.inf
    for kinds in ways:
        asked = (candidate, lengths, costs, mesh, method, kinds)
        plan, step_s = _fastest_of(*asked, min(limit_s, best_s), far)
        if step_s < best_s:
            best, best_s = plan, step_s
    return best, best_s


def _fastest_of(
    candidate: Candidate,
    lengths: Int32Array,
    costs: Sequence[CostModel],
    mesh: Mesh,
    method: PlanMethod,
    kinds: tuple[bool, ...],
    limit_s: float,
    far: float,
) -> tuple[StepPlan | None, float]:
    """As `_fastest`, with separate weight gradients or without: the first of these kinds that fits."""
    best, best_s, slowness = None, math.inf, 1.0
    for cost in reversed(costs):
        plan = unordered(candidate, lengths, cost, mesh, method)
        # Both passes have the same MicroPacks.
        prices = prices_of(plan, plan.forward, stage_costs(cost, mesh))
        for is_split in kinds:
            plan, each = replace(plan, splits_backward=is_split), stage_costs(cost, mesh, splits=is_split)
            seconds = durations_of_prices(each, prices, prices)
            least_s = bound_s(plan, seconds) + float(each.sync_s.min())
            if slowness * least_s >= limit_s:
                best_s = min(best_s, far * limit_s)
                break
            ordered, step_s = _ordered(plan, cost, each, seconds, far * limit_s)
            if step_s < math.inf:
                kinds, slowness = (is_split,), step_s / least_s
                if step_s < best_s:
                    best, best_s = ordered, step_s
                    limit_s = min(limit_s, step_s)
                break
        else:  # it doesn't fit
            break
    return best, best_s


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
    candidate: Candidate,
    lengths: Int32Array,
    cost: CostModel,
    mesh: Mesh,
    method: PlanMethod,
) -> StepPlan:
    """Return a candidate as a plan that has no tasks yet."""
    multiple = mesh.pp if mesh.virtual_stages > 1 else 1
    forward = _rounded(candidate.forward, multiple)
    is_same = candidate.backward is candidate.forward
    return StepPlan(
        lengths=lengths,
        first_ranks=candidate.first_ranks,
        num_ranks=candidate.num_ranks,
        forward=forward,
        backward=forward if is_same else _rounded(candidate.backward, multiple),
        tasks=np.zeros(0, np.uint8),
        task_offsets=np.zeros(mesh.dp * mesh.pp + 1, np.int32),
        mesh=mesh,
        method=method,
        recompute=cost.recompute,
        recompute_share=cost.recompute_share,
        offload=cost.offload,
        answered_by=candidate.label,
    )


def _rounded(packs: MicroPacks, multiple: int) -> MicroPacks:
    """Add empty MicroPacks at each rank's end, up to a multiple: interleaved schedules run rounds of `pp`."""
    missing = -packs.counts % multiple
    if not missing.any():
        return packs
    sizes = np.insert(np.diff(packs.slice_offsets), np.repeat(packs.rank_offsets[1:], missing), 0)
    return replace(
        packs,
        rank_offsets=np.append(0, np.cumsum(packs.counts + missing)).astype(np.int32),
        slice_offsets=np.append(0, np.cumsum(sizes)).astype(np.int32),
    )


def _ordered(
    plan: StepPlan, cost: CostModel, costs: StageCosts, seconds: Durations, limit_s: float
) -> tuple[StepPlan | None, float]:
    """Order the tasks of a plan; returns it with its seconds, or None and the limit, or inf if memory is short."""
    mesh, sync_s = plan.mesh, float(costs.sync_s.max())
    if plan.num_merged or mesh.sharding == "parameters":
        order = dispatch(pipeline_of_all(plan, costs, seconds), limit_s=_WAITING * limit_s)
        if order.makespan_s == math.inf or order.makespan_s > _WAITING * limit_s:
            return None, math.inf if order.makespan_s == math.inf else limit_s
        plan = _with_tasks(
            plan, [order.codes.ravel()] * mesh.dp, np.full(mesh.dp * mesh.pp, order.codes.shape[1])
        )
        is_sharded = mesh.sharding == "parameters"
        step_s = score(plan, cost) if is_sharded else seconds_in_step(plan, order.codes, seconds)
        return (plan, step_s) if step_s < limit_s else (None, max(limit_s, step_s))
    pipeline = pipelines_of(plan, costs, seconds)
    by_rank: dict[int, Dispatched] = {}
    for rank in np.argsort(
        -loads_s(plan, seconds), kind="stable"
    ).tolist():  # the slowest first, to give up early
        by_rank[rank] = dispatch(pipeline(rank), limit_s=limit_s - sync_s)
        if by_rank[rank].makespan_s + sync_s >= limit_s:
            return None, math.inf if by_rank[rank].makespan_s == math.inf else limit_s
    orders = [by_rank[rank] for rank in range(mesh.dp)]
    sizes = np.repeat([order.codes.shape[1] for order in orders], mesh.pp)
    ordered = _with_tasks(plan, [order.codes.ravel() for order in orders], sizes)
    return ordered, max(order.makespan_s for order in orders) + sync_s


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
