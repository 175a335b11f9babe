"""`method="micropack"`: documents to ranks, MicroPacks of equal or graded cost, the fastest candidate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from varlen.cost import kernels
from varlen.cost.memory import NEAR, OPENED, OWN, RETURNED
from varlen.cost.model import CostModel
from varlen.cost.rates import Rates
from varlen.plan import kernels_compose
from varlen.plan.assign import Groups, documents_of_ranks, grouped, merged_sizes
from varlen.plan.compose import ROW_MULTIPLE, TYPICAL_ROWS, Composition, RankDocuments, seconds_of
from varlen.plan.local_search import (
    Answer,
    Composed,
    Look,
    blocks,
    improve,
    padded,
    pipeline_of_block,
    work_of_block,
)
from varlen.plan.search import Search
from varlen.simulate.dispatch import dispatch
from varlen.simulate.graph import StageCosts, stage_costs
from varlen.step_plan import Mesh, MicroPacks, PlanMethod, StepPlan
from varlen.types import Int32Array, IntArray

THRESHOLDS = (math.inf, 0.9, 0.5, 0.25)
"""Documents are shared when one costs more than this much of a rank's mean work; each set is tried."""
ROOM_PARTS = (2, 4, 8, 16, 32)
"""Documents are shared, too, that hold more than one of these parts of what memory has room for."""
RECUTS = (1.0, 0.5, 0.75, 1.5, 2.0)
"""Backward MicroPacks of a long document over its forward ones, where they are composed apart."""
LEAST_GAIN = 0.99
"""Composed apart, a backward pass must make its block at least so much faster."""
_ROUNDING = 1 + 1e-9
_SLOW = 1.06
"""Times its work alone that a step may take before it is called slow, where memory is full."""
FAR_OVER = 1.12
"""Times its lower bound that a step may take before it is looked at thoroughly."""
_KEPT = 4
"""Ways to share documents that are looked at closely, of those that a quick look finds best."""
_CLOSER = 1.06
"""What a close look makes faster, about: ways that a quick look finds slower by more than the best are left."""
_KEPT_LONGER = 2
"""Those of them that are looked at thoroughly, where the best is still far over its bound."""


class _Sharing(NamedTuple):
    """One way to share documents among ranks."""

    groups: Groups
    documents: list[RankDocuments]
    """Of each rank."""
    spares_memory: bool
    """Whether some are shared because memory can't hold them otherwise."""
    composed: dict[tuple[object, ...], Composed]
    """As `Answer.composed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a step was planned from, and what may be looked at longer."""

    lengths: Int32Array
    cost: CostModel
    mesh: Mesh
    search: Search
    method: PlanMethod
    best: Answer
    kept: list[Answer]
    """Ways to share documents that were looked at closely."""

    def plan(self) -> StepPlan:
        """Return the best answer as a plan."""
        best = self.best
        return step_plan(
            self.lengths,
            best.groups,
            best.forward,
            best.backward,
            best.codes,
            self.cost,
            self.mesh,
            splits=best.costs.splits,
            method=self.method,
            answered_by=best.label,
        )


def micropack(
    lengths: Int32Array,
    cost: CostModel,
    mesh: Mesh,
    search: Search,
    *,
    method: PlanMethod = "micropack",
    incumbent_s: float = math.inf,
) -> Found | None:
    """Plan a step by slices and MicroPacks: a quick look at every way to share documents, a close one at the best.

    Args:
        lengths: int32 `[num_documents]`, with at least one document.
    """
    splits, kept = search.splits_backward, list[Answer]()
    costs = stage_costs(cost, mesh, splits=splits)
    incumbent_s -= float(costs.sync_s.min())
    shared = list(_groupings(lengths, costs, search))
    ways = _seen(shared, costs, search)
    best = _best_of(ways, search, kept, incumbent_s)
    found = {"lengths": lengths, "cost": cost, "mesh": mesh, "search": search, "method": method}
    if best and not search.closely:
        return Found(**found, best=best, kept=kept)  # type: ignore[arg-type]
    if best and _may_compose_apart(cost, search):
        best = _composed_apart(best, search)
    plain = stage_costs(cost, mesh)
    if splits and (best is None or (best.is_full and best.slowness > _SLOW)):
        # Weight gradients apart hold memory for longer: with little of it, another way to share may be better.
        best = _best_of(_seen(shared, plain, search, best), search, kept, incumbent_s, best)
    elif splits and best and best.is_full:
        # Only then may a plain backward be faster; it is begun where the best one stands.
        way = _plain(best, plain, search)
        if way.makespan_s < _CLOSER * best.makespan_s:
            best = _better(way, best, search, Look.CLOSE)
    return Found(**found, best=best, kept=kept) if best else None  # type: ignore[arg-type]


