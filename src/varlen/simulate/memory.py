"""What each GPU holds over the step: states, activations between the passes, accumulators of key-value gradients."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from varlen.cost.memory import Memory
from varlen.simulate import kernels
from varlen.simulate.graph import Graph
from varlen.step_plan import BACKWARD, FORWARD, WEIGHT, MicroPacks, StepPlan
from varlen.types import FloatArray, Int32Array, IntArray


class Curves(NamedTuple):
    """What one GPU of each stage holds, as points in time; see `Timeline`."""

    offsets: IntArray
    times_s: FloatArray
    sizes_bytes: FloatArray


class TaskBytes(NamedTuple):
    """What tasks take and leave, of one GPU; chunk by chunk and MicroPack by MicroPack."""

    forward_peaks: FloatArray
    """float64 `[chunks, forward MicroPacks]`: the most beyond what was there before."""
    forward_left: FloatArray
    """float64 of the same shape: what is there more when the task ends."""
    backward_peaks: FloatArray
    """float64 `[chunks, backward MicroPacks]`."""
    backward_left: FloatArray
    """float64 of the same shape; below 0 where it gives back."""
    waiting: FloatArray
    """float64 of the same shape: what weight gradients wait with, where they are tasks of their own; else 0."""
    begins: FloatArray
    """float64 `[ranks, stages]`: what is received before the first task."""


def plan_bytes(plan: StepPlan, memory: Memory) -> TaskBytes:
    """Return what each MicroPack of a plan takes in each chunk of layers.

    Cost: O(slices + chunks * MicroPacks).
    """
    mesh = plan.mesh
    offsets, forward, ranks = _slices(plan, plan.forward)
    ahead = forward_counts(offsets, forward, ranks, mesh.cp)[np.newaxis]
    offsets, slices, ranks = _slices(plan, plan.backward)
    order = np.arange(plan.backward.num_micropacks)
    back = backward_counts(offsets, slices, order, ranks, mesh.cp, forward)[np.newaxis]
    found = bytes_of(memory, ahead, back, mesh.pp, splits=plan.splits_backward)
    begins = np.zeros((mesh.dp, mesh.pp))
    for rank in range(mesh.dp) if memory.first_bytes.any() else ():
        of_ranks = (packs.rank_offsets[rank : rank + 2].tolist() for packs in (plan.forward, plan.backward))
        first, second = (counts[:, :, slice(*ends)].copy() for counts, ends in zip((ahead, back), of_ranks))
        begins[rank] = bytes_of(memory, first, second, mesh.pp, splits=False).begins[0]
    return TaskBytes._make([*(of_rank[0] for of_rank in found[:-1]), begins])


def _slices(plan: StepPlan, packs: MicroPacks) -> tuple[Int32Array, Int32Array, Int32Array]:
    """What counting takes; of arrays that can't be written kernels would be compiled once more."""
    ids = packs.document_ids
    is_end = (packs.stops == plan.lengths[ids]).astype(np.int32)
    table = np.stack([packs.starts, packs.stops, plan.num_ranks[ids], ids, is_end])
    return packs.slice_offsets.copy(), table, packs.rank_offsets.copy()


@functools.lru_cache(maxsize=64)
def _coefficients(memory: Memory, splits: bool) -> tuple[FloatArray, ...]:
    """Bytes as arrays that can be written, so that kernels are compiled once; none of them is."""
    tables = memory.forward_peaks, memory.forward_left, memory.backward_peaks, memory.backward_left
    return (
        *(table.copy() for table in tables),
        memory.kept_for_weight_bytes * splits,
        memory.first_bytes.copy(),
    )


