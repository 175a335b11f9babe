"""Packs of even work in a number that was asked for: what ranks and pipelines need who all run as many."""

from __future__ import annotations

import heapq
from typing import Literal

import numpy as np

from varlen.errors import SettingError
from varlen.pack.api import pack
from varlen.pack.assign import spread
from varlen.pack.lengths import LARGEST
from varlen.plan.partition import partition
from varlen.types import FloatArray, Int32Array


def packed(
    lengths: Int32Array,
    capacity: int,
    max_documents: int = LARGEST,
    method: Literal["best_fit_decreasing", "next_fit"] = "best_fit_decreasing",
) -> tuple[Int32Array, int]:
    """Return the pack of each document by one of the packer's methods, int32 `[documents]`, and how many there are.

    Args:
        lengths: int32 `[documents]`, from 1 to `capacity`.
        capacity: tokens a pack can hold.
        max_documents: documents a pack can hold.
        method: one of `varlen.pack`.
    """
    packing = pack(lengths, capacity, method, max_documents=max_documents)
    pack_of = np.empty(lengths.size, np.int32)
    pack_of[packing.document_ids] = np.repeat(np.arange(packing.num_packs), np.diff(packing.offsets))
    return pack_of, packing.num_packs


def even_ways(
    lengths: Int32Array,
    work: FloatArray,
    pack_of: Int32Array,
    num_packs: int,
    capacity: int,
    max_documents: int = LARGEST,
) -> list[Int32Array]:
    """Return one to four ways to fill a number of packs evenly, for the caller to choose from.

    The first cuts the heaviest of the packs given; then, where they fit, even parts by both of the planner's methods,
    and documents from much work to little each to the pack with the least.

    Args:
        lengths: int32 `[documents]`, from 1 to `capacity`.
        work: float64 `[documents]`.
        pack_of: int32 `[documents]`: few packs that hold all of them, as `packed` returns.
        num_packs: how many are wanted: at least those, and at most as many as documents.
        capacity: tokens a pack can hold.
        max_documents: documents a pack can hold.

    Returns:
        The pack of each document, int32 `[documents]`; none is empty.
    """
    ways = [halved(pack_of, num_packs, work)]
    if not lengths.size:
        return ways
    ways += fitting_parts(lengths, work, num_packs, capacity, max_documents)
    ones = np.ones(lengths.size, np.int32)
    even, used = spread(num_packs, lengths, ones, work, capacity, max_documents)
    if used == num_packs and np.bincount(even, minlength=used).min():
        ways.append(even)
    return ways


def even_packs(
    lengths: Int32Array, work: FloatArray, num_packs: int, capacity: int, max_documents: int = LARGEST
) -> Int32Array:
    """Divide documents into a number of packs whose heaviest is light; int32 `[documents]`, none empty.

    Args:
        lengths: int32 `[documents]`, from 1 to `capacity`.
        work: float64 `[documents]`.
        num_packs: at least as many as best-fit-decreasing needs, and at most as many as documents.
        capacity: tokens a pack can hold.
        max_documents: documents a pack can hold.

    Raises:
        SettingError: `num_packs` is out of that range, and no even parts fit.

    >>> even_packs(np.array([5, 5, 2, 2], np.int32), np.array([5.0, 5.0, 2.0, 2.0]), 2, 8).tolist()
    [0, 1, 0, 1]
    """
    fullest, fewest = packed(lengths, capacity, max_documents)
    if num_packs > lengths.size:
        raise SettingError(
            f"{lengths.size:,} documents can't fill {num_packs:,} packs; ask for at most as many"
        )
    if num_packs >= fewest:
        ways = even_ways(lengths, work, fullest, num_packs, capacity, max_documents)
    else:
        ways = fitting_parts(lengths, work, num_packs, capacity, max_documents)
    if not ways:
        raise SettingError(
            f"{num_packs:,} packs of {capacity:,} tokens don't hold {lengths.size:,} documents; {fewest:,} do"
        )
    return min(ways, key=lambda way: float(np.bincount(way, weights=work, minlength=1).max()))


def fitting_parts(
    lengths: Int32Array, work: FloatArray, num_packs: int, capacity: int, max_documents: int = LARGEST
) -> list[Int32Array]:
    """Return even parts by both of the planner's methods, int32 `[documents]`, where they fit into packs.

    Args:
        lengths: int32 `[documents]`, at least one.
        work: float64 `[documents]`.
        num_packs: parts, at most as many as documents.
        capacity: tokens a pack can hold.
        max_documents: documents a pack can hold.
    """
    parts = [partition(work, num_packs), partition(work, num_packs, method="karmarkar_karp")]
    return [part_of for part_of in parts if _holds(part_of, lengths, num_packs, capacity, max_documents)]


def halved(pack_of: Int32Array, num_packs: int, work: FloatArray) -> Int32Array:
    """Cut the pack with the most work into even halves until there are as many packs as wanted.

    Args:
        pack_of: int32 `[documents]`; no pack is empty.
        num_packs: how many are wanted, at least as many as there are, and at most as many as documents.
        work: float64 `[documents]`.
    """
    packs = int(pack_of.max(initial=-1)) + 1
    if packs == num_packs:
        return pack_of
    cut = pack_of.copy()
    members = np.split(
        np.argsort(pack_of, kind="stable"), np.cumsum(np.bincount(pack_of, minlength=packs))[:-1]
    )
    waiting = [(-float(work[items].sum()), number) for number, items in enumerate(members) if items.size > 1]
    heapq.heapify(waiting)
    for number in range(packs, num_packs):
        _, heavy = heapq.heappop(waiting)
        side = partition(work[members[heavy]], 2)
        cut[members[heavy][side == 1]] = number
        members.append(members[heavy][side == 1])
        members[heavy] = members[heavy][side == 0]
        for part in (heavy, number):
            if members[part].size > 1:
                heapq.heappush(waiting, (-float(work[members[part]].sum()), part))
    return cut


def _holds(
    pack_of: Int32Array, lengths: Int32Array, num_packs: int, capacity: int, max_documents: int
) -> bool:
    """Return whether no pack is empty, over its tokens or over its documents."""
    tokens = np.bincount(pack_of, weights=lengths, minlength=num_packs)
    counts = np.bincount(pack_of, minlength=num_packs)
    return bool(tokens.max() <= capacity and counts.min() >= 1 and counts.max() <= max_documents)
