"""Kernels that turn an assignment into the arrays of a Packing, that cut a stream into full packs, and `fill`.

`tests/oracles/pack.py` and `pack_fill.py` define in plain Python what each returns.
"""

# Kernels mix Python and numpy integers, which numba types by itself.
# mypy: disable-error-code="assignment,return-value,no-any-return"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from varlen.jit import compiled
from varlen.pack import in_python

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@compiled(in_python=in_python._scramble)
def _scramble(state: np.uint64) -> np.uint64:
    """SplitMix64's output function (Steele, Lea and Flood 2014): a 64-bit hash of a counter."""
    word = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@compiled(in_python=in_python.permutation)
def permutation(seed: np.uint64, order: Int64) -> None:
    """Write a random permutation of 0 … n - 1, the same for a seed on every machine and version."""
    for index in range(order.size):
        order[index] = index
    state = seed
    for index in range(order.size - 1, 0, -1):
        state += np.uint64(0x9E3779B97F4A7C15)
        other = np.int64(_scramble(state) % np.uint64(index + 1))
        order[index], order[other] = order[other], order[index]


@compiled(in_python=in_python.rank_packs)
def rank_packs(pack_of: Int32, rank: Int32) -> int:
    """Renumber packs, in place, by their first piece; returns the number of packs that hold a piece.

    `rank` is int32 `[num_packs]` of -1 on entry, and the new number of each pack afterwards.
    """
    used = 0
    for piece in range(pack_of.size):
        pack = pack_of[piece]
        if pack < 0:
            continue
        if rank[pack] < 0:
            rank[pack] = used
            used += 1
        pack_of[piece] = rank[pack]
    return used


@compiled(in_python=in_python.renumber)
def renumber(pack_of: Int32, number: Int64) -> None:
    """Give every pack another number, in place; -1 stays."""
    for piece in range(pack_of.size):
        if pack_of[piece] >= 0:
            pack_of[piece] = number[pack_of[piece]]


@compiled(in_python=in_python.batch_bounds)
def batch_bounds(pack_of: Int32, shift: int, begin: Int64) -> int:
    """Write where each batch of 2^shift consecutive packs begins; returns the pieces of the largest batch."""
    for piece in range(pack_of.size):
        if pack_of[piece] >= 0:
            begin[(pack_of[piece] >> shift) + 1] += 1
    largest = np.int64(0)
    for batch in range(1, begin.size):
        largest = max(largest, begin[batch])
        begin[batch] += begin[batch - 1]
    return largest


@compiled(in_python=in_python.gather_batches)
def gather_batches(
    pack_of: Int32, lengths: Int32, shift: int, length_bits: int, position: Int64, words: Int64
) -> None:
    """Gather the pieces of each batch of packs: the first of two passes of a radix sort.

    Two passes with local writes take a fraction of the time of one pass with scattered writes. A word holds a piece's
    number, its pack's index in the batch (`shift` bits) and its length (`length_bits`). `position` is where each
    batch begins, from `batch_bounds`, and is advanced.
    """
    pack_mask = (1 << shift) - 1
    for piece in range(pack_of.size):
        pack = pack_of[piece]
        if pack >= 0:
            batch = pack >> shift
            word = (((np.int64(piece) << shift) | (pack & pack_mask)) << length_bits) | lengths[piece]
            words[position[batch]] = word
            position[batch] += 1


@compiled(in_python=in_python.order_batches)
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
    """Sort each batch of packs, which fits in a core's cache, and unpack its words.

    `words` come from `gather_batches` and hold piece numbers afterwards; `offsets` and `lengths` are written.
    `buffer` (as long as the largest batch) and `position` (`2^shift + 1`) are working space.
    """
    pack_mask = (1 << shift) - 1
    length_mask = (np.int64(1) << length_bits) - 1
    for batch in range(begin.size - 1):
        start, stop = begin[batch], begin[batch + 1]
        for local in range(pack_mask + 2):
            position[local] = 0
        for index in range(start, stop):
            buffer[index - start] = words[index]
            position[((words[index] >> length_bits) & pack_mask) + 1] += 1
        position[0] = start
        for local in range(pack_mask + 1):
            position[local + 1] += position[local]
            if (batch << shift) + local < offsets.size:
                offsets[(batch << shift) + local] = position[local]
        for index in range(stop - start):
            word = buffer[index]
            local = (word >> length_bits) & pack_mask
            to = position[local]
            position[local] = to + 1
            words[to] = word >> (length_bits + shift)
            lengths[to] = word & length_mask
    offsets[offsets.size - 1] = words.size


@compiled(in_python=in_python.checksum)
def checksum(lengths: Int32) -> np.uint64:
    """Return an order-independent 64-bit checksum of the numbers and lengths of all non-empty pieces."""
    total = np.uint64(0)
    for piece in range(lengths.size):
        if lengths[piece] > 0:
            total += _scramble((np.uint64(piece) << np.uint64(31)) | np.uint64(lengths[piece]))
    return total


