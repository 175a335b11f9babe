"""A block of ranks as one pipeline: those that share documents run one order of tasks, so that none waits long."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from varlen import jit
from varlen.cost.rates import ROWS
from varlen.plan.compose import Composition
from varlen.plan.groups import Groups
from varlen.simulate.dispatch import Pipeline
from varlen.simulate.durations import gathers_s
from varlen.simulate.memory import backward_counts, bytes_of, forward_counts
from varlen.simulate.stage_costs import StageCosts, priced
from varlen.types import IntArray

_kernel = functools.partial(jit.kernel, "varlen.plan", "kernels_compose")
_JOINED = ("forward_peaks", "forward_left", "backward_peaks", "backward_left", "waiting")
_SAME = ("limits", "splits")


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


def pipeline_of_block(
    forward: Sequence[Composition], backward: Sequence[Composition], costs: StageCosts
) -> Pipeline:
    """Return what a block's pipeline has to do: of each MicroPack what it takes the slowest rank.

    An order of tasks for this pipeline is one for all of its ranks, and none of them takes longer with it.

    Args:
        forward: one a rank, all of the same number of MicroPacks.
        backward: the same for the backward pass; may be equal.
        costs: of the mesh.

    Cost: O(slices).
    """
    pipelines = [pipeline_of_rank(ahead, back, costs) for ahead, back in zip(forward, backward)]
    if len(pipelines) == 1:
        return pipelines[0]
    joined = {}
    for name in Pipeline.__slots__:
        values = [getattr(pipeline, name) for pipeline in pipelines]
        if name in _SAME:
            joined[name] = values[0]
        elif name in _JOINED:
            joined[name] = np.concatenate(values)
        else:
            joined[name] = functools.reduce(np.maximum, values)
    return Pipeline(**joined)


def pipeline_of_rank(forward: Composition, backward: Composition, costs: StageCosts) -> Pipeline:
    """Price a rank's MicroPacks and say what each waits for.

    Args:
        forward: MicroPacks of the rank.
        backward: those of the backward pass, with the same chains of the same documents.
        costs: of the mesh.

    Cost: O(slices).
    """
    order = backward.backward_order
    ahead = priced(costs, forward.slice_offsets, forward.slices)
    back = ahead if backward is forward else priced(costs, backward.slice_offsets, backward.slices)
    after = _kernel("backward_waits")(backward.chains, forward.chains, order)
    counts = forward_counts(forward.slice_offsets, *forward.slices[:4], costs.mesh.cp)
    starts, stops, num_ranks, _, is_end = backward.slices
    back_counts = backward_counts(backward.slice_offsets, starts, stops, num_ranks, is_end, costs.mesh.cp)
    taken = bytes_of(costs.memory, counts, back_counts, order, costs.splits)
    forward_s, backward_s, weight_s = _kernel("task_seconds")(
        ahead,
        back,
        order,
        costs.layers,
        costs.heads,
        gathers_s(costs.gather_s, splits=costs.splits),
        costs.splits,
        costs.head_at_once,
    )
    rows, back_rows = ahead[:, ROWS], back[order, ROWS]
    return Pipeline(
        forward=forward_s,
        backward=backward_s,
        weight=weight_s,
        send_forward=rows * costs.send_s_per_row + costs.send_latency_s,
        send_backward=back_rows * costs.send_s_per_row + costs.send_latency_s,
        after=after,
        forward_peaks=taken.forward_peaks[np.newaxis],
        forward_left=taken.forward_left[np.newaxis],
        backward_peaks=taken.backward_peaks[np.newaxis],
        backward_left=taken.backward_left[np.newaxis],
        waiting=taken.waiting[np.newaxis],
        limits=costs.limits,
        splits=costs.splits,
    )
