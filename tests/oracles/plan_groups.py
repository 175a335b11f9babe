"""The kernels that fill micro-batches with whole documents, in plain Python: specification and oracle.

`reference.py` hands them on. Written to be read: arguments, results and every tie are those of the kernels.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Floats = NDArray[np.float64]

HALVINGS = 24
"""Times that the span of a micro-batch's time is halved, between what is possible and what is sure."""


@dataclass
class Group:
    """Neighbouring ranks, 2^level of them, and the documents whose rows they share."""

    level: int
    work: Floats
    lengths: Int32
    items: list[int] = field(default_factory=list)
    load: float = 0.0
    tokens: float = 0.0
    """Of one rank."""

    def add(self, item: int) -> None:
        """Give the group one more document."""
        self.items.append(item)
        self.load += self.work[item, self.level]
        self.tokens += self.lengths[item] / 2.0**self.level

    def holds(self, item: int, limit_s: float, token_limit: int) -> bool:
        """Return whether one more document keeps within both limits."""
        return bool(
            self.tokens + self.lengths[item] / 2.0**self.level <= token_limit
            and self.load + self.work[item, self.level] <= limit_s
        )


def least_work(
    order: Int32, lengths: Int32, work: Floats, num_packs: int, token_limit: int, pack_of: Int32
) -> None:
    """Give each document to the pack with the least work, if not full; else to that with the fewest tokens.

    Those that fit in neither wait, and go to the pack with the least work in the end.

    Args:
        order: int32 `[any]`: the documents in the order in which they choose.
        lengths: int32 `[num_documents]`.
        work: float64 `[num_documents]`.
        num_packs: how many packs there are.
        token_limit: tokens of a full pack.
        pack_of: int32 `[num_documents]`, -1 throughout, written.
    """
    loads, tokens = [0.0] * num_packs, [0] * num_packs
    waiting = []

    def give(item: int, pack: int) -> None:
        pack_of[item] = pack
        loads[pack] += work[item]
        tokens[pack] += int(lengths[item])

    for item in order.tolist():
        choices = (loads.index(min(loads)), tokens.index(min(tokens)))
        fitting = [pack for pack in choices if tokens[pack] + lengths[item] <= token_limit]
        if fitting:
            give(item, fitting[0])
        else:
            waiting.append(item)
    for item in waiting:
        give(item, loads.index(min(loads)))


def share(
    by_work: Int32, lengths: Int32, work: Floats, dp: int, token_limit: int, group_of: Int32, levels: Int32
) -> int:
    """Share one micro-batch's documents among groups of ranks so that the slowest is fast.

    Halves the span between a time that is too short and one that is enough, and doubles groups where ranks are left
    over. Where nothing fits, the limit of tokens is doubled until something does.

    Args:
        by_work: int32 `[any]`: the documents of the micro-batch, much work first.
        lengths: int32 `[num_documents]`.
        work: float64 `[num_documents, num_levels]`: seconds of each rank if 2^level ranks share a document.
        dp: ranks in all, at least 2^(num_levels - 1).
        token_limit: tokens of one rank, at most.
        group_of: int32 `[num_documents]`, written for the documents given.
        levels: int32 `[dp]`, written for each group.

    Returns:
        How many groups there are.
    """
    low = max((float(work[item].min()) for item in by_work), default=0.0)
    high = 0.0
    for item in by_work:
        high += float(work[item].max())
    while _fitted(high, token_limit, dp, by_work, lengths, work) is None:
        token_limit *= 2
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        if _fitted(middle, token_limit, dp, by_work, lengths, work) is None:
            low = middle
        else:
            high = middle
    groups = _fitted(high, token_limit, dp, by_work, lengths, work)
    assert groups is not None
    _widen(dp, groups, by_work.tolist())
    _write(groups, 0, group_of, levels)
    return len(groups)


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
    """Fill micro-batches one after the other, each up to a time, with documents at fixed levels.

    A document opens a group as long as ranks are free, else it goes to the group of its level with the least work
    that stays within the time, which is as long as the longest document of the micro-batch at least. The others wait
    for the next micro-batch. Groups are doubled where ranks are left over.

    Args:
        order: int32 `[any]`: the documents, from high levels to low and from much work to little.
        least_levels: int32 `[num_documents]`: the level of each.
        lengths: int32 `[num_documents]`.
        work: float64 `[num_documents, num_levels]`: seconds of each rank if 2^level ranks share a document.
        dp: ranks in all.
        token_limit: tokens of one rank, at most, where a group takes more than one document.
        target_s: seconds of a micro-batch.
        batch_of: int32 `[num_documents]`, -1 throughout, written.
        group_of: int32 `[num_documents]`, -1 throughout, written: groups are numbered through all micro-batches.
        levels: int32 `[len(order) + dp]`, written for each group.
        group_offsets: int32 `[len(order) + 1]`, 0 at first, written: micro-batch b has the groups from
            `group_offsets[b]` up to `group_offsets[b + 1]`.

    Returns:
        How many micro-batches there are.
    """
    waiting, num_batches, num_groups = order.tolist(), 0, 0
    while waiting:
        groups: list[Group] = []
        limit_s, late = target_s, []
        for item in waiting:
            level = int(least_levels[item])
            limit_s = max(limit_s, float(work[item, level]))
            if sum(2**group.level for group in groups) + 2**level <= dp:
                groups.append(Group(level, work, lengths))
                groups[-1].add(item)
                continue
            chosen = _least_loaded(groups, item, level, limit_s, token_limit)
            if chosen is None:
                late.append(item)
            else:
                chosen.add(item)
        for group in groups:
            batch_of[group.items] = num_batches
        _widen(dp, groups, waiting)
        _write(groups, num_groups, group_of, levels)
        num_batches += 1
        num_groups += len(groups)
        group_offsets[num_batches] = num_groups
        waiting = late
    return num_batches


