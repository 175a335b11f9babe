"""Packs as users run them, round robin and 1F1B, and the same at the best capacity, balance and order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import numpy as np

from varlen import jit
from varlen.pack.api import pack
from varlen.plan import kernels_groups
from varlen.plan.partition import partition
from varlen.plan.search import Candidate, Schedule
from varlen.step_plan import Mesh, MicroPacks
from varlen.types import FloatArray, Int32Array, IntArray

# The orders in which a rank may run its packs: a setting that every method is given the best of.

Order = Literal["given", "long_first", "long_last", "long_middle", "long_ends", "random"]

ORDERS: Final[tuple[Order, ...]] = ("given", "long_first", "long_last", "long_middle", "long_ends", "random")


def ordered(work: FloatArray, group_of: Int32Array, order: Order) -> IntArray:
    """Return all packs so that those of each group stand in an order.

    - "given": by number.
    - "long_first", "long_last": by falling and rising work; equal work by number.
    - "long_middle": rising up to the heaviest, then falling; "long_ends": the other way round.
    - "random": the same permutation every time.

    Args:
        work: float64 `[num_packs]`, in any unit.
        group_of: int32 `[num_packs]`: the rank of each pack, or zeros where all ranks run them in one order.

    Returns:
        int64 `[num_packs]`: groups one after the other.

    >>> ordered(np.array([1.0, 5.0, 3.0, 2.0]), np.zeros(4, np.int32), "long_middle").tolist()
    [0, 2, 1, 3]
    """
    if order == "given":
        return np.argsort(group_of, kind="stable")
    if order == "random":
        return np.lexsort((np.random.default_rng(0).permutation(work.size), group_of))
    falling = np.lexsort((np.arange(work.size), -work, group_of))
    counts = np.bincount(group_of, minlength=1)[group_of[falling]]
    begins = np.searchsorted(group_of[falling], group_of[falling])
    turn = np.arange(work.size) - begins
    if order == "long_last":
        turn = counts - 1 - turn
    elif order == "long_middle":
        turn = _inwards(counts - 1 - turn, counts)
    elif order == "long_ends":
        turn = _inwards(turn, counts)
    return falling[np.lexsort((turn, group_of[falling]))]


def _inwards(turn: IntArray, counts: IntArray) -> IntArray:
    """Return places taken in turn from both ends: 0, last, 1, last but one, and so on."""
    return np.where(turn % 2 == 0, turn // 2, counts - 1 - turn // 2)


LEAST_CAPACITY = 1024
"""Tokens below which a smaller capacity is not tried: kernels lose more there than balance can gain."""


def packed(lengths: Int32Array, mesh: Mesh, capacity: int) -> Candidate:
    """Return best-fit-decreasing packs dealt round robin to data-parallel ranks, run by 1F1B.

    Args:
        lengths: int32 `[num_documents]`.
    """
    pack_of, num_packs = packs_of(lengths, capacity)
    numbers = np.arange(num_packs)
    return placed(
        lengths,
        pack_of,
        (numbers % mesh.dp).astype(np.int32),
        np.ones(num_packs, np.int32),
        numbers,
        mesh=mesh,
        label=f"capacity {capacity:,}, round robin",
    )


def packed_candidates(
    lengths: Int32Array,
    work: FloatArray,
    mesh: Mesh,
    capacity: int,
    *,
    orders: tuple[Order, ...] = ORDERS,
) -> Iterator[Candidate]:
    """Yield what a careful user of packing would try: smaller capacities, ranks of even work, orders.

    Args:
        lengths: int32 `[num_documents]`.
        work: float64 `[num_documents]`: seconds of both passes.
    """
    for tried in capacities(capacity):
        pack_of, num_packs = packs_of(lengths, tried)
        pack_work = work_of_packs(work, pack_of, num_packs)
        seen: set[bytes] = set()
        for name, ranks in rank_choices(pack_work, mesh.dp):
            if ranks.tobytes() in seen:
                continue
            seen.add(ranks.tobytes())
            for order in orders:
                yield placed(
                    lengths,
                    pack_of,
                    ranks,
                    np.ones(num_packs, np.int32),
                    ordered(pack_work, ranks, order),
                    mesh=mesh,
                    label=f"capacity {tried:,}, {name}, {order.replace('_', ' ')}",
                )


def packs_of(lengths: Int32Array, capacity: int) -> tuple[Int32Array, int]:
    """Return the best-fit-decreasing pack of each document, int32 `[num_documents]`, and how many packs there are.

    Args:
        lengths: int32 `[num_documents]`; those of 0 get pack -1.
    """
    pack_of = np.full(lengths.size, -1, np.int32)
    is_long = lengths > capacity
    packing = pack(np.where(is_long, 0, lengths), capacity)
    pack_of[packing.document_ids] = np.repeat(np.arange(packing.num_packs), np.diff(packing.offsets))
    num_long = int(np.count_nonzero(is_long))
    pack_of[is_long] = packing.num_packs + np.arange(num_long)
    return pack_of, packing.num_packs + num_long


def capacities(capacity: int) -> list[int]:
    """Return a capacity, its half, … its 32nd part, but none below `LEAST_CAPACITY` save the first."""
    smaller = (capacity >> halvings for halvings in (1, 2, 3, 4, 5))
    return [capacity, *(tried for tried in smaller if tried >= LEAST_CAPACITY)]


def rank_choices(work: FloatArray, dp: int) -> Iterator[tuple[str, Int32Array]]:
    """Yield the ways to hand packs to ranks with their names: int32 `[num_packs]` each.

    Args:
        work: float64 `[num_packs]`.
    """
    yield "round robin", (np.arange(work.size) % dp).astype(np.int32)
    if work.size > dp:
        yield "even work in equal numbers", equal_counts(work, dp)
        yield "even work", partition(work, dp)


def equal_counts(work: FloatArray, dp: int) -> Int32Array:
    """Return ranks of even work and equal numbers of packs, int32 `[num_packs]`.

    Where the packs can't be divided, some ranks get less: packs of no work are added, and left out again.

    Args:
        work: float64 `[num_packs]`.
    """
    missing = -work.size % dp
    return partition(np.concatenate([work, np.zeros(missing)]), dp, is_equal=True)[: work.size]


# Whole documents balanced by work over ranks and micro-batches: WLB-LLM's greedy, and Karmarkar-Karp.

BALANCED_ORDERS: tuple[Order, ...] = ("long_first", "long_last", "long_middle", "long_ends")
COUNTS = (
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    8.0,
    12.0,
    *(2.0**step * part for step in range(4, 31) for part in (1, 1.5)),
)
"""Micro-batches a rank that may be tried, times the pipeline's stages: as long as more of them help."""
LEAST_TOKENS = 1024
"""Tokens of a micro-batch, on average, below which more of them are not tried."""
_MOST_STEPS, _LEAST_ROUNDS = 2**29, 4
"""Documents times micro-batches of all ranks that are looked at, about a second; but this many micro-batches for each
of the pipeline's stages are always tried. Steps of less than some 20,000 documents are never held back by it."""
SLACK = 2.0
"""Times its even share of tokens that a micro-batch may hold, as WLB-LLM has it."""


