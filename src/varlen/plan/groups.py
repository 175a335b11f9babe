"""Phase 1: documents to data-parallel ranks, the longest ones shared by neighbours (DP-Merge)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from varlen.cost.rates import Rates
from varlen.plan.assign import assign
from varlen.plan.compose import TYPICAL_ROWS, RankDocuments, seconds_of
from varlen.plan.exact import improve_exactly
from varlen.types import FloatArray, Int32Array

_STEPS = 2**18
"""Steps of the search for an assignment: a millisecond or two, of which a way to share documents needs one."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Groups:
    """Which ranks hold each document of a step."""

    first_ranks: Int32Array
    """int32 `[num_documents]`: -1 for documents of length 0."""
    num_ranks: Int32Array
    """int32 `[num_documents]`."""
    work: FloatArray
    """float64 `[num_documents]`: seconds of one GPU of each of its ranks, in both passes and an average layer."""

    @property
    def num_merged(self) -> int:
        """Documents that several ranks share."""
        return int(np.count_nonzero(self.num_ranks > 1))

    def loads(self, dp: int) -> FloatArray:
        """Return the work of each rank, float64 `[dp]`.

        Args:
            dp: ranks.
        """
        held = self.first_ranks >= 0
        first, work = self.first_ranks[held], self.work[held]
        # Added up in the order of documents, what begins before what ends.
        places, changes = np.concatenate([first, first + self.num_ranks[held]]), np.concatenate([work, -work])
        edges = np.bincount(places, changes, dp + 1)
        return np.cumsum(edges)[:dp].astype(np.float64)


def merged_sizes(
    lengths: Int32Array,
    dp: int,
    rates: Rates,
    *,
    threshold: float,
    most_ranks: int,
    most_rows: float,
    alone: FloatArray | None = None,
) -> Int32Array:
    """Return how many ranks share each document, int32 `[num_documents]`: the least power of two that is enough.

    Args:
        lengths: int32 `[num_documents]`.
        dp: ranks.
        rates: of the mesh.
        threshold: a rank's part of a document may cost at most this much of the mean work of a rank.
        most_ranks: that share a document because of its cost.
        most_rows: rows that a rank can hold from forward to backward; more are shared whatever they cost.
        alone: float64 `[num_documents]`: what each costs that isn't shared, where that is known.
    """
    sizes = np.ones(lengths.size, np.int32)
    work = seconds_of(lengths, sizes, TYPICAL_ROWS, rates) if alone is None else alone
    most_work = threshold * (work.sum() / dp)
    left = np.arange(lengths.size)
    while True:
        # What isn't doubled now never is: most documents are looked at once.
        is_long = lengths[left] / sizes[left] > most_rows
        is_large = work > most_work
        some = is_long | is_large
        left, work, is_long, is_large = left[some], work[some], is_long[some], is_large[some]
        wider = 2 * sizes[left]
        # Sharing pays as long as it makes a rank's part cheaper; between nodes a short document may cost more.
        shared_work = seconds_of(lengths[left], wider, TYPICAL_ROWS, rates)
        grows = is_large & (shared_work < 0.8 * work) & (wider <= most_ranks)
        grows = (grows | is_long) & (wider <= dp)
        if not grows.any():
            return sizes
        left, work = left[grows], shared_work[grows]
        sizes[left] *= 2


def grouped(
    lengths: Int32Array, num_ranks: Int32Array, dp: int, rates: Rates, *, is_exact: bool = False
) -> Groups:
    """Assign documents to ranks so that the heaviest rank is light.

    Shared documents go first, large groups before small ones, each to the aligned block of ranks with the least
    work; all others then by `assign`, with what the ranks hold already.

    Args:
        lengths: int32 `[num_documents]`.
        num_ranks: int32 `[num_documents]`: powers of two.
        dp: ranks.
        rates: of the mesh.
        is_exact: improve the assignment by mixed-integer programming.

    Raises:
        MissingExtraError: `is_exact` without a solver.
    """
    work = seconds_of(lengths, num_ranks, TYPICAL_ROWS, rates)
    first_ranks = np.full(lengths.size, -1, np.int32)
    loads = np.zeros(dp)
    shared = np.flatnonzero((num_ranks > 1) & (lengths > 0))
    for document in shared[np.lexsort((-work[shared], -num_ranks[shared]))].tolist():
        size = int(num_ranks[document])
        blocks = loads[: dp // size * size].reshape(-1, size)
        block = int(blocks.max(axis=1).argmin())
        first_ranks[document] = block * size
        loads[block * size : (block + 1) * size] += work[document]
    alone = np.flatnonzero((num_ranks == 1) & (lengths > 0))
    ranks = assign(work[alone], dp, loads=loads, steps=_STEPS)
    first_ranks[alone] = improve_exactly(work[alone], ranks, dp, loads=loads).group_of if is_exact else ranks
    return Groups(first_ranks=first_ranks, num_ranks=num_ranks, work=work)


def documents_of_ranks(groups: Groups, lengths: Int32Array, dp: int) -> list[RankDocuments]:
    """Return what each rank holds, in the order in which it is composed.

    Args:
        groups: of the step.
        lengths: int32 `[num_documents]`.
        dp: ranks.

    Cost: O(num_documents · log of them), however many ranks there are.
    """
    work, size = groups.work, groups.num_ranks
    ids = np.lexsort((-work, -size))
    ids = ids[groups.first_ranks[ids] >= 0]
    # A shared document stands in the list of each of its ranks.
    sizes = size[ids]
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    ids = np.repeat(ids, sizes)
    ranks = groups.first_ranks[ids] + within
    # So few ranks make this a radix sort.
    ids = ids[np.argsort(ranks.astype(np.min_scalar_type(dp)), kind="stable")]
    document_ids = ids.astype(np.int32)
    bounds = np.concatenate([[0], np.cumsum(np.bincount(ranks, minlength=dp))]).tolist()
    held, shared, seconds = lengths[ids], size[ids], work[ids]
    return [
        RankDocuments(
            document_ids=document_ids[begin:end],
            lengths=held[begin:end],
            num_ranks=shared[begin:end],
            work=seconds[begin:end],
        )
        for begin, end in zip(bounds, bounds[1:])
    ]
