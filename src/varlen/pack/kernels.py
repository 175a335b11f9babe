"""Packing kernels over flat arrays; `tests/oracles/pack.py` defines in plain Python what each returns.

An *item* stays in one pack: a document, a piece of one, or a group of documents. Items have slots (tokens that they
take) and sizes (documents that they count as); an item with slot 0 is skipped and has pack -1. Packs are numbered in
the order in which they are opened; `arrange` renumbers them by their first document.

All packs with the same free space (`room`) are in one first-in-first-out queue, and a two-level bitmap finds the
smallest sufficient room in a few instructions. `quota` counts the documents that a pack can still take.
Best-fit-decreasing places all items of one length at once (histogram packing: Krell et al. 2021,
arXiv:2107.02027), so its search takes as long for a thousand documents as for a billion.
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
UInt64 = NDArray[np.uint64]
Float64 = NDArray[np.float64]

_ONE = np.uint64(1)
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_BIT_OF = np.zeros(64, np.int64)
for _bit in range(64):
    _BIT_OF[((1 << _bit) * int(_DE_BRUIJN) & 0xFFFFFFFFFFFFFFFF) >> 58] = _bit


@compiled
def _lowest_bit(word: np.uint64) -> int:
    """Number of the lowest set bit of a non-zero word (de Bruijn multiplication)."""
    return _BIT_OF[((word & (~word + _ONE)) * _DE_BRUIJN) >> np.uint64(58)]


@compiled
def _mark(low: UInt64, high: UInt64, value: int) -> None:
    """Put a value into the bitmap set."""
    word = value >> 6
    low[word] |= _ONE << np.uint64(value & 63)
    high[word >> 6] |= _ONE << np.uint64(word & 63)


@compiled
def _unmark(low: UInt64, high: UInt64, value: int) -> None:
    """Take a value out of the bitmap set."""
    word = value >> 6
    low[word] &= ~(_ONE << np.uint64(value & 63))
    if low[word] == 0:
        high[word >> 6] &= ~(_ONE << np.uint64(word & 63))


@compiled
def _smallest_from(low: UInt64, high: UInt64, value: int) -> int:
    """Smallest number of the bitmap set that is at least `value`, or -1."""
    word = value >> 6
    if word >= low.size:
        return -1
    bits = (low[word] >> np.uint64(value & 63)) << np.uint64(value & 63)
    if bits != 0:
        return (word << 6) + _lowest_bit(bits)
    word += 1
    top = word >> 6
    if top >= high.size:
        return -1
    bits = (high[top] >> np.uint64(word & 63)) << np.uint64(word & 63)
    while bits == 0:
        top += 1
        if top >= high.size:
            return -1
        bits = high[top]
    word = (top << 6) + _lowest_bit(bits)
    return (word << 6) + _lowest_bit(low[word])


@compiled
def descending(slots: Int32, largest: int, order: Int32) -> None:
    """Write the items in order of falling slots, equal ones in input order: a counting sort."""
    begin = np.zeros(largest + 2, np.int64)
    for item in range(slots.size):
        begin[largest - slots[item] + 1] += 1
    for value in range(1, largest + 2):
        begin[value] += begin[value - 1]
    for item in range(slots.size):
        value = largest - slots[item]
        order[begin[value]] = item
        begin[value] += 1


@compiled(in_python=in_python.next_fit)
def next_fit(slots: Int32, sizes: Int32, capacity: int, max_documents: int, pack_of: Int32) -> int:
    """Fill one pack after the other in input order; returns the number of packs."""
    room = 0
    quota = 0
    num_packs = 0
    for item in range(slots.size):
        if slots[item] == 0:
            pack_of[item] = -1
            continue
        if room < slots[item] or quota < sizes[item]:
            num_packs += 1
            room = capacity
            quota = max_documents
        room -= slots[item]
        quota -= sizes[item]
        pack_of[item] = num_packs - 1
    return num_packs


@compiled
def best_fit(
    order: Int32, slots: Int32, sizes: Int32, capacity: int, max_documents: int, pack_of: Int32
) -> int:
    """Put each item, in the order given, where the least space stays free; returns the number of packs.

    Packs with equal free space are taken first in, first out.
    """
    fewest = max_documents  # packs with a smaller quota are not queued: they would slow down every search
    for item in range(slots.size):
        if slots[item] > 0:
            fewest = min(fewest, np.int64(sizes[item]))
    words = (capacity >> 6) + 1
    low = np.zeros(words, np.uint64)
    high = np.zeros((words >> 6) + 1, np.uint64)
    head = np.full(capacity + 1, -1, np.int32)
    tail = np.full(capacity + 1, -1, np.int32)
    waiting = np.empty(slots.size, np.int32)  # the next pack in the same class
    quota = np.empty(slots.size, np.int32)  # documents that a pack still takes
    num_packs = 0
    for turn in range(order.size):
        item = order[turn]
        slot = slots[item]
        if slot == 0:
            pack_of[item] = -1
            continue
        before = -1
        pack = -1
        room = _smallest_from(low, high, slot)
        while room >= 0:
            before = -1
            pack = head[room]
            while pack >= 0 and quota[pack] < sizes[item]:
                before = pack
                pack = waiting[pack]
            if pack >= 0:
                break
            room = _smallest_from(low, high, room + 1)
        if pack < 0:
            pack = num_packs
            num_packs += 1
            room = capacity
            quota[pack] = max_documents
        else:
            if before < 0:
                head[room] = waiting[pack]
            else:
                waiting[before] = waiting[pack]
            if tail[room] == pack:
                tail[room] = before
            if head[room] < 0:
                _unmark(low, high, room)
        pack_of[item] = pack
        room -= slot
        quota[pack] -= sizes[item]
        if room > 0 and quota[pack] >= max(fewest, 1):
            waiting[pack] = -1
            if head[room] < 0:
                head[room] = pack
                _mark(low, high, room)
            else:
                waiting[tail[room]] = pack
            tail[room] = pack
    return num_packs


@compiled
def _quotient(whole: int, part: int) -> int:
    """Integer quotient of positive numbers: exact below 2^52, and faster than a 64-bit division."""
    return int(float(whole) / float(part))


@compiled
def _plan_equal_lengths(
    counts: Int64,
    capacity: int,
    max_documents: int,
    low: UInt64,
    high: UInt64,
    ends: Int32,
    clusters: Int32,
    runs: Int32,
    run_offsets: Int64,
) -> int:
    """Run best-fit-decreasing over a histogram, `counts[s]` items of length s, for all packs filled alike at once.

    A row of `clusters` is a range of packs that were filled alike: first pack, packs, quota left, next cluster of
    the same free space; `ends` holds the first and last cluster of each free space. A row of `runs` says how items of
    one length are dealt out: first pack, packs, items per pack; runs of length s are `run_offsets[capacity -
    s]:run_offsets[capacity - s + 1]`.

    Returns the number of packs, or -1 if `clusters` or `runs` have too few rows.
    """
    num_clusters, num_runs, num_packs = 0, 0, 0
    for length in range(capacity, 0, -1):
        run_offsets[capacity - length] = num_runs
        left = counts[length]
        while left > 0:
            room = _smallest_from(low, high, length)
            if room < 0:
                room = capacity
                first = num_packs
                quota = max_documents
                each = min(_quotient(room, length), quota)
                packs = _quotient(left + each - 1, each)
                num_packs += packs
            else:
                cluster = ends[room, 0]
                first, quota = clusters[cluster, 0], clusters[cluster, 2]
                each = min(_quotient(room, length), quota)
                packs = clusters[cluster, 1]
                wanted = _quotient(left + each - 1, each)
                if packs <= wanted:
                    ends[room, 0] = clusters[cluster, 3]
                    if ends[room, 0] < 0:
                        _unmark(low, high, room)
                else:
                    packs = wanted
                    clusters[cluster, 0] += packs
                    clusters[cluster, 1] -= packs
            dealt = min(left, packs * each)
            if num_runs == runs.shape[0] or num_clusters + 2 > clusters.shape[0]:
                return -1
            runs[num_runs, 0] = first
            runs[num_runs, 1] = packs
            runs[num_runs, 2] = each
            num_runs += 1
            left -= dealt
            # `full` packs took `each` items; at most one more, the last, took fewer
            full = _quotient(dealt, each)
            taken = each if full > 0 else dealt
            many = max(full, 1)
            while many > 0:
                after = room - taken * length
                if after > 0 and quota > taken:
                    clusters[num_clusters, 0] = first
                    clusters[num_clusters, 1] = many
                    clusters[num_clusters, 2] = quota - taken
                    clusters[num_clusters, 3] = -1
                    if ends[after, 0] < 0:
                        ends[after, 0] = num_clusters
                        _mark(low, high, after)
                    else:
                        clusters[ends[after, 1], 3] = num_clusters
                    ends[after, 1] = num_clusters
                    num_clusters += 1
                if taken < each:
                    break
                first += full
                taken = dealt - full * each
                many = 1 if taken > 0 else 0
    run_offsets[capacity] = num_runs
    return num_packs


@compiled
def _deal_equal_lengths(slots: Int32, capacity: int, runs: Int32, now: Int32, pack_of: Int32) -> None:
    """Assign every item, in input order, to the next pack among the runs of its length.

    Row `capacity - length` of `now` is the position in the runs of that length: current pack, items left in it, packs
    left in its run, next run.
    """
    for item in range(slots.size):
        length = slots[item]
        if length == 0:
            pack_of[item] = -1
            continue
        key = capacity - length
        if now[key, 1] == 0:
            run = now[key, 3]
            if now[key, 2] == 0:
                now[key, 0] = runs[run, 0]
                now[key, 2] = runs[run, 1] - 1
                now[key, 1] = runs[run, 2]
                now[key, 3] = run + 1
            else:
                now[key, 0] += 1
                now[key, 2] -= 1
                now[key, 1] = runs[run - 1, 2]
        now[key, 1] -= 1
        pack_of[item] = now[key, 0]


@compiled
def _histogram(slots: Int32, counts: Int64) -> None:
    """Count the items of each length."""
    for item in range(slots.size):
        counts[slots[item]] += 1


def best_fit_decreasing(slots: Int32, capacity: int, max_documents: int, pack_of: Int32) -> int:
    """Best-fit over items from long to short, every item one document; returns the number of packs.

    The same packs as `best_fit` in `descending` order, in O(n) plus a few steps a distinct length.
    """
    counts = np.zeros(capacity + 1, np.int64)
    _histogram(slots, counts)
    counts[0] = 0
    run_offsets = np.zeros(capacity + 2, np.int64)
    rows = 4 * min(slots.size, capacity) + 64
    num_packs = -1
    while num_packs < 0:
        runs, clusters = np.empty((rows, 3), np.int32), np.empty((2 * rows, 4), np.int32)
        ends = np.full((capacity + 1, 2), -1, np.int32)
        space = (*_bitmap(capacity), ends, clusters, runs, run_offsets)
        num_packs = _plan_equal_lengths(counts, capacity, max_documents, *space)
        rows *= 4
    now = np.zeros((capacity + 1, 4), np.int32)
    now[:, 3] = run_offsets[:-1]
    _deal_equal_lengths(slots, capacity, runs, now, pack_of)
    return int(num_packs)


def _bitmap(largest: int) -> tuple[UInt64, UInt64]:
    """Return an empty bitmap set of the numbers up to `largest`: its words, and a bitmap of its non-zero words."""
    words = (largest >> 6) + 1
    return np.zeros(words, np.uint64), np.zeros((words >> 6) + 1, np.uint64)


# Kernels that search packs in a tree: first-fit (by free space) and balanced (by work and space).

_FAN = 64  # children of a node, which are scanned with vector instructions


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
    """Set a pack's free space and update the maxima above it."""
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

    Free space only shrinks, so an item as long as the one before starts its search where that one ended: a run of
    equal lengths costs one sweep over the packs.
    """
    blocks = most_packs // _FAN + 1
    leaf = np.zeros(blocks * _FAN, np.int32)
    block = np.zeros((blocks // _FAN + 1) * _FAN, np.int32)
    chunk = np.zeros(blocks // _FAN + 1, np.int32)
    quota = np.empty(most_packs, np.int32)
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
        while pack < num_packs and quota[pack] < size:
            pack = _first_room(leaf, block, chunk, pack + 1, num_packs, slot)
        if pack == num_packs:
            num_packs += 1
            quota[pack] = max_documents
            leaf[pack] = capacity
            block[pack // _FAN] = capacity
            chunk[pack // (_FAN * _FAN)] = capacity
        pack_of[item] = pack
        quota[pack] -= size
        _lower(leaf, block, chunk, pack, leaf[pack] - slot if quota[pack] > 0 else 0)
        last_slot, last_size, last_pack = slot, size, pack
    return num_packs


@compiled
def _lightest(
    work: Float64, room: Int32, quota: Int32, leaves: int, slot: int, size: int, stack: Int32
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
            if quota[pack] >= size and (work[node] < best_work or pack < best):
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
    packs. With items in falling order of work, this is the longest-processing-time rule (Graham 1969).
    """
    leaves = 1
    while leaves < most_packs:
        leaves *= 2
    work = np.full(2 * leaves, np.inf)
    room = np.zeros(2 * leaves, np.int32)
    quota = np.full(leaves, max_documents, np.int32)
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
        pack = _lightest(work, room, quota, leaves, slots[item], sizes[item], stack)
        if pack < 0:
            pack = num_packs
            num_packs += 1
            work[leaves + pack] = 0.0
            room[leaves + pack] = capacity
        pack_of[item] = pack
        quota[pack] -= sizes[item]
        node = leaves + pack
        work[node] += item_work[item]
        room[node] = room[node] - slots[item] if quota[pack] > 0 else 0
        node //= 2
        while node > 0:
            work[node] = min(work[2 * node], work[2 * node + 1])
            room[node] = max(room[2 * node], room[2 * node + 1])
            node //= 2
    return num_packs
