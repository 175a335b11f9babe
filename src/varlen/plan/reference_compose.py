"""Filling, ordering and waiting in plain Python: the specification, the oracle of the tests, and `VARLEN_JIT=0`."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    cuts: Int32, beside: Int64, filled: Float, heads: int, tails: int, in_step: bool, documents: Int32
) -> Any:
    """Put slices and whole documents together and MicroPacks in order; `varlen.plan.compose` says which."""
    num_cut, whole = cuts.shape[1], documents.shape[1] - beside.size
    held: list[list[tuple[int, int, int]]] = [[] for _ in range(filled.size)]
    for pack, (document, start, stop) in enumerate(cuts.T.tolist()):
        held[pack].append((start, stop, document))
    for document, pack in enumerate(beside.tolist(), start=whole):
        held[pack].append((0, int(documents[0, document]), document))
    tail, rest = num_cut + heads, num_cut + heads + tails
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
