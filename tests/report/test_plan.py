"""Plans compared, drawn, painted and reported: every figure is that of the plan that was simulated."""

import base64
import json
import re
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from importlib.resources import files
from io import StringIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.report.pages import read

from varlen.cost.hardware import Hardware
from varlen.cost.model import CostModel
from varlen.cost.shape import ModelShape
from varlen.errors import SettingError
from varlen.report.page import duration, share, times
from varlen.report.plan import (
    METHODS,
    baseline,
    compare,
    headline,
    other_choices,
    planned,
    step_documents,
)
from varlen.report.plan_page import drawn_ranks, plan_page
from varlen.report.plan_table import costs, plan_table, truncation
from varlen.simulate.api import simulate
from varlen.step_plan import Mesh

COST = CostModel(model=ModelShape.named("llama-2-7b"), hardware=Hardware.named("h100"))


LENGTHS = np.random.default_rng(0).lognormal(7.5, 1.3, 60).clip(16, 40_000).astype(np.int64)


@cache
def comparison(
    name="chats", dp=2, pp=2, documents=40, capacity=4_096, methods=METHODS, are_bytes=False, **more
):
    """A step of a few documents, some of them truncated, by all methods or some."""
    step = step_documents(LENGTHS, documents=documents, step=0, capacity=capacity, seed=0)
    cost = COST.replace(recompute="full")
    mesh = Mesh(dp=dp, pp=pp, tp=8)
    return compare(step, cost=cost, mesh=mesh, methods=methods, name=name, are_bytes=are_bytes, **more)


@cache
def impossible():
    """A step that no plan holds: a model whose states alone are too large for one GPU."""
    step = step_documents(LENGTHS, documents=8, step=0, capacity=512, seed=None)
    cost = COST.replace(model=ModelShape.named("llama-2-70b"))
    return compare(step, cost=cost, mesh=Mesh(), methods=("packed", "micropack"))


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

    assert found.documents.truncated_documents == over.sum() > 0
    assert found.documents.truncated_tokens == (step.lengths[over] - 4_096).sum()
    assert f"{over.sum()} documents longer than 4,096 were truncated: " in truncation(found)
    assert truncation(comparison(capacity=65_536)) == ""


def test_memory_that_is_kept_free_is_said_with_its_reason():
    found = comparison()
    memory = dict(costs(found))["memory"]

    assert memory.endswith(
        "of 73.6 GB that a plan may use. The other 6.4 GB of 80.0 GB are kept free for the allocator and NCCL; a "
        "smaller --memory-fraction keeps more"
    )


def test_the_headline_speaks_of_the_best_other_method_first_and_then_of_tuned_packs():
    found = comparison(dp=4, capacity=40_000)
    alone = comparison(methods=("micropack",))

    best, second = found.methods[:2]
    packs = found.method("packed_tuned")
    assert baseline(found) is second
    assert second.name not in ("packed", "packed_tuned")
    assert headline(found) == (
        f"{duration(best.step_s)} a step with {best.title}: on this mesh {said_of(best, second)}, the best other "
        "method, and "
        f"{said_of(best, packs)}."
    )
    first = replace(found, methods=(best, packs))
    assert headline(first).endswith(f": on this mesh {said_of(best, packs)}, the best other method.")
    assert baseline(alone) is None
    assert "times the lower bound" in headline(alone)


def test_the_headline_says_so_where_another_method_is_faster():
    found = comparison(dp=4, capacity=40_000)
    ours, second = found.methods[:2]
    slow = replace(ours, timeline=replace(ours.timeline, stops_s=1.2 * ours.timeline.stops_s))
    lost = replace(found, methods=(second, slow) if slow.step_s > second.step_s else (slow, second))

    assert slow.step_s > second.step_s
    assert lost.ours is slow
    assert baseline(lost) is lost.best is second
    at = f" at cp {second.cp}" if second.cp > 1 else ""
    assert headline(lost) == (
        f"{duration(second.step_s)} a step with {second.title}{at}; MicroPacks take "
        f"{times(slow.step_s / second.step_s)} as long."
    )


