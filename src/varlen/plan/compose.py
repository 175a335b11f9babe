"""Data-parallel ranks' documents become MicroPacks of equal or graded cost, the same in both passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from varlen.cost import kernels
from varlen.cost.rates import Rates
from varlen.plan import kernels_compose
from varlen.types import FloatArray, Int32Array, IntArray

TYPICAL_ROWS = 8192.0
"""Rows of the MicroPacks that documents are weighed in before there are any."""
ROW_MULTIPLE = 128
"""Slices end on a multiple of this many rows: a block of attention kernels."""


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
    table: Int32Array = field(init=False)
    """int32 `[3, n]`: lengths, ranks that share them, ids."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_shared", int(np.count_nonzero(self.num_ranks > 1)))
        object.__setattr__(self, "num_rows", float((self.lengths / self.num_ranks).sum()))
        object.__setattr__(self, "seconds", float(self.work.sum()))
        object.__setattr__(self, "table", np.array([self.lengths, self.num_ranks, self.document_ids]))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockDocuments:
    """The documents of a block of ranks, one rank behind the other, as kernels take them."""

    table: Int32Array
    """int32 `[3, n]`: lengths, ranks that share them, ids."""
    work: FloatArray
    """float64 `[n]`."""
    bounds: IntArray
    """int64 `[ranks + 1]`: where those of each rank begin."""
    shared: IntArray
    """int64 `[ranks]`: how many other ranks share."""
    rows: FloatArray
    """float64 `[ranks]`."""
    seconds: FloatArray
    """float64 `[ranks]`."""
    cuts: dict[tuple[float, ...], tuple[IntArray, Int32Array]] = field(init=False, default_factory=dict)
    """By count and budget: as `compose` has cut long and shared documents. int64 `[ranks]`, how many are cut, shared,
    or both; int32 `[3, slices]`: documents, counted over those of all ranks, starts, stops."""

    @classmethod
    def of(cls, ranks: Sequence[RankDocuments]) -> BlockDocuments:
        """Put the documents of ranks one behind the other."""
        return cls(
            table=np.concatenate([each.table for each in ranks], axis=1),
            work=np.concatenate([each.work for each in ranks]),
            bounds=np.cumsum([0, *(each.work.size for each in ranks)]),
            shared=np.array([each.num_shared for each in ranks]),
            rows=np.array([each.num_rows for each in ranks]),
            seconds=np.array([each.seconds for each in ranks]),
        )


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
        """Return the same with empty MicroPacks at the end."""
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
        order: IntArray = kernels_compose.reversed_chains(self.chains)
        return order


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockComposition:
    """The MicroPacks of a block's ranks, equally many on each, one rank behind the other."""

    slice_offsets: Int32Array
    """int32 `[ranks * num_micropacks + 1]`."""
    slices: Int32Array
    """int32 `[5, num_slices]`: as `Composition` has them."""
    chains: Int32Array
    """int32 `[ranks, num_micropacks]`."""
    order: IntArray
    """int64 `[ranks, num_micropacks]`: in which the backward pass runs them, counted over all ranks."""
    waits: Int32Array
    """int32 `[ranks, num_micropacks]`: the last forward MicroPack of the chain of each, in that order."""

    def apart(self) -> list[Composition]:
        """Return the MicroPacks of each rank."""
        packs = self.chains.shape[1]
        found = []
        for rank, chains in enumerate(self.chains):
            offsets = self.slice_offsets[rank * packs : (rank + 1) * packs + 1]
            slices = np.ascontiguousarray(self.slices[:, offsets[0] : offsets[-1]])
            found.append(Composition(slice_offsets=offsets - offsets[0], slices=slices, chains=chains))
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Grading:
    """How MicroPacks at the ends of a rank's order are made smaller, so that pipelines fill and drain faster."""

    heads: int = 0
    """Sizes between the smallest and a whole MicroPack at the beginning, one MicroPack of each; 0 for equal sizes."""
    tails: int = 0
    """The same at the end."""
    smallest: float = 1.0
    """The smallest over a whole MicroPack."""


def seconds_of(
    lengths: Int32Array, num_ranks: Int32Array, rows: float, rates: Rates, *, forward_part: float = 1.0
) -> FloatArray:
    """Return what each document costs in both passes, per average layer and GPU; float64 `[num_documents]`.

    Args:
        lengths: int32 `[num_documents]`.
        num_ranks: int32 `[num_documents]`: ranks that share its rows.
    """
    seconds: FloatArray = kernels.document_seconds(lengths, num_ranks, rows, forward_part, rates)
    return seconds


def compose(
    documents: BlockDocuments,
    num_micropacks: int,
    grading: Grading,
    *,
    least_rows: int,
    budget: float,
    rates: Rates,
    in_step: bool = False,
    by_work: bool = True,
    mixes: bool = True,
) -> BlockComposition:
    """Make the MicroPacks of a block's ranks (SlimPack's Slim, Mix and Pack; Liu et al. 2025, arXiv 2509.26246).

    A document over 1.15 budgets is cut into slices of equal cost, each the start of a MicroPack of its own (Slim);
    shared ones that aren't cut stand together in as few MicroPacks as budgets hold;
    those that are left go, from much work to little, each to the MicroPack with the least (Graham 1969, "Bounds on
    Multiprocessing Timing Anomalies"): to slices with room (Mix) and to free MicroPacks (Pack). Order: small
    MicroPacks rising; shared chains; the other chains, long ones first; full MicroPacks; small ones falling. Ranks
    with fewer MicroPacks than others get empty ones at the end.

    Cost: O(n · log num_micropacks).
    """
    own = documents.seconds / num_micropacks
    given = (documents.table, documents.work, documents.bounds, documents.shared)
    asked = (num_micropacks, budget if documents.shared.any() else 0.0, least_rows)
    cut = documents.cuts.get(asked)
    if cut is None:
        chained, lengths, ranks, seconds, budgets = kernels_compose.to_cut(*given, own, budget, least_rows)
        cuts = kernels.cut_evenly(lengths, ranks, seconds, budgets, least_rows, ROW_MULTIPLE, 1.0, rates)
        cut = documents.cuts[asked] = chained, np.array(cuts)
    offsets, slices, chains, order, waits = kernels_compose.composed_ranks(
        cut[1],
        cut[0],
        *given,
        num_micropacks,
        own,
        budget,
        np.array([grading.heads, grading.tails]),
        grading.smallest,
        # None of the small ones holds too few rows.
        np.minimum(1.0, least_rows / np.maximum(1.0, documents.rows / num_micropacks)),
        in_step,
        by_work,
        mixes,
    )
    return BlockComposition(slice_offsets=offsets, slices=slices, chains=chains, order=order, waits=waits)
