"""Packs dealt round robin, packs at the best capacity, balance and order, and documents balanced by work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

import numpy as np

from varlen import jit
from varlen.pack.api import pack
from varlen.plan import kernels_groups
from varlen.plan.partition import partition
from varlen.plan.search import Candidate
from varlen.step_plan import Mesh, MicroPacks
from varlen.types import FloatArray, Int32Array, IntArray

Order = Literal["given", "long_first", "long_last", "long_middle", "long_ends", "random"]
"""The order in which a rank runs its packs."""

PacksOf = Callable[[int], tuple[Int32Array, int]]
"""A function from a capacity to the pack of each document, and the number of packs."""

ORDERS: Final[tuple[Order, ...]] = ("given", "long_first", "long_last", "long_middle", "long_ends", "random")


def ordered(work: FloatArray, group_of: Int32Array, order: Order) -> IntArray:
    """Return the packs, group by group, each group in an order.

    - "given": by number.
    - "long_first", "long_last": by falling and rising work; equal work by number.
    - "long_middle": rising up to the heaviest, then falling; "long_ends": the other way round.
    - "random": the same permutation every time.

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
    """Return positions taken in turn from both ends: 0, last, 1, last but one, and so on."""
    return np.where(turn % 2 == 0, turn // 2, counts - 1 - turn // 2)


LEAST_CAPACITY = 1024
"""The least smaller capacity that is tried: below, kernels lose more than balance can gain."""


def packed(lengths: Int32Array, mesh: Mesh, capacity: int) -> Candidate:
    """Return best-fit-decreasing packs dealt round robin to data-parallel ranks."""
    pack_of, num_packs = packs_of(lengths, capacity)
    numbers = np.arange(num_packs)
    return build(
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
    sizes: Sequence[int],
    *,
    orders: tuple[Order, ...] = ORDERS,
    packs: PacksOf | None = None,
) -> Iterator[Iterator[Candidate]]:
    """Yield tuned packings: several capacities and ranks of even work, each in several orders.

    `packs` returns the packs of `lengths` at a capacity, if they are kept.
    """
    for tried in sizes:
        pack_of, num_packs = packs(tried) if packs else packs_of(lengths, tried)
        pack_work = work_of_packs(work, pack_of, num_packs)
        seen: set[bytes] = set()
        for name, ranks in rank_choices(pack_work, mesh.dp):
            if ranks.tobytes() in seen:
                continue
            seen.add(ranks.tobytes())
            yield _in_orders(lengths, pack_of, ranks, pack_work, mesh, f"capacity {tried:,}, {name}", orders)


def _in_orders(
    lengths: Int32Array,
    pack_of: Int32Array,
    ranks: Int32Array,
    pack_work: FloatArray,
    mesh: Mesh,
    label: str,
    orders: tuple[Order, ...],
) -> Iterator[Candidate]:
    """Yield packs that no ranks share, in each order."""
    ones = np.ones(ranks.size, np.int32)
    for order in orders:
        turn = ordered(pack_work, ranks, order)
        name = f"{label}, {order.replace('_', ' ')}"
        yield build(lengths, pack_of, ranks, ones, turn, mesh=mesh, label=name)


def packs_of(lengths: Int32Array, capacity: int) -> tuple[Int32Array, int]:
    """Return the best-fit-decreasing pack of each document, -1 for empty ones, and the number of packs.

    Documents over the capacity get packs of their own.
    """
    pack_of = np.full(lengths.size, -1, np.int32)
    is_long = lengths > capacity
    packing = pack(np.where(is_long, 0, lengths), capacity)
    pack_of[packing.document_ids] = np.repeat(np.arange(packing.num_packs), np.diff(packing.offsets))
    num_long = int(np.count_nonzero(is_long))
    pack_of[is_long] = packing.num_packs + np.arange(num_long)
    return pack_of, packing.num_packs + num_long


def capacities(capacity: int) -> list[int]:
    """Return a capacity and its halvings down to 1/32, as far as they are at least `LEAST_CAPACITY`."""
    smaller = (capacity >> halvings for halvings in (1, 2, 3, 4, 5))
    return [capacity, *(tried for tried in smaller if tried >= LEAST_CAPACITY)]


def rounded(tokens: int) -> int:
    """Return the next multiple of 128."""
    return -(-tokens // 128) * 128


def usual_capacities(lengths: Int32Array, dp: int) -> list[int]:
    """Return powers of two from that which holds a rank's even share down, and the longest document's length.

    At most 10 powers, of at least `LEAST_CAPACITY`.
    """
    longest = rounded(int(lengths.max()))
    share = max(longest, int(lengths.sum(dtype=np.int64)) // dp, LEAST_CAPACITY)
    powers = [1 << bits for bits in range((share - 1).bit_length(), LEAST_CAPACITY.bit_length() - 2, -1)][:10]
    return sorted({longest, *powers}, reverse=True)


def rank_choices(work: FloatArray, dp: int) -> Iterator[tuple[str, Int32Array]]:
    """Yield names of ways to deal packs to ranks, and the rank of each pack."""
    yield "round robin", (np.arange(work.size) % dp).astype(np.int32)
    if work.size > dp:
        yield "even work in equal numbers", equal_counts(work, dp)
        yield "even work", partition(work, dp)


def equal_counts(work: FloatArray, dp: int) -> Int32Array:
    """Return the rank of each pack, for even work and equal numbers of packs."""
    missing = -work.size % dp  # filled up with packs of no work
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
"""Numbers of micro-batches per rank to try, as multiples of the pipeline's chunks."""
LEAST_TOKENS = 1024
"""Least tokens of a micro-batch on average."""
_MOST_STEPS = 2**29  # documents times micro-batches of all ranks: limits the time to about a second
_LEAST_ROUNDS = 4  # micro-batches for each chunk of the pipeline that are tried in any case
SLACK = 2.0
"""A micro-batch may hold this multiple of its even share of tokens, as in WLB-LLM."""


def balanced_candidates(
    lengths: Int32Array,
    work: FloatArray,
    mesh: Mesh,
    *,
    counts: tuple[int, ...] | None = None,
    orders: tuple[Order, ...] = BALANCED_ORDERS,
) -> Iterator[Iterator[Candidate]]:
    """Yield both ways to balance whole documents, for each number of micro-batches, each in every order.

    - WLB-LLM (Wang et al. 2025, "WLB-LLM: Workload-Balanced 4D Parallelism for Large Language Model Training",
      arXiv 2503.17924): all micro-batches of the step are filled at once, with documents from long to short.
    - Karmarkar-Karp: documents are divided into ranks of even work, as in verl; then each rank's go, by falling work,
      to the micro-batch with the least.
    """
    for count in micro_batch_counts(lengths, mesh) if counts is None else counts:
        for name, pack_of, ranks in (
            *by_workload(lengths, work, count, mesh.dp),
            ("Karmarkar-Karp", *by_differencing(work, count, mesh.dp)),
        ):
            pack_work = work_of_packs(work, pack_of, ranks.size)
            label = f"{name}, {count} micro-batches a rank"
            yield _in_orders(lengths, pack_of, ranks, pack_work, mesh, label, orders)


def micro_batch_counts(lengths: Int32Array, mesh: Mesh, steps: int = _MOST_STEPS) -> tuple[int, ...]:
    """Return the numbers of micro-batches per rank to try, at least one, rising.

    The last is limited by the number of documents, by `LEAST_TOKENS`, and by `steps` of work for many documents.
    """
    most = int(lengths.sum(dtype=np.int64)) // (mesh.dp * LEAST_TOKENS)
    filled = int(np.count_nonzero(lengths))
    in_time = max(steps // max(filled * mesh.dp, 1), _LEAST_ROUNDS * mesh.num_chunks)
    most = min(most, filled, in_time)
    tried = {round(times * mesh.num_chunks) for times in COUNTS}
    return (*sorted(count for count in tried if count < most), max(most, 1))


def by_workload(
    lengths: Int32Array, work: FloatArray, count: int, dp: int
) -> Iterator[tuple[str, Int32Array, Int32Array]]:
    """Yield a name, the micro-batch of each document (-1 if it is empty), and the rank of each micro-batch.

    WLB-LLM's greedy gives a document to the micro-batch with the least work if its tokens fit there, else to the one
    with the fewest tokens if they fit there. WLB-LLM delays the others to later steps; here, they go to the
    micro-batch with the least work in the end.
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
    """Return the micro-batch of each document, and the rank of each micro-batch; only empty documents have work 0."""
    filled = np.flatnonzero(work)
    rank_of = partition(work[filled], dp) if filled.size > dp else np.arange(filled.size, dtype=np.int32)
    pack_of = np.full(work.size, -1, np.int32)
    ranks: list[int] = []
    for rank in range(dp):
        mine = filled[rank_of == rank]
        mine = mine[np.argsort(-work[mine], kind="stable")]
        parts = min(count, mine.size)
        if parts:
            pack_of[mine] = len(ranks) + partition(work[mine], parts, method="greedy")
        ranks += [rank] * parts
    return pack_of, np.array(ranks, np.int32)


def build(
    lengths: Int32Array,
    pack_of: Int32Array,
    first_ranks: Int32Array,
    num_ranks: Int32Array,
    order: IntArray,
    *,
    mesh: Mesh,
    label: str,
) -> Candidate:
    """Return packs of whole documents as MicroPacks, the same in both passes.

    A pack runs on `num_ranks` neighbouring ranks that share its rows (`num_ranks` and `first_ranks` have an entry per
    pack). Every rank runs its packs in the order of `order`, so that shared packs have one order on all ranks.
    """
    num_packs = first_ranks.size
    copies = np.repeat(order, num_ranks[order])
    ranks = first_ranks[copies] + count_up(num_ranks[order].astype(np.int64))
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
    ids = by_pack[np.repeat(begins[copies], sizes[copies]) + count_up(sizes[copies])].astype(np.int32)
    packs = MicroPacks(
        rank_offsets=_offsets(counts),
        slice_offsets=_offsets(sizes[copies]),
        document_ids=ids,
        starts=np.zeros(ids.size, np.int32),
        stops=lengths[ids].astype(np.int32),
    )
    is_packed = pack_of >= 0
    return Candidate(
        forward=packs,
        backward=packs,
        first_ranks=np.where(is_packed, np.append(first_ranks, 0)[pack_of], -1).astype(np.int32),
        num_ranks=np.where(is_packed, np.append(num_ranks, 0)[pack_of], 1).astype(np.int32),
        label=label,
    )


def work_of_packs(work: FloatArray, pack_of: Int32Array, num_packs: int) -> FloatArray:
    """Return the work of each pack; documents of pack -1 don't count."""
    is_packed = pack_of >= 0
    total = np.bincount(pack_of[is_packed], weights=work[is_packed], minlength=num_packs)
    return total.astype(np.float64)


def count_up(counts: IntArray) -> IntArray:
    """Return 0, 1, … below each count, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _offsets(counts: IntArray) -> Int32Array:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
