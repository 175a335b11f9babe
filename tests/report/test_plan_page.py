"""The report of plans: whole, escaped, fetching nothing, and drawing the very tasks of the timelines."""

import base64
import json
import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from tests.report.plan_comparisons import comparison, impossible
from tests.report.test_demo import read

from varlen.report.plan import duration, headline
from varlen.report.plan_page import lanes, plan_page

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
        for value in (row.title, duration(row.step_s), f"{found.bound_ratio(row):.2f}", row.plan.answered_by):
            assert value in text


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

    part = lanes(timeline, most)

    computes = timeline.kinds < 3
    ends = np.array([timeline.stops_s[computes & (timeline.ranks == rank)].max() for rank in range(4)])
    left_out = np.setdiff1d(np.arange(4), part.ranks)
    assert len(part.ranks) >= 1
    assert part.is_whole == (most == 10**9) == (part.said == "")
    if not part.is_whole:
        assert ends[part.ranks].min() >= ends[left_out].max()
        assert part.said.startswith(f"Shown: {len(part.ranks)} of 4 ranks, ")
        assert len(part.tasks) <= most or len(part.ranks) == 1


def test_what_is_left_of_a_plan_that_is_cut_down_keeps_its_own_slices():
    found = comparison(dp=4, methods=("micropack",))
    plan = found.best.plan
    part = lanes(found.best.timeline, 1)
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
    last = lanes(changed, 1)
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
