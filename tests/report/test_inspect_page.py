"""The page and the table of an inspection: whole, escaped, and with every figure where it belongs."""

import re
from io import StringIO

import numpy as np
import pytest
from rich.console import Console
from tests.report.pages import read
from tests.support.rarely import mostly

from varlen.report.drawing import Bar, Line, bars, half_octaves, lines, spread_out
from varlen.report.inspect_page import inspect_page
from varlen.report.inspection import inspect_lengths, inspect_table
from varlen.report.page import share

EVIL = "</title></svg><script>alert('x')</script> \"' onload=alert(1) &amp; <b"
RNG = np.random.default_rng(0)
LENGTHS = np.r_[RNG.lognormal(5, 1, 4_000).astype(int) + 1, [70_000] * 2]


def found(**changes):
    return inspect_lengths(
        LENGTHS, **{"name": "chats", "arguments": ["chats.jsonl", "-o", "packed"], **changes}
    )


def printed(inspection, width):
    stream = StringIO()
    Console(file=stream, width=width, highlight=False).print(inspect_table(inspection))
    return stream.getvalue()


def test_names_and_texts_are_escaped_wherever_they_stand_on_the_page():
    inspection = found(name=EVIL, excerpts=dict.fromkeys(range(len(LENGTHS)), EVIL))

    page = inspect_page(inspection)

    assert "script" not in read(page).tags
    assert "<script" not in page
    assert "<b" not in page.replace("<body", "").replace("<b>", "")
    text = "".join(read(page).text)
    assert text.count(EVIL) > len(inspection.picture.pieces)


def test_the_page_fetches_nothing_and_runs_nothing():
    page = inspect_page(found())
    reader = read(page)

    assert reader.links == []
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(reader.tags)
    assert re.findall(r"url\(|@import|https?:", page) == []


