"""Packs of whole documents as a Candidate: each runs on one rank, or on neighbours that share its rows."""

from __future__ import annotations

import numpy as np

from varlen.plan.candidate import Candidate, Schedule
from varlen.step_plan import Mesh, MicroPacks
from varlen.types import FloatArray, Int32Array, IntArray


def placed(
    lengths: Int32Array,
    pack_of: Int32Array,
    first_ranks: Int32Array,
    num_ranks: Int32Array,
    order: IntArray,
    *,
    mesh: Mesh,
    label: str,
    schedule: Schedule = "one_f_one_b",
) -> Candidate:
    """Return packs of whole documents as MicroPacks, the same in both passes.

    Args:
        lengths: int32 `[num_documents]`.
        pack_of: int32 `[num_documents]`: -1 for documents of length 0 and no others.
        first_ranks: int32 `[num_packs]`: the first data-parallel rank that runs the pack.
        num_ranks: int32 `[num_packs]`: how many neighbours share its rows, a power of two.
        order: int64 `[num_packs]`: all packs as they are run; each rank runs its own in this order, so that packs
            which ranks share stand in one order on all of them.
        mesh: where parameters are sharded, ranks with fewer packs are given empty MicroPacks at their end.
        label: for people.
        schedule: the order of tasks.
    """
    num_packs = first_ranks.size
    copies = np.repeat(order, num_ranks[order])
    ranks = first_ranks[copies] + _count_up(num_ranks[order].astype(np.int64))
    counts = np.bincount(ranks, minlength=mesh.dp)
    if mesh.sharding == "parameters":
        missing = counts.max() - counts
        copies = np.concatenate([copies, np.full(missing.sum(), num_packs)])
        ranks = np.concatenate([ranks, np.repeat(np.arange(mesh.dp), missing)])
        counts += missing
    copies = copies[np.argsort(ranks, kind="stable")]

    by_pack = np.argsort(pack_of, kind="stable")[np.count_nonzero(pack_of < 0) :]
    sizes = np.bincount(pack_of[by_pack], minlength=num_packs + 1)
    begins = np.cumsum(sizes) - sizes
    ids = by_pack[np.repeat(begins[copies], sizes[copies]) + _count_up(sizes[copies])].astype(np.int32)
    packs = MicroPacks(
        rank_offsets=_offsets(counts),
        slice_offsets=_offsets(sizes[copies]),
        document_ids=ids,
        starts=np.zeros(ids.size, np.int32),
        stops=lengths[ids].astype(np.int32),
    )
    held = np.flatnonzero(pack_of >= 0)
    first_of_documents, num_of_documents = (
        np.full(pack_of.size, -1, np.int32),
        np.ones(pack_of.size, np.int32),
    )
    first_of_documents[held] = first_ranks[pack_of[held]]
    num_of_documents[held] = num_ranks[pack_of[held]]
    return Candidate(
        forward=packs,
        backward=packs,
        first_ranks=first_of_documents,
        num_ranks=num_of_documents,
        schedule=schedule,
        label=label,
    )


def work_of_packs(work: FloatArray, pack_of: Int32Array, num_packs: int) -> FloatArray:
    """Return the work of each pack, float64 `[num_packs]`.

    Args:
        work: float64 `[num_documents]`.
        pack_of: int32 `[num_documents]`: -1 where a document is in no pack.
        num_packs: how many packs there are.
    """
    is_held = pack_of >= 0
    total = np.bincount(pack_of[is_held], weights=work[is_held], minlength=num_packs)
    return total.astype(np.float64)


def _count_up(counts: IntArray) -> IntArray:
    """Return 0, 1, … up to each count, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _offsets(counts: IntArray) -> Int32Array:
    """Return int32 `[n + 1]` offsets of `[n]` counts."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
