"""Meshes of some GPUs, compared: all of them are looked at, and the fastest are printed."""

from dataclasses import replace

import numpy as np
import pytest
from tests.report.printed import printed

from varlen.cost.hardware import Hardware
from varlen.cost.model import CostModel
from varlen.cost.shape import ModelShape
from varlen.errors import SettingError
from varlen.plan.bound import lower_bound
from varlen.report.page import duration, share
from varlen.report.plan import compare, step_documents
from varlen.report.plan_sweep import BOUND, NO_PLAN, SAME, STATES, meshes, sweep, sweep_table

COST = CostModel(model=ModelShape.named("llama-2-7b"), hardware=Hardware.named("h100"))
LENGTHS = np.random.default_rng(0).lognormal(7.5, 1.3, 60).clip(16, 40_000).astype(np.int64)


def swept(num_gpus=8, most=10, capacities=(4_096,), cost=COST):
    steps = [
        step_documents(LENGTHS, documents=30, step=0, capacity=capacity, seed=0) for capacity in capacities
    ]
    return sweep(steps, cost=cost, num_gpus=num_gpus, most=most)


def test_every_mesh_of_a_sweep_has_all_gpus_and_divides_the_model():
    found = list(meshes(COST, 48, "optimizer"))

    assert len(found) == len({(mesh.dp, mesh.pp, mesh.cp, mesh.tp) for mesh in found})
    for mesh in found:
        assert mesh.num_gpus == 48
        assert mesh.tp in (1, 2, 4, 8)
        assert mesh.pp <= 32
    assert {mesh.pp for mesh in found} == {1, 2, 3, 4, 6, 8, 12, 16, 24}


def test_a_sweep_finds_what_planning_every_mesh_finds():
    found = swept(2, most=3, capacities=(2_048, 4_096))

    rates = []
    for capacity in (2_048, 4_096):
        step = step_documents(LENGTHS, documents=30, step=0, capacity=capacity, seed=0)
        for mesh in meshes(COST, 2, "optimizer"):
            best = compare(step, cost=COST, mesh=mesh, methods=("micropack",)).best
            if best is not None:
                rates.append((step.num_tokens / best.step_s, step, mesh))
    fastest = sorted(rates, key=lambda rate: -rate[0])[:3]
    for place, (rate, step, mesh) in enumerate(fastest):
        more = [replace(mesh, virtual_stages=chunks) for chunks in (2, 3)] if mesh.pp > 1 else []
        others = [compare(step, cost=COST, mesh=one, methods=("micropack",)).best for one in more]
        fastest[place] = (max([rate, *(step.num_tokens / one.step_s for one in others if one)]), step, mesh)
    assert [one.tokens_per_s for one in found.best] == sorted((rate for rate, *_ in fastest), reverse=True)
    counted = sum(count for _, count in found.left_out)
    assert counted + len(found.best) == found.num_meshes == 2 * len(list(meshes(COST, 2, "optimizer")))


def test_a_sweep_leaves_out_only_meshes_whose_bound_is_no_better():
    found = swept(most=1)

    left_out = dict(found.left_out)
    assert left_out.get(BOUND, 0) > 0
    step = step_documents(LENGTHS, documents=30, step=0, capacity=4_096, seed=0)
    bounds = sorted(lower_bound(step.lengths, COST, mesh).seconds for mesh in meshes(COST, 8, "optimizer"))
    assert bounds[-left_out[BOUND]] >= found.best[0].figures.step_s


def test_a_sweep_says_why_meshes_have_no_plan():
    large = COST.replace(model=COST.model.named("llama-2-70b"))

    found = swept(num_gpus=2, cost=large)

    assert found.best == ()
    assert dict(found.left_out) == {STATES: found.num_meshes}
    text = printed(sweep_table(found), 120)
    assert "No mesh of these GPUs holds this step." in text
    assert f"{found.num_meshes}: {STATES}" in text
    assert NO_PLAN not in text


def test_a_sweep_lists_a_plan_once_though_ranks_share_documents_as_dp_and_as_cp():
    step = step_documents(np.array([40_000, *LENGTHS[:2]]), documents=3, step=0, capacity=40_000, seed=None)

    found = sweep([step], cost=COST, num_gpus=4)

    figures = [(one.mesh.pp, one.mesh.tp, one.figures.step_s) for one in found.best]
    assert len(figures) == len(set(figures))
    assert dict(found.left_out)[SAME] > 0
    twins = [mesh for mesh in meshes(COST, 4, "optimizer") if mesh.pp == 2 and mesh.tp == 1]
    assert sorted(mesh.cp for mesh in twins) == [1, 2]
    assert [one.mesh.cp for one in found.best if (one.mesh.pp, one.mesh.tp) == (2, 1)] == [1]


def test_a_sweep_is_printed_with_the_fastest_first():
    found = swept(2)

    text = printed(sweep_table(found), 120)

    assert "is the fastest:" in text
    for one in found.best:
        assert duration(one.figures.step_s) in text
    assert [row["tokens_per_s"] for row in found.to_json()["best"]] == [
        one.tokens_per_s for one in found.best
    ]


@pytest.fixture(scope="module")
def of_two_capacities():
    return swept(capacities=(2_048, 4_096))


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_of_a_sweep_keeps_to_the_width(of_two_capacities, width):
    found = of_two_capacities

    lines = printed(sweep_table(found), width).splitlines()

    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    for one in found.best:
        assert any(
            f"{duration(one.figures.step_s)} " in line and f"{one.tokens_per_s / 8:,.0f} " in line
            for line in lines
        )


def test_meshes_that_are_as_fast_as_a_sweep_tells_are_said_to_be(of_two_capacities):
    found = of_two_capacities
    rates = [one.tokens_per_s / found.best[0].tokens_per_s for one in found.best]
    ties = sum(rate >= 0.95 for rate in rates)
    alone = replace(found, best=found.best[:1])

    text = " ".join(printed(sweep_table(found), 120).split())
    assert ties > 1
    assert f"The first {ties} are within {share(0.05)} of each other" in text
    assert found.to_json()["ties"] == ties
    assert "are within" not in printed(sweep_table(alone), 120)


def test_a_sweep_of_no_gpu_is_refused():
    with pytest.raises(SettingError, match="--gpus must be at least 1; got 0"):
        swept(num_gpus=0)
