"""Filling and ordering MicroPacks, and what their pipeline waits for, as numba kernels."""

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


@compiled
def fill_lightest(work: Float, loads: Float) -> Int64:
    """Give each document, in the order given, to the MicroPack with the least load; `loads` is changed."""
    chosen = np.empty(work.size, np.int64)
    # A heap by load, then by number: what is sorted is one.
    heap = np.argsort(loads, kind="mergesort")
    for item in range(work.size):
        pack, place = heap[0], 0
        chosen[item] = pack
        loads[pack] += work[item]
        while True:
            child = 2 * place + 1
            if child >= heap.size:
                break
            if child + 1 < heap.size:
                one, other = heap[child], heap[child + 1]
                if loads[other] < loads[one] or (loads[other] == loads[one] and other < one):
                    child += 1
            one = heap[child]
            if loads[one] > loads[pack] or (loads[one] == loads[pack] and one > pack):
                break
            heap[place] = one
            place = child
        heap[place] = pack
    return chosen


@compiled
def arrange(
    cuts: Int32, beside: Int64, filled: Float, heads: int, tails: int, in_step: bool, documents: Int32
) -> Any:
    """Put slices and whole documents together and MicroPacks in order; `varlen.plan.compose` says which.

    Args:
        cuts: int32 `[3, cut slices]`: document, start, stop; slice i is the first of MicroPack i.
        beside: int64 `[whole documents]`: the MicroPack of each.
        filled: float64 `[MicroPacks]`: seconds of whole documents in each.
        heads: small MicroPacks at the beginning, from the first on; they stand behind the cut slices.
        tails: small MicroPacks at the end, from the last on; they stand behind those.
        in_step: keep empty MicroPacks.
        documents: int32 `[3, documents]`: lengths, ranks, ids; whole ones are the last.

    Returns:
        slice_offsets int32 `[MicroPacks + 1]`, slices int32 `[5, slices]`, chains int32 `[MicroPacks]`.
    """
    num_cut, num_packs = cuts.shape[1], filled.size
    sizes = np.zeros(num_packs, np.int64)
    sizes[:num_cut] = 1
    for pack in beside:
        sizes[pack] += 1
    plain = num_cut + heads + tails
    order = np.empty(num_packs, np.int64)
    for step in range(heads):
        order[step] = num_cut + step
    for step in range(tails):
        order[num_packs - 1 - step] = num_cut + heads + step
    order[heads : heads + num_cut] = np.arange(num_cut)
    order[heads + num_cut : num_packs - tails] = plain + np.argsort(-filled[plain:], kind="mergesort")
    used, total = 0, num_cut + beside.size
    offsets, chains = np.zeros(num_packs + 1, np.int32), np.empty(num_packs, np.int32)
    places = np.empty(num_packs, np.int64)
    whole = documents.shape[1] - beside.size
    for pack in order:
        if sizes[pack] > 0 or in_step:
            places[pack] = offsets[used]
            offsets[used + 1] = offsets[used] + sizes[pack]
            chains[used] = cuts[0, pack] if pack < num_cut else whole + pack
            used += 1
    slices = np.empty((5, total), np.int32)
    for item in range(total):
        is_cut = item < num_cut
        pack = item if is_cut else beside[item - num_cut]
        document = cuts[0, item] if is_cut else whole + item - num_cut
        at = places[pack]
        places[pack] += 1
        slices[0, at] = cuts[1, item] if is_cut else 0
        slices[1, at] = cuts[2, item] if is_cut else documents[0, document]
        slices[2, at], slices[3, at] = documents[1, document], documents[2, document]
        slices[4, at] = slices[1, at] == documents[0, document]
    return offsets[: used + 1], slices, chains[:used]


