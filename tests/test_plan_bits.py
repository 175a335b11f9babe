"""A plan is the same to its last bit however it is made: by compiled kernels or in plain Python, on any machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rarely import IS_SOAK

import varlen as vl
from varlen.cost.model import _interpolated
from varlen.plan.local_search import pipeline_of_block, work_of_block
from varlen.plan.micropack import micropack
from varlen.plan.search import Search
from varlen.plan.serialize import plan_fingerprint
from varlen.simulate.dispatch import Pipeline, pipelines_of
from varlen.simulate.graph import durations, stage_costs
from varlen.step_plan import PlanMethod, Recompute, Sharding

MODELS = ("llama-3-8b", "mistral-7b", "llama-2-7b")


def step_of(seed: int, method: PlanMethod) -> tuple[np.ndarray, vl.CostModel, vl.Mesh]:
    """A few documents, some of them long, on a small mesh."""
    rng = np.random.default_rng((seed, get_args(PlanMethod).index(method)))
    lengths = np.exp(rng.uniform(0, 10.3, rng.integers(2, 14))).astype(np.int32)
    cost = vl.CostModel(
        model=vl.ModelShape.named(MODELS[seed % len(MODELS)]),
        hardware=vl.Hardware.named("h100"),
        recompute=str(rng.choice(get_args(Recompute))),  # type: ignore[arg-type]
        offload="kv" if seed == 3 else "none",
    )
    dp, pp = ((2, 2), (3, 1), (4, 2))[seed % 3]
    sharding: Any = str(rng.choice(get_args(Sharding)))
    return lengths, cost, vl.Mesh(dp=dp, pp=pp, tp=4, sharding=sharding)


@pytest.mark.parametrize("method", get_args(PlanMethod))
def test_a_plan_and_its_seconds_are_the_same_without_kernels(
    method: PlanMethod, plain_python: Callable[[bool], None]
) -> None:
    for seed in range(5) if IS_SOAK else (0, 3):
        lengths, cost, mesh = step_of(seed, method)
        found = []
        for is_plain in (False, True):
            plain_python(is_plain)
            plan = vl.plan_step(lengths, cost=cost, mesh=mesh, method=method, tuned=True)
            timeline = vl.simulate(plan, cost)
            found.append((plan_fingerprint(plan), timeline.makespan_s, timeline.peak_bytes))

        assert found[0] == found[1]


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("cp", [1, 3])
@pytest.mark.parametrize("sharding", get_args(Sharding))
def test_a_rank_has_the_same_to_do_as_the_planner_and_as_a_plan_say(
    sharding: Sharding, cp: int, splits: bool
) -> None:
    mesh = vl.Mesh(dp=3, pp=4, cp=cp, tp=4, sharding=sharding)
    cost = vl.CostModel(model=vl.ModelShape.named("llama-3-8b"), hardware=vl.Hardware.named("h100"))
    lengths = np.exp(np.random.default_rng(cp).uniform(3, 11, 90)).astype(np.int32)
    search = Search(merges=False, splits_backward=splits)
    planned = micropack(lengths, cost, mesh, search)
    assert planned is not None
    answer, plan = planned.best, planned.plan()
    costs = stage_costs(cost, mesh, splits=plan.splits_backward)

    told = pipelines_of(plan, costs, durations(plan, cost))
    for rank, found in enumerate(map(told, range(mesh.dp))):
        work = work_of_block([answer.forward[rank]], [answer.backward[rank]], costs)
        own = pipeline_of_block(work, costs)
        held = found.send_backward > found.send_backward.min()
        for field in fields(Pipeline):
            one, other = getattr(own, field.name), getattr(found, field.name)
            if field.name == "after":
                # An empty MicroPack waits for nothing; the planner lets it stand where its chain does.
                one, other = one[held], other[held]
            np.testing.assert_array_equal(one, other, err_msg=field.name)


@given(
    st.lists(st.floats(0, 2), max_size=20),
    st.lists(st.floats(0.01, 1), min_size=1, max_size=9, unique=True),
    st.integers(0, 2**32 - 1),
)
def test_rates_are_interpolated_as_by_numpy(at: list[float], grid: list[float], seed: int) -> None:
    points, values = np.sort(grid), np.random.default_rng(seed).random(len(grid))
    where = np.concatenate([at, points])

    np.testing.assert_allclose(
        _interpolated(where, points, values), np.interp(where, points, values), rtol=1e-12
    )
