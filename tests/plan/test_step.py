"""`plan_step`: every method's plan fits and takes what the planner said; what can't be planned is refused."""

import math
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.planning import METHODS, cost_of, long_cost_of, long_tailed
from tests.support.rarely import IS_SOAK, mostly
from tests.support.sliced import one_gpu_plan

import varlen as vl
from varlen.errors import LengthsError, OverlongDocumentError, PlanError, SettingError
from varlen.plan import api
from varlen.plan.api import repairs
from varlen.plan.bound import lower_bound
from varlen.plan.check import check_plan
from varlen.plan.micropack import _groupings, micropack, narrowed
from varlen.plan.serialize import plan_to_bytes
from varlen.simulate.graph import stage_costs
from varlen.step_plan import spread


@given(
    st.lists(st.integers(0, 60_000), min_size=1, max_size=40).filter(any),
    st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 4), (8, 1)]),
    st.sampled_from(METHODS),
    st.sampled_from(["none", "optimizer", "parameters"]),
)
@settings(max_examples=settings().max_examples // 4, deadline=None)
def test_every_plan_of_every_method_keeps_the_rules(lengths, dp_pp, method, sharding):
    mesh = vl.Mesh(dp=dp_pp[0], pp=dp_pp[1], tp=4, sharding=sharding)
    cost = cost_of()

    plan = vl.plan_step(lengths, cost=cost, mesh=mesh, method=method)
    timeline = vl.simulate(plan, cost)

    check_plan(plan, cost)
    assert plan.lengths.tolist() == lengths
    assert timeline.peak_bytes <= cost.limit_bytes * (1 + 1e-9)
    if sharding == "parameters":
        assert len(set(plan.forward.counts.tolist())) == 1
        assert len(set(plan.backward.counts.tolist())) == 1


@given(st.integers(0, 10_000), st.sampled_from([(2, 2), (4, 4), (8, 2), (2, 8)]), st.booleans())
@settings(max_examples=settings().max_examples // 4, deadline=None)
def test_no_plan_is_faster_than_the_bound(seed, dp_pp, merges):
    lengths = long_tailed(60, 80_000, seed)
    mesh, cost = vl.Mesh(dp=dp_pp[0], pp=dp_pp[1], tp=4), cost_of()

    plan = vl.plan_step(lengths, cost=cost, mesh=mesh, search=vl.Search(merges=merges))

    assert vl.simulate(plan, cost).makespan_s >= lower_bound(plan.lengths, cost, mesh).seconds * (1 - 1e-9)


@pytest.mark.parametrize("method", ["dynamic_cp", "micropack"])
def test_the_bound_counts_as_many_ranks_as_may_share_a_document(method):
    mesh, cost = vl.Mesh(dp=16, cp=2, tp=8), cost_of(recompute="none", mode="flops", offload="kv")

    plan = vl.plan_step([1_000_000], cost=cost, mesh=mesh, method=method)

    assert plan.num_ranks.tolist() == [16]
    assert vl.simulate(plan, cost).makespan_s >= lower_bound(plan.lengths, cost, mesh).seconds * (1 - 1e-9)


@pytest.mark.parametrize("mode", ["calibrated", "flops"])
@pytest.mark.parametrize("splits", [False, True])
def test_the_planner_scores_what_the_simulator_measures(mode, splits):
    mesh, cost = vl.Mesh(dp=4, pp=4, tp=4), cost_of(mode=mode)
    search = vl.Search(merges=False, splits_backward=splits)

    found = micropack(long_tailed(200, 60_000), cost, mesh, search)
    plan = vl.plan_step(long_tailed(200, 60_000), cost=cost, mesh=mesh, search=search)

    assert found is not None
    sync = float(cost.gradient_sync_s(mesh).max())
    assert vl.simulate(plan, cost).makespan_s == pytest.approx(found.best.makespan_s + sync, rel=0.02)


def test_ranks_that_share_documents_take_no_longer_than_planned():
    lengths = np.append(long_tailed(200, 20_000), [200_000, 150_000]).astype(np.int32)
    mesh, cost = vl.Mesh(dp=8, pp=4, tp=4), cost_of()

    found = micropack(lengths, cost, mesh, vl.Search())
    plan = vl.plan_step(lengths, cost=cost, mesh=mesh)

    assert found is not None
    assert plan.num_merged >= 2
    sync = float(cost.gradient_sync_s(mesh).max())
    assert vl.simulate(plan, cost).makespan_s <= (found.best.makespan_s + sync) * 1.001


def test_equal_arguments_give_equal_plans():
    mesh, cost = vl.Mesh(dp=4, pp=2, tp=4), cost_of()

    plans = {plan_to_bytes(vl.plan_step(long_tailed(300, 90_000), cost=cost, mesh=mesh)) for _ in range(3)}

    assert len(plans) == 1


def test_each_switch_of_the_search_is_one_idea_and_changes_the_plan_as_it_says():
    lengths = np.append(long_tailed(100, 20_000), [150_000]).astype(np.int32)
    mesh, cost = vl.Mesh(dp=4, pp=4, tp=4), cost_of()

    whole = vl.plan_step(lengths, cost=cost, mesh=mesh, search=vl.Search(slices=False, merges=False))
    alone = vl.plan_step(lengths, cost=cost, mesh=mesh, search=vl.Search(merges=False))
    same = vl.plan_step(
        lengths, cost=cost, mesh=mesh, search=vl.Search(splits_backward=False, asymmetric=False)
    )

    assert (whole.forward.starts == 0).all()
    assert alone.num_merged == 0
    assert (alone.forward.starts > 0).any()
    assert not same.splits_backward
    slices = [sorted(zip(p.document_ids, p.starts, p.stops)) for p in (same.forward, same.backward)]
    assert slices[0] == slices[1]


def test_micropacks_are_never_slower_than_slices_and_slices_than_packs():
    mesh, cost = vl.Mesh(dp=4, pp=4, tp=4), cost_of()
    for seed in range(2 if IS_SOAK else 1):
        lengths = long_tailed(256, 100_000, seed)
        took = {
            method: vl.simulate(vl.plan_step(lengths, cost=cost, mesh=mesh, method=method), cost).makespan_s
            for method in METHODS
        }
        assert took["micropack"] <= min(took.values()) * 1.02, took
        assert took["sliced"] <= took["packed"], took


def test_packs_as_users_run_them_are_best_fit_decreasing_round_robin():
    lengths = long_tailed(100, 8_000)
    mesh, cost = vl.Mesh(dp=2, pp=2, tp=4), cost_of()

    plan = vl.plan_step(lengths, cost=cost, mesh=mesh, method="packed", capacity=8192)

    packing = vl.pack(lengths, 8192)
    packs = packing.to_lists()
    found = [
        plan.forward.document_ids[a:b].tolist()
        for a, b in zip(plan.forward.slice_offsets[:-1], plan.forward.slice_offsets[1:])
    ]
    assert found == [*packs[0::2], *packs[1::2]]


def test_documents_are_kept_whole_beside_one_that_is_cut_into_slices_of_enough_rows():
    lengths = np.append(np.full(64, 900), [120_000]).astype(np.int32)
    mesh, cost = vl.Mesh(dp=1, pp=4, tp=4), cost_of()

    plan = vl.plan_step(lengths, cost=cost, mesh=mesh)
    rows = plan.forward.stops - plan.forward.starts

    assert (rows[plan.forward.document_ids < 64] == 900).all()
    assert rows[plan.forward.document_ids == 64].min() >= 2048
    assert (plan.forward.stops[:-1][rows[:-1] > 2048] % 128 == 0).mean() > 0.5


def test_memory_that_is_short_is_repaired_by_more_recomputation_and_said():
    lengths = np.array([160_000, 3000, 4000], np.int32)
    mesh = vl.Mesh(dp=1, pp=4, tp=2)
    cost = cost_of(recompute="none")

    plan = vl.plan_step(lengths, cost=cost, mesh=mesh)

    assert plan.recompute != "none"
    assert vl.simulate(plan, cost).peak_bytes <= cost.limit_bytes
    with pytest.raises(PlanError, match=r"documents of up to [\d,]+ tokens would fit, or a mesh of cp=\d"):
        vl.plan_step(lengths, cost=cost, mesh=mesh, search=vl.Search(repairs=False))


def test_where_memory_wants_half_the_layers_recomputed_only_they_are():
    mesh, lengths = vl.Mesh(dp=2, pp=4, tp=4), long_tailed(96, 60_000)
    whole = long_cost_of("llama-2-70b", memory_fraction=0.8)
    least = whole.replace(recompute="none")

    plan = vl.plan_step(lengths, cost=least, mesh=mesh)
    timeline = vl.simulate(plan, least)
    all_layers = vl.simulate(vl.plan_step(lengths, cost=whole, mesh=mesh), whole)

    assert (plan.recompute, plan.recompute_share) == ("full", 0.5)
    assert timeline.peak_bytes <= least.limit_bytes
    assert timeline.makespan_s < 0.98 * all_layers.makespan_s


@pytest.mark.parametrize(("pp", "shares"), [(32, [1.0]), (16, [0.5, 1.0]), (4, [0.25, 0.5, 1.0])])
def test_shares_that_recompute_the_same_layers_are_tried_once(pp, shares):
    tried = [cost for cost in repairs(cost_of(recompute="none"), vl.Mesh(pp=pp)) if cost.recompute == "full"]

    assert [cost.recompute_share for cost in tried if cost.offload == "none"] == shares


def test_few_rows_are_planned_in_as_few_micropacks_as_are_fast():
    mesh, cost = vl.Mesh(tp=4), cost_of(recompute="none")
    took = {
        method: vl.simulate(vl.plan_step([4096] * 5, cost=cost, mesh=mesh, method=method), cost).makespan_s
        for method in ("micropack", "balanced")
    }

    assert took["micropack"] <= took["balanced"] * 1.02


@pytest.mark.parametrize("method", METHODS)
def test_packs_alone_are_tuned_only_if_asked_to_be(method):
    asked: dict[str, Any] = {"cost": cost_of(), "mesh": vl.Mesh(dp=2, pp=4, tp=4), "method": method}
    lengths = long_tailed(48, 30_000)

    plain, tuned = (vl.plan_step(lengths, **asked, tuned=tuned) for tuned in (False, True))

    assert (plan_to_bytes(plain) == plan_to_bytes(tuned)) == (method != "packed")


@pytest.mark.parametrize(
    ("lengths", "mesh"),
    [
        ([16_384] * 8, vl.Mesh(dp=1, pp=8, cp=4, tp=4)),
        ([1630, 1415], vl.Mesh(dp=2, pp=2, tp=4)),
        ([40, 3000, 700], vl.Mesh(dp=4, pp=4, cp=2, tp=2)),
    ],
)
def test_no_plan_of_few_rows_a_gpu_is_faster_than_the_bound(lengths, mesh):
    cost = long_cost_of(mode="flops", recompute="none")
    plan = vl.plan_step(lengths, cost=cost, mesh=mesh)

    assert vl.simulate(plan, cost).makespan_s >= lower_bound(plan.lengths, cost, mesh).seconds


def test_no_more_ranks_share_a_document_than_may_where_parameters_are_sharded():
    mesh, roomy = vl.Mesh(dp=8, sharding="parameters"), replace(vl.Hardware.named("h100"), memory_bytes=2e12)
    cost = long_cost_of(hardware=roomy)

    plan = vl.plan_step([60_000] + [300] * 20, cost=cost, mesh=mesh, search=vl.Search(most_merged_ranks=2))

    assert plan.num_ranks.max() <= 2


@pytest.mark.parametrize(("over", "tried"), [(1.2, 2), (1.3, 4)])
def test_more_recomputation_is_tried_only_for_plans_far_over_their_bound(monkeypatch, over, tried):
    lengths, mesh, cost, calls = np.array([5000, 900], np.int32), vl.Mesh(tp=4), cost_of(), []
    bound_s = lower_bound(lengths, cost, mesh, least_rows=vl.Search().least_rows).seconds
    plan = vl.plan_step(lengths, cost=cost, mesh=mesh, method="sliced")
    full = api._Planned(plan, over * bound_s, is_full=True)
    monkeypatch.setattr(api, "repairs", lambda *_: [cost] * 4)
    monkeypatch.setattr(api, "_contained", lambda given, levels, level, best: best)
    monkeypatch.setattr(
        api, "_planned", lambda *_, **__: calls.append(1) or (full if len(calls) == 1 else None)
    )

    vl.plan_step(lengths, cost=cost, mesh=mesh)

    assert len(calls) == tried


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"lengths": []}, LengthsError, "no token"),
    ({"lengths": [0, 0]}, LengthsError, "2 documents have no token among them"),
    ({"lengths": [5, -1]}, LengthsError, "-1"),
    ({"lengths": [5.5]}, LengthsError, "5.5"),
    ({"method": "micropacks"}, SettingError, "did you mean 'micropack'"),
    ({"search": {}}, SettingError, "search is a dict; it must be a vl.Search"),
    ({"capacity": 0}, SettingError, "capacity=0"),
    ({"capacity": 50}, OverlongDocumentError, r"document 0 has 100 tokens but capacity is 50 \(1 of"),
    ({"mesh": vl.Mesh(dp=1, pp=33, tp=1)}, SettingError, "33"),
    ({"mesh": vl.Mesh(dp=1, tp=3)}, SettingError, "tp=3 doesn't divide"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD)
