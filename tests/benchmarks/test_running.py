"""The benchmarks of what runs, on whatever device there is, take what they must and say what was found."""

import json
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from benchmarks.gpu import engine, gradients, several, slices, training
from benchmarks.gpu.__main__ import PARTS, Part, run, run_part
from benchmarks.gpu.models import TINY, llama, one_document
from benchmarks.running import longest, page, pipelines, steps, waits

import varlen as vl
from varlen.attention.kernels import Kernels
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


def test_every_way_plans_the_same_documents_and_can_be_run(planned):
    for step in planned:
        check_plan(step.plan)
        assert step.plan.lengths.tolist() == LENGTHS.tolist()
    by_name = {step.method: step.plan for step in planned}
    symmetric, asymmetric = by_name["symmetric"], by_name["asymmetric"]
    assert symmetric.forward.stops.tolist() == asymmetric.forward.stops.tolist()
    assert symmetric.backward.num_micropacks == symmetric.forward.num_micropacks
    assert asymmetric.backward.num_micropacks > asymmetric.forward.num_micropacks


@pytest.mark.soak
def test_processes_in_timed_waits_take_at_least_what_their_busiest_stage_waits(planned, monkeypatch):
    monkeypatch.setattr(waits, "STEP_S", 0.5)

    rows = waits.compared([planned[0], planned[2]], COST, rounds=1)

    for row, step in zip(rows, (planned[0], planned[2]), strict=True):
        scale = 0.5 / vl.simulate(step.plan, COST).makespan_s
        busiest_s = scale * loads_s(step.plan, waits.durations(step.plan, COST)).max()
        assert busiest_s <= row["waited_s"]
        assert row["predicted_s"] == pytest.approx(0.5, rel=0.1)
        assert row["tasks"] == len(step.plan.tasks)


def test_waits_are_as_long_as_tasks_and_rows_as_many():
    plan = vl.plan_step(LENGTHS, cost=COST, mesh=pipelines.MESH, method="packed", capacity=2048)
    seconds = waits.durations(plan, COST)
    chunk = waits.chunk_of(plan, 0, 1, seconds, 2.0, 8)
    key = waits.keys_of(plan, FORWARD, 0)[0]

    assert chunk._seconds[FORWARD][key] == pytest.approx(2 * seconds.forward[1, 0])
    assert chunk._seconds[BACKWARD][key] == pytest.approx(2 * seconds.backward[1, 0])
    assert chunk.forward(key, None).shape == (1, sum(b - a for _, a, b in key), 8)
    assert chunk.backward(key, None) is not None
    first = waits.chunk_of(plan, 0, 0, seconds, 2.0, 8)
    assert first.backward(key, None) is None


def test_predictions_are_compared_with_what_the_last_rank_took(planned):
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


def test_a_long_document_is_planned_on_one_rank_and_on_both():
    known = vl.Hardware.named("h100")
    slow = replace(  # as a core is: launches and messages take next to nothing beside the work
        known,
        attention=tuple(replace(table, tflops=1e-4 * table.tflops) for table in known.attention),
        gemm=replace(known.gemm, tflops=1e-4 * known.gemm.tflops),
    )
    cost = pipelines.cost_of(slow)

    found = pipelines.merged_plans(cost, documents=6)

    for packed, alone, shared in zip(*[iter(found)] * 3, strict=True):
        assert packed.plan.num_merged == alone.plan.num_merged == 0 < shared.plan.num_merged
        assert np.array_equal(packed.plan.lengths, shared.plan.lengths)
        assert alone.plan.lengths.max() == steps.CAPACITY > alone.plan.lengths[:-1].sum()
        took = [vl.simulate(step.plan, cost).makespan_s for step in (packed, alone, shared)]
        assert took[2] < 0.9 * took[1] <= 0.9 * took[0] * (1 + 1e-9)


def test_the_page_takes_each_part_from_the_newest_file_and_says_what_was_missed(tmp_path, monkeypatch):
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


def test_the_longest_document_is_within_the_budget_and_one_percent_of_it():
    for fixed, per_token, guess in ((0, 7, 10), (5_000, 3, 10), (5_000, 3, 400_000), (90_000, 1, 1)):
        found, peak = longest.longest(lambda n, a=fixed, b=per_token: a + b * n, 100_000, guess)

        assert peak == fixed + per_token * found
        assert 99_000 <= peak <= 100_000


