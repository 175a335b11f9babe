"""The lower bound is what is written out by hand here, and scores of candidates are what the simulator says."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.oracles import simulate_in_step as reference
from tests.support.planning import cost_of
from tests.support.rarely import IS_SOAK

import varlen as vl
from varlen.plan import score as score_module
from varlen.plan.baselines.dynamic_cp import dynamic_cp_candidates
from varlen.plan.baselines.packed import capacities, packed, packed_candidates
from varlen.plan.bound import lower_bound
from varlen.plan.score import best_plan, score, unordered
from varlen.simulate import kernels
from varlen.simulate.api import simulate
from varlen.simulate.dispatch import bound_s, dispatch, loads_s, pipelines_of, seconds_in_step
from varlen.simulate.graph import durations, stage_costs

COST = cost_of(recompute="none", mode="flops")
MODEL, HARDWARE = COST.model, COST.hardware
GEMM_S = 1e-12 / HARDWARE.gemm.tflops.max()
PAIR_S = 1e-12 / HARDWARE.attention[0].tflops.max() * 4 * MODEL.heads * MODEL.head_dim
EXACT = 1e-9


def attention_s(length: int) -> float:
    """A layer's, forward: every token attends to itself and all before it."""
    return PAIR_S * length * (length + 1) / 2


def layer_s(length: int) -> float:
    """A layer's, both passes: attention's backward costs 2.5 times its forward, a product's twice."""
    return 3.5 * attention_s(length) + 3 * length * 2 * MODEL.linear_parameters_per_layer * GEMM_S


def stages_s(length: int, mesh: vl.Mesh) -> np.ndarray:
    """A document's on each stage, both passes; the last has the vocabulary head."""
    seconds: np.ndarray = COST.stages(mesh).layers * layer_s(length)
    seconds[-1] += 3 * length * 2 * MODEL.head_parameters * GEMM_S
    return seconds


def filling_s(rows: int, mesh: vl.Mesh) -> np.ndarray:
    """When each stage can begin: the smallest MicroPack has gone forward through those before it."""
    latency_s, row_s = COST.send_s(mesh)
    forward = rows * (attention_s(1) + 2 * MODEL.linear_parameters_per_layer * GEMM_S)
    each = COST.stages(mesh).layers[:-1] * forward + latency_s + rows * row_s
    return np.cumsum(np.append(0.0, each))


def test_the_bound_holds_for_documents_that_any_number_of_ranks_share():
    lengths, mesh = np.array([60_000, 500], np.int32), vl.Mesh(dp=4)

    shared, alone = (lower_bound(lengths, COST, mesh, most_merged_ranks=ranks).chain_s for ranks in (4, 1))

    assert lower_bound(lengths, COST, mesh).chain_s == shared < alone / 3


def test_a_short_document_takes_its_own_work():
    mesh = vl.Mesh()

    found = lower_bound(np.array([0, 700], np.int32), COST, mesh)

    expected = MODEL.layers * layer_s(700) + 6 * 700 * MODEL.head_parameters * GEMM_S
    assert found.work_s == pytest.approx(expected, rel=EXACT)
    assert found.chain_s == pytest.approx(expected, rel=EXACT)
    assert found.seconds == pytest.approx(expected, rel=EXACT)


def test_a_giant_is_done_by_its_own_ranks_behind_a_pipeline_that_fills():
    mesh, rows = vl.Mesh(dp=4, pp=4), 2048
    lengths = np.array([90_000, 500, 700], np.int32)

    found = lower_bound(lengths, COST, mesh, least_rows=rows, most_merged_ranks=1)

    chain_s = (filling_s(rows, mesh) + stages_s(90_000, mesh)).max()
    sync_s = COST.gradient_sync_s(mesh).min()
    assert sync_s > 0
    assert found.chain_s == pytest.approx(chain_s, rel=EXACT)
    assert found.seconds == pytest.approx(chain_s + sync_s, rel=EXACT)


def test_many_documents_are_shared_evenly_by_all_ranks_behind_a_pipeline_that_fills():
    mesh, rows = vl.Mesh(dp=2, pp=4), 512
    lengths = np.array([3000, 2500, 900] * 30, np.int32)

    found = lower_bound(lengths, COST, mesh, least_rows=rows)

    work = 30 * sum(stages_s(length, mesh) for length in (3000, 2500, 900)) / mesh.dp
    assert found.work_s == pytest.approx((filling_s(rows, mesh) + work).max(), rel=EXACT)
    assert found.seconds == pytest.approx(found.work_s + COST.gradient_sync_s(mesh).min(), rel=EXACT)
    filling = filling_s(rows, mesh)[-1]
    assert 0 < filling < 0.1 * found.work_s