def test_bad_input_is_refused_in_a_sentence(change, error, words):
    arguments: dict[str, Any] = {"lengths": [100, 20], "cost": cost_of(), "mesh": vl.Mesh(tp=4)} | change

    with pytest.raises(error, match=words):
        vl.plan_step(arguments.pop("lengths"), **arguments)


def test_more_ranks_than_documents_leave_ranks_idle():
    mesh, cost = vl.Mesh(dp=8, pp=2, tp=4), cost_of()
    for method in METHODS:
        plan = vl.plan_step([700, 30], cost=cost, mesh=mesh, method=method)

        check_plan(plan, cost)
        assert math.isfinite(vl.simulate(plan, cost).makespan_s)


@pytest.mark.parametrize("virtual", [1, 2])
def test_interleaved_stages_are_planned_too(virtual):
    mesh, cost = vl.Mesh(dp=2, pp=4, tp=4, virtual_stages=virtual), cost_of()

    for method in METHODS:
        plan = vl.plan_step(long_tailed(100, 30_000), cost=cost, mesh=mesh, method=method)
        check_plan(plan, cost)
        assert vl.simulate(plan, cost).peak_bytes <= cost.limit_bytes


BAD_SEARCH: list[tuple[dict[str, Any], str]] = [
    ({"grades": 1}, "search grades=1; it is True or False"),
    ({"least_rows": 0}, "least_rows=0; it must be a whole number of at least 1"),
    ({"least_rows": 1.5}, "least_rows=1.5; it must be a whole number"),
    ({"most_merged_ranks": 3}, "most_merged_ranks=3; it must be a power of two"),
    ({"most_merged_ranks": 2.0}, "most_merged_ranks=2.0; it must be a power of two"),
    ({"micropacks_per_stage": 4}, "micropacks_per_stage=4; it must be a tuple of numbers"),
    ({"micropacks_per_stage": ("a",)}, "it must be a tuple of numbers"),
    ({"micropacks_per_stage": ()}, r"micropacks_per_stage=\(\); it must hold numbers above 0"),
    ({"micropacks_per_stage": (0, 1)}, "must hold numbers above 0"),
    ({"micropacks_per_stage": (5, 1)}, r"=\(5, 1\); .* each above the one before"),
    ({"micropacks_per_stage": (1, float("nan"))}, "must hold numbers above 0"),
    ({"micropacks_per_stage": (1, float("inf"))}, "must hold numbers above 0"),
]


