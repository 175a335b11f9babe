"""Plans of several ranks and stages, run in one process, have the gradients of the uncut model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rarely import examples
from tests.support.sliced import one_gpu_plan, take_gradients, tiny, tokens_of, uncut

import varlen as vl
from varlen.errors import DeadlockError
from varlen.plan.check import check_plan
from varlen.plan.search import Search
from varlen.runtime.step import run_step
from varlen.step_plan import BACKWARD, FORWARD

SMALL = Search(merges=False, splits_backward=False, repairs=False, least_rows=4)


def planned(
    model: Any, lengths: list[int], mesh: vl.Mesh, *, search: Search = SMALL, **settings: Any
) -> vl.StepPlan:
    """A plan of the planner's, whose slices are small enough to be many."""
    cost = vl.CostModel(
        model=vl.ModelShape.from_config(model.config),
        hardware=vl.Hardware.named("h100"),
        mode="flops",
        **settings,
    )
    return vl.plan_step(lengths, cost=cost, mesh=mesh, search=search)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], vl.Mesh, dict[str, Any]]:
    lengths = draw(st.lists(st.integers(1, 60), min_size=2, max_size=8).filter(lambda x: max(x) > 1))
    pp = draw(st.integers(1, 3))
    mesh = vl.Mesh(dp=draw(st.integers(1, 3)), pp=pp, virtual_stages=draw(st.integers(1, 2)) if pp > 1 else 1)
    share = draw(st.sampled_from([0, 0.5, 1]))
    settings = {"recompute": "full", "recompute_share": share} if share else {}
    return lengths, mesh, settings


@given(cases())
@examples(12, 60)
def test_every_rank_and_stage_does_its_part(case: tuple[list[int], vl.Mesh, dict[str, Any]]) -> None:
    lengths, mesh, chosen = case
    model = tiny("llama", num_hidden_layers=7)
    plan = planned(model, lengths, mesh, **chosen)
    check_plan(plan)
    tokens = tokens_of(lengths)
    loss, wanted = uncut(model, tokens, lengths)

    run = run_step(model, tokens, plan)

    assert run.loss == pytest.approx(loss, rel=1e-12)
    assert sum(len(place.kinds) for place in run.places) == len(plan.tasks)
    found = take_gradients(model)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert (gradient - wanted[name]).norm() <= 1e-12 * wanted[name].norm(), name


def test_stages_that_wait_for_each_other_are_told() -> None:
    mesh = vl.Mesh(pp=2)
    plan = one_gpu_plan([4, 4], [[(0, 0, 4)], [(1, 0, 4)]], mesh=mesh)
    order = [FORWARD, BACKWARD, FORWARD, BACKWARD]
    wrong = replace(
        plan,
        tasks=np.array([*order, FORWARD, FORWARD, BACKWARD, BACKWARD], np.uint8),
        task_offsets=np.array([0, 4, 8]),
    )

    with pytest.raises(
        DeadlockError, match=r"2 stages wait for each other; the first has come to \(1, 0, 0\)"
    ):
        run_step(tiny("llama"), tokens_of([4, 4]), wrong)