LLAMA_7B = vl.CostModel(
    model=vl.ModelShape.named("llama-2-7b"), hardware=vl.Hardware.named("h100"), recompute="full"
)


@pytest.mark.parametrize("virtual_stages", [1, 2, 4])
def test_the_slowest_dispatched_rank_takes_what_the_simulator_says(virtual_stages):
    mesh = vl.Mesh(dp=8, pp=2, tp=8, virtual_stages=virtual_stages)
    lengths = np.array([9000, 3000, 8000, 200, 5000, 7000, 60, 4000, 4500, 900, 8100], np.int32)
    plan = unordered(packed(lengths, mesh, 9088), lengths, LLAMA_7B, mesh, "packed")
    assert virtual_stages == 1 or (np.diff(plan.forward.slice_offsets) == 0).any()

    seconds = durations(plan, LLAMA_7B)
    pipeline = pipelines_of(plan, stage_costs(LLAMA_7B, mesh), seconds)
    made = [dispatch(pipeline(rank)) for rank in range(mesh.dp)]
    loads = loads_s(plan, seconds)
    ordered = dataclasses.replace(
        plan,
        tasks=np.concatenate([one.codes.ravel() for one in made]),
        task_offsets=np.append(
            0, np.cumsum([size for one in made for size in (one.codes.shape[1],) * mesh.pp])
        ).astype(np.int32),
    )
    timeline = simulate(ordered, LLAMA_7B, contention=False)
    sync_s = LLAMA_7B.gradient_sync_s(mesh).max()

    assert max(one.makespan_s for one in made) == pytest.approx(timeline.makespan_s - sync_s, rel=1e-3)
    assert all(load <= one.makespan_s for one, load in zip(made, loads))
    for rank, load in enumerate(loads):
        ahead, back = (slice(*x.rank_offsets[rank : rank + 2]) for x in (plan.forward, plan.backward))
        chunks = seconds.forward[:, ahead].sum(1) + seconds.backward[:, back].sum(1)
        assert load == pytest.approx(max(chunks[stage :: mesh.pp].sum() for stage in range(mesh.pp)))


@pytest.mark.parametrize("virtual_stages", [1, 2, 3])
def test_a_search_with_a_limit_begins_with_fewer_micro_batches_where_stages_are_interleaved(virtual_stages):
    tried = counts_of_a_search(vl.Mesh(dp=4, pp=4, tp=8, virtual_stages=virtual_stages))

    assert tried[0] == 24 // virtual_stages


def test_a_search_with_a_limit_goes_on_to_more_micro_batches_where_none_fit():
    assert counts_of_a_search(vl.Mesh(dp=4, pp=4, tp=8)) == [24, 26, 28, 30]
    assert counts_of_a_search(vl.Mesh(dp=4, tp=8)) == [1, 3, 5, 7]


def test_a_search_with_a_limit_begins_again_from_fewer_micro_batches_and_climbs(monkeypatch):
    def seconds(candidate, *_):
        return None, 0.9 + abs(candidate - 5) / 100 if candidate < 20 else 2.0

    monkeypatch.setattr(score_module, "_fastest", seconds)

    assert counts_of_a_search(vl.Mesh(dp=4, pp=4, tp=8), lambda count: [[count]]) == [24, 8, 9, 7, 6, 5, 4]