@compiled
def _follow(slices_of: Int64, num_ranks: Int32, work: Float, budget: float) -> Int64:
    """Deal shared documents that aren't cut to as few MicroPacks as budgets hold, those of equal ranks together.

    Args:
        slices_of: int64 `[shared documents]`: slices that each is cut into.
        num_ranks: int32 `[shared documents]` or more, falling.
        work: float64, likewise.
        budget: seconds of a shared MicroPack.

    Returns:
        int64 `[shared documents]`: the document in whose MicroPack each stands, -1 for one that leads its own.
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
    """Say which slices begin a MicroPack, which documents stand beside them, and how full that makes them.

    Args:
        of: int32 `[cut slices]`: the document of each, rising.
        chained: documents that are cut, shared, or both: the first ones.
        num_ranks: int32 `[documents]`.
        work: float64 `[documents]`.
        shared: documents that other ranks share: the first ones.
        budget: seconds of a shared MicroPack.

    Returns:
        int64 `[m]`, the slices that begin one, and float64 `[m]`, seconds of each MicroPack; int64 `[followers]`,
        documents that stand in the MicroPack of another, and int64 `[followers]`, which MicroPack that is.
    """
    slices_of, places = np.zeros(chained, np.int64), np.zeros(chained, np.int64)
    for document in of:
        slices_of[document] += 1
    leader = _follow(slices_of[:shared], num_ranks, work, budget)
    leads, seconds = np.empty(of.size, np.int64), np.empty(of.size)
    used = 0
    for one in range(of.size):
        document = of[one]
        if document >= shared or leader[document] < 0:
            if one == 0 or of[one - 1] != document:
                places[document] = used
            leads[used], seconds[used] = one, work[document] / slices_of[document]
            used += 1
    followers, leading = np.empty(shared, np.int64), np.empty(shared, np.int64)
    beside = 0
    begin = shared
    # From few ranks to many, as they are dealt.
    while begin > 0:
        end = begin
        while begin > 0 and num_ranks[begin - 1] == num_ranks[end - 1]:
            begin -= 1
        for document in range(begin, end):
            if leader[document] >= 0:
                followers[beside], leading[beside] = document, places[leader[document]]
                seconds[leading[beside]] += work[document]
                beside += 1
    return leads[:used], seconds[:used], followers[:beside], leading[:beside]


@compiled
def composed(
    cuts: Int32, chained: int, documents: Int32, work: Float, shared: int, count: int, own: float, budget: float,
    ends: Int64, smallest: float, least: float, in_step: bool, by_work: bool, mixes: bool,
) -> Any:  # fmt: skip
    """Make a rank's MicroPacks of the slices that its long and shared documents were cut into.

    Args:
        cuts: int32 `[3, cut slices]`: document, start, stop.
        chained: documents that are cut, shared, or both: the first ones.
        documents: int32 `[3, documents]`: lengths, ranks, ids.
        work: float64 `[documents]`: seconds.
        shared: documents that other ranks share: the first ones.
        count: MicroPacks wanted.
        own: seconds of a MicroPack of the rank's own documents.
        budget: seconds of a shared MicroPack.
        ends: int64 `[2]`: small MicroPacks at the beginning and at the end, at most.
        smallest: the smallest over a whole MicroPack.
        least: no small one is below so much of a whole one.
        in_step: keep empty MicroPacks, and small ones in any case.
        by_work: full MicroPacks stand before emptier ones; without, chains stand as their documents do.
        mixes: documents of the rank alone stand beside shared slices, too.

    Returns:
        As `arrange` does.
    """
    leads, seconds, followers, leading = _lead(cuts[0], chained, documents[1], work, shared, budget)
    led, first_own = leads.size, 0
    first_slices = np.empty((3, led), np.int32)
    for place in range(led):
        first_slices[:, place] = cuts[:, leads[place]]
        first_own += first_slices[0, place] < shared
    shorts = work[chained:]
    free = max(count - led, int(first_own == led and shorts.size > 0))
    heads, tails = ends[0], ends[1]
    if in_step:  # as many on all ranks, or shared MicroPacks would stand in different places
        free = max(free, heads + tails)
    else:
        tails = min(tails, free // 2)
        heads = min(heads, free - tails)
    first = 0 if mixes and by_work else first_own
    held_back = np.zeros(led - first + free)
    held_back[: led - first] = seconds[first:]
    for step in range(heads + tails):
        part, steps = (step, heads) if step < heads else (step - heads, tails)
        size = smallest + (1.0 - smallest) * part / steps
        held_back[led - first + step] = own * (1.0 - min(max(size, least), 1.0))
    loads = held_back.copy()
    beside = np.append(leading, first + fill_lightest(shorts, loads))
    filled = np.zeros(led + free)
    filled[first:] = loads - held_back
    if not by_work:
        # MicroPacks behind the chains stay as they came.
        order, place_of = np.arange(led), np.arange(led + free)
        order[first_own:] = first_own + np.argsort(
            documents[2][first_slices[0, first_own:]], kind="mergesort"
        )
        place_of[order] = np.arange(led)
        first_slices, beside = first_slices[:, order], place_of[beside]
        filled[:] = 0.0
    if followers.size:
        # Documents that lead no MicroPack stand behind those that do.
        order, place_of = np.arange(documents.shape[1]), np.arange(chained)
        is_led = np.ones(chained, np.bool_)
        is_led[followers] = False
        order[: chained - followers.size] = np.flatnonzero(is_led)
        order[chained - followers.size : chained] = followers
        place_of[order[:chained]] = np.arange(chained)
        documents = documents[:, order]
        first_slices[0] = place_of[first_slices[0]]
    return arrange(first_slices, beside, filled, heads, tails, in_step, documents)


@compiled
def reversed_chains(chains: Int32) -> Int64:
    """Return the order in which the backward pass runs MicroPacks: chains as they stand, each from its last one."""
    count = chains.size
    order = np.empty(count, np.int64)
    first = 0
    for pack in range(count):
        if pack == count - 1 or chains[pack + 1] != chains[pack]:
            for place in range(first, pack + 1):
                order[place] = first + pack - place
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
            # Empty MicroPacks at the end may have no like in the forward pass.
            last = min(last + 1, forward_chains.size - 1)
            while last + 1 < forward_chains.size and forward_chains[last + 1] == forward_chains[last]:
                last += 1
        ends[pack] = last
    for place in range(count):
        after[place] = ends[order[place]]
    return after


@compiled
def backward_order(chains: Int32, forward_chains: Int32) -> Any:
    """Return what `reversed_chains` and `backward_waits` do."""
    order = reversed_chains(chains)
    return order, backward_waits(chains, forward_chains, order)


@compiled
def to_cut(
    documents: Int32, work: Float, bounds: Int64, shared: Int64, own: Float, budget: float, least_rows: int
) -> Any:
    """Say which documents of each rank are cut, shared, or both, and how much each of their slices may cost.

    Args:
        documents: int32 `[3, documents]`: lengths, ranks, ids; of one rank behind the other.
        work: float64 `[documents]`: seconds.
        bounds: int64 `[ranks + 1]`: where the documents of each rank begin.
        shared: int64 `[ranks]`: documents that other ranks share: the first ones of each.
        own: float64 `[ranks]`: seconds of a MicroPack of the rank's own documents.
        budget: seconds of a shared MicroPack.
        least_rows: rows that a slice has at least.

    Returns:
        int64 `[ranks]`, how many; of each its length int32, ranks int32, seconds and budget float64.
    """
    chained = shared.copy()
    for rank in range(shared.size):
        for one in range(bounds[rank] + shared[rank], bounds[rank + 1]):
            chained[rank] += work[one] > 1.15 * own[rank] and documents[0, one] >= 2 * least_rows
    total, at = chained.sum(), 0
    lengths, num_ranks = np.empty(total, np.int32), np.empty(total, np.int32)
    seconds, budgets = np.empty(total), np.empty(total)
    for rank in range(shared.size):
        for place in range(chained[rank]):
            one = bounds[rank] + place
            lengths[at], num_ranks[at], seconds[at] = documents[0, one], documents[1, one], work[one]
            budgets[at] = budget if place < shared[rank] else own[rank]
            at += 1
    return chained, lengths, num_ranks, seconds, budgets


@compiled
def composed_ranks(
    cuts: Int32, chained: Int64, documents: Int32, work: Float, bounds: Int64, shared: Int64, count: int, own: Float,
    budget: float, ends: Int64, smallest: float, least: Float, in_step: bool, by_work: bool, mixes: bool,
) -> Any:  # fmt: skip
    """Make the MicroPacks of all ranks of a block, equally many: those that have fewer get empty ones at the end.

    Args are those of `composed`, which makes the MicroPacks of one rank, and of `to_cut`, which says what is cut;
    documents of `cuts` are counted over those that `to_cut` returns.

    Returns:
        slice_offsets int32 `[ranks * MicroPacks + 1]` and slices int32 `[5, slices]`; int32 `[ranks, MicroPacks]`
        chains; int64 and int32 of the same shape: what `backward_order` returns, counted over all ranks' MicroPacks.
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