def _least_loaded(
    groups: list[Group], item: int, level: int, limit_s: float, token_limit: int
) -> Group | None:
    """The group of a level with the least work that a document keeps within both limits."""
    fitting = [g for g in groups if g.level == level and g.holds(item, limit_s, token_limit)]
    return min(fitting, key=lambda group: group.load, default=None)


def _fitted(
    limit_s: float, token_limit: int, dp: int, by_work: Int32, lengths: Int32, work: Floats
) -> list[Group] | None:
    """Share documents so that no group takes over `limit_s`; None where too few ranks are left for one.

    Each is shared by as few ranks as the limits allow, the most shared first; by more where a wider group has room.
    """
    num_levels = work.shape[1]
    least = {}
    for item in by_work.tolist():
        able = [
            level
            for level in range(num_levels)
            if work[item, level] <= limit_s and lengths[item] / 2.0**level <= token_limit
        ]
        if not able:
            return None
        least[item] = able[0]
    groups: list[Group] = []
    for item in sorted(least, key=lambda item: -least[item]):
        choices = (
            _least_loaded(groups, item, each, limit_s, token_limit) for each in range(least[item], num_levels)
        )
        chosen = next((group for group in choices if group is not None), None)
        if chosen is None:
            if sum(2**group.level for group in groups) + 2 ** least[item] > dp:
                return None
            chosen = Group(least[item], work, lengths)
            groups.append(chosen)
        chosen.add(item)
    return groups


def _widen(dp: int, groups: list[Group], order: list[int]) -> None:
    """Double groups, the slowest first, as long as ranks are free and that makes one faster."""
    while True:
        free = dp - sum(2**group.level for group in groups)
        able = [group for group in groups if 2**group.level <= free and group.level + 1 < group.work.shape[1]]
        faster = [group for group in able if _wider(group, order) < group.load]
        if not faster:
            return
        slowest = max(faster, key=lambda group: group.load)
        slowest.load = _wider(slowest, order)
        slowest.level += 1


def _wider(group: Group, order: list[int]) -> float:
    """The work of a group of twice the ranks, added up in the order in which all documents stand."""
    own, load = set(group.items), 0.0
    for item in order:
        load += float(group.work[item, group.level + 1]) if item in own else 0.0
    return load


def _write(groups: list[Group], first: int, group_of: Int32, levels: Int32) -> None:
    """Write the number of each document's group, counted from `first`, and the level of each group."""
    for number, group in enumerate(groups, first):
        group_of[group.items] = number
        levels[number] = group.level


def seat(turns: Int32, loads: Floats, levels: Int32, batches: Int32, dp: int, first_ranks: Int32) -> None:
    """Give each group, in turn, the aligned neighbouring ranks that its micro-batch left free with the least work.

    Args:
        turns: int32 `[num_groups]`: the groups, micro-batch by micro-batch, wide ones first.
        loads: float64 `[num_groups]`: seconds of each of a group's ranks.
        levels: int32 `[num_groups]`: a group has 2^level ranks.
        batches: int32 `[num_groups]`: the micro-batch of each.
        dp: ranks in all.
        first_ranks: int32 `[num_groups]`, written.
    """
    totals = [0.0] * dp
    taken: set[tuple[int, int]] = set()
    for group in turns.tolist():
        batch, width = int(batches[group]), 2 ** int(levels[group])
        free = [
            (max(totals[first : first + width]), first)
            for first in range(0, dp // width * width, width)
            if not any((batch, rank) in taken for rank in range(first, first + width))
        ]
        least, first = min(free)
        first_ranks[group] = first
        for rank in range(first, first + width):
            taken.add((batch, rank))
            totals[rank] = least + loads[group]
