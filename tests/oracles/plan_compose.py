"""Filling, ordering and waiting in plain Python: the specification that tests hold kernels against."""

import math
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from varlen.cost.rates import FORWARD_HEAD, FORWARD_LAYER, INPUT_HEAD, INPUT_LAYER, WEIGHT_HEAD, WEIGHT_LAYER

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float = NDArray[np.float64]


def fill_lightest(work: Float, loads: Float) -> Int64:
    """Give each document, in the order given, to the MicroPack with the least load; `loads` is changed."""
    chosen = []
    for cost in work.tolist():
        least = int(loads.argmin())
        loads[least] += cost
        chosen.append(least)
    return np.array(chosen, np.int64)


def arrange(
    cuts: Int32, beside: Int64, filled: Float, num_first: int, num_last: int, in_step: bool, documents: Int32
) -> Any:
    """Put slices and whole documents together and MicroPacks in order; `varlen.plan.compose` says which."""
    num_cut, whole = cuts.shape[1], documents.shape[1] - beside.size
    held: list[list[tuple[int, int, int]]] = [[] for _ in range(filled.size)]
    for pack, (document, start, stop) in enumerate(cuts.T.tolist()):
        held[pack].append((start, stop, document))
    for document, pack in enumerate(beside.tolist(), start=whole):
        held[pack].append((0, int(documents[0, document]), document))
    tail, rest = num_cut + num_first, num_cut + num_first + num_last
    plain = sorted(range(rest, filled.size), key=lambda pack: -filled[pack])
    order = [*range(num_cut, tail), *range(num_cut), *plain, *reversed(range(tail, rest))]
    order = [pack for pack in order if held[pack] or in_step]
    table = [
        (start, stop, documents[1, document], documents[2, document], stop == documents[0, document])
        for pack in order
        for start, stop, document in held[pack]
    ]
    chains = [cuts[0, pack] if pack < num_cut else whole + pack for pack in order]
    offsets = np.cumsum([0, *(len(held[pack]) for pack in order)]).astype(np.int32)
    return offsets, np.array(table, np.int32).reshape(-1, 5).T.copy(), np.array(chains, np.int32)


def _followers(
    slices_of: list[int], num_ranks: list[int], work: list[float], shared: int, budget: float
) -> dict[int, int]:
    """Shared documents that stand in the MicroPack of another, and that other one; those of few ranks first."""
    leaders: dict[int, int] = {}
    for ranks in sorted(set(num_ranks[:shared])):
        mine = [each for each in range(shared) if num_ranks[each] == ranks and slices_of[each] == 1]
        count = max(1, math.ceil(sum((work[each] for each in mine), 0.0) / budget))
        if count < len(mine):
            chosen = fill_lightest(np.array([work[each] for each in mine]), np.zeros(count)).tolist()
            leaders |= {each: mine[pack] for each, pack in zip(mine[count:], chosen[count:])}
    return leaders


def composed(
    cuts: Int32, chained: int, documents: Int32, work: Float, shared: int, count: int, own: float, budget: float,
    ends: Int64, smallest: float, least: float, in_step: bool, by_work: bool, mixes: bool,
) -> Any:  # fmt: skip
    """Make a rank's MicroPacks of the slices that its long and shared documents were cut into."""
    costs, num_ranks = work.tolist(), documents[1].tolist()
    slices_of = np.bincount(cuts[0], minlength=chained).tolist()
    leaders = _followers(slices_of, num_ranks, costs, shared, budget)
    leading = [cut for cut in cuts.T.tolist() if cut[0] not in leaders]
    first_own = sum(document < shared for document, _, _ in leading)
    seconds = [costs[document] / slices_of[document] for document, _, _ in leading]
    pack_of = {document: pack for pack, (document, _, _) in reversed([*enumerate(leading)])}
    for follower, leader in leaders.items():
        seconds[pack_of[leader]] += costs[follower]
    shorts = work[chained:]
    free = max(count - len(leading), int(first_own == len(leading) and shorts.size > 0))
    num_first, num_last = (int(end) for end in ends)
    if in_step:  # as many on all ranks, or shared MicroPacks would have different indices
        free = max(free, num_first + num_last)
    else:
        num_last = min(num_last, free // 2)
        num_first = min(num_first, free - num_last)
    small = [
        smallest + (1.0 - smallest) * step / size for size in (num_first, num_last) for step in range(size)
    ]
    held_back = [own * (1.0 - min(max(size, least), 1.0)) for size in small]
    first = 0 if mixes and by_work else first_own
    before = np.array([*seconds[first:], *held_back, *[0.0] * (free - len(small))], np.float64)
    loads = before.copy()
    beside = [pack_of[leader] for leader in leaders.values()]
    beside += (first + fill_lightest(shorts, loads)).tolist()
    filled = np.concatenate([np.zeros(first), loads - before])
    if not by_work:
        # MicroPacks behind the chains stay as they came.
        ids = documents[2].tolist()
        order = sorted(range(first_own, len(leading)), key=lambda pack: ids[leading[pack][0]])
        order = [*range(first_own), *order]
        index_of = {pack: index for index, pack in enumerate(order)}
        beside = [index_of.get(pack, pack) for pack in beside]
        leading, filled = [leading[pack] for pack in order], np.zeros_like(filled)
    # Documents that lead no MicroPack stand behind those that do.
    chain_order = [*(each for each in range(chained) if each not in leaders), *leaders]
    number = {document: index for index, document in enumerate(chain_order)}
    table = documents[:, [*chain_order, *range(chained, documents.shape[1])]]
    first_slices = np.array([(number[cut[0]], *cut[1:]) for cut in leading], np.int32).reshape(-1, 3).T
    return arrange(first_slices, np.array(beside, np.int64), filled, num_first, num_last, in_step, table)


def to_cut(
    documents: Int32, work: Float, bounds: Int64, shared: Int64, own: Float, budget: float, least_rows: int
) -> Any:
    """Find the documents of each rank that are cut, shared, or both, and the budget of their slices."""
    chained, rows = [], []
    for rank, (first, last) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist())):
        mine, most, held = range(first, last), own[rank], int(shared[rank])
        long = [d for d in mine[held:] if work[d] > 1.15 * most and documents[0, d] >= 2 * least_rows]
        chained.append(held + len(long))
        for index, d in enumerate(mine[: chained[-1]]):
            rows.append((documents[0, d], documents[1, d], work[d], budget if index < held else most))
    columns = list(zip(*rows)) or [()] * 4
    lengths, num_ranks = (np.array(column, np.int32) for column in columns[:2])
    seconds, budgets = (np.array(column, np.float64) for column in columns[2:])
    return np.array(chained, np.int64), lengths, num_ranks, seconds, budgets


