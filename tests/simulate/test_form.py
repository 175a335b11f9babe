"""Plans that are out of form or can't run are refused in words, and never timed."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.step_plans import Slices, durations_of, equal_plan, memory_of, plan_of, step_plans

import varlen as vl
from varlen.errors import DeadlockError, PlanError, SettingError
from varlen.simulate.api import run_plan
from varlen.simulate.schedules import one_f_one_b
from varlen.simulate.timeline import Timeline
from varlen.step_plan import Mesh, MicroPacks, StepPlan

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
                plan, first_ranks=np.ones_like(plan.first_ranks), num_ranks=np.ones_like(plan.num_ranks)
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
def test_what_is_out_of_range_is_refused(change, said):
    plan = planned()
    vl.simulate(plan, COST)

    with pytest.raises(PlanError, match=said):
        vl.simulate(change(plan), COST)


@pytest.mark.parametrize(
    "given", [lambda: (None, COST), lambda: (planned(), None), lambda: (planned(), "h100")]
)
def test_something_else_than_a_plan_and_a_cost_model_is_refused(given):
    plan, cost = given()

    with pytest.raises(SettingError, match=r"give what vl\.plan_step returned, and a vl\.CostModel"):
        vl.simulate(plan, cost)


@pytest.mark.parametrize("given", [{"cost": None, "mesh": MESH}, {"cost": COST, "mesh": (2, 2)}])
def test_planning_needs_a_cost_model_and_a_mesh(given):
    with pytest.raises(SettingError, match=r"give a vl\.CostModel and a vl\.Mesh"):
        vl.plan_step([10, 20], **given)


def test_a_mesh_of_more_gpus_than_there_are_is_refused():
    assert vl.Mesh(dp=2**17, tp=8).num_gpus == 2**20
    with pytest.raises(SettingError, match=r"a mesh of 8,000,000,000 GPUs .* a plan is of 1,048,576 at most"):
        vl.Mesh(dp=10**9, tp=8)


def test_a_mesh_that_has_no_work_for_its_ranks_is_refused_at_once():
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
def test_a_cost_model_needs_a_shape_and_hardware(given):
    with pytest.raises(SettingError, match=r"give a vl\.ModelShape and a vl\.Hardware"):
        COST.replace(**given)


@pytest.mark.parametrize("given", ["fast", [[1, 2], [3]], [None, "x", 1, 1]])
def test_a_slowdown_of_something_else_than_numbers_is_refused(given):
    with pytest.raises(SettingError, match="slowdown is no array of numbers"):
        vl.simulate(planned(), COST, slowdown=given)


def run(plan: StepPlan) -> Timeline:
    return run_plan(plan, durations_of(plan, 1.0, 1.0), memory_of(plan))


def test_a_backward_before_its_forward_is_a_circle_of_one():
    packs: Slices = [[[(0, 0, 4)], [(0, 4, 8)]]]
    backward: Slices = [[[(0, 4, 8)], [(0, 0, 4)]]]
    plan = plan_of(packs, backward, [[0, 0, 1, 1], [0, 1, 0, 1]], Mesh(pp=2))

    with pytest.raises(DeadlockError) as caught:
        run(plan)

    assert str(caught.value).startswith(
        "the order of tasks waits in a circle: stage 1 of rank 0 waits in backward of MicroPack 0 for forward of "
        "MicroPack 1, which comes there after backward of MicroPack 0. "
    )
    assert "A backward MicroPack must come after every forward MicroPack" in str(caught.value)


def test_weight_gradients_before_their_inputs_are_a_circle():
    packs: Slices = [[[(0, 0, 4)]]]
    plan = plan_of(packs, packs, [[0, 2, 1]], Mesh(), splits_backward=True)

    with pytest.raises(
        DeadlockError, match="waits in weight gradients of MicroPack 0 for backward of MicroPack 0, "
    ):
        run(plan)


def test_a_circle_through_two_stages_names_both():
    packs: Slices = [[[(0, 0, 4)], [(1, 0, 4)]]]
    # Stage 0 wants a gradient before it sends the second MicroPack; stage 1 wants that first.
    plan = plan_of(packs, packs, [[0, 1, 0, 1], [0, 0, 1, 1]], Mesh(pp=2))

    with pytest.raises(DeadlockError) as caught:
        run(plan)

    message = str(caught.value)
    assert (
        "stage 0 of rank 0 waits in backward of MicroPack 0 for send backward of MicroPack 0 on stage 1"
        in message
    )
    assert (
        "stage 1 of rank 0 waits in forward of MicroPack 1 for send forward of MicroPack 1 on stage 0"
        in message
    )
    assert "of 12 tasks can't run" in message


def test_a_circle_across_merged_ranks_says_who_was_to_start_together():
    one, other = [(0, 0, 8)], [(1, 0, 8)]
    packs = [[one, other], [other, one]]
    plan = plan_of(packs, [[one, other], [one, other]], [[0, 0, 1, 1]] * 2, Mesh(dp=2))

    with pytest.raises(DeadlockError) as caught:
        run(plan)

    assert str(caught.value).startswith(
        "the order of tasks waits in a circle: "
        "stage 0 of rank 0 waits in forward of MicroPack 0 for forward of MicroPack 1 on stage 0 of rank 1, which is "
        "to start together with it and comes there after forward of MicroPack 0; "
        "stage 0 of rank 1 waits in forward of MicroPack 0 for forward of MicroPack 1 on stage 0 of rank 0, which is "
        "to start together with it and comes there after forward of MicroPack 0. 8 of 8 tasks can't run"
    )


def test_two_micropacks_of_one_rank_cannot_start_together():
    whole, halves = [(0, 0, 8)], [[(0, 0, 8), (1, 0, 4)], [(1, 4, 8)]]
    packs = [[whole, [(1, 0, 4)], [(1, 4, 8)]], [*halves, []]]
    same_rank = [packs[0], [[(0, 0, 8)], [(1, 0, 4), (1, 4, 8)], []]]
    plan = plan_of(same_rank, same_rank, [[0, 0, 0, 1, 1, 1]] * 2, Mesh(dp=2))

    with pytest.raises(
        DeadlockError, match="which is to start together with it and comes there after forward"
    ):
        run(plan)


def test_ranks_in_different_orders_are_found_where_parameters_are_sharded():
    packs: Slices = [[[(0, 0, 4)], [(1, 0, 4)]], [[(2, 0, 4)], [(3, 0, 4)]]]
    plan = plan_of(packs, packs, [[0, 0, 1, 1], [0, 1, 0, 1]], Mesh(dp=2, sharding="parameters"))

    with pytest.raises(DeadlockError, match="which is to start together with it"):
        run(plan)


def test_chunks_are_named_where_a_stage_has_several():
    packs: Slices = [[[(0, 0, 4)]]]
    plan = plan_of(packs, packs, [[3, 0, 4, 1], [0, 3, 4, 1]], Mesh(pp=2, virtual_stages=2))

    with pytest.raises(
        DeadlockError, match=r"stage 0 of rank 0 waits in forward of MicroPack 0 \(chunk 2\) for"
    ):
        run(plan)


@given(step_plans(), st.integers(0, 2**32 - 1))
def test_a_shuffled_order_runs_or_is_explained(plan, seed):
    random = np.random.default_rng(seed)
    tasks = plan.tasks.copy()
    for first, last in zip(plan.task_offsets, plan.task_offsets[1:]):
        random.shuffle(tasks[first:last])
    shuffled = dataclasses.replace(plan, tasks=tasks)

    message = ""
    try:
        assert np.isfinite(run(shuffled).stops_s).all()
    except DeadlockError as error:
        message = str(error)
    assert message == "" or is_circle(message)


def is_circle(message: str) -> bool:
    """Whether each stage named waits for the next, and the last for the first."""
    words = message.removeprefix("the order of tasks waits in a circle: ").split(". ")[0].split("; ")
    waiting = [re.match(r"stage \d+ of rank \d+", clause) for clause in words]
    waited_for = [re.search(r" on (stage \d+ of rank \d+)", clause) for clause in words]
    places = [match[0] for match in waiting if match]
    following = [match[1] if match else place for match, place in zip(waited_for, places)]
    return (
        len(places) == len(words) and following == [*places[1:], places[0]] and len(set(words)) == len(words)
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"tasks": np.array([0, 0, 1, 0, 0, 1, 0, 1], np.uint8)},
            r"stage 0 of rank 0 runs 3 tasks of forward in its chunk 0, and its rank has 2 such MicroPacks "
            r"\(1 of 2 stages are so\)",
        ),
        (
            {"tasks": np.array([0, 0, 1, 3, 0, 1, 0, 1], np.uint8)},
            "task code 3 stands for no task: 1 chunks a stage",
        ),
        ({"splits_backward": True}, r"runs 0 tasks of weight gradients in its chunk 0"),
        (
            {"task_offsets": np.array([0, 4], np.int32)},
            r"task offsets hold 1 stages and 8 tasks; the mesh has 1 x 2",
        ),
    ],
)
def test_a_plan_that_leaves_something_out_is_refused(changes, words):
    plan = equal_plan(one_f_one_b(2, 2), 2, Mesh(pp=2))

    with pytest.raises(PlanError, match=words):
        run(dataclasses.replace(plan, **changes))


def test_a_backward_without_its_forward_is_refused():
    plan = plan_of([[[(0, 0, 4)]]], [[[(0, 0, 4), (1, 0, 2)]]], [[0, 1]], Mesh())

    with pytest.raises(
        PlanError,
        match=r"backward MicroPack 0 of rank 0 holds document 1, which no forward MicroPack of this rank holds "
        r"\(1 of 2 backward slices are so\)",
    ):
        run(plan)


def test_unequal_counts_are_refused_where_parameters_are_sharded():
    packs: Slices = [[[(0, 0, 4)], [(1, 0, 4)]], [[(2, 0, 4)]]]
    plan = plan_of(packs, packs, [[0, 0, 1, 1], [0, 1]], Mesh(dp=2, sharding="parameters"))

    with pytest.raises(PlanError, match=r"rank 0 runs 2 forward MicroPacks and rank 1 runs 1 .* empty ones"):
        run(plan)
