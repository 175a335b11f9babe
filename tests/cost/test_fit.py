"""Measured samples become tables: true rates are recovered from noise, outliers and odd machines."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varlen.cost import kernels
from varlen.cost.fit import (
    Samples,
    _never_less,
    _not_negative,
    calibrated,
    fit_curve,
    fit_launch_s,
    fit_table,
    mape,
    median_of_repeats,
)
from varlen.cost.hardware import Hardware, RateTable, load_hardware, save_hardware
from varlen.cost.model import CostModel
from varlen.cost.rates import FORWARD_LAYER, INPUT_LAYER, WEIGHT_LAYER
from varlen.cost.shape import ModelShape, pairs_of
from varlen.errors import SettingError
from varlen.step_plan import Mesh
from varlen.types import FloatArray

Rate = Callable[[FloatArray, FloatArray], FloatArray]
REPEATS = 5
SHAPE = ModelShape(hidden=512, ffn=1408, layers=4, heads=8, kv_heads=4, vocab=1000)


def forward_tflops(rows: FloatArray, keys: FloatArray) -> FloatArray:
    return 720.0 * rows / (rows + 650.0) * keys / (keys + 500.0)


def backward_tflops(rows: FloatArray, keys: FloatArray) -> FloatArray:
    return 640.0 * rows / (rows + 1300.0) * keys / (keys + 1000.0)


def stepped_tflops(rows: FloatArray, keys: FloatArray) -> FloatArray:
    """A machine that runs a third slower from 4K rows on, as where a cache is full."""
    return forward_tflops(rows, keys) / np.where(rows >= 4096, 1.33, 1.0)


def measured(rate: Rate, noise: float = 0.0, outliers: float = 0.0, seed: int = 0) -> Samples:
    """Slices of 256 to 16K rows that end at 256 to 64K, and packs of shorter documents; each timed a few times."""
    random = np.random.default_rng(seed)
    rows, keys = (grid.ravel() for grid in np.meshgrid(np.exp2(np.arange(8, 15)), np.exp2(np.arange(8, 17))))
    rows, keys = (np.repeat(grid, REPEATS) for grid in (rows, keys))
    each = np.minimum(rows, keys)
    flops = 4 * SHAPE.heads * SHAPE.head_dim * pairs_of(keys - each, keys) * (rows / each)
    seconds = flops * 1e-12 / rate(rows, keys) * np.exp(random.normal(0.0, noise, rows.size))
    seconds[random.random(rows.size) < outliers] *= 10.0
    return Samples(rows=rows, keys=keys, flops=flops, seconds=seconds)


def products(peak: float, half: float, noise: float = 0.0) -> Samples:
    """Matrix products of 64 to 16K rows."""
    rows = np.repeat(np.exp2(np.arange(6, 15)), REPEATS)
    flops = 2 * SHAPE.linear_parameters_per_layer * rows
    seconds = flops * 1e-12 / (peak * rows / (rows + half))
    seconds *= np.exp(np.random.default_rng(1).normal(0.0, noise, rows.size))
    return Samples(rows=rows, keys=np.ones_like(rows), flops=flops, seconds=seconds)


def error_of(table: RateTable, rate: Rate) -> FloatArray:
    """Relative error of every cell."""
    rows, keys = np.meshgrid(table.query_rows, table.key_lengths, indexing="ij")
    return np.abs(table.tflops / rate(rows, keys) - 1.0)


@pytest.mark.parametrize("rate", [forward_tflops, backward_tflops])
@pytest.mark.parametrize("share", [1.0, 0.2])
def test_a_saturating_rate_is_recovered_exactly_from_few_points_too(rate: Rate, share: float) -> None:
    samples = measured(rate)
    kept = np.random.default_rng(0).random(samples.rows.size) < share
    kept[[0, -1]] = True

    columns = (samples.rows, samples.keys, samples.flops, samples.seconds)
    rows, keys, flops, seconds = (column[kept] for column in columns)
    table = fit_table(Samples(rows=rows, keys=keys, flops=flops, seconds=seconds))

    assert table.query_rows[[0, -1]].tolist() == pytest.approx([256, 16_384])
    assert table.key_lengths[[0, -1]].tolist() == pytest.approx([256, 65_536])
    assert error_of(table, rate).max() < 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_five_percent_leaves_rates_within_one_on_average(seed: int) -> None:
    errors = error_of(fit_table(measured(forward_tflops, noise=0.05, seed=seed)), forward_tflops)

    assert errors.mean() < 0.01
    assert errors.max() < 0.05


def test_single_repeats_that_went_wrong_do_not_count() -> None:
    errors = error_of(fit_table(measured(forward_tflops, outliers=0.05)), forward_tflops)

    assert errors.mean() < 0.01


def test_a_machine_that_saturates_otherwise_is_followed() -> None:
    table = fit_table(measured(stepped_tflops))

    rows, keys = (grid.ravel() for grid in np.meshgrid([512.0, 1024.0, 8192.0], [16_384.0, 65_536.0]))
    ours = RateTableReader(table)(rows, keys)
    assert np.abs(ours / stepped_tflops(rows, keys) - 1).max() < 0.05


class RateTableReader:
    """A table as prices read it, cell by cell."""

    def __init__(self, table: RateTable) -> None:
        hardware = Hardware.named("h100")
        cost = CostModel(model=SHAPE, hardware=hardware)
        rates = cost.rates(Mesh())
        self.rates = rates._replace(
            query_rows=table.query_rows.copy(),
            key_lengths=table.key_lengths.copy(),
            forward_s=1e-12 / table.tflops,
            backward_s=1e-12 / table.tflops,
            linear_flops=0.0,
            launch_s=0.0,
        )

    def __call__(self, rows: FloatArray, keys: FloatArray) -> FloatArray:
        columns = (np.arange(len(rows) + 1), keys - rows, keys, np.ones(len(rows)))
        priced = kernels.price(*(column.astype(np.int32) for column in columns), self.rates)
        flops = self.rates.attention_flops * pairs_of(keys - rows, keys)
        return flops * 1e-12 / priced[:, FORWARD_LAYER]


def test_a_curve_is_recovered() -> None:
    exact, noisy = fit_curve(products(600, 512)), fit_curve(products(600, 512, noise=0.05))

    true = 600 * exact.rows / (exact.rows + 512)
    np.testing.assert_allclose(exact.tflops, true, rtol=1e-9)
    assert np.abs(noisy.tflops / true - 1).mean() < 0.025


def test_a_single_point_is_a_flat_rate() -> None:
    table = fit_table(Samples(rows=[512], keys=[1024], flops=[1e12], seconds=[0.25]))  # type: ignore[arg-type]

    assert table.tflops.tolist() == [[pytest.approx(4.0)]]


def test_launch_time_is_what_layers_take_beyond_their_kernels() -> None:
    predicted = np.linspace(1e-4, 1e-2, 21)
    late = predicted + 30e-6
    late[3] += 1.0

    assert fit_launch_s(late, predicted) == pytest.approx(30e-6)
    assert fit_launch_s(predicted - 1e-5, predicted) == 0.0


def test_repeats_become_their_median() -> None:
    one, noise = median_of_repeats(
        Samples(
            rows=np.array([2.0, 1.0, 2.0, 2.0]),
            keys=np.full(4, 5.0),
            flops=np.full(4, 7.0),
            seconds=np.array([3.0, 8.0, 4.0, 900.0]),
        )
    )

    assert (one.rows.tolist(), one.seconds.tolist()) == ([1.0, 2.0], [8.0, 4.0])
    # Of the repeats 3, 4 and 900 the middle one's neighbour is log(4/3) away: 900 doesn't count.
    assert noise == pytest.approx(np.pi / 2 * (1.48 * np.log(4 / 3)) ** 2)


@pytest.mark.parametrize("spread", [0.02, 0.1])
def test_noise_is_told_from_repeats(spread: float) -> None:
    _, noise = median_of_repeats(measured(forward_tflops, noise=spread))

    # Of five repeats a median has about pi / 2 / 5 of their variance.
    assert noise == pytest.approx(spread**2 * np.pi / 2 / 5, rel=0.4)


@given(st.lists(st.floats(0.01, 100), min_size=4, max_size=4), st.integers(5, 30), st.integers(0, 1000))
def test_no_weight_is_negative_and_none_fits_better(weights: list[float], count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    parts = random.random((4, count)) / (np.array(weights)[:, None])

    found = _not_negative(parts)

    error = ((found @ parts - 1) ** 2).sum()
    assert (found >= 0).all()
    for other in np.abs(found + random.normal(0, 0.1, (20, 4)) * found.max()):
        assert ((other @ parts - 1) ** 2).sum() >= error - 1e-9


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8))
def test_more_rows_never_take_less_time_and_sound_rates_stay(per_flop: list[float]) -> None:
    rows = np.exp2(np.arange(len(per_flop)))

    raised = _never_less(rows, np.array(per_flop))

    assert (np.diff(raised * rows) >= -1e-12).all()
    assert (raised >= np.array(per_flop) * (1 - 1e-12)).all()
    assert raised[0] == per_flop[0]


@given(st.integers(0, 50))
@settings(max_examples=10)
def test_a_calibrated_machine_predicts_what_it_did_not_measure(seed: int) -> None:
    """Held-out slices, of rows and keys off the grid, through the cost model's own prices."""
    machine = calibrated(
        Hardware.named("h100"),
        attention=(measured(forward_tflops, 0.03, seed=seed), _backward(seed)),
        gemm=products(600, 512, noise=0.03),
        gemm_backward=products(300, 512, noise=0.03),
        heads=SHAPE.heads,
        launch_s=20e-6,
        source="synthetic",
    )
    random = np.random.default_rng(seed)
    rows = random.integers(300, 16_000, 50)
    starts = random.integers(0, 49_000, 50)
    keys = rows + starts
    columns = (np.arange(51), starts, keys, np.ones(50))
    rates = CostModel(model=SHAPE, hardware=machine).rates(Mesh())

    priced = kernels.price(*(column.astype(np.int32) for column in columns), rates)

    flops = 4 * SHAPE.heads * SHAPE.head_dim * pairs_of(starts.astype(float), keys.astype(float))
    linear = 2 * SHAPE.linear_parameters_per_layer * (rows + 512)
    forward = flops * 1e-12 / forward_tflops(rows, keys) + linear / 600e12 + 20e-6
    backward = 2.5 * flops * 1e-12 / backward_tflops(rows, keys) + 2 * linear / 300e12 + 40e-6
    assert mape(priced[:, FORWARD_LAYER], forward) < 0.03
    assert mape(priced[:, INPUT_LAYER] + priced[:, WEIGHT_LAYER], backward) < 0.03
    assert machine.measured_heads == 8
    assert machine.inter == Hardware.named("h100").inter


