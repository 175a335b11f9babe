"""A plan that keeps every rule passes, one that breaks a rule is found, and a plan is the same to its last bit."""

from dataclasses import fields, replace
from random import Random
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.random_plans import keeps_every_rule, micropacks, random_plan
from tests.support.rarely import IS_SOAK

import varlen as vl
from varlen.cost.hardware import Hardware
from varlen.cost.model import CostModel, _interpolated
from varlen.cost.shape import ModelShape
from varlen.errors import DeadlockError, PlanError
from varlen.plan.check import check_plan, targets_per_document
from varlen.plan.local_search import pipeline_of_block, work_of_block
from varlen.plan.micropack import micropack
from varlen.plan.search import Search
from varlen.plan.serialize import plan_fingerprint
from varlen.simulate.api import simulate
from varlen.simulate.dispatch import Pipeline, pipelines_of
from varlen.simulate.graph import durations, stage_costs
from varlen.step_plan import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    Mesh,
    MicroPacks,
    PlanMethod,
    Recompute,
    Sharding,
    StepPlan,
    spread,
)

ARRAYS = ["lengths", "first_ranks", "num_ranks", "tasks", "task_offsets"] + [
    f"{of}.{field.name}" for of in ("forward", "backward") for field in fields(MicroPacks)
]


def with_array(plan: StepPlan, name: str, array: np.ndarray) -> StepPlan:
    """The plan with another array in place of the one that is named as messages name it."""
    outer, _, inner = name.rpartition(".")
    if not outer:
        return replace(plan, **{name: array})
    return replace(plan, **{outer: replace(getattr(plan, outer), **{inner: array})})


def array_of(plan: StepPlan, name: str) -> np.ndarray:
    found: Any = plan
    for part in name.split("."):
        found = getattr(found, part)
    return found


def changed(plan: StepPlan, name: str, **entries: int) -> StepPlan:
    """The plan with some entries of one array changed: `_3=7` puts 7 at index 3."""
    array = array_of(plan, name).copy()
    for index, value in entries.items():
        array[int(index[1:])] = value
    return with_array(plan, name, array)


def shared_plan(**changes: Any) -> StepPlan:
    """Two ranks without a pipeline that share document 0; document 1 is for rank 0 alone, document 2 for rank 1."""
    plan = StepPlan(
        lengths=np.array([8, 3, 4], np.int32),
        first_ranks=np.array([0, 0, 1], np.int32),
        num_ranks=np.array([2, 1, 1], np.int32),
        forward=micropacks([[(0, 0, 4)], [(0, 4, 8), (1, 0, 3)]], [[(0, 0, 4)], [(0, 4, 8)], [(2, 0, 4)]]),
        backward=micropacks([[(0, 4, 8)], [(0, 0, 4)], [(1, 0, 3)]], [[(2, 0, 4)], [(0, 4, 8)], [(0, 0, 4)]]),
        tasks=np.array([0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1], np.uint8),
        task_offsets=np.array([0, 5, 11], np.int32),
        mesh=Mesh(dp=2),
        recompute="full",
    )
    return replace(plan, **changes)


@given(st.integers(0, 10**9))
def test_a_plan_that_keeps_every_rule_passes(seed):
    plan = random_plan(seed)

    check_plan(plan)

    assert keeps_every_rule(plan)


@settings(max_examples=4 * settings().max_examples)
@given(st.integers(0, 10**9), st.sampled_from(ARRAYS), st.integers(0, 10**9))
def test_a_single_entry_changed_is_found_unless_the_plan_still_keeps_every_rule(seed, name, dice):
    plan, random = random_plan(seed, most_documents=5), Random(dice)
    array = array_of(plan, name).copy()
    if not array.size:
        return
    index = random.randrange(array.size)
    was = int(array[index])
    near = [was + 1, was - 1, was + 3, random.choice(array.tolist()), 0, -1, 100, 255]
    array[index] = random.choice([value for value in near if value >= 0 or array.dtype != np.uint8]) % (
        256 if array.dtype == np.uint8 else 2**31
    )
    broken = with_array(plan, name, array)

    if keeps_every_rule(broken):
        check_plan(broken)
        # A slice in the MicroPack beside is as good.
        assert array[index] == was or name.endswith("slice_offsets")
    else:
        with pytest.raises(PlanError):
            check_plan(broken)