@pytest.mark.parametrize(("settings", "words"), BAD_SEARCH)
def test_a_search_that_cannot_be_is_refused(settings, words):
    with pytest.raises(SettingError, match=words):
        vl.Search(**settings)


def test_one_size_is_enough():
    assert vl.Search(micropacks_per_stage=(4,), most_merged_ranks=1).least_rows == 2048


SHORT = (900, 4000, 17_000, 60, 2500)
CASES: list[tuple[Any, vl.Mesh, int, int]] = [
    ("micropack", vl.Mesh(dp=1, pp=2, tp=8), 5_000_000, 1),
    ("micropack", vl.Mesh(dp=3, pp=2, tp=8), 9_000_000, 2),
    ("micropack", vl.Mesh(dp=16, pp=1, tp=8), 30_000_000, 16),
    ("micropack", vl.Mesh(dp=2, pp=2, cp=2, tp=4, sharding="parameters"), 20_000_000, 4),
    ("sliced", vl.Mesh(dp=4, pp=2, tp=8), 5_000_000, 1),
    ("dynamic_cp", vl.Mesh(dp=4, pp=2, tp=8), 20_000_000, 4),
    ("packed", vl.Mesh(dp=4, pp=2, tp=8), 3_000_000, 1),
    ("balanced", vl.Mesh(dp=4, pp=2, tp=8), 3_000_000, 1),
]
"""Method, mesh, tokens of a document that is too long, and the ranks that may share it."""