def _backward(seed: int) -> Samples:
    """Backward samples: 2.5 times the FLOPs, in the time that they take."""
    forward = measured(backward_tflops, 0.03, seed=seed + 1000)
    return Samples(
        rows=forward.rows, keys=forward.keys, flops=2.5 * forward.flops, seconds=2.5 * forward.seconds
    )


def test_a_calibrated_machine_is_kept_as_a_file(tmp_path: object) -> None:
    machine = calibrated(
        Hardware.named("h100"),
        attention=(measured(forward_tflops), measured(backward_tflops)),
        gemm=products(600, 512),
        heads=8,
        name="bench",
        source="synthetic",
    )
    save_hardware(machine, f"{tmp_path}/bench.json")

    again = load_hardware(f"{tmp_path}/bench.json")

    assert again.name == "bench"
    assert (again.attention[1].tflops == machine.attention[1].tflops).all()
    assert again.gemm_backward is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seconds": [1, 0, -1]}, r"seconds of sample 1 is 0.0; samples must be above 0 \(2 of 3 aren't\)"),
        ({"keys": [1, 2]}, r"keys has shape \(2,\), rows \(3,\)"),
        ({"rows": [], "keys": [], "flops": [], "seconds": []}, "of one length of at least 1"),
        ({"flops": [1, float("inf"), 1]}, "flops of sample 1 is inf"),
    ],
)
def test_samples_that_were_not_measured_are_refused(changes: dict[str, list[float]], words: str) -> None:
    sound = {"rows": [1, 2, 3], "keys": [1, 2, 3], "flops": [1, 2, 3], "seconds": [1, 2, 3]}

    with pytest.raises(SettingError, match=words):
        Samples(**(sound | changes))  # type: ignore[arg-type]


def test_matrix_products_with_keys_are_refused() -> None:
    with pytest.raises(SettingError, match="samples of 9 key lengths were given"):
        fit_curve(measured(forward_tflops))
