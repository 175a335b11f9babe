"""Every packing kernel in plain Python: the specification, the oracle of the tests, and `VARLEN_JIT=0`.

Written to be read. Arguments, results and numbering of packs are those of the kernels.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

_WORD = 0xFFFFFFFFFFFFFFFF


def descending(slots: Int32, largest: int, order: Int32) -> None:
    """Write the items in order of falling slots, equal ones in input order."""
    order[:] = sorted(range(len(slots)), key=lambda item: -slots[item])


def next_fit(slots: Int32, sizes: Int32, capacity: int, max_documents: int, pack_of: Int32) -> int:
    """Fill one pack after the other in input order; returns the number of packs."""
    num_packs = room = places = 0
    for item, slot in enumerate(slots.tolist()):
        if slot == 0:
            pack_of[item] = -1
            continue
        if room < slot or places < sizes[item]:
            num_packs, room, places = num_packs + 1, capacity, max_documents
        room -= slot
        places -= int(sizes[item])
        pack_of[item] = num_packs - 1
    return num_packs


def best_fit(
    order: Int32, slots: Int32, sizes: Int32, capacity: int, max_documents: int, pack_of: Int32
) -> int:
    """Put each item, in the order given, where the least space stays free; returns the number of packs.

    Among packs with equally much free space, the one that has had it longest is taken.
    """
    waiting: dict[int, deque[int]] = defaultdict(deque)  # free space -> packs, the longest waiting first
    rooms: list[int] = []  # the free spaces with a waiting pack, rising
    places: list[int] = []
    for item in order.tolist():
        slot, size = int(slots[item]), int(sizes[item])
        if slot == 0:
            pack_of[item] = -1
            continue
        fitting = (
            (room, pack)
            for room in rooms[bisect_left(rooms, slot) :]
            for pack in waiting[room]
            if places[pack] >= size
        )
        room, pack = next(fitting, (capacity, len(places)))
        if pack == len(places):
            places.append(max_documents)
        else:
            waiting[room].remove(pack)
            if not waiting[room]:
                rooms.remove(room)
        pack_of[item] = pack
        room -= slot
        places[pack] -= size
        if room > 0 and places[pack] > 0:
            if not waiting[room]:
                insort(rooms, room)
            waiting[room].append(pack)
    return len(places)


def best_fit_decreasing(slots: Int32, capacity: int, max_documents: int, pack_of: Int32) -> int:
    """Best-fit over items from long to short, every item one document; returns the number of packs."""
    order = np.empty(len(slots), np.int32)
    descending(slots, capacity, order)
    return best_fit(order, slots, np.ones(len(slots), np.int32), capacity, max_documents, pack_of)


def first_fit(
    order: Int32,
    slots: Int32,
    sizes: Int32,
    capacity: int,
    max_documents: int,
    most_packs: int,
    pack_of: Int32,
) -> int:
    """Put each item, in the order given, into the first pack with space; returns the number of packs."""
    rooms: list[int] = []
    places: list[int] = []
    for item in order.tolist():
        slot, size = int(slots[item]), int(sizes[item])
        if slot == 0:
            pack_of[item] = -1
            continue
        pack = next(_fitting(rooms, places, slot, size), len(rooms))
        if pack == len(rooms):
            rooms.append(capacity)
            places.append(max_documents)
        pack_of[item] = pack
        rooms[pack] -= slot
        places[pack] -= size
    return len(rooms)


def _fitting(rooms: list[int], places: list[int], slot: int, size: int) -> Iterator[int]:
    """The packs with space for an item, in order."""
    return (pack for pack in range(len(rooms)) if rooms[pack] >= slot and places[pack] >= size)


def balanced(
    order: Int32,
    slots: Int32,
    sizes: Int32,
    item_work: Float64,
    capacity: int,
    max_documents: int,
    num_packs: int,
    most_packs: int,
    pack_of: Int32,
) -> int:
    """Put each item, in the order given, into the pack with the least work that has space for it.

    Starts with `num_packs` empty packs and opens another only where no pack has space; returns the number of
    packs.
    """
    rooms = [capacity] * num_packs
    places = [max_documents] * num_packs
    work = [0.0] * num_packs
    for item in order.tolist():
        slot, size = int(slots[item]), int(sizes[item])
        if slot == 0:
            pack_of[item] = -1
            continue
        pack = min(_fitting(rooms, places, slot, size), key=work.__getitem__, default=len(rooms))
        if pack == len(rooms):
            rooms.append(capacity)
            places.append(max_documents)
            work.append(0.0)
        pack_of[item] = pack
        rooms[pack] -= slot
        places[pack] -= size
        work[pack] += float(item_work[item])
    return len(rooms)


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

    The four arrays are written if they have room for every piece, else only counted.
    """
    pieces = []
    num_packs = room = places = 0
    for document, length in enumerate(lengths.tolist()):
        start = 0
        while start < length:
            if room == 0 or places == 0:
                num_packs, room, places = num_packs + 1, capacity, max_documents
            stop = min(length, start + room)
            pieces.append((document, start, stop, num_packs - 1))
            room -= -(-(stop - start) // multiple) * multiple
            places -= 1
            start = stop
    if pieces and len(documents) >= len(pieces):
        table = np.array(pieces)
        documents[: len(pieces)], starts[: len(pieces)] = table[:, 0], table[:, 1]
        stops[: len(pieces)], pack_of[: len(pieces)] = table[:, 2], table[:, 3]
    return len(pieces), num_packs


def permutation(seed: int, order: Int64) -> None:
    """Write a random permutation of 0 … n - 1: SplitMix64 numbers in a Fisher-Yates shuffle."""
    values = list(range(len(order)))
    state = int(seed)
    for index in range(len(values) - 1, 0, -1):
        state = (state + 0x9E3779B97F4A7C15) & _WORD
        other = _scramble(state) % (index + 1)
        values[index], values[other] = values[other], values[index]
    order[:] = values


def rank_packs(pack_of: Int32, rank: Int32) -> int:
    """Renumber packs, in place, by their first piece; returns the number of packs that hold a piece."""
    ranked: dict[int, int] = {}
    pack_of[:] = [ranked.setdefault(pack, len(ranked)) if pack >= 0 else -1 for pack in pack_of.tolist()]
    return len(ranked)


def renumber(pack_of: Int32, number: Int64) -> None:
    """Give every pack another number, in place; -1 stays."""
    pack_of[:] = [number[pack] if pack >= 0 else -1 for pack in pack_of.tolist()]


def batch_bounds(pack_of: Int32, shift: int, begin: Int64) -> int:
    """Write where each batch of 2^shift neighbouring packs begins; returns the pieces of the largest batch."""
    sizes = np.bincount([pack >> shift for pack in pack_of.tolist() if pack >= 0], minlength=len(begin) - 1)
    begin[1:] = np.cumsum(sizes)
    return max(sizes.tolist(), default=0)


def gather_batches(
    pack_of: Int32, lengths: Int32, shift: int, length_bits: int, position: Int64, words: Int64
) -> None:
    """Write each piece's word (number, pack's place in the batch, length) at the next position of its batch."""
    for piece, (pack, length) in enumerate(zip(pack_of.tolist(), lengths.tolist())):
        if pack >= 0:
            batch, place = divmod(pack, 1 << shift)
            words[position[batch]] = (((piece << shift) + place) << length_bits) + length
            position[batch] += 1


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
    """Sort each batch by pack and piece, and take the words apart; working space is left alone."""
    split = []
    for batch, (start, stop) in enumerate(zip(begin[:-1].tolist(), begin[1:].tolist())):
        for word in words[start:stop].tolist():
            piece, place = divmod(word >> length_bits, 1 << shift)
            split.append(((batch << shift) + place, piece, word % (1 << length_bits)))
    split.sort()
    words[:] = [piece for _, piece, _ in split]
    lengths[:] = [length for _, _, length in split]
    offsets[:] = np.searchsorted([pack for pack, _, _ in split], np.arange(len(offsets)))


def checksum(lengths: Int32) -> int:
    """An order-free 64-bit sum over all non-empty pieces of their numbers and lengths, scrambled."""
    pairs = enumerate(lengths.tolist())
    return sum(_scramble((piece << 31) | length) for piece, length in pairs if length) & _WORD


def audit(
    pieces: Int64, lengths: Int32, offsets: Int64, capacity: int, multiple: int
) -> tuple[int, int, int]:
    """Count tokens in finished packs and packs over capacity, and sum up the pieces as `checksum` does."""
    slots = [-(-length // multiple) * multiple for length in lengths.tolist()]
    bounds = offsets.tolist()
    overfull = sum(sum(slots[begin:end]) > capacity for begin, end in zip(bounds[:-1], bounds[1:]))
    pairs = zip(pieces.tolist(), lengths.tolist())
    total = sum(_scramble((piece << 31) | length) for piece, length in pairs) & _WORD
    return sum(lengths.tolist()), overfull, total


def misplaced(documents: Int64, starts: Int32, lengths: Int32, wholes: Int32) -> int:
    """Count pieces, in input order, that don't go on where the one before ended, and documents left unfinished.

    Pieces of a document that is unknown or was finished before make all of them wrong.
    """
    order = documents.tolist()
    if order != sorted(order) or any(not 0 <= document < len(wholes) for document in order):
        return len(order) + 1
    ends = dict.fromkeys(range(len(wholes)), 0)
    wrong = 0
    for document, start, length in zip(order, starts.tolist(), lengths.tolist()):
        wrong += start != ends[document]
        ends[document] += length
    unfinished = sum(ends[document] != length for document, length in enumerate(wholes.tolist()))
    return int(wrong + unfinished)


def _scramble(word: int) -> int:
    """SplitMix64's output function: 64 well mixed bits of a number."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
