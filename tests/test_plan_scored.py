"""Scores of candidates are what the simulator says, also where ranks have empty MicroPacks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import varlen as vl
from varlen.plan.baselines.packed import packed
from varlen.plan.scored import unordered
from varlen.simulate.api import simulate
from varlen.simulate.dispatch import dispatch
from varlen.simulate.pipelines import pipelines_of

COST = vl.CostModel(
    model=vl.ModelShape.named("llama-2-7b"), hardware=vl.Hardware.named("h100"), recompute="full"
)


@pytest.mark.parametrize("virtual_stages", [1, 2, 4])
def test_the_slowest_dispatched_rank_takes_what_the_simulator_says(virtual_stages: int) -> None:
    mesh = vl.Mesh(dp=8, pp=2, tp=8, virtual_stages=virtual_stages)
    lengths = np.array([9000, 3000, 8000, 200, 5000, 7000, 60, 4000, 4500, 900, 8100], np.int32)
    plan = unordered(packed(lengths, mesh, 9088), lengths, COST, mesh, "packed")
    assert virtual_stages == 1 or (np.diff(plan.forward.slice_offsets) == 0).any()

    made = [dispatch(pipeline) for pipeline in pipelines_of(plan, COST)]
    ordered = dataclasses.replace(
        plan,
        tasks=np.concatenate([one.codes.ravel() for one in made]),
        task_offsets=np.append(
            0, np.cumsum([size for one in made for size in (one.codes.shape[1],) * mesh.pp])
        ).astype(np.int32),
    )
    timeline = simulate(ordered, COST, contention=False)
    sync_s = COST.gradient_sync_s(mesh).max()

    assert max(one.makespan_s for one in made) == pytest.approx(timeline.makespan_s - sync_s, rel=1e-3)
