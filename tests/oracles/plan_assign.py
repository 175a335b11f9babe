"""The kernels that give documents to groups, in plain Python: the specification, and the oracle of their tests.

Whoever changes one touches `kernels_assign.py` as well: compiled kernels are kept as long as their own file is
unchanged. Of all of them:

- `order`, int32: the documents to give, by falling work unless said
- `work`, float64 `[num_documents]`, of at least 0, and `tokens`, int64 `[num_documents]`
- `limits`, int64 `[num_groups]`: tokens that each group can hold
- `loads`, float64 `[num_groups]`: work that each group has before
- `enough`: stop where the heaviest group weighs no more
- `group_of`, int32 `[num_documents]`: a way that keeps to the limits, changed
"""

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


def deal(order: Int32, work: Float64, tokens: Int64, limits: Int64, loads: Float64, group_of: Int32) -> int:
    """Give each document, in the order given, to the least loaded group with room for its tokens.

    Args:
        order: all documents, in any order.
        group_of: written; -1 where no group has room.

    Returns:
        How many documents are left over.
    """
    now, room, left_over = loads.tolist(), limits.tolist(), 0
    for item in order.tolist():
        fitting = [group for group in range(len(now)) if tokens[item] <= room[group]]
        group = min(fitting, key=now.__getitem__, default=-1)
        group_of[item] = group
        if group < 0:
            left_over += 1
            continue
        now[group] += float(work[item])
        room[group] -= int(tokens[item])
    return left_over


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
    """Lighten the heaviest group as long as that goes by one document given away, or swapped for another.

    The lightest group that makes the pair lighter takes part, and of the exchanges with it that are looked at, the
    one that makes the two most alike; ties go to what is looked at first. For each document of the heavy group those
    are: giving it away, and swapping it for one of the `near` documents of the light group on either side of where
    the two groups would be even, nearest first, the lighter side before the heavier.

    Args:
        near: see above.
        steps: most steps to take; a look at a pair costs `near` for each document of the heavy group, one for each
            of the light group and one for each group.

    Returns:
        The steps that are left.
    """
    values, sizes = work.tolist(), tokens.tolist()
    rank = {item: number for number, item in enumerate(order.tolist())}
    members: list[list[int]] = [[] for _ in loads]
    now, room = loads.tolist(), limits.tolist()
    for item in rank:
        members[group_of[item]].append(item)
        now[group_of[item]] += values[item]
        room[group_of[item]] -= sizes[item]
    while True:
        by_load = sorted(range(len(now)), key=now.__getitem__)
        heavy, found, light = by_load[-1], None, -1
        if now[heavy] <= enough:
            return steps
        for light in by_load:
            gap = now[heavy] - now[light]
            cost = len(members[heavy]) * near + len(members[light]) + len(now)
            if gap <= 0 or cost > steps:
                return steps
            steps -= cost
            rooms = room[heavy], room[light]
            found = _exchange(values, sizes, members[heavy], members[light], gap, rooms, near)
            if found is not None:
                break
        # The last of `by_load` is the heaviest group itself, to which there is no gap.
        assert found is not None
        for item, source, target in ((found[0], heavy, light), (found[1], light, heavy)):
            if item >= 0:
                group_of[item] = target
                members[source].remove(item)
                members[target] = sorted([*members[target], item], key=rank.__getitem__)
                now[source] -= values[item]
                now[target] += values[item]
                room[source] += sizes[item]
                room[target] -= sizes[item]