def balanced_candidates(
    lengths: Int32Array,
    work: FloatArray,
    mesh: Mesh,
    *,
    counts: tuple[int, ...] | None = None,
    orders: tuple[Order, ...] = BALANCED_ORDERS,
) -> Iterator[Candidate]:
    """Yield both ways to balance whole documents, at each number of micro-batches, in every order.

    - WLB-LLM (Wang et al. 2025, "WLB-LLM: Workload-Balanced 4D Parallelism for Large Language Model Training",
      arXiv 2503.17924): all micro-batches of the step are filled at once, documents from long to short.
    - Karmarkar-Karp: documents to ranks of even work, as verl does; then on each rank, from much work to little, to
      the micro-batch with the least.

    Args:
        lengths: int32 `[num_documents]`.
        work: float64 `[num_documents]`: seconds of both passes.
    """
    for count in micro_batch_counts(lengths, mesh) if counts is None else counts:
        for name, pack_of, ranks in (
            *by_workload(lengths, work, count, mesh.dp),
            ("Karmarkar-Karp", *by_differencing(work, count, mesh.dp)),
        ):
            pack_work = work_of_packs(work, pack_of, ranks.size)
            for order in orders:
                yield placed(
                    lengths,
                    pack_of,
                    ranks,
                    np.ones(ranks.size, np.int32),
                    ordered(pack_work, ranks, order),
                    mesh=mesh,
                    label=f"{name}, {count} micro-batches a rank, {order.replace('_', ' ')}",
                )


