"""Share whole documents among as many ranks as each needs: Megatron's dynamic context parallelism, and FlexSP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from varlen import jit
from varlen.plan import kernels_groups
from varlen.plan.baselines.packed import (
    Order,
    build,
    count_up,
    micro_batch_counts,
    ordered,
    work_of_packs,
)
from varlen.plan.partition import partition
from varlen.plan.search import Candidate
from varlen.step_plan import Mesh
from varlen.types import FloatArray, Int32Array

SHARED_ORDERS: tuple[Order, ...] = ("long_first", "long_last", "long_middle")
Way = Literal["Megatron", "FlexSP"]
WAYS: tuple[Way, ...] = ("Megatron", "FlexSP")
MOST_STEPS = 2**26
"""Limit for `micro_batch_counts`, lower than the default since each document is tried in many groups."""
SLACK = 1.05
"""A micro-batch of Megatron's way may take this multiple of its even share of work."""


def dynamic_cp_candidates(
    lengths: Int32Array,
    work: FloatArray,
    mesh: Mesh,
    sizes: Sequence[int],
    *,
    counts: tuple[int, ...] | None = None,
    orders: tuple[Order, ...] = SHARED_ORDERS,
    ways: tuple[Way, ...] = WAYS,
    most_s: float = np.inf,
) -> Iterator[Iterator[Candidate]]:
    """Yield both ways to share documents among ranks, for each number of micro-batches, each in every order.

    - Megatron's: the fewest ranks, a power of two, that hold a document's rows share it; micro-batches are filled one
      after the other until they have 5 % more than their share of work.
    - FlexSP's (Wang et al. 2025, "FlexSP: Accelerating Large Language Model Training via Flexible Sequence
      Parallelism", arXiv 2412.01523): documents are divided into micro-batches first, sorted by length as in the
      paper, or evenly; within each, groups of ranks are chosen so that the slowest is fast.

    Every rank runs one MicroPack a micro-batch, perhaps an empty one, and all ranks run micro-batches in one order,
    so that 1F1B can't deadlock. `work[d, k]` is the seconds of both passes on each rank if 2^k ranks share document
    d. Capacities with which the work of all ranks is over `most_s` on average are left out.
    """
    seen: set[bytes] = set()
    for label, group_of, levels, batches in _shared(lengths, work, mesh, sizes, counts, ways, most_s):
        key = b"|".join(array.tobytes() for array in (group_of, levels, batches))
        if key not in seen:
            seen.add(key)
            yield _candidates(lengths, work, mesh, group_of, levels, batches, label, orders)


def _shared(
    lengths: Int32Array,
    work: FloatArray,
    mesh: Mesh,
    sizes: Sequence[int],
    counts: tuple[int, ...] | None,
    ways: tuple[Way, ...],
    most_s: float,
) -> Iterator[tuple[str, Int32Array, Int32Array, Int32Array]]:
    """Yield a label, and the result of `by_need` or `by_speed`."""
    for count in micro_batch_counts(lengths, mesh, MOST_STEPS) if counts is None else counts:
        for tried in sizes if "Megatron" in ways else ():
            if needed_work(lengths, work, tried)[1].sum() > most_s * mesh.dp:
                continue
            label = f"Megatron, {count} micro-batches of {tried:,} tokens a rank"
            yield label, *by_need(lengths, work, mesh.dp, tried, count)
        for name, batch_of in divisions(lengths, work[:, 0], count) if "FlexSP" in ways else ():
            label = f"FlexSP, {count} micro-batches {name}"
            yield label, *by_speed(lengths, work, mesh.dp, max(sizes), batch_of)


