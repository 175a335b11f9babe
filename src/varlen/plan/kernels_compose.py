"""Filling and ordering MicroPacks, and what their pipeline waits for, as numba kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

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