@compiled(in_python=in_python.audit)
def audit(
    pieces: Int64, lengths: Int32, offsets: Int64, capacity: int, multiple: int
) -> tuple[int, int, np.uint64]:
    """Return tokens in packs, packs over capacity, and the `checksum` of the pieces, from finished packs alone."""
    tokens = 0
    total = np.uint64(0)
    for index in range(pieces.size):
        length = lengths[index]
        total += _scramble((np.uint64(pieces[index]) << np.uint64(31)) | np.uint64(length))
        tokens += length
    overfull = 0
    index = 0
    for pack in range(offsets.size - 1):
        used = 0
        while index < offsets[pack + 1]:
            length = np.int64(lengths[index])
            used += length if multiple == 1 else (length + multiple - 1) // multiple * multiple
            index += 1
        overfull += used > capacity
    return tokens, overfull, total


@compiled(in_python=in_python.misplaced)
def misplaced(documents: Int64, starts: Int32, lengths: Int32, wholes: Int32) -> int:
    """Count pieces that don't begin where the one before ended, and documents that pieces don't cover.

    `wholes[document]` is the length that the pieces of a document must add up to.
    """
    if documents.size > 0 and documents[0] < 0:
        return documents.size + 1
    wrong = 0
    document = -1
    at = np.int64(0)
    for piece in range(documents.size + 1):
        coming = documents[piece] if piece < documents.size else wholes.size
        if coming != document:
            if document >= 0 and at != wholes[document]:
                wrong += 1
            for skipped in range(document + 1, min(coming, wholes.size)):
                wrong += wholes[skipped] != 0
            if coming < document or (coming >= wholes.size and piece < documents.size):
                return documents.size + 1
            document = coming
            at = np.int64(0)
        if piece < documents.size:
            wrong += starts[piece] != at
            at += lengths[piece]
    return wrong


@compiled(in_python=in_python.wrapped)
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
    """Lay the documents end to end and cut every `capacity` slots; returns numbers of pieces and of packs.

    The four arrays are written if every piece fits; a first call with empty arrays returns their size.
    """
    num_pieces = 0
    num_packs = 0
    room = 0
    quota = 0
    for document in range(lengths.size):
        start = 0
        while start < lengths[document]:
            if room == 0 or quota == 0:
                num_packs += 1
                room = capacity
                quota = max_documents
            stop = min(lengths[document], start + room)
            if num_pieces < documents.size:
                documents[num_pieces] = document
                starts[num_pieces] = start
                stops[num_pieces] = stop
                pack_of[num_pieces] = num_packs - 1
            num_pieces += 1
            room -= (stop - start + multiple - 1) // multiple * multiple
            quota -= 1
            start = stop
    return num_pieces, num_packs


# `fill` fills packs completely: each around one item, with other items whose slots sum up to the free space.
#
# The subset of items that fills a pack best comes from their subset sums (minimum bin slack: Gupta and Ho 1999): bit
# s of a row is set if the items considered so far can sum up to s, and a shift adds an item to all sums at once. Only
# the last few items of a pack are selected in this way. The others are the next ones in order, whatever their
# lengths: if all were selected, short items would be skipped more often than long ones and gather in later packs.

UInt64 = NDArray[np.uint64]

_ONE = np.uint64(1)

UNSURE = 8  # items at the end of those that fit in order which `fill` may replace by better ones
PASSED = 1024  # most items that it skips for one pack
SUMMED = 256  # most items whose subset sums it considers
PATIENT = 32  # items among which it requires an exact fit; after these, a small gap is enough
FINEST = 1 << 16  # most distinct sums; for more space than that, slots are rounded up
FAILED = 256  # it gives up once the packs that it couldn't fill outnumber the filled ones by this


@compiled
def _add(sums: UInt64, row: int, reach: int, slot: int, room: int) -> int:
    """Write the sums of row `row` with and without one more item into the next row; returns the largest sum.

    Sums over `room` are dropped. `reach` is the largest sum of `row`; bits behind it are undefined.
    """
    before, after = sums[row], sums[row + 1]
    largest = min(reach + slot, room)
    words = (largest >> 6) + 1
    for word in range((reach >> 6) + 1, words):
        before[word] = 0
    whole, left = slot >> 6, np.uint64(slot & 63)
    for word in range(min(whole, words)):
        after[word] = before[word]
    if left == 0:
        for word in range(whole, words):
            after[word] = before[word] | before[word - whole]
    else:
        right = np.uint64(64) - left
        if whole < words:
            after[whole] = before[whole] | (before[0] << left)
        for word in range(whole + 1, words):
            moved = (before[word - whole] << left) | (before[word - whole - 1] >> right)
            after[word] = before[word] | moved
    return largest


@compiled
def _has(sums: UInt64, row: int, value: int) -> bool:
    """Whether a row holds a sum."""
    return (sums[row, value >> 6] >> np.uint64(value & 63)) & _ONE != 0


