"""One data-parallel rank's documents become MicroPacks of equal or graded cost, the same in both passes."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from varlen import jit
from varlen.cost.rates import Rates
from varlen.types import FloatArray, Int32Array, IntArray

_kernel = functools.partial(jit.kernel, "varlen.plan", "kernels_compose")
_cost_kernel = functools.partial(jit.kernel, "varlen.cost", "kernels")

TYPICAL_ROWS = 8192.0
"""Rows of the MicroPacks that documents are weighed in before there are any."""
ROW_MULTIPLE = 128
"""Slices end on a multiple of this many rows: a block of attention kernels."""

_NOBODY: IntArray = np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankDocuments:
    """The documents of one rank; what a search asks of them again and again is counted once.

    Those that other ranks share stand first, in one order on all of them; then the others, from much work to little.
    """

    document_ids: Int32Array
    """int32 `[n]`: among the lengths of the step; none of length 0."""
    lengths: Int32Array
    """int32 `[n]`."""
    num_ranks: Int32Array
    """int32 `[n]`."""
    work: FloatArray
    """float64 `[n]`: seconds of one GPU in both passes and an average layer."""
    num_shared: int = field(init=False)
    """Documents that other ranks share."""
    num_rows: float = field(init=False)
    """Rows of this rank."""
    seconds: float = field(init=False)
    """All of its work."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_shared", int(np.count_nonzero(self.num_ranks > 1)))
        object.__setattr__(self, "num_rows", float((self.lengths / self.num_ranks).sum()))
        object.__setattr__(self, "seconds", float(self.work.sum()))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Composition:
    """The MicroPacks of one rank: forward as they stand, backward the same ones in `backward_order`."""

    slice_offsets: Int32Array
    """int32 `[num_micropacks + 1]`."""
    slices: Int32Array
    """int32 `[5, num_slices]`: starts, stops, ranks that share it, document ids, whether its document ends here."""
    chains: Int32Array
    """int32 `[num_micropacks]`: MicroPacks of one chain hold the slices of one document, and stand together."""

    @property
    def num_micropacks(self) -> int:
        """How many there are."""
        return len(self.chains)

    def extended(self, count: int) -> Composition:
        """Return the same with empty MicroPacks at the end.

        Args:
            count: MicroPacks wanted, at least as many as there are.
        """
        missing = count - self.num_micropacks
        if not missing:
            return self
        last = int(self.chains.max(initial=-1))
        return Composition(
            slice_offsets=np.append(self.slice_offsets, np.repeat(self.slice_offsets[-1], missing)),
            slices=self.slices,
            chains=np.append(self.chains, last + 1 + np.arange(missing, dtype=np.int32)),
        )

    @property
    def backward_order(self) -> IntArray:
        """int64 `[num_micropacks]`: chains in the same order, each from its last MicroPack to its first."""
        order: IntArray = _kernel("reversed_chains")(self.chains)
        return order


@dataclass(frozen=True, kw_only=True, slots=True)
class Grading:
    """How MicroPacks at the ends of a rank's order are made smaller, so that pipelines fill and drain faster."""

    heads: int = 0
    """Sizes between the smallest and a whole MicroPack at the beginning, one MicroPack of each; 0 for equal sizes."""
    tails: int = 0
    """The same at the end."""
    smallest: float = 1.0
    """The smallest over a whole MicroPack."""

    def sizes(self, steps: int) -> FloatArray:
        """Return sizes over a whole MicroPack, rising evenly, float64 `[steps]`.

        Args:
            steps: at one end.
        """
        rising: FloatArray = self.smallest + (1 - self.smallest) * np.arange(steps) / max(1, steps)
        return rising


