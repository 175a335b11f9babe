"""Kernels that fill micro-batches with whole documents, for the baselines.

`tests/oracles/plan_groups.py` defines in plain Python what each returns. A *group* is 2^k neighbouring ranks that
share the rows of documents; its *level* is k. `work[d, k]` is the seconds of document d on each rank of a group of
level k.
"""

# Kernels mix Python and numpy integers, which numba types by itself.
# mypy: disable-error-code="assignment,return-value,no-any-return"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from varlen.jit import compiled

Int32 = NDArray[np.int32]
Floats = NDArray[np.float64]

_HALVINGS = 24  # of the bisection for a micro-batch's time


@compiled
def least_work(
    order: Int32, lengths: Int32, work: Floats, num_packs: int, token_limit: int, pack_of: Int32
) -> None:
    """Assign each document to the pack with the least work if it fits, else to that with the fewest tokens.

    Those that fit in neither come last, and go over the limit into the pack with the least work.
    """
    loads, tokens = np.zeros(num_packs), np.zeros(num_packs, np.int64)
    for late in range(2):
        for turn in range(order.size):
            item = order[turn]
            if pack_of[item] >= 0:
                continue
            pack = np.argmin(loads)
            if late == 0 and tokens[pack] + lengths[item] > token_limit:
                pack = np.argmin(tokens)
                if tokens[pack] + lengths[item] > token_limit:
                    continue
            pack_of[item] = pack
            loads[pack] += work[item]
            tokens[pack] += lengths[item]


@compiled
def _least_loaded(
    item: int,
    level: int,
    num_groups: int,
    limit_s: float,
    token_limit: int,
    lengths: Int32,
    work: Floats,
    levels: Int32,
    loads: Floats,
    tokens: Floats,
) -> int:
    """Return the group of a level with the least work that has room for a document within both limits, or -1."""
    best = -1
    for group in range(num_groups):
        if levels[group] != level or (best >= 0 and loads[group] >= loads[best]):
            continue
        if tokens[group] + lengths[item] / 2.0**level > token_limit:
            continue
        if loads[group] + work[item, level] <= limit_s:
            best = group
    return best


@compiled
def _fits(
    limit_s: float,
    token_limit: int,
    dp: int,
    by_work: Int32,
    lengths: Int32,
    work: Floats,
    group_of: Int32,
    levels: Int32,
    loads: Floats,
    tokens: Floats,
) -> int:
    """Share documents among groups that take at most `limit_s`; returns the number of groups, -1 if it fails."""
    num_levels = work.shape[1]
    num_groups, used = 0, 0
    for level in range(num_levels - 1, -1, -1):
        for turn in range(by_work.size):
            item = by_work[turn]
            least = 0
            while least < num_levels and (
                work[item, least] > limit_s or lengths[item] / 2.0**least > token_limit
            ):
                least += 1
            if least == num_levels:
                return -1
            if least != level:
                continue
            group = -1
            for wider in range(level, num_levels):
                group = _least_loaded(
                    item, wider, num_groups, limit_s, token_limit, lengths, work, levels, loads, tokens
                )
                if group >= 0:
                    break
            if group < 0:
                if used + 2**level > dp:
                    return -1
                group = num_groups
                levels[group], loads[group], tokens[group] = level, 0.0, 0.0
                num_groups += 1
                used += 2**level
            group_of[item] = group
            loads[group] += work[item, levels[group]]
            tokens[group] += lengths[item] / 2.0 ** levels[group]
    return num_groups


@compiled
def _widen(
    dp: int, num_groups: int, items: Int32, group_of: Int32, work: Floats, levels: Int32, loads: Floats
) -> None:
    """Double groups, the slowest first, as long as ranks are free and this makes the group faster."""
    used = 0
    for group in range(num_groups):
        used += 2 ** levels[group]
    while True:
        best, best_load = -1, 0.0
        for group in range(num_groups):
            level = levels[group]
            if used + 2**level > dp or level + 1 >= work.shape[1]:
                continue
            if best >= 0 and loads[group] <= loads[best]:
                continue
            wider = 0.0
            for turn in range(items.size):
                if group_of[items[turn]] == group:
                    wider += work[items[turn], level + 1]
            if wider < loads[group]:
                best, best_load = group, wider
        if best < 0:
            return
        used += 2 ** levels[best]
        levels[best] += 1
        loads[best] = best_load


