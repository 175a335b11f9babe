"""The kernel that fills packs to the brim: each around one item, with such others as sum up to what is left free.

`tests/oracles/pack_fill.py` says in plain Python what it must return.
Items, slots and pack numbers are as in
`kernels.py`.

Which of some items fill a pack best is told by the sums that they can make (the minimum bin slack of Gupta and Ho
1999): bit s of a row says whether items looked at so far can sum up to s, and a shift adds an item to all sums at
once. Only the last few items of a pack are chosen so. The others are those that come first, whatever their lengths:
were all chosen, the short ones would be left out more often than the long ones, and meet in later packs.
"""

# Kernels mix Python and numpy integers, which numba types by itself.
# mypy: disable-error-code="assignment,return-value,no-any-return"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from varlen.jit import compiled

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]

_ONE = np.uint64(1)


UNSURE = 8
"""Last items of those that fit one after the other in place of which `fill` looks for better ones."""
PASSED = 1024
"""Items that it passes by for a pack, at most."""
SUMMED = 256
"""Items whose sums it tells apart, at most."""
PATIENT = 32
"""Items of which it looks for those that leave no space at all; after them, for any that leave little."""
FINEST = 1 << 16
"""Sums that it tells apart, at most; in more space than that they are rounded up."""

FAILED = 256
"""Packs that it fails to fill before it gives up, beside as many as it has filled."""


@compiled
def _add(sums: UInt64, row: int, reach: int, slot: int, room: int) -> int:
    """Write the sums of row `row` with and without one more item into the next row; returns the largest, to `room`.

    Args:
        sums: uint64 `[rows, words]`; what stands in a row behind its largest sum means nothing.
        row: the sums so far.
        reach: the largest of them, at most `room`.
        slot: of the item.
        room: larger sums are of no use.
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
    """Write the items of the largest sum behind those that a pack holds; returns how many it holds then."""
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
    """Look for items that fill a room; returns how many come first, how many are summed, and in what unit.

    Args:
        after: int32 `[items + 1]`: the free item behind each one; the last number stands between last and first.
        at: the place behind which to begin.
        num_others: free items there are.
        slots: int32 `[items]`.
        room: slots that they can fill together.
        least: slots at which it is enough once PATIENT items are summed.
        others: int32 `[items]`, written: the items that come first.
        summed: int32 `[SUMMED]`, written: those that are summed.
        sums: uint64, written: row r holds the sums of the first r of those.
        reaches: int64, written: the largest sum of each row.
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
    """Fill a pack around each item of an order, if others fill it well enough; returns the number of packs.

    Args:
        order: int32 `[any]`: the items around which a pack is tried, those left out that a pack holds by then.
        slots: int32 `[items]`; items of slot 0 are skipped.
        capacity: slots that a pack can hold.
        least: slots that a pack must hold; else its items stay free.
        max_documents: items that a pack can hold.
        from_first: look at the free items from the first on; else from the one around which the pack is, and round.
        pack_of: int32 `[items]`, written: -1 for those that stay free.
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
        size = min(size, max_documents - 1)  # fewer of them may be enough
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