def by_need(
    lengths: Int32Array, work: FloatArray, dp: int, capacity: int, count: int
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Share each document among as few ranks as hold it, and fill micro-batches one after the other.

    Returns the group of each document, -1 if it is empty, and the level and the micro-batch of each group.
    """
    least, of_all = needed_work(lengths, work, capacity)
    own = of_all / 2.0**least
    heaviest = np.lexsort((-own, -least))
    order = heaviest[lengths[heaviest] > 0].astype(np.int32)
    batch_of, group_of = np.full(lengths.size, -1, np.int32), np.full(lengths.size, -1, np.int32)
    levels, offsets = np.zeros(order.size + dp, np.int32), np.zeros(order.size + 1, np.int32)
    target_s = SLACK * float(of_all.sum()) / (dp * count)
    with jit.sized(2e-7 * order.size * dp * count):
        num_batches = kernels_groups.fill(
            order, least, lengths, work, dp, capacity, target_s, batch_of, group_of, levels, offsets
        )
    groups_of = np.diff(offsets[: num_batches + 1])
    batches = np.repeat(np.arange(num_batches, dtype=np.int32), groups_of)
    return group_of, levels[: batches.size], batches


def needed_work(lengths: Int32Array, work: FloatArray, capacity: int) -> tuple[Int32Array, FloatArray]:
    """Return the least level of each document that holds its rows, and the seconds of all its ranks."""
    size = np.maximum(lengths, 1) / capacity
    least = np.clip(np.ceil(np.log2(size)), 0, work.shape[1] - 1).astype(np.int32)
    return least, work[np.arange(lengths.size), least] * 2.0**least


def by_speed(
    lengths: Int32Array, work: FloatArray, dp: int, capacity: int, batch_of: Int32Array
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Share the documents of each micro-batch among groups of ranks so that the slowest group is fast.

    `batch_of` is the micro-batch of each document, -1 if it is empty. Returns the same as `by_need`.
    """
    group_of, levels = np.full(lengths.size, -1, np.int32), np.zeros(dp, np.int32)
    all_levels, batches = [np.zeros(0, np.int32)], []
    by_work = np.lexsort((-work[:, 0], batch_of))[np.count_nonzero(batch_of < 0) :].astype(np.int32)
    num_groups = 0
    with jit.sized(1e-5 * lengths.size * dp):
        sizes = np.bincount(batch_of[by_work], minlength=1)
        for batch, mine in enumerate(np.split(by_work, np.cumsum(sizes)[:-1])):
            count = kernels_groups.share(mine, lengths, work, dp, capacity, group_of, levels)
            group_of[mine] += num_groups
            all_levels.append(levels[:count].copy())
            batches += [batch] * count
            num_groups += count
    return group_of, np.concatenate(all_levels), np.array(batches, np.int32)


def divisions(lengths: Int32Array, work: FloatArray, count: int) -> Iterator[tuple[str, Int32Array]]:
    """Yield names of ways to divide documents into micro-batches, and the micro-batch of each (-1 if it is empty).

    Documents are sorted by length and cut into parts of about equal tokens or equal work, or divided into micro-
    batches of similar documents.
    """
    filled = np.flatnonzero(lengths)
    if not filled.size:
        return
    filled = filled[np.argsort(-lengths[filled].astype(np.int64), kind="stable")]
    for name, weights in (("sorted by length", lengths.astype(np.float64)), ("sorted, of equal work", work)):
        # A document belongs to the part that contains its middle.
        middles = np.cumsum(weights[filled]) - 0.5 * weights[filled]
        batch_of = np.full(lengths.size, -1, np.int32)
        parts = np.minimum((middles * (count / weights[filled].sum())).astype(np.int32), count - 1)
        batch_of[filled] = np.unique(parts, return_inverse=True)[1]
        yield name, batch_of
    batch_of = np.full(lengths.size, -1, np.int32)
    batch_of[filled] = partition(work[filled], count)
    yield "each like the others", batch_of


def _candidates(
    lengths: Int32Array,
    work: FloatArray,
    mesh: Mesh,
    group_of: Int32Array,
    levels: Int32Array,
    batches: Int32Array,
    label: str,
    orders: tuple[Order, ...],
) -> Iterator[Candidate]:
    """Yield one candidate for each order of the micro-batches."""
    filled = np.flatnonzero(group_of >= 0)
    own = np.zeros(lengths.size)
    own[filled] = work[filled, levels[group_of[filled]]]
    loads = work_of_packs(own, group_of, levels.size)
    first_ranks = seated(loads, levels, batches, mesh.dp)
    slowest = np.zeros(int(batches.max(initial=-1)) + 1)
    np.maximum.at(slowest, batches, loads)
    first_ranks, levels, batches = _completed(first_ranks, levels, batches, mesh.dp)
    for order in orders:
        turn = np.empty(slowest.size, np.int64)
        turn[ordered(slowest, np.zeros(slowest.size, np.int32), order)] = np.arange(slowest.size)
        yield build(
            lengths,
            group_of,
            first_ranks,
            (1 << levels).astype(np.int32),
            np.argsort(turn[batches], kind="stable"),
            mesh=mesh,
            label=f"{label}, {order.replace('_', ' ')}",
        )


def seated(loads: FloatArray, levels: Int32Array, batches: Int32Array, dp: int) -> Int32Array:
    """Return the first rank of each group: the aligned neighbours with the least work so far.

    `loads` are the seconds of each of a group's 2^level ranks; `batches`, the micro-batch of each group, rise.
    """
    first_ranks = np.zeros(levels.size, np.int32)
    turns = np.lexsort((-loads, -levels, batches)).astype(np.int32)
    kernels_groups.seat(turns, loads, levels, batches, dp, first_ranks)
    return first_ranks


def _completed(
    first_ranks: Int32Array, levels: Int32Array, batches: Int32Array, dp: int
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Add an empty group for each rank that a micro-batch leaves free."""
    num_batches = int(batches.max(initial=-1)) + 1
    is_free = np.ones((num_batches, dp), np.bool_)
    sizes = 1 << levels
    is_free[np.repeat(batches, sizes), np.repeat(first_ranks, sizes) + count_up(sizes.astype(np.int64))] = (
        False
    )
    more, ranks = np.nonzero(is_free)
    return (
        np.concatenate([first_ranks, ranks]).astype(np.int32),
        np.concatenate([levels, np.zeros(ranks.size)]).astype(np.int32),
        np.concatenate([batches, more]).astype(np.int32),
    )
