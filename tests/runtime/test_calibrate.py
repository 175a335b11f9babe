"""Calibration turns timings into the rates that predict them, and keeps to its seconds on any machine."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rarely import examples

from varlen.cost.hardware import Hardware
from varlen.cost.model import CostModel
from varlen.cost.shape import ModelShape
from varlen.errors import SettingError
from varlen.runtime.calibrate import (
    FEWEST_ROUNDS,
    LEAST_ROUNDS,
    Bench,
    Calibration,
    Case,
    Machine,
    Probe,
    attention_levels,
    attention_probe,
    calibrate,
    layer_levels,
    layer_probe,
    pairs_of,
    parts_of,
    quiet,
    run_once,
    run_round,
)
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


def test_a_machine_of_constant_rates_is_found_and_predicted_exactly():
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


def test_what_is_held_out_is_none_of_what_was_fitted():
    on = bench()
    shapes = [(probe.kind, probe.rows, probe.keys) for probe in on.probes]
    held = set(shapes[-on.num_held :])

    assert len(held) == on.num_held
    assert not held & set(shapes[: -on.num_held])
    assert {kind for kind, _, _ in held} == {"attention", "layer"}


def test_an_error_of_prediction_is_reported_and_not_hidden():
    on = bench()
    seconds = ideal_round(on)
    seconds[-on.num_held :] *= 1.25
    on.rounds.append(seconds)

    found = on.calibration()

    assert found.mape_attention == pytest.approx(0.2)
    assert [row["error"] for row in found.table()] == pytest.approx([-0.2] * 2 * on.num_held)
    assert found.table()[0]["what"] == "attention forward"


def test_this_machine_is_measured_within_a_budget_and_its_plans_can_be_priced():
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
def test_attention_probes_count_the_pairs_they_compute(rows, keys):
    probe = attention_probe(SHAPE, rows, keys, CPU, torch.float32)
    seen = torch.ones(keys, keys).tril()[-min(rows, keys) :].sum().item() * max(1, rows // keys)

    assert probe.flops == 4 * 4 * 8 * seen
    assert probe.rows == rows
    assert (run_once(probe, CPU) > 0).all()
    assert (run_once(probe, CPU) > 0).all(), "a probe runs again, though a first slice releases its cache"


def test_a_layer_without_attention_runs_all_its_matrices_both_ways():
    parts = parts_of(SHAPE, CPU, torch.float32)
    probe = layer_probe(parts, 6)

    probe.backward(probe.forward(probe.prepare()))

    assert probe.flops == 2 * 6 * SHAPE.linear_parameters_per_layer
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in parts.layers[0].parameters())


def test_disturbed_rounds_do_not_count_and_probes_take_turns():
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


def test_a_budget_or_a_layer_that_cannot_be_is_refused():
    with pytest.raises(SettingError, match="budget_s=0; it must be above 0 seconds"):
        calibrate(SHAPE, budget_s=0)
    wide = ModelShape(name="wide", hidden=2**20, layers=1, heads=2**13, ffn=2**22, vocab=8)
    with pytest.raises(
        SettingError, match=r"one layer of wide takes .* GB with its gradients, over half of the"
    ):
        calibrate(wide, device="cpu")


LEAST = {case for level in (attention_levels()[0], layer_levels()[0]) for part in level for case in part}


class Pretended:
    """A machine whose time passes only as its shapes take it."""

    def __init__(self, *, pair_s: float = 1e-7, row_s: float = 1e-3, call_s: float = 1e-3) -> None:
        self.pair_s, self.row_s, self.call_s = pair_s, row_s, call_s
        self.clock = 100.0
        self.ran: list[Case] = []
        self.unrest: Callable[[int], float] = lambda _: 1.0
        self.machine = Machine(make=self.make, run=self.run, now=lambda: self.clock)

    def seconds(self, case: Case) -> float:
        work_s = (
            self.row_s * case.rows if case.kind == "layer" else self.pair_s * pairs_of(case.rows, case.keys)
        )
        return self.call_s + work_s

    @property
    def least_s(self) -> float:
        """What the smallest set takes, each shape run three times: what is short is run again to know it."""
        return (FEWEST_ROUNDS + 1) * sum(map(self.seconds, LEAST))

    def make(self, case: Case) -> Probe:
        flops = (
            4.0 * SHAPE.heads * SHAPE.head_dim * pairs_of(case.rows, case.keys)
            if case.keys
            else 1e4 * case.rows
        )
        return Probe(
            kind=case.kind,
            rows=case.rows,
            keys=case.keys,
            flops=flops,
            prepare=lambda: None,
            forward=lambda _: None,
            backward=lambda _: None,
        )

    def run(self, probe: Probe) -> np.ndarray:
        case = Case(probe.kind, probe.rows, probe.keys)
        taken = self.seconds(case) * self.unrest(len(self.ran))
        self.ran.append(case)
        self.clock += taken
        return np.array([0.3, 0.7]) * taken

    def calibrated(self, budget_s: float, **settings: Callable[[float], object]) -> tuple[Calibration, float]:
        """Calibrate, and return what came out and the seconds it took."""
        began = self.clock
        found = calibrate(SHAPE, device="cpu", budget_s=budget_s, machine=self.machine, **settings)
        return found, self.clock - began


@given(st.floats(-10, -5), st.floats(-6, 0), st.floats(-5, -1), st.floats(-1, 2), st.integers(0, 2**32 - 1))
@examples(8)
def test_no_calibration_is_over_its_budget_by_more_than_the_least(pair, row, call, budget, seed):
    on = Pretended(pair_s=10**pair, row_s=10**row, call_s=10**call)
    unrest = np.random.default_rng(seed).uniform(1.0, 1.2, 97)
    on.unrest = lambda turn: float(unrest[turn % 97])

    _, taken = on.calibrated(10**budget)

    assert taken <= 10**budget + 1.2 * on.least_s
    assert set(on.ran) >= LEAST


def test_a_budget_that_holds_more_than_the_least_is_used_and_kept():
    for budget_s in (20.0, 60.0, 200.0):
        # 210 rows of the smallest set take 4 s, as a layer of 4,096 columns does on a core.
        on = Pretended(row_s=0.02)

        _, taken = on.calibrated(budget_s)

        assert 0.8 * budget_s <= taken <= budget_s


def test_where_the_least_takes_longer_the_seconds_are_said_before_they_are_spent():
    on, said = Pretended(row_s=0.02), []

    found, taken = on.calibrated(3.0, on_least=lambda seconds: said.append((seconds, on.clock)))

    ((seconds, when),) = said
    assert seconds == pytest.approx(taken)
    assert when < on.clock
    assert set(on.ran) == LEAST
    assert found.rounds == FEWEST_ROUNDS
    assert {row.kind for row in found.held_out} == {"attention", "layer"}
    assert np.isfinite([found.mape_attention, found.mape_gemm]).all()


def test_a_budget_that_holds_the_least_says_nothing():
    said: list[float] = []

    Pretended(row_s=0.02).calibrated(20.0, on_least=said.append)

    assert said == []


def test_shapes_are_added_only_where_all_of_them_can_be_run_several_times():
    on = Pretended()

    found, _ = on.calibrated(20.0)

    counts = {case: on.ran.count(case) for case in on.ran}
    assert len(counts) > len(LEAST)
    assert min(counts.values()) >= LEAST_ROUNDS
    assert found.rounds >= LEAST_ROUNDS


@pytest.mark.parametrize(("faster", "budget_s"), [(100, 20.0), (1, 2000.0)])
def test_a_faster_machine_or_more_seconds_measure_longer_documents_and_more_rows(faster, budget_s):
    slow, fast = Pretended(pair_s=1e-6, row_s=1e-2), Pretended(pair_s=1e-6 / faster, row_s=1e-2 / faster)

    for on, seconds in ((slow, 20.0), (fast, budget_s)):
        on.calibrated(seconds)

    for kind in ("attention", "layer"):
        reach = [max(case.rows + case.keys for case in on.ran if case.kind == kind) for on in (slow, fast)]
        assert reach[0] < reach[1]


def test_levels_only_add_and_hold_out_nothing_that_is_fitted():
    for levels in (attention_levels(), layer_levels()):
        held = {case for _, apart in levels for case in apart}
        known = {case for fitted, _ in levels for case in fitted}
        assert not held & known
        assert all(apart for _, apart in levels[:1])
        works = [max(case.work for case in fitted) for fitted, _ in levels]
        assert works[1:] == sorted(works[1:])


def test_held_out_shapes_lie_within_what_is_fitted():
    for levels in (attention_levels(), layer_levels()):
        fitted: list[Case] = []
        for known, held in levels:
            fitted += known
            for case in held:
                assert min(one.keys for one in fitted) <= case.keys <= max(one.keys for one in fitted)
                assert min(one.rows for one in fitted) <= case.rows <= max(one.rows for one in fitted)


def test_progress_rises_to_all_of_it():
    shares: list[float] = []

    Pretended(row_s=0.02).calibrated(20.0, progress=shares.append)

    assert shares == sorted(set(shares))
    assert shares[-1] == 1.0
    assert len(shares) > 10
