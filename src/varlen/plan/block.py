"""A block of ranks as one pipeline: those that share documents run one order of tasks, so that none waits long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from varlen.cost.rates import NUM_COLUMNS, ROWS
from varlen.plan import kernels_block, kernels_compose
from varlen.plan.compose import BlockComposition, Composition
from varlen.plan.groups import Groups
from varlen.simulate.dispatch import Pipeline
from varlen.simulate.durations import gathers_s
from varlen.simulate.memory import backward_counts, bytes_of, forward_counts
from varlen.simulate.stage_costs import StageCosts, priced
from varlen.types import FloatArray, Int32Array, IntArray


def blocks_of(groups: Groups, dp: int, *, in_step: bool) -> IntArray:
    """Return where blocks of ranks begin, int64 `[num_blocks + 1]`.

    A block is the ranks of the largest group that shares a document, or a rank that shares none: groups are aligned
    powers of two, so that smaller ones lie within larger ones.

    Args:
        groups: which ranks hold each document.
        dp: ranks.
        in_step: all ranks are one block, because parameters are sharded and gathered MicroPack by MicroPack.
    """
    if in_step:
        return np.array([0, dp])
    is_inside = np.zeros(dp + 1, np.bool_)
    shared = np.flatnonzero((groups.num_ranks > 1) & (groups.first_ranks >= 0))
    for first, size in zip(groups.first_ranks[shared].tolist(), groups.num_ranks[shared].tolist()):
        is_inside[first + 1 : first + size] = True
    return np.flatnonzero(~is_inside)


def padded(compositions: Sequence[Composition]) -> list[Composition]:
    """Give all ranks of a block equally many MicroPacks, empty ones at the end of those that have fewer.

    Args:
        compositions: one a rank.
    """
    count = max(composition.num_micropacks for composition in compositions)
    return [composition.extended(count) for composition in compositions]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockWork:
    """What a block's MicroPacks are by themselves, whatever a chunk of layers makes of them: priced, in order."""

    ahead: FloatArray
    """float64 `[ranks, forward MicroPacks, 7]`: as `stage_costs.priced`."""
    back: FloatArray
    """float64 `[ranks, backward MicroPacks, 7]`: in the order in which they run."""
    send_forward: FloatArray
    send_backward: FloatArray
    after: Int32Array
    """These three as `Pipeline` has them."""
    counts_forward: FloatArray
    """float64 `[ranks, 7, forward MicroPacks]`: as `forward_counts`."""
    counts_backward: FloatArray
    """float64 `[ranks, 14, backward MicroPacks]`: as `backward_counts`, in the order in which they run."""


def work_of_block(
    forward: Sequence[Composition], backward: Sequence[Composition], costs: StageCosts
) -> BlockWork:
    """Price the MicroPacks of a block's ranks, composed apart for both passes, and say what each waits for.

    Args:
        forward: one a rank, all of the same number of MicroPacks.
        backward: the same for the backward pass, with the same chains of the same documents; may be equal.
        costs: of the mesh; whether weight gradients stand apart makes no difference.

    Cost: O(slices).
    """
    ahead = _joined(forward, forward)
    return work_of(ahead, ahead if backward is forward else _joined(backward, forward), costs)


def work_of(forward: BlockComposition, backward: BlockComposition, costs: StageCosts) -> BlockWork:
    """Price the MicroPacks of a block's ranks.

    Args:
        forward: of the forward pass.
        backward: of the backward pass; may be the same ones.
        costs: of the mesh; whether weight gradients stand apart makes no difference.

    Cost: O(slices).
    """
    (ranks, count), cp = forward.chains.shape, costs.mesh.cp
    rank_offsets = _rank_offsets(forward)
    ahead = priced(costs, forward.slice_offsets, forward.slices)
    counts = forward_counts(forward.slice_offsets, forward.slices, rank_offsets, cp)
    back, back_offsets = ahead, rank_offsets
    if backward is not forward:
        back = priced(costs, backward.slice_offsets, backward.slices)
        back_offsets = _rank_offsets(backward)
    back = back[backward.order]
    order = backward.order.ravel()
    back_counts = backward_counts(
        backward.slice_offsets, backward.slices, order, back_offsets, cp, forward.slices
    )
    latency, per_row = costs.send_latency_s, costs.send_s_per_row
    return BlockWork(
        ahead=ahead.reshape(ranks, count, NUM_COLUMNS),
        back=back,
        send_forward=ahead[:, ROWS].reshape(ranks, count).max(axis=0) * per_row + latency,
        send_backward=back[:, :, ROWS].max(axis=0) * per_row + latency,
        after=backward.waits.max(axis=0),
        counts_forward=_by_rank(counts, ranks),
        counts_backward=_by_rank(back_counts, ranks),
    )


def _joined(compositions: Sequence[Composition], forward: Sequence[Composition]) -> BlockComposition:
    """Compositions of a block's ranks, of either pass."""
    ends = np.cumsum([0, *(one.slices.shape[1] for one in compositions)], dtype=np.int32)
    offsets = [one.slice_offsets[:-1] + end for one, end in zip(compositions, ends)]
    found = [
        kernels_compose.backward_order(one.chains, ahead.chains) for one, ahead in zip(compositions, forward)
    ]
    packs = compositions[0].num_micropacks
    return BlockComposition(
        slice_offsets=np.concatenate([*offsets, ends[-1:]]),
        slices=np.concatenate([one.slices for one in compositions], axis=1),
        chains=np.array([one.chains for one in compositions]),
        order=np.array([order + rank * packs for rank, (order, _) in enumerate(found)]),
        waits=np.array([waits for _, waits in found]),
    )


def _rank_offsets(made: BlockComposition) -> Int32Array:
    """Where the MicroPacks of each rank begin, int32 `[ranks + 1]`."""
    ranks, packs = made.chains.shape
    offsets: Int32Array = (packs * np.arange(ranks + 1)).astype(np.int32)
    return offsets


def _by_rank(counts: FloatArray, ranks: int) -> FloatArray:
    """`[things, ranks * MicroPacks]` as `[ranks, things, MicroPacks]`."""
    apart = counts.reshape(len(counts), ranks, -1).swapaxes(0, 1)
    return np.ascontiguousarray(apart)


def pipeline_of_block(work: BlockWork, costs: StageCosts) -> Pipeline:
    """Return what a block's pipeline has to do: of each MicroPack what it takes the slowest rank.

    An order of tasks for this pipeline is one for all of its ranks, and none of them takes longer with it.

    Args:
        work: of the block.
        costs: of the mesh.

    Cost: O(ranks * MicroPacks * chunks).
    """
    taken = bytes_of(
        costs.memory, work.counts_forward, work.counts_backward, costs.mesh.pp, splits=costs.splits
    )
    forward, backward, weight = kernels_block.task_seconds(
        work.ahead,
        work.back,
        costs.layers,
        costs.heads,
        gathers_s(costs.gather_s, splits=costs.splits),
        costs.splits,
        costs.head_at_once,
    )
    return Pipeline(
        forward=forward,
        backward=backward,
        weight=weight,
        send_forward=work.send_forward,
        send_backward=work.send_backward,
        after=work.after,
        **taken._asdict(),
        limits=costs.limits,
        splits=costs.splits,
    )
