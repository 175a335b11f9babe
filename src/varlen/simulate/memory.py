"""What each GPU holds over the step: states, activations between the passes, accumulators of key-value gradients."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from varlen import jit
from varlen.cost.memory import Memory
from varlen.cost.phases import OWN
from varlen.simulate.graph import Graph
from varlen.step_plan import BACKWARD, FORWARD, WEIGHT, StepPlan
from varlen.types import FloatArray, Int32Array, IntArray

_kernel = functools.partial(jit.kernel, "varlen.simulate", "kernels")


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


def plan_bytes(plan: StepPlan, memory: Memory) -> TaskBytes:
    """Return what each MicroPack of a plan takes in each chunk of layers.

    Args:
        plan: its tasks aren't read.
        memory: bytes of rows.

    Cost: O(slices + chunks * MicroPacks).
    """
    ahead, back = plan.forward, plan.backward
    # Of arrays that can't be written the kernels would be compiled once more.
    counts = forward_counts(
        ahead.slice_offsets.copy(),
        ahead.starts.copy(),
        ahead.stops.copy(),
        plan.num_ranks[ahead.document_ids],
        ahead.document_ids.copy(),
        plan.mesh.cp,
    )
    back_counts = backward_counts(
        back.slice_offsets.copy(),
        back.starts.copy(),
        back.stops.copy(),
        plan.num_ranks[back.document_ids],
        (back.stops == plan.lengths[back.document_ids]).astype(np.int32),
        plan.mesh.cp,
    )
    of_ranks = bytes_of(memory, counts[np.newaxis], back_counts[np.newaxis], splits=plan.splits_backward)
    return TaskBytes(*(of_rank[0] for of_rank in of_ranks))


def bytes_of(memory: Memory, forward: FloatArray, backward: FloatArray, *, splits: bool) -> TaskBytes:
    """Return what MicroPacks of ranks take, given what they count; with ranks as a first dimension.

    Args:
        memory: bytes of rows.
        forward: float64 `[ranks, 5, MicroPacks]`, by `forward_counts`.
        backward: float64 `[ranks, 9, MicroPacks]`, by `backward_counts`.
        splits: whether weight gradients are tasks of their own.
    """
    task_bytes = _kernel("task_bytes")
    # Copies can be written, so that kernels are compiled once.
    peaks, left = task_bytes(forward, memory.forward_peaks.copy(), memory.forward_left.copy())
    back_peaks, back_left = task_bytes(backward, memory.backward_peaks.copy(), memory.backward_left.copy())
    apart = memory.kept_for_weight_bytes * splits
    return TaskBytes(
        forward_peaks=peaks,
        forward_left=left,
        backward_peaks=back_peaks,
        backward_left=back_left,
        waiting=apart[:, np.newaxis] * backward[:, np.newaxis, OWN],
    )


def forward_counts(
    slice_offsets: Int32Array,
    starts: Int32Array,
    stops: Int32Array,
    num_ranks: Int32Array,
    document_ids: Int32Array,
    cp: int,
) -> FloatArray:
    """Return what forward MicroPacks count of what takes memory; float64 `[5, MicroPacks]`.

    Args:
        slice_offsets: int32 `[MicroPacks + 1]`.
        starts: int32 `[slices]`, all of their documents among them.
        stops: int32 `[slices]`.
        num_ranks: int32 `[slices]`: data-parallel ranks that share the slice.
        document_ids: int32 `[slices]`.
        cp: GPUs of a rank that share it.
    """
    found: FloatArray = _kernel("forward_counts")(slice_offsets, starts, stops, num_ranks, document_ids, cp)
    return found


def backward_counts(
    slice_offsets: Int32Array,
    starts: Int32Array,
    stops: Int32Array,
    num_ranks: Int32Array,
    is_end: Int32Array,
    cp: int,
) -> FloatArray:
    """Return what backward MicroPacks count of what takes memory; float64 `[9, MicroPacks]`.

    Args:
        slice_offsets: int32 `[MicroPacks + 1]`.
        starts: int32 `[slices]`.
        stops: int32 `[slices]`.
        num_ranks: int32 `[slices]`: data-parallel ranks that share the slice.
        is_end: int32 `[slices]`: 1 for the last slice of its document, else 0.
        cp: GPUs of a rank that share it.
    """
    found: FloatArray = _kernel("backward_counts")(slice_offsets, starts, stops, num_ranks, is_end, cp)
    return found


def memory_of(plan: StepPlan, memory: Memory, graph: Graph, starts: FloatArray, stops: FloatArray) -> Curves:
    """Return what each stage holds over time.

    A task takes as it starts what it holds at its peak, and gives back as it stops all but what it leaves: a forward
    MicroPack its rows' activations and keys and values, the backward what a separate weight-gradient task needs,
    which goes with that. Weight gradients are added to those that the states count.

    Args:
        plan: the plan.
        memory: bytes of states, and of rows in each chunk.
        graph: tasks; those of the first `dp * pp` streams compute.
        starts: float64 `[num_tasks]`.
        stops: float64 `[num_tasks]`.

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
    begins = np.tile(memory.state_bytes, mesh.dp)
    _kernel("memory_curves")(offsets, at_start, at_stop, starts[:count], stops[:count], begins, times, sizes)
    return Curves(2 * offsets.astype(np.int64) + np.arange(num_places + 1), times, sizes)