def thorough(found: Found) -> Found:
    """Look thoroughly at the best ways to share documents."""
    best: Answer | None = None
    for way in sorted(found.kept, key=lambda way: way.makespan_s)[:_KEPT_LONGER]:
        best = _better(way, best, found.search, Look.THOROUGH)
    if best and _may_compose_apart(found.cost, found.search):
        best = _composed_apart(best, found.search)
    return replace(found, best=best) if best and best.makespan_s < found.best.makespan_s else found


def _plain(best: Answer, costs: StageCosts, search: Search) -> Answer:
    """The same documents with weight gradients within the backward pass, looked at briefly."""
    documents = [rank for block in best.blocks for rank in block.documents]
    fresh = blocks(documents, best.groups, costs, search)
    way = Answer(best.groups, costs, fresh, best.spares_memory, best.composed)
    slowest = max(best.blocks, key=lambda block: block.makespan_s)
    improve(way, search, math.inf, Look.BRIEF, slowest.setting)
    return way


def _may_compose_apart(cost: CostModel, search: Search) -> bool:
    """Kept activations belong to the slices that made them: only what is computed again may be cut anew."""
    return search.asymmetric and cost.recompute == "full" and cost.recompute_share == 1


def _composed_apart(answer: Answer, search: Search) -> Answer:
    """The answer with backward passes of their own; the one given stays, to be looked at longer."""
    copy = replace(answer, blocks=[replace(block) for block in answer.blocks])
    _compose_apart(copy, search)
    return copy


def _seen(
    shared: list[_Sharing], costs: StageCosts, search: Search, best: Answer | None = None
) -> list[Answer]:
    """Look quickly at ways to share documents: closely enough to tell those that can't beat the best."""
    ways = [
        Answer(
            one.groups,
            costs,
            blocks(one.documents, one.groups, costs, search),
            one.spares_memory,
            one.composed,
        )
        for one in shared
    ]
    incumbent_s = best.makespan_s if best else math.inf
    for way in ways:
        improve(way, search, incumbent_s, Look.QUICK)
        incumbent_s = min(incumbent_s, way.makespan_s)
    return ways


def _best_of(
    ways: list[Answer], search: Search, kept: list[Answer], worth_s: float, best: Answer | None = None
) -> Answer | None:
    """The best way to share documents, if it beats the best so far; what is looked at closely goes into `kept`."""
    most = len(kept) + _KEPT
    for way in sorted(ways, key=lambda way: way.makespan_s):
        if way.makespan_s > _CLOSER * min(worth_s, best.makespan_s if best else math.inf):
            break
        best = _better(way, best, search, Look.CLOSE if search.closely else Look.BRIEF)
        kept += [way] if way.is_complete else []
        if len(kept) == most or (best and not search.closely):
            break
    return best


def _better(way: Answer, best: Answer | None, search: Search, look: Look) -> Answer | None:
    """Look at a way and return the faster of the two."""
    incumbent_s = best.makespan_s if best and best is not way else math.inf
    improve(way, search, incumbent_s, look)
    return way if way.is_complete and way.makespan_s < incumbent_s else best