def micro_batch_counts(lengths: Int32Array, mesh: Mesh, steps: int = _MOST_STEPS) -> tuple[int, ...]:
    """Return the numbers of micro-batches a rank that may be tried, at least one, rising.

    The last is one document a micro-batch, or micro-batches of `LEAST_TOKENS`; of very many documents, as many as can
    be filled in about a second.

    Args:
        lengths: int32 `[num_documents]`.
    """
    most = int(lengths.sum(dtype=np.int64)) // (mesh.dp * LEAST_TOKENS)
    held = int(np.count_nonzero(lengths))
    in_time = max(steps // max(held * mesh.dp, 1), _LEAST_ROUNDS * mesh.num_chunks)
    most = min(most, held, in_time)
    tried = {round(times * mesh.num_chunks) for times in COUNTS}
    return (*sorted(count for count in tried if count < most), max(most, 1))


def by_workload(
    lengths: Int32Array, work: FloatArray, count: int, dp: int
) -> Iterator[tuple[str, Int32Array, Int32Array]]:
    """Yield micro-batches filled by WLB-LLM's greedy with the ways to hand them to ranks.

    A document goes to the micro-batch with the least work if its tokens fit there, else to the one with the fewest
    tokens if they fit there. What fits nowhere waits, and goes to the least work in the end: our step is one step.

    Args:
        lengths: int32 `[num_documents]`.
        work: float64 `[num_documents]`.

    Yields:
        A name; int32 `[num_documents]`, the micro-batch of each document, -1 where it is empty; and int32
        `[num_packs]`, the rank of each micro-batch.
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable")[: np.count_nonzero(lengths)].astype(np.int32)
    limit = max(SLACK * lengths.sum(dtype=np.int64) / (count * dp), float(lengths.max(initial=0)))
    pack_of = np.full(lengths.size, -1, np.int32)
    with jit.sized(1e-7 * lengths.size * count * dp):
        kernels_groups.least_work(order, lengths, work, count * dp, int(limit), pack_of)
    used, numbers = np.unique(pack_of[order], return_inverse=True)
    pack_of[order] = numbers
    pack_work = work_of_packs(work, pack_of, used.size)
    for name, ranks in rank_choices(pack_work, dp):
        yield f"WLB-LLM, {name}", pack_of, ranks


def by_differencing(work: FloatArray, count: int, dp: int) -> tuple[Int32Array, Int32Array]:
    """Return the micro-batch of each document, int32 `[num_documents]`, and the rank of each, int32 `[num_packs]`.

    Args:
        work: float64 `[num_documents]`; 0 for empty documents and no others.
    """
    held = np.flatnonzero(work)
    rank_of = partition(work[held], dp) if held.size > dp else np.arange(held.size, dtype=np.int32)
    pack_of = np.full(work.size, -1, np.int32)
    ranks: list[int] = []
    for rank in range(dp):
        mine = held[rank_of == rank]
        mine = mine[np.argsort(-work[mine], kind="stable")]
        parts = min(count, mine.size)
        if parts:
            pack_of[mine] = len(ranks) + partition(work[mine], parts, method="greedy")
        ranks += [rank] * parts
    return pack_of, np.array(ranks, np.int32)


# Packs of whole documents as a Candidate: each runs on one rank, or on neighbours that share its rows.


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