def refused(lengths: Any, **settings: Any) -> str:
    with pytest.raises(PlanError) as caught:
        vl.plan_step(lengths, **settings)
    return str(caught.value)


def number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, text
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize(
    ("method", "mesh", "longest", "ranks"), mostly([CASES[1], CASES[3], CASES[5], CASES[6]], CASES)
)
def test_a_document_of_the_length_that_would_fit_does_and_a_longer_one_does_not(method, mesh, longest, ranks):
    asked: dict[str, Any] = {"cost": long_cost_of(), "mesh": mesh, "method": method}

    said = refused([*SHORT, longest, longest - 1], **asked)

    assert said.startswith(f"document {len(SHORT)} has {longest:,} tokens, too many for the {ranks} rank")
    assert "(2 documents are too long)" in said
    fits = number(r"alone, documents of up to ([\d,]+) tokens would fit", said)
    assert vl.plan_step([fits], **asked).num_tokens == fits
    assert f"has {fits + 1:,} tokens" in refused([fits + 1], **asked)
    wider = replace(mesh, cp=number(r"or a mesh of cp=(\d+)$", said))
    assert vl.plan_step([*SHORT, longest], **(asked | {"mesh": wider})).num_documents == len(SHORT) + 1


def test_without_merging_a_document_has_one_rank():
    search = vl.Search(merges=False, repairs=False)
    asked: dict[str, Any] = {"cost": long_cost_of(), "mesh": vl.Mesh(dp=4, pp=2, tp=8), "search": search}

    said = refused([9_000_000], **asked)

    assert "too many for the 1 rank that may share it (1 document is too long)" in said
    assert "(recompute='full', offload='none', and no more of them may be tried)" in said
    fits = number(r"up to ([\d,]+) tokens", said)
    assert vl.plan_step([fits], **asked).num_merged == 0
    refused([fits + 1], **asked)


