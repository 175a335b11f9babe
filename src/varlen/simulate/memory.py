"""What each GPU holds over the step: states, activations between the passes, accumulators of key-value gradients."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from varlen import jit
from varlen.cost.memory import Memory
from varlen.cost.phases import BEFORE, NEXT, OWN
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
    begins: FloatArray
    """float64 `[ranks, stages]`: what is received before the first task."""


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
    for of_pass, packs in ((counts, ahead), (back_counts, back)):
        of_pass[[NEXT, BEFORE]] = in_turn(of_pass[OWN], packs.rank_offsets)
    found = bytes_of(
        memory, counts[np.newaxis], back_counts[np.newaxis], plan.mesh.pp, splits=plan.splits_backward
    )
    begins = np.zeros((plan.mesh.dp, plan.mesh.pp))
    for of_pass, packs, of_row in ((counts, ahead, 0), (back_counts, back, 1)):
        for rank in range(plan.mesh.dp):
            mine = of_pass[OWN, slice(*packs.rank_offsets[rank : rank + 2].tolist())]
            begins[rank] += _first(memory, of_row, mine[np.newaxis], plan.mesh.pp)[0]
    return TaskBytes._make([*(of_ranks[0] for of_ranks in found[:-1]), begins])


def in_turn(rows: FloatArray, rank_offsets: npt.NDArray[np.integer]) -> FloatArray:
    """Return rows of the MicroPacks next to each on its rank that hold some, float64 `[2, MicroPacks]`: next, before.

    Args:
        rows: float64 `[MicroPacks]`: in the order in which each rank runs them.
        rank_offsets: `[ranks + 1]`.
    """
    found = np.zeros((2, len(rows)))
    some = np.flatnonzero(rows)
    ranks = np.searchsorted(rank_offsets, some, "right")
    one, other = some[:-1][ranks[1:] == ranks[:-1]], some[1:][ranks[1:] == ranks[:-1]]
    found[0, one], found[1, other] = rows[other], rows[one]
    return found


def _first(memory: Memory, of_row: int, rows: FloatArray, stages: int) -> FloatArray:
    """What stages receive before their first task of a pass, float64 `[ranks, stages]`."""
    first = rows[np.arange(len(rows)), (rows > 0).argmax(axis=1)] if rows.shape[1] else np.zeros(len(rows))
    of_stages = memory.first_bytes[of_row].reshape(-1, stages).sum(axis=0)
    begins: FloatArray = first[:, np.newaxis] * of_stages
    return begins


def bytes_of(
    memory: Memory, forward: FloatArray, backward: FloatArray, stages: int, *, splits: bool
) -> TaskBytes:
    """Return what MicroPacks of ranks take, given what they count; with ranks as a first dimension.

    Args:
        memory: bytes of rows.
        forward: float64 `[ranks, 7, MicroPacks]`, by `forward_counts`, and `in_turn`.
        backward: float64 `[ranks, 12, MicroPacks]`, by `backward_counts`, and `in_turn`.
        stages: of the pipeline.
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
        begins=_first(memory, 0, forward[:, OWN], stages) + _first(memory, 1, backward[:, OWN], stages),
    )


def forward_counts(
    slice_offsets: Int32Array,
    starts: Int32Array,
    stops: Int32Array,
    num_ranks: Int32Array,
    document_ids: Int32Array,
    cp: int,
) -> FloatArray:
    """Return what forward MicroPacks count of what takes memory; float64 `[7, MicroPacks]`.

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
    """Return what backward MicroPacks count of what takes memory; float64 `[12, MicroPacks]`.

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
    begins = np.tile(memory.state_bytes, mesh.dp) + taken.begins.ravel()
    _kernel("memory_curves")(offsets, at_start, at_stop, starts[:count], stops[:count], begins, times, sizes)
    return Curves(2 * offsets.astype(np.int64) + np.arange(num_places + 1), times, sizes)
