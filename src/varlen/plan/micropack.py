"""`method="micropack"`: searches groupings of documents, and MicroPacks of equal or graded cost for each rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from varlen.cost import kernels
from varlen.cost.memory import NEAR, OPENED, OWN, RETURNED, WHOLE
from varlen.cost.model import CostModel
from varlen.cost.rates import Rates
from varlen.plan import kernels_compose
from varlen.plan.assign import Groups, documents_of_ranks, grouped, merged_sizes
from varlen.plan.bound import lower_bound
from varlen.plan.compose import ROW_MULTIPLE, TYPICAL_ROWS, Composition, RankDocuments, seconds_of
from varlen.plan.local_search import (
    Composed,
    Effort,
    StepSearch,
    blocks,
    improve,
    padded,
    pipeline_of_block,
    work_of_block,
)
from varlen.plan.score import are_few, weights_apart_first
from varlen.plan.search import Search
from varlen.simulate.dispatch import dispatch
from varlen.simulate.graph import StageCosts, stage_costs
from varlen.step_plan import Mesh, MicroPacks, PlanMethod, StepPlan, copied
from varlen.types import Int32Array, IntArray

THRESHOLDS = (math.inf, 0.9, 0.5, 0.25)
"""Documents that cost more than this share of a rank's mean work are shared; each threshold is tried."""
ROOM_PARTS = (2, 4, 8, 16, 32)
"""Documents with more than one of these parts of the rows that fit into memory are shared; each part is tried."""
RECUTS = (1.0, 0.5, 0.75, 1.5, 2.0)
"""Backward over forward MicroPacks of a long document, tried if the passes are composed independently."""
LEAST_GAIN = 0.99
"""An independent backward pass must reduce its block's time to this share."""
FAR_OVER = 1.12
"""From this multiple of its lower bound on, a plan is searched thoroughly."""
_ROUNDING = 1 + 1e-9
_SLOW = 1.06  # with full memory, a step counts as slow from this multiple of its work on
_CLOSE_GROUPINGS = 4  # groupings that are searched closely, the best of the quick search
_CLOSE_GAIN, _CLOSE_GAIN_OF_FEW = 1.05, 1.2  # a close search usually gains no more


def narrowed(mesh: Mesh, search: Search) -> list[Mesh]:
    """Return the mesh, and those on which 2, 4, … neighbouring data-parallel ranks share every document."""
    most = min(mesh.dp & -mesh.dp, search.most_merged_ranks) if search.merges else 1
    return [replace(mesh, dp=mesh.dp >> each, cp=mesh.cp << each) for each in range(most.bit_length())]


