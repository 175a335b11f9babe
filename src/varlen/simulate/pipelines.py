"""What the pipeline of a rank has to do, put together from what its tasks take: the dispatcher's input."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from varlen.simulate.computes import last_forwards
from varlen.simulate.dispatch import Pipeline
from varlen.simulate.durations import Durations, gathers_s
from varlen.simulate.memory import TaskBytes, plan_bytes
from varlen.simulate.stage_costs import StageCosts
from varlen.step_plan import BACKWARD, FORWARD, WEIGHT, StepPlan
from varlen.types import FloatArray, Int32Array

ALL = slice(None)


def pipeline_of(
    costs: StageCosts,
    seconds: Durations,
    after: Int32Array,
    taken: TaskBytes,
    begins: FloatArray,
    ahead: slice = ALL,
    back: slice = ALL,
) -> Pipeline:
    """Put together what one rank's pipeline has to do.

    Args:
        costs: of the mesh.
        seconds: of tasks, those of other ranks perhaps among them.
        after: int32 `[backward MicroPacks]`, as `Pipeline.after`.
        taken: bytes of the same tasks as `seconds`.
        begins: float64 `[stages]`: bytes before the first task.
        ahead: the rank's among the forward MicroPacks of `seconds`.
        back: the rank's among the backward ones.
    """
    # Parameters that are sharded are gathered while a task computes: it takes as long as the longer of the two.
    gathers = gathers_s(seconds.gather, splits=costs.splits)[:, :, np.newaxis]
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
    """Return how long each data-parallel rank's busiest stage computes, float64 `[dp]`: no order of tasks is faster.

    Args:
        plan: its tasks aren't read.
        seconds: of them.
    """
    pp, dp = plan.mesh.pp, plan.mesh.dp
    passes = [(plan.forward, seconds.forward), (plan.backward, seconds.backward)]
    if plan.splits_backward:
        passes.append((plan.backward, seconds.weight))
    stages = np.zeros((pp, dp))
    for micropacks, taken in passes:
        sums = np.zeros((taken.shape[0], taken.shape[1] + 1))
        np.cumsum(taken, axis=1, out=sums[:, 1:])
        of_chunks = np.diff(sums[:, micropacks.rank_offsets], axis=1)
        stages += of_chunks.reshape(-1, pp, dp).sum(axis=0)
    loads: FloatArray = stages.max(axis=0)
    return loads


def pipelines_of(plan: StepPlan, costs: StageCosts, seconds: Durations) -> Callable[[int], Pipeline]:
    """Return what tells each data-parallel rank's pipeline, where ranks share nothing.

    Args:
        plan: its tasks aren't read.
        costs: of its mesh.
        seconds: of its tasks.

    Raises:
        PlanError: a rank runs the backward of a document and not its forward.
    """
    after = last_forwards(plan)
    taken = plan_bytes(plan, costs.memory)

    def of(rank: int) -> Pipeline:
        ahead = slice(*plan.forward.rank_offsets[rank : rank + 2].tolist())
        back = slice(*plan.backward.rank_offsets[rank : rank + 2].tolist())
        own = np.maximum(after[back] - ahead.start, -1).astype(np.int32)
        return pipeline_of(costs, seconds, own, taken, taken.begins[rank], ahead, back)

    return of