def _groupings(lengths: Int32Array, costs: StageCosts, search: Search) -> Iterator[_Sharing]:
    """Yield the ways to share documents that differ, save those of which memory can't hold a document alone."""
    seen = set()
    alone = seconds_of(lengths, np.ones(lengths.size, np.int32), TYPICAL_ROWS, costs.rates)
    held = costs.memory.held_bytes.reshape(-1, costs.mesh.pp).sum(axis=0)
    room = float((costs.limits / np.maximum(held, 1e-9)).min())
    # All rows of a document lie there when the last of them goes backward, which opens gradients of those before it.
    last = costs.memory.backward_peaks
    own = last[:, :, OWN] + last[:, :, RETURNED]  # pieces of a whole document go with their rows
    more = (np.minimum(own, last[:, :, OPENED]) + last[:, :, NEAR]).max(axis=1, initial=0)
    least = held + more.reshape(-1, costs.mesh.pp).min(axis=0)
    most_held = costs.mesh.cp * float((costs.limits / np.maximum(least, 1e-9)).min())
    tries = [(threshold, room) for threshold in THRESHOLDS] + [(math.inf, room / part) for part in ROOM_PARTS]
    for threshold, most_rows in tries if search.merges else [(math.inf, math.inf)]:
        sizes = merged_sizes(
            lengths,
            costs.mesh.dp,
            costs.rates,
            threshold=threshold,
            most_ranks=search.most_merged_ranks,
            most_rows=most_rows,
            alone=alone,
        )
        if sizes.tobytes() in seen:
            continue
        seen.add(sizes.tobytes())
        if (lengths / sizes > _ROUNDING * most_held).any():
            continue
        groups = grouped(lengths, sizes, costs.mesh.dp, costs.rates, is_exact=search.exact)
        documents = documents_of_ranks(groups, lengths, costs.mesh.dp)
        yield _Sharing(groups, documents, bool((lengths > most_rows).any()), composed={})


def _compose_apart(answer: Answer, search: Search) -> None:
    """Cut long documents anew for the backward pass of the slowest blocks, as long as that gains enough."""
    costs, tried = answer.costs, set()
    while True:
        number = max(range(len(answer.blocks)), key=lambda number: answer.blocks[number].makespan_s)
        block = answer.blocks[number]
        if number in tried or not block.forward:
            return
        tried.add(number)
        before_s = block.makespan_s
        is_ahead = block.setting is not None and block.setting.forward_first
        for factor in RECUTS:
            backward = padded(
                [recut(one, factor, least_rows=search.least_rows, rates=costs.rates) for one in block.forward]
            )
            limit_s = min(block.makespan_s, LEAST_GAIN * before_s)
            pipeline = pipeline_of_block(work_of_block(block.forward, backward, costs), costs)
            found = dispatch(pipeline, forward_first=is_ahead, limit_s=limit_s)
            if found.makespan_s < limit_s:
                block.found, block.backward = found, backward
        if block.makespan_s == before_s:
            return


# Backward MicroPacks composed apart: long documents are cut anew, into slices of equal backward cost.


def recut(composition: Composition, factor: float, *, least_rows: int, rates: Rates) -> Composition:
    """Return a rank's MicroPacks for the backward pass alone (SlimPack's asymmetric partitioning).

    The documents of a chain, the long one and the short ones beside it, stay together, so that its backward still
    waits for nothing but its own forward. The long one is cut into `factor` times as many slices of equal backward
    cost; short ones go to the MicroPack of the chain with the least.
    """
    sizes = np.diff(composition.slice_offsets)
    pack_of = np.repeat(np.arange(composition.num_micropacks), sizes)
    chain_of = composition.chains[pack_of]
    starts, stops, num_ranks, ids, is_end = composition.slices
    is_long = (starts > 0) | (is_end == 0)
    parts, chains = [], []
    for chain in dict.fromkeys(composition.chains.tolist()):
        mine = np.flatnonzero(chain_of == chain)
        long = mine[is_long[mine]]
        count = int(np.count_nonzero(composition.chains == chain))
        if not long.size:
            parts.append((np.zeros(mine.size, np.int64), composition.slices[:, mine]))
            chains += [chain]
            continue
        last = long[-1]
        length, ranks = stops[last : last + 1], num_ranks[last : last + 1]
        work = seconds_of(length, ranks, TYPICAL_ROWS, rates, forward_part=0.0)
        _, first, end = kernels.cut_evenly(
            length, ranks, work, work / max(1.0, count * factor), least_rows, ROW_MULTIPLE, 0.0, rates
        )
        shorts = mine[~is_long[mine]]
        loads = np.repeat(work / first.size, first.size)
        costs = seconds_of(stops[shorts], num_ranks[shorts], TYPICAL_ROWS, rates, forward_part=0.0)
        order = np.argsort(-costs, kind="stable")
        beside = np.empty(shorts.size, np.int64)
        beside[order] = kernels_compose.fill_lightest(costs[order], loads)
        again = np.ones_like(first)
        table = np.stack(
            [first, end, ranks[0] * again, ids[last] * again, (end == length[0]).astype(np.int32)]
        )
        parts.append(
            (
                np.append(np.arange(first.size), beside),
                np.concatenate([table, composition.slices[:, shorts]], axis=1),
            )
        )
        chains += [chain] * first.size
    return _joined(parts, chains)


