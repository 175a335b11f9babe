"""Scores of candidates are what the simulator says, also where ranks have empty MicroPacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from rarely import IS_SOAK

import varlen as vl
from varlen.plan.baselines.dynamic_cp import dynamic_cp_candidates
from varlen.plan.baselines.packed import packed, packed_candidates
from varlen.plan.score import best_plan, score, unordered
from varlen.plan.search import Candidate
from varlen.simulate.api import simulate
from varlen.simulate.dispatch import dispatch, loads_s, pipelines_of
from varlen.simulate.graph import durations, stage_costs

COST = vl.CostModel(
    model=vl.ModelShape.named("llama-2-7b"), hardware=vl.Hardware.named("h100"), recompute="full"
)


@pytest.mark.parametrize("virtual_stages", [1, 2, 4])
def test_the_slowest_dispatched_rank_takes_what_the_simulator_says(virtual_stages: int) -> None:
    mesh = vl.Mesh(dp=8, pp=2, tp=8, virtual_stages=virtual_stages)
    lengths = np.array([9000, 3000, 8000, 200, 5000, 7000, 60, 4000, 4500, 900, 8100], np.int32)
    plan = unordered(packed(lengths, mesh, 9088), lengths, COST, mesh, "packed")
    assert virtual_stages == 1 or (np.diff(plan.forward.slice_offsets) == 0).any()

    seconds = durations(plan, COST)
    pipeline = pipelines_of(plan, stage_costs(COST, mesh), seconds)
    made = [dispatch(pipeline(rank)) for rank in range(mesh.dp)]
    loads = loads_s(plan, seconds)
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
    assert all(load <= one.makespan_s for one, load in zip(made, loads))
    for rank, load in enumerate(loads):
        ahead, back = (slice(*x.rank_offsets[rank : rank + 2]) for x in (plan.forward, plan.backward))
        chunks = seconds.forward[:, ahead].sum(1) + seconds.backward[:, back].sum(1)
        assert load == pytest.approx(max(chunks[stage :: mesh.pp].sum() for stage in range(mesh.pp)))


@pytest.mark.parametrize("candidates_of", [packed_candidates, dynamic_cp_candidates])
def test_candidates_that_are_left_out_were_slower(candidates_of: Callable[..., Iterator[Candidate]]) -> None:
    mesh = vl.Mesh(dp=4, pp=2, tp=8)
    for seed in range(5 if IS_SOAK else 2):
        lengths = np.exp(np.random.default_rng(seed).uniform(4, 10, 40)).astype(np.int32)
        # Seconds of attention alone are enough to make candidates differ.
        work = np.outer(lengths.astype(float) ** 2, [1, 1 / 2, 1 / 4])
        given = work if candidates_of is dynamic_cp_candidates else work[:, 0]
        candidates = list(candidates_of(lengths, given, mesh, int(lengths.max())))

        found = best_plan(lambda _, c=candidates: iter(c), (0,), lengths, COST, mesh, "packed")

        alone = [
            best_plan(lambda _, c=candidate: iter([c]), (0,), lengths, COST, mesh, "packed")
            for candidate in candidates
        ]
        seconds = [score(plan, COST) if plan else np.inf for plan in alone]
        assert found is not None
        assert len(candidates) > 5
        assert score(found, COST) <= min(seconds) * (1 + 1e-3)
