"""Each thing that the search tries brings something on the steps that it is there for, and is kept only there."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support.planning import cost_of, long_cost_of, long_tailed
from tests.support.rarely import examples

import varlen as vl
from varlen.plan import local_search
from varlen.plan import micropack as micropack_module
from varlen.plan.api import _work
from varlen.plan.assign import grouped, merged_sizes
from varlen.plan.baselines.dynamic_cp import dynamic_cp_candidates
from varlen.plan.baselines.packed import balanced_candidates, micro_batch_counts, usual_capacities
from varlen.plan.check import check_plan
from varlen.plan.compose import TYPICAL_ROWS, seconds_of
from varlen.plan.local_search import Effort, StepSearch, improve, padded, pipeline_of_block, work_of_block
from varlen.plan.micropack import LEAST_GAIN, RECUTS, _compose_apart, micropack, recut
from varlen.plan.score import best_plan
from varlen.plan.serialize import plan_fingerprint
from varlen.simulate.dispatch import dispatch

ROOMY = vl.Hardware(
    **{
        name: getattr(vl.Hardware.named("h100"), name)
        for name in vl.Hardware.__dataclass_fields__
        if name != "memory_bytes"
    },
    memory_bytes=1e13,
)


def test_a_document_over_a_rank_s_share_of_work_is_shared_however_much_memory_there_is():
    cost, mesh = cost_of("llama-3-8b", hardware=ROOMY, recompute="none"), vl.Mesh(dp=4, tp=8)
    lengths = np.array([8000, *[200] * 20], np.int32)

    plan = vl.plan_step(lengths, cost=cost, mesh=mesh)
    alone_s = took(lengths, cost, mesh, search=vl.Search(merges=False))

    assert plan.num_ranks[0] > 1
    assert vl.simulate(plan, cost).makespan_s < 0.75 * alone_s


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_small_micropacks_fill_a_deep_pipeline_faster(recompute):
    cost, mesh = cost_of(recompute=recompute), vl.Mesh(pp=8, tp=8)
    lengths = long_tailed(150, 8000)

    plan = vl.plan_step(lengths, cost=cost, mesh=mesh)
    even_s = took(lengths, cost, mesh, search=vl.Search(grades=False))

    rows = np.add.reduceat(plan.forward.stops - plan.forward.starts, plan.forward.slice_offsets[:-1])
    assert rows[0] < 0.8 * np.median(rows)
    assert vl.simulate(plan, cost).makespan_s < 0.975 * even_s


def test_the_way_to_share_that_a_quick_look_likes_best_is_not_always_the_best(monkeypatch):
    cost = cost_of()
    steps = [(long_tailed(200, 40_000, seed), vl.Mesh(dp=8, pp=4, tp=4)) for seed in range(3)]

    several = [took(lengths, cost, mesh) for lengths, mesh in steps]
    monkeypatch.setattr(micropack_module, "_CLOSE_GROUPINGS", 1)
    first = [took(lengths, cost, mesh) for lengths, mesh in steps]

    assert sum(several) < 0.999 * sum(first)


def counted(lengths: Any, cost: vl.CostModel, mesh: vl.Mesh, method: Any) -> dict[int, float]:
    """Seconds of the best plan at each number of micro-batches, one for one, inf where none fits."""
    work = _work(lengths, cost, mesh)
    found = {}
    for count in micro_batch_counts(lengths, mesh):
        if method == "balanced":
            families = balanced_candidates(lengths, work[:, 0], mesh, counts=(count,))
        else:
            families = dynamic_cp_candidates(
                lengths, work, mesh, usual_capacities(lengths, mesh.dp), counts=(count,)
            )
        plan = best_plan(lambda _, f=families: f, (0,), lengths, [cost], mesh, method)
        found[count] = plan[1] if plan else float("inf")
    return found


@pytest.mark.parametrize("method", ["balanced", "dynamic_cp"])
def test_peers_have_as_many_micro_batches_as_is_best_for_them(method):
    cost, mesh = cost_of(recompute="none"), vl.Mesh(dp=2, pp=2, tp=8)
    lengths = long_tailed(600, 20_000)

    every = counted(lengths, cost, mesh, method)
    best = min(every, key=lambda count: every[count])
    found_s = took(lengths, cost, mesh, method=method, search=vl.Search(repairs=False, splits_backward=False))

    assert max(every) > 4 * best
    assert found_s <= every[best] * (1 + 1e-9)


@pytest.mark.soak
def test_peers_are_given_small_micro_batches_where_memory_wants_them():
    cost, mesh = cost_of("llama-3-8b", recompute="none"), vl.Mesh(dp=8)
    lengths = np.full(2000, 2000, np.int32)

    plans = [vl.plan_step(lengths, cost=cost, mesh=mesh, method=m) for m in ("balanced", "dynamic_cp")]

    assert all(plan.forward.counts.max() > 12 for plan in plans)


TOLERANCE = 1.02


def took(lengths: Any, cost: vl.CostModel, mesh: vl.Mesh, **settings: Any) -> float:
    plan = vl.plan_step(lengths, cost=cost, mesh=mesh, **settings)
    return vl.simulate(plan, cost.as_planned(plan)).makespan_s


@pytest.mark.parametrize(
    ("mesh", "millions"),
    [(vl.Mesh(tp=8), 16), (vl.Mesh(dp=2, pp=4), 16), (vl.Mesh(dp=8), 8)],
    ids=["tp8", "dp2pp4", "dp8"],
)
def test_no_number_of_tokens_is_planned_slower_than_plain_packs(mesh, millions):
    cost = cost_of("llama-3-8b", recompute="none")
    lengths = np.full(millions * 500, 2000, np.int32)

    assert took(lengths, cost, mesh) <= TOLERANCE * took(lengths, cost, mesh, method="packed", capacity=8192)


def test_more_tokens_are_cut_into_more_micropacks_and_not_into_more_recomputation():
    cost, mesh = cost_of("llama-3-8b", recompute="none"), vl.Mesh(tp=8)
    few, many = np.full(1_000, 2000, np.int32), np.full(16_000, 2000, np.int32)

    plans = [vl.plan_step(lengths, cost=cost, mesh=mesh) for lengths in (few, many)]

    assert [plan.recompute for plan in plans] == ["none", "none"]
    assert plans[1].forward.counts[0] > 64
    check_plan(plans[1], cost)


def test_sizes_that_are_given_are_all_that_is_tried():
    cost, mesh, lengths = cost_of(), vl.Mesh(pp=2, tp=8), np.full(400, 2000, np.int32)

    plan = vl.plan_step(
        lengths, cost=cost, mesh=mesh, search=vl.Search(micropacks_per_stage=(3,), grades=False)
    )

    assert plan.forward.counts.tolist() == [6]


@pytest.mark.parametrize(
    ("mesh", "fraction", "length"),
    [
        (vl.Mesh(dp=2, pp=4), 0.3651, 8346),
        (vl.Mesh(dp=8), 0.6845, 6350),
        (vl.Mesh(tp=8), 0.1998, 7814),
        (vl.Mesh(dp=3, pp=2, tp=4), 0.1259, 1740),
    ],
)
def test_where_memory_holds_hardly_more_than_a_document_plain_packs_are_not_faster(mesh, fraction, length):
    cost = long_cost_of(recompute="none", memory_fraction=fraction)
    lengths = np.full(200, length, np.int32)

    assert took(lengths, cost, mesh) <= TOLERANCE * took(lengths, cost, mesh, method="packed")


def test_what_others_plan_is_not_refused():
    rng = np.random.default_rng(3)
    planned = refused = 0
    for number in range(3):
        mesh = (vl.Mesh(tp=8), vl.Mesh(dp=4, pp=2, tp=4), vl.Mesh(dp=2, pp=4))[number % 3]
        cost = cost_of(recompute="none")
        states = float(cost.memory(mesh).state_bytes.max()) / cost.hardware.memory_bytes
        cost = cost.replace(memory_fraction=states + float(rng.choice([0.005, 0.02])))
        cost = cost.replace(model=replace(cost.model, max_positions=None))
        lengths = long_tailed(20, 30_000, number)

        def fits(method: Any, lengths: Any = lengths, cost: Any = cost, mesh: Any = mesh) -> bool:
            try:
                check_plan(vl.plan_step(lengths, cost=cost, mesh=mesh, method=method, tuned=True), cost)
            except vl.errors.PlanError:
                return False
            return True

        others = [fits(method) for method in ("packed", "balanced", "sliced", "dynamic_cp")]
        assert fits("micropack") or not any(others)
        planned += any(others)
        refused += not any(others)
    assert planned
    assert refused


def test_a_quick_look_is_deterministic_and_shares_documents_as_a_close_one_does():
    cost = long_cost_of(recompute="none").replace(memory_fraction=0.92)
    mesh, lengths = vl.Mesh(dp=8, pp=2, tp=8), np.append(long_tailed(200, 8000), 250_000).astype(np.int32)
    quick: dict[str, Any] = {"search": vl.Search(closely=False)}

    plans = [vl.plan_step(lengths, cost=cost, mesh=mesh, **quick) for _ in range(2)]
    close_s, quick_s = took(lengths, cost, mesh), took(lengths, cost, mesh, **quick)

    assert plan_fingerprint(plans[0]) == plan_fingerprint(plans[1])
    assert plans[0].num_merged > 0
    assert close_s <= quick_s < 1.2 * close_s
    assert took(lengths, cost, mesh, method="sliced") > 2 * quick_s


NODE = vl.Hardware.named("h100").gpus_per_node
MESHES = [vl.Mesh(dp=dp, cp=cp, tp=tp, pp=2) for dp in (3, 8, 12, 32) for cp in (1, 2) for tp in (1, 2, 4, 8)]


def nodes_used(first_ranks: np.ndarray, num_ranks: np.ndarray, mesh: vl.Mesh) -> np.ndarray:
    """How many nodes each shared document touches, and how many would be enough; `[2, shared]`."""
    width = mesh.cp * mesh.tp  # GPUs are numbered tp fastest, then cp, then dp
    shared = num_ranks > 1
    first, last = first_ranks[shared] * width, (first_ranks + num_ranks)[shared] * width - 1
    stages = mesh.dp * width * np.arange(mesh.pp)[:, None]
    touched = ((stages + last) // NODE - (stages + first) // NODE + 1).max(axis=0)
    return np.stack([touched, -(-(last - first + 1) // NODE)])


@given(
    st.sampled_from(MESHES),
    st.lists(st.tuples(st.integers(1, 200_000), st.integers(0, 5)), min_size=1, max_size=40),
)
def test_no_group_touches_more_nodes_than_it_needs(mesh, documents):
    assume(mesh.dp * mesh.cp * mesh.tp % NODE == 0)  # else stages begin within a node
    lengths = np.array([length for length, _ in documents], np.int32)
    sizes = np.array([2**level for _, level in documents], np.int32)
    sizes = np.minimum(sizes, 2 ** int(np.log2(mesh.dp))).astype(np.int32)

    groups = grouped(lengths, sizes, mesh.dp, cost_of().rates(mesh))

    touched, enough = nodes_used(groups.first_ranks, groups.num_ranks, mesh)
    assert (touched == enough).all()
    assert (groups.first_ranks + groups.num_ranks <= mesh.dp).all()


@pytest.mark.parametrize("method", ["micropack", "dynamic_cp"])
@pytest.mark.parametrize("mesh", [vl.Mesh(dp=16, pp=2, tp=2), vl.Mesh(dp=8, pp=1, cp=2, tp=2)])
@examples(1, 3)
@given(seed=st.integers(0, 1000))
def test_plans_share_within_nodes(method, mesh, seed):
    lengths = np.append(
        np.random.default_rng(seed).integers(100, 8000, 40), [120_000, 60_000, 60_000, 30_000]
    )

    plan = vl.plan_step(lengths, cost=cost_of(), mesh=mesh, method=method)

    assert plan.num_merged > 0
    touched, enough = nodes_used(plan.first_ranks, plan.num_ranks, mesh)
    assert (touched == enough).all()


def test_a_document_is_shared_beyond_its_node_only_where_that_pays():
    mesh, cost = vl.Mesh(dp=32, tp=2), cost_of()
    lengths = np.array([4_000, 12_000, 24_000, 60_000, 200_000, 1_000_000], np.int32)

    def sizes(rates: Any) -> list[int]:
        return [
            int(merged_sizes(one, 32, rates, threshold=0.001, most_ranks=32, most_rows=1e12)[0])
            for one in np.split(lengths, lengths.size)
        ]

    one_node = cost.replace(hardware=replace(cost.hardware, gpus_per_node=64))
    found = np.array(sizes(cost.rates(mesh)), np.int32)

    assert sizes(one_node.rates(mesh)) == [32] * 6
    assert found.tolist() == sorted(found)
    assert found[0] == NODE // mesh.tp
    assert found[-1] == 32
    taken, wider = (seconds_of(lengths, more * found, TYPICAL_ROWS, cost.rates(mesh)) for more in (1, 2))
    assert (wider[found < 32] >= 0.8 * taken[found < 32]).all()


ALIKE = vl.Search(asymmetric=False)


def few_heads(**settings: Any) -> vl.CostModel:
    """Attention is slow on few rows times heads, in the backward pass more than in the forward one."""
    cost = long_cost_of(model="llama-3-8b", **settings)
    return cost.replace(hardware=replace(cost.hardware, heads_exponent=1.0))


def step_of(longest: int, count: int, seed: int) -> np.ndarray:
    return np.append(np.random.default_rng(seed).integers(200, 8000, count), longest).astype(np.int32)


CASES = [
    (vl.Mesh(dp=2, pp=8, tp=8), step_of(108_000, 23, 33), few_heads(recompute="full")),
    (vl.Mesh(dp=1, pp=16, tp=8), step_of(78_000, 13, 27), few_heads(recompute="full")),
]


@pytest.mark.parametrize(
    ("mesh", "lengths", "cost"), CASES[1:]
)  # in the first, slices searched thoroughly win
def test_deep_pipelines_with_a_long_document_are_faster_with_both_passes_apart(mesh, lengths, cost):
    apart = vl.plan_step(lengths, cost=cost, mesh=mesh)
    alike = vl.plan_step(lengths, cost=cost, mesh=mesh, search=ALIKE)

    check_plan(apart, cost)
    assert "backward composed apart" in apart.answered_by
    assert "apart on" not in alike.answered_by
    assert not np.array_equal(np.sort(apart.forward.stops), np.sort(apart.backward.stops))
    assert vl.simulate(apart, cost).makespan_s < LEAST_GAIN * vl.simulate(alike, cost).makespan_s


def test_activations_that_are_kept_stay_with_the_slices_that_made_them():
    mesh, lengths, cost = CASES[0]
    for kept in ({"recompute": "none"}, {"recompute": "selective"}, {"recompute_share": 0.5}):
        plan = vl.plan_step(lengths, cost=cost.replace(**kept), mesh=mesh, search=vl.Search(repairs=False))

        assert "apart on" not in plan.answered_by
        assert np.array_equal(np.sort(plan.forward.stops), np.sort(plan.backward.stops))


def fastest_recut(answer: StepSearch) -> float:
    """Seconds of a step on one data-parallel rank, with the best of all backward passes composed apart."""
    (block,) = answer.blocks
    rates, least_rows = answer.costs.rates, ALIKE.least_rows
    return min(
        dispatch(
            pipeline_of_block(work_of_block(block.forward, padded(backward), answer.costs), answer.costs),
            forward_first=block.setting is not None and block.setting.forward_first,
        ).makespan_s
        for factor in RECUTS
        for backward in [[recut(one, factor, least_rows=least_rows, rates=rates) for one in block.forward]]
    )


def test_what_gains_less_than_a_hundredth_is_left_and_what_gains_more_is_taken():
    seen: Counter[str] = Counter()
    for seed in range(24):
        dice = np.random.default_rng(seed)
        cost = few_heads(recompute="full") if seed % 2 else long_cost_of(recompute="full")
        mesh = vl.Mesh(dp=1, pp=int(dice.choice([2, 4, 8])), tp=int(dice.choice([2, 4, 8])))
        lengths = step_of(int(dice.integers(20_000, 120_000)), int(dice.integers(0, 20)), seed)
        found = micropack(lengths, cost, mesh, replace(ALIKE, splits_backward=False))
        assert found is not None
        answer = found.best
        (block,) = answer.blocks
        before_s, best_s = block.makespan_s, fastest_recut(answer)

        _compose_apart(answer, vl.Search())

        if best_s < LEAST_GAIN * before_s:
            seen["taken"] += 1
            assert block.makespan_s == best_s
            assert block.backward is not block.forward
            assert "backward composed apart on 1 of 1 blocks" in answer.label
        else:
            seen["too little" if best_s < before_s else "nothing"] += 1
            assert block.makespan_s == before_s
            assert block.backward is block.forward
            assert "apart on" not in answer.label
    assert LEAST_GAIN == 0.99
    assert min(seen[outcome] for outcome in ("taken", "too little", "nothing")) >= 3


@pytest.mark.parametrize(("gain", "tries"), [(0.99, Effort.BRIEF), (0.9, 3 * Effort.BRIEF)])
def test_a_brief_search_goes_on_while_settings_are_far_faster_than_those_before(monkeypatch, gain, tries):
    found = micropack(step_of(60_000, 20, 0), long_cost_of(), vl.Mesh(pp=4, tp=8), ALIKE)
    assert found is not None
    (block,) = found.best.blocks
    step = replace(found.best, blocks=[replace(block, best=None, setting=None, tried=set(), known={})])
    calls = list[float]()

    def faster_each_time(pipeline: Any, **settings: Any) -> Any:
        calls.append(gain if len(calls) < 3 * Effort.BRIEF - 1 else 1.0)
        return replace(dispatch(pipeline), makespan_s=math.prod(calls))

    monkeypatch.setattr(local_search, "dispatch", faster_each_time)

    improve(step, ALIKE, math.inf, Effort.BRIEF)

    assert len(step.blocks[0].tried) == tries


def test_only_the_slowest_ranks_are_composed_anew():
    def answer_of(documents: int) -> StepSearch:
        mesh, lengths = vl.Mesh(dp=2, pp=16, tp=8), np.full(documents, 30_000, np.int32)
        found = micropack(lengths, few_heads(recompute="full"), mesh, replace(ALIKE, merges=False))
        assert found is not None
        return found.best

    def composed_apart(answer: StepSearch) -> list[tuple[float, float]]:
        """Seconds of both ranks, the slower first, before and after."""
        ranks = sorted(answer.blocks, key=lambda block: -block.makespan_s)
        before = [block.makespan_s for block in ranks]
        _compose_apart(answer, vl.Search())
        return [(was, block.makespan_s) for was, block in zip(before, ranks)]

    (two_before, two_after), _ = composed_apart(answer_of(3))
    (slow_before, slow_after), (fast_before, fast_after) = composed_apart(answer_of(5))

    assert slow_after < LEAST_GAIN * slow_before
    assert fast_before == fast_after < slow_after  # though it might:
    assert two_after < LEAST_GAIN * two_before
