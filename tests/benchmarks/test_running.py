"""The benchmarks of what runs: processes in timed waits take what they must, and the page says what was found."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.running import longest, page, pipelines, steps, waits

import varlen as vl
from varlen.plan.check import check_plan
from varlen.plan.one_gpu import one_gpu_plan
from varlen.runtime.clock import bytes_meter
from varlen.simulate.dispatch import loads_s
from varlen.step_plan import BACKWARD, FORWARD

COST = pipelines.cost_of(vl.Hardware.named("h100"))
LENGTHS = np.array([900, 30, 60, 400, 8, 120, 75], np.int32)


@pytest.fixture(scope="module")
def planned() -> list[steps.Step]:
    return steps.steps("some", LENGTHS, COST, pipelines.MESH)


def test_every_way_plans_the_same_documents_and_can_be_run(planned: list[steps.Step]) -> None:
    for step in planned:
        check_plan(step.plan)
        assert step.plan.lengths.tolist() == LENGTHS.tolist()
    by_name = {step.method: step.plan for step in planned}
    symmetric, asymmetric = by_name["symmetric"], by_name["asymmetric"]
    assert symmetric.forward.stops.tolist() == asymmetric.forward.stops.tolist()
    assert symmetric.backward.num_micropacks == symmetric.forward.num_micropacks
    assert asymmetric.backward.num_micropacks > asymmetric.forward.num_micropacks


def test_processes_in_timed_waits_take_at_least_what_their_busiest_stage_waits(
    planned: list[steps.Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "STEP_S", 0.5)

    rows = waits.compared([planned[0], planned[2]], COST, rounds=1)

    for row, step in zip(rows, (planned[0], planned[2]), strict=True):
        scale = 0.5 / vl.simulate(step.plan, COST).makespan_s
        busiest_s = scale * loads_s(step.plan, waits.durations(step.plan, COST)).max()
        assert busiest_s <= row["waited_s"]
        assert row["predicted_s"] == pytest.approx(0.5, rel=0.1)
        assert row["tasks"] == len(step.plan.tasks)


def test_waits_are_as_long_as_tasks_and_rows_as_many() -> None:
    plan = vl.plan_step(LENGTHS, cost=COST, mesh=pipelines.MESH, method="packed", capacity=2048)
    seconds = waits.durations(plan, COST)
    chunk = waits.chunk_of(plan, 0, 1, seconds, 2.0, 8)
    key = waits.keys_of(plan.forward, 0)[0]

    assert chunk._seconds[FORWARD][key] == pytest.approx(2 * seconds.forward[1, 0])
    assert chunk._seconds[BACKWARD][key] == pytest.approx(2 * seconds.backward[1, 0])
    assert chunk.forward(key, None).shape == (1, sum(b - a for _, a, b in key), 8)
    assert chunk.backward(key, None) is not None
    first = waits.chunk_of(plan, 0, 0, seconds, 2.0, 8)
    assert first.backward(key, None) is None


def test_predictions_are_compared_with_what_the_last_rank_took(planned: list[steps.Step]) -> None:
    hardware = vl.Hardware.named("h100")
    first, second = planned[:2]
    spans = [[[0.0, 2.0], [10.0, 12.5]], [[0.0, 1.0], [0.0, 1.0]]]
    late = [[[0.5, 3.0], [10.0, 12.0]], [[0.0, 1.0], [0.0, 1.0]]]
    ranks: list[Any] = [{"spans": spans, "hardware": hardware}, {"spans": late, "hardware": hardware}]

    found = pipelines.compared([first, second], ranks)

    assert [row["rounds_s"] for row in found["steps"]] == [[3.0, 2.5], [1.0, 1.0]]
    assert found["steps"][1]["gain_measured"] == pytest.approx(2.5)
    assert found["steps"][0]["error"] == pytest.approx(
        vl.simulate(first.plan, pipelines.cost_of(hardware)).makespan_s / 2.5 - 1
    )
    assert found["limit"] == max(0.05, 1.5 * found["repeat_mape"])
    assert found["met"] is (found["mape"] <= found["limit"])


def test_a_long_document_is_planned_on_one_rank_and_on_both() -> None:
    known = vl.Hardware.named("h100")
    slow = replace(  # as a core is: launches and messages take next to nothing beside the work
        known,
        attention=tuple(replace(table, tflops=1e-4 * table.tflops) for table in known.attention),
        gemm=replace(known.gemm, tflops=1e-4 * known.gemm.tflops),
    )
    cost = pipelines.cost_of(slow)

    found = pipelines.merged_plans(cost, documents=6)

    for packed, alone, shared in zip(*[iter(found)] * 3, strict=True):
        assert [step.plan.num_merged for step in (packed, alone, shared)] == [0, 0, 1]
        assert np.array_equal(packed.plan.lengths, shared.plan.lengths)
        assert alone.plan.lengths.max() == steps.CAPACITY > alone.plan.lengths[:-1].sum()
        took = [vl.simulate(step.plan, cost).makespan_s for step in (packed, alone, shared)]
        assert took[2] < 0.9 * took[1] <= 0.9 * took[0] * (1 + 1e-9)


def test_the_page_takes_each_part_from_the_newest_file_and_says_what_was_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    (tmp_path / "run").mkdir()
    made = {"versions": {"commit": "abc", "torch": "2"}, "load": [0, 1]}
    machine = {"cpu": "a cpu", "cores": 2, "python": "3"}
    row = {
        "slice_tokens": 4096,
        "seconds": 2.0,
        "over_unsliced": 1.2,
        "over_one_slice": 1.0,
        "peak_bytes": 1e6,
    }
    cut = {"tokens": 10, "unsliced_s": 1.0, "unsliced_peak_bytes": 2e6, "one_slice_s": 1.0}
    for date, ratio in (("2026-01-01", 1.0), ("2026-01-02", 1.2)):
        found = {**cut, "one_slice_peak_bytes": 2e6, "slices": [{**row, "over_unsliced": ratio}]}
        file = {"date": date, "machine": machine, "parts": {"overhead": made}, "overhead": found}
        (tmp_path / "run" / f"{date}.json").write_text(json.dumps(file))

    text = page.page()

    assert "| 4,096 | 2.00 s | 1.200 | 1.000 | 1 MB | **no** |" in text
    assert "2026-01-02, commit abc" in text
    assert "2026-01-01" not in text


def test_the_longest_document_is_within_the_budget_and_one_percent_of_it() -> None:
    for fixed, per_token, guess in ((0, 7, 10), (5_000, 3, 10), (5_000, 3, 400_000), (90_000, 1, 1)):
        found, peak = longest.longest(lambda n, a=fixed, b=per_token: a + b * n, 100_000, guess)

        assert peak == fixed + per_token * found
        assert 99_000 <= peak <= 100_000


def test_the_longest_document_by_formula_is_what_the_simulator_lets_pass() -> None:
    shape = longest.SHAPES["GQA"]
    for way in longest.WAYS:
        tokens = longest.tokens_of(shape, way)
        if way.kind == "whole" or way.saved == "stage":
            continue
        cost = vl.CostModel(
            model=shape,
            hardware=vl.Hardware.named("h100"),
            recompute="full",
            offload=way.offload,
            kernels="eager",
        )
        plan = one_gpu_plan(np.array([tokens], np.int32), longest.SLICE_TOKENS, offload=way.offload)
        states = cost.memory(longest.MESH).state_bytes[0] - cost.memory(vl.Mesh()).state_bytes[0]
        peak = vl.simulate(plan, cost).peak_bytes + states

        assert peak == pytest.approx(longest.CARD_BYTES, rel=0.04)


def test_bytes_do_not_depend_on_whether_attention_is_computed() -> None:
    sizes = {**longest.MODELS["GQA"], "num_hidden_layers": 3}
    model = longest.llama(sizes, torch.device("cpu"))
    way = longest.WAYS[-1]

    with bytes_meter(torch.device("cpu")) as meter:
        vl.SliceEngine(model, 256, saved=way.saved, offload=way.offload).step(
            longest.one_document(sizes, 600), meter=meter
        )
    shape = vl.ModelShape.from_config(model.config)
    # Gradients are of the tokens before the last slice alone.
    assert 0.75 < meter.host_peak / longest.host_bytes_of(shape, way, 600) <= 1
    left_out, computed = (
        longest.peak_of(model, sizes, way, 600, computes=computes) for computes in (False, True)
    )

    assert left_out == computed


def test_targets_are_of_the_best_way_of_each_kind() -> None:
    names = [way.name for way in longest.WAYS]
    cells = longest.cells_of(dict(zip(names, (10, 40, 70, 81, 300, 310))))

    found = longest.targets({"cells": cells})

    assert found == {
        "device_over_a": 8.1,
        "device_met": True,
        "host_over_b": 7.75,
        "host_met": False,
    }
