"""Kernels of `assign`; `tests/oracles/plan_assign.py` defines in plain Python what each returns.

Work is added up in the order of documents, so that a kernel and its oracle round alike.
"""

# Kernels mix Python and numpy integers, which numba types by itself.
# mypy: disable-error-code="assignment,return-value,no-any-return"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from varlen.jit import compiled

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


@compiled
def deal(order: Int32, work: Float64, tokens: Int64, limits: Int64, loads: Float64, group_of: Int32) -> int:
    """Assign each document, in order, to the least loaded group with room for it; returns how many are left."""
    now, room, left_over = loads.copy(), limits.copy(), 0
    for turn in range(order.size):
        item = order[turn]
        best = -1
        for group in range(now.size):
            if tokens[item] <= room[group] and (best < 0 or now[group] < now[best]):
                best = group
        group_of[item] = best
        if best < 0:
            left_over += 1
            continue
        now[best] += work[item]
        room[best] -= tokens[item]
    return left_over


@compiled
def _closest(
    given: int,
    other: int,
    gap: float,
    give_room: int,
    take_room: int,
    near: int,
    links: Int32,
    work: Float64,
    tokens: Int64,
    limit: float,
) -> tuple[int, float]:
    """Return the neighbour of `other` that best evens out if it is swapped for `given`, and the gap left."""
    found, best = -1, limit
    for way in range(2):
        candidate = other if way == 0 else (links[other, 1] if other >= 0 else -1)
        seen = 0
        while candidate >= 0 and seen < near:
            more = tokens[given] - tokens[candidate]
            if more <= take_room and -more <= give_room:
                distance = abs(2 * (work[given] - work[candidate]) - gap)
                if distance < best:
                    best, found = distance, candidate
            candidate = links[candidate, way]
            seen += 1
    return found, best


@compiled
def _exchange(
    heavy: int,
    light: int,
    ends: Int32,
    links: Int32,
    work: Float64,
    tokens: Int64,
    room: Int64,
    gap: float,
    near: int,
) -> tuple[int, int]:
    """Return the document to move and the one to move back (-1 for none) that best even out; -1 if none do."""
    best, found, other = gap, -1, -1
    below = ends[light, 0]  # the first document of the light group that isn't too heavy to even out
    given = ends[heavy, 0]
    while given >= 0:
        while below >= 0 and links[below, 0] >= 0 and 2 * (work[given] - work[below]) < gap:
            below = links[below, 0]
        if tokens[given] <= room[light]:
            distance = abs(2 * work[given] - gap)
            if distance < best:
                best, found, other = distance, given, -1
        if below >= 0:
            taken, distance = _closest(
                given, below, gap, room[heavy], room[light], near, links, work, tokens, best
            )
            if taken >= 0:
                best, found, other = distance, given, taken
        given = links[given, 0]
    return found, other


@compiled
def _move_item(item: int, source: int, target: int, ends: Int32, links: Int32, rank: Int32) -> None:
    """Move a document from the list of one group to that of another, both sorted by rank."""
    after, before = links[item, 0], links[item, 1]
    if before >= 0:
        links[before, 0] = after
    else:
        ends[source, 0] = after
    if after >= 0:
        links[after, 1] = before
    else:
        ends[source, 1] = before
    before, after = -1, ends[target, 0]
    while after >= 0 and rank[after] < rank[item]:
        before, after = after, links[after, 0]
    links[item, 0], links[item, 1] = after, before
    if before >= 0:
        links[before, 0] = item
    else:
        ends[target, 0] = item
    if after >= 0:
        links[after, 1] = item
    else:
        ends[target, 1] = item


@compiled
def lighten(
    order: Int32,
    work: Float64,
    tokens: Int64,
    limits: Int64,
    loads: Float64,
    enough: float,
    near: int,
    steps: int,
    group_of: Int32,
) -> int:
    """Move a document of the heaviest group, or swap it, as long as that makes it lighter; returns steps left."""
    num_groups = loads.size
    now, room, counts = loads.copy(), limits.copy(), np.zeros(num_groups, np.int64)
    rank = np.empty(order.size, np.int32)
    ends, links = np.full((num_groups, 2), -1, np.int32), np.full((order.size, 2), -1, np.int32)
    for turn in range(order.size):
        item = order[turn]
        group = group_of[item]
        rank[item] = turn
        links[item, 1] = ends[group, 1]
        if ends[group, 1] >= 0:
            links[ends[group, 1], 0] = item
        else:
            ends[group, 0] = item
        ends[group, 1] = item
        now[group] += work[item]
        room[group] -= tokens[item]
        counts[group] += 1
    while True:
        by_load = np.argsort(now, kind="mergesort")
        heavy = by_load[num_groups - 1]
        given, taken, chosen = -1, -1, 0
        if now[heavy] <= enough:
            return steps
        while given < 0:
            light = by_load[chosen]
            gap = now[heavy] - now[light]
            cost = counts[heavy] * near + counts[light] + num_groups
            if gap <= 0 or cost > steps:
                return steps
            steps -= cost
            given, taken = _exchange(heavy, light, ends, links, work, tokens, room, gap, near)
            chosen += 1
        for turn in range(2):
            item, source, target = (given, heavy, light) if turn == 0 else (taken, light, heavy)
            if item < 0:
                continue
            _move_item(item, source, target, ends, links, rank)
            group_of[item] = target
            now[source] -= work[item]
            now[target] += work[item]
            room[source] += tokens[item]
            room[target] -= tokens[item]
            counts[source] -= 1
            counts[target] += 1


