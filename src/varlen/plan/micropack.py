"""`method="micropack"`: documents to ranks, MicroPacks of equal or graded cost, the fastest candidate."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from varlen.cost.model import CostModel
from varlen.plan.assemble import step_plan
from varlen.plan.block import blocks_of, padded, pipeline_of_block
from varlen.plan.compose import Composition, RankDocuments, compose
from varlen.plan.groups import Groups, documents_of_ranks, grouped, merged_sizes
from varlen.plan.recut import recut
from varlen.plan.search import Search
from varlen.plan.settings import (
    EVEN,
    GRADINGS,
    SHARINGS,
    Setting,
    far_settings,
    first_setting,
    neighbours,
)
from varlen.simulate.dispatch import Dispatched, dispatch
from varlen.simulate.stage_costs import StageCosts, stage_costs
from varlen.step_plan import Mesh, PlanMethod, StepPlan
from varlen.types import Int32Array

THRESHOLDS = (math.inf, 0.9, 0.5, 0.25)
"""Documents are shared when one costs more than this much of a rank's mean work; each set is tried."""
ROOM_PARTS = (2, 4, 8, 16)
"""Documents are shared, too, that hold more than one of these parts of what memory has room for."""
RECUTS = (1.0, 0.5, 0.75, 1.5, 2.0)
"""Backward MicroPacks of a long document over its forward ones, where they are composed apart."""
LEAST_GAIN = 0.99
"""Composed apart, a backward pass must make its block at least so much faster."""
_WAITING = 1.08
"""Ranks that share documents wait for each other, which makes their block slower, by about so much."""
_ESTIMATE_SLACK = 0.9
"""Work in MicroPacks may take a little less than documents were weighed at."""
_NEARLY_FULL = 0.9
"""Share of a GPU's memory above which it may be what holds a step back."""
_SLOW = 1.06
"""Times its work alone that a step may take before it is called slow, where memory is full."""
FAR_OVER = 1.12
"""Times its lower bound that a step may take before it is looked at thoroughly."""
_KEPT = 4
"""Ways to share documents that are looked at closely, of those that a quick look finds best."""
_KEPT_LONGER = 2
"""Those of them that are looked at thoroughly, where the best is still far over its bound."""


@dataclass(slots=True)
class BlockSearch:
    """What has been tried on the ranks of a block, and the best of it."""

    documents: list[RankDocuments]
    estimate_s: float
    """What it takes if nothing waits, as long as nothing has been tried."""
    tried: set[Setting] = field(default_factory=set)
    forward: list[Composition] = field(default_factory=list)
    backward: list[Composition] = field(default_factory=list)
    found: Dispatched | None = None
    setting: Setting | None = None
    """That of the best."""

    @property
    def makespan_s(self) -> float:
        """Seconds of the best; an estimate before anything was tried, inf if nothing that was tried fits."""
        if self.found:
            return self.found.makespan_s
        return math.inf if self.tried else self.estimate_s

    @property
    def shares(self) -> bool:
        """Whether its ranks share documents."""
        return any(documents.num_shared for documents in self.documents)


class Look(enum.IntEnum):
    """How closely a block is looked at: how many settings are tried on it."""

    QUICK = 4
    CLOSE = 100
    THOROUGH = 200
    """From far settings, too."""


@dataclass(slots=True)
class Answer:
    """One way to share documents, with the best that was found for each block of ranks."""

    groups: Groups
    costs: StageCosts
    blocks: list[BlockSearch]

    @property
    def makespan_s(self) -> float:
        """Seconds of the slowest block, estimated where nothing has been tried yet."""
        return max(block.makespan_s for block in self.blocks)

    @property
    def is_full(self) -> bool:
        """Whether the memory of some stage is nearly full, so that more of it might make the step faster."""
        peaks = [block.found.peaks_bytes for block in self.blocks if block.found]
        return bool((np.array(peaks) > _NEARLY_FULL * self.costs.limits).any())

    @property
    def slowness(self) -> float:
        """Seconds over those that its work would take if nothing waited."""
        return self.makespan_s / max(block.estimate_s for block in self.blocks)

    @property
    def is_complete(self) -> bool:
        """Whether there is something that fits for every block."""
        return all(block.found for block in self.blocks)

    @property
    def forward(self) -> list[Composition]:
        """Forward MicroPacks of all ranks."""
        return [composition for block in self.blocks for composition in block.forward]

    @property
    def backward(self) -> list[Composition]:
        """Backward MicroPacks of all ranks."""
        return [composition for block in self.blocks for composition in block.backward]

    @property
    def codes(self) -> list[npt.NDArray[np.uint8]]:
        """The order of tasks of all ranks."""
        return [block.found.codes for block in self.blocks if block.found for _ in block.documents]

    @property
    def label(self) -> str:
        """What was chosen, for people."""
        counts = [composition.num_micropacks for composition in self.forward]
        shared = self.groups.num_merged
        apart = sum(block.forward is not block.backward for block in self.blocks)
        return (
            f"{min(counts)} to {max(counts)} MicroPacks a rank, weight gradients "
            f"{'apart' if self.costs.splits else 'within'}, {shared} of {self.groups.work.size} documents shared"
            + (f", backward composed apart on {apart} of {len(self.blocks)} blocks of ranks" if apart else "")
        )


