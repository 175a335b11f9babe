"""Python versions of kernels, for runs without compilation, where they are faster than the kernels' own source.

Best fit here also serves huge capacities, for which the kernel's table of free spaces would be too large. Arguments
and results are those of the kernels.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]


def best_fit(
    order: Int32, slots: Int32, sizes: Int32, capacity: int, max_documents: int, pack_of: Int32
) -> int:
    """Put each item, in the order given, where the least space stays free; returns the number of packs.

    Packs with equal free space are taken first in, first out.
    """
    waiting: dict[int, deque[int]] = defaultdict(deque)  # free space -> packs, first in, first out
    rooms: list[int] = []  # free spaces that some pack has, rising
    quota: list[int] = []
    fewest = max(int(sizes[slots > 0].min(initial=max_documents)), 1)
    for item in order.tolist():
        slot, size = int(slots[item]), int(sizes[item])
        if slot == 0:
            pack_of[item] = -1
            continue
        fitting = (
            (rooms[at], pack)
            for at in range(bisect_left(rooms, slot), len(rooms))
            for pack in waiting[rooms[at]]
            if quota[pack] >= size
        )
        room, pack = next(fitting, (capacity, len(quota)))
        if pack == len(quota):
            quota.append(max_documents)
        else:
            waiting[room].remove(pack)
            if not waiting[room]:
                del rooms[bisect_left(rooms, room)]
        pack_of[item] = pack
        room -= slot
        quota[pack] -= size
        if room > 0 and quota[pack] >= fewest:  # no item fits in a smaller quota
            if not waiting[room]:
                insort(rooms, room)
            waiting[room].append(pack)
    return len(quota)


class _Cluster(NamedTuple):
    """Packs with consecutive numbers that were filled alike."""

    first: int
    packs: int
    quota: int


def best_fit_decreasing(slots: Int32, capacity: int, max_documents: int, pack_of: Int32) -> int:
    """Best-fit over items from long to short, every item one document; returns the number of packs.

    The same packs as `best_fit` in `descending` order; all items of one length are packed at once.
    """
    waiting: dict[int, deque[_Cluster]] = defaultdict(deque)  # free space -> packs, first in, first out
    rooms: list[int] = []  # free spaces that some pack has, rising
    runs = [(0, 1, 0)]  # first pack, items a pack, items: from long to short
    num_packs = 0

    def wait(room: int, cluster: _Cluster) -> None:
        if room > 0 and cluster.packs > 0 and cluster.quota > 0:
            if not waiting[room]:
                insort(rooms, room)
            waiting[room].append(cluster)

    lengths, counts = np.unique(slots[slots > 0], return_counts=True)
    for length, left in zip(lengths[::-1].tolist(), counts[::-1].tolist()):
        while left > 0:
            at = bisect_left(rooms, length)
            is_new = at == len(rooms)
            room = capacity if is_new else rooms[at]
            first, packs, quota = _Cluster(num_packs, left, max_documents) if is_new else waiting[room][0]
            each = min(room // length, quota)
            used = min(packs, -(-left // each))
            if is_new:
                num_packs += used
            elif used < packs:
                waiting[room][0] = _Cluster(first + used, packs - used, quota)
            else:
                waiting[room].popleft()
                if not waiting[room]:
                    del rooms[at]
            dealt = min(left, used * each)
            full, rest = divmod(dealt, each)
            wait(room - each * length, _Cluster(first, full, quota - each))
            wait(room - rest * length, _Cluster(first + full, min(rest, 1), quota - rest))
            runs.append((first, each, dealt))
            left -= dealt
    firsts, eachs, sizes = np.array(runs, np.int64).T
    turns = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    order = np.argsort(-slots, kind="stable")
    pack_of[:] = -1
    pack_of[order[: len(turns)]] = np.repeat(firsts, sizes) + turns // np.repeat(eachs, sizes)
    return num_packs


def next_fit(slots: Int32, sizes: Int32, capacity: int, max_documents: int, pack_of: Int32) -> int:
    """Fill one pack after the other in input order; returns the number of packs."""
    num_packs = room = quota = 0
    for item, slot in enumerate(slots.tolist()):
        if slot == 0:
            pack_of[item] = -1
            continue
        if room < slot or quota < sizes[item]:
            num_packs, room, quota = num_packs + 1, capacity, max_documents
        room -= slot
        quota -= int(sizes[item])
        pack_of[item] = num_packs - 1
    return num_packs


def wrapped(
    lengths: Int32,
    capacity: int,
    max_documents: int,
    multiple: int,
    documents: Int64,
    starts: Int32,
    stops: Int32,
    pack_of: Int32,
) -> tuple[int, int]:
    """Lay the documents end to end and cut every `capacity` tokens; returns numbers of pieces and of packs.

    The four arrays are written if they have room for every piece; else pieces are only counted.
    """
    pieces = []
    num_packs = room = quota = 0
    for document, length in enumerate(lengths.tolist()):
        start = 0
        while start < length:
            if room == 0 or quota == 0:
                num_packs, room, quota = num_packs + 1, capacity, max_documents
            stop = min(length, start + room)
            pieces.append((document, start, stop, num_packs - 1))
            room -= -(-(stop - start) // multiple) * multiple
            quota -= 1
            start = stop
    if pieces and len(documents) >= len(pieces):
        table = np.array(pieces)
        documents[: len(pieces)], starts[: len(pieces)] = table[:, 0], table[:, 1]
        stops[: len(pieces)], pack_of[: len(pieces)] = table[:, 2], table[:, 3]
    return len(pieces), num_packs


def permutation(seed: int, order: Int64) -> None:
    """Write a random permutation of 0 … n - 1: SplitMix64 numbers in a Fisher-Yates shuffle."""
    values = list(range(len(order)))
    states = np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15) * np.arange(1, len(order) + 1, dtype=np.uint64)
    for index, number in zip(reversed(range(1, len(values))), _scramble(states).tolist()):
        other = number % (index + 1)
        values[index], values[other] = values[other], values[index]
    order[:] = values


def rank_packs(pack_of: Int32, rank: Int32) -> int:
    """Renumber packs, in place, by their first piece; returns the number of packs that hold a piece."""
    packs, firsts = np.unique(pack_of[pack_of >= 0], return_index=True)
    rank[packs[np.argsort(firsts)]] = np.arange(len(packs))
    renumber(pack_of, rank)
    return len(packs)


def renumber(pack_of: Int32, number: Int32 | Int64) -> None:
    """Give every pack another number, in place; -1 stays."""
    is_packed = pack_of >= 0
    pack_of[is_packed] = number[pack_of[is_packed]]


def batch_bounds(pack_of: Int32, shift: int, begin: Int64) -> int:
    """Write where each batch of 2^shift neighbouring packs begins; returns the pieces of the largest batch."""
    sizes = np.bincount(pack_of[pack_of >= 0] >> shift, minlength=len(begin) - 1)
    begin[1:] = np.cumsum(sizes)
    return int(sizes.max(initial=0))


def gather_batches(
    pack_of: Int32, lengths: Int32, shift: int, length_bits: int, position: Int64, words: Int64
) -> None:
    """Write each piece's word (number, pack's index in the batch, length) at the next position of its batch."""
    pieces = np.flatnonzero(pack_of >= 0)
    batches, local = np.divmod(pack_of[pieces].astype(np.int64), 1 << shift)
    order = np.argsort(batches, kind="stable")
    words[:] = ((((pieces << shift) + local) << length_bits) + lengths[pieces])[order]
    position[:-1] += np.bincount(batches, minlength=len(position) - 1)


def order_batches(
    words: Int64,
    begin: Int64,
    shift: int,
    length_bits: int,
    buffer: Int64,
    position: Int64,
    offsets: Int64,
    lengths: Int32,
) -> None:
    """Sort each batch by pack and piece, and unpack the words."""
    batches = np.repeat(np.arange(len(begin) - 1), np.diff(begin))
    rest, sizes = np.divmod(words, 1 << length_bits)
    pieces, local = np.divmod(rest, 1 << shift)
    packs = (batches << shift) + local
    order = np.lexsort((pieces, packs))
    words[:], lengths[:] = pieces[order], sizes[order]
    offsets[1:] = np.cumsum(np.bincount(packs, minlength=len(offsets) - 1))


def checksum(lengths: Int32) -> int:
    """Return an order-independent 64-bit checksum of the numbers and lengths of all non-empty pieces."""
    pieces = np.flatnonzero(lengths)
    return _sum_of_pieces(pieces, lengths[pieces])


def audit(
    pieces: Int64, lengths: Int32, offsets: Int64, capacity: int, multiple: int
) -> tuple[int, int, int]:
    """Return tokens in packs, packs over capacity, and the `checksum` of the pieces."""
    slots = -(-lengths.astype(np.int64) // multiple) * multiple
    ends = np.append(0, np.cumsum(slots))
    overfull = np.diff(ends[offsets]) > capacity
    return int(lengths.sum(dtype=np.int64)), int(overfull.sum()), _sum_of_pieces(pieces, lengths)


def _sum_of_pieces(pieces: Int64, lengths: Int32) -> int:
    """Sum of the scrambled numbers and lengths of pieces, modulo 2^64."""
    words = pieces.astype(np.uint64) << np.uint64(31) | lengths.astype(np.uint64)
    return int(_scramble(words).sum())


def misplaced(documents: Int64, starts: Int32, lengths: Int32, wholes: Int32) -> int:
    """Count pieces that don't begin where the one before ended, and documents that pieces don't cover.

    If a document is unknown or its pieces aren't consecutive: one more than the number of pieces.
    """
    if (documents[1:] < documents[:-1]).any() or ((documents < 0) | (documents >= len(wholes))).any():
        return len(documents) + 1
    ends = np.append(0, np.cumsum(lengths, dtype=np.int64))
    first = np.searchsorted(documents, np.arange(len(wholes) + 1))  # the first piece of each document
    wrong = starts != ends[:-1] - ends[first[documents]]
    unfinished = np.diff(ends[first]) != wholes
    return int(wrong.sum() + unfinished.sum())


def _scramble(words: UInt64) -> UInt64:
    """SplitMix64's output function: a 64-bit hash of each number."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
