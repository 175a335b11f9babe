"""Comparing plans, drawing steps and sweeping meshes: every figure is that of the plan that was simulated."""

import json
import re
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_comparisons import COST, LENGTHS, comparison, impossible
from rich.console import Console

from varlen.errors import SettingError
from varlen.plan.bound import lower_bound
from varlen.report.page import times
from varlen.report.plan import (
    METHODS,
    baseline,
    compare,
    duration,
    headline,
    plan_table,
    step_documents,
    truncation,
)
from varlen.report.plan_page import plan_page
from varlen.report.plan_sweep import BOUND, NO_PLAN, STATES, meshes, sweep, sweep_table
from varlen.simulate.api import simulate
from varlen.step_plan import Mesh


def printed(table, width=120):
    stream = StringIO()
    Console(file=stream, width=width, highlight=False).print(table)
    return stream.getvalue()


@given(
    st.lists(st.integers(0, 10_000), min_size=1, max_size=60).filter(any),
    st.integers(1, 20),
    st.integers(1, 12_000),
    st.none() | st.integers(0, 3),
)
def test_the_steps_of_a_data_set_hold_each_document_once_and_count_what_is_cut(lengths, size, capacity, seed):
    full = [length for length in lengths if length]
    steps = range(-(-len(full) // size))

    found = [
        step_documents(np.array(lengths), documents=size, step=step, capacity=capacity, seed=seed)
        for step in steps
    ]

    held = [length for step in found for length in step.lengths.tolist()]
    assert sorted(held) == sorted(min(length, capacity) for length in full)
    assert sum(step.num_tokens + step.truncated_tokens for step in found) == sum(full)
    assert sum(step.truncated_documents for step in found) == sum(length > capacity for length in full)
    assert [len(step.lengths) for step in found[:-1]] == [size] * (len(found) - 1)


def test_documents_keep_their_order_only_if_asked_to():
    given_order = step_documents(LENGTHS, documents=60, step=0, capacity=10**6, seed=None).lengths
    shuffled, again, other = (
        step_documents(LENGTHS, documents=60, step=0, capacity=10**6, seed=seed).lengths for seed in (0, 0, 1)
    )

    assert given_order.tolist() == LENGTHS.tolist()
    assert shuffled.tolist() == again.tolist()
    assert shuffled.tolist() not in (given_order.tolist(), other.tolist())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"step": 2}, "--step 2 isn't there: 60 documents, 30 a step, make 2 steps, 0 to 1"),
        ({"step": -1}, "--step -1 isn't there"),
        ({"seed": -1}, "--seed must be at least 0; got -1"),
        ({"documents": 0}, "--documents must be at least 1, the documents of a step; got 0"),
        ({"lengths": np.zeros(3, int)}, "every document is empty; there is nothing to plan"),
    ],
)
def test_a_step_that_is_not_there_is_refused(settings, said):
    with pytest.raises(SettingError, match=said):
        step_documents(
            **{"lengths": LENGTHS, "documents": 30, "step": 0, "capacity": 100, "seed": 0} | settings
        )


def test_methods_stand_from_fast_to_slow_and_each_figure_is_of_its_own_plan():
    found = comparison()

    steps = [row.step_s for row in found.methods]
    assert {row.name for row in found.methods} == set(METHODS)
    assert steps == sorted(steps)
    assert found.best is found.methods[0]
    for row in found.methods:
        assert row.step_s == simulate(row.plan, COST).makespan_s
        assert found.bound_ratio(row) >= 1
        assert found.tokens_per_s(row) * row.step_s == pytest.approx(found.num_tokens)
        assert row.timeline.peak_bytes <= found.limit_bytes
    assert found.method("packed").plan.method == "packed"
    assert found.method("packed_tuned").step_s < found.method("packed").step_s
    assert found.method("nothing") is None


def test_truncation_is_counted_and_said():
    found = comparison()
    step = step_documents(LENGTHS, documents=40, step=0, capacity=10**6, seed=0)
    over = step.lengths > 4_096

    assert found.truncated_documents == over.sum() > 0
    assert found.truncated_tokens == (step.lengths[over] - 4_096).sum()
    assert f"{over.sum()} documents longer than 4,096 were truncated: " in truncation(found)
    assert truncation(comparison(capacity=65_536)) == ""


def test_the_headline_compares_with_the_next_best_and_not_with_packs_as_they_come():
    found = comparison()
    alone = comparison(methods=("micropack",))

    best, second = found.methods[:2]
    assert baseline(found) is second is not found.method("packed")
    assert headline(found) == (
        f"{duration(best.step_s)} a step with {best.title}: {times(second.step_s / best.step_s)} as fast as "
        f"{second.title}, the next best."
    )
    assert baseline(alone) is None
    assert "times the lower bound" in headline(alone)