@compiled
def _largest(sums: UInt64, row: int, reach: int) -> int:
    """The largest sum of a row that is at most `reach`; every row holds 0."""
    at = reach
    word = sums[row, at >> 6] << np.uint64(63 - (at & 63))
    while word == 0:
        at = ((at >> 6) << 6) - 1
        word = sums[row, at >> 6]
    while word >> np.uint64(63) == 0:
        word <<= _ONE
        at -= 1
    return at


@compiled
def _take(
    slots: Int32,
    unit: int,
    pack: Int32,
    size: int,
    summed: Int32,
    tried: int,
    sums: UInt64,
    reaches: Int64,
) -> int:
    """Append the items of the largest sum to a pack of `size` items; returns its new size."""
    left = _largest(sums, tried, reaches[tried])
    for row in range(tried - 1, -1, -1):
        if left > reaches[row] or not _has(sums, row, left):
            pack[size] = summed[row]
            size += 1
            left -= (slots[summed[row]] + unit - 1) // unit
    return size


@compiled
def _choose(
    after: Int32,
    at: int,
    num_others: int,
    slots: Int32,
    room: int,
    least: int,
    others: Int32,
    summed: Int32,
    sums: UInt64,
    reaches: Int64,
) -> tuple[int, int, int]:
    """Find items that fill a room; returns how many are taken in order, how many are summed, and the unit of sums.

    `after` is a circular linked list of the free items, read from behind `at`; its last entry joins the ends. Written
    are `others` (the items taken in order), `summed`, `sums` (row r: the subset sums of the first r summed items) and
    `reaches` (the largest sum of each row). Once PATIENT items are summed, a sum of `least` slots is enough.
    """
    end = after.size - 1
    seen, passed, fitting, held, is_over = 0, 0, 0, 0, 0
    while seen < num_others and passed < PASSED and is_over == 0:
        at = after[at] if after[at] < end else after[end]
        seen += 1
        if slots[at] > room:
            passed += 1
            continue
        others[fitting] = at
        if held + slots[at] > room:
            is_over = 1
        else:
            held += slots[at]
            fitting += 1
    sure = max(fitting - UNSURE, 0)
    for index in range(sure):
        room -= slots[others[index]]
        least -= slots[others[index]]
    unit = room // FINEST + 1
    index, tried, reach, goal = sure, 0, 0, room // unit
    sums[0, 0] = _ONE
    while tried < SUMMED and not (reach == goal and _has(sums, tried, goal)):
        if tried >= PATIENT and _largest(sums, tried, reach) * unit >= least:
            break
        if index < fitting + is_over:
            item = others[index]
            index += 1
        elif seen < num_others and passed < PASSED:
            at = after[at] if after[at] < end else after[end]
            seen += 1
            passed += 1
            item = at
        else:
            break
        if slots[item] <= room:
            summed[tried] = item
            reach = _add(sums, tried, reach, (slots[item] + unit - 1) // unit, goal)
            tried += 1
            reaches[tried] = reach
    return sure, tried, unit


@compiled
def fill(
    order: Int32,
    slots: Int32,
    capacity: int,
    least: int,
    max_documents: int,
    from_first: bool,
    pack_of: Int32,
) -> int:
    """Fill a pack around each free item of `order` if it gets at least `least` slots; returns the number of packs.

    Free items are read from the first one on if `from_first`, else in a circle from the one around which the pack is
    filled. `pack_of` is written; it is -1 for items that stay free.
    """
    end = slots.size
    after, before = np.empty(end + 1, np.int32), np.empty(end + 1, np.int32)
    num_free, left, last = 0, 0, end
    for item in range(end):
        pack_of[item] = -1
        if slots[item] > 0:
            after[last], before[item] = item, last
            last = item
            num_free += 1
            left += slots[item]
    after[last], before[end] = end, last
    sums = np.empty((SUMMED + 1, (min(capacity, FINEST) >> 6) + 1), np.uint64)
    reaches = np.zeros(SUMMED + 1, np.int64)
    pack, summed = np.empty(end, np.int32), np.empty(SUMMED, np.int32)
    num_packs, failed = 0, 0
    for turn in range(order.size):
        if left < least or failed > FAILED + num_packs:
            break
        seed = order[turn]
        if slots[seed] == 0 or pack_of[seed] >= 0:
            continue
        after[before[seed]], before[after[seed]] = after[seed], before[seed]
        at, room = end if from_first else before[seed], capacity - slots[seed]
        size, tried, unit = _choose(
            after, at, num_free - 1, slots, room, least - slots[seed], pack, summed, sums, reaches
        )
        size = _take(slots, unit, pack, size, summed, tried, sums, reaches)
        size = min(size, max_documents - 1)  # the first of them may still reach `least`
        held = np.int64(slots[seed])
        for index in range(size):
            held += slots[pack[index]]
        if held < least:
            after[before[seed]], before[after[seed]] = seed, seed
            failed += 1
            continue
        for index in range(size):
            item = pack[index]
            pack_of[item] = num_packs
            after[before[item]], before[after[item]] = after[item], before[item]
        pack_of[seed] = num_packs
        num_free -= size + 1
        left -= held
        num_packs += 1
    return num_packs