def bytes_of(
    memory: Memory, forward: FloatArray, backward: FloatArray, stages: int, *, splits: bool
) -> TaskBytes:
    """Return what MicroPacks of ranks take, given what they count; with ranks as a first dimension.

    Args:
        forward: float64 `[ranks, 7, MicroPacks]`, by `forward_counts`.
        backward: float64 `[ranks, 14, MicroPacks]`, by `backward_counts`.
    """
    forward_peaks, forward_left, backward_peaks, backward_left, apart, first = _coefficients(memory, splits)
    return TaskBytes._make(
        kernels.task_bytes(
            forward,
            backward,
            forward_peaks,
            forward_left,
            backward_peaks,
            backward_left,
            apart,
            first,
            stages,
        )
    )


def forward_counts(
    slice_offsets: Int32Array, slices: Int32Array, rank_offsets: Int32Array, cp: int
) -> FloatArray:
    """Return what forward MicroPacks count of what takes memory; float64 `[7, MicroPacks]`.

    Args:
        slice_offsets: int32 `[MicroPacks + 1]`.
        slices: int32 `[5, slices]`: starts, stops, data-parallel ranks that share it, document ids, whether its
            document ends here.
        rank_offsets: int32 `[ranks + 1]`.
    """
    found: FloatArray = kernels.forward_counts(slice_offsets, slices, rank_offsets, cp)
    return found


def backward_counts(
    slice_offsets: Int32Array,
    slices: Int32Array,
    order: IntArray,
    rank_offsets: Int32Array,
    cp: int,
    forward: Int32Array,
) -> FloatArray:
    """Return what backward MicroPacks count of what takes memory, as they run; float64 `[14, MicroPacks]`.

    Args:
        slice_offsets: int32 `[MicroPacks + 1]`.
        slices: int32 `[5, slices]`: as for `forward_counts`.
        order: int64 `[MicroPacks]`: in which they run.
        rank_offsets: int32 `[ranks + 1]`: in that order.
        forward: int32 `[5, forward slices]` of the same documents; may be `slices`, where both passes are cut alike.
    """
    cuts = np.zeros(0, np.int64)
    if forward is not slices:  # else every piece goes as it came
        cuts = np.sort(forward[3].astype(np.int64) << 32 | forward[1])
    found: FloatArray = kernels.backward_counts(slice_offsets, slices, order, rank_offsets, cp, cuts)
    return found


def memory_of(plan: StepPlan, memory: Memory, graph: Graph, starts: FloatArray, stops: FloatArray) -> Curves:
    """Return what each stage holds over time (`starts`: float64 `[num_tasks]`; `stops`: float64 `[num_tasks]`).

    A task takes as it starts what it holds at its peak, and gives back as it stops all but what it leaves: a forward
    MicroPack its rows' activations and keys and values, the backward what a separate weight-gradient task needs,
    which goes with that. Weight gradients are added to those that the states count.

    Cost: O(tasks).
    """
    mesh = plan.mesh
    num_places = mesh.dp * mesh.pp
    offsets = graph.stream_offsets[: num_places + 1]
    count = int(offsets[-1])
    kinds, chunks, micropacks = graph.kinds[:count], graph.chunks[:count], graph.micropacks[:count]
    taken = plan_bytes(plan, memory)
    at_start, at_stop = np.zeros(count), np.zeros(count)
    for kind, peaks, left in (
        (FORWARD, taken.forward_peaks, taken.forward_left),
        (BACKWARD, taken.backward_peaks, taken.backward_left),
        (WEIGHT, 0 * taken.waiting, -taken.waiting),
    ):
        some = np.flatnonzero(kinds == kind)
        where = chunks[some], micropacks[some]
        at_start[some] = peaks[where]
        at_stop[some] = left[where] - peaks[where]
    points = 2 * count + num_places
    times, sizes = np.empty(points), np.empty(points)
    begins = np.tile(memory.state_bytes, mesh.dp) + taken.begins.ravel()
    kernels.memory_curves(offsets, at_start, at_stop, starts[:count], stops[:count], begins, times, sizes)
    return Curves(2 * offsets.astype(np.int64) + np.arange(num_places + 1), times, sizes)
