"""Packing kernels that search the packs in a tree: first-fit (by free space) and balanced (by work and space).

`tests/oracles/pack.py` says in plain Python what each must return.
Items, slots, sizes and pack
numbers are as in `kernels.py`.
"""

# Kernels mix Python and numpy integers, which numba types by itself.
# mypy: disable-error-code="assignment,return-value,no-any-return"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from varlen.jit import compiled

Int32 = NDArray[np.int32]
Float64 = NDArray[np.float64]

_FAN = 64  # children of a node: one or two vector registers of free spaces, scanned faster than a branch


@compiled
def _scan(rooms: Int32, start: int, stop: int, slot: int) -> int:
    """First index in [start, stop) with at least `slot` free, or `stop`."""
    for index in range(start, stop):
        if rooms[index] >= slot:
            return index
    return stop


@compiled
def _first_room(leaf: Int32, block: Int32, chunk: Int32, start: int, stop: int, slot: int) -> int:
    """First pack in [start, stop) with at least `slot` tokens free, or `stop`."""
    at = start
    while at < stop:
        if at % _FAN != 0:
            end = min(stop, (at // _FAN + 1) * _FAN)
            found = _scan(leaf, at, end, slot)
            if found < end:
                return found
            at = end
            continue
        parent = at // _FAN
        if parent % _FAN != 0:
            end = (parent // _FAN + 1) * _FAN
        else:
            grand = _scan(chunk, parent // _FAN, chunk.size, slot)
            if grand == chunk.size:
                return stop
            parent = grand * _FAN
            end = parent + _FAN
        end = min(end, block.size)
        found = _scan(block, parent, end, slot)
        at = found * _FAN
        if found < end:
            last = min(stop, at + _FAN)
            hit = _scan(leaf, at, last, slot)
            if hit < last:
                return hit
            at = last
    return stop


@compiled
def _lower(leaf: Int32, block: Int32, chunk: Int32, pack: int, room: int) -> None:
    """Set a pack's free space and mend the maxima above it."""
    was = leaf[pack]
    leaf[pack] = room
    parent = pack // _FAN
    if was < block[parent]:
        return
    block[parent] = leaf[parent * _FAN : (parent + 1) * _FAN].max()
    grand = parent // _FAN
    if was == chunk[grand]:
        chunk[grand] = block[grand * _FAN : (grand + 1) * _FAN].max()


@compiled
def first_fit(
    order: Int32,
    slots: Int32,
    sizes: Int32,
    capacity: int,
    max_documents: int,
    most_packs: int,
    pack_of: Int32,
) -> int:
    """Put each item, in the order given, into the first pack with space; returns the number of packs.

    Space only shrinks, so an item as long as the one before starts its search where that one ended: equal
    lengths in a row cost one sweep over the packs.
    """
    blocks = most_packs // _FAN + 1
    leaf = np.zeros(blocks * _FAN, np.int32)
    block = np.zeros((blocks // _FAN + 1) * _FAN, np.int32)
    chunk = np.zeros(blocks // _FAN + 1, np.int32)
    places = np.empty(most_packs, np.int32)
    num_packs = 0
    last_slot = 0
    last_size = 0
    last_pack = 0
    for turn in range(order.size):
        item = order[turn]
        slot = slots[item]
        if slot == 0:
            pack_of[item] = -1
            continue
        size = sizes[item]
        start = last_pack if slot == last_slot and size == last_size else 0
        pack = _first_room(leaf, block, chunk, start, num_packs, slot)
        while pack < num_packs and places[pack] < size:
            pack = _first_room(leaf, block, chunk, pack + 1, num_packs, slot)
        if pack == num_packs:
            num_packs += 1
            places[pack] = max_documents
            leaf[pack] = capacity
            block[pack // _FAN] = capacity
            chunk[pack // (_FAN * _FAN)] = capacity
        pack_of[item] = pack
        places[pack] -= size
        _lower(leaf, block, chunk, pack, leaf[pack] - slot if places[pack] > 0 else 0)
        last_slot, last_size, last_pack = slot, size, pack
    return num_packs


@compiled
def _lightest(
    work: Float64, room: Int32, places: Int32, leaves: int, slot: int, size: int, stack: Int32
) -> int:
    """The pack with the least work among those with space, the first of equals, or -1.

    `work` and `room` are complete binary trees, node n above 2n and 2n + 1, the packs at `leaves + pack`:
    `work` holds minima and `room` maxima. Branch and bound: the lighter child first.
    """
    best = -1
    best_work = np.inf
    stack[0] = 1
    depth = 1
    while depth > 0:
        depth -= 1
        node = stack[depth]
        if room[node] < slot or work[node] > best_work:
            continue
        if node >= leaves:
            pack = node - leaves
            if places[pack] >= size and (work[node] < best_work or pack < best):
                best = pack
                best_work = work[node]
            continue
        if best >= 0 and work[node] == best_work:
            first = node
            while first < leaves:
                first *= 2
            if first - leaves > best:
                continue
        left = 2 * node
        if work[left] <= work[left + 1]:
            stack[depth] = left + 1
            stack[depth + 1] = left
        else:
            stack[depth] = left
            stack[depth + 1] = left + 1
        depth += 2
    return best


@compiled
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
    packs. With items in falling order of work this is the longest-processing-time rule (Graham 1969).
    """
    leaves = 1
    while leaves < most_packs:
        leaves *= 2
    work = np.full(2 * leaves, np.inf)
    room = np.zeros(2 * leaves, np.int32)
    places = np.full(leaves, max_documents, np.int32)
    work[leaves : leaves + num_packs] = 0.0
    room[leaves : leaves + num_packs] = capacity
    for node in range(leaves - 1, 0, -1):
        work[node] = min(work[2 * node], work[2 * node + 1])
        room[node] = max(room[2 * node], room[2 * node + 1])
    stack = np.empty(256, np.int32)
    for turn in range(order.size):
        item = order[turn]
        if slots[item] == 0:
            pack_of[item] = -1
            continue
        pack = _lightest(work, room, places, leaves, slots[item], sizes[item], stack)
        if pack < 0:
            pack = num_packs
            num_packs += 1
            work[leaves + pack] = 0.0
            room[leaves + pack] = capacity
        pack_of[item] = pack
        places[pack] -= sizes[item]
        node = leaves + pack
        work[node] += item_work[item]
        room[node] = room[node] - slots[item] if places[pack] > 0 else 0
        node //= 2
        while node > 0:
            work[node] = min(work[2 * node], work[2 * node + 1])
            room[node] = max(room[2 * node], room[2 * node + 1])
            node //= 2
    return num_packs