@compiled
def share(
    by_work: Int32, lengths: Int32, work: Floats, dp: int, token_limit: int, group_of: Int32, levels: Int32
) -> int:
    """Share one micro-batch's documents among groups of ranks so that the slowest is fast."""
    loads, tokens = np.zeros(dp), np.zeros(dp)
    low, high = 0.0, 0.0
    for turn in range(by_work.size):
        low = max(low, work[by_work[turn]].min())
        high += work[by_work[turn]].max()
    while _fits(high, token_limit, dp, by_work, lengths, work, group_of, levels, loads, tokens) < 0:
        token_limit *= 2
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        if _fits(middle, token_limit, dp, by_work, lengths, work, group_of, levels, loads, tokens) < 0:
            low = middle
        else:
            high = middle
    num_groups = _fits(high, token_limit, dp, by_work, lengths, work, group_of, levels, loads, tokens)
    _widen(dp, num_groups, by_work, group_of, work, levels, loads)
    return num_groups


@compiled
def _first_that_fits(
    waiting: Int32,
    turn: int,
    left: int,
    room_s: float,
    room: float,
    is_falling: bool,
    least_levels: Int32,
    lengths: Int32,
    work: Floats,
) -> int:
    """Return the index of the next waiting document that some group could take, or that has another level.

    `waiting` is sorted by falling level and work, and also by falling length within a level if `is_falling`; the
    document at `turn` didn't fit. `room_s` and `room` are the most seconds and tokens left on a group.
    """
    level = least_levels[waiting[turn]]
    low, high = turn + 1, left
    while low < high:
        middle = (low + high) // 2
        item = waiting[middle]
        is_out = work[item, level] > room_s or (is_falling and lengths[item] / 2.0**level > room)
        if least_levels[item] == level and is_out:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def fill(
    order: Int32,
    least_levels: Int32,
    lengths: Int32,
    work: Floats,
    dp: int,
    token_limit: int,
    target_s: float,
    batch_of: Int32,
    group_of: Int32,
    levels: Int32,
    group_offsets: Int32,
) -> int:
    """Fill micro-batches one after the other, each up to `target_s`, with documents of fixed levels."""
    left, num_batches, num_groups = order.size, 0, 0
    waiting, taken = order.copy(), order.copy()
    loads, tokens = np.zeros(order.size + dp), np.zeros(order.size + dp)
    is_falling = True
    for turn in range(1, left):
        before, item = order[turn - 1], order[turn]
        if least_levels[before] == least_levels[item] and lengths[before] < lengths[item]:
            is_falling = False
    while left > 0:
        begin, used, limit_s = num_groups, 0, target_s
        now, later, turn = 0, 0, -1
        while turn + 1 < left:
            turn += 1
            item = waiting[turn]
            level = least_levels[item]
            limit_s = max(limit_s, work[item, level])
            if used + 2**level <= dp:
                group = num_groups
                levels[group] = level
                num_groups += 1
                used += 2**level
            else:
                found = _least_loaded(
                    item,
                    level,
                    num_groups - begin,
                    limit_s,
                    token_limit,
                    lengths,
                    work,
                    levels[begin:],
                    loads[begin:],
                    tokens[begin:],
                )
                if found < 0:  # skip all documents that are too large for every group of this level
                    room_s, room = -1.0, -1.0
                    for group in range(begin, num_groups):
                        if levels[group] == level:
                            room_s = max(room_s, limit_s - loads[group] + 1e-9 * limit_s)
                            room = max(room, token_limit - tokens[group] + 1e-6)
                    rooms = (room_s, room, is_falling)
                    following = _first_that_fits(waiting, turn, left, *rooms, least_levels, lengths, work)
                    while turn < following:
                        waiting[later] = waiting[turn]
                        later += 1
                        turn += 1
                    turn -= 1
                    continue
                group = begin + found
            batch_of[item], group_of[item] = num_batches, group
            loads[group] += work[item, level]
            tokens[group] += lengths[item] / 2.0**level
            taken[now] = item
            now += 1
        _widen(dp, num_groups - begin, taken[:now], group_of - begin, work, levels[begin:], loads[begin:])
        left = later
        num_batches += 1
        group_offsets[num_batches] = num_groups
    return num_batches


@compiled
def seat(turns: Int32, loads: Floats, levels: Int32, batches: Int32, dp: int, first_ranks: Int32) -> None:
    """Give each group, in turn, the aligned neighbouring ranks that its micro-batch left free with the least work.

    Of equal ones, the first. `loads` are the seconds of each of a group's ranks.
    """
    totals, taken, batch = np.zeros(dp), np.zeros(dp, np.bool_), -1
    for turn in range(turns.size):
        group = turns[turn]
        if batches[group] != batch:
            batch = batches[group]
            taken[:] = False
        width = 2 ** levels[group]
        first, least = 0, np.inf
        for begin in range(0, dp // width * width, width):
            so_far = totals[begin : begin + width].max()
            if so_far < least and not taken[begin : begin + width].any():
                first, least = begin, so_far
        first_ranks[group] = first
        for rank in range(first, first + width):
            taken[rank] = True
            totals[rank] = least + loads[group]