@compiled
def _next_group(
    now: Float64, room: Int64, size: int, last_load: float, last: int, work: float, best: float
) -> int:
    """Return the next group to try, by rising load, with which the document stays below the best; -1 for none."""
    found = -1
    for group in range(now.size):
        load = now[group]
        if load < last_load or (load == last_load and group <= last):
            continue
        if (found >= 0 and load >= now[found]) or size > room[group] or load + work >= best:
            continue
        is_twin = False
        for other in range(group):
            is_twin |= now[other] == load and room[other] == room[group]
        if not is_twin:
            found = group
    return found


@compiled
def search(
    order: Int32,
    work: Float64,
    tokens: Int64,
    limits: Int64,
    loads: Float64,
    enough: float,
    nodes: int,
    group_of: Int32,
) -> int:
    """Branch and bound for a lighter heaviest group, least loaded groups first; returns nodes left."""
    n = order.size
    now, room = loads.copy(), limits.copy()
    best = np.inf
    if n and group_of[order[0]] >= 0:
        for turn in range(n):
            now[group_of[order[turn]]] += work[order[turn]]
        best = now.max()
        now[:] = loads
    rest = np.zeros(n + 1, np.float64)
    for turn in range(n - 1, -1, -1):
        rest[turn] = rest[turn + 1] + work[order[turn]]
    least = work[order[n - 1]] if n else 0.0
    chosen, before = np.full(n, -1, np.int32), np.zeros(n, np.float64)
    depth = 0 if n else -1
    while depth >= 0 and best > enough:
        item, group, last, last_load = order[depth], chosen[depth], -1, -1.0
        if group >= 0:
            now[group] = before[depth]
            room[group] += tokens[item]
            last, last_load = group, now[group]
        group = -1
        if nodes > 0:
            group = _next_group(now, room, tokens[item], last_load, last, work[item], best)
        chosen[depth] = group
        if group < 0:
            depth -= 1
            continue
        nodes -= 1
        before[depth] = now[group]
        now[group] += work[item]
        room[group] -= tokens[item]
        if depth == n - 1:
            best = now.max()
            for turn in range(n):
                group_of[order[turn]] = chosen[turn]
            continue
        usable = 0.0
        for other in range(now.size):
            if now[other] + least < best:
                usable += best - now[other]
        if rest[depth + 1] < usable:
            depth += 1
            chosen[depth] = -1
    return nodes


@compiled
def _gather(
    order: Int32, group_of: Int32, groups: Int32, most: int, work: Float64, base: Float64, items: Int32
) -> int:
    """List the lightest documents of some groups by falling work, and add the work of the others to `base`."""
    found = 0
    for turn in range(order.size - 1, -1, -1):
        item = order[turn]
        for number in range(groups.size):
            if group_of[item] == groups[number]:
                if found < most:
                    found += 1
                    items[most - found] = item
                else:
                    base[number] += work[item]
    return found


@compiled
def regroup(
    order: Int32,
    work: Float64,
    tokens: Int64,
    limits: Int64,
    loads: Float64,
    enough: float,
    most: int,
    nodes: int,
    steps: int,
    group_of: Int32,
) -> int:
    """Search new assignments of the light documents of the heaviest and two other groups; returns steps left."""
    num_groups = loads.size
    now, room = loads.copy(), limits.copy()
    for turn in range(order.size):
        now[group_of[order[turn]]] += work[order[turn]]
        room[group_of[order[turn]]] -= tokens[order[turn]]
    listed, groups = np.empty(most, np.int32), np.empty(3, np.int32)
    part, base, free = np.empty(order.size, np.int32), np.empty(3, np.float64), np.empty(3, np.int64)
    first = 0
    by_load = np.argsort(now, kind="mergesort")
    while first + 2 < num_groups and now[by_load[num_groups - 1]] > enough and steps >= order.size + nodes:
        groups[0], groups[1], groups[2] = by_load[num_groups - 1], by_load[first], by_load[first + 1]
        for number in range(3):
            base[number] = loads[groups[number]]
        count = _gather(order, group_of, groups, most, work, base, listed)
        items = listed[most - count :]
        for number in range(3):
            free[number] = room[groups[number]]
            for turn in range(count):
                if group_of[items[turn]] == groups[number]:
                    part[items[turn]] = number
                    free[number] += tokens[items[turn]]
        was = now[groups[0]]
        left = search(items, work, tokens, free, base, enough, nodes, part)
        steps -= order.size + nodes - left
        for turn in range(count):
            base[part[items[turn]]] += work[items[turn]]
        if base.max() >= was:
            first += 1
            continue
        for turn in range(count):
            group_of[items[turn]] = groups[part[items[turn]]]
            free[part[items[turn]]] -= tokens[items[turn]]
        for number in range(3):
            now[groups[number]], room[groups[number]] = base[number], free[number]
        first = 0
        by_load = np.argsort(now, kind="mergesort")
    return steps
