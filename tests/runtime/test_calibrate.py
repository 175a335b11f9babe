"""Calibration turns timings into the rates that predict them, and says how well it predicts what it left out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from varlen.cost.hardware import Hardware
from varlen.cost.model import CostModel
from varlen.cost.shape import ModelShape
from varlen.errors import SettingError
from varlen.runtime.calibrate import FEWEST_ROUNDS, Bench, calibrate
from varlen.runtime.probes import attention_probe, layer_probe, parts_of, quiet, run_once, run_round
from varlen.step_plan import Mesh

SHAPE = ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=64)
CPU = torch.device("cpu")
FAST, SLOW = 4e9, 1e9
"""FLOP/s of the machine that tests pretend to have measured: layers, attention."""


def bench(budget_s: float = 0.01) -> Bench:
    return Bench.of(SHAPE, device=CPU, dtype=torch.float32, budget_s=budget_s)


def ideal_round(on: Bench) -> np.ndarray:
    """What a machine takes whose rates no size changes, its backward pass a tenth slower than FLOPs say."""
    seconds = np.empty((len(on.probes), 2))
    for probe, row in zip(on.probes, seconds):
        rate, ratio = (SLOW, 2.5) if probe.kind == "attention" else (FAST, 2.0)
        row[:] = probe.flops / rate, 1.1 * ratio * probe.flops / rate
    return seconds


def test_a_machine_of_constant_rates_is_found_and_predicted_exactly() -> None:
    on = bench()
    for factor in (1.0, 1.0, 3.0, 1.0, 2.0):  # two rounds were disturbed
        on.rounds.append(factor * ideal_round(on))

    found = on.calibration()

    assert found.mape_attention < 1e-6
    assert found.mape_gemm < 1e-6
    forward, backward = found.hardware.attention
    assert forward.tflops == pytest.approx(SLOW / 1e12)
    assert backward.tflops == pytest.approx(SLOW / 1.1e12)
    assert found.hardware.gemm.tflops == pytest.approx(FAST / 1e12)
    assert found.hardware.gemm_backward is not None
    assert found.hardware.gemm_backward.tflops == pytest.approx(FAST / 1.1e12)


def test_what_is_held_out_is_none_of_what_was_fitted() -> None:
    on = bench()
    shapes = [(probe.kind, probe.rows, probe.keys) for probe in on.probes]
    held = set(shapes[-on.num_held :])

    assert len(held) == on.num_held
    assert not held & set(shapes[: -on.num_held])
    assert {kind for kind, _, _ in held} == {"attention", "layer"}


def test_an_error_of_prediction_is_reported_and_not_hidden() -> None:
    on = bench()
    seconds = ideal_round(on)
    seconds[-on.num_held :] *= 1.25
    on.rounds.append(seconds)

    found = on.calibration()

    assert found.mape_attention == pytest.approx(0.2)
    assert [row["error"] for row in found.table()] == pytest.approx([-0.2] * 2 * on.num_held)
    assert found.table()[0]["what"] == "attention forward"


def test_this_machine_is_measured_within_a_budget_and_its_plans_can_be_priced() -> None:
    shares: list[float] = []

    found = calibrate(SHAPE, device="cpu", budget_s=0.1, progress=shares.append)

    assert shares[-1] == 1.0
    assert all(one < next_ for one, next_ in pairwise(shares))
    assert found.rounds >= FEWEST_ROUNDS
    assert found.repeat_mape >= 0
    assert "float32" in found.hardware.source
    rates = CostModel(model=SHAPE, hardware=found.hardware).rates(Mesh())
    assert np.isfinite(rates.forward_s).all()
    assert found.hardware.memory_bytes_per_s > 1e8
    assert isinstance(found.hardware, Hardware)


@pytest.mark.parametrize(("rows", "keys"), [(3, 10), (10, 10), (30, 10)])
def test_attention_probes_count_the_pairs_they_compute(rows: int, keys: int) -> None:
    probe = attention_probe(SHAPE, rows, keys, CPU, torch.float32)
    seen = torch.ones(keys, keys).tril()[-min(rows, keys) :].sum().item() * max(1, rows // keys)

    assert probe.flops == 4 * 4 * 8 * seen
    assert probe.rows == rows
    assert (run_once(probe, CPU) > 0).all()
    assert (run_once(probe, CPU) > 0).all(), "a probe runs again, though a first slice releases its cache"


def test_a_layer_without_attention_runs_all_its_matrices_both_ways() -> None:
    parts = parts_of(SHAPE, CPU, torch.float32)
    probe = layer_probe(parts, 6)

    probe.backward(probe.forward(probe.prepare()))

    assert probe.flops == 2 * 6 * SHAPE.linear_parameters_per_layer
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in parts.layers[0].parameters())


def test_disturbed_rounds_do_not_count_and_probes_take_turns() -> None:
    assert quiet(np.array([5.0, 1.0, 9.0, 2.0, 7.0])) == 2.0
    order: list[int] = []
    probes = [attention_probe(SHAPE, rows, 8, CPU, torch.float32) for rows in (2, 3)]
    watched = [
        type(p)(
            kind=p.kind,
            rows=p.rows,
            flops=p.flops,
            prepare=lambda p=p: order.append(p.rows) or p.prepare(),
            forward=p.forward,
            backward=p.backward,
        )
        for p in probes
    ]

    run_round(watched, lambda probe: run_once(probe, CPU))
    run_round(watched, lambda probe: run_once(probe, CPU), is_back=True)

    assert order == [2, 3, 3, 2]


def test_a_budget_or_a_layer_that_cannot_be_is_refused() -> None:
    with pytest.raises(SettingError, match="budget_s=0; it must be above 0 seconds"):
        calibrate(SHAPE, budget_s=0)
    wide = ModelShape(name="wide", hidden=2**20, layers=1, heads=2**13, ffn=2**22, vocab=8)
    with pytest.raises(
        SettingError, match=r"one layer of wide takes .* GB with its gradients, over half of the"
    ):
        calibrate(wide, device="cpu")