@settings(max_examples=2 * settings().max_examples)
@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_tasks_in_another_order_are_found_unless_they_can_be_run(seed, dice):
    plan, random = random_plan(seed, most_documents=6), Random(dice)
    places = np.flatnonzero(np.diff(plan.task_offsets) > 1).tolist()
    if not places:
        return
    place = random.choice(places)
    here = range(plan.task_offsets[place], plan.task_offsets[place + 1])
    one, other = random.sample(here, 2)
    tasks = plan.tasks.copy()
    tasks[[one, other]] = tasks[[other, one]]
    swapped = replace(plan, tasks=tasks)

    if keeps_every_rule(swapped):
        check_plan(swapped)
    else:
        with pytest.raises(PlanError, match="waits in a circle"):
            check_plan(swapped)


@given(st.integers(0, 10**9))
def test_every_token_but_the_last_of_each_document_is_a_target_however_it_is_cut(seed):
    plan = random_plan(seed)
    wanted = [max(length - 1, 0) for length in plan.lengths.tolist()]

    assert targets_per_document(plan).tolist() == wanted
    assert targets_per_document(plan, "backward").tolist() == wanted


def shared(name: str, index: int, value: int) -> StepPlan:
    """A plan with a shared document, one entry of whose arrays is changed."""
    return changed(shared_plan(), name, **{f"_{index}": value})


def test_a_shared_document_passes_where_its_ranks_agree():
    check_plan(shared_plan())
    assert keeps_every_rule(shared_plan())


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (shared("lengths", 1, -3), r"lengths\[1\] is -3; it may be 0 to any above \(1 of 3"),
        (shared_plan(lengths=np.array([8, 3, 4])), "lengths is int64 of shape .* a plan has int32"),
        (shared_plan(num_ranks=np.array([2, 1], np.int32)), r"num_ranks is int32 of shape \(2,\); .* size 3"),
        (shared("num_ranks", 1, 0), r"num_ranks\[1\] is 0; it may be 1 to 2"),
        (
            shared("first_ranks", 0, 1),
            "document 0 of 8 tokens stands on 2 ranks from rank 1; .* a power of two",
        ),
        (shared("first_ranks", 1, 1), "slice 2 of document 1 stands on rank 0, and .* 1 ranks from rank 1"),
        (shared("forward.stops", 0, 9), "forward slice 0 is the tokens 0 to 9 of document 0, which has 8"),
        (shared("forward.stops", 0, 3), "forward slice 1, tokens 4 to 8 .* run first to last"),
        (shared("backward.starts", 0, 5), "backward slice 1, tokens 0 to 4 .* run last to first"),
        (
            shared("forward.stops", 5, 3),
            "forward slice 5, tokens 0 to 3 of document 2 on rank 1, leaves tokens out",
        ),
        (
            shared("forward.rank_offsets", 2, 4),
            "forward.rank_offsets runs from 0 to 4; it must rise from 0 to 5",
        ),
        (shared("forward.slice_offsets", 1, 4), "forward.slice_offsets .* without a step back"),
        (shared("forward.document_ids", 5, 3), r"forward.document_ids\[5\] is 3; it may be 0 to 2"),
        (shared("tasks", 0, 3), r"tasks\[0\] is 3; it may be 0 to 2"),
        (
            shared("tasks", 0, 2),
            "stage 0 of rank 0 has 1 forward tasks for chunk 0, and its rank 2 MicroPacks",
        ),
        (shared("task_offsets", 1, 6), "stage 0 of rank 0 has 3 forward"),
        (shared_plan(splits_backward=True), "has 0 weight-gradient tasks .* its rank 3"),
        (
            shared_plan(
                forward=micropacks([[(0, 0, 8)], [(1, 0, 3)]], [[(0, 0, 4)], [(0, 4, 8)], [(2, 0, 4)]])
            ),
            "forward slice 2 of document 0 on rank 1 is not what rank 0 shares with it",
        ),
        (
            shared_plan(
                forward=micropacks(
                    [[(0, 0, 4), (0, 4, 8)], [(1, 0, 3)]], [[(0, 0, 4)], [(0, 4, 8)], [(2, 0, 4)]]
                )
            ),
            "forward slice 4 of document 0 on rank 1 .* together in a MicroPack or apart",
        ),
        (
            shared_plan(forward=micropacks([[(0, 0, 4)], [(0, 4, 8), (1, 0, 3)]], [[], [], [(2, 0, 4)]])),
            "document 0 of 8 tokens has no forward slice on 1 of its 2 ranks",
        ),
        (
            shared_plan(mesh=Mesh(dp=2, sharding="parameters")),
            "rank 0 runs 2 forward MicroPacks, rank 1 runs 3 .* empty ones",
        ),
        (
            shared_plan(
                mesh=Mesh(dp=2, sharding="parameters"),
                forward=micropacks([[], [(0, 0, 8)], [(1, 0, 3)]], [[(0, 0, 8)], [], [(2, 0, 4)]]),
                tasks=np.array([0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1], np.uint8),
                task_offsets=np.array([0, 6, 12], np.int32),
            ),
            "forward slice 2 of the shared document 0 is in the MicroPack 0 of rank 1 and in another one of rank 0",
        ),
        (
            shared_plan(
                forward=micropacks([[(0, 0, 8)], [(1, 0, 3)]], [[(0, 0, 8)], [(1, 0, 3)], [(2, 0, 4)]])
            ),
            r"forward slice 3 of document 1 stands on rank 1, and the document on 1 ranks from rank 0 \(1 of 5",
        ),
        (
            shared_plan(
                lengths=np.array([4, 4], np.int32),
                first_ranks=np.array([0, 0], np.int32),
                num_ranks=np.array([2, 2], np.int32),
                forward=micropacks([[(0, 0, 4)], [(1, 0, 4)]], [[(1, 0, 4)], [(0, 0, 4)]]),
                backward=micropacks([[(0, 0, 4)], [(1, 0, 4)]], [[(0, 0, 4)], [(1, 0, 4)]]),
            ),
            "forward slice 2 of document 1 on rank 1 is not what rank 0 shares with it",
        ),
        (
            changed(shared_plan(), "tasks", _1=1, _2=0),
            r"stage 0 of rank 0 waits to run the backward task of its MicroPack 0 .* \(2 of 2 stages wait, 9 tasks",
        ),
    ],
)
def test_what_is_wrong_with_a_plan_is_said_in_a_sentence(plan, words):
    with pytest.raises(PlanError, match=words):
        check_plan(plan)


