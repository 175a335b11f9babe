"""List scheduling: chooses the order in which each stage of a pipeline runs its tasks, and simulates it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from varlen.simulate import kernels
from varlen.simulate.graph import Durations, StageCosts, last_forwards
from varlen.simulate.memory import TaskBytes, plan_bytes
from varlen.step_plan import BACKWARD, FORWARD, WEIGHT, StepPlan
from varlen.types import FloatArray, Int32Array

_TRIES = 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pipeline:
    """The MicroPacks of a rank's pipeline; chunk q runs on stage q % stages.

    For several ranks that run one order of tasks, seconds are those of the slowest, bytes those of each.
    """

    forward: FloatArray
    """float64 `[chunks, forward MicroPacks]`: seconds."""
    backward: FloatArray
    """float64 `[chunks, backward MicroPacks]`: seconds, only of input gradients if the backward is split."""
    weight: FloatArray
    """float64 `[chunks, backward MicroPacks]`: seconds of weight gradients; 0 unless split."""
    send_forward: FloatArray
    """float64 `[forward MicroPacks]`: seconds from a chunk to the next."""
    send_backward: FloatArray
    """float64 `[backward MicroPacks]`."""
    after: Int32Array
    """int32 `[backward MicroPacks]`: the last forward MicroPack that holds a slice of its documents; -1 for an empty
    one."""
    forward_peaks: FloatArray
    """float64 `[ranks, chunks, forward MicroPacks]`: as in `TaskBytes`, like the following."""
    forward_left: FloatArray
    backward_peaks: FloatArray
    """float64 `[ranks, chunks, backward MicroPacks]`."""
    backward_left: FloatArray
    waiting: FloatArray
    """float64 `[ranks, chunks, backward MicroPacks]`; 0 unless split."""
    begins: FloatArray
    """float64 `[ranks, stages]`: bytes before the first task."""
    limits: FloatArray
    """float64 `[stages]`: bytes left beside the states."""
    splits: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dispatched:
    """An order of tasks, with its time and memory."""

    makespan_s: float
    """Seconds; inf if memory doesn't suffice."""
    codes: npt.NDArray[np.uint8]
    """uint8 `[stages, tasks]`: as `StepPlan.tasks`."""
    peaks_bytes: FloatArray
    """float64 `[stages]`: peak bytes beside the states."""


def dispatch(pipeline: Pipeline, *, forward_first: bool = False, limit_s: float = np.inf) -> Dispatched:
    """Choose the order in which stages run their tasks; gives up once it would take longer than `limit_s`.

    List scheduling (Graham 1966, "Bounds for Certain Multiprocessing Anomalies") with fixed orders of MicroPacks:
    each stage runs the next forward or the next backward, whichever can start first, the backward if both can (or the
    forward, with `forward_first`). A forward waits until there is memory for it, and for the peaks of backwards.
    Separate weight gradients fill gaps of at least a quarter of their time (Qi et al. 2023, arXiv 2401.10241). With
    equal costs this is 1F1B. Takes O(tasks * stages), about 0.1 µs each.
    """
    makespan, codes, peaks = kernels.dispatch(
        pipeline.forward,
        pipeline.backward,
        pipeline.weight,
        pipeline.send_forward,
        pipeline.send_backward,
        pipeline.after,
        pipeline.forward_peaks,
        pipeline.forward_left,
        pipeline.backward_peaks,
        pipeline.backward_left,
        pipeline.waiting,
        pipeline.begins,
        pipeline.limits,
        pipeline.splits,
        forward_first,
        float(limit_s),
        _TRIES,
    )
    if limit_s < makespan < np.inf:
        return Dispatched(makespan_s=makespan, codes=codes[:, :0], peaks_bytes=peaks)
    is_over = bool((peaks > pipeline.limits).any())
    return Dispatched(makespan_s=np.inf if is_over else makespan, codes=codes, peaks_bytes=peaks)


def _pipeline_of(
    costs: StageCosts,
    seconds: Durations,
    after: Int32Array,
    taken: TaskBytes,
    begins: FloatArray,
    ahead: slice,
    back: slice,
) -> Pipeline:
    """Build one rank's pipeline from its MicroPacks `ahead` (forward) and `back` (backward)."""
    # Sharded parameters are gathered while a task computes: it takes as long as the longer of the two.
    gathers = seconds.gather[:, :, np.newaxis]
    weight = seconds.weight[:, back]
    return Pipeline(
        forward=np.maximum(seconds.forward[:, ahead], gathers[FORWARD]),
        backward=np.maximum(seconds.backward[:, back], gathers[BACKWARD]),
        weight=np.maximum(weight, gathers[WEIGHT]) if costs.splits else weight.copy(),
        send_forward=seconds.send_forward[ahead] + seconds.latency_s,
        send_backward=seconds.send_backward[back] + seconds.latency_s,
        after=after,
        forward_peaks=taken.forward_peaks[np.newaxis, :, ahead].copy(),
        forward_left=taken.forward_left[np.newaxis, :, ahead].copy(),
        backward_peaks=taken.backward_peaks[np.newaxis, :, back].copy(),
        backward_left=taken.backward_left[np.newaxis, :, back].copy(),
        waiting=taken.waiting[np.newaxis, :, back].copy(),
        begins=begins[np.newaxis],
        limits=costs.limits,
        splits=costs.splits,
    )