def test_documents_that_fit_alone_and_not_beside_each_other_are_said_to():
    lengths = np.full(8, 700_000, np.int32)
    asked: dict[str, Any] = {"cost": long_cost_of(), "mesh": vl.Mesh(pp=4, tp=4), "method": "packed"}

    said = refused(lengths, **asked)

    assert said.startswith("no plan of this method fits into the 73.6 GB")
    assert "(up to recompute='full', offload='kv')" in said
    assert "though each document would alone; use another method" in said
    assert vl.plan_step(lengths[:1], **asked).num_tokens == 700_000
    assert vl.plan_step(lengths, **(asked | {"method": "micropack"})).num_tokens == 8 * 700_000


@pytest.mark.parametrize(
    ("model", "dp", "tp"), [("llama-2-70b", 1, 2), ("llama-2-70b", 16, 1), ("llama-2-7b", 2, 1)]
)
def test_states_that_do_not_fit_are_said_to_with_the_least_mesh_and_sharding_that_hold_them(model, dp, tp):
    cost, mesh = cost_of(model), vl.Mesh(dp=dp, tp=tp)

    def holds(on: vl.Mesh) -> bool:
        return bool((cost.memory(on).state_bytes < cost.limit_bytes).all())

    said = refused([100], cost=cost, mesh=mesh)

    assert re.match(r"parameters, gradients and optimizer states take [\d,.]+ GB on stage 0 of 1", said)
    least, pp, wide = (
        number(pattern, said) for pattern in (r"at least ([\d,]+) would", r"\(pp=(\d+)", r", tp=(\d+);")
    )
    assert least == pp * wide
    assert holds(replace(mesh, pp=pp, tp=wide))
    heads = cost.model.heads
    fewer = [(a, b) for a in range(1, 81) for b in (1, 2, 4, 8, 16) if a * b < least and heads % b == 0]
    assert not any(holds(replace(mesh, pp=a, tp=b)) for a, b in fewer if a <= cost.model.layers)
    sharded = number(r"sharding='parameters' with dp=([\d,]+)", said) if "with dp" in said else dp
    assert holds(replace(mesh, dp=sharded, sharding="parameters"))
    assert sharded == dp or not holds(replace(mesh, dp=sharded // 2, sharding="parameters"))


@pytest.mark.parametrize("kernels", ["fused", "eager"])
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_a_document_that_some_plan_holds_is_never_left_out_unseen(kernels, kv_heads):
    length, cost = 131_072, long_cost_of(kernels=kernels, recompute="full")
    cost = cost.replace(model=replace(cost.model, kv_heads=kv_heads))
    peaks = []
    for count in (16, 24, 32):
        cuts = pairwise(np.linspace(0, length, count + 1).astype(int).tolist())
        plan = one_gpu_plan([length], [[(0, *each)] for each in cuts], recompute="full")
        peaks.append(float(vl.simulate(plan, cost).peak_bytes))
    enough = replace(cost.hardware, memory_bytes=1.0001 * min(peaks) / cost.memory_fraction)
    costs = stage_costs(cost.replace(hardware=enough), vl.Mesh())

    assert list(_groupings(np.array([length], np.int32), costs, vl.Search(), 8))


CONTEXT = [(2, 2, 2), (1, 3, 4), (2, 4, 1)]


@pytest.mark.parametrize(("dp", "pp", "cp"), mostly(CONTEXT[:2], CONTEXT))
@pytest.mark.parametrize("sharding", ["none", "optimizer", "parameters"])
@pytest.mark.parametrize(
    ("virtual_stages", "kernels"), mostly([(2, "fused")], [(1, "fused"), (2, "fused"), (1, "eager")])
)
def test_ranks_that_share_all_documents_are_those_of_a_mesh_with_context_parallelism(
    dp, pp, cp, sharding, virtual_stages, kernels
):
    lengths = np.append(long_tailed(60, 60_000), 0).astype(np.int32)
    mesh, cost = (
        vl.Mesh(dp=dp, pp=pp, cp=cp, tp=4, sharding=sharding, virtual_stages=virtual_stages),
        cost_of(kernels=kernels),
    )

    for method in ("sliced", "dynamic_cp"):
        plan = vl.plan_step(lengths, cost=cost, mesh=mesh, method=method)
        same = spread(plan, cp)

        check_plan(same, cost)
        assert same.mesh == replace(mesh, dp=dp * cp, cp=1)
        assert same.num_ranks.tolist() == np.where(lengths > 0, plan.num_ranks * cp, 1).tolist()
        before, after = (vl.simulate(each, cost.as_planned(each)) for each in (plan, same))
        assert after.makespan_s == pytest.approx(before.makespan_s, rel=1e-12)
        assert after.peaks_bytes == pytest.approx(np.repeat(before.peaks_bytes, cp, axis=0), rel=1e-12)


STEPS: list[tuple[str, vl.Mesh, dict[str, Any]]] = [
    ("a few documents of most work", vl.Mesh(dp=4, pp=4, tp=4), {}),
    ("a few documents of most work", vl.Mesh(dp=8, pp=2, tp=4), {"exchange_overlap": 0.0}),
    ("a few rows for each rank", vl.Mesh(dp=8, pp=4, tp=8), {}),
    ("short documents", vl.Mesh(dp=8, tp=4), {}),
    ("short documents", vl.Mesh(dp=2, pp=8, tp=4, sharding="parameters"), {}),
    ("two long documents", vl.Mesh(dp=2, pp=2, cp=2, tp=4), {"exchange_overlap": 0.5}),
    ("a dozen documents", vl.Mesh(dp=4, tp=4), {"recompute": "none"}),
]
LENGTHS = {
    "a few documents of most work": long_tailed(200, 150_000),
    "a few rows for each rank": np.full(400, 300, np.int32),
    "short documents": long_tailed(200, 8000),
    "a dozen documents": np.append(
        np.random.default_rng(0).lognormal(7, 1.2, 12).clip(64, 16_000), 9000
    ).astype(int),
    "two long documents": np.array([60_000, 50_000, *[900] * 60], np.int32),
}


@pytest.mark.parametrize(("documents", "mesh", "settings"), mostly([STEPS[1], STEPS[4]], STEPS))
def test_the_planner_is_no_slower_than_what_it_contains_at_any_context_parallelism(documents, mesh, settings):
    assert_no_slower(LENGTHS[documents], mesh, cost_of(**settings))


SMALL_MESHES = [
    vl.Mesh(dp=2, tp=4),
    vl.Mesh(dp=4, tp=4),
    vl.Mesh(dp=2, pp=2, tp=4),
    vl.Mesh(dp=4, pp=4, tp=4),
    vl.Mesh(dp=4, pp=4, tp=4, virtual_stages=2),
    vl.Mesh(dp=4, tp=4, sharding="parameters"),
    vl.Mesh(dp=2, pp=2, tp=4, sharding="parameters"),
    vl.Mesh(pp=8, tp=4, sharding="parameters"),
]


@pytest.mark.parametrize(("mesh", "apart"), [(SMALL_MESHES[5], False), (SMALL_MESHES[3], True)])
def test_weight_gradients_are_apart_where_a_pipeline_has_gaps_for_them(mesh, apart):
    plan = vl.plan_step(long_tailed(24, 4000), cost=cost_of(), mesh=mesh)

    assert plan.splits_backward == apart


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("mesh", SMALL_MESHES)
def test_no_random_dozen_of_documents_is_planned_slower_than_by_what_the_planner_contains(mesh, seed):
    lengths = np.random.default_rng(seed).lognormal(7, 1.2, 12).clip(64, 16_000)
    assert_no_slower(
        np.append(lengths, (9000, 60_000)[seed % 2]).astype(np.int32), mesh, cost_of(recompute="none")
    )


def assert_no_slower(lengths: np.ndarray, mesh: vl.Mesh, cost: vl.CostModel) -> None:
    """Compare the planner with all that it contains, at every context parallelism."""

    def took_s(mesh, **given):
        plan = vl.plan_step(lengths, cost=cost, mesh=mesh, **given)
        return vl.simulate(plan, cost.as_planned(plan)).makespan_s

    ours_s = took_s(mesh)
    apart_s = [took_s(each, search=vl.Search(merges=False)) for each in narrowed(mesh, vl.Search())]
    for number, each in enumerate(narrowed(mesh, vl.Search())):
        assert ours_s <= took_s(each) * 1.001
        assert ours_s <= took_s(each, method="dynamic_cp") * 1.001
        for method in ("packed", "balanced", "sliced"):
            peer_s = took_s(each, method=method, tuned=True)
            assert ours_s <= peer_s * 1.001
            assert apart_s[number] <= peer_s * 1.001


def test_selective_recomputation_comes_first_only_where_memory_is_far_too_short(monkeypatch):
    mesh, lengths, tried = vl.Mesh(dp=2, pp=4, tp=4), long_tailed(96, 60_000), []
    original = api.micropack
    monkeypatch.setattr(
        api, "micropack", lambda *given, **more: tried.append(given[1].recompute) or original(*given, **more)
    )

    for fraction, first in ((0.9, "none"), (0.7, "selective")):
        tried.clear()
        cost = long_cost_of("llama-2-70b", memory_fraction=fraction).replace(recompute="none")
        vl.plan_step(lengths // 4, cost=cost, mesh=mesh)
        assert tried[0] == first