class _Grouping(NamedTuple):
    """One way to share documents among ranks."""

    mesh: Mesh
    """The planned mesh, or one of more context parallelism and fewer data-parallel ranks."""
    groups: Groups
    documents: list[RankDocuments]
    """Of each rank."""
    spares_memory: bool
    """Whether some documents are shared because they don't fit into memory otherwise."""
    composed: dict[tuple[object, ...], Composed]
    """As `StepSearch.composed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best grouping of a search, and what is needed to continue it."""

    lengths: Int32Array
    cost: CostModel
    search: Search
    method: PlanMethod
    best: StepSearch
    closest: list[StepSearch]
    """The best that was searched closely on each mesh, with and without separate weight gradients; the best first."""

    @property
    def most_s(self) -> float:
        """Seconds of the plan, or more where ranks share documents, since each task takes as long as the slowest."""
        return self.best.makespan_s + float(self.best.costs.sync_s.max())

    def plan(self) -> StepPlan:
        """Return the best grouping as a plan, of the mesh on which it was found."""
        best = self.best
        return step_plan(
            self.lengths,
            best.groups,
            best.forward,
            best.backward,
            best.codes,
            self.cost,
            best.costs.mesh,
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
    near: Mesh | None = None,
) -> SearchResult | None:
    """Plan a step by slices and MicroPacks: a quick search of all groupings, then a close one of the best.

    Of the `narrowed` meshes, only those are searched that are like `near` or one doubling away, if it is given.
    """
    kinds = [search.splits_backward]
    if search.splits_backward and not weights_apart_first(mesh):
        kinds = [False, True]
    close = list[StepSearch]()
    groupings, quick = list[_Grouping](), list[StepSearch]()
    for narrow in narrowed(mesh, search):
        if near and not near.dp <= 2 * narrow.dp <= 4 * near.dp:
            continue
        costs = stage_costs(cost, narrow, splits=kinds[0])
        sync_s = float(costs.sync_s.min())
        least_s = min([step.makespan_s for step in quick], default=math.inf)
        bound_s = lower_bound(lengths, cost, narrow, least_rows=search.least_rows).seconds if quick else 0.0
        if bound_s >= min(incumbent_s, least_s + sync_s):
            continue
        own = list(_groupings(lengths, costs, search, search.most_merged_ranks * mesh.cp // narrow.cp))
        for splits in kinds:
            quick += _quick(own, cost, search, splits=splits, incumbent_s=least_s)
        groupings += own
    incumbent_s -= sync_s
    best = _best_of(quick, search, close, incumbent_s)
    if best is None and method == "sliced" and incumbent_s < math.inf:
        return None  # it is hardly ever the best; weight gradients within wouldn't make it so
    if best and search.closely and _can_compose_backward(cost, search):
        best = _with_own_backward(best, search)
    if kinds == [True] and (best is None or search.closely):
        best = _without_splits(groupings, cost, search, close, incumbent_s, best)
    if best is None:
        return None
    first = dict[StageCosts, StepSearch]()
    for step in sorted(close, key=lambda step: step.makespan_s):
        first.setdefault(step.costs, step)
    closest = list(first.values())
    return SearchResult(lengths=lengths, cost=cost, search=search, method=method, best=best, closest=closest)


def _without_splits(
    groupings: list[_Grouping],
    cost: CostModel,
    search: Search,
    close: list[StepSearch],
    incumbent_s: float,
    best: StepSearch | None,
) -> StepSearch | None:
    """Try weight gradients within the backward pass, which can only be faster if memory is full."""
    if best is None or (best.is_full and best.slowness > _SLOW):
        # Separate weight gradients hold memory for longer; without them, another grouping may be better.
        plain = _quick(
            groupings, cost, search, splits=False, incumbent_s=best.makespan_s if best else math.inf
        )
        best = _best_of(plain, search, close, incumbent_s, best)
    elif best.is_full:
        limit_s = _close_gain(best) * best.makespan_s
        step = _plain(best, stage_costs(cost, best.costs.mesh), search, limit_s)
        if step.makespan_s < limit_s:
            best = _better(step, best, search, Effort.CLOSE)
    return best


def thorough(result: SearchResult) -> SearchResult:
    """Continue a search thoroughly for the best grouping, or if documents `are_few` for that of each mesh."""
    best: StepSearch | None = None
    every = are_few(result.lengths.size, result.best.costs.mesh)
    for step in result.closest if every else result.closest[:1]:
        best = _better(step, best, result.search, Effort.THOROUGH)
    if best and _can_compose_backward(result.cost, result.search):
        best = _with_own_backward(best, result.search)
    return replace(result, best=best) if best and best.makespan_s < result.best.makespan_s else result


def _plain(best: StepSearch, costs: StageCosts, search: Search, limit_s: float) -> StepSearch:
    """Search the same grouping briefly with weight gradients within the backward pass, up to a limit."""
    documents = [rank for block in best.blocks for rank in block.documents]
    fresh = blocks(documents, best.groups, costs, search)
    step = StepSearch(best.groups, costs, fresh, best.spares_memory, best.composed)
    slowest = max(best.blocks, key=lambda block: block.makespan_s)
    improve(step, search, limit_s, Effort.BRIEF, slowest.setting)
    return step


def _can_compose_backward(cost: CostModel, search: Search) -> bool:
    """Whether backward may have other slices than forward; stored activations would bind it to the same."""
    return search.asymmetric and cost.recompute == "full" and cost.recompute_share == 1


def _with_own_backward(step: StepSearch, search: Search) -> StepSearch:
    """Return a copy with independent backward passes; the original can still be searched further."""
    copy = replace(step, blocks=[replace(block) for block in step.blocks])
    _compose_apart(copy, search)
    return copy


def _quick(
    groupings: list[_Grouping], cost: CostModel, search: Search, *, splits: bool, incumbent_s: float
) -> list[StepSearch]:
    """Search groupings quickly, each until it is known whether it can beat the best."""
    steps = []
    for mesh, groups, documents, spares_memory, composed in groupings:
        costs = stage_costs(cost, mesh, splits=splits)
        own = blocks(documents, groups, costs, search)
        steps.append(StepSearch(groups, costs, own, spares_memory, composed))
    for step in steps:
        improve(step, search, incumbent_s, Effort.QUICK)
        incumbent_s = min(incumbent_s, step.makespan_s)
    return steps


def _best_of(
    steps: list[StepSearch],
    search: Search,
    close: list[StepSearch],
    incumbent_s: float,
    best: StepSearch | None = None,
) -> StepSearch | None:
    """Return the best grouping, or `best` if none is faster; adds those that are searched closely to `close`."""
    seen = Counter[StageCosts]()
    for step in sorted(steps, key=lambda step: step.makespan_s):
        if step.makespan_s > _close_gain(step) * min(incumbent_s, best.makespan_s if best else math.inf):
            break
        if seen[step.costs] == _CLOSE_GROUPINGS:
            continue
        seen[step.costs] += 1
        effort = Effort.CLOSE if search.closely else Effort.BRIEF
        best = _better(step, best, search, effort, incumbent_s)
        close += [step] if step.is_complete else []
        if best and not search.closely:
            break
    return best


def _close_gain(step: StepSearch) -> float:
    """Return what a close search gains at most: slower groupings are skipped."""
    return _CLOSE_GAIN_OF_FEW if are_few(step.groups.work.size, step.costs.mesh) else _CLOSE_GAIN


def _better(
    step: StepSearch,
    best: StepSearch | None,
    search: Search,
    effort: Effort,
    incumbent_s: float = math.inf,
) -> StepSearch | None:
    """Search a grouping, and return the faster of the two; it may be given up if it takes `incumbent_s` or longer."""
    if best and best is not step:
        incumbent_s = min(incumbent_s, best.makespan_s)
    improve(step, search, incumbent_s, effort)
    return step if step.is_complete and step.makespan_s < incumbent_s else best


def _groupings(
    lengths: Int32Array, costs: StageCosts, search: Search, most_ranks: int
) -> Iterator[_Grouping]:
    """Yield distinct groupings, except those in which a document by itself exceeds the memory."""
    seen = set()
    unshared = seconds_of(lengths, np.ones(lengths.size, np.int32), TYPICAL_ROWS, costs.rates)
    held = costs.memory.held_bytes.reshape(-1, costs.mesh.pp).sum(axis=0)
    room = float((costs.limits / np.maximum(held, 1e-9)).min())
    # All rows of a document are in memory when its last slice runs backward, which opens gradients of those before
    # it.
    last = costs.memory.backward_peaks
    # Pieces of a whole document are returned with their rows, and its keys and values aren't held.
    own = last[:, :, OWN] + last[:, :, RETURNED] + last[:, :, WHOLE]
    own = own + costs.memory.forward_left[:, np.newaxis, WHOLE]
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
            most_ranks=most_ranks,
            most_rows=most_rows,
            unshared=unshared,
        )
        if sizes.tobytes() in seen:
            continue
        seen.add(sizes.tobytes())
        if (lengths / sizes > _ROUNDING * most_held).any():
            continue
        groups = grouped(lengths, sizes, costs.mesh.dp, costs.rates, is_exact=search.exact)
        documents = documents_of_ranks(groups, lengths, costs.mesh.dp)
        yield _Grouping(costs.mesh, groups, documents, bool((lengths > most_rows).any()), composed={})


def _compose_apart(step: StepSearch, search: Search) -> None:
    """Cut long documents anew for the backward pass of the slowest blocks, as long as that gains enough."""
    costs, tried = step.costs, set()
    while True:
        number = max(range(len(step.blocks)), key=lambda number: step.blocks[number].makespan_s)
        block = step.blocks[number]
        if number in tried or not block.forward:
            return
        tried.add(number)
        before_s = block.makespan_s
        forward_first = block.setting is not None and block.setting.forward_first
        for factor in RECUTS:
            backward = padded(
                [
                    recut(composition, factor, least_rows=search.least_rows, rates=costs.rates)
                    for composition in block.forward
                ]
            )
            limit_s = min(block.makespan_s, LEAST_GAIN * before_s)
            pipeline = pipeline_of_block(work_of_block(block.forward, backward, costs), costs)
            dispatched = dispatch(pipeline, forward_first=forward_first, limit_s=limit_s)
            if dispatched.makespan_s < limit_s:
                block.best, block.backward = dispatched, backward
        if block.makespan_s == before_s:
            return


def recut(composition: Composition, factor: float, *, least_rows: int, rates: Rates) -> Composition:
    """Return a rank's MicroPacks for the backward pass alone (SlimPack's asymmetric partitioning).

    The documents of a chain, the long one and the short ones beside it, stay together, so that its backward still
    waits only for its own forward. The long document is cut into `factor` times as many slices of equal backward
    cost; each short one goes to the MicroPack of the chain with the least work.
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
    """Join chains, each given as the MicroPack of each slice within the chain, and the slices."""
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


def micropacks_of(compositions: Sequence[Composition], *, is_backward: bool) -> MicroPacks:
    """Join the MicroPacks of all ranks for one pass."""
    sizes, slices, counts = [], [], []
    for composition in compositions:
        each = np.diff(composition.slice_offsets)
        table = composition.slices
        if is_backward:
            order = composition.backward_order
            table = table[:, copied(composition.slice_offsets, order)[0]]
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
    """Join the ranks' compositions and task codes (`[stages, tasks]` each) into the plan of the step."""
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
