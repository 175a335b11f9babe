"""`Answer`: a way to share documents among ranks, with the best that was found for each block of them."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
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
from varlen.simulate.graph import StageCosts, gathers_s, priced
from varlen.simulate.memory import backward_counts, bytes_of, forward_counts
from varlen.types import FloatArray, Int32Array, IntArray

# A block of ranks as one pipeline: those that share documents run one order of tasks, so that none waits long.


def blocks_of(groups: Groups, dp: int, *, in_step: bool) -> IntArray:
    """Return where blocks of ranks begin, int64 `[num_blocks + 1]`.

    A block is the ranks of the largest group that shares a document, or a rank that shares none: groups are aligned
    powers of two, so that smaller ones lie within larger ones.
    """
    if in_step:
        return np.array([0, dp])
    is_inside = np.zeros(dp + 1, np.bool_)
    shared = np.flatnonzero((groups.num_ranks > 1) & (groups.first_ranks >= 0))
    for first, size in zip(groups.first_ranks[shared].tolist(), groups.num_ranks[shared].tolist()):
        is_inside[first + 1 : first + size] = True
    return np.flatnonzero(~is_inside)


def padded(compositions: Sequence[Composition]) -> list[Composition]:
    """Give all ranks of a block equally many MicroPacks, empty ones at the end of those that have fewer."""
    count = max(composition.num_micropacks for composition in compositions)
    return [composition.extended(count) for composition in compositions]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockWork:
    """What a block's MicroPacks are by themselves, whatever a chunk of layers makes of them: priced, in order."""

    ahead: FloatArray
    """float64 `[ranks, forward MicroPacks, 7]`: as `stage_costs.priced`."""
    back: FloatArray
    """float64 `[ranks, backward MicroPacks, 7]`: in the order in which they run."""
    send_forward: FloatArray
    send_backward: FloatArray
    after: Int32Array
    """These three as `Pipeline` has them."""
    counts_forward: FloatArray
    """float64 `[ranks, 7, forward MicroPacks]`: as `forward_counts`."""
    counts_backward: FloatArray
    """float64 `[ranks, 14, backward MicroPacks]`: as `backward_counts`, in the order in which they run."""


def work_of_block(
    forward: Sequence[Composition], backward: Sequence[Composition], costs: StageCosts
) -> BlockWork:
    """Price the MicroPacks of a block's ranks, composed apart for both passes, and say what each waits for.

    Cost: O(slices).
    """
    ahead = _joined(forward, forward)
    return work_of(ahead, ahead if backward is forward else _joined(backward, forward), costs)


def work_of(forward: BlockComposition, backward: BlockComposition, costs: StageCosts) -> BlockWork:
    """Price the MicroPacks of a block's ranks.

    Cost: O(slices).
    """
    (ranks, count), cp = forward.chains.shape, costs.mesh.cp
    rank_offsets = _rank_offsets(forward)
    ahead = priced(costs, forward.slice_offsets, forward.slices)
    counts = forward_counts(forward.slice_offsets, forward.slices, rank_offsets, cp)
    back, back_offsets = ahead, rank_offsets
    if backward is not forward:
        back = priced(costs, backward.slice_offsets, backward.slices)
        back_offsets = _rank_offsets(backward)
    back = back[backward.order]
    order = backward.order.ravel()
    back_counts = backward_counts(
        backward.slice_offsets, backward.slices, order, back_offsets, cp, forward.slices
    )
    latency, per_row = costs.send_latency_s, costs.send_s_per_row
    return BlockWork(
        ahead=ahead.reshape(ranks, count, NUM_COLUMNS),
        back=back,
        send_forward=ahead[:, ROWS].reshape(ranks, count).max(axis=0) * per_row + latency,
        send_backward=back[:, :, ROWS].max(axis=0) * per_row + latency,
        after=backward.waits.max(axis=0),
        counts_forward=_by_rank(counts, ranks),
        counts_backward=_by_rank(back_counts, ranks),
    )


def _joined(compositions: Sequence[Composition], forward: Sequence[Composition]) -> BlockComposition:
    """Compositions of a block's ranks, of either pass."""
    ends = np.cumsum([0, *(one.slices.shape[1] for one in compositions)], dtype=np.int32)
    offsets = [one.slice_offsets[:-1] + end for one, end in zip(compositions, ends)]
    found = [
        kernels_compose.backward_order(one.chains, ahead.chains) for one, ahead in zip(compositions, forward)
    ]
    packs = compositions[0].num_micropacks
    return BlockComposition(
        slice_offsets=np.concatenate([*offsets, ends[-1:]]),
        slices=np.concatenate([one.slices for one in compositions], axis=1),
        chains=np.array([one.chains for one in compositions]),
        order=np.array([order + rank * packs for rank, (order, _) in enumerate(found)]),
        waits=np.array([waits for _, waits in found]),
    )


