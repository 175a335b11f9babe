"""A calibration keeps to its seconds on machines of any speed, and takes what rates need at least where it can't."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rarely import examples

from varlen.cost.shape import ModelShape
from varlen.runtime.calibrate import (
    FEWEST_ROUNDS,
    LEAST_ROUNDS,
    Calibration,
    Case,
    Machine,
    attention_levels,
    calibrate,
    layer_levels,
)
from varlen.runtime.probes import Probe, pairs_of

SHAPE = ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=64)
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


@given(
    st.floats(-10, -5),
    st.floats(-6, 0),
    st.floats(-5, -1),
    st.floats(-1, 2),
    st.integers(0, 2**32 - 1),
)
@examples(8)
def test_no_calibration_is_over_its_budget_by_more_than_the_least(
    pair: float, row: float, call: float, budget: float, seed: int
) -> None:
    on = Pretended(pair_s=10**pair, row_s=10**row, call_s=10**call)
    unrest = np.random.default_rng(seed).uniform(1.0, 1.2, 97)
    on.unrest = lambda turn: float(unrest[turn % 97])

    _, taken = on.calibrated(10**budget)

    assert taken <= 10**budget + 1.2 * on.least_s
    assert set(on.ran) >= LEAST


def test_a_budget_that_holds_more_than_the_least_is_used_and_kept() -> None:
    for budget_s in (20.0, 60.0, 200.0):
        on = Pretended(
            row_s=0.02
        )  # 210 rows of the smallest set take 4 s, as a layer of 4,096 columns does on a core

        _, taken = on.calibrated(budget_s)

        assert 0.8 * budget_s <= taken <= budget_s


def test_where_the_least_takes_longer_the_seconds_are_said_before_they_are_spent() -> None:
    on, said = Pretended(row_s=0.02), []

    found, taken = on.calibrated(3.0, on_least=lambda seconds: said.append((seconds, on.clock)))

    ((seconds, when),) = said
    assert seconds == pytest.approx(taken)
    assert when < on.clock
    assert set(on.ran) == LEAST
    assert found.rounds == FEWEST_ROUNDS
    assert {row.kind for row in found.held_out} == {"attention", "layer"}
    assert np.isfinite([found.mape_attention, found.mape_gemm]).all()


def test_a_budget_that_holds_the_least_says_nothing() -> None:
    said: list[float] = []

    Pretended(row_s=0.02).calibrated(20.0, on_least=said.append)

    assert said == []


def test_shapes_are_added_only_where_all_of_them_can_be_run_several_times() -> None:
    on = Pretended()

    found, _ = on.calibrated(20.0)

    counts = {case: on.ran.count(case) for case in on.ran}
    assert len(counts) > len(LEAST)
    assert min(counts.values()) >= LEAST_ROUNDS
    assert found.rounds >= LEAST_ROUNDS


@pytest.mark.parametrize(("faster", "budget_s"), [(100, 20.0), (1, 2000.0)])
def test_a_faster_machine_or_more_seconds_measure_longer_documents_and_more_rows(
    faster: float, budget_s: float
) -> None:
    slow, fast = Pretended(pair_s=1e-6, row_s=1e-2), Pretended(pair_s=1e-6 / faster, row_s=1e-2 / faster)

    for on, seconds in ((slow, 20.0), (fast, budget_s)):
        on.calibrated(seconds)

    for kind in ("attention", "layer"):
        reach = [max(case.rows + case.keys for case in on.ran if case.kind == kind) for on in (slow, fast)]
        assert reach[0] < reach[1]


def test_levels_only_add_and_hold_out_nothing_that_is_fitted() -> None:
    for levels in (attention_levels(), layer_levels()):
        held = {case for _, apart in levels for case in apart}
        known = {case for fitted, _ in levels for case in fitted}
        assert not held & known
        assert all(apart for _, apart in levels[:1])
        works = [max(case.work for case in fitted) for fitted, _ in levels]
        assert works[1:] == sorted(works[1:])


def test_held_out_shapes_lie_within_what_is_fitted() -> None:
    for levels in (attention_levels(), layer_levels()):
        fitted: list[Case] = []
        for known, held in levels:
            fitted += known
            for case in held:
                assert min(one.keys for one in fitted) <= case.keys <= max(one.keys for one in fitted)
                assert min(one.rows for one in fitted) <= case.rows <= max(one.rows for one in fitted)


def test_progress_rises_to_all_of_it() -> None:
    shares: list[float] = []

    Pretended(row_s=0.02).calibrated(20.0, progress=shares.append)

    assert shares == sorted(set(shares))
    assert shares[-1] == 1.0
    assert len(shares) > 10
