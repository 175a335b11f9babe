"""Which rank gets which packs of a step: equal counts, and work as equal as a greedy hand can deal it."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from varlen.types import IntArray


def deal(
    work: npt.NDArray[np.float64], ranks: int, micro_batch_size: int, *, in_order: bool = False
) -> IntArray:
    """Deal the packs of a step.

    Packs of about equal work go into the same micro-batch of all ranks, because ranks wait for each other there;
    within it the pack with the most work goes to the hand with the least so far (Graham's longest processing time
    first, 1969, with equal counts), and the hand with the most to the rank that had the least before.

    Args:
        work: `[packs]`, a multiple of `ranks * micro_batch_size`; equal work keeps the order of the packs.
        ranks: data-parallel ranks.
        micro_batch_size: packs a rank takes at a time.
        in_order: earlier packs go into earlier micro-batches, however much work they are.

    Returns:
        int64 `[ranks, packs / ranks]`: the packs of each rank, micro-batch after micro-batch, ascending in each.

    >>> deal(np.array([1.0, 9.0, 8.0, 2.0]), ranks=2, micro_batch_size=2).tolist()
    [[0, 1], [2, 3]]
    """
    order = np.arange(len(work)) if in_order else np.argsort(-work, kind="stable")
    if ranks == 1:
        return np.sort(order.reshape(-1, micro_batch_size), axis=1).reshape(1, -1)
    at_once = ranks * micro_batch_size
    rounds, totals = [np.zeros((ranks, 0), dtype=np.int64)], np.zeros(ranks)
    for start in range(0, len(order), at_once):
        packs = order[start : start + at_once]
        packs = packs[np.argsort(-work[packs], kind="stable")]
        hands = np.array(_dealt(packs.tolist(), work, ranks), dtype=np.int64)
        sums = work[hands].sum(axis=1)
        owners = np.argsort(totals, kind="stable")
        hands[owners] = hands[np.argsort(-sums, kind="stable")]
        totals += work[hands].sum(axis=1)
        rounds.append(np.sort(hands, axis=1))
    return np.concatenate(rounds, axis=1)


def _dealt(packs: list[int], work: npt.NDArray[np.float64], ranks: int) -> list[list[int]]:
    """Deal one micro-batch; packs come with the most work first."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    room = len(packs) // ranks
    waiting = [(0.0, rank) for rank in range(ranks)]
    for pack in packs:
        total, rank = heapq.heappop(waiting)
        hands[rank].append(pack)
        if len(hands[rank]) < room:
            heapq.heappush(waiting, (total + float(work[pack]), rank))
    return hands
