"""Kernels of `partition` over flat arrays; `tests/oracles/plan.py` defines in plain Python what each returns.

The differencing method merges states, each a division of some items into subsets. The subsets of a state, and the
items of a subset, are linked lists, so that the cost of a merge depends only on what changes. A state stores no empty
subsets: 10^5 items in 10^3 parts need memory for 10^5 subsets, not 10^8.
"""

# Kernels mix Python and numpy integers, which numba types by itself.
# mypy: disable-error-code="assignment,return-value,no-any-return"

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from varlen.jit import compiled

Int32 = NDArray[np.int32]
Weights = NDArray[Any]


_HEAD, _TAIL, _COUNT, _BEFORE, _AFTER = range(5)
"""Columns of `subsets`, int32 `[num_items, 5]`: first and last item, number of items, previous and next subset."""


@compiled
def _is_above(totals: Weights, subsets: Int32, one: int, other: int) -> bool:
    """Whether a subset is sorted before another: heavier, then of more items, then by its first item."""
    if totals[one] != totals[other]:
        return totals[one] > totals[other]
    if subsets[one, _COUNT] != subsets[other, _COUNT]:
        return subsets[one, _COUNT] > subsets[other, _COUNT]
    return subsets[one, _HEAD] > subsets[other, _HEAD]


@compiled
def _key(
    totals: Weights, subsets: Int32, ends: Int32, sizes: Int32, state: int, num_parts: int
) -> tuple[Any, Any, int, int, int]:
    """Return the heap key of a state: the largest difference first, then the heaviest subset; and the state."""
    first = ends[state, 0]
    spread = totals[first]
    if sizes[state] == num_parts:
        spread -= totals[ends[state, 1]]
    count, head = subsets[first, _COUNT], subsets[first, _HEAD]
    return (-spread, -totals[first], -np.int64(count), -np.int64(head), np.int64(state))


@compiled
def _join(
    one: int,
    other: int,
    swapped: bool,
    shared: int,
    totals: Weights,
    subsets: Int32,
    following: Int32,
    fresh: Int32,
) -> int:
    """Join `shared` subsets of a state, from its lightest (`one`) up, with those of another, from `other` down.

    With `swapped`, the items of `other` come first. `fresh` gets the joined subsets by falling weight. Returns the
    lightest subset that was not joined, or -1.
    """
    for joined in range(shared):
        next_one, next_other = subsets[one, _BEFORE], subsets[other, _AFTER]
        first, second = (other, one) if swapped else (one, other)
        following[subsets[first, _TAIL]] = subsets[second, _HEAD]
        head, tail = subsets[first, _HEAD], subsets[second, _TAIL]
        subsets[one, _HEAD], subsets[one, _TAIL] = head, tail
        subsets[one, _COUNT] += subsets[other, _COUNT]
        totals[one] += totals[other]
        index = joined
        while index > 0 and _is_above(totals, subsets, one, fresh[index - 1]):
            fresh[index] = fresh[index - 1]
            index -= 1
        fresh[index] = one
        one, other = next_one, next_other
    return one


@compiled
def _insert(
    ends: Int32, fresh: Int32, num_fresh: int, rest: int, num_rest: int, totals: Weights, subsets: Int32
) -> None:
    """Insert subsets into the sorted list of a state, whose first and last subset are `ends` (-1 if it is empty).

    These are the `num_fresh` first of `fresh`, and `num_rest` linked subsets from `rest` on, both by falling
    weight.
    """
    before, after, turn = -1, ends[0], 0
    while turn < num_fresh or num_rest > 0:
        if num_rest == 0 or (turn < num_fresh and _is_above(totals, subsets, fresh[turn], rest)):
            new = fresh[turn]
            turn += 1
        else:
            new = rest
            rest = subsets[rest, _AFTER]
            num_rest -= 1
        if ends[1] >= 0 and _is_above(totals, subsets, ends[1], new):
            before, after = ends[1], -1
        while after >= 0 and _is_above(totals, subsets, after, new):
            before = after
            after = subsets[after, _AFTER]
        subsets[new, _BEFORE], subsets[new, _AFTER] = before, after
        if before >= 0:
            subsets[before, _AFTER] = new
        else:
            ends[0] = new
        if after >= 0:
            subsets[after, _BEFORE] = new
        else:
            ends[1] = new
        before = new


@compiled
def karmarkar_karp(weights: Weights, num_parts: int, is_equal: bool, part_of: Int32) -> None:
    """Divide items by the largest differencing method.

    A subset has the number of its initial item. The subsets of a state are linked by falling weight, and the smaller
    of two states is merged into the larger.
    """
    n = weights.size
    rising = np.argsort(weights, kind="mergesort")
    totals = weights.copy()
    following = np.full(n, -1, np.int32)
    subsets = np.full((n, 5), -1, np.int32)
    size = num_parts if is_equal else 1
    num_states = n // size
    ends, sizes = np.empty((num_states, 2), np.int32), np.full(num_states, size, np.int32)
    for turn in range(n):
        item = rising[turn]
        subsets[item, _HEAD], subsets[item, _TAIL], subsets[item, _COUNT] = item, item, 1
        if turn % size:
            subsets[item, _AFTER], subsets[rising[turn - 1], _BEFORE] = rising[turn - 1], item
    for state in range(num_states):
        ends[state, 0], ends[state, 1] = rising[(state + 1) * size - 1], rising[state * size]
    heap = [_key(totals, subsets, ends, sizes, state, num_parts) for state in range(num_states)]
    heapify(heap)
    fresh = np.empty(num_parts, np.int32)
    while len(heap) > 1:
        one, other = heappop(heap)[4], heappop(heap)[4]
        base, added = (one, other) if sizes[one] >= sizes[other] else (other, one)
        shared = max(sizes[base] + sizes[added] - num_parts, 0)
        num_rest = sizes[added] - shared
        rest = ends[added, 0]
        late = rest
        for _ in range(num_rest):
            late = subsets[late, _AFTER]
        last = _join(ends[base, 1], late, base != one, shared, totals, subsets, following, fresh)
        ends[base, 1] = last
        if last >= 0:
            subsets[last, _AFTER] = -1
        else:
            ends[base, 0] = -1
        _insert(ends[base], fresh, shared, rest, num_rest, totals, subsets)
        sizes[base] += num_rest
        heappush(heap, _key(totals, subsets, ends, sizes, base, num_parts))
    state = heap[0][4]
    subset = ends[state, 0]
    for part in range(sizes[state]):
        item = subsets[subset, _HEAD]
        while item >= 0:
            part_of[item] = part
            item = following[item]
        subset = subsets[subset, _AFTER]


