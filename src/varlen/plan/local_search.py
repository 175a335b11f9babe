"""`StepSearch`: searches the best composition and order of tasks for each block of ranks, given their documents.

A block is the ranks that share documents, directly or through others. They run one order of tasks, so that none waits
long, and are searched as one pipeline.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from varlen.cost.memory import AHEAD, OWN
from varlen.cost.rates import NUM_COLUMNS, ROWS
from varlen.counts import many
from varlen.plan import kernels_compose
from varlen.plan.assign import Groups
from varlen.plan.compose import (
    BlockComposition,
    BlockDocuments,
    Composition,
    Grading,
    RankDocuments,
    compose,
)
from varlen.plan.search import Search
from varlen.simulate.dispatch import Dispatched, Pipeline, dispatch
from varlen.simulate.graph import StageCosts, priced
from varlen.simulate.memory import bytes_of, counts_of_both
from varlen.types import FloatArray, Int32Array, IntArray


def blocks_of(groups: Groups, dp: int, *, in_step: bool) -> IntArray:
    """Return where blocks of ranks begin, int64 `[num_blocks + 1]`.

    Groups that share a document are aligned powers of two, so smaller groups lie within larger ones: a block is one
    of the largest groups, or a rank that shares nothing.
    """
    if in_step:
        return np.array([0, dp])
    is_inside = np.zeros(dp + 1, np.bool_)
    shared = np.flatnonzero((groups.num_ranks > 1) & (groups.first_ranks >= 0))
    for first, size in zip(groups.first_ranks[shared].tolist(), groups.num_ranks[shared].tolist()):
        is_inside[first + 1 : first + size] = True
    return np.flatnonzero(~is_inside)


def padded(compositions: Sequence[Composition]) -> list[Composition]:
    """Pad the ranks of a block to equally many MicroPacks, with empty ones at the end."""
    count = max(composition.num_micropacks for composition in compositions)
    return [composition.extended(count) for composition in compositions]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockWork:
    """The prices and memory counts of a block's MicroPacks, which are the same for every chunk of layers."""

    ahead: FloatArray
    """float64 `[ranks, forward MicroPacks, 7]`: what `simulate.graph.priced` returns."""
    back: FloatArray
    """float64 `[ranks, backward MicroPacks, 7]`: in the order in which they run."""
    send_forward: FloatArray
    """As in `Pipeline`, like the next two."""
    send_backward: FloatArray
    after: Int32Array
    counts_forward: FloatArray
    """float64 `[ranks, 9, forward MicroPacks]`: as `forward_counts`."""
    counts_backward: FloatArray
    """float64 `[ranks, 17, backward MicroPacks]`: as `backward_counts`, in the order in which they run."""


def work_of_block(
    forward: Sequence[Composition], backward: Sequence[Composition], costs: StageCosts
) -> BlockWork:
    """Price the MicroPacks of a block's ranks, given rank by rank."""
    ahead = _joined(forward, forward)
    return work_of(ahead, ahead if backward is forward else _joined(backward, forward), costs)


def work_of(forward: BlockComposition, backward: BlockComposition, costs: StageCosts) -> BlockWork:
    """Price the MicroPacks of a block's ranks."""
    ranks, count = forward.chains.shape
    ahead = priced(costs, forward.slice_offsets, forward.slices)
    back = ahead if backward is forward else priced(costs, backward.slice_offsets, backward.slices)
    back = back[backward.order]
    counts = counts_of_both(
        (forward.slice_offsets, forward.slices),
        (backward.slice_offsets, backward.slices),
        backward.order.ravel(),
        (_rank_offsets(forward), _rank_offsets(backward)),
        costs.mesh.cp,
    )
    latency, per_row = costs.send_latency_s, costs.send_s_per_row
    return BlockWork(
        ahead=ahead.reshape(ranks, count, NUM_COLUMNS),
        back=back,
        send_forward=ahead[:, ROWS].reshape(ranks, count).max(axis=0) * per_row + latency,
        send_backward=back[:, :, ROWS].max(axis=0) * per_row + latency,
        after=backward.waits.max(axis=0),
        counts_forward=counts[0],
        counts_backward=counts[1],
    )