@pytest.mark.parametrize(("first", "num"), [(0, 3), (1, 2), (2, 4), (4, 4), (-1, 1)])
def test_a_document_stands_on_an_aligned_power_of_two_of_ranks(first, num):
    ranks = [[[(0, 0, 8)]] if first <= rank < first + num else [[]] for rank in range(6)]
    plan = StepPlan(
        lengths=np.array([8], np.int32),
        first_ranks=np.array([first], np.int32),
        num_ranks=np.array([num], np.int32),
        forward=micropacks(*ranks),
        backward=micropacks(*ranks),
        tasks=np.array([0, 1] * 6, np.uint8),
        task_offsets=np.arange(0, 13, 2, dtype=np.int32),
        mesh=Mesh(dp=6),
    )

    with pytest.raises(
        PlanError, match=f"stands on {num} ranks from rank {first}; it must be a power of two"
    ):
        check_plan(plan)


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ({"recompute": "none"}, "recompute='none', recompute_share=1"),
        ({"recompute": "selective"}, "recompute='selective'"),
        ({"recompute_share": 0.5}, "recompute='full', recompute_share=0.5"),
    ],
)
def test_passes_cut_apart_are_found_where_layers_keep_activations(kept, said):
    with pytest.raises(PlanError, match=rf"stands in one pass alone \(3 do\); .* {said}"):
        check_plan(shared_plan(**kept))


def test_a_micropack_over_the_capacity_is_found_and_a_shared_slice_counts_by_its_part():
    check_plan(shared_plan(), capacity=5)
    with pytest.raises(
        PlanError, match=r"forward MicroPack 1 on rank 0 holds 5 tokens, over the capacity of 4 \(1 of 5"
    ):
        check_plan(shared_plan(), capacity=4)


def test_a_peak_over_the_card_s_memory_is_found():
    cost = CostModel(model=ModelShape.named("llama-3-8b"), hardware=Hardware.named("h100"))
    plan = shared_plan(mesh=Mesh(dp=2, tp=8))
    limit = cost.memory(plan.mesh).limit_bytes

    check_plan(plan, cost)
    check_plan(plan, cost, peaks_bytes=[[limit], [limit]])
    with pytest.raises(
        PlanError, match=r"stage 0 of rank 1 holds .* GB at its peak, over .* \(1 of 2 stages"
    ):
        check_plan(plan, cost, peaks_bytes=[[limit], [1.01 * limit]])
    with pytest.raises(
        PlanError, match=r"stage 0 of rank 0 holds .* over the limit of .* more pipeline stages"
    ):
        check_plan(plan, cost.replace(memory_fraction=0.1))
    with pytest.raises(PlanError, match="holds nan GB"):
        check_plan(plan, cost, peaks_bytes=[[np.nan], [1.0]])
    with pytest.raises(PlanError, match=r"shape \(2,\); pass one for each stage of each rank, \(2, 1\)"):
        check_plan(plan, cost, peaks_bytes=[1.0, 2.0])