def test_it_is_said_above_every_comparison_that_others_were_not_given_context_parallelism():
    found, alone = comparison(), comparison(methods=("micropack",))

    words = " ".join(printed(plan_table(found)).split())
    assert words.index("static context parallelism") < words.index("over bound")
    page = plan_page(found)
    assert page.index("static context parallelism") < page.index("<table")
    assert "static context parallelism" not in printed(plan_table(alone)) + plan_page(alone)


def test_a_label_names_one_number_of_micropacks_once():
    answers = [row.plan.answered_by for row in comparison().methods if row.plan and row.plan.answered_by]

    for few, most in re.findall(r"(\S+) to (\S+) MicroPacks", " ".join(answers)):
        assert few != most
    assert any("MicroPack" in answer for answer in answers)


def test_how_well_measured_rates_predict_is_said_where_they_are_used():
    measured = replace(COST.hardware, held_out_errors=(0.052, 0.031))
    step = step_documents(LENGTHS, documents=8, step=0, capacity=4_096, seed=0)
    found = compare(step, cost=COST.replace(hardware=measured), mesh=Mesh(tp=8), methods=("micropack",))

    said = "within 5.2 % (attention) and 3.1 % (the rest of a layer)"
    assert said in " ".join(printed(plan_table(found)).split())
    assert said in plan_page(found)
    assert "within" not in comparison().estimated


def test_a_headline_does_not_call_a_rival_slower_that_is_as_fast():
    found = comparison()
    best = found.methods[0]
    found = replace(found, methods=(best, replace(best, name="sliced")))

    assert (
        headline(found)
        == f"{duration(best.step_s)} a step with {best.title}: no faster than equal slices, the next best."
    )


def test_where_no_method_has_a_plan_each_says_why_and_json_does_too():
    found = impossible()

    assert found.best is None
    assert headline(found) == "No method holds this step on this mesh."
    text = " ".join(printed(plan_table(found)).split())
    for row in found.methods:
        assert "parameters, gradients and optimizer states take" in row.refusal
        assert " ".join(row.refusal.split()) in text
    assert [row["refusal"] for row in found.to_json()["methods"]] == [row.refusal for row in found.methods]


def test_memory_is_repaired_only_where_that_is_allowed():
    step = step_documents(np.full(8, 40_000), documents=8, step=0, capacity=40_000, seed=None)

    free, held = (
        compare(step, cost=COST, mesh=Mesh(pp=4), methods=("packed",), repairs=repairs).methods[0]
        for repairs in (True, False)
    )

    assert free.recompute in ("selective", "full")
    assert held.plan is None
    assert "recompute='none'" in held.refusal


def test_an_unknown_method_is_refused_with_the_nearest_name():
    with pytest.raises(
        SettingError, match=r"no method is called 'micropak'; did you mean micropack\? There are"
    ):
        comparison(methods=("micropak",))


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_keeps_to_the_width_and_cuts_no_number(width):
    found = comparison(are_bytes=True)

    text = printed(plan_table(found), width)

    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    flat = " ".join(text.split())
    for row in found.methods:
        assert duration(row.step_s) in flat
        assert duration(row.planning_s) in flat
    assert "Bytes are counted here" in flat


def test_figures_are_json_and_hold_every_method():
    found = comparison()

    read = json.loads(json.dumps(found.to_json()))

    assert read["gpus"] == 32
    assert read["mesh"]["dp"] == 2
    assert [row["step_s"] for row in read["methods"]] == [row.step_s for row in found.methods]
    assert all(row["lower_bound_ratio"] >= 1 and row["peak_bytes"] > 0 for row in read["methods"])


@pytest.mark.parametrize(
    ("value", "said"), [(0.9996, "1.00 s"), (0.0999, "99.9 ms"), (99.96, "100 s"), (2e-6, "2.00 µs")]
)
def test_durations_have_three_digits(value, said):
    assert duration(value) == said


# --- sweeps ---


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
    found = swept(most=3, capacities=(2_048, 4_096))

    rates = []
    for capacity in (2_048, 4_096):
        step = step_documents(LENGTHS, documents=30, step=0, capacity=capacity, seed=0)
        for mesh in meshes(COST, 8, "optimizer"):
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
    assert counted + len(found.best) == found.num_meshes == 2 * len(list(meshes(COST, 8, "optimizer")))


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
    text = printed(sweep_table(found))
    assert "No mesh of these GPUs holds this step." in text
    assert f"{found.num_meshes}: {STATES}" in text
    assert NO_PLAN not in text


def test_a_sweep_is_printed_with_the_fastest_first():
    found = swept()

    text = printed(sweep_table(found))

    assert "is the fastest:" in text
    for one in found.best:
        assert duration(one.figures.step_s) in text
    assert [row["tokens_per_s"] for row in found.to_json()["best"]] == [
        one.tokens_per_s for one in found.best
    ]


def test_a_sweep_of_no_gpu_is_refused():
    with pytest.raises(SettingError, match="--gpus must be at least 1; got 0"):
        swept(num_gpus=0)
