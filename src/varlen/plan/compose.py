"""`compose`: cuts and packs the documents of data-parallel ranks into MicroPacks of equal or graded cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from varlen.cost import kernels
from varlen.cost.rates import Rates
from varlen.plan import kernels_compose
from varlen.types import FloatArray, Int32Array, IntArray

TYPICAL_ROWS = 8192.0
"""Rows of a MicroPack, to estimate the work of documents before they are cut."""
ROW_MULTIPLE = 128
"""Slices end on a multiple of this many rows, a block of attention kernels."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankDocuments:
    """The documents of one rank, with totals that a search needs often.

    Shared documents come first, in the same order on all of their ranks; then the others, by falling work.
    """

    document_ids: Int32Array
    """int32 `[n]`: indices in the lengths of the step; none of length 0."""
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
    """Work of all documents."""
    table: Int32Array = field(init=False)
    """int32 `[3, n]`: lengths, numbers of ranks, ids."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_shared", int(np.count_nonzero(self.num_ranks > 1)))
        object.__setattr__(self, "num_rows", float((self.lengths / self.num_ranks).sum()))
        object.__setattr__(self, "seconds", float(self.work.sum()))
        object.__setattr__(self, "table", np.array([self.lengths, self.num_ranks, self.document_ids]))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockDocuments:
    """The documents of a block of ranks, rank by rank, as kernels take them."""

    table: Int32Array
    """int32 `[3, n]`: lengths, numbers of ranks, ids."""
    work: FloatArray
    """float64 `[n]`."""
    bounds: IntArray
    """int64 `[ranks + 1]`: where the documents of each rank begin."""
    shared: IntArray
    """int64 `[ranks]`: number of documents that other ranks share."""
    rows: FloatArray
    """float64 `[ranks]`."""
    seconds: FloatArray
    """float64 `[ranks]`."""
    cuts: dict[tuple[float, ...], tuple[IntArray, Int32Array]] = field(init=False, default_factory=dict)
    """Cache of `compose`, by count and budget: int64 `[ranks]`, the number of cut or shared documents; and int32
    `[3, slices]`: documents (numbered over all ranks), starts, stops."""

    @classmethod
    def of(cls, ranks: Sequence[RankDocuments]) -> BlockDocuments:
        """Concatenate the documents of ranks."""
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
    """The MicroPacks of one rank, in forward order; the backward pass runs them in `backward_order`."""

    slice_offsets: Int32Array
    """int32 `[num_micropacks + 1]`."""
    slices: Int32Array
    """int32 `[5, num_slices]`: starts, stops, numbers of ranks, document ids, whether the document ends here."""
    chains: Int32Array
    """int32 `[num_micropacks]`: the chain of each: consecutive MicroPacks with the slices of one document."""

    @property
    def num_micropacks(self) -> int:
        """Number of MicroPacks."""
        return len(self.chains)

    def extended(self, count: int) -> Composition:
        """Return the composition padded with empty MicroPacks to `count`."""
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
        """int64 `[num_micropacks]`: chains in forward order, the MicroPacks within each reversed."""
        order: IntArray = kernels_compose.reversed_chains(self.chains)
        return order


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockComposition:
    """The MicroPacks of a block's ranks, equally many on each, rank by rank."""

    slice_offsets: Int32Array
    """int32 `[ranks * num_micropacks + 1]`."""
    slices: Int32Array
    """int32 `[5, num_slices]`: as in `Composition`."""
    chains: Int32Array
    """int32 `[ranks, num_micropacks]`."""
    order: IntArray
    """int64 `[ranks, num_micropacks]`: the order of the backward pass, numbered over all ranks."""
    waits: Int32Array
    """int32 `[ranks, num_micropacks]`: the last forward MicroPack of each one's chain, in that order."""

    def apart(self) -> list[Composition]:
        """Return the composition of each rank."""
        packs = self.chains.shape[1]
        compositions = []
        for rank, chains in enumerate(self.chains):
            offsets = self.slice_offsets[rank * packs : (rank + 1) * packs + 1]
            slices = np.ascontiguousarray(self.slices[:, offsets[0] : offsets[-1]])
            compositions.append(Composition(slice_offsets=offsets - offsets[0], slices=slices, chains=chains))
        return compositions


@dataclass(frozen=True, kw_only=True, slots=True)
class Grading:
    """Smaller MicroPacks at the ends of a rank's order, so that pipelines fill and drain faster."""

    first: int = 0
    """Number of smaller MicroPacks at the beginning, rising in size."""
    last: int = 0
    """Number of smaller MicroPacks at the end, falling in size."""
    smallest: float = 1.0
    """Size of the smallest as a share of a full MicroPack."""


def seconds_of(
    lengths: Int32Array, num_ranks: Int32Array, rows: float, rates: Rates, *, forward_part: float = 1.0
) -> FloatArray:
    """Return the seconds of each document in both passes, per average layer and GPU, in MicroPacks of `rows` rows."""
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
    """Compose the MicroPacks of a block's ranks (SlimPack's Slim, Mix and Pack; Liu et al. 2025, arXiv 2509.26246).

    - Slim: a document whose work is over 1.15 times the mean MicroPack's is cut into slices of equal cost, each in a
      MicroPack of its own; shared documents that aren't cut are packed into as few MicroPacks as budgets allow.
    - Mix and Pack: the others go, by falling work, to the MicroPack with the least work (Graham 1969, "Bounds on
      Multiprocessing Timing Anomalies"), beside slices or in MicroPacks of their own.

    Order: small MicroPacks rising; shared chains; the other chains, long ones first; full MicroPacks; small ones
    falling. Ranks with fewer MicroPacks than others get empty ones at the end.
    """
    own = documents.seconds / num_micropacks
    arrays = (documents.table, documents.work, documents.bounds, documents.shared)
    key = (num_micropacks, budget if documents.shared.any() else 0.0, least_rows)
    cut = documents.cuts.get(key)
    if cut is None:
        chained, lengths, ranks, seconds, budgets = kernels_compose.to_cut(*arrays, own, budget, least_rows)
        cuts = kernels.cut_evenly(lengths, ranks, seconds, budgets, least_rows, ROW_MULTIPLE, 1.0, rates)
        cut = documents.cuts[key] = chained, np.array(cuts)
    offsets, slices, chains, order, waits = kernels_compose.composed_ranks(
        cut[1],
        cut[0],
        *arrays,
        num_micropacks,
        own,
        budget,
        np.array([grading.first, grading.last]),
        grading.smallest,
        # Small MicroPacks hold at least `least_rows`.
        np.minimum(1.0, least_rows / np.maximum(1.0, documents.rows / num_micropacks)),
        in_step,
        by_work,
        mixes,
    )
    return BlockComposition(slice_offsets=offsets, slices=slices, chains=chains, order=order, waits=waits)
