"""The planning benchmark draws its cells evenly, and its verdicts follow from every cell."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.plan import delayed as delayed_of
from benchmarks.plan import figures as figures_of
from benchmarks.plan import run as benchmark
from benchmarks.plan import sections
from benchmarks.plan import table as page_of
from benchmarks.plan.grid import MESHES, SETS, Cell, equal_rates, grid, hidden, published
from benchmarks.plan.methods import ABLATION_CELLS, EXACT_CELLS, SETTINGS
from benchmarks.plan.sharding import by_documents, by_sequences

from varlen.step_plan import Mesh, MicroPacks


def record(speedup: float = 3.0, *, ratio: float = 1.05, refused: str = "", **cell: Any) -> dict[str, Any]:
    """A cell in which micropack takes a second and all others `speedup` of them."""
    plain = {"lengths": "code_src", "capacity": 262_144, "dp": 16, "pp": 4, "tp": 4} | cell
    methods: dict[str, Any] = {
        name: {
            "step_s": 1.0 if name == "micropack" else speedup,
            "ratio": ratio if name == "micropack" else ratio * speedup,
            "bubble": 0.1,
            "imbalance": 1.0,
            "peak_gb": 60.0,
            "planning_s": 0.05,
            "fits": True,
            "recompute": "none",
        }
        for name in figures_of.TITLES
    }
    if refused:
        methods[refused] = {"refused": "too little memory", "planning_s": 0.1}
    return {
        "key": "/".join(map(str, plain.values())),
        "cell": plain,
        "is_large": True,
        "tokens": 10**6,
        "truncated_share": 0.1,
        "methods": methods,
    }


def result(cells: list[dict[str, Any]], **parts: Any) -> dict[str, Any]:
    every = {"grid": {"records": cells, "seconds": 60.0, "load": [1, 2]}}
    every |= {name: {"records": records, "seconds": 1.0, "load": []} for name, records in parts.items()}
    return {
        "date": "2026-01-01",
        "machine": {"cpu": "a processor", "cores": 2, "python": "3.12"},
        "versions": {"varlen": "0", "commit": "abc"},
        "total_cells": 100,
        "parts": every,
    }


def verdict(what: str, cells: list[dict[str, Any]], **parts: Any) -> figures_of.Verdict:
    return next(found for found in figures_of.verdicts(result(cells, **parts)) if what in found.what)


def test_each_set_capacity_and_mesh_has_as_many_cells():
    cells = grid(2)
    groups = Counter((cell.lengths, cell.dp * cell.pp * cell.tp, cell.pp) for cell in cells)

    assert len({cell.key for cell in cells}) == len(cells) == 2 * len(SETS) * len(MESHES)
    assert min(groups.values()) >= 2
    for field in ("capacity", "documents", "model", "seed"):
        counts = Counter(getattr(cell, field) for cell in cells)
        assert max(counts.values()) - min(counts.values()) <= 4, field


def test_cells_are_drawn_the_same_every_time_and_all_of_them_are_every_combination():
    assert [cell.key for cell in grid(1)] == [cell.key for cell in grid(1)]
    every = grid(48)
    assert len({cell.key for cell in every}) == len(every)
    # 30B on 4x4x8 becomes 8x4x4, which is there already.
    assert len(every) == 48 * len(SETS) * len(MESHES) - 12 * len(SETS)


def test_heads_are_divided_by_tensor_parallel_ranks_in_every_cell():
    for cell in {cell.model + cell.mesh_text: cell for cell in grid(48)}.values():
        assert cell.cost().model.heads % cell.tp == 0, cell.key
        assert cell.mesh.num_gpus in (32, 64, 128, 256, 512, 1024), cell.key


def test_keys_tell_cells_apart():
    cells = [*grid(48), *hidden(grid(48)), *published(grid(48)), *equal_rates(), *ABLATION_CELLS]

    assert len({cell.key for cell in cells}) == len(set(cells))
    assert {name for cell in ABLATION_CELLS for name in SETTINGS if name in ("FLOPs", "calibrated")}


def test_one_slow_cell_is_enough_to_miss_a_target_on_the_worst():
    good = [record() for _ in range(50)]

    assert verdict("over that of sliced", good).met is True
    assert verdict("over that of sliced", [*good, record(0.9)]).met is False
    assert verdict("the same, worst", [*good, record(ratio=1.31)]).met is False
    assert verdict("large enough cells, median", [*good, record(ratio=1.31)]).met is True


def test_every_tuned_method_has_the_chunks_of_layers_that_suit_it():
    cell = record(ratio=1.4)
    ours, theirs = cell["methods"]["micropack"], cell["methods"]["sliced"]
    faster = {**ours, "step_s": 0.9 * ours["step_s"], "ratio": 1.25}
    theirs_faster = {**theirs, "step_s": 0.5 * theirs["step_s"]}
    woven = [
        {
            "key": f"{cell['key']}/virtual_stages=2",
            "methods": {"micropack": faster, "sliced": {"refused": "no"}},
        },
        {"key": f"{cell['key']}/virtual_stages=3", "methods": {"micropack": ours, "sliced": theirs_faster}},
    ]

    assert verdict("the same, worst", [cell]).value == 1.4
    assert verdict("the same, worst", [cell], interleaved=woven).value == 1.25
    alone = verdict("over that of sliced", [cell]).value
    assert alone is not None
    both = verdict("over that of sliced", [cell], interleaved=woven).value
    assert both == pytest.approx(alone * 0.9 / 0.5)
    assert "| tuned | 1 | 1.25" in page_of.page(result([cell], interleaved=woven))


def test_a_plan_over_the_limit_of_memory_misses():
    over = record()
    over["methods"]["micropack"]["fits"] = False

    assert verdict("over the card's limit", [record()]).met is True
    assert verdict("over the card's limit", [record(), over]).value == 1


def test_the_best_other_method_is_the_fastest_tuned_one_of_each_cell():
    cells = [record(1.2), record(1.3), record(1.0, dp=2)]
    cells[1]["methods"]["sliced"]["step_s"] = 1.05
    cells[1]["methods"]["as_run"]["step_s"] = 0.5

    assert figures_of.best_other(cells[1]) == ("sliced", 1.05)
    wide = verdict("over the best other method, exchanges as measured", cells)
    assert (wide.value, wide.cells, wide.met) == (pytest.approx((1.2 + 1.05) / 2), 2, True)
    assert verdict("over the best other method, exchanges hidden", cells).met is None
    hidden = verdict("over the best other method, exchanges hidden", [], hidden=cells[1:2])
    assert (hidden.value, hidden.met) == (1.05, False)


def test_packs_as_users_run_them_are_shown_where_every_rank_has_one():
    cell = record()
    assert figures_of.speedup(cell, "as_run") == 3.0
    cell["methods"]["as_run"]["idle_ranks"] = cell["methods"]["packed"]["idle_ranks"] = 1
    assert figures_of.speedup(cell, "as_run") is None
    assert (
        figures_of.speedup(cell, "packed") == 3.0
    )  # a tuned method that leaves ranks idle is as slow as it is


def test_a_method_that_does_not_fit_is_left_out_and_counted():
    cells = [record(), record(refused="as_run")]

    assert len(figures_of.speedups(cells, "as_run")) == 1
    assert "| packed, as users run it | 3.15 (3.15 to 3.15) |" in page_of.page(result(cells))


def test_simulating_has_a_least_speed_and_says_where_it_was_not_timed():
    fast, slow = [0.1, 0.2, 0.1], [0.5, 0.6, 0.9]
    engine = [{"key": "8192 on 64x16", "tasks": 500_000, "engine_s": fast, "seconds": slow}]

    assert verdict("event engine", [], engine=engine).value == pytest.approx(5e6)
    assert verdict("event engine", [], engine=engine).met is True
    assert verdict("vl.simulate", [], engine=engine).met is False
    assert verdict("vl.simulate", []).met is None


def test_planning_times_have_limits():
    quick, slow = (
        [{"seconds": [0.05, 0.2, 0.06], "recompute": "none"}],
        [{"seconds": [0.3, 0.1, 0.22], "recompute": "full"}],
    )
    times = [
        {"key": "a", "size": "512 on 4x4", "model": "7B", "tp": 8, "steps": quick},
        {"key": "b", "size": "512 on 4x4", "model": "70B", "tp": 4, "steps": quick + slow},
    ]

    assert verdict("planning 512", [], times=times[:1]).value == pytest.approx(0.06)
    assert verdict("planning 512", [], times=times[:1]).met is True
    assert verdict("planning 512", [], times=times).value == pytest.approx(0.22)
    assert verdict("planning 512", [], times=times).met is False
    assert verdict("planning 8192", [], times=times).met is None
    assert "| 512 on 4x4, 70B, tp 4 | 2 | 1 | 140 | 220 | 1 over 150 |" in page_of.page(
        result([], times=times)
    )


def test_nothing_measured_is_no_target_met():
    assert [found.met for found in figures_of.verdicts(result([]))].count(True) == 0


def test_the_page_shows_every_cell_and_what_was_missed():
    cells = [record(), record(0.5, dp=8), record(2.0, pp=8)]
    plans = {"everything": {"step_s": 1.0}, "slicing": {"step_s": 1.5}}
    page = page_of.page(result(cells, ablation=[{"setting": "calibrated", "plans": plans}]))

    every = page[page.index("## Every cell") :]
    assert all(cell["key"].replace("/", ", ") in every for cell in cells)
    assert "| **no** |" in page
    assert "| slicing | 1.5 (1.5 to 1.5) |" in page


@pytest.mark.parametrize("name", SETS)
def test_lengths_are_cut_at_the_capacity_and_the_loss_is_told(name):
    cell = Cell(lengths=name, capacity=65_536, documents=512, model="llama-2-7b", dp=4, pp=4, tp=4, seed=1)
    try:
        lengths, told = cell.drawn()
    except FileNotFoundError:
        pytest.skip("the real sets, shared/data/lengths beside the checkout, are not here")

    assert lengths.size == 512
    assert 0 < lengths.min() <= lengths.max() <= 65_536
    assert (told["truncated_documents"] == 0) == (told["truncated_share"] == 0)


def test_each_part_says_on_which_days_and_commits_it_was_run():
    told = result([record()], times=[])
    told["parts"]["grid"].pop("runs", None)
    first = told | {"date": "2026-01-02", "versions": {"commit": "aaa"}}
    later = told | {"date": "2026-01-03", "versions": {"commit": "bbb"}}
    for run in (first, first, later):
        figures_of.note_run(told["parts"]["grid"], run)
    figures_of.note_run(told["parts"]["grid"], later, ("sliced", "micropack"))

    page = page_of.page(told)

    assert "| grid | 2026-01-02 | aaa | a processor | 1.0 | 1 to 2 | 1 |\n| grid | 2026-01-03 | bbb |" in page
    assert page.count("| grid | ") == 2
    assert "| grid, sliced, micropack anew | 2026-01-03 | bbb | a processor |" in page
    assert "| times | not kept | not kept | not kept | 0.0 | not kept to not kept | 0 |" in page


def test_a_record_that_is_kept_notes_its_run(tmp_path, monkeypatch):
    told = result([])
    told["parts"] = {}
    monkeypatch.setattr(benchmark, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))

    benchmark._run("engine", [("one", dict, ())], told, tmp_path / "found.json", 1)

    found = json.loads((tmp_path / "found.json").read_text())
    assert found["parts"]["engine"]["records"] == [{"key": "one"}]
    assert found["parts"]["engine"]["runs"] == [{"date": "2026-01-01", "commit": "abc", "cpu": "a processor"}]


def test_exact_solvers_are_shown_with_the_date_the_commit_and_the_command():
    def step(name: str, gained: float, proven: bool) -> dict[str, Any]:
        answer = {"over_bound": 0.001, "gained": gained, "proven": proven, "seconds": 2.0}
        return {"step": name, "assign": {"over_bound": 0.001, "seconds": 0.0}, "highs": answer}

    solved = {
        "date": "2026-02-02",
        "machine": {"cpu": "another"},
        "versions": {"commit": "ccc", "highs": "1.2", "ortools": "absent"},
        "limits": {"highs_nodes": 1200, "cp_sat_deterministic_s": 1.0},
        "steps": [step("even", 0.0, True), step("even", 0.0002, False)],
    }

    page = page_of.page(result([record()]), solved)

    assert "| even | 2 | 0.1000 | 0.0200 | 1 | 2.00 | - | - | - |" in page
    assert "2026-02-02, commit ccc, another: HiGHS 1.2 (at most 1,200 nodes), on one thread" in page
    assert "`python -m benchmarks.plan.exact` measures them anew (4 s here" in page
    assert "## Exact solvers" not in page_of.page(result([record()]))


def test_what_exact_solvers_brought_is_kept_and_of_a_clean_commit():
    kept = figures_of.load_exact()

    assert kept is not None
    assert len(kept["steps"]) == 21
    assert not kept["versions"]["commit"].endswith("+")
    assert figures_of.load_exact(Path("gone.json")) is None


PLAIN = Cell(lengths="", capacity=8192, documents=8, model="llama-2-7b", dp=4, pp=2, tp=4, seed=0)


def test_slower_attention_takes_its_share_longer_and_all_else_as_long():
    whole, half = (Cell(**{**vars(PLAIN), "attention_share": share}).cost().hardware for share in (1.0, 0.5))

    for before, after in zip(whole.attention, half.attention):
        np.testing.assert_array_equal(2 * after.tflops, before.tflops)
    np.testing.assert_array_equal(whole.gemm.tflops, half.gemm.tflops)


def test_cells_run_at_the_rates_of_the_h100_that_was_measured():
    measured = PLAIN.cost().hardware
    published = Cell(**{**vars(PLAIN), "rates": "published"}).cost().hardware

    assert measured.source.startswith("measured on ")
    assert measured.gpus_per_node == published.gpus_per_node == 8
    assert 0.4 < measured.attention[0].tflops.max() / published.attention[0].tflops.max() < 0.6


def test_shares_of_the_rates_are_compared_over_the_same_cells():
    fast, other = record(1.2), record(9.0, dp=8)
    slow = record(1.3, rates="published", attention_share=0.5)

    page = page_of.page(result([fast, other], published=[slow]))

    assert "| best other, 0.5 of published | 1 | 1.3 | 1.3 | 1.3 | 1.3 | 1.3 |" in page
    assert "| best other, measured | 1 | 1.2 | 1.2 | 1.2 | 1.2 | 1.2 |" in page
    assert "## Published rates" not in page_of.page(result([fast]))


def packs(counts: list[int], lengths: list[int]) -> MicroPacks:
    """Whole documents on one rank."""
    return MicroPacks(
        rank_offsets=np.array([0, len(counts)], np.int32),
        slice_offsets=np.cumsum([0, *counts]).astype(np.int32),
        document_ids=np.arange(len(lengths), dtype=np.int32),
        starts=np.zeros(len(lengths), np.int32),
        stops=np.array(lengths, np.int32),
    )


@pytest.mark.parametrize("cp", [2, 4])
def test_at_this_models_rates_no_micro_batch_is_faster_shared_as_a_sequence(cp):
    """So WLB-LLM's choice between both can't make `balanced` faster than it is priced."""
    random = np.random.default_rng(cp)
    counts = [1, *random.integers(1, 40, 30).tolist()]
    lengths = [65_536, *random.lognormal(7.5, 1.3, sum(counts) - 1).clip(16, 65_536).astype(int).tolist()]
    mesh, cost = Mesh(dp=1, pp=2, cp=cp, tp=4), PLAIN.cost()

    as_documents, as_sequences = (
        way(packs(counts, lengths), cost, mesh) for way in (by_documents, by_sequences)
    )

    assert (as_sequences >= as_documents * (1 - 1e-9)).all()
    assert as_sequences[0] == pytest.approx(
        as_documents[0], rel=0.02
    )  # one document: first and last parts are even
    assert as_sequences.sum() > 1.02 * as_documents.sum()


def test_what_adaptive_sharding_would_bring_is_summed_by_context_parallelism():
    plan = {
        "cp": 2,
        "micro_batches": 10,
        "faster_as_sequence": 1,
        "by_document_s": 2.0,
        "by_sequence_s": 2.5,
        "adaptive_s": 1.9,
    }
    page = page_of.page(result([record()], sharding=[{"plans": [plan, plan | {"cp": 4}]}, {"plans": [plan]}]))

    assert "| 2 | 20 | 2 | 1.250x | 0.950x |" in page
    assert "| 4 | 10 | 1 | 1.250x | 0.950x |" in page


def test_delayed_steps_hold_the_same_documents_and_count_who_waits():
    lengths = np.full(40, 100, np.int32)
    lengths[[3, 17]] = 8000
    drawn = delayed_of._Order(np.arange(40), np.arange(0, 41, 10))
    orders = delayed_of._orders(lengths, drawn, PLAIN)

    assert len(orders) == len(delayed_of.SHARES) * len(delayed_of.ROUNDS)
    for setting, order in orders:
        assert sorted(order.ids.tolist()) == list(range(40))
        assert sum(int(step.sum()) for step in order.steps(lengths, 4)) == lengths.sum()
        # Both wait until the last step, from the first and from the second.
        assert setting["waiting_share"] == pytest.approx(2 / 40)
        assert setting["waited_steps"] == pytest.approx(2.5)


def test_methods_that_move_documents_have_a_table_of_their_own():
    ways = {
        "balanced": {"seconds": 30.0, "cp": 4},
        "balanced, delayed": {"seconds": 24.0, "cp": 2, "waiting_share": 0.012},
        "micropack": {"seconds": 20.0, "cp": 1},
        "micropack, delayed": {"refused": "too little memory"},
    }
    held = {"key": "a/b", "steps": 64, "ways": ways}

    page = page_of.page(result([record()], delayed=[held]))

    assert "| a, b | 20 s | 1.500x, cp 4 | 1.200x, cp 2 | 1.000x | - | 1.2% |" in page
    assert figures_of.verdicts(result([record()], delayed=[held])) == figures_of.verdicts(result([record()]))


def test_errors_have_their_sign_and_say_whom_they_favour():
    def step(method: str, predicted: float, measured: float) -> dict[str, Any]:
        return {
            "documents": "code",
            "method": method,
            "predicted_s": predicted,
            "measured_s": measured,
            "error": predicted / measured - 1,
        }

    steps = [step("micropack", 0.9, 1.0), *(step(name, 1.8, 2.0) for name in figures_of.TUNED_OTHERS)]
    steps[1] = step("sliced", 1.26, 1.2)
    held = {"mesh": "two stages", "repeat_mape": 0.01, "steps": steps}

    page = page_of.page(result([record()], accuracy=[held]))

    assert "| micropack | -10.0% (-10.0% to -10.0%) |" in page
    assert "| sliced | +5.0% (+5.0% to +5.0%) |" in page
    assert "| packed, as users run it | - |" in page
    assert "| two stages, code, sliced | 1.4x | 1.2x |" in page


def test_what_asymmetry_brings_is_said_in_words():
    plans = {"everything": {"step_s": 1.0}, "asymmetry": {"step_s": 1.0}}
    gained = {"everything": {"step_s": 1.0}, "asymmetry": {"step_s": 1.02}}
    records = [{"setting": "full recomputation", "plans": each} for each in (plans, plans, gained)]

    page = page_of.page(result([record()], ablation=records))

    assert "full recomputation 1x (1 to 1.02), 1 of 3 cells faster by 0.5 % or more" in page


def test_one_sentence_of_the_results_stands_between_marks_unless_others_were_not_tuned():
    before = f"a {sections.MARKS[0]}old{sections.MARKS[1]} b"
    wide, small = record(1.5), record(4.0, dp=2)

    assert sections.told(before, result([wide, small])) == before
    wide["methods"]["sliced"]["cp"] = 4
    after = sections.told(before, result([wide, small]))

    said = "1 steps on 16 ranks and more: 1.5x (1.5 to 1.5) over the best other method"
    assert after.startswith(f"a {sections.MARKS[0]}simulated, {said}")
    assert after.endswith(f"{sections.MARKS[1]} b")
    for path in page_of.TOLD:
        text = path.read_text(encoding="utf-8")
        assert text.index(sections.MARKS[0]) < text.index(sections.MARKS[1])


def test_exact_solving_is_tried_in_some_cells_of_one_setting():
    assert len(EXACT_CELLS) == 6
    assert set(ABLATION_CELLS) > EXACT_CELLS