def seconds_of(
    lengths: Int32Array, num_ranks: Int32Array, rows: float, rates: Rates, *, forward_part: float = 1.0
) -> FloatArray:
    """Return what each document costs in both passes, per average layer and GPU; float64 `[num_documents]`.

    Args:
        lengths: int32 `[num_documents]`.
        num_ranks: int32 `[num_documents]`: ranks that share its rows.
        rows: of the MicroPacks that hold it.
        rates: of the mesh.
        forward_part: how much of the forward pass counts; 0 for the backward pass alone.
    """
    seconds: FloatArray = _cost_kernel("document_seconds")(lengths, num_ranks, rows, forward_part, rates)
    return seconds


def compose(
    documents: RankDocuments,
    num_micropacks: int,
    grading: Grading,
    *,
    least_rows: int,
    budget: float,
    rates: Rates,
    in_step: bool = False,
    by_work: bool = True,
    mixes: bool = True,
) -> Composition:
    """Make the MicroPacks of one rank (SlimPack's Slim, Mix and Pack; Liu et al. 2025, arXiv 2509.26246).

    A document over 1.15 budgets is cut into slices of equal cost, each the start of a MicroPack of its own (Slim);
    shared ones that aren't cut stand together in as few MicroPacks as budgets hold;
    those that are left go, from much work to little, each to the MicroPack with the least (Graham 1969, "Bounds on
    Multiprocessing Timing Anomalies"): to slices with room (Mix) and to free MicroPacks (Pack). Order: small
    MicroPacks rising; shared chains; the other chains, long ones first; full MicroPacks; small ones falling.

    Args:
        documents: of the rank.
        num_micropacks: wanted; long documents and whole ones can make it more or fewer.
        grading: sizes at both ends.
        least_rows: rows that a slice has at least.
        budget: seconds of a shared MicroPack; equal on all ranks, unlike the rank's own.
        rates: of the mesh.
        in_step: keep empty MicroPacks, so that shared ones stand at the same place on all ranks.
        by_work: the order above; without, chains stand as their documents do, and full MicroPacks as they come.
        mixes: shared slices with room get documents of this rank alone, too.

    Cost: O(n · log num_micropacks).
    """
    own = documents.seconds / num_micropacks
    cuts = _cut(documents, own, budget, least_rows, rates)
    of, chained, first_own = cuts.of, cuts.num_documents, cuts.num_shared
    shorts = documents.work[chained:]
    free = max(num_micropacks - of.size, int(first_own == of.size and shorts.size > 0))
    heads, tails = grading.heads, grading.tails
    if in_step:  # as many on all ranks, or shared MicroPacks would stand in different places
        free = max(free, heads + tails)
    else:
        tails = min(tails, free // 2)
        heads = min(heads, free - tails)
    # None holds too few rows.
    least = min(1.0, least_rows / max(1, documents.num_rows / num_micropacks))
    small = np.concatenate([grading.sizes(heads), grading.sizes(tails)]).clip(least, 1.0)
    first = 0 if mixes and by_work else first_own
    held_back = np.zeros(of.size - first + free)
    held_back[: of.size - first] = cuts.seconds[first:]
    held_back[of.size - first :][: small.size] = own * (1 - small)
    loads = held_back.copy()
    pack_of = first + _kernel("fill_lightest")(shorts, loads)
    filled = np.zeros(of.size + free)
    filled[first:] = loads - held_back
    order: IntArray | slice = slice(None)
    if not by_work:
        # A stable sort of chains by their documents; MicroPacks behind them stay as they came.
        order = np.arange(filled.size)
        order[first_own : of.size] = first_own + np.argsort(
            documents.document_ids[of[first_own:]], kind="stable"
        )
        pack_of, filled = np.argsort(order)[pack_of], np.zeros_like(filled)
        order = order[: of.size]
    table = np.array([documents.lengths, documents.num_ranks, documents.document_ids])
    beside = pack_of
    if cuts.followers.size:
        # Documents that lead no MicroPack stand behind those that do.
        places = np.arange(shorts.size + chained)
        places[:chained] = np.append(np.delete(places[:chained], cuts.followers), cuts.followers)
        table, of = table.take(places, axis=1), np.argsort(places).astype(np.int32)[of]
        beside = np.append(cuts.leading, pack_of)
    first_slices = np.array([of[order], cuts.starts[order], cuts.stops[order]], np.int32)
    offsets, slices, chains = _kernel("arrange")(first_slices, beside, filled, heads, tails, in_step, table)
    return Composition(slice_offsets=offsets, slices=slices, chains=chains)


class _Cuts(NamedTuple):
    """The slices that are the first of a MicroPack, of which there are `m`."""

    of: Int32Array
    """int32 `[m]`: which of the rank's documents each is of; these stand in order."""
    starts: Int32Array
    """int32 `[m]`."""
    stops: Int32Array
    """int32 `[m]`."""
    seconds: FloatArray
    """float64 `[m]`: of the MicroPack: of the slice, and of followers."""
    num_documents: int
    """That are cut, shared, or both: the rank's first ones."""
    num_shared: int
    """Slices of shared documents, the first ones."""
    followers: IntArray
    """int64 `[followers]`: shared documents that stand in the MicroPack of another."""
    leading: IntArray
    """int64 `[followers]`: the MicroPack that each stands in."""


def _cut(documents: RankDocuments, own: float, budget: float, least_rows: int, rates: Rates) -> _Cuts:
    """Cut long documents into slices of equal cost, and join shared ones that are short.

    Args:
        documents: of the rank.
        own: seconds of a MicroPack of this rank's own documents.
        budget: seconds of a shared MicroPack.
        least_rows: rows that a slice has at least.
        rates: of the mesh.
    """
    shared = documents.num_shared
    is_long = (documents.work[shared:] > 1.15 * own) & (documents.lengths[shared:] >= 2 * least_rows)
    chained = shared + int(np.count_nonzero(is_long))
    budgets = np.full(chained, own)
    budgets[:shared] = budget
    of, starts, stops = _cost_kernel("cut_evenly")(
        documents.lengths[:chained],
        documents.num_ranks[:chained],
        documents.work[:chained],
        budgets,
        least_rows,
        ROW_MULTIPLE,
        1.0,
        rates,
    )
    num_slices = np.bincount(of, minlength=chained)
    seconds = documents.work[of] / num_slices[of]
    followers, leaders = _beside_others(documents, num_slices[:shared], budget)
    if followers.size:
        leads = ~np.isin(of, followers)
        of, starts, stops, seconds = of[leads], starts[leads], stops[leads], seconds[leads]
    leading = np.searchsorted(of, leaders)
    np.add.at(seconds, leading, documents.work[followers])
    return _Cuts(of, starts, stops, seconds, chained, int(np.searchsorted(of, shared)), followers, leading)


def _beside_others(
    documents: RankDocuments, num_slices: IntArray, budget: float
) -> tuple[IntArray, IntArray]:
    """Shared documents that stand in the MicroPack of another one, and that other one, int64 `[followers]` each.

    Those that aren't cut and that the same ranks share are dealt to as few MicroPacks as budgets hold; all of these
    ranks deal them alike.

    Args:
        documents: of the rank.
        num_slices: int64 `[shared documents]`.
        budget: seconds of a shared MicroPack.
    """
    followers, leaders = [_NOBODY], [_NOBODY]
    whole = np.flatnonzero(num_slices == 1)
    if whole.size < 2:
        return _NOBODY, _NOBODY
    ranks = documents.num_ranks[whole]
    for size in np.unique(ranks).tolist():
        mine = whole[ranks == size]
        work = documents.work[mine]
        count = max(1, math.ceil(float(work.sum()) / budget))
        if count < mine.size:
            chosen = _kernel("fill_lightest")(work, np.zeros(count))
            followers.append(mine[count:])
            leaders.append(mine[chosen[count:]])
    return np.concatenate(followers), np.concatenate(leaders)