def loads_s(plan: StepPlan, seconds: Durations) -> FloatArray:
    """Return the computing seconds of each data-parallel rank's busiest stage, float64 `[dp]`: a lower bound."""
    loads: FloatArray = _of_stages(plan, seconds)[0].max(axis=0)
    return loads


def bound_s(plan: StepPlan, seconds: Durations) -> float:
    """Return a lower bound on the seconds before the gradient sync, for any order of MicroPacks and tasks.

    A stage begins when a MicroPack has come to it, and the stages before it still run the input gradients of the last
    one when it ends. If both passes have the same MicroPacks, each runs through all stages and back.
    """
    loads, work, fill, drain = _of_stages(plan, seconds)
    bounds = [float(loads.max()), float((fill + work + drain)[:, plan.forward.counts > 0].max(initial=0.0))]
    if plan.forward.num_micropacks and np.array_equal(plan.forward.document_ids, plan.backward.document_ids):
        bounds.append(float((seconds.forward.sum(axis=0) + seconds.backward.sum(axis=0)).max()))
    return max(bounds)


def _of_stages(plan: StepPlan, seconds: Durations) -> FloatArray:
    """Return `kernels.stage_seconds` of a plan, float64 `[4, pp, dp]`."""
    passes = zip((plan.forward, plan.backward), (seconds.forward, seconds.backward))
    (ahead, forward), (back, backward) = (
        (packs.rank_offsets.copy(), taken.copy()) for packs, taken in passes
    )
    found: FloatArray = kernels.stage_seconds(
        ahead, back, forward, backward, seconds.weight.copy(), plan.mesh.pp
    )
    return found


def pipeline_of_all(plan: StepPlan, costs: StageCosts, seconds: Durations) -> Pipeline:
    """Return all ranks as one pipeline, in which each task takes as long as on the slowest rank.

    Ranks that share documents run one order of tasks; they have equally many MicroPacks.
    """
    dp, taken = plan.mesh.dp, plan_bytes(plan, costs.memory)
    after = last_forwards(plan).reshape(dp, -1) - plan.forward.rank_offsets[:-1, np.newaxis]

    def slowest(values: FloatArray) -> FloatArray:
        most: FloatArray = values.reshape(*values.shape[:-1], dp, -1).max(axis=-2)
        return most

    def of_each(values: FloatArray) -> FloatArray:
        return np.ascontiguousarray(values.reshape(len(values), dp, -1).swapaxes(0, 1))

    every = slice(None)
    one = _pipeline_of(
        costs,
        seconds,
        np.maximum(after.max(axis=0), -1).astype(np.int32),
        taken,
        taken.begins[0],
        every,
        every,
    )
    return replace(
        one,
        forward=slowest(one.forward),
        backward=slowest(one.backward),
        weight=slowest(one.weight),
        send_forward=slowest(one.send_forward),
        send_backward=slowest(one.send_backward),
        forward_peaks=of_each(taken.forward_peaks),
        forward_left=of_each(taken.forward_left),
        backward_peaks=of_each(taken.backward_peaks),
        backward_left=of_each(taken.backward_left),
        waiting=of_each(taken.waiting),
        begins=taken.begins,
    )


def pipelines_of(plan: StepPlan, costs: StageCosts, seconds: Durations) -> Callable[[int], Pipeline]:
    """Return a function from a data-parallel rank to its pipeline, for ranks that share no documents."""
    after = last_forwards(plan)
    taken = plan_bytes(plan, costs.memory)

    def of(rank: int) -> Pipeline:
        ahead = slice(*plan.forward.rank_offsets[rank : rank + 2].tolist())
        back = slice(*plan.backward.rank_offsets[rank : rank + 2].tolist())
        own = np.maximum(after[back] - ahead.start, -1).astype(np.int32)
        return _pipeline_of(costs, seconds, own, taken, taken.begins[rank], ahead, back)

    return of


def seconds_in_step(plan: StepPlan, codes: npt.NDArray[np.uint8], seconds: Durations) -> float:
    """Return what `simulate` measures of whole documents if all ranks run one order of tasks, `[stages, tasks]`.

    Ranks have equally many MicroPacks, the same in both passes, and parameters aren't sharded.
    """
    packs, dp = plan.forward, plan.mesh.dp
    of_tasks = np.stack([seconds.forward, seconds.backward, seconds.weight])
    lags = np.where(seconds.forward_rows > 0, seconds.latency_s, 0.0)
    leaders = np.repeat(np.arange(dp), packs.counts)
    filled = np.flatnonzero(np.diff(packs.slice_offsets))
    leaders[filled] = plan.first_ranks[packs.document_ids[packs.slice_offsets[filled]]]
    ends = kernels.run_in_step(
        codes,
        of_tasks.reshape(*of_tasks.shape[:2], dp, -1),
        seconds.send_forward.reshape(dp, -1).copy(),
        lags.reshape(dp, -1),
        leaders.reshape(dp, -1),
    )
    return float((ends.max(axis=1) + seconds.sync).max())