def _joined(compositions: Sequence[Composition], forward: Sequence[Composition]) -> BlockComposition:
    """Join the compositions of a block's ranks, of either pass."""
    ends = np.cumsum([0, *(each.slices.shape[1] for each in compositions)], dtype=np.int32)
    offsets = [each.slice_offsets[:-1] + end for each, end in zip(compositions, ends)]
    orders = [
        kernels_compose.backward_order(each.chains, ahead.chains)
        for each, ahead in zip(compositions, forward)
    ]
    packs = compositions[0].num_micropacks
    return BlockComposition(
        slice_offsets=np.concatenate([*offsets, ends[-1:]]),
        slices=np.concatenate([each.slices for each in compositions], axis=1),
        chains=np.array([each.chains for each in compositions]),
        order=np.array([order + rank * packs for rank, (order, _) in enumerate(orders)]),
        waits=np.array([waits for _, waits in orders]),
    )


def _rank_offsets(composition: BlockComposition) -> Int32Array:
    """Return where the MicroPacks of each rank begin, int32 `[ranks + 1]`."""
    ranks, packs = composition.chains.shape
    offsets: Int32Array = (packs * np.arange(ranks + 1)).astype(np.int32)
    return offsets


def pipeline_of_block(work: BlockWork, costs: StageCosts) -> Pipeline:
    """Return a block as one pipeline, in which each task takes as long as on the slowest rank.

    All ranks of the block can run its order of tasks, and none of them takes longer than this pipeline.
    """
    taken = bytes_of(
        costs.memory, work.counts_forward, work.counts_backward, costs.mesh.pp, splits=costs.splits
    )
    forward, backward, weight = kernels_compose.task_seconds(
        work.ahead,
        work.back,
        costs.layers,
        costs.has_head,
        costs.gather_s,
        costs.splits,
        costs.head_at_once,
    )
    return Pipeline(
        forward=forward,
        backward=backward,
        weight=weight,
        send_forward=work.send_forward,
        send_backward=work.send_backward,
        after=work.after,
        **taken._asdict(),
        limits=costs.limits,
        splits=costs.splits,
    )


_WAITING = 1.08  # ranks that share documents wait for each other: their block is slower by about this factor
_ESTIMATE_SLACK = 0.9  # MicroPacks may take a little less time than estimated from whole documents
_NO_MIXING = 1e-9  # share of a rank's work: a budget so small that no two documents are in one MicroPack
_MOST_CACHED = 65_536  # documents of a rank up to which compositions are cached; more would take gigabytes
_FAR_FASTER = 0.95  # a brief search goes on while each setting takes less than this share of the best so far
_NEARLY_FULL = 0.9  # share of a GPU's memory above which memory may limit a step


Composed = tuple[BlockComposition, BlockWork]


@dataclass(slots=True)
class BlockSearch:
    """The settings that were tried for a block of ranks, and the best result."""

    first: int
    """The first rank."""
    documents: list[RankDocuments]
    tables: BlockDocuments
    """The same documents as kernels take them."""
    estimate_s: float
    """Estimated seconds if nothing waits, used before anything has been tried."""
    coarsest: int = 0
    """The first index in `Search.sizes` with which a MicroPack by itself fits into memory."""
    finest: int = 0
    """The last index with which MicroPacks hold enough rows."""
    tried: set[Setting] = field(default_factory=set)
    known: dict[tuple[object, ...], float] = field(default_factory=dict)
    """Seconds of each simulated run, by its composition and order."""
    forward: list[Composition] = field(default_factory=list)
    backward: list[Composition] = field(default_factory=list)
    best: Dispatched | None = None
    setting: Setting | None = None
    """The setting of the best result."""
    is_full: bool = False
    """Whether some stage has no memory left for another MicroPack in the best result."""
    falls: bool = False
    """Whether the last setting was far faster than those before, so that others near it may be, too."""
    too_coarse: int = -1
    """The largest index in `Search.sizes` that was tried and didn't fit."""

    @property
    def makespan_s(self) -> float:
        """Seconds of the best result; an estimate before anything was tried, inf if nothing tried fits."""
        if self.best:
            return self.best.makespan_s
        return math.inf if self.tried else self.estimate_s

    @property
    def shares(self) -> bool:
        """Whether its ranks share documents."""
        return any(documents.num_shared for documents in self.documents)


