"""Packs as users run them, round robin and 1F1B, and the same at the best capacity, balance and order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from varlen.pack.api import pack
from varlen.plan.baselines.orders import ORDERS, Order, ordered
from varlen.plan.baselines.placing import placed, work_of_packs
from varlen.plan.candidate import Candidate
from varlen.plan.partition import partition
from varlen.step_plan import Mesh
from varlen.types import FloatArray, Int32Array

LEAST_CAPACITY = 1024
"""Tokens below which a smaller capacity is not tried: kernels lose more there than balance can gain."""


def packed(lengths: Int32Array, mesh: Mesh, capacity: int) -> Candidate:
    """Return best-fit-decreasing packs dealt round robin to data-parallel ranks, run by 1F1B.

    Args:
        lengths: int32 `[num_documents]`.
        mesh: ranks that get one pack less run one less.
        capacity: tokens a pack can hold. Longer documents are packs of their own.
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
        mesh: where it runs.
        capacity: tokens that the largest packs tried can hold. Documents longer than a smaller one are packs of
            their own.
        orders: of the packs of each rank.

    Yields:
        Candidates at capacity, its half, … its 32nd part; for each, packs dealt round robin, evenly in equal
        numbers, and evenly in any numbers; for each of those, every order.
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
        capacity: tokens a pack can hold. Longer documents get packs of their own, after the others.
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
        dp: data-parallel ranks.
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
        dp: data-parallel ranks.
    """
    missing = -work.size % dp
    return partition(np.concatenate([work, np.zeros(missing)]), dp, is_equal=True)[: work.size]