def micropack(
    lengths: Int32Array,
    cost: CostModel,
    mesh: Mesh,
    search: Search,
    *,
    method: PlanMethod = "micropack",
    look: Look = Look.CLOSE,
) -> tuple[StepPlan, bool] | None:
    """Plan a step by slices and MicroPacks; return it and whether more memory might make a faster one.

    Args:
        lengths: int32 `[num_documents]`, with at least one document.
        cost: seconds and bytes.
        mesh: the GPUs.
        search: what may be tried.
        method: what the plan says of itself.
        look: how closely the best candidates are looked at.

    Returns:
        None where memory holds no candidate.
    """
    best = best_answer(lengths, cost, mesh, search, look)
    if best is None:
        return None
    plan = step_plan(
        lengths,
        best.groups,
        best.forward,
        best.backward,
        best.codes,
        cost,
        mesh,
        splits=best.costs.splits,
        method=method,
        answered_by=best.label,
    )
    return plan, best.is_full


def best_answer(
    lengths: Int32Array, cost: CostModel, mesh: Mesh, search: Search, look: Look = Look.CLOSE
) -> Answer | None:
    """Look quickly at every way to share documents, then closely at the best; None where nothing fits.

    Args:
        lengths: int32 `[num_documents]`, with at least one document.
        cost: seconds and bytes.
        mesh: the GPUs.
        search: what may be tried.
        look: how closely the best ways are looked at.
    """
    best = _searched(lengths, stage_costs(cost, mesh, splits=search.splits_backward), search, look)
    # Kept activations belong to the slices that made them: only what is computed again may be cut anew.
    if best and search.asymmetric and cost.recompute == "full" and cost.recompute_share == 1:
        _compose_apart(best, search)
    if not search.splits_backward:
        return best
    plain = stage_costs(cost, mesh)
    if best is None or (best.is_full and best.slowness > _SLOW):
        # Weight gradients apart hold memory for longer: with little of it, another way to share may be better.
        return _searched(lengths, plain, search, look, best)
    documents = [rank for block in best.blocks for rank in block.documents]
    way = Answer(best.groups, plain, _blocks(documents, best.groups, plain))
    return _better(way, best, search, Look.CLOSE)


def _searched(
    lengths: Int32Array, costs: StageCosts, search: Search, look: Look, best: Answer | None = None
) -> Answer | None:
    """The best way to share documents, if it beats the best so far."""
    ways = [
        Answer(groups, costs, _blocks(documents_of_ranks(groups, lengths, costs.mesh.dp), groups, costs))
        for groups in _groupings(lengths, costs, search)
    ]
    incumbent_s = best.makespan_s if best else math.inf
    for way in ways:
        _improve(way, search, incumbent_s, Look.QUICK)
        incumbent_s = min(incumbent_s, way.makespan_s)
    kept = []
    for way in sorted(ways, key=lambda way: way.makespan_s):
        best = _better(way, best, search, Look.CLOSE)
        kept += [way] if way.is_complete else []
        if len(kept) == _KEPT:
            break
    if look is Look.THOROUGH:
        for way in sorted(kept, key=lambda way: way.makespan_s)[:_KEPT_LONGER]:
            best = _better(way, best, search, look)
    return best


def _better(way: Answer, best: Answer | None, search: Search, look: Look) -> Answer | None:
    """Look at a way and return the faster of the two."""
    incumbent_s = best.makespan_s if best and best is not way else math.inf
    _improve(way, search, incumbent_s, look)
    return way if way.is_complete and way.makespan_s < incumbent_s else best


def _next(block: BlockSearch, favourite: Setting | None, search: Search, look: Look) -> Setting | None:
    """The setting to try next: the best one's neighbours, until all of them have been tried.

    Args:
        block: what has been tried.
        favourite: the setting to begin with, if any.
        search: what may be tried.
        look: how closely.
    """
    if not block.tried:
        return favourite or first_setting(search)
    # As long as nothing fits: smaller MicroPacks hold less while they run.
    best = block.setting or max(block.tried, key=lambda setting: setting.size)
    around = neighbours(best, search, shares=block.shares)
    if block.setting is not None:
        if len(block.tried) >= look:
            return None
        if look is Look.THOROUGH:
            around = itertools.chain(far_settings(search, shares=block.shares), around)
    return next((setting for setting in around if setting not in block.tried), None)


