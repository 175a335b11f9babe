"""Every planning kernel in plain Python: the specification that tests hold kernels against.

Written to be read. Arguments, results and every tie are those of the kernels.
"""

from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.oracles.plan_assign import deal, lighten, regroup, search  # noqa: F401 - exported
from tests.oracles.plan_compose import (  # noqa: F401
    arrange,
    backward_order,
    backward_waits,
    composed,
    composed_ranks,
    fill_lightest,
    reversed_chains,
    task_seconds,
    to_cut,
)
from tests.oracles.plan_groups import fill, least_work, seat, share  # noqa: F401

Int32 = NDArray[np.int32]
Weights = NDArray[Any]
Subset = tuple[Any, int, list[int]]
"""Items that will share a part: their weight, their number, and which they are. A tuple, so that it compares."""


def karmarkar_karp(weights: Weights, num_parts: int, is_equal: bool, part_of: Int32) -> None:
    """Divide items by the largest differencing method.

    A *state* says how some of the items are divided: its subsets, from heavy to light. At first each item is a
    state (or, for parts of equal size, each `num_parts` neighbours by weight are). The two states whose heaviest
    and lightest subsets are furthest apart are merged, heavy subsets with light ones, until one state is left.
    """
    values = weights.tolist()
    size = num_parts if is_equal else 1
    rising = sorted(range(len(values)), key=lambda item: (values[item], item))
    states = []
    for first in range(0, len(rising), size):
        subsets = [(values[item], 1, [item]) for item in rising[first : first + size]]
        states.append(_keyed(sorted(subsets, reverse=True), num_parts))
    heapify(states)
    while len(states) > 1:
        one, other = heappop(states)[-1], heappop(states)[-1]
        merged = []
        for number in range(num_parts):
            left = one[number] if number < len(one) else (0, 0, [])
            mirrored = num_parts - 1 - number
            right = other[mirrored] if mirrored < len(other) else (0, 0, [])
            merged.append((left[0] + right[0], left[1] + right[1], left[2] + right[2]))
        filled = [subset for subset in merged if subset[1]]
        heappush(states, _keyed(sorted(filled, reverse=True), num_parts))
    for part, (_, _, items) in enumerate(states[0][-1]):
        part_of[items] = part


def _keyed(subsets: list[Subset], num_parts: int) -> tuple[Any, Any, int, int, list[Subset]]:
    """A state behind what a heap compares: the largest difference first, then the heaviest subset."""
    weight, count, items = subsets[0]
    lightest = subsets[-1][0] if len(subsets) == num_parts else 0
    return lightest - weight, -weight, -count, -items[0], subsets


def greedy(order: Int32, weights: Weights, num_parts: int, is_equal: bool, part_of: Int32) -> None:
    """Give each item, in the order given, to the lightest part; to the lightest of the smallest for equal sizes."""
    loads: list[tuple[int, Any, int]] = [(0, weights.dtype.type(0).item(), part) for part in range(num_parts)]
    values = weights.tolist()
    for item in order.tolist():
        count, load, part = heappop(loads)
        part_of[item] = part
        heappush(loads, (count + is_equal, load + values[item], part))


def improve(
    order: Int32, weights: Weights, num_parts: int, is_equal: bool, steps: int, part_of: Int32
) -> int:
    """Lighten the heaviest part as long as that goes by one item given away, or swapped for another.

    The lightest part that makes the pair lighter takes part, and of all exchanges with it the one that makes the
    two most alike; ties go to the items that stand first in `order`. A search costs one step, and one for each
    item of the two parts.

    Args:
        order: int32 `[num_items]`: all items by falling weight.
        weights: `[num_items]`, of at least 0.
        num_parts: how many parts.
        is_equal: items are only swapped, so that parts keep their sizes.
        steps: most steps to take.
        part_of: int32 `[num_items]`: the part of each item, changed.

    Returns:
        The steps that are left.
    """
    values = weights.tolist()
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    rank = {item: number for number, item in enumerate(order.tolist())}
    loads = [weights.dtype.type(0).item()] * num_parts
    for item in rank:
        parts[part_of[item]].append(item)
    for item in reversed(rank):  # `sum` of Python 3.12 and later would round less than the kernel does
        loads[part_of[item]] += values[item]
    while True:
        by_load = sorted(range(num_parts), key=lambda part: (loads[part], part))
        heavy, found = by_load[-1], None
        for light in by_load:
            gap = loads[heavy] - loads[light]
            cost = len(parts[heavy]) + len(parts[light]) + 1
            if gap <= 0 or cost > steps:
                return steps
            steps -= cost
            found = _exchange(values, parts[heavy], parts[light], gap, is_equal)
            if found is not None:
                break
        # The last part in `by_load` is the heaviest itself, to which there is no gap.
        assert found is not None
        given, taken = found
        for item, source, target in ((given, heavy, light), (taken, light, heavy)):
            if item >= 0:
                parts[source].remove(item)
                parts[target] = sorted([*parts[target], item], key=rank.__getitem__)
                loads[source] -= values[item]
                loads[target] += values[item]
                part_of[item] = target


def _exchange(
    values: list[Any], heavy: list[int], light: list[int], gap: Any, is_equal: bool
) -> tuple[int, int] | None:
    """The item to give and the one to take for it, -1 for none, that bring two parts closest; None if none do."""
    best, found = gap, None
    for given in heavy:
        for taken in light if is_equal else [*light, -1]:
            moved = values[given] - (values[taken] if taken >= 0 else 0)
            if abs(2 * moved - gap) < best:
                best, found = abs(2 * moved - gap), (given, taken)
    return found