def _exchange(
    values: list[float],
    sizes: list[int],
    heavy: list[int],
    light: list[int],
    gap: float,
    rooms: tuple[int, int],
    near: int,
) -> tuple[int, int] | None:
    """The document to give and the one to take for it, -1 for none, that bring two groups closest."""
    best, found, place = gap, None, 0
    for given in heavy:
        while place + 1 < len(light) and 2 * (values[given] - values[light[place]]) < gap:
            place += 1
        around = light[place : place + near] + light[max(place - near, 0) : place][::-1]
        for taken in [-1, *around]:
            more = sizes[given] - (sizes[taken] if taken >= 0 else 0)
            moved = values[given] - (values[taken] if taken >= 0 else 0.0)
            if more <= rooms[1] and -more <= rooms[0] and abs(2 * moved - gap) < best:
                best, found = abs(2 * moved - gap), (given, taken)
    return found


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
    """Look for ways with a lighter heaviest group, the promising ones first, until nodes run out or none is left.

    Branch and bound, depth first: documents in the order given, each tried in the least loaded group first, and in
    one of several groups that are alike. A branch ends where the groups that could still take the smallest document
    have no room below the best way known for all that is left.

    Args:
        nodes: most documents to place.
        group_of: may be -1 where no way is known.

    Returns:
        The nodes that are left; the way is the best there is if they are over 0, and `enough` wasn't reached.
    """
    items, values, sizes = order.tolist(), work.tolist(), tokens.tolist()
    now, room, best = loads.tolist(), limits.tolist(), float("inf")
    if items and group_of[items[0]] >= 0:
        sums = loads.tolist()
        for item in items:
            sums[group_of[item]] += values[item]
        best = max(sums)
    rest = [0.0]
    for item in reversed(items):
        rest.append(rest[-1] + values[item])

    def descend(depth: int, way: list[int]) -> None:
        nonlocal best, nodes
        if depth == len(items):
            best = max(now)
            group_of[items] = way
            return
        item = items[depth]
        for group in sorted(range(len(now)), key=now.__getitem__):
            is_twin = any((now[other], room[other]) == (now[group], room[group]) for other in range(group))
            if is_twin or best <= enough or sizes[item] > room[group] or now[group] + values[item] >= best:
                continue
            if nodes == 0:
                return
            nodes -= 1
            before = now[group]
            now[group] += values[item]
            room[group] -= sizes[item]
            usable = 0.0
            for load in now:  # `sum` of Python 3.12 and later would round less than the kernel does
                usable += best - load if load + values[items[-1]] < best else 0.0
            if depth + 1 == len(items) or rest[-depth - 2] < usable:
                descend(depth + 1, [*way, group])
            now[group] = before
            room[group] += sizes[item]

    if items and best > enough:
        descend(0, [])
    return nodes


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
    """Lighten the heaviest group by dividing anew what it and two others hold, as long as that goes.

    The two others are neighbours by load, the lightest first. Of what the three hold, the lightest documents are
    divided by `search`; the others stay where they are.

    Args:
        most: documents to divide at a time.
        nodes: of one search.
        steps: most steps to take; a search costs one for each document of all, and one for each node.

    Returns:
        The steps that are left.
    """
    values, sizes = work.tolist(), tokens.tolist()
    now, room = loads.tolist(), limits.tolist()
    for item in order.tolist():
        now[group_of[item]] += values[item]
        room[group_of[item]] -= sizes[item]
    first = 0
    by_load = sorted(range(len(now)), key=now.__getitem__)
    while first + 2 < len(now) and now[by_load[-1]] > enough and steps >= order.size + nodes:
        groups = [by_load[-1], by_load[first], by_load[first + 1]]
        held = [item for item in order.tolist() if group_of[item] in groups]
        items = np.array(held[max(len(held) - most, 0) :], np.int32)
        base = loads[groups]
        for item in reversed(held[: -items.size]):
            base[groups.index(int(group_of[item]))] += values[item]
        part = np.full(order.size, -1, np.int32)
        free = np.array([room[group] for group in groups], np.int64)
        for item in items.tolist():
            part[item] = groups.index(int(group_of[item]))
            free[part[item]] += sizes[item]
        left = search(items, work, tokens, free, base, enough, nodes, part)
        steps -= order.size + nodes - left
        for item in items.tolist():
            base[part[item]] += values[item]
        if base.max() >= now[groups[0]]:
            first += 1
            continue
        for item in items.tolist():
            group_of[item] = groups[part[item]]
            free[part[item]] -= sizes[item]
        for number, group in enumerate(groups):
            now[group], room[group] = float(base[number]), int(free[number])
        first = 0
        by_load = sorted(range(len(now)), key=now.__getitem__)
    return steps