def _groupings(lengths: Int32Array, costs: StageCosts, search: Search) -> Iterator[Groups]:
    """Yield the ways to share documents that differ."""
    seen = set()
    held = costs.per_row[0].reshape(-1, costs.mesh.pp).sum(axis=0)
    room = float((costs.limits / np.maximum(held, 1e-9)).min())
    tries = [(threshold, room) for threshold in THRESHOLDS] + [(math.inf, room / part) for part in ROOM_PARTS]
    for threshold, most_rows in tries if search.merges else [(math.inf, math.inf)]:
        sizes = merged_sizes(
            lengths,
            costs.mesh.dp,
            costs.rates,
            threshold=threshold,
            most_ranks=search.most_merged_ranks,
            most_rows=most_rows,
        )
        if sizes.tobytes() not in seen:
            seen.add(sizes.tobytes())
            yield grouped(lengths, sizes, costs.mesh.dp, costs.rates, is_exact=search.exact)


def _blocks(documents: list[RankDocuments], groups: Groups, costs: StageCosts) -> list[BlockSearch]:
    """The blocks of ranks, of which nothing has been tried yet."""
    mesh = costs.mesh
    bounds = blocks_of(groups, mesh.dp, in_step=mesh.sharding == "parameters").tolist()
    layers = float(costs.layers.reshape(-1, mesh.pp).sum(axis=0).max())
    estimates = np.maximum.reduceat(groups.loads(mesh.dp) * layers, bounds[:-1])
    estimates *= np.where(np.diff(bounds) > 1, _WAITING, 1.0)
    return [
        BlockSearch(documents[first:last], estimate)
        for first, last, estimate in zip(bounds, bounds[1:], estimates.tolist())
    ]


def _improve(answer: Answer, search: Search, incumbent_s: float, look: Look) -> None:
    """Try settings on whichever block is slowest, until it has none left: no other can make the step faster.

    Args:
        answer: changed.
        search: what may be tried.
        incumbent_s: of the best answer so far; no more is tried once this one can't beat it.
        look: how closely; a quick look leaves blocks alone of which an estimate says that they aren't the slowest.
    """
    favourite: Setting | None = None
    while True:
        block = max(answer.blocks, key=lambda block: block.makespan_s)
        setting = _next(block, favourite, search, look)
        if setting is None or (not block.tried and block.estimate_s * _ESTIMATE_SLACK > incumbent_s):
            if block.makespan_s >= incumbent_s or look is Look.QUICK:
                return
            favourite = block.setting
            waiting = [block for block in answer.blocks if not block.tried]
            if not waiting:
                return
            block = waiting[0]
            setting = _next(block, favourite, search, look)
        assert setting is not None
        _try(block, setting, answer, search)


def _try(block: BlockSearch, setting: Setting, answer: Answer, search: Search) -> None:
    """Compose a block one way, and keep it if it runs faster."""
    block.tried.add(setting)
    costs = answer.costs
    stages = costs.limits.size
    rows = min(documents.num_rows for documents in block.documents)
    wanted = round(search.micropacks_per_stage[setting.size] * stages)
    count = max(1, min(wanted, int(rows // search.least_rows)))
    graded = GRADINGS[setting.grading if search.grades else EVEN]
    heads, tails = (min(ends * stages, count // 2) for ends in (graded.heads, graded.tails))
    grading = replace(graded, heads=heads, tails=tails)
    sharing = SHARINGS[setting.sharing]
    work = sum(float(documents.work.sum()) for documents in block.documents) / len(block.documents)
    budget = sharing.size * work / count
    compositions = padded(
        [
            compose(
                documents,
                count,
                grading,
                least_rows=search.least_rows if search.slices else 2**31 - 1,
                budget=budget,
                rates=costs.rates,
                in_step=len(block.documents) > 1,
                by_work=search.orders,
                mixes=sharing.mixes,
            )
            for documents in block.documents
        ]
    )
    found = dispatch(
        pipeline_of_block(compositions, compositions, costs), forward_first=setting.forward_first
    )
    before_s = block.found.makespan_s if block.found else math.inf
    # Of equals the one with fewer MicroPacks: where rows are few, many counts come to the same, and fewer may be
    # faster still.
    is_fewer = block.setting is not None and setting.size < block.setting.size
    if found.makespan_s < before_s or (is_fewer and found.makespan_s == before_s < math.inf):
        block.found, block.forward, block.backward = found, compositions, compositions
        block.setting = setting


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
            found = dispatch(pipeline_of_block(block.forward, backward, costs), forward_first=is_ahead)
            if found.makespan_s < min(block.makespan_s, LEAST_GAIN * before_s):
                block.found, block.backward = found, backward
        if block.makespan_s == before_s:
            return