@compiled
def greedy(order: Int32, weights: Weights, num_parts: int, is_equal: bool, part_of: Int32) -> None:
    """Assign each item, in order, to the lightest part; for equal sizes, to the lightest of the smallest parts."""
    zero = weights[0] - weights[0]
    loads = [(np.int64(0), zero, np.int64(part)) for part in range(num_parts)]
    more = np.int64(1) if is_equal else np.int64(0)
    for turn in range(order.size):
        item = order[turn]
        count, load, part = heappop(loads)
        part_of[item] = part
        heappush(loads, (count + more, load + weights[item], part))


@compiled
def _settle(by_load: Int32, loads: Weights, index: int) -> None:
    """Move one part to its position by rising load."""
    part = by_load[index]
    while index > 0:
        other = by_load[index - 1]
        if loads[other] < loads[part] or (loads[other] == loads[part] and other < part):
            break
        by_load[index] = other
        index -= 1
    while index + 1 < by_load.size:
        other = by_load[index + 1]
        if loads[part] < loads[other] or (loads[part] == loads[other] and part < other):
            break
        by_load[index] = other
        index += 1
    by_load[index] = part


@compiled
def _exchange(weights: Weights, following: Int32, heavy: int, light: int, gap: Any, is_equal: bool) -> Any:
    """Return the item to move and the one to move back (-1 for none) that best even out two parts; -1 if none do.

    Both lists are read once: for a lighter item, the one that evens out is lighter too.
    """
    best, found, other = gap, -1, -1
    above, below = -2, light  # the lightest item that is too heavy to even out, and the next one
    given = heavy
    while given >= 0:
        while below >= 0 and 2 * (weights[given] - weights[below]) < gap:
            if above < 0 or weights[below] != weights[above]:
                above = below
            below = following[below]
        for turn in range(3):
            taken = above if turn == 0 else below if turn == 1 else -1
            if taken == -2 or (taken < 0 and is_equal):
                continue
            moved = weights[given]
            if taken >= 0:
                moved -= weights[taken]
            distance = abs(2 * moved - gap)
            if distance < best:
                best, found, other = distance, given, taken
        given = following[given]
    return found, other


@compiled
def _move_item(item: int, source: int, target: int, firsts: Int32, following: Int32, rank: Int32) -> None:
    """Move an item from the list of one part to that of another, both sorted by rank."""
    if firsts[source] == item:
        firsts[source] = following[item]
    else:
        before = firsts[source]
        while following[before] != item:
            before = following[before]
        following[before] = following[item]
    if firsts[target] < 0 or rank[firsts[target]] > rank[item]:
        following[item] = firsts[target]
        firsts[target] = item
        return
    before = firsts[target]
    while following[before] >= 0 and rank[following[before]] < rank[item]:
        before = following[before]
    following[item] = following[before]
    following[before] = item


@compiled
def improve(
    order: Int32, weights: Weights, num_parts: int, is_equal: bool, steps: int, part_of: Int32
) -> int:
    """Move an item of the heaviest part, or swap it, as long as that makes the part lighter; returns steps left."""
    n = order.size
    rank, following = np.empty(n, np.int32), np.empty(n, np.int32)
    firsts, counts = np.full(num_parts, -1, np.int32), np.zeros(num_parts, np.int32)
    loads = np.zeros(num_parts, weights.dtype)
    for turn in range(n - 1, -1, -1):
        item = order[turn]
        part = part_of[item]
        rank[item], following[item] = turn, firsts[part]
        firsts[part] = item
        counts[part] += 1
        loads[part] += weights[item]
    by_load = np.arange(num_parts).astype(np.int32)
    for part in range(num_parts):
        _settle(by_load[: part + 1], loads, part)
    while True:
        heavy = by_load[num_parts - 1]
        given, taken, chosen = -1, -1, 0
        while given < 0:
            light = by_load[chosen]
            gap = loads[heavy] - loads[light]
            cost = counts[heavy] + counts[light] + 1
            if gap <= 0 or cost > steps:
                return steps
            steps -= cost
            given, taken = _exchange(weights, following, firsts[heavy], firsts[light], gap, is_equal)
            chosen += 1
        _move_item(given, heavy, light, firsts, following, rank)
        loads[heavy] -= weights[given]
        loads[light] += weights[given]
        part_of[given] = light
        if taken >= 0:
            _move_item(taken, light, heavy, firsts, following, rank)
            loads[light] -= weights[taken]
            loads[heavy] += weights[taken]
            part_of[taken] = heavy
        else:
            counts[heavy] -= 1
            counts[light] += 1
        _settle(by_load, loads, num_parts - 1)
        index = 0
        while by_load[index] != light:
            index += 1
        _settle(by_load, loads, index)