def composed_ranks(
    cuts: Int32, chained: Int64, documents: Int32, work: Float, bounds: Int64, shared: Int64, count: int, own: Float,
    budget: float, ends: Int64, smallest: float, least: Float, in_step: bool, by_work: bool, mixes: bool,
) -> Any:  # fmt: skip
    """Make the MicroPacks of all ranks of a block, equally many: those that have fewer get empty ones at the end."""
    made, firsts = [], np.cumsum([0, *chained])
    for rank, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:])):
        mine = cuts[:, (firsts[rank] <= cuts[0]) & (cuts[0] < firsts[rank + 1])].copy()
        mine[0] -= firsts[rank]
        of_rank = int(chained[rank]), documents[:, begin:end], work[begin:end], int(shared[rank])
        made.append(
            composed(mine, *of_rank, count, float(own[rank]), budget, ends, smallest, float(least[rank]),
                     in_step, by_work, mixes)
        )  # fmt: skip
    packs = max(chains.size for _, _, chains in made)
    offsets, chains_of = [np.zeros(1, np.int32)], []
    for one, slices, chains in made:
        missing = packs - chains.size
        offsets.append(offsets[-1][-1:] + np.append(one[1:], np.repeat(slices.shape[1], missing)))
        more = chains.max(initial=-1) + 1 + np.arange(missing)
        chains_of.append(np.append(chains, more).astype(np.int32))
    found = [backward_order(chains, chains) for chains in chains_of]
    shape = (len(made), packs)
    return (
        np.concatenate(offsets).astype(np.int32),
        np.concatenate([slices for _, slices, _ in made], axis=1),
        np.array(chains_of, np.int32).reshape(shape),
        np.array([order + rank * packs for rank, (order, _) in enumerate(found)], np.int64).reshape(shape),
        np.array([waits for _, waits in found], np.int32).reshape(shape),
    )


def task_seconds(
    ahead: Float, back: Float, layers: Float, has_head: Float, gather: Float, splits: bool, head_at_once: bool
) -> Any:
    """Return what tasks take the slowest rank: forward, backward, and weight gradients where they are apart."""
    many, head = layers[:, np.newaxis], has_head[:, np.newaxis]
    each = [_rank_seconds(*one, many, head, head_at_once) for one in zip(ahead, back)]
    forward, inputs, weights = (np.array(kind) for kind in zip(*each))
    floors = gather[:, :, np.newaxis]
    weight = np.maximum(weights.max(axis=0), floors[2]) if splits else np.zeros_like(weights[0])
    backward = (inputs if splits else inputs + weights).max(axis=0)
    return np.maximum(forward.max(axis=0), floors[0]), np.maximum(backward, floors[1]), weight


def _rank_seconds(ahead: Float, back: Float, many: Float, head: Float, head_at_once: bool) -> Any:
    """What the tasks of one rank take by themselves."""
    forward, weights = many * ahead[:, FORWARD_LAYER], many * back[:, WEIGHT_LAYER]
    inputs = many * back[:, INPUT_LAYER] + head * back[:, INPUT_HEAD]
    if head_at_once:
        return forward, inputs + head * (back[:, FORWARD_HEAD] + back[:, WEIGHT_HEAD]), weights
    return forward + head * ahead[:, FORWARD_HEAD], inputs, weights + head * back[:, WEIGHT_HEAD]


def _chains(chains: Int32) -> list[list[int]]:
    """MicroPacks of each chain, in order."""
    return [list(packs) for _, packs in groupby(range(chains.size), key=lambda pack: chains[pack])]


def reversed_chains(chains: Int32) -> Int64:
    """Return the order in which the backward pass runs MicroPacks: chains as they stand, each from its last one."""
    return np.array([pack for chain in _chains(chains) for pack in reversed(chain)], np.int64)


def backward_waits(chains: Int32, forward_chains: Int32, order: Int64) -> Int32:
    """Return the last forward MicroPack of the chain of each backward MicroPack, in the order in which they run."""
    last_forward = [chain[-1] for chain in _chains(forward_chains)]
    chain_of = {pack: number for number, chain in enumerate(_chains(chains)) for pack in chain}
    # Empty MicroPacks at the end may have no like in the forward pass.
    after = [last_forward[min(chain_of[pack], len(last_forward) - 1)] for pack in order.tolist()]
    return np.array(after, np.int32)


def backward_order(chains: Int32, forward_chains: Int32) -> tuple[Int64, Int32]:
    """Return what `reversed_chains` and `backward_waits` do."""
    order = reversed_chains(chains)
    return order, backward_waits(chains, forward_chains, order)
