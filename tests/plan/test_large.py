"""Steps of many tokens a rank, or with little memory: as many MicroPacks as they need, never behind plain packs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.plan.test_step import cost_of, long_tailed

import varlen as vl
from varlen.plan.check import check_plan
from varlen.plan.serialize import plan_fingerprint

TOLERANCE = 1.02


def took(lengths: Any, cost: vl.CostModel, mesh: vl.Mesh, **settings: Any) -> float:
    plan = vl.plan_step(lengths, cost=cost, mesh=mesh, **settings)
    return vl.simulate(plan, cost.as_planned(plan)).makespan_s


@pytest.mark.parametrize(
    ("mesh", "millions"),
    [(vl.Mesh(tp=8), 16), (vl.Mesh(dp=2, pp=4), 16), (vl.Mesh(dp=8), 8)],
    ids=["tp8", "dp2pp4", "dp8"],
)
def test_no_number_of_tokens_is_planned_slower_than_plain_packs(mesh: vl.Mesh, millions: int) -> None:
    cost = cost_of("llama-3-8b", recompute="none")
    lengths = np.full(millions * 500, 2000, np.int32)

    assert took(lengths, cost, mesh) <= TOLERANCE * took(lengths, cost, mesh, method="packed", capacity=8192)


def test_more_tokens_are_cut_into_more_micropacks_and_not_into_more_recomputation() -> None:
    cost, mesh = cost_of("llama-3-8b", recompute="none"), vl.Mesh(tp=8)
    few, many = np.full(1_000, 2000, np.int32), np.full(16_000, 2000, np.int32)

    plans = [vl.plan_step(lengths, cost=cost, mesh=mesh) for lengths in (few, many)]

    assert [plan.recompute for plan in plans] == ["none", "none"]
    assert plans[1].forward.counts[0] > 64
    check_plan(plans[1], cost)


def test_sizes_that_are_given_are_all_that_is_tried() -> None:
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
def test_where_memory_holds_hardly_more_than_a_document_plain_packs_are_not_faster(
    mesh: vl.Mesh, fraction: float, length: int
) -> None:
    cost = cost_of(recompute="none", memory_fraction=fraction)
    cost = cost.replace(model=replace(cost.model, max_positions=None))
    lengths = np.full(200, length, np.int32)

    assert took(lengths, cost, mesh) <= TOLERANCE * took(lengths, cost, mesh, method="packed")


def test_what_others_plan_is_not_refused() -> None:
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


def test_a_quick_look_is_deterministic_and_shares_documents_as_a_close_one_does() -> None:
    cost = cost_of(recompute="none").replace(memory_fraction=0.92)
    cost = cost.replace(model=replace(cost.model, max_positions=None))
    mesh, lengths = vl.Mesh(dp=8, pp=2, tp=8), np.append(long_tailed(200, 8000), 250_000).astype(np.int32)
    quick: dict[str, Any] = {"search": vl.Search(closely=False)}

    plans = [vl.plan_step(lengths, cost=cost, mesh=mesh, **quick) for _ in range(2)]
    close_s, quick_s = took(lengths, cost, mesh), took(lengths, cost, mesh, **quick)

    assert plan_fingerprint(plans[0]) == plan_fingerprint(plans[1])
    assert plans[0].num_merged > 0
    assert close_s <= quick_s < 1.2 * close_s
    assert took(lengths, cost, mesh, method="sliced") > 2 * quick_s