class Effort(enum.IntEnum):
    """The number of settings to try on a block."""

    QUICK = 4
    """Only on the slowest block."""
    BRIEF = 5
    CLOSE = 100
    THOROUGH = 200
    """Also begins from distant settings."""


@dataclass(slots=True)
class StepSearch:
    """One grouping of documents, and the search of each block of ranks."""

    groups: Groups
    costs: StageCosts
    blocks: list[BlockSearch]
    spares_memory: bool = False
    """Whether documents are shared because they don't fit into memory otherwise."""
    composed: dict[tuple[object, ...], Composed] = field(default_factory=dict)
    """Compositions by block and parameters; the same with and without separate weight gradients."""

    @property
    def makespan_s(self) -> float:
        """Seconds of the slowest block, estimated where nothing has been tried yet."""
        return max(block.makespan_s for block in self.blocks)

    @property
    def is_full(self) -> bool:
        """Whether more memory might make the step faster."""
        return self.spares_memory or any(block.is_full for block in self.blocks)

    @property
    def slowness(self) -> float:
        """Seconds over the estimate for a step in which nothing waits."""
        return self.makespan_s / max(block.estimate_s for block in self.blocks)

    @property
    def is_complete(self) -> bool:
        """Whether every block has a result that fits."""
        return all(block.best for block in self.blocks)

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
        return [block.best.codes for block in self.blocks if block.best for _ in block.documents]

    @property
    def label(self) -> str:
        """The choices, for display."""
        counts = [composition.num_micropacks for composition in self.forward]
        few, most = min(counts), max(counts)
        packs = many(few, "MicroPack") if few == most else f"{few:,} to {most:,} MicroPacks"
        shared = self.groups.num_merged
        apart = sum(block.forward is not block.backward for block in self.blocks)
        return (
            f"{packs} a rank, weight gradients "
            f"{'apart' if self.costs.splits else 'within'}, {shared} of {self.groups.work.size} documents shared"
            + (f", backward composed apart on {apart} of {len(self.blocks)} blocks of ranks" if apart else "")
        )