def _rank_offsets(made: BlockComposition) -> Int32Array:
    """Where the MicroPacks of each rank begin, int32 `[ranks + 1]`."""
    ranks, packs = made.chains.shape
    offsets: Int32Array = (packs * np.arange(ranks + 1)).astype(np.int32)
    return offsets


def _by_rank(counts: FloatArray, ranks: int) -> FloatArray:
    """`[things, ranks * MicroPacks]` as `[ranks, things, MicroPacks]`."""
    apart = counts.reshape(len(counts), ranks, -1).swapaxes(0, 1)
    return np.ascontiguousarray(apart)


def pipeline_of_block(work: BlockWork, costs: StageCosts) -> Pipeline:
    """Return what a block's pipeline has to do: of each MicroPack what it takes the slowest rank.

    An order of tasks for this pipeline is one for all of its ranks, and none of them takes longer with it.

    Cost: O(ranks * MicroPacks * chunks).
    """
    taken = bytes_of(
        costs.memory, work.counts_forward, work.counts_backward, costs.mesh.pp, splits=costs.splits
    )
    forward, backward, weight = kernels_compose.task_seconds(
        work.ahead,
        work.back,
        costs.layers,
        costs.heads,
        gathers_s(costs.gather_s, splits=costs.splits),
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


_WAITING = 1.08
"""Ranks that share documents wait for each other, which makes their block slower, by about so much."""
_ESTIMATE_SLACK = 0.9
"""Work in MicroPacks may take a little less than documents were weighed at."""
_NONE_BESIDE = 1e-9
"""Of a rank's work: a budget so small that no document stands beside another."""
_MOST_KEPT = 65_536
"""Documents of a rank up to which its compositions are kept; of more of them they would take gigabytes."""
_NEARLY_FULL = 0.9
"""Share of a GPU's memory above which it may be what holds a step back."""


Composed = tuple[BlockComposition, BlockWork]
"""What was composed of a block's ranks, and what they have to do."""


@dataclass(slots=True)
class BlockSearch:
    """What has been tried on the ranks of a block, and the best of it."""

    first: int
    """Its first rank."""
    documents: list[RankDocuments]
    tables: BlockDocuments
    """The same, as kernels take them."""
    estimate_s: float
    """What it takes if nothing waits, as long as nothing has been tried."""
    coarsest: int = 0
    """The place in `Search.sizes` below which a MicroPack alone is over some memory."""
    finest: int = 0
    """The place behind which MicroPacks would hold too few rows."""
    tried: set[Setting] = field(default_factory=set)
    known: dict[tuple[object, ...], float] = field(default_factory=dict)
    """Seconds of what was run, by all that tells one run from another."""
    forward: list[Composition] = field(default_factory=list)
    backward: list[Composition] = field(default_factory=list)
    found: Dispatched | None = None
    setting: Setting | None = None
    """That of the best."""
    is_full: bool = False
    """Whether the memory of some stage is nearly full in the best: it has no room for another MicroPack."""
    too_coarse: int = -1
    """The last place in `Search.sizes` that was tried and didn't fit."""

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
    """Of the slowest block alone."""
    BRIEF = 5
    CLOSE = 100
    THOROUGH = 200
    """From far settings, too."""


@dataclass(slots=True)
class Answer:
    """One way to share documents, with the best that was found for each block of ranks."""

    groups: Groups
    costs: StageCosts
    blocks: list[BlockSearch]
    spares_memory: bool = False
    """Whether documents are shared because memory can't hold them otherwise."""
    composed: dict[tuple[object, ...], Composed] = field(default_factory=dict)
    """By block and all that tells one composition from another: the same whether weight gradients stand apart."""

    @property
    def makespan_s(self) -> float:
        """Seconds of the slowest block, estimated where nothing has been tried yet."""
        return max(block.makespan_s for block in self.blocks)

    @property
    def is_full(self) -> bool:
        """Whether more memory might make a step faster: a stage's is nearly full, or documents are shared for it."""
        if self.spares_memory:
            return True
        return any(block.is_full for block in self.blocks)

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
    """The blocks of ranks, of which nothing has been tried yet."""
    mesh = costs.mesh
    bounds = blocks_of(groups, mesh.dp, in_step=mesh.sharding == "parameters").tolist()
    layers = float(costs.layers.reshape(-1, mesh.pp).sum(axis=0).max())
    estimates = np.maximum.reduceat(groups.loads(mesh.dp) * layers, bounds[:-1])
    estimates *= np.where(np.diff(bounds) > 1, _WAITING, 1.0)
    return [
        BlockSearch(first, mine, BlockDocuments.of(mine), estimate, *_places(mine, costs, search))
        for first, last, estimate in zip(bounds, bounds[1:], estimates.tolist())
        for mine in [documents[first:last]]
    ]


def _places(documents: list[RankDocuments], costs: StageCosts, search: Search) -> tuple[int, int]:
    """The sizes that a search may go between: one MicroPack alone fits, and none holds too few rows."""
    stages = costs.limits.size
    rows = min(each.num_rows for each in documents)
    # Of a row at least: its document may be there already, or end later.
    least_bytes = costs.memory.forward_peaks[:, :, OWN].max(axis=1) - costs.memory.forward_left[:, AHEAD]
    least_bytes = least_bytes.reshape(-1, stages).min(axis=0)
    # While the last rank's largest MicroPack runs forward through the first of a stage's chunks.
    most_rows = (costs.limits / np.maximum(least_bytes, 1e-9)).min()
    least = max(each.num_rows for each in documents) / costs.mesh.cp / max(float(most_rows), 1e-9)
    wanted = np.round(np.array(search.sizes) * stages)
    finest = min(int(np.searchsorted(wanted, int(rows // search.least_rows))), wanted.size - 1)
    return min(int(np.searchsorted(wanted, least)), finest), finest


def improve(
    answer: Answer, search: Search, incumbent_s: float, look: Look, favourite: Setting | None = None
) -> None:
    """Try settings on whichever block is slowest, until it has none left: no other can make the step faster."""
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
    wanted = round(search.sizes[setting.size] * stages)
    count = max(1, min(wanted, int(rows // search.least_rows)))
    if setting.whole:
        count = max(1, *(documents.lengths.size for documents in block.documents))
    graded = GRADINGS[setting.grading if search.grades and not setting.whole else EVEN]
    heads, tails = (min(ends * stages, count // 2) for ends in (graded.heads, graded.tails))
    grading = replace(graded, heads=heads, tails=tails)
    sharing = SHARINGS[setting.sharing]
    work = sum(documents.seconds for documents in block.documents) / len(block.documents)
    budget = _NONE_BESIDE * work if setting.whole else sharing.size * work / count
    before_s = block.found.makespan_s if block.found else math.inf
    # Of equals the one with fewer MicroPacks: where rows are few, many counts come to the same, and fewer may be
    # faster still.
    is_fewer = block.setting is not None and setting.size < block.setting.size
    shared = sharing if block.shares else None
    composed = (block.first, count, heads, tails, graded.smallest, shared, setting.whole)
    same = (*composed, setting.forward_first)
    if same in block.known:
        if is_fewer and block.known[same] == before_s < math.inf:
            block.setting = setting
        return
    known = answer.composed.get(composed)
    if known is None:
        known = _composed(block, count, grading, budget, sharing.mixes, setting.whole, costs, search)
        if block.documents[0].lengths.size <= _MOST_KEPT:
            answer.composed[composed] = known
    compositions, priced = known
    pipeline = pipeline_of_block(priced, costs)
    found = dispatch(pipeline, forward_first=setting.forward_first, limit_s=before_s)
    if found.makespan_s == math.inf:
        block.too_coarse = max(block.too_coarse, setting.size)
    block.known[same] = found.makespan_s
    if found.makespan_s < before_s or (is_fewer and found.makespan_s == before_s < math.inf):
        block.forward = block.backward = compositions.apart()
        block.found = found
        block.setting = setting
        count = max(1, pipeline.forward_left.shape[0] * pipeline.forward_left.shape[2])
        another = pipeline.forward_left.sum(axis=(0, 2)).reshape(-1, stages).sum(axis=0) / count
        most = np.minimum(_NEARLY_FULL * costs.limits, costs.limits - another)
        block.is_full = bool((found.peaks_bytes > most).any())


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
    """Make the MicroPacks of a block's ranks, equally many on each."""
    compositions = compose(
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
    return compositions, work_of(compositions, compositions, costs)


def _next(block: BlockSearch, favourite: Setting | None, search: Search, look: Look) -> Setting | None:
    """The setting to try next: the best one's neighbours, until all of them have been tried."""
    if not block.tried:
        begin = favourite or first_setting(search)
        return begin._replace(size=min(max(begin.size, block.coarsest), block.finest))
    best = block.setting
    if best is None:  # smaller MicroPacks hold less while they run
        tried = max(block.tried, key=lambda setting: (setting.size, setting.whole))
        if tried.size < block.finest:
            return tried._replace(size=block.finest)
        return None if tried.whole else tried._replace(whole=True)
    middle = best._replace(size=(best.size + block.too_coarse) // 2)
    if 0 <= block.too_coarse < middle.size and middle not in block.tried:
        return middle
    if len(block.tried) >= look:
        return None
    around = neighbours(best, block.finest, search, shares=block.shares, is_full=block.is_full)
    if look is Look.THOROUGH:
        around = itertools.chain(far_settings(block.finest, search, shares=block.shares), around)
    return next((setting for setting in around if setting not in block.tried), None)


# The ways to compose a rank that the planner tries, and which it tries next.


@dataclass(frozen=True, slots=True)
class Sharing:
    """How shared documents are cut."""

    size: float
    """A slice over a MicroPack's mean work."""
    mixes: bool
    """Whether what is left of a MicroPack holds documents of the rank alone."""


SHARINGS = (
    Sharing(1.0, mixes=True),
    Sharing(0.7, mixes=True),
    Sharing(0.5, mixes=True),
    Sharing(1.5, mixes=True),
    Sharing(2.0, mixes=True),
    Sharing(1.0, mixes=False),
)
"""Cuts of shared documents that are tried."""
GRADINGS = (
    Grading(heads=1, tails=1, smallest=0.2),
    Grading(),
    Grading(heads=2, tails=2, smallest=0.1),
    Grading(heads=1, smallest=0.2),
    Grading(heads=2, smallest=0.1),
)
"""Small MicroPacks that are tried; their numbers count in a pipeline's stages."""
EVEN = 1
"""The grading that leaves all MicroPacks as large."""
_FIRST_TRIED = 6
"""MicroPacks per stage that are tried first; the search climbs from there."""
_FAR = ((1, 2, 4, 7), (0, 3), (1, 0, 3), (False, True))
"""Places from which a thorough search climbs too: of each part of a setting."""


class Setting(NamedTuple):
    """One way to compose and run a rank."""

    size: int
    """Place in `Search.sizes`."""
    grading: int = 0
    """Place in `GRADINGS`."""
    sharing: int = 0
    """Place in `SHARINGS`."""
    forward_first: bool = False
    """As `simulate.dispatch.dispatch`."""
    whole: bool = False
    """Each document whole, in a MicroPack of its own, whatever the size: where memory holds hardly more than one."""


def first_setting(search: Search) -> Setting:
    """Return where the search begins."""
    sizes = search.sizes
    return Setting(min(range(len(sizes)), key=lambda place: abs(sizes[place] - _FIRST_TRIED)))


def neighbours(
    best: Setting, finest: int, search: Search, *, shares: bool, is_full: bool
) -> Iterator[Setting]:
    """Yield the settings that differ from one in one thing, the most promising first."""
    for step in (-1, 1):
        if 0 <= best.size + step <= finest:
            yield best._replace(size=best.size + step)
    if shares:
        yield from (best._replace(sharing=place) for place in range(len(SHARINGS)))
    if search.grades:
        yield from (best._replace(grading=place) for place in range(len(GRADINGS)))
    if search.orders:
        yield best._replace(forward_first=not best.forward_first)
    if is_full and not best.whole:
        yield best._replace(whole=True)


def far_settings(finest: int, search: Search, *, shares: bool) -> Iterator[Setting]:
    """Yield settings far from each other, for a step that is slow at the one to which the search climbed."""
    sizes, gradings, sharings, orders = _FAR
    for size, grading, sharing, forward_first in itertools.product(
        [place for place in sizes if place <= finest],
        gradings if search.grades else gradings[:1],
        sharings if shares else (0,),
        orders if search.orders else (False,),
    ):
        yield Setting(size, grading, sharing, forward_first)