# What the tasks of a block of ranks take, as a numba kernel.


@compiled
def task_seconds(
    ahead: Float, back: Float, layers: Float, heads: Float, gathers: Float, splits: bool, head_at_once: bool
) -> Any:
    """Return what tasks take the slowest rank, float64 `[chunks, MicroPacks]`: forward, backward, weight gradients.

    Args:
        ahead: float64 `[ranks, forward MicroPacks, 7]`: priced in an average layer.
        back: float64 `[ranks, backward MicroPacks, 7]`: in the order in which they run.
        layers: float64 `[chunks]`.
        heads: float64 `[chunks]`: 1 where the vocabulary head is.
        gathers: float64 `[3, chunks]`: seconds that a forward, backward and weight-gradient task takes at least.
        splits: whether weight gradients are tasks of their own; else theirs are 0.
        head_at_once: whether the head's forward runs in backward tasks.
    """
    chunks, ranks = layers.size, ahead.shape[0]
    forward, backward = np.empty((chunks, ahead.shape[1])), np.empty((chunks, back.shape[1]))
    weight = np.zeros((chunks, back.shape[1]))
    for chunk in range(chunks):
        many, head = layers[chunk], heads[chunk]
        forward[chunk], backward[chunk] = gathers[0, chunk], gathers[1, chunk]
        if splits:
            weight[chunk] = gathers[2, chunk]
        for rank in range(ranks):
            for pack in range(ahead.shape[1]):
                taken = many * ahead[rank, pack, FORWARD_LAYER]
                if not head_at_once:
                    taken = taken + head * ahead[rank, pack, FORWARD_HEAD]
                forward[chunk, pack] = max(taken, forward[chunk, pack])
            for pack in range(back.shape[1]):
                one = back[rank, pack]
                inputs = many * one[INPUT_LAYER] + head * one[INPUT_HEAD]
                weights = many * one[WEIGHT_LAYER]
                if head_at_once:
                    inputs = inputs + head * (one[FORWARD_HEAD] + one[WEIGHT_HEAD])
                else:
                    weights = weights + head * one[WEIGHT_HEAD]
                if splits:
                    weight[chunk, pack] = max(weights, weight[chunk, pack])
                else:
                    inputs = inputs + weights
                backward[chunk, pack] = max(inputs, backward[chunk, pack])
    return forward, backward, weight
