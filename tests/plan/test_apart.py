"""Backward passes composed apart from forward ones are kept where they make a step 1 % faster, and only there."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.plan.test_step import cost_of

import varlen as vl
from varlen.plan.check import check_plan
from varlen.plan.local_search import Answer, padded, pipeline_of_block, work_of_block
from varlen.plan.micropack import LEAST_GAIN, RECUTS, _compose_apart, micropack, recut
from varlen.simulate.dispatch import dispatch

ALIKE = vl.Search(asymmetric=False)


def many_heads(**settings: Any) -> vl.CostModel:
    """Rows alone say how fast attention is."""
    cost = cost_of(**settings)
    return cost.replace(model=replace(cost.model, max_positions=None))


def few_heads(**settings: Any) -> vl.CostModel:
    """Attention is slow on few rows times heads, in the backward pass more than in the forward one."""
    cost = many_heads(model="llama-3-8b", **settings)
    return cost.replace(hardware=replace(cost.hardware, heads_exponent=1.0))


def step_of(longest: int, count: int, seed: int) -> np.ndarray:
    return np.append(np.random.default_rng(seed).integers(200, 8000, count), longest).astype(np.int32)


CASES = [
    (vl.Mesh(dp=2, pp=8, tp=8), step_of(108_000, 23, 33), few_heads(recompute="full")),
    (vl.Mesh(dp=1, pp=16, tp=8), step_of(78_000, 13, 27), few_heads(recompute="full")),
    (vl.Mesh(dp=1, pp=8, tp=8), step_of(98_000, 11, 38), many_heads(model="llama-3-8b", recompute="full")),
]


@pytest.mark.parametrize(("mesh", "lengths", "cost"), CASES)
def test_deep_pipelines_with_a_long_document_are_faster_with_both_passes_apart(
    mesh: vl.Mesh, lengths: np.ndarray, cost: vl.CostModel
) -> None:
    apart = vl.plan_step(lengths, cost=cost, mesh=mesh)
    alike = vl.plan_step(lengths, cost=cost, mesh=mesh, search=ALIKE)

    check_plan(apart, cost)
    assert "backward composed apart" in apart.answered_by
    assert "apart on" not in alike.answered_by
    assert not np.array_equal(np.sort(apart.forward.stops), np.sort(apart.backward.stops))
    assert vl.simulate(apart, cost).makespan_s < LEAST_GAIN * vl.simulate(alike, cost).makespan_s


def test_activations_that_are_kept_stay_with_the_slices_that_made_them() -> None:
    mesh, lengths, cost = CASES[0]
    for kept in ({"recompute": "none"}, {"recompute": "selective"}, {"recompute_share": 0.5}):
        plan = vl.plan_step(lengths, cost=cost.replace(**kept), mesh=mesh, search=vl.Search(repairs=False))

        assert "apart on" not in plan.answered_by
        assert np.array_equal(np.sort(plan.forward.stops), np.sort(plan.backward.stops))


def fastest_recut(answer: Answer) -> float:
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


def test_what_gains_less_than_a_hundredth_is_left_and_what_gains_more_is_taken() -> None:
    seen: Counter[str] = Counter()
    for seed in range(24):
        dice = np.random.default_rng(seed)
        cost = few_heads(recompute="full") if seed % 2 else many_heads(recompute="full")
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


def test_only_the_slowest_ranks_are_composed_anew() -> None:
    def answer_of(documents: int) -> Answer:
        mesh, lengths = vl.Mesh(dp=2, pp=16, tp=8), np.full(documents, 30_000, np.int32)
        found = micropack(lengths, few_heads(recompute="full"), mesh, replace(ALIKE, merges=False))
        assert found is not None
        return found.best

    def composed_apart(answer: Answer) -> list[tuple[float, float]]:
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
