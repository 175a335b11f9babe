"""What each GPU holds over the step: states, activations between the passes, accumulators of key-value gradients."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from varlen import jit
from varlen.cost.memory import Memory
from varlen.simulate.durations import Durations
from varlen.simulate.graph import Graph
from varlen.step_plan import BACKWARD, FORWARD, WEIGHT, StepPlan
from varlen.types import FloatArray, Int32Array, IntArray

_kernel = functools.partial(jit.kernel, "varlen.simulate", "kernels")


class Curves(NamedTuple):
    """What one GPU of each stage holds, as points in time; see `Timeline`."""

    offsets: IntArray
    times_s: FloatArray
    sizes_bytes: FloatArray


def accumulators(plan: StepPlan) -> tuple[FloatArray, FloatArray]:
    """Return rows whose key-value gradients begin, and those that stop, to be held in each backward MicroPack.

    The backward of a document's last slice adds to the keys and values of all rows before it; each earlier slice
    takes the sums of its own rows and is done with them.

    Args:
        plan: the plan.

    Returns:
        Two arrays float64 `[num_backward_micropacks]`, rows of one GPU.
    """
    packs = plan.backward
    begun, ended = accumulated(
        packs.slice_offsets.copy(),
        packs.starts.copy(),
        packs.stops.copy(),
        plan.num_ranks[packs.document_ids],
        (packs.stops == plan.lengths[packs.document_ids]).astype(np.int32),
        plan.mesh.cp,
    )
    return begun, ended


def accumulated(
    slice_offsets: Int32Array,
    starts: Int32Array,
    stops: Int32Array,
    num_ranks: Int32Array,
    is_end: Int32Array,
    cp: int,
) -> tuple[FloatArray, FloatArray]:
    """Return what `accumulators` does, of slices as arrays.

    Args:
        slice_offsets: int32 `[num_micropacks + 1]`.
        starts: int32 `[num_slices]`.
        stops: int32 `[num_slices]`.
        num_ranks: int32 `[num_slices]`: data-parallel ranks that share the slice.
        is_end: int32 `[num_slices]`: 1 for the last slice of its document, else 0.
        cp: GPUs of a rank that share it.
    """
    found: tuple[FloatArray, FloatArray] = _kernel("accumulated")(
        slice_offsets, starts, stops, num_ranks, is_end, cp
    )
    return found


def memory_of(
    plan: StepPlan, memory: Memory, durations: Durations, graph: Graph, starts: FloatArray, stops: FloatArray
) -> Curves:
    """Return what each stage holds over time.

    A forward MicroPack takes its rows' activations and keys and values as it starts. The backward gives them back
    as it stops, but for what a separate weight-gradient task needs, which goes with that. While a MicroPack runs
    forward or backward, it holds what the layer at work does; weight gradients are added to those that the states
    count.

    Args:
        plan: the plan.
        memory: bytes of states, and of rows in each chunk.
        durations: rows of each MicroPack.
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
    begun, ended = accumulators(plan)
    at_start, at_stop = np.zeros(count), np.zeros(count)
    for kind, rows in (
        (FORWARD, durations.forward_rows),
        (BACKWARD, durations.backward_rows),
        (WEIGHT, durations.backward_rows),
    ):
        some = np.flatnonzero(kinds == kind)
        chunk, micropack = chunks[some], micropacks[some]
        row = rows[micropack]
        passing = memory.passing_bytes[chunk] * row * (kind != WEIGHT)
        kept = memory.kept_for_weight_bytes[chunk] * row if plan.splits_backward else np.zeros(len(some))
        at_start[some] += passing
        at_stop[some] -= passing
        if kind == FORWARD:
            at_start[some] += memory.held_bytes[chunk] * row
        elif kind == BACKWARD:
            at_start[some] += memory.gradient_bytes[chunk] * begun[micropack]
            at_stop[some] -= (
                memory.gradient_bytes[chunk] * ended[micropack] + memory.held_bytes[chunk] * row - kept
            )
        else:
            at_stop[some] -= kept
    points = 2 * count + num_places
    times, sizes = np.empty(points), np.empty(points)
    begins = np.tile(memory.state_bytes, mesh.dp)
    _kernel("memory_curves")(offsets, at_start, at_stop, starts[:count], stops[:count], begins, times, sizes)
    return Curves(2 * offsets.astype(np.int64) + np.arange(num_places + 1), times, sizes)