def test_each_other_choice_changes_one_thing_and_is_planned_and_simulated_like_the_fastest():
    step = step_documents(LENGTHS, documents=24, step=0, capacity=4_096, seed=0)
    mesh = Mesh(dp=4, pp=2, tp=4)

    found = compare(step, cost=COST, mesh=mesh, methods=("micropack", "packed"), alternatives=True)

    best = found.best
    others = {one.title: one for one in found.alternatives}
    levels = {"none": "nothing", "selective": "selectively", "full": "everything"}
    recomputed = {f"recompute {much}" for level, much in levels.items() if level != best.plan.recompute}
    meshes_ = {
        "pp 1, dp 8": Mesh(dp=8, pp=1, tp=4),
        "pp 4, dp 2": Mesh(dp=2, pp=4, tp=4),
        "tp 2, dp 8": Mesh(dp=8, pp=2, tp=2),
        "tp 8, dp 2": Mesh(dp=2, pp=2, tp=8),
        "sharding parameters": replace(mesh, sharding="parameters"),
    }
    assert best.plan.recompute_share == 1
    assert others.keys() == recomputed | {"offload keys and values"} | meshes_.keys()
    for title, one in others.items():
        plan = one.figures.plan
        assert one.mesh == meshes_.get(title, mesh)
        assert one.mesh.num_gpus == mesh.num_gpus
        if plan is None:
            assert one.figures.refusal
            continue
        assert plan.mesh == one.mesh
        assert one.figures.step_s == simulate(plan, COST).makespan_s
        if title in recomputed:
            assert title == f"recompute {levels[plan.recompute]}"
            assert plan.offload == best.plan.offload
        if title == "offload keys and values":
            assert (plan.offload, plan.recompute) == ("kv", best.plan.recompute)


def test_other_choices_leave_out_meshes_that_the_model_or_the_gpus_do_not_divide_into():
    step = step_documents(LENGTHS, documents=8, step=0, capacity=2_048, seed=0)
    model = replace(COST.model, layers=3)
    row = planned(step, "packed", cost=COST.replace(model=model), mesh=Mesh(pp=2, virtual_stages=1, tp=8))

    titles = [title for title, _, _ in other_choices(row, COST.replace(model=model), row.plan.mesh)]

    assert [title for title in titles if title.startswith(("pp", "tp", "sharding"))] == [
        "pp 1, dp 2",
        "tp 4, dp 2",
    ]
    assert list(other_choices(replace(row, plan=None), COST, Mesh())) == []


@pytest.mark.parametrize("price", [0, -1.5, float("nan"), float("inf")])
def test_a_price_that_is_none_is_refused(price):
    step = step_documents(LENGTHS, documents=8, step=0, capacity=2_048, seed=0)

    with pytest.raises(SettingError, match="--price is what a GPU-hour costs, a number above 0; got"):
        compare(step, cost=COST, mesh=Mesh(tp=8), methods=("packed",), price=price)


def test_the_page_and_the_table_say_that_figures_are_simulated_and_with_which_rates():
    step = step_documents(LENGTHS, documents=8, step=0, capacity=4_096, seed=0)
    measured = COST.replace(hardware=replace(COST.hardware, held_out_errors=(0.052, 0.031)))
    said = {
        "with tables of rates of h100 (attention: FlashAttention 3, at best 720 TFLOP/s forward, 640 backward); "
        "--calibrate measures those of your GPUs.": COST,
        "with tables of rates of mine; --calibrate": COST.replace(
            hardware=replace(COST.hardware, name="mine", source="measured")
        ),
        "with rates that --calibrate measured. The rates of h100 predict": measured,
        "at one rate of h100 for all FLOPs, as papers count.": COST.replace(mode="flops"),
    }
    for words, cost in said.items():
        found = compare(step, cost=cost, mesh=Mesh(tp=8), methods=("micropack",))
        assert f"All times and memory are simulated, {words}" in " ".join(printed(plan_table(found)).split())
        assert f"All times and memory are simulated, {words}" in "".join(read(plan_page(found)).text)


def said_of(best, other):
    title = other.title + (f" at cp {other.cp}" if other.cp > 1 else "")
    faster = other.step_s / best.step_s
    return f"{times(faster)} as fast as {title}" if faster >= 1.01 else f"no faster than {title}"


def test_packs_as_they_come_are_no_best_other_method():
    found = comparison(dp=4, capacity=40_000)
    best, second, slow = found.best, replace(found.methods[1], name="packed"), found.method("packed_tuned")

    assert baseline(replace(found, methods=(best, second, slow))) is slow
    assert baseline(replace(found, methods=(best, second))) is second


