"""The docs' benchmark tables follow from measurements alone: ratios and verdicts can't be written by hand."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks import startup, table
from benchmarks.packing import PROMISED, ROW, lengths_of_mean, utilization
from benchmarks.rows import Contestant, Limit, Race, Samples, from_json, to_json
from benchmarks.run import reason

ROOT = Path(__file__).resolve().parents[2]


def contestant(name, wall_s, cpu_s=None, fill=None):
    return Contestant(name=name, call=f"{name} call", samples=Samples(wall_s, cpu_s or wall_s), fill=fill)


def race(*, ours, theirs, target=50.0, section="packing"):
    return Race(section=section, what="assign documents", ours=ours, peer=theirs, target=target)


def result(rows):
    return {
        "date": "2026-01-02",
        "machine": {
            "cpu": "A CPU",
            "cores": 2,
            "memory_gib": 8.0,
            "system": "Linux x86_64",
            "python": "3.11.7",
        },
        "versions": {"varlen": "0.1.0", "commit": "abc1234", "numpy": "2.4.6"},
        "load": [0.1, 1.2],
        "rows": [to_json(row) for row in rows],
        "absent": [],
    }


def test_a_ratio_is_the_median_of_the_rounds_in_wall_or_processor_time_whichever_is_less():
    busy = race(
        ours=contestant("varlen", [1.0, 1.0, 2.0], [1.0, 1.0, 1.0]),
        theirs=contestant("peer", [90.0, 80.0, 70.0], [60.0, 60.0, 60.0]),
    )

    assert busy.ratio == 60.0


def test_a_section_measured_apart_stands_in_its_place_with_its_own_origin(tmp_path):
    def written(name, date, *rows):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(result(rows) | {"date": date}))

    fast = race(ours=contestant("varlen", [1.0]), theirs=contestant("peer", [90.0]))
    slow = race(ours=contestant("varlen", [1.0]), theirs=contestant("peer", [9.0]), section="megatron")
    written("2026-01-02.json", "2026-01-02", fast)
    written("megatron/2026-01-01.json", "2026-01-01", slow)

    whole, apart = table.results(tmp_path)
    page = table.render(whole, apart)

    assert list(apart) == ["megatron"]
    assert "**1 of 2 targets met.** Missed: assign documents against peer (9x of 50x)." in page
    assert page.index("### Megatron") < page.index("This section apart. Measured on 2026-01-01")
    # A later run of everything goes before it, and a later one apart before that.
    written("2026-01-03.json", "2026-01-03", fast, slow)
    assert table.results(tmp_path)[1] == {}
    written("megatron/2026-01-04.json", "2026-01-04", slow)
    assert list(table.results(tmp_path)[1]) == ["megatron"]
    assert table.render(*table.results(tmp_path)).count("### Megatron") == 1


def test_the_demo_becomes_races_against_every_baseline_and_two_limits():
    def method(name, role, wall_s, slots, last_loss):
        return {
            "name": name,
            "title": name.replace("_", " "),
            "role": role,
            "num_documents": 80,
            "num_tokens": 24_000,
            "num_slots": slots,
            "steps": 2,
            "wall_s": wall_s,
            "user_s": 2 * wall_s - 1,
            "system_s": 1.0,
            "step_losses": [8.0, last_loss],
        }

    figures = {
        "methods": [
            method("padded_with_mask", "baseline", 20.0, 120_000, 7.5),
            method("padded", "baseline", 15.0, 120_000, 7.5),
            method("bucketed", "baseline", 6.0, 40_000, 7.4),
            method("flattened", "varlen", 3.0, 24_000, 7.5001),
            method("without_boundaries", "control", 3.0, 24_000, 7.3),
        ],
        "threads": 2,
        "total_s": 200.0,
    }
    *races, loss, length = startup.rows_of(figures)

    assert [round(row.ratio, 3) for row in races] == [6.667, 5.0, 2.0]
    assert [row.met for row in races] == [True, True, None]
    assert races[1].note == "5.00 positions a token"
    assert (round(loss.value, 9), loss.met) == (1e-4, False)
    assert (length.value, length.met) == (200.0, False)
    assert "8,000 tokens/s" in table.race_line(races[1], has_fill=False)


def test_a_race_is_won_only_at_equal_or_better_fill():
    fast = {"ours": [1.0], "theirs": [60.0]}
    fuller = race(
        ours=contestant("a", fast["ours"], fill=0.99), theirs=contestant("b", fast["theirs"], fill=0.99)
    )
    emptier = race(
        ours=contestant("a", fast["ours"], fill=0.98), theirs=contestant("b", fast["theirs"], fill=0.99)
    )

    assert fuller.met is True
    assert emptier.met is False


def test_a_row_without_a_target_has_no_verdict():
    assert race(ours=contestant("a", [1.0]), theirs=contestant("b", [2.0]), target=None).met is None
    assert Limit(section="scale", what="x", value=3.0, unit="s", limit=None).met is None


def test_a_verdict_written_into_the_file_by_hand_is_ignored():
    lost = race(ours=contestant("varlen", [1.0]), theirs=contestant("peer", [3.0]))
    forged = result([lost])
    forged["rows"][0].update(met=True, ratio=500.0)

    page = table.render(forged)

    assert "**no**" in page
    assert "500" not in page
    assert "0 of 1 targets met" in page


def test_rows_survive_the_way_through_a_file():
    rows = [
        race(ours=contestant("a", [1.0, 2.0], [1.0, 1.5], fill=0.9), theirs=contestant("b", [2.0, 3.0])),
        Limit(
            section="windows", what="w", value=11, unit="packs", limit=12, base=10, group="g", samples=[11]
        ),
    ]

    again = [from_json(plain) for plain in json.loads(json.dumps([to_json(row) for row in rows]))]

    assert again == rows


def test_a_missed_target_is_named_at_the_top():
    page = table.render(
        result(
            [
                race(ours=contestant("varlen", [1.0]), theirs=contestant("peer", [60.0])),
                Limit(section="startup", what="first call", value=0.7, unit="s", limit=0.5),
            ]
        )
    )

    assert "**1 of 2 targets met.** Missed: first call (700 ms)." in page


def test_of_a_group_the_row_furthest_over_its_limit_is_shown():
    rows = [
        Limit(section="windows", what=f"set at {k}", value=value, unit="packs", limit=limit, group="set")
        for k, value, limit in (("2K", 100, 101), ("4K", 50, 48), ("8K", 20, 30))
    ]

    page = table.table(rows)

    assert "set at 4K" in page
    assert "set at 2K" not in page
    assert "set at 8K" not in page


def test_what_could_not_be_measured_is_said():
    with_gap = result([])
    with_gap["absent"] = [{"what": "packing: a peer", "why": "ImportError: no module"}]

    assert "- packing: a peer: ImportError: no module" in table.render(with_gap)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (2.5, "s", "2.5 s"),
        (0.0025, "s", "2.5 ms"),
        (2.5e-6, "s", "2.5 µs"),
        (1234, "packs", "1,234 packs"),
        (1.27, "GB", "1.27 GB"),
    ],
)
def test_quantities_have_units_that_keep_them_readable(value, unit, text):
    assert table.quantity(value, unit) == text


def test_only_the_part_between_the_markers_is_rewritten():
    page = f"before\n{table.START}\nold\n{table.END}\nafter\n"

    once = table.spliced(page, "new\n")

    assert once == f"before\n{table.START}\n\nnew\n\n{table.END}\nafter\n"
    assert table.spliced(once, "new\n") == once


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="the page must hold"):
        table.spliced("nothing here", "new")


def test_the_check_notices_a_page_that_differs_from_the_newest_result(tmp_path, monkeypatch, capsys):
    results, page = tmp_path / "results", tmp_path / "benchmarks.md"
    results.mkdir()
    older, newer = result([]), copy.deepcopy(result([]))
    newer["date"] = "2026-02-03"
    (results / "2026-01-02.json").write_text(json.dumps(older))
    page.write_text(f"{table.START}\n{table.END}\n")
    monkeypatch.setattr(table, "RESULTS", results)
    monkeypatch.setattr(table, "PAGE", page)

    assert table.main(["--check"]) == 1
    assert table.main([]) == 0
    assert table.main(["--check"]) == 0
    (results / "2026-02-03.json").write_text(json.dumps(newer))
    assert table.main(["--check"]) == 1
    assert "run `python -m benchmarks.table`" in capsys.readouterr().err


def test_the_tables_need_nothing_but_python():
    heavy = "{'numpy', 'rich', 'torch', 'varlen'}"
    program = f"import sys, benchmarks.table; print({heavy} & set(sys.modules))"

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert (done.stdout.strip(), done.stderr) == ("set()", "")


def test_the_docs_hold_the_tables_of_the_newest_result():
    assert table.main(["--check"]) == 0


def test_result_files_name_neither_folder_nor_host():
    for path in sorted(table.RESULTS.glob("*.json")):
        text = path.read_text()

        assert re.findall(r"(?<![\w.<])/(?:[\w.+-]+/)+", text) == []
        assert set(json.loads(text)["machine"]) == {"cpu", "cores", "memory_gib", "system", "python"}


def test_a_reason_keeps_the_file_and_leaves_out_its_folder():
    error = ImportError("Traceback\ncannot import name 'a' from 'b' (/opt/place/lib/b.py)")

    assert reason(error) == "cannot import name 'a' from 'b' (b.py)"


@pytest.mark.parametrize("mean", PROMISED)
@pytest.mark.parametrize("seed", [0, 1])
def test_packs_are_fuller_than_promised_at_every_mean_length(mean, seed):
    padded, packed, improvement = PROMISED[mean]

    found = utilization(mean, num_documents=20_000, seed=seed)

    assert found.padded == pytest.approx(padded, rel=1e-4)
    assert found.packed > max(0.99, packed)
    assert found.improvement >= improvement
    assert found.lower_bound <= found.packs <= 1.01 * found.lower_bound


@pytest.mark.parametrize("mean", PROMISED)
def test_the_mean_is_kept_after_clipping(mean):
    lengths = lengths_of_mean(mean, ROW, 10_000, seed=3)

    assert lengths.min() >= 1
    assert lengths.max() <= ROW
    assert abs(lengths.mean() - mean) < 0.02
    assert np.unique(lengths).size > 500
