"""One data-parallel rank's documents become MicroPacks of equal or graded cost, the same in both passes."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankDocuments:
    """The documents of one rank.

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

    @property
    def num_shared(self) -> int:
        """Documents that other ranks share."""
        return int(np.count_nonzero(self.num_ranks > 1))

    @property
    def num_rows(self) -> float:
        """Rows of this rank."""
        return float((self.lengths / self.num_ranks).sum())


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
    shared = documents.num_shared
    own = float(documents.work.sum()) / num_micropacks
    is_long = (documents.work[shared:] > 1.15 * own) & (documents.lengths[shared:] >= 2 * least_rows)
    chained = shared + int(np.count_nonzero(is_long))
    budgets = np.where(np.arange(chained) < shared, budget, own)
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
    followers, leaders = _beside_others(documents, np.bincount(of, minlength=chained)[:shared], budget)
    is_first = ~np.isin(of, followers)
    of, starts, stops = of[is_first], starts[is_first], stops[is_first]
    first_own = int(np.searchsorted(of, shared))
    sizes = documents.work[of] / np.bincount(of, minlength=chained)[of]
    led = np.searchsorted(of, leaders)
    np.add.at(sizes, led, documents.work[followers])
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
    held_back = np.concatenate([sizes[first:], own * (1 - small), np.zeros(free - heads - tails)])
    loads = held_back.copy()
    pack_of = first + _kernel("fill_lightest")(shorts, loads)
    filled = np.concatenate([np.zeros(first), loads - held_back])
    if not by_work:
        order = np.argsort(documents.document_ids[of[first_own:]], kind="stable") + first_own
        order = np.concatenate([np.arange(first_own), order, np.arange(of.size, filled.size)])
        of, starts, stops = (part[order[: of.size]] for part in (of, starts, stops))
        pack_of, filled = np.argsort(order)[pack_of], np.zeros_like(filled)
    # Documents that lead no MicroPack stand behind those that do.
    order = np.concatenate(
        [np.delete(np.arange(chained), followers), followers, np.arange(chained, documents.work.size)]
    )
    places = np.empty(order.size, np.int32)
    places[order] = np.arange(order.size)
    table = np.stack([documents.lengths, documents.num_ranks, documents.document_ids])[:, order]
    offsets, slices, chains = _kernel("arrange")(
        np.stack([places[of], starts, stops]), np.append(led, pack_of), filled, heads, tails, in_step, table
    )
    return Composition(slice_offsets=offsets, slices=slices, chains=chains)


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
    followers, leaders = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    whole = np.flatnonzero(num_slices == 1)
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