def _joined(parts: list[tuple[IntArray, Int32Array]], chains: list[int]) -> Composition:
    """Put chains together: of each, the MicroPack of its slices among its own, and the slices."""
    chain_of = np.array(chains, np.int32)
    firsts = np.flatnonzero(np.diff(chain_of, prepend=-1))
    packs = np.concatenate([pack + first for (pack, _), first in zip(parts, firsts.tolist())])
    slices = np.concatenate([table for _, table in parts], axis=1)
    sizes = np.bincount(packs, minlength=chain_of.size)
    return Composition(
        slice_offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
        slices=np.ascontiguousarray(slices[:, np.argsort(packs, kind="stable")]).astype(np.int32),
        chains=chain_of,
    )


# Ranks' compositions and orders of tasks become one StepPlan.


def micropacks_of(compositions: Sequence[Composition], *, is_backward: bool) -> MicroPacks:
    """Join the MicroPacks of all ranks for one pass."""
    sizes, slices, counts = [], [], []
    for composition in compositions:
        each = np.diff(composition.slice_offsets)
        table = composition.slices
        if is_backward:
            order = composition.backward_order
            table = table[:, _moved(composition.slice_offsets, order)]
            each = each[order]
        sizes.append(each)
        slices.append(table)
        counts.append(each.size)
    joined = np.concatenate(slices, axis=1)
    return MicroPacks(
        rank_offsets=_offsets(np.array(counts)),
        slice_offsets=_offsets(np.concatenate(sizes)),
        document_ids=joined[3].copy(),
        starts=joined[0].copy(),
        stops=joined[1].copy(),
    )


def _moved(offsets: Int32Array, order: IntArray) -> IntArray:
    """Where the slices of MicroPacks come from, in another order of MicroPacks."""
    sizes = np.diff(offsets)[order]
    behind = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    moved: IntArray = np.repeat(offsets[:-1][order], sizes) + behind
    return moved


def _offsets(sizes: npt.NDArray[np.integer]) -> Int32Array:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


def step_plan(
    lengths: Int32Array,
    groups: Groups,
    forward: Sequence[Composition],
    backward: Sequence[Composition],
    codes: Sequence[npt.NDArray[np.uint8]],
    cost: CostModel,
    mesh: Mesh,
    *,
    splits: bool,
    method: PlanMethod,
    answered_by: str,
) -> StepPlan:
    """Join what ranks run into the plan of the step.

    Args:
        lengths: int32 `[num_documents]`.
        codes: uint8 `[stages, tasks]`, one a rank.
    """
    return StepPlan(
        lengths=lengths,
        first_ranks=groups.first_ranks,
        num_ranks=groups.num_ranks,
        forward=micropacks_of(forward, is_backward=False),
        backward=micropacks_of(backward, is_backward=True),
        tasks=np.concatenate([code.ravel() for code in codes]),
        task_offsets=_offsets(np.repeat([code.shape[1] for code in codes], mesh.pp)),
        mesh=mesh,
        splits_backward=splits,
        method=method,
        recompute=cost.recompute,
        recompute_share=cost.recompute_share,
        offload=cost.offload,
        answered_by=answered_by,
    )
