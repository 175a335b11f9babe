"""The demo's page and table: what they say follows from the figures, and nothing in them can run."""

import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from tests.report.pages import read
from tests.support.demo_figures import figures, piece, with_method

from varlen.errors import SettingError
from varlen.report.demo import PictureFigures, demo_table, findings, headline, spread
from varlen.report.demo_page import demo_page
from varlen.report.drawing import Bar, Dots, bars, dots, histogram
from varlen.report.page import check_writable, page, write_page


def printed(demo, width=80):
    stream = StringIO()
    Console(file=stream, width=width, highlight=False).print(demo_table(demo))
    return stream.getvalue()


def test_text_of_documents_is_escaped_wherever_it_stands_on_the_page():
    evil = "</title></svg><script>alert('x')</script> \"' onload=alert(1) &amp; <b"
    row = (piece(7, 20, evil), piece(2, 30, evil))
    demo = figures(picture=PictureFigures(batch=row, row=row, capacity=64))
    demo = replace(demo, corpus=replace(demo.corpus, description=evil))

    page = demo_page(demo)

    assert "script" not in read(page).tags
    assert "<script" not in page
    assert "<b" not in page.replace("<body", "").replace("<b>", "")
    assert evil in "".join(read(page).text)


def test_the_page_fetches_nothing_and_runs_nothing():
    page = demo_page(figures())
    reader = read(page)

    assert reader.links == []
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(reader.tags)
    assert re.findall(r"url\(|@import|https?:", page) == []


def test_the_page_is_well_formed_and_shows_every_method_in_every_picture_of_methods():
    text = "".join(read(demo_page(figures())).text)

    for method in figures().methods:
        assert text.count(method.title) >= 8
    assert "isolated" in text
    assert "150 tokens in = 100 packed + 50 cut + 0 dropped; 0 twice" in text


def test_the_headline_and_ratios_follow_from_the_figures():
    assert (
        headline(figures())
        == "The same documents, the same steps, the same loss: 6.0× the tokens per second."
    )
    slow = with_method("flattened", wall_s=7.0)
    assert headline(slow).endswith("no more tokens per second.")
    other = with_method("flattened", step_losses=(8.0, 7.6))
    assert "another loss" in headline(other)
    assert "more than rounding" in findings(other).loss


def test_equal_losses_are_called_equal_to_the_bit_and_nearly_equal_ones_to_rounding():
    assert "the same to the bit on all of 2 steps" in findings(figures()).loss
    near = tuple(loss + 1e-6 for loss in figures().method("flattened").step_losses)
    assert "rounding in float32" in findings(with_method("flattened", step_losses=near)).loss


def test_buckets_are_told_what_they_cost_and_what_they_do_not():
    said = findings(figures()).buckets

    assert "1.50× as fast" in said
    assert "flatters flattening" in said
    assert "1.06×" in said
    assert "validation loss shows (+0.175 ± 0.025" in said
    assert "flatters" not in findings(with_method("bucketed", num_slots=106)).buckets
    assert (
        "doesn't clearly show (0.000"
        in findings(with_method("bucketed", validation_losses=(7.0, 7.1))).buckets
    )


def test_a_control_whose_loss_is_worse_is_said_to_show_it():
    assert "nothing to leak" in findings(figures()).control
    leaking = {"validation_losses": (7.06, 7.1), "step_losses": (8.01, 7.4)}
    assert "give it away" in findings(with_method("without_boundaries", **leaking)).control
    assert (
        "Here the loss shows it"
        in findings(
            with_method("without_boundaries", validation_losses=(7.5, 7.5), step_losses=(8.01, 7.4))
        ).control
    )


def test_an_isolation_that_was_not_proved_is_not_called_proved():
    isolation = replace(figures().isolation, verdict="blind: nothing to leak", is_proved=False)
    demo = figures(isolation=isolation)

    assert "not proved" in demo_page(demo)
    assert "blind: nothing to leak" in printed(demo)
    assert "leaked, as it must" not in demo_page(demo)


def test_a_loss_that_was_not_trained_is_taken_from_the_same_batches_and_marked():
    demo = figures()

    assert demo.losses(demo.method("padded")) == (7.0, 7.1)
    assert "*7.050±0.050" in printed(demo)
    assert " 7.225±0.025" in printed(demo)
    assert "its own loss for seed 0" in " ".join(printed(demo).split())


def test_the_table_is_not_cut_off_in_eighty_columns():
    lines = printed(figures()).splitlines()

    assert max(map(len, lines)) <= 80
    assert "…" not in printed(figures())
    for method in figures().methods:
        assert any(line.startswith(method.title) and "±" in line for line in lines)


def test_json_holds_plain_values_and_the_rates():
    import json

    tree = json.loads(json.dumps(figures().to_json()))

    padded = next(m for m in tree["methods"] if m["name"] == "padded")
    assert padded["flattened_speedup_wall"] == pytest.approx(6.0)
    assert padded["slots_per_token"] == 5.0
    assert padded["validation_loss_mean"] == pytest.approx(7.05)
    assert padded["flattened_step_loss_difference"] == 0.0
    assert tree["ledger"]["balance"] == 0


@pytest.mark.parametrize("width", [354, 944])
def test_charts_stay_inside_their_frame(width):
    rows = [
        Bar(label="a", value=1.0, note="1", kind="varlen"),
        Bar(label="b", value=0.0, note="0", kind="baseline"),
    ]
    drawn = bars(rows, width, "x") + dots(
        [
            Dots(label="a", values=(1.0, 2.5), note="n", kind="varlen"),
            Dots(label="b", values=(2.0,), note="n", kind="control"),
        ],
        width,
        "x",
        str,
    )
    drawn += histogram((1, 2, 3, 100_000), 2048, width, "x") + histogram((7,), 8, width, "x")

    for x, size in re.findall(r'<rect class="[^"]*" x="([\d.-]+)" y="[\d.-]+" width="([\d.]+)"', drawn):
        assert 0 <= float(x) <= float(x) + float(size) <= width + 0.1
    for x in re.findall(r'(?:cx|x1|x2)="([\d.-]+)"', drawn):
        assert 0 <= float(x) <= width


def test_equal_values_can_be_drawn():
    assert "circle" in dots([Dots(label="a", values=(7.0, 7.0), note="n", kind="varlen")], 400, "x", str)


def test_the_spread_is_half_the_range():
    assert spread((1.0, 4.0, 2.0)) == 1.5


def test_a_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    old = page("old", [])
    write_page(path, old)

    with pytest.raises(UnicodeEncodeError):
        write_page(path, "new \ud800")

    assert path.read_text() == old
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("name", "said"), [(".", "is a folder"), ("missing/report.html", "doesn't exist")])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path, name, said):
    with pytest.raises(SettingError, match=said):
        check_writable(tmp_path / name)
