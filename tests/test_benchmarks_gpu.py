"""Each part of the GPU script runs, on whatever device there is, and says what it measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import engine, gradients, slices, training
from benchmarks.gpu.__main__ import PARTS, Part, run, run_part
from benchmarks.gpu.models import TINY, llama, one_document

import varlen as vl

CPU = torch.device("cpu")


@pytest.mark.soak
def test_families_are_verified_with_every_attention() -> None:
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


def test_the_families_are_ones_that_transformers_has() -> None:
    from varlen.verify.models.loading import families

    assert set(gradients.ISOLATED) <= set(families())


def test_attention_is_timed_over_rows_keys_and_heads() -> None:
    found = engine.rates(CPU, rows=(8, 32), keys=(16, 64), heads=((4, 2),), dtype=torch.float32)

    assert [(row["rows"], row["keys"]) for row in found] == [(8, 16), (8, 64), (32, 64)]
    assert all(row["forward_tflops"] > 0 and row["backward_tflops"] > 0 for row in found)


def test_slices_are_timed_beside_the_unsliced_step() -> None:
    found = slices.overhead(CPU, sizes=TINY, tokens=256, slice_tokens=(64, 128))

    assert [row["slice_tokens"] for row in found["slices"]] == [64, 128]
    assert all(row["over_unsliced"] > 0 for row in found["slices"])
    peaks = [row["peak_bytes"] for row in found["slices"]]
    assert peaks[0] < peaks[1] < found["one_slice_peak_bytes"]
    assert found["unsliced_peak_bytes"] > peaks[1]


def test_the_unsliced_step_has_the_engines_gradients() -> None:
    model, batch = llama(TINY, CPU, torch.float64), one_document(TINY, 100)
    slices.checkpointed(model, batch, CPU)
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad.zero_()

    vl.SliceEngine(model, slice_tokens=30).step(batch)

    for parameter, right in zip(model.parameters(), wanted):
        torch.testing.assert_close(parameter.grad, right, rtol=1e-10, atol=1e-12)


def test_the_longest_document_is_found_by_doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(model: Any, batch: Any, device: torch.device) -> None:
        if batch.num_tokens > 64:
            raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(slices, "checkpointed", full)
    found = slices.longest(CPU, sizes=TINY, slice_tokens=32, first=32, most=128)

    assert [row["tokens"] for row in found] == [128, 64, 128]
    assert [row["ended_by"] for row in found] == ["the most tried", "memory", "the most tried"]


def test_padded_and_packed_steps_train_the_same_documents() -> None:
    found = training.steps(CPU, sizes=TINY, count=12, capacity=256, dtype=torch.float32)

    assert found["padded_tokens"] > found["tokens"] > 0
    assert found["ratio"] == pytest.approx(found["padded_sdpa_s"] / found["packed_varlen_s"])


def test_gradients_of_slices_are_measured_beside_float64() -> None:
    found = list(gradients.gradients(CPU, families=["llama"], dtypes=[torch.float32, torch.bfloat16]))

    assert [row["kernels"] for row in found] == ["auto", "auto", "sdpa", "varlen", "flash_attn", "flex"]
    assert found[0]["error"] < 1e-5 < found[1]["error"] < 2 * found[1]["unsliced_error"]
    assert all("half precision on CUDA" in row["not_run"] for row in found[3:])
    assert found[2]["used"] == ["rectangles"]


def test_steps_are_measured_beside_the_simulator() -> None:
    first, *steps = engine.ways(
        CPU, sizes=TINY, tokens=256, slice_tokens=64, dtype=torch.float32, budget_s=1, rounds=1
    )

    assert "float32" in first["source"]
    assert len(steps) == 2 * len(engine.WAYS)
    assert [row["count"] for row in steps[:: len(engine.WAYS)]] == [1, 3]
    for row in steps:
        assert min(row[of] for of in ("seconds", "simulated_s", "peak_bytes", "simulated_peak_bytes")) > 0


def test_kernels_of_a_step_are_counted() -> None:
    found = engine.kernels(CPU, sizes=TINY, tokens=256, slice_tokens=64, dtype=torch.float32)

    assert [row["documents"] for row in found] == ["one long", "short"]
    assert all(row["seconds"] > 0 for row in found)


def test_a_part_that_fails_is_told_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: torch.device) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setitem(PARTS, "attention", Part(broken, 60))

    assert run_part("attention", tmp_path / "found.json", CPU) == 0

    found = json.loads((tmp_path / "found.json").read_text())
    assert found["failed"] == "RuntimeError: no kernel"
    assert "in broken" in found["log"]


def test_parts_run_in_processes_that_are_stopped_at_their_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PARTS, "attention", replace(PARTS["attention"], limit_s=0.1))

    result = run(["attention", "transfer"], tmp_path / "gpu.json", "cpu")

    assert result["attention"]["failed"] == "stopped after 0 s"
    if not torch.cuda.is_available():
        assert "RuntimeError" in result["transfer"]["failed"]
    assert json.loads((tmp_path / "gpu.json").read_text()) == result
