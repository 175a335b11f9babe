"""Memory of each GPU over the step: states, activations, accumulators of key-value gradients."""

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
    """Memory of one GPU of each stage, as points in time; see `Timeline`."""

    offsets: IntArray
    times_s: FloatArray
    sizes_bytes: FloatArray


class TaskBytes(NamedTuple):
    """Bytes that tasks allocate on one GPU, by chunk and MicroPack."""

    forward_peaks: FloatArray
    """float64 `[chunks, forward MicroPacks]`: the most in addition to those before the task."""
    forward_left: FloatArray
    """float64 of the same shape: bytes left when the task ends."""
    backward_peaks: FloatArray
    """float64 `[chunks, backward MicroPacks]`."""
    backward_left: FloatArray
    """float64 of the same shape; negative if it frees more than it allocates."""
    waiting: FloatArray
    """float64 of the same shape: bytes that separate weight-gradient tasks free; else 0."""
    begins: FloatArray
    """float64 `[ranks, stages]`: bytes received before the first task."""


def plan_bytes(plan: StepPlan, memory: Memory) -> TaskBytes:
    """Return the bytes of each MicroPack of a plan in each chunk of layers."""
    mesh = plan.mesh
    (offsets, forward, ranks), (back_offsets, backward, back_ranks) = (
        _slices(plan, packs) for packs in (plan.forward, plan.backward)
    )
    order = np.arange(plan.backward.num_micropacks)
    of_both = (offsets, forward), (back_offsets, backward)
    ahead = forward_counts(*of_both, ranks, mesh.cp)[np.newaxis]
    back = backward_counts(*of_both, order, back_ranks, mesh.cp)[np.newaxis]
    taken = bytes_of(memory, ahead, back, mesh.pp, splits=plan.splits_backward)
    begins = np.zeros((mesh.dp, mesh.pp))
    for rank in range(mesh.dp) if memory.first_bytes.any() else ():
        of_ranks = (packs.rank_offsets[rank : rank + 2].tolist() for packs in (plan.forward, plan.backward))
        first, second = (counts[:, :, slice(*ends)].copy() for counts, ends in zip((ahead, back), of_ranks))
        begins[rank] = bytes_of(memory, first, second, mesh.pp, splits=False).begins[0]
    return TaskBytes._make([*(of_rank[0] for of_rank in taken[:-1]), begins])


def _slices(plan: StepPlan, packs: MicroPacks) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Return arguments of the counts, as writable copies: numba compiles kernels again for read-only arrays."""
    ids = packs.document_ids
    is_end = (packs.stops == plan.lengths[ids]).astype(np.int32)
    table = np.stack([packs.starts, packs.stops, plan.num_ranks[ids], ids, is_end])
    return packs.slice_offsets.copy(), table, packs.rank_offsets.copy()


@functools.lru_cache(maxsize=64)
def _coefficients(memory: Memory, splits: bool) -> tuple[FloatArray, ...]:
    """Return the tables as writable copies, since numba compiles kernels again for read-only arrays."""
    tables = memory.forward_peaks, memory.forward_left, memory.backward_peaks, memory.backward_left
    return (
        *(table.copy() for table in tables),
        memory.kept_for_weight_bytes * splits,
        memory.first_bytes.copy(),
    )


def bytes_of(
    memory: Memory, forward: FloatArray, backward: FloatArray, stages: int, *, splits: bool
) -> TaskBytes:
    """Return the bytes of MicroPacks, given their counts; ranks are the first dimension of all arrays."""
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


Slices = tuple[Int32Array, Int32Array]
"""Of a pass: int32 `[MicroPacks + 1]`, where the slices of each begin; int32 `[5, slices]`: starts, stops, numbers of
ranks, document ids, whether the document ends here."""


def forward_counts(forward: Slices, backward: Slices, rank_offsets: Int32Array, cp: int) -> FloatArray:
    """Return the counts of forward MicroPacks (see `varlen.cost.memory`), float64 `[9, MicroPacks]`."""
    whole = kernels.are_whole(forward[1], backward[1], cp)
    counts: FloatArray = kernels.forward_counts(*forward, rank_offsets, cp, whole)
    return counts


def backward_counts(
    forward: Slices, backward: Slices, order: IntArray, rank_offsets: Int32Array, cp: int
) -> FloatArray:
    """Return the counts of backward MicroPacks in the `order` in which they run, float64 `[18, MicroPacks]`.

    Both passes are cut alike if the slices of both are the same object.
    """
    cuts = np.zeros(0, np.int64)
    if forward[1] is not backward[1]:  # else forward and backward slices are the same
        cuts = np.sort(forward[1][3].astype(np.int64) << 32 | forward[1][1])
    whole = kernels.are_whole(backward[1], forward[1], cp)
    counts: FloatArray = kernels.backward_counts(*backward, order, rank_offsets, cp, cuts, whole)
    return counts


def counts_of_both(
    forward: Slices,
    backward: Slices,
    order: IntArray,
    rank_offsets: tuple[Int32Array, Int32Array],
    cp: int,
) -> tuple[FloatArray, FloatArray]:
    """Return the counts of both passes by rank; within a pass, ranks have equally many MicroPacks.

    They are float64 `[ranks, 9, forward MicroPacks]` and `[ranks, 18, backward MicroPacks]`, in `order`.
    `rank_offsets` are those of both passes.
    """
    if forward[1] is backward[1]:
        ahead, back = kernels.counts_alike(*forward, order, rank_offsets[0], cp)
    else:
        ahead = forward_counts(forward, backward, rank_offsets[0], cp)
        back = backward_counts(forward, backward, order, rank_offsets[1], cp)
    ranks = rank_offsets[0].size - 1
    return _by_rank(ahead, ranks), _by_rank(back, ranks)


def _by_rank(counts: FloatArray, ranks: int) -> FloatArray:
    """Reshape `[counts, ranks * MicroPacks]` to `[ranks, counts, MicroPacks]`."""
    return np.ascontiguousarray(counts.reshape(len(counts), ranks, -1).swapaxes(0, 1))


def memory_of(plan: StepPlan, memory: Memory, graph: Graph, starts: FloatArray, stops: FloatArray) -> Curves:
    """Return the memory of each stage over time.

    A task allocates its peak as it starts, and frees all but what it leaves as it stops. A forward leaves its rows'
    activations, keys and values; a backward what a separate weight-gradient task needs, which that task frees. The
    states include the weight gradients.
    """
    mesh = plan.mesh
    num_stage_ids = mesh.dp * mesh.pp
    offsets = graph.stream_offsets[: num_stage_ids + 1]
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
    points = 2 * count + num_stage_ids
    times, sizes = np.empty(points), np.empty(points)
    begins = np.tile(memory.state_bytes, mesh.dp) + taken.begins.ravel()
    kernels.memory_curves(offsets, at_start, at_stop, starts[:count], stops[:count], begins, times, sizes)
    return Curves(2 * offsets.astype(np.int64) + np.arange(num_stage_ids + 1), times, sizes)