def test_the_page_shows_every_row_at_every_capacity():
    inspection = found(targets=LENGTHS // 2)

    text = "".join(read(inspect_page(inspection)).text)

    for row in inspection.capacities[0].packings:
        assert text.count(row.title) >= len(inspection.capacities)
    for at in inspection.capacities:
        assert f"{at.capacity:,} tokens: {at.lower_bound:,} packs at least" in text
        assert share(at.truncation_share) in text
    assert inspection.advice.headline in text
    assert inspection.advice.call in text
    assert inspection.advice.command in text
    assert "supervised tokens lost by dropping" in text


@pytest.mark.parametrize(
    "lengths", [[1], [5] * 40, [3, 1_000_000], [2, 3], LENGTHS, RNG.integers(1, 99, 5_000)]
)
@pytest.mark.parametrize("capacities", mostly([None], [None, [64], [48, 1_000, 100_000]]))
def test_any_lengths_can_be_shown_and_no_picture_leaves_its_width(lengths, capacities):
    inspection = inspect_lengths(lengths, capacities=capacities)

    page = inspect_page(inspection)

    read(page)
    for width, drawn in re.findall(r'<svg viewBox="0 0 ([\d.]+) [\d.]+"(.*?)</svg>', page):
        for x, size in re.findall(r'<rect class="[^"]*" x="([\d.-]+)" y="[\d.-]+" width="([\d.]+)"', drawn):
            assert 0 <= float(x) <= float(x) + float(size) <= float(width) + 0.1
        for x in re.findall(r'(?:cx|x1|x2)="([\d.-]+)"', drawn):
            assert 0 <= float(x) <= float(width)
    assert not re.search(r"\b(nan|inf)\b", page)
    assert printed(inspection, 80)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_keeps_to_the_width_and_cuts_no_number(width):
    inspection = found(targets=LENGTHS // 2)

    lines_ = printed(inspection, width).splitlines()

    text = " ".join(" ".join(lines_).split())
    assert max(map(len, lines_)) <= width
    assert "…" not in text
    assert " ".join(inspection.advice.headline.split()) in text
    for at in inspection.capacities:
        assert f"{at.capacity:,}" in text
        assert share(at.dropping_share) in text
    for row in inspection.advised, inspection.at(inspection.advice.capacity).packing("trl_bfd"):
        assert f"{row.packs:,}" in text


def test_sampled_figures_say_so(monkeypatch):
    monkeypatch.setattr("varlen.report.inspection_figures.MOST_DOCUMENTS", 2_000)

    inspection = found()

    said = "Packs were measured on 2,000 of the documents"
    assert said in "".join(read(inspect_page(inspection)).text)
    assert said in printed(inspection, 120)
    assert said not in printed(found(batch_documents=4), 120) or inspection.is_sampled


def test_a_line_breaks_where_a_value_is_missing():
    drawn = lines([Line(label="a", values=(0.9, None, 0.8, 0.7), kind="varlen")], [1, 2, 4, 8], 900, "x", str)

    assert drawn.count("<polyline") == 2
    assert drawn.count("<circle") == 3


def test_more_is_higher_and_further_right():
    drawn = lines([Line(label="a", values=(0.5, 1.0), kind="varlen")], [1_024, 2_048], 900, "x", str)

    (x1, y1), (x2, y2) = re.findall(r'<circle class="[^"]*" cx="([\d.]+)" cy="([\d.]+)"', drawn)
    assert float(x1) < float(x2)
    assert float(y1) > float(y2)


def test_names_of_places_do_not_touch():
    places = [1_000, 1_024, 1_100, 4_096]

    drawn = lines([Line(label="a", values=(0.5,) * 4, kind="varlen")], places, 900, "x", str)

    assert [f">{place:,}<" in drawn for place in places] == [True, False, False, True]


@pytest.mark.parametrize(("cut", "anchor"), [(4, "start"), (900, "end")])
def test_the_name_of_a_cut_stays_within_the_picture(cut, anchor):
    drawn = half_octaves(0, [1.0] * 20, [1.0] * 20, cut, "capacity", 354, "x")

    assert re.search(f'text-anchor="{anchor}">capacity<', drawn)


def test_lengths_on_the_axis_do_not_touch():
    for width in (354, 944):
        drawn = half_octaves(0, [1.0] * 42, [1.0] * 42, 4, "", width, "x")
        ends = [
            (float(x) - share * 7 * len(number), float(x) + (1 - share) * 7 * len(number))
            for x, anchor, number in re.findall(
                r'x="([\d.]+)" y="[\d.]+" text-anchor="(\w+)">([\d,]+)<', drawn
            )
            for share in [{"start": 0, "middle": 0.5, "end": 1}[anchor]]
        ]
        assert len(ends) > 3
        assert all(a[1] < b[0] for a, b in zip(ends, ends[1:]))


def test_names_of_lines_are_a_line_apart():
    heights = spread_out([5.0, 6.0, 7.0, 200.0, 290.0, 291.0], 17, 292)

    assert all(b - a >= 17 for a, b in zip(heights, heights[1:]))
    assert heights[-1] <= 292


def test_next_to_no_padding_is_drawn_as_next_to_none():
    rows = [Bar(label="packed", value=0.005, note="0.5 %", kind="varlen")]

    sizes = [
        float(w) for least in (0.0, 0.1) for w in re.findall(r'width="([\d.]+)"', bars(rows, 900, "x", least))
    ]

    assert sizes[1] == pytest.approx(sizes[0] / 20, rel=0.01)


def test_where_nothing_is_cut_a_sentence_stands_for_the_empty_picture():
    text = "".join(read(inspect_page(inspect_lengths([50] * 2_000, capacities=[1_000, 2_000]))).text)

    assert "No document is longer than any of these capacities" in text


def test_the_page_says_where_bytes_were_counted():
    pages = [inspect_page(found(are_bytes=given)) for given in (True, False)]

    assert ["Bytes are counted here" in page for page in pages] == [True, False]