def test_the_longest_document_by_formula_is_what_the_simulator_lets_pass():
    shape = longest.SHAPES["GQA"]
    for way in longest.WAYS:
        tokens = longest.tokens_of(shape, way)
        assert longest.host_bytes_of(shape, way, tokens) <= longest.HOST_BYTES  # else it couldn't run
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


def test_a_document_that_the_card_could_hold_ends_where_host_memory_does():
    shape, way = longest.SHAPES["GQA"], longest.WAYS[-1]
    tokens = longest.tokens_of(shape, way)

    assert longest.host_bytes_of(shape, way, tokens) <= longest.HOST_BYTES
    assert longest.host_bytes_of(shape, way, tokens + 1) > longest.HOST_BYTES


def test_the_page_has_no_row_that_could_not_run():
    cells = [
        {"name": name, "tokens": 7, "over_a": 1.0, "over_b": 1.0, "host_bytes": held}
        for name, held in (("runs", 5e9), ("needs more than the host has", 2e12))
    ]
    found = {
        "card_bytes": 7e10,
        "host_bytes": 1e11,
        "mesh": {"dp": 64},
        "slice_tokens": 1,
        "small_slice_tokens": 1,
        "formula": {"GQA": {"shape": "named", "cells": cells}},
        "measured": {},
        "targets": {},
    }
    part = {"longest": {"versions": {"commit": "c", "torch": "t"}, "load": [0, 0]}}

    said = page.longest({"longest": found, "parts": part, "date": "today"})

    assert "runs" in said
    assert "needs more" not in said


def test_bytes_do_not_depend_on_whether_attention_is_computed():
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


def test_targets_are_of_the_best_way_of_each_kind():
    names = [way.name for way in longest.WAYS]
    cells = longest.cells_of(dict(zip(names, (10, 40, 70, 81, 300, 310))))

    found = longest.targets({"cells": cells})

    assert found == {"device_over_a": 8.1, "device_met": True, "host_over_b": 7.75, "host_met": False}


CPU = torch.device("cpu")


@pytest.mark.soak
def test_families_are_verified_with_every_attention():
    found = list(gradients.isolation("cpu", ["llama", "no such family"], [torch.float32]))

    assert [row["attention"] for row in found[:-1:2]] == [
        "eager",
        "sdpa",
        "flex_attention",
        "varlen",
        "flash_attention_2",
    ]
    assert {row["verdict"] for row in found[:-1]} == {"isolated"}
    assert found[0]["kernels"] == {"softmax": 2}
    assert (found[-1]["attention"], found[-1]["verdict"]) == ("all", "not run")
    assert "no such family" in found[-1]["reason"]


def test_the_families_are_ones_that_transformers_has():
    from varlen.verify.models.loading import families

    assert set(gradients.ISOLATED) <= set(families())


def test_attention_is_timed_over_rows_keys_and_heads():
    found = engine.rates(CPU, rows=(8, 32), keys=(16, 64), heads=((4, 2),), dtype=torch.float32)

    assert [(row["rows"], row["keys"]) for row in found] == [(8, 16), (8, 64), (32, 64)]
    assert all(row["forward_tflops"] > 0 and row["backward_tflops"] > 0 for row in found)


def test_slices_are_timed_beside_the_unsliced_step():
    found = slices.overhead(CPU, sizes=TINY, tokens=256, slice_tokens=(64, 128))

    assert [row["slice_tokens"] for row in found["slices"]] == [64, 128]
    assert all(row["over_unsliced"] > 0 for row in found["slices"])
    peaks = [row["peak_bytes"] for row in found["slices"]]
    assert peaks[0] < peaks[1] < found["one_slice_peak_bytes"]
    assert found["unsliced_peak_bytes"] > peaks[1]


def test_the_unsliced_step_has_the_engines_gradients():
    model, batch = llama(TINY, CPU, torch.float64), one_document(TINY, 100)
    slices.checkpointed(model, batch, CPU)
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad.zero_()

    vl.SliceEngine(model, slice_tokens=30).step(batch)

    for parameter, right in zip(model.parameters(), wanted):
        torch.testing.assert_close(parameter.grad, right, rtol=1e-10, atol=1e-12)


