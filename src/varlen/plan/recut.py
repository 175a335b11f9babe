"""Backward MicroPacks composed apart: long documents are cut anew, into slices of equal backward cost."""

from __future__ import annotations

import numpy as np

from varlen.cost import kernels
from varlen.cost.rates import Rates
from varlen.plan import kernels_compose
from varlen.plan.compose import ROW_MULTIPLE, TYPICAL_ROWS, Composition, seconds_of
from varlen.types import Int32Array, IntArray


def recut(composition: Composition, factor: float, *, least_rows: int, rates: Rates) -> Composition:
    """Return a rank's MicroPacks for the backward pass alone (SlimPack's asymmetric partitioning).

    The documents of a chain, the long one and the short ones beside it, stay together, so that its backward still
    waits for nothing but its own forward. The long one is cut into `factor` times as many slices of equal backward
    cost; short ones go to the MicroPack of the chain with the least.

    Args:
        composition: of the forward pass.
        factor: backward MicroPacks of a chain over its forward ones.
        least_rows: rows that a slice has at least.
        rates: of the mesh.

    Returns:
        MicroPacks in forward order; `backward_order` is the order in which they run.
    """
    sizes = np.diff(composition.slice_offsets)
    pack_of = np.repeat(np.arange(composition.num_micropacks), sizes)
    chain_of = composition.chains[pack_of]
    starts, stops, num_ranks, ids, is_end = composition.slices
    is_long = (starts > 0) | (is_end == 0)
    parts, chains = [], []
    for chain in dict.fromkeys(composition.chains.tolist()):
        mine = np.flatnonzero(chain_of == chain)
        long = mine[is_long[mine]]
        count = int(np.count_nonzero(composition.chains == chain))
        if not long.size:
            parts.append((np.zeros(mine.size, np.int64), composition.slices[:, mine]))
            chains += [chain]
            continue
        last = long[-1]
        length, ranks = stops[last : last + 1], num_ranks[last : last + 1]
        work = seconds_of(length, ranks, TYPICAL_ROWS, rates, forward_part=0.0)
        _, first, end = kernels.cut_evenly(
            length, ranks, work, work / max(1.0, count * factor), least_rows, ROW_MULTIPLE, 0.0, rates
        )
        shorts = mine[~is_long[mine]]
        loads = np.repeat(work / first.size, first.size)
        costs = seconds_of(stops[shorts], num_ranks[shorts], TYPICAL_ROWS, rates, forward_part=0.0)
        order = np.argsort(-costs, kind="stable")
        beside = np.empty(shorts.size, np.int64)
        beside[order] = kernels_compose.fill_lightest(costs[order], loads)
        again = np.ones_like(first)
        table = np.stack(
            [first, end, ranks[0] * again, ids[last] * again, (end == length[0]).astype(np.int32)]
        )
        parts.append(
            (
                np.append(np.arange(first.size), beside),
                np.concatenate([table, composition.slices[:, shorts]], axis=1),
            )
        )
        chains += [chain] * first.size
    return _joined(parts, chains)


def _joined(parts: list[tuple[IntArray, Int32Array]], chains: list[int]) -> Composition:
    """Put chains together: of each, the MicroPack of its slices among its own, and the slices."""
    chain_of = np.array(chains, np.int32)
    firsts = np.flatnonzero(np.diff(chain_of, prepend=-1))
    packs = np.concatenate([pack + first for (pack, _), first in zip(parts, firsts.tolist())])
    slices = np.concatenate([table for _, table in parts], axis=1)
    sizes = np.bincount(packs, minlength=chain_of.size)
    return Composition(
        slice_offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
        slices=np.ascontiguousarray(slices[:, np.argsort(packs, kind="stable")]).astype(np.int32),
        chains=chain_of,
    )
