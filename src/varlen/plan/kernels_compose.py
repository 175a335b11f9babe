"""Kernels that fill and order MicroPacks, and that price the tasks of a block of ranks.

Arguments that kernels share: `documents` int32 `[3, documents]`: lengths, numbers of ranks, ids, shared documents
first; `work` float64 `[documents]`: seconds; `cuts` int32 `[3, slices]`: document, start, stop of each cut slice;
`chained`: how many of the first documents are cut, shared, or both; `shared`: how many of the first are
shared with other ranks; `own` and `budget`: seconds of a MicroPack of the rank's own and of shared documents;
`ends` int64 `[2]`: maximum numbers of small MicroPacks at the beginning and at the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from varlen.cost.rates import (
    FORWARD_HEAD,
    FORWARD_LAYER,
    INPUT_HEAD,
    INPUT_LAYER,
    WEIGHT_HEAD,
    WEIGHT_LAYER,
)
from varlen.jit import compiled

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float = NDArray[np.float64]

_CUT_ABOVE = 1.15  # a document with more work than this times the mean MicroPack's is cut


@compiled
def fill_lightest(work: Float, loads: Float) -> Int64:
    """Assign each document, in the order given, to the MicroPack with the least load; `loads` is changed."""
    chosen = np.empty(work.size, np.int64)
    # A heap by load, then by number; a sorted array is one.
    heap = np.argsort(loads, kind="mergesort")
    for item in range(work.size):
        pack, node = heap[0], 0
        chosen[item] = pack
        loads[pack] += work[item]
        while True:
            child = 2 * node + 1
            if child >= heap.size:
                break
            if child + 1 < heap.size:
                one, other = heap[child], heap[child + 1]
                if loads[other] < loads[one] or (loads[other] == loads[one] and other < one):
                    child += 1
            one = heap[child]
            if loads[one] > loads[pack] or (loads[one] == loads[pack] and one > pack):
                break
            heap[node] = one
            node = child
        heap[node] = pack
    return chosen


@compiled
def arrange(
    cuts: Int32, beside: Int64, filled: Float, num_first: int, num_last: int, in_step: bool, documents: Int32
) -> Any:
    """Join slices and whole documents into MicroPacks, and order these as `varlen.plan.compose` describes.

    Slice i is the first of MicroPack i; behind those come the `num_first` and `num_last` small ones of both ends.
    `beside` is the MicroPack of each whole document (the last of `documents`), `filled` the seconds of whole
    documents in each MicroPack. Empty MicroPacks are dropped unless `in_step`.

    Returns slice_offsets int32 `[MicroPacks + 1]`, slices int32 `[5, slices]`, chains int32 `[MicroPacks]`.
    """
    num_cut, num_packs = cuts.shape[1], filled.size
    sizes = np.zeros(num_packs, np.int64)
    sizes[:num_cut] = 1
    for pack in beside:
        sizes[pack] += 1
    plain = num_cut + num_first + num_last
    order = np.empty(num_packs, np.int64)
    for step in range(num_first):
        order[step] = num_cut + step
    for step in range(num_last):
        order[num_packs - 1 - step] = num_cut + num_first + step
    order[num_first : num_first + num_cut] = np.arange(num_cut)
    order[num_first + num_cut : num_packs - num_last] = plain + np.argsort(-filled[plain:], kind="mergesort")
    used, total = 0, num_cut + beside.size
    offsets, chains = np.zeros(num_packs + 1, np.int32), np.empty(num_packs, np.int32)
    cursors = np.empty(num_packs, np.int64)
    whole = documents.shape[1] - beside.size
    for pack in order:
        if sizes[pack] > 0 or in_step:
            cursors[pack] = offsets[used]
            offsets[used + 1] = offsets[used] + sizes[pack]
            chains[used] = cuts[0, pack] if pack < num_cut else whole + pack
            used += 1
    slices = np.empty((5, total), np.int32)
    for item in range(total):
        is_cut = item < num_cut
        pack = item if is_cut else beside[item - num_cut]
        document = cuts[0, item] if is_cut else whole + item - num_cut
        at = cursors[pack]
        cursors[pack] += 1
        slices[0, at] = cuts[1, item] if is_cut else 0
        slices[1, at] = cuts[2, item] if is_cut else documents[0, document]
        slices[2, at], slices[3, at] = documents[1, document], documents[2, document]
        slices[4, at] = slices[1, at] == documents[0, document]
    return offsets[: used + 1], slices, chains[:used]


@compiled
def _follow(slices_of: Int64, num_ranks: Int32, work: Float, budget: float) -> Int64:
    """Pack uncut shared documents with equal numbers of ranks into as few MicroPacks as budgets allow.

    Returns the document whose MicroPack each one joins, -1 for one with a MicroPack of its own.
    """
    shared = slices_of.size
    leader = np.full(shared, -1, np.int64)
    begin = 0
    while begin < shared:
        end, total = begin, 0.0
        mine = np.empty(shared - begin, np.int64)
        used = 0
        while end < shared and num_ranks[end] == num_ranks[begin]:
            if slices_of[end] == 1:
                mine[used] = end
                total += work[end]
                used += 1
            end += 1
        count = max(1, int(np.ceil(total / budget)))
        if count < used:
            chosen = fill_lightest(work[mine[:used]], np.zeros(count))
            for item in range(count, used):
                leader[mine[item]] = mine[chosen[item]]
        begin = end
    return leader


@compiled
def _lead(of: Int32, chained: int, num_ranks: Int32, work: Float, shared: int, budget: float) -> Any:
    """Find the slices that begin a MicroPack, and the shared documents that join one.

    `of` is the document of each slice, rising. Returns the slices that begin a MicroPack and the seconds of each
    MicroPack; the documents that join the MicroPack of another, and that MicroPack.
    """
    slices_of, lead_of = np.zeros(chained, np.int64), np.zeros(chained, np.int64)
    for document in of:
        slices_of[document] += 1
    leader = _follow(slices_of[:shared], num_ranks, work, budget)
    leads, seconds = np.empty(of.size, np.int64), np.empty(of.size)
    used = 0
    for index in range(of.size):
        document = of[index]
        if document >= shared or leader[document] < 0:
            if index == 0 or of[index - 1] != document:
                lead_of[document] = used
            leads[used], seconds[used] = index, work[document] / slices_of[document]
            used += 1
    followers, leading = np.empty(shared, np.int64), np.empty(shared, np.int64)
    beside = 0
    begin = shared
    # By rising numbers of ranks.
    while begin > 0:
        end = begin
        while begin > 0 and num_ranks[begin - 1] == num_ranks[end - 1]:
            begin -= 1
        for document in range(begin, end):
            if leader[document] >= 0:
                followers[beside], leading[beside] = document, lead_of[leader[document]]
                seconds[leading[beside]] += work[document]
                beside += 1
    return leads[:used], seconds[:used], followers[:beside], leading[:beside]


@compiled
def composed(
    cuts: Int32, chained: int, documents: Int32, work: Float, shared: int, count: int, own: float, budget: float,
    ends: Int64, smallest: float, least: float, in_step: bool, by_work: bool, mixes: bool,
) -> Any:  # fmt: skip
    """Compose a rank's MicroPacks from the slices of its cut and shared documents, and its whole documents.

    Small MicroPacks hold `smallest` of a full one at the ends, and more further inside, but at least `least`.
    `in_step` keeps empty MicroPacks and all small ones; `by_work` orders MicroPacks by falling work, else
    chains keep the order of their documents; `mixes` lets the rank's own documents join MicroPacks of shared
    slices. Returns the same as `arrange`.
    """
    leads, seconds, followers, leading = _lead(cuts[0], chained, documents[1], work, shared, budget)
    led, first_own = leads.size, 0
    first_slices = np.empty((3, led), np.int32)
    for index in range(led):
        first_slices[:, index] = cuts[:, leads[index]]
        first_own += first_slices[0, index] < shared
    shorts = work[chained:]
    free = max(count - led, int(first_own == led and shorts.size > 0))
    num_first, num_last = ends[0], ends[1]
    if in_step:  # equally many on all ranks, so that shared MicroPacks have the same index
        free = max(free, num_first + num_last)
    else:
        num_last = min(num_last, free // 2)
        num_first = min(num_first, free - num_last)
    first = 0 if mixes and by_work else first_own
    held_back = np.zeros(led - first + free)
    held_back[: led - first] = seconds[first:]
    for step in range(num_first + num_last):
        part, steps = (step, num_first) if step < num_first else (step - num_first, num_last)
        size = smallest + (1.0 - smallest) * part / steps
        held_back[led - first + step] = own * (1.0 - min(max(size, least), 1.0))
    loads = held_back.copy()
    beside = np.append(leading, first + fill_lightest(shorts, loads))
    filled = np.zeros(led + free)
    filled[first:] = loads - held_back
    if not by_work:
        # MicroPacks behind the chains keep their order.
        order, index_of = np.arange(led), np.arange(led + free)
        order[first_own:] = first_own + np.argsort(
            documents[2][first_slices[0, first_own:]], kind="mergesort"
        )
        index_of[order] = np.arange(led)
        first_slices, beside = first_slices[:, order], index_of[beside]
        filled[:] = 0.0
    if followers.size:
        # Move documents that join another's MicroPack behind those that have their own.
        order, index_of = np.arange(documents.shape[1]), np.arange(chained)
        is_led = np.ones(chained, np.bool_)
        is_led[followers] = False
        order[: chained - followers.size] = np.flatnonzero(is_led)
        order[chained - followers.size : chained] = followers
        index_of[order[:chained]] = np.arange(chained)
        documents = documents[:, order]
        first_slices[0] = index_of[first_slices[0]]
    return arrange(first_slices, beside, filled, num_first, num_last, in_step, documents)


@compiled
def reversed_chains(chains: Int32) -> Int64:
    """Return the backward order of MicroPacks: chains in forward order, the MicroPacks within each reversed."""
    count = chains.size
    order = np.empty(count, np.int64)
    first = 0
    for pack in range(count):
        if pack == count - 1 or chains[pack + 1] != chains[pack]:
            for index in range(first, pack + 1):
                order[index] = first + pack - index
            first = pack + 1
    return order


@compiled
def backward_waits(chains: Int32, forward_chains: Int32, order: Int64) -> Int32:
    """Return the last forward MicroPack of the chain of each backward MicroPack, in the order in which they run."""
    count = order.size
    after, ends = np.zeros(count, np.int32), np.zeros(count, np.int32)
    last = -1
    for pack in range(count):
        if pack == 0 or chains[pack] != chains[pack - 1]:
            # Empty MicroPacks at the end may have no counterpart in the forward pass.
            last = min(last + 1, forward_chains.size - 1)
            while last + 1 < forward_chains.size and forward_chains[last + 1] == forward_chains[last]:
                last += 1
        ends[pack] = last
    for turn in range(count):
        after[turn] = ends[order[turn]]
    return after


@compiled
def backward_order(chains: Int32, forward_chains: Int32) -> Any:
    """Return the results of `reversed_chains` and `backward_waits`."""
    order = reversed_chains(chains)
    return order, backward_waits(chains, forward_chains, order)


@compiled
def to_cut(
    documents: Int32, work: Float, bounds: Int64, shared: Int64, own: Float, budget: float, least_rows: int
) -> Any:
    """Find the documents of each rank that are cut, shared, or both, and the budget of their slices.

    `bounds` is where the documents of each rank begin; `shared` and `own` have an entry per rank. Returns the number
    of these documents on each rank, and the length, number of ranks, seconds and budget of each.
    """
    chained = shared.copy()
    for rank in range(shared.size):
        for document in range(bounds[rank] + shared[rank], bounds[rank + 1]):
            chained[rank] += (
                work[document] > _CUT_ABOVE * own[rank] and documents[0, document] >= 2 * least_rows
            )
    total, at = chained.sum(), 0
    lengths, num_ranks = np.empty(total, np.int32), np.empty(total, np.int32)
    seconds, budgets = np.empty(total), np.empty(total)
    for rank in range(shared.size):
        for index in range(chained[rank]):
            document = bounds[rank] + index
            lengths[at], num_ranks[at] = documents[0, document], documents[1, document]
            seconds[at] = work[document]
            budgets[at] = budget if index < shared[rank] else own[rank]
            at += 1
    return chained, lengths, num_ranks, seconds, budgets


@compiled
def composed_ranks(
    cuts: Int32, chained: Int64, documents: Int32, work: Float, bounds: Int64, shared: Int64, count: int, own: Float,
    budget: float, ends: Int64, smallest: float, least: Float, in_step: bool, by_work: bool, mixes: bool,
) -> Any:  # fmt: skip
    """Run `composed` for all ranks of a block, and pad them to equally many MicroPacks, with empty ones at the end.

    The documents of `cuts` are numbered over those that `to_cut` returns. Returns the arrays of a `BlockComposition`.
    """
    ranks = shared.size
    all_offsets, all_slices, all_chains = [], [], []
    at, first, packs, total = 0, 0, 0, 0
    for rank in range(ranks):
        begin = at
        while at < cuts.shape[1] and cuts[0, at] < first + chained[rank]:
            at += 1
        mine = cuts[:, begin:at].copy()
        mine[0] -= first
        first += chained[rank]
        offsets, slices, chains = composed(
            mine, chained[rank], documents[:, bounds[rank] : bounds[rank + 1]].copy(),
            work[bounds[rank] : bounds[rank + 1]], shared[rank], count, own[rank], budget, ends, smallest,
            least[rank], in_step, by_work, mixes,
        )  # fmt: skip
        all_offsets.append(offsets)
        all_slices.append(slices)
        all_chains.append(chains)
        packs, total = max(packs, chains.size), total + slices.shape[1]
    slice_offsets, table = np.zeros(ranks * packs + 1, np.int32), np.empty((5, total), np.int32)
    made = np.empty((ranks, packs), np.int32)
    order, waits = np.empty((ranks, packs), np.int64), np.empty((ranks, packs), np.int32)
    before = 0
    for rank in range(ranks):
        offsets, slices, chains = all_offsets[rank], all_slices[rank], all_chains[rank]
        last = -1
        for pack in range(packs):
            is_there = pack < chains.size
            last = max(last, chains[pack]) if is_there else last + 1
            made[rank, pack] = chains[pack] if is_there else last
            slice_offsets[rank * packs + pack + 1] = before + offsets[min(pack + 1, chains.size)]
        table[:, before : before + slices.shape[1]] = slices
        before += slices.shape[1]
        one, other = backward_order(made[rank], made[rank])
        order[rank], waits[rank] = one + rank * packs, other
    return slice_offsets, table, made, order, waits


@compiled
def task_seconds(
    ahead: Float, back: Float, layers: Float, has_head: Float, gather: Float, splits: bool, head_at_once: bool
) -> Any:
    """Return seconds of forward, backward and weight-gradient tasks on the slowest rank, `[chunks, MicroPacks]`.

    `ahead` and `back` are prices `[ranks, MicroPacks, 7]` of both passes, `gather` the least seconds of each kind of
    task `[3, chunks]`; `layers`, `has_head` and the flags are those of `StageCosts`.
    """
    chunks, ranks = layers.size, ahead.shape[0]
    forward, backward = np.empty((chunks, ahead.shape[1])), np.empty((chunks, back.shape[1]))
    weight = np.zeros((chunks, back.shape[1]))
    for chunk in range(chunks):
        num_layers, head = layers[chunk], has_head[chunk]
        forward[chunk], backward[chunk] = gather[0, chunk], gather[1, chunk]
        if splits:
            weight[chunk] = gather[2, chunk]
        for rank in range(ranks):
            for pack in range(ahead.shape[1]):
                taken = num_layers * ahead[rank, pack, FORWARD_LAYER]
                if not head_at_once:
                    taken = taken + head * ahead[rank, pack, FORWARD_HEAD]
                forward[chunk, pack] = max(taken, forward[chunk, pack])
            for pack in range(back.shape[1]):
                prices = back[rank, pack]
                inputs = num_layers * prices[INPUT_LAYER] + head * prices[INPUT_HEAD]
                weights = num_layers * prices[WEIGHT_LAYER]
                if head_at_once:
                    inputs = inputs + head * (prices[FORWARD_HEAD] + prices[WEIGHT_HEAD])
                else:
                    weights = weights + head * prices[WEIGHT_HEAD]
                if splits:
                    weight[chunk, pack] = max(weights, weight[chunk, pack])
                else:
                    inputs = inputs + weights
                backward[chunk, pack] = max(inputs, backward[chunk, pack])
    return forward, backward, weight