def test_every_other_method_is_at_its_best_context_parallelism_on_the_same_gpus():
    found = comparison(dp=4, capacity=40_000)
    step = step_documents(LENGTHS, documents=40, step=0, capacity=40_000, seed=0)
    cost = COST.replace(recompute="full")

    for name in set(METHODS) - {"micropack", "packed"}:
        row = found.method(name)
        alone = [
            planned(step, name, cost=cost, mesh=Mesh(dp=4 // cp, pp=2, cp=cp, tp=8)).step_s
            for cp in (1, 2, 4)
        ]
        assert row.step_s == pytest.approx(min(alone), rel=1e-12)
        assert row.plan.mesh == Mesh(dp=4, pp=2, tp=8)
        if min(alone) < min(alone[:1] + alone[2:]):
            assert row.cp == 2
        assert found.best.step_s <= row.step_s
    assert found.method("packed").step_s == planned(step, "packed", cost=cost, mesh=found.mesh).step_s
    assert any(row.cp > 1 for row in found.methods)


def test_packs_as_they_come_are_not_compared_where_ranks_have_no_pack():
    found = comparison(dp=32, capacity=40_000)
    alone = comparison(dp=32, capacity=40_000, methods=("packed",))

    idle = int((alone.best.plan.forward.counts == 0).sum())
    assert idle > 0
    assert found.method("packed").timeline is None
    assert found.method("packed").refusal == (
        f"{idle} of 32 data-parallel ranks would have no pack; more --documents or a smaller --capacity make more "
        "packs"
    )
    assert all(row.plan for row in found.methods if row.name != "packed")


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
        == f"{duration(best.step_s)} a step with {best.title}: on this mesh no faster than equal slices, the best "
        "other method."
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

    assert free.plan.recompute in ("selective", "full")
    assert held.plan is None
    assert "recompute='none'" in held.refusal


def test_an_unknown_method_is_refused_with_the_nearest_name():
    with pytest.raises(
        SettingError, match=r"no method is called 'micropak'; did you mean micropack\? There are"
    ):
        comparison(methods=("micropak",))


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_keeps_to_the_width_and_cuts_no_number(width):
    found = comparison(are_bytes=True, alternatives=True, price=2.5)

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


EVIL = "</title></script><script>alert('x')</script> \"' onload=alert(1) &amp; <b"
KINDS = {
    "<i4": ("rowOffsets", "micropacks", "memoryOffsets", "lengths", "sharers"),
    "<u1": ("kinds", "chunks", "ofBackward"),
    "<f4": ("starts", "stops", "works", "memoryTimes", "memoryBytes"),
}
DTYPES = {name: dtype for dtype, names in KINDS.items() for name in names}


def decoded(record):
    """What the page's script makes of a plan's arrays."""
    found = {
        name: np.frombuffer(base64.b64decode(text), DTYPES[name])
        for name, text in record.items()
        if name in DTYPES
    }
    passes = [
        {name: np.frombuffer(base64.b64decode(text), "<i4") for name, text in one.items()}
        for one in record["passes"]
    ]
    return found | {"passes": passes}


def data_of(page):
    (content,) = re.findall(r'<script type="application/json" id="timeline-data">(.*?)</script>', page)
    return json.loads(content)["plans"]


def test_names_are_escaped_and_the_only_scripts_are_the_data_and_our_own():
    page = plan_page(comparison(name=EVIL))

    reader = read(page)
    assert reader.tags.count("script") == 2
    assert "<b " not in page.replace("<body", "")
    assert "<script>alert" not in page
    assert EVIL in "".join(reader.text)


def test_the_page_fetches_nothing():
    page = plan_page(comparison())

    reader = read(page)
    assert reader.links == []
    assert {"link", "img", "iframe", "object"}.isdisjoint(reader.tags)
    code = re.sub(r'<script type="application/json".*?</script>', "", page)
    assert re.findall(r"url\(|@import|https?:|fetch\(|XMLHttp|import\(|eval\(", code) == []


def test_the_page_shows_every_figure_of_every_method():
    found = comparison()

    text = "".join(read(plan_page(found)).text)

    assert headline(found) in text
    assert found.hardware_source in text
    for row in found.methods:
        for value in (row.title, duration(row.step_s), f"{found.bound_ratio(row):.2f}"):
            assert value in text


def test_the_page_begins_with_step_time_tokens_a_second_and_gpu_and_mfu():
    found = comparison()
    best, gpus = found.best, found.mesh.num_gpus
    step = step_documents(LENGTHS, documents=40, step=0, capacity=4_096, seed=0)
    flops = COST.flops(step.lengths).model

    text = "".join(read(plan_page(found)).text)

    opening = text[: text.index("Methods")]
    places = [
        opening.index(words)
        for words in (
            duration(best.step_s),
            f"{step.num_tokens / best.step_s / gpus:,.0f}tokens a second and GPU",
            f"{share(flops / best.step_s / gpus / 989e12)}MFU",
        )
    ]
    assert places == sorted(places)


def test_the_page_names_no_setting_of_the_planner():
    found = comparison()

    page = re.sub(r"<script.*?</script>", "", plan_page(found), flags=re.DOTALL)
    text = "".join(read(page).text)

    for row in found.methods:
        assert not row.plan.answered_by or row.plan.answered_by not in text
    assert re.findall(r"\b[a-z]+_[a-z_]+\b", text) == []


def test_the_axis_of_memory_says_which_figure_is_the_peak_and_which_line_the_limit():
    page = plan_page(comparison())

    assert 'fillText("limit"' in page
    assert "fillText(`peak ${" in page


def test_a_step_without_a_plan_has_a_page_that_says_why_and_draws_nothing():
    found = impossible()

    page = plan_page(found)

    text = "".join(read(page).text)
    assert all(row.refusal in text for row in found.methods)
    assert "<script" not in page
    assert not re.search(r"\b(nan|inf)\b", text)


def test_every_task_is_drawn_where_and_when_it_runs():
    found = comparison()

    for record in data_of(plan_page(found)):
        row, drawn = found.method(record["method"]), decoded(record)
        timeline, plan = row.timeline, row.plan
        pp = plan.mesh.pp
        assert len(drawn["kinds"]) == timeline.num_tasks
        rows = np.repeat(np.arange(plan.mesh.dp * pp), np.diff(drawn["rowOffsets"]))
        shown = np.stack([rows, drawn["kinds"], drawn["micropacks"], drawn["ofBackward"]], axis=1)
        places = timeline.ranks * pp + timeline.stages
        own = np.stack([places, timeline.kinds, timeline.micropacks, timeline.backward_of], axis=1)
        keys = [
            np.lexsort((starts, *table.T))
            for starts, table in ((drawn["starts"], shown), (timeline.starts_s, own))
        ]
        np.testing.assert_array_equal(shown[keys[0]], own[keys[1]])
        for name, values in (
            ("starts", timeline.starts_s),
            ("stops", timeline.stops_s),
            ("works", timeline.work_s),
        ):
            np.testing.assert_allclose(drawn[name][keys[0]], values[keys[1]], rtol=1e-6, atol=1e-9)
        for begin, end in zip(drawn["rowOffsets"], drawn["rowOffsets"][1:]):
            assert (np.diff(drawn["starts"][begin:end]) >= 0).all()


def test_slices_and_memory_are_those_of_the_plan():
    found = comparison()

    for record in data_of(plan_page(found)):
        row, drawn = found.method(record["method"]), decoded(record)
        for packs, one in zip((row.plan.forward, row.plan.backward), drawn["passes"]):
            np.testing.assert_array_equal(one["documents"], packs.document_ids)
            np.testing.assert_array_equal(one["starts"], packs.starts)
            np.testing.assert_array_equal(one["stops"], packs.stops)
            np.testing.assert_array_equal(one["offsets"], packs.slice_offsets)
            np.testing.assert_array_equal(one["rankOffsets"], packs.rank_offsets)
        np.testing.assert_array_equal(drawn["memoryOffsets"], row.timeline.memory_offsets)
        np.testing.assert_allclose(drawn["memoryBytes"], row.timeline.memory_bytes, rtol=1e-6)
        assert record["peaks"] == row.timeline.peaks_bytes.ravel().tolist()
        assert record["limit"] == found.limit_bytes


def test_the_fastest_and_what_it_is_compared_with_are_shown_first():
    found = comparison()

    shown = {record["method"] for record in data_of(plan_page(found)) if record["shown"]}

    assert shown == {found.best.name, found.methods[1].name}


@pytest.mark.parametrize("most", [1, 80, 10**9])
def test_a_plan_that_is_too_large_is_cut_down_to_its_slowest_ranks_and_says_so(most):
    found = comparison(dp=4, methods=("packed",))
    timeline = found.best.timeline

    part = drawn_ranks(timeline, most)

    computes = timeline.kinds < 3
    ends = np.array([timeline.stops_s[computes & (timeline.ranks == rank)].max() for rank in range(4)])
    left_out = np.setdiff1d(np.arange(4), part.ranks)
    assert len(part.ranks) >= 1
    assert part.is_whole == (most == 10**9) == (part.note == "")
    if not part.is_whole:
        assert ends[part.ranks].min() >= ends[left_out].max()
        assert part.note.startswith(f"Shown: {len(part.ranks)} of 4 ranks, ")
        assert len(part.tasks) <= most or len(part.ranks) == 1


def test_what_is_left_of_a_plan_that_is_cut_down_keeps_its_own_slices():
    found = comparison(dp=4, methods=("micropack",))
    plan = found.best.plan
    part = drawn_ranks(found.best.timeline, 1)
    rank = int(part.ranks[0])

    drawn = decoded(part.to_json())

    for packs, one in zip((plan.forward, plan.backward), drawn["passes"]):
        first, last = packs.rank_offsets[rank : rank + 2]
        slices = slice(packs.slice_offsets[first], packs.slice_offsets[last])
        np.testing.assert_array_equal(one["documents"], packs.document_ids[slices])
        np.testing.assert_array_equal(
            one["offsets"], packs.slice_offsets[first : last + 1] - packs.slice_offsets[first]
        )
    computes = drawn["kinds"] < 3
    counts = {0: plan.forward.counts[rank], 1: plan.backward.counts[rank]}
    for of_backward, count in counts.items():
        numbers = drawn["micropacks"][computes & (drawn["ofBackward"] == of_backward)]
        assert set(numbers.tolist()) == set(range(count))


def test_micropacks_are_numbered_within_their_own_pass():
    found = comparison(dp=2, methods=("packed",))
    timeline, backward = found.best.timeline, found.best.plan.backward
    first = int(backward.rank_offsets[1])
    moved = replace(backward, rank_offsets=np.array([0, first - 1, backward.num_micropacks], np.int32))
    changed = replace(timeline, plan=replace(timeline.plan, backward=moved))
    last = drawn_ranks(changed, 1)
    assert last.ranks.tolist() in ([0], [1])
    rank = int(last.ranks[0])

    drawn = decoded(last.to_json())

    own = timeline.micropacks[last.tasks].astype(int)
    begins = np.where(drawn["ofBackward"], moved.rank_offsets[rank], backward.rank_offsets[rank])
    known = (own >= 0) & (
        own < np.where(drawn["ofBackward"], moved.rank_offsets[rank + 1], backward.rank_offsets[rank + 1])
    )
    np.testing.assert_array_equal(drawn["micropacks"], np.where(known, own - begins, -1))


def test_the_page_says_when_it_does_not_draw_all_ranks():
    page = plan_page(comparison(dp=4, methods=("packed",)), most_tasks=1)

    (record,) = data_of(page)
    assert "Shown: 1 of 4 ranks, the one that finishes last; the figures are of all." in record["note"]
    assert len(record["ranks"]) == 1


def test_the_script_can_be_parsed():
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here to parse it")
    (code,) = re.findall(r"<script>\n(.*?)</script>", plan_page(comparison()), flags=re.DOTALL)

    run = subprocess.run([node, "--check", "-"], input=code, text=True, capture_output=True)

    assert run.returncode == 0, run.stderr


IDLE, FORWARD, BACKWARD, SYNC, SEND = 1, 10, 11, 15, 13
WIDTH, VIEWS = 200, ((0.0, 100.0), (30.0, 40.0), (-5.0, 105.0))
AROUND = """
const WEIGHT = 2, SYNC = 5, SHADES = 1;
let byDocument = false, colours = {}, view = {};
function passOf(plan, task) { return plan.passes[plan.ofBackward[task]]; }
function isBeside(kind) { return kind > WEIGHT && kind !== SYNC; }
"""
RUN = """
const given = JSON.parse(require("fs").readFileSync(0, "utf8"));
const kinds = [10, 11, 12, 13, 14, 15, 16];
paints = { idle: 1, grid: 2, kinds, shades: kinds.map((one) => [[one, one]]), documents: [] };
const plan = given.plan;
for (const name of ["starts", "stops", "works"]) plan[name] = Float64Array.from(plan[name]);
for (const name of ["kinds", "micropacks", "chunks", "ofBackward"]) plan[name] = Int32Array.from(plan[name]);
divideLanes(plan);
plan.firsts = plan.micropacks.map(() => 0);
const said = given.views.map(([from, to]) => {
  view = { from, to };
  const line = new Uint32Array(given.width).fill(1), strip = new Uint32Array(given.width).fill(1);
  paintComputing(plan, 0, line, strip, given.width / (to - from), []);
  paintBeside(plan, 0, strip, given.width / (to - from));
  return [Array.from(line), Array.from(strip)];
});
console.log(JSON.stringify(said));
"""


def painted(starts, stops, kinds):
    """Both lines of pixels of one row, for each view."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here to run it")
    room = files("varlen.report")
    drawing = room.joinpath("plan_draw.js").read_text()
    first = drawing.index("function firstAfter(")
    code = (
        AROUND
        + drawing[first : drawing.index("\n}\n", first) + 3]
        + room.joinpath("plan_paint.js").read_text()
        + RUN
    )
    of_one = {"offsets": [0, 1], "documents": [0], "shares": [0]}
    plan = {
        "rows": 1, "rowOffsets": [0, len(starts)], "passes": [of_one, of_one], "makespan": 100.0,
        "starts": starts, "stops": stops, "works": (np.array(stops) - starts).tolist(), "kinds": kinds,
        "micropacks": [0] * len(starts), "chunks": [0] * len(starts), "ofBackward": [0] * len(starts),
    }  # fmt: skip
    content = json.dumps({"plan": plan, "views": VIEWS, "width": WIDTH})
    run = subprocess.run([node, "-e", code], input=content, text=True, capture_output=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return [(np.array(line), np.array(strip)) for line, strip in json.loads(run.stdout)]


@pytest.mark.parametrize("count", [3, 40, 5000])
def test_a_pixel_within_a_task_has_its_colour_and_one_between_tasks_none(count):
    """Whole pixels of one task or of nothing leave no choice; of the others any task that touches them is right."""
    random = np.random.default_rng(count)
    cuts = np.sort(random.uniform(0, 100, 2 * count))
    starts, stops = cuts[::2], cuts[1::2]
    kinds = random.integers(0, 2, count)

    lines = painted(starts.tolist(), stops.tolist(), kinds.tolist())

    for (from_, to), (line, _) in zip(VIEWS, lines):
        begins = from_ + np.arange(WIDTH) * (to - from_) / WIDTH
        ends = begins + (to - from_) / WIDTH
        touching = (starts < ends[:, None]) & (stops > begins[:, None])
        whole = (starts <= begins[:, None]) & (stops >= ends[:, None])
        for x in range(WIDTH):
            if whole[x].any():
                assert line[x] == FORWARD + kinds[whole[x]][0]
            elif not touching[x].any():
                assert line[x] == IDLE
        seen = (starts < to) & (stops > from_)
        assert set(np.unique(line)) - {IDLE} <= set((FORWARD + kinds[seen]).tolist())


def test_every_task_that_is_narrower_than_a_pixel_is_seen():
    starts = np.arange(0.2, 100, 10.0)

    ((line, _), _, _) = painted(starts.tolist(), (starts + 0.001).tolist(), [1] * 10)

    assert (line == BACKWARD).sum() == 10
    assert np.flatnonzero(line == BACKWARD).tolist() == np.floor(2 * starts).astype(int).tolist()


def test_messages_have_the_strip_and_a_sync_has_both():
    ((line, strip), _, _) = painted([0.0, 10.0, 15.0, 90.0], [20.0, 30.0, 18.0, 100.0], [0, 3, 4, 5])

    assert set(line[:40]) == {FORWARD}
    assert set(line[40:180]) == {IDLE}
    assert set(strip[:20]) == {IDLE}
    assert set(strip[20:30]) == {SEND}
    assert set(strip[36:60]) == {SEND}
    assert set(line[180:]) == set(strip[180:]) == {SYNC}


def test_the_axis_spans_the_timelines_that_are_shown():
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here to run it")
    drawing = files("varlen.report").joinpath("plan_draw.js").read_text()
    reach = next(line for line in drawing.splitlines() if line.startswith("const reach"))
    plans = [{"isShown": True, "makespan": 3.0}, {"isShown": False, "makespan": 90.0}]
    none = [{**plan, "isShown": False} for plan in plans]
    code = "".join(
        f"(() => {{ const plans = {json.dumps(some)};\n{reach}\nconsole.log(reach()); }})();\n"
        for some in (plans, none)
    )

    run = subprocess.run([node, "-e", code], text=True, capture_output=True, timeout=60)

    assert run.stdout.split() == ["3", "90"], run.stderr
