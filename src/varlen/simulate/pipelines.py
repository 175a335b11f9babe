"""What the pipeline of a rank has to do, put together from what its tasks take: the dispatcher's input."""

from __future__ import annotations

import numpy as np

from varlen.cost.model import CostModel
from varlen.simulate.computes import last_forwards
from varlen.simulate.dispatch import Pipeline
from varlen.simulate.durations import Durations, durations, gathers_s
from varlen.simulate.memory import accumulators
from varlen.simulate.stage_costs import StageCosts, stage_costs
from varlen.step_plan import BACKWARD, FORWARD, WEIGHT, StepPlan
from varlen.types import FloatArray, Int32Array

ALL = slice(None)


def pipeline_of(
    costs: StageCosts,
    seconds: Durations,
    after: Int32Array,
    opened: FloatArray,
    closed: FloatArray,
    ahead: slice = ALL,
    back: slice = ALL,
) -> Pipeline:
    """Put together what one rank's pipeline has to do.

    Args:
        costs: of the mesh.
        seconds: of tasks, those of other ranks perhaps among them.
        after: int32 `[backward MicroPacks]`, as `Pipeline.after`.
        opened: float64 `[backward MicroPacks]`: rows whose dK/dV is opened.
        closed: float64 `[backward MicroPacks]`: rows whose dK/dV is closed.
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
        rows_forward=seconds.forward_rows[ahead].copy()[np.newaxis],
        rows_backward=np.stack([seconds.backward_rows[back], opened, closed])[np.newaxis],
        per_row=costs.per_row,
        limits=costs.limits,
        splits=costs.splits,
    )


def pipelines_of(plan: StepPlan, cost: CostModel) -> list[Pipeline]:
    """Return what each data-parallel rank's pipeline has to do, where ranks share nothing.

    Args:
        plan: its tasks aren't read.
        cost: what everything takes.

    Raises:
        PlanError: a rank runs the backward of a document and not its forward.
    """
    costs = stage_costs(cost, plan.mesh, splits=plan.splits_backward)
    seconds, after = durations(plan, cost), last_forwards(plan)
    opened, closed = accumulators(plan)
    pipelines = []
    for rank in range(plan.mesh.dp):
        ahead = slice(*plan.forward.rank_offsets[rank : rank + 2].tolist())
        back = slice(*plan.backward.rank_offsets[rank : rank + 2].tolist())
        own = np.maximum(after[back] - ahead.start, -1).astype(np.int32)
        pipelines.append(pipeline_of(costs, seconds, own, opened[back], closed[back], ahead, back))
    return pipelines