@settings(max_examples=settings().max_examples // 2)
@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_the_simulator_runs_what_passes_and_no_other(seed, dice):
    cost = CostModel(model=ModelShape.named("llama-3-8b"), hardware=Hardware.named("h100"))
    plan, random = random_plan(seed), Random(dice)
    if not plan.num_tokens:
        return
    place = random.randrange(len(plan.task_offsets) - 1)
    tasks = plan.tasks.copy()
    random.shuffle(here := tasks[plan.task_offsets[place] : plan.task_offsets[place + 1]].tolist())
    tasks[plan.task_offsets[place] : plan.task_offsets[place + 1]] = here

    simulate(plan, cost)
    shuffled = replace(plan, tasks=tasks)
    try:
        check_plan(shuffled)
    except PlanError:
        with pytest.raises(DeadlockError):
            simulate(shuffled, cost)
    else:
        simulate(shuffled, cost)


def test_the_codes_of_tasks_are_those_of_the_plan():
    assert (FORWARD, BACKWARD, WEIGHT) == (0, 1, 2)


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
def test_a_plan_and_its_seconds_are_the_same_without_kernels(method, plain_python):
    for seed in range(5) if IS_SOAK else (3,):
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
def test_a_rank_has_the_same_to_do_as_the_planner_and_as_a_plan_say(sharding, cp, splits):
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
def test_rates_are_interpolated_as_by_numpy(at, grid, seed):
    points, values = np.sort(grid), np.random.default_rng(seed).random(len(grid))
    where = np.concatenate([at, points])

    np.testing.assert_allclose(
        _interpolated(where, points, values), np.interp(where, points, values), rtol=1e-12
    )


def as_lists(packs: MicroPacks) -> list[list[list[tuple[int, int, int]]]]:
    """The slices of each MicroPack of each rank."""
    slices = list(zip(packs.document_ids.tolist(), packs.starts.tolist(), packs.stops.tolist()))
    every = [slices[a:b] for a, b in zip(packs.slice_offsets.tolist(), packs.slice_offsets.tolist()[1:])]
    return [every[a:b] for a, b in zip(packs.rank_offsets.tolist(), packs.rank_offsets.tolist()[1:])]


@settings(max_examples=40 * (1 + 9 * IS_SOAK))
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 3, 4]))
def test_a_plan_with_cp_is_one_whose_neighbouring_ranks_share_every_document(seed, cp):
    given = random_plan(seed)
    mesh = replace(given.mesh, cp=cp)
    plan = replace(given, mesh=mesh)

    found = spread(plan)

    assert found.mesh == replace(mesh, dp=mesh.dp * cp, cp=1)
    for of in ("forward", "backward"):
        wanted = [packs for packs in as_lists(getattr(plan, of)) for _ in range(cp)]
        assert as_lists(getattr(found, of)) == wanted
    tasks = np.split(plan.tasks, plan.task_offsets[1:-1])
    for rank in range(found.mesh.dp):
        mine = found.documents_of(rank)
        assert (mine == plan.documents_of(rank // cp)).all()
        for stage in range(mesh.pp):
            a, b = found.task_offsets[rank * mesh.pp + stage :][:2]
            assert found.tasks[a:b].tolist() == tasks[rank // cp * mesh.pp + stage].tolist()
    if cp != 3:
        check_plan(found)


@pytest.mark.parametrize("cp", [2, 4])
def test_a_plan_with_cp_takes_the_time_of_the_plan_whose_ranks_share_every_document(cp):
    cost = CostModel(model=ModelShape.named("llama-3-8b"), hardware=Hardware.named("h100"))
    lengths = [9000, 300, 20000, 4000, 1200, 700]
    plan = vl.plan_step(lengths, cost=cost, mesh=Mesh(dp=2, pp=2, cp=cp), method="sliced")

    ours, other = (simulate(one, cost) for one in (plan, spread(plan)))

    assert other.makespan_s == pytest.approx(ours.makespan_s, rel=1e-12)