def test_the_longest_document_is_found_by_doubling(monkeypatch):
    def full(model: Any, batch: Any, device: torch.device) -> None:
        if batch.num_tokens > 64:
            raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(slices, "checkpointed", full)
    found = slices.longest(CPU, sizes=TINY, slice_tokens=32, first=32, most=128)

    assert [row["tokens"] for row in found] == [128, 64, 128]
    assert [row["ended_by"] for row in found] == ["the most tried", "memory", "the most tried"]


def test_padded_and_packed_steps_train_the_same_documents():
    found = training.steps(CPU, sizes=TINY, count=12, capacity=256, dtype=torch.float32)

    assert found["padded_tokens"] > found["tokens"] > 0
    assert found["ratio"] == pytest.approx(found["padded_sdpa_s"] / found["packed_varlen_s"])


def test_gradients_of_slices_are_measured_beside_float64():
    found = list(gradients.gradients(CPU, families=["llama"], dtypes=[torch.float32, torch.bfloat16]))

    assert [row["kernels"] for row in found] == ["auto", *get_args(Kernels)]
    assert found[0]["error"] < 1e-5 < found[1]["error"] < 2 * found[1]["unsliced_error"]
    assert all("half precision on CUDA" in row["not_run"] for row in found[3:])
    assert found[2]["used"] == ("sdpa",)


def test_steps_are_measured_beside_the_simulator():
    first, *steps = engine.ways(
        CPU, sizes=TINY, tokens=256, slice_tokens=64, dtype=torch.float32, budget_s=1, rounds=1
    )

    assert "float32" in first["source"]
    assert len(steps) == 2 * len(engine.WAYS)
    assert [row["count"] for row in steps[:: len(engine.WAYS)]] == [1, 3]
    for row in steps:
        assert min(row[of] for of in ("seconds", "simulated_s", "peak_bytes", "simulated_peak_bytes")) > 0


def test_kernels_of_a_step_are_counted():
    found = engine.kernels(CPU, sizes=TINY, tokens=256, slice_tokens=64, dtype=torch.float32)

    assert [row["documents"] for row in found] == ["one long", "short", "equal"]
    assert all(row["seconds"] > 0 for row in found)


def test_what_processes_found_is_the_first_ones_with_the_largest_distances():
    rows = {0: {"mesh": "pp=2", "loss_off": 0.1}, 1: {"mesh": "pp=2", "loss_off": 0.3}}

    assert several._first(rows) == {"mesh": "pp=2", "loss_off": 0.3}
    assert several._first({**rows, 1: {"failed": "no"}})["failed"] == "no"
    assert "no process ended" in several._first({})["failed"]
    assert {len(several.meshes(world)) for world in (2, 4)} == {4, 7}
    assert all(mesh.num_gpus == world for world in (2, 4) for mesh in several.meshes(world))


@pytest.mark.soak
def test_two_processes_have_the_gradients_of_one_and_a_death_is_raised(monkeypatch):
    monkeypatch.setattr(several, "PATIENCE_S", 300.0)

    rows = [several._first(several._job(several.exact, 2, "cpu", mesh)) for mesh in several.meshes(2)]
    death = several._first(several._job(several.killed, 2, "cpu", dies=1))

    assert all(row["gradients_off"] < 1e-5 for row in rows)
    assert rows[2]["shared_documents"] > 0
    assert "WorkerDiedError" in death["raised"]


def test_a_part_that_fails_is_told_and_the_others_run(tmp_path, monkeypatch):
    def broken(_: torch.device) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setitem(PARTS, "attention", Part(broken, 60))

    assert run_part("attention", tmp_path / "found.json", CPU) == 0

    found = json.loads((tmp_path / "found.json").read_text())
    assert found["failed"] == "RuntimeError: no kernel"
    assert "in broken" in found["log"]


@pytest.mark.soak
def test_parts_run_in_processes_that_are_stopped_at_their_limit(tmp_path, monkeypatch):
    monkeypatch.setitem(PARTS, "attention", replace(PARTS["attention"], limit_s=0.1))

    result = run(["attention", "transfer"], tmp_path / "gpu.json", "cpu")

    assert result["attention"]["failed"] == "stopped after 0 s"
    if not torch.cuda.is_available():
        assert "RuntimeError" in result["transfer"]["failed"]
    assert json.loads((tmp_path / "gpu.json").read_text()) == result
