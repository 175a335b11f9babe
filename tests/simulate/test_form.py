"""A plan made by hand is looked at before it is simulated: what is out of range is said, and never timed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import varlen as vl
from varlen.errors import PlanError, SettingError
from varlen.step_plan import MicroPacks, StepPlan

COST = vl.CostModel(model=vl.ModelShape.named("llama-3-8b"), hardware=vl.Hardware.named("h100"))
MESH = vl.Mesh(dp=2, pp=2, tp=8)


def planned() -> StepPlan:
    return vl.plan_step([9000, 200, 40_000, 1500], cost=COST, mesh=MESH)


def with_slice(plan: StepPlan, **changes: int) -> StepPlan:
    """The plan with other values of its first forward slice."""
    columns = {
        field.name: getattr(plan.forward, field.name).copy() for field in dataclasses.fields(MicroPacks)
    }
    for name, value in changes.items():
        columns[name][0] = value
    return dataclasses.replace(plan, forward=MicroPacks(**columns))


def part_of(micropacks: MicroPacks) -> MicroPacks:
    """Without the first token of the first slice of more than one."""
    starts = micropacks.starts.copy()
    starts[np.argmax(micropacks.stops - starts > 1)] += 1
    return dataclasses.replace(micropacks, starts=starts)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda plan: with_slice(plan, document_ids=4), r"forward.document_ids\[0\] is 4; it may be 0 to 3"),
        (lambda plan: with_slice(plan, stops=10**6), "forward slice 0 is the tokens .* which has"),
        (
            lambda plan: dataclasses.replace(plan, first_ranks=np.full(4, -1, np.int32)),
            "stands on . ranks? from rank -1",
        ),
        (
            lambda plan: dataclasses.replace(plan, mesh=vl.Mesh(dp=4, pp=2, tp=8)),
            "forward.rank_offsets is int32",
        ),
        (lambda plan: dataclasses.replace(plan, mesh=vl.Mesh(dp=2, pp=1, tp=8)), "task_offsets is int32"),
        (lambda plan: dataclasses.replace(plan, mesh=None), "mesh of the plan is a NoneType, no Mesh"),
        (
            lambda plan: dataclasses.replace(plan, backward=None),
            "backward of the plan is a NoneType, no Micro",
        ),
        (
            lambda plan: dataclasses.replace(
                plan, first_ranks=np.where(plan.num_ranks == 1, 1 - plan.first_ranks, 0).astype(np.int32)
            ),
            "forward slice . of document . is on rank 0, and the document on 1 rank from rank 1 .* elsewhere",
        ),
        (
            lambda plan: dataclasses.replace(plan, lengths=plan.lengths + np.array([0, 0, 7, 0], np.int32)),
            r"slices of document 2 hold 80,000 tokens of its 80,014 on 2 ranks \(1 of 4 documents differ\)",
        ),
        (
            lambda plan: dataclasses.replace(plan, backward=part_of(plan.backward)),
            "the backward slices of document",
        ),
    ],
)
def test_what_is_out_of_range_is_refused(change: Any, said: str) -> None:
    plan = planned()
    vl.simulate(plan, COST)

    with pytest.raises(PlanError, match=said):
        vl.simulate(change(plan), COST)


@pytest.mark.parametrize(
    "given", [lambda: (None, COST), lambda: (planned(), None), lambda: (planned(), "h100")]
)
def test_something_else_than_a_plan_and_a_cost_model_is_refused(given: Any) -> None:
    plan, cost = given()

    with pytest.raises(SettingError, match=r"give what vl\.plan_step returned, and a vl\.CostModel"):
        vl.simulate(plan, cost)


@pytest.mark.parametrize("given", [{"cost": None, "mesh": MESH}, {"cost": COST, "mesh": (2, 2)}])
def test_planning_needs_a_cost_model_and_a_mesh(given: Any) -> None:
    with pytest.raises(SettingError, match=r"give a vl\.CostModel and a vl\.Mesh"):
        vl.plan_step([10, 20], **given)


def test_a_mesh_of_more_gpus_than_there_are_is_refused() -> None:
    assert vl.Mesh(dp=2**17, tp=8).num_gpus == 2**20
    with pytest.raises(SettingError, match=r"a mesh of 8,000,000,000 GPUs .* a plan is of 1,048,576 at most"):
        vl.Mesh(dp=10**9, tp=8)


def test_a_mesh_that_has_no_work_for_its_ranks_is_refused_at_once() -> None:
    lengths = np.full(100, 2000)

    assert (
        vl.plan_step(lengths, cost=COST, mesh=vl.Mesh(dp=1024, tp=8), method="packed").num_tokens == 200_000
    )
    assert vl.plan_step(10 * [20_000], cost=COST, mesh=vl.Mesh(dp=1562, tp=8), method="packed").num_tokens
    for dp, cp, most in ((1563, 1, "1,562"), (2**17, 1, "1,562"), (2**16, 2, "1,024")):
        with pytest.raises(
            PlanError, match=f"dp={dp:,} for 200,000 tokens in 100 .* dp may be at most {most}"
        ):
            vl.plan_step(lengths, cost=COST, mesh=vl.Mesh(dp=dp, cp=cp, tp=8))


@pytest.mark.parametrize("given", [{"model": None}, {"hardware": "h100"}])
def test_a_cost_model_needs_a_shape_and_hardware(given: Any) -> None:
    with pytest.raises(SettingError, match=r"give a vl\.ModelShape and a vl\.Hardware"):
        COST.replace(**given)


@pytest.mark.parametrize("given", ["fast", [[1, 2], [3]], [None, "x", 1, 1]])
def test_a_slowdown_of_something_else_than_numbers_is_refused(given: Any) -> None:
    with pytest.raises(SettingError, match="slowdown is no array of numbers"):
        vl.simulate(planned(), COST, slowdown=given)