def counts_of_a_search(mesh: vl.Mesh, families_of: Callable[[int], Any] = lambda count: ()) -> list[int]:
    """The numbers of micro-batches that a search with a limit of a second tries, out of 1 to 32, in its order."""
    tried = list[int]()

    def families(count: int) -> Any:
        tried.append(count)
        return families_of(count)

    lengths = np.full(200, 20_000, np.int32)
    best_plan(families, tuple(range(1, 33)), lengths, [LLAMA_7B], mesh, "balanced", limit_s=1.0)
    return tried


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("families_of", [packed_candidates, dynamic_cp_candidates])
def test_candidates_that_are_left_out_were_slower(families_of, splits):
    mesh = vl.Mesh(dp=4, pp=2, tp=8)
    for seed in range(5 if IS_SOAK else 2):
        lengths = np.exp(np.random.default_rng(seed).uniform(4, 10, 40)).astype(np.int32)
        # Seconds of attention alone are enough to make candidates differ.
        work = np.outer(lengths.astype(float) ** 2, [1, 1 / 2, 1 / 4])
        given = work if families_of is dynamic_cp_candidates else work[:, 0]
        families = [
            list(family) for family in families_of(lengths, given, mesh, capacities(int(lengths.max())))
        ]

        def best_of(families, limit_s=np.inf, lengths=lengths):
            return best_plan(
                lambda _: families, (0,), lengths, [LLAMA_7B], mesh, "packed", splits=splits, limit_s=limit_s
            )

        found = best_of(families)
        alone = [best_of([[candidate]]) for family in families for candidate in family]

        assert found is not None
        assert len(families) > 5
        least_s = min(one[1] for one in alone if one)
        assert found[1] <= least_s * (1 + 1e-3)
        assert score(found[0], LLAMA_7B) == pytest.approx(found[1], rel=1e-3)
        assert best_of(families, limit_s=found[1]) is None
        if splits:
            assert least_s < best_plan(lambda _, f=families: f, (0,), lengths, [LLAMA_7B], mesh, "packed")[1]


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_no_order_of_micropacks_takes_less_than_their_bound(splits, virtual_stages):
    mesh = vl.Mesh(dp=2, pp=4, tp=8, virtual_stages=virtual_stages)
    lengths = np.exp(np.random.default_rng(0).uniform(4, 10, 60)).astype(np.int32)
    slack = []
    for family in packed_candidates(lengths, lengths.astype(float) ** 2, mesh, [int(lengths.max())]):
        floors = []
        for candidate in family:
            plan = unordered(candidate, lengths, LLAMA_7B, mesh, "packed")
            plan = dataclasses.replace(plan, splits_backward=splits)
            seconds = durations(plan, LLAMA_7B)
            pipeline = pipelines_of(plan, stage_costs(LLAMA_7B, mesh, splits=splits), seconds)
            made_s = max(dispatch(pipeline(rank)).makespan_s for rank in range(mesh.dp))
            floors.append(bound_s(plan, seconds))
            slack.append(made_s / floors[-1])
        assert np.ptp(floors) <= 1e-9 * max(floors)
    assert min(slack) >= 1 - 1e-9
    assert min(slack) < 1.3


@pytest.mark.parametrize(("pp", "virtual_stages"), [(2, 1), (4, 1), (2, 2)])
def test_ranks_that_share_whole_documents_take_what_the_simulator_says(pp, virtual_stages, monkeypatch):
    mesh, told = vl.Mesh(dp=4, pp=pp, tp=8, virtual_stages=virtual_stages), []

    def both(plan, codes, seconds):
        taken_s = seconds_in_step(plan, codes, seconds)
        told.append((taken_s, simulate(plan, LLAMA_7B.as_planned(plan)).makespan_s))
        return taken_s

    monkeypatch.setattr("varlen.plan.score.seconds_in_step", both)
    lengths = np.exp(np.random.default_rng(pp).uniform(4, 11, 60)).astype(np.int32)
    vl.plan_step(lengths, cost=LLAMA_7B, mesh=mesh, method="dynamic_cp")

    assert len(told) > 10
    for taken_s, simulated_s in told:
        assert taken_s == pytest.approx(simulated_s, rel=EXACT)


@pytest.mark.parametrize("virtual_stages", [1, 2])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_ranks_in_step_end_when_the_reference_says(stages, virtual_stages):
    random = np.random.default_rng(stages)
    chunks, ranks, count = stages * virtual_stages, 4, 5
    for splits in (False, True):
        seconds = random.uniform(1, 2, (3, chunks, ranks, count))
        seconds[:, :, :, 3] = 0.0  # empty on all ranks
        leaders = np.array(
            [random.choice([[0, 0, 2, 2], [0, 1, 2, 3], [0, 0, 0, 0]]) for _ in range(count)]
        ).T
        sends, lags = random.uniform(0, 9, (2, ranks, count))  # messages wait for each other
        last = virtual_stages - 1
        order = [3 * chunk for chunk in range(last) for _ in range(count)] + [3 * last, 3 * last + 1] * count
        order += [3 * chunk + 1 for chunk in range(last)[::-1] for _ in range(count)]
        order += [3 * chunk + 2 for chunk in range(virtual_stages) for _ in range(count) if splits]
        given = (np.tile(np.array(order, np.uint8), (stages, 1)), seconds, sends, lags, leaders.copy())

        found = kernels.run_in_step(*given)

        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, reference.run_in_step(*given), rtol=EXACT)
    backwards = (given[0][:, ::-1].copy(), *given[1:])
    assert (
        np.isinf(kernels.run_in_step(*backwards)).all() == np.isinf(reference.run_in_step(*backwards)).all()
    )


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_sums_of_stages_are_those_of_the_reference(pp):
    random = np.random.default_rng(pp)
    ahead, back = np.array([0, 3, 3, 7], np.int32), np.array([0, 2, 4, 9], np.int32)
    forward, backward, weight = (random.uniform(1, 2, (2 * pp, count)) for count in (7, 9, 9))
    forward[:, 4] = backward[:, 1] = 0.0

    found = kernels.stage_seconds(ahead, back, forward, backward, weight, pp)

    np.testing.assert_allclose(
        found, reference.stage_seconds(ahead, back, forward, backward, weight, pp), rtol=EXACT
    )