def blocks(
    documents: list[RankDocuments], groups: Groups, costs: StageCosts, search: Search
) -> list[BlockSearch]:
    """Return the blocks of ranks, before any search."""
    mesh = costs.mesh
    bounds = blocks_of(groups, mesh.dp, in_step=mesh.sharding == "parameters").tolist()
    layers = float(costs.layers.reshape(-1, mesh.pp).sum(axis=0).max())
    estimates = np.maximum.reduceat(groups.loads(mesh.dp) * layers, bounds[:-1])
    estimates *= np.where(np.diff(bounds) > 1, _WAITING, 1.0)
    wanted, most_rows = [round(size * mesh.pp) for size in search.sizes], _most_rows(costs)
    found = []
    for first, last, estimate in zip(bounds, bounds[1:], estimates.tolist()):
        mine = documents[first:last]
        rows = [each.num_rows for each in mine]
        finest = min(bisect_left(wanted, min(rows) // search.least_rows), len(wanted) - 1)
        coarsest = min(bisect_left(wanted, max(rows) / mesh.cp / most_rows), finest)
        found.append(BlockSearch(first, mine, BlockDocuments.of(mine), estimate, coarsest, finest))
    return found


def _most_rows(costs: StageCosts) -> float:
    """Return the rows of a MicroPack that by itself fits into the memory of every stage."""
    # Least bytes of a row: the document's reserved memory may be counted already.
    least_bytes = costs.memory.forward_peaks[:, :, OWN].max(axis=1) - costs.memory.forward_left[:, AHEAD]
    least_bytes = least_bytes.reshape(-1, costs.mesh.pp).min(axis=0)  # in the cheapest of a stage's chunks
    return max(float((costs.limits / np.maximum(least_bytes, 1e-9)).min()), 1e-9)


def improve(
    step: StepSearch, search: Search, incumbent_s: float, effort: Effort, start: Setting | None = None
) -> None:
    """Try settings on the slowest block until it has none left: others can't make the step faster.

    Then, each block that has no result gets one, beginning from the best setting.
    """
    while True:
        block = max(step.blocks, key=lambda block: block.makespan_s)
        setting = _next(block, start, search, effort)
        if setting is None or (not block.tried and block.estimate_s * _ESTIMATE_SLACK > incumbent_s):
            if block.makespan_s >= incumbent_s or effort is Effort.QUICK:
                return
            start = block.setting
            untried = next((block for block in step.blocks if not block.tried), None)
            if untried is None:
                return
            block, setting = untried, _next(untried, start, search, effort)
        assert setting is not None
        _try(block, setting, step, search)


def _try(block: BlockSearch, setting: Setting, step: StepSearch, search: Search) -> None:
    """Compose and dispatch a block with one setting, and store the result if it is the best."""
    block.tried.add(setting)
    block.falls = False
    costs = step.costs
    stages = costs.limits.size
    rows = min(documents.num_rows for documents in block.documents)
    wanted = round(search.sizes[setting.size] * stages)
    count = max(1, min(wanted, int(rows // search.least_rows)))
    if setting.whole:
        count = max(1, *(documents.lengths.size for documents in block.documents))
    graded = GRADINGS[setting.grading] if search.grades and not setting.whole else Grading()
    first, last = (min(ends * stages, count // 2) for ends in (graded.first, graded.last))
    grading = Grading(first=first, last=last, smallest=graded.smallest)
    sharing = SHARINGS[setting.sharing]
    work = sum(documents.seconds for documents in block.documents) / len(block.documents)
    budget = _NO_MIXING * work if setting.whole else sharing.size * work / count
    before_s = block.best.makespan_s if block.best else math.inf
    # Of equal results, prefer fewer MicroPacks: with few rows, many counts give the same composition, and still fewer
    # may be faster.
    is_fewer = block.setting is not None and setting.size < block.setting.size
    shared = sharing if block.shares else None
    key = (block.first, count, first, last, graded.smallest, shared, setting.whole)
    run_key = (*key, setting.forward_first)
    if run_key in block.known:
        if is_fewer and block.known[run_key] == before_s < math.inf:
            block.setting = setting
        return
    composed = step.composed.get(key)
    if composed is None:
        composed = _composed(block, count, grading, budget, sharing.mixes, setting.whole, costs, search)
        if block.documents[0].lengths.size <= _MOST_CACHED:
            step.composed[key] = composed
    composition, priced = composed
    pipeline = pipeline_of_block(priced, costs)
    result = dispatch(pipeline, forward_first=setting.forward_first, limit_s=before_s)
    if result.makespan_s == math.inf:
        block.too_coarse = max(block.too_coarse, setting.size)
    block.known[run_key] = result.makespan_s
    block.falls = result.makespan_s < _FAR_FASTER * before_s < math.inf
    if result.makespan_s < before_s or (is_fewer and result.makespan_s == before_s < math.inf):
        block.forward = block.backward = composition.apart()
        block.best = result
        block.setting = setting
        count = max(1, pipeline.forward_left.shape[0] * pipeline.forward_left.shape[2])
        another = pipeline.forward_left.sum(axis=(0, 2)).reshape(-1, stages).sum(axis=0) / count
        most = np.minimum(_NEARLY_FULL * costs.limits, costs.limits - another)
        block.is_full = bool((result.peaks_bytes > most).any())


def _composed(
    block: BlockSearch,
    count: int,
    grading: Grading,
    budget: float,
    mixes: bool,
    whole: bool,
    costs: StageCosts,
    search: Search,
) -> Composed:
    """Compose and price the MicroPacks of a block's ranks, equally many on each."""
    composition = compose(
        block.tables,
        count,
        grading,
        least_rows=search.least_rows if search.slices and not whole else 2**31 - 1,
        budget=budget,
        rates=costs.rates,
        in_step=len(block.documents) > 1,
        by_work=search.orders,
        mixes=mixes,
    )
    return composition, work_of(composition, composition, costs)


def _next(block: BlockSearch, start: Setting | None, search: Search, effort: Effort) -> Setting | None:
    """Return the next setting to try, among the best one's neighbours; None if all have been tried."""
    if not block.tried:
        begin = start or first_setting(search)
        return begin._replace(size=min(max(begin.size, block.coarsest), block.finest))
    best = block.setting
    if best is None:  # nothing fits yet: smaller MicroPacks take less memory
        tried = max(block.tried, key=lambda setting: (setting.size, setting.whole))
        if tried.size < block.finest:
            return tried._replace(size=block.finest)
        return None if tried.whole else tried._replace(whole=True)
    middle = best._replace(size=(best.size + block.too_coarse) // 2)
    if 0 <= block.too_coarse < middle.size and middle not in block.tried:
        return middle
    if len(block.tried) >= effort and not block.falls:
        return None
    around = neighbours(best, block.finest, search, shares=block.shares, is_full=block.is_full)
    if effort is Effort.THOROUGH:
        around = far_settings(block.finest, search, shares=block.shares) + around
    return next((setting for setting in around if setting not in block.tried), None)


@dataclass(frozen=True, slots=True)
class Sharing:
    """How shared documents are cut."""

    size: float
    """Work of a slice over the mean of a MicroPack."""
    mixes: bool
    """Whether the rank's own documents fill up MicroPacks with shared slices."""


SHARINGS = (
    Sharing(1.0, mixes=True),
    Sharing(0.7, mixes=True),
    Sharing(1.5, mixes=True),
    Sharing(2.0, mixes=True),
    Sharing(1.0, mixes=False),
)
GRADINGS = (
    Grading(first=1, last=1, smallest=0.2),
    Grading(first=2, last=2, smallest=0.1),
    Grading(first=1, smallest=0.2),
    Grading(first=2, smallest=0.1),
)
"""Numbers of small MicroPacks, as multiples of a pipeline's stages."""
_FIRST_TRIED = 6  # MicroPacks per stage at which the search begins
_FAR = ((1, 2, 4, 7), (0, 2), (1, 0, 2), (False, True))  # distant values of each field of a setting


class Setting(NamedTuple):
    """One way to compose and run a block."""

    size: int
    """Index in `Search.sizes`."""
    grading: int = 0
    """Index in `GRADINGS`."""
    sharing: int = 0
    """Index in `SHARINGS`."""
    forward_first: bool = False
    """As in `simulate.dispatch.dispatch`."""
    whole: bool = False
    """Give each document, uncut, a MicroPack of its own, for memory that holds hardly more than one document."""


@functools.lru_cache(maxsize=64)
def first_setting(search: Search) -> Setting:
    """Return the setting at which the search begins."""
    sizes = search.sizes
    return Setting(min(range(len(sizes)), key=lambda index: abs(sizes[index] - _FIRST_TRIED)))


@functools.lru_cache(maxsize=4096)
def neighbours(
    best: Setting, finest: int, search: Search, *, shares: bool, is_full: bool
) -> tuple[Setting, ...]:
    """Return the settings that differ from the best in one field, the most promising first."""
    found = [best._replace(size=size) for size in (best.size - 1, best.size + 1) if 0 <= size <= finest]
    if shares:
        found += [best._replace(sharing=index) for index in range(len(SHARINGS))]
    if search.grades:
        found += [best._replace(grading=index) for index in range(len(GRADINGS))]
    if search.orders:
        found.append(best._replace(forward_first=not best.forward_first))
    if is_full and not best.whole:
        found.append(best._replace(whole=True))
    return tuple(found)


@functools.lru_cache(maxsize=256)
def far_settings(finest: int, search: Search, *, shares: bool) -> tuple[Setting, ...]:
    """Return settings far from each other, for a thorough search."""
    sizes, gradings, sharings, orders = _FAR
    fields = itertools.product(
        [index for index in sizes if index <= finest],
        gradings if search.grades else gradings[:1],
        sharings if shares else (0,),
        orders if search.orders else (False,),
    )
    return tuple(Setting(*values) for values in fields)
