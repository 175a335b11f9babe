"""Hardware: published rates, tables without holes, machines kept as files, and tables fitted to measurements."""

import dataclasses
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varlen.cli.plan import HardwareName
from varlen.cost import kernels
from varlen.cost.fit import (
    Samples,
    _never_less,
    _not_negative,
    calibrated,
    fit_curve,
    fit_table,
    mape,
    median_of_repeats,
)
from varlen.cost.hardware import MACHINES, Hardware, Link, RateCurve, RateTable, load_hardware, save_hardware
from varlen.cost.model import CostModel
from varlen.cost.rates import FORWARD_LAYER, INPUT_LAYER, WEIGHT_LAYER
from varlen.cost.shape import ModelShape, pairs_of
from varlen.errors import SettingError
from varlen.step_plan import Mesh
from varlen.types import FloatArray

NAMES = list(MACHINES)
DISTCA = {
    (256, 1_100): 77,
    (512, 1_300): 124,
    (1_024, 1_500): 167,
    (1_024, 4_600): 201,
    (2_048, 3_000): 234,
    (2_048, 9_000): 261,
    (4_096, 6_000): 290,
    (4_096, 18_000): 306,
    (8_192, 37_000): 342,
}
"""Slices on H100 (arXiv 2510.18121's profile): query rows and key length, TFLOP/s by FlashAttention 2."""
DAO = {512: 99, 1_024: 133, 2_048: 155, 4_096: 173, 8_192: 182, 16_384: 189}
"""FlashAttention 2 on A100, causal, both passes, 16K rows (arXiv 2307.08691): key length, TFLOP/s."""


MAGI = {2_048: (584, 219), 4_096: (663, 357), 8_192: (657, 484), 16_384: (672, 544), 32_768: (680, 584)}
"""FlashAttention 3 forward on H100, causal (charts of MagiAttention): rows of one document, TFLOP/s; and the same in
documents of at most a quarter."""


def forward_tflops(hardware: Hardware, rows: int, keys: int) -> float:
    """Between grid points too, as prices have it."""
    return _rate(hardware.attention[0], rows, keys)


def _rate(table: RateTable, rows: int, keys: int) -> float:
    """Interpolated in reciprocals."""
    seconds = [np.interp(1 / keys, 1 / table.key_lengths[::-1], (1 / row)[::-1]) for row in table.tflops]
    return float(1 / np.interp(1 / rows, 1 / table.query_rows[::-1], np.array(seconds)[::-1]))


@pytest.mark.parametrize("name", NAMES)
def test_named_hardware_says_where_its_figures_come_from(name):
    hardware = Hardware.named(name.upper())

    assert hardware.name == name
    assert "TB/s" in hardware.source
    assert "planning default" in hardware.source
    for table in hardware.attention:
        assert table.query_rows[[0, -1]].tolist() == [128, 256 * 1024]
        assert table.key_lengths[[0, -1]].tolist() == [128, 1024 * 1024]
        assert table.tflops.max() < hardware.peak_tflops
    assert hardware.gemm.tflops.max() < hardware.peak_tflops


@pytest.mark.parametrize(("slice_shape", "published"), DISTCA.items())
def test_rates_saturate_as_published_slices_do(slice_shape, published):
    """FlashAttention 2 runs at half of FlashAttention 3's best rate."""
    ours = forward_tflops(Hardware.named("h100"), *slice_shape) * 360 / 720

    assert ours == pytest.approx(published, rel=0.11)


@pytest.mark.parametrize(("rows", "published"), MAGI.items())
def test_rates_stand_between_one_document_and_many_as_the_source_says(rows, published):
    hardware = Hardware.named("h100")
    alone, packed = forward_tflops(hardware, rows, rows), forward_tflops(hardware, rows, rows // 4)

    assert 0.75 <= alone / published[0] < 1.03
    assert 1.1 < packed / published[1] < 1.265
    assert "up to 25 % low" in hardware.source
    assert "10 to 26 % high" in hardware.source


@pytest.mark.parametrize(("keys", "published"), DAO.items())
def test_the_a100_has_published_rates_of_both_passes(keys, published):
    forward, backward = (_rate(table, 16_384, keys) for table in Hardware.named("a100").attention)

    assert 7 / (2 / forward + 5 / backward) == pytest.approx(published, rel=0.06)


def test_the_h200_is_an_h100_with_more_memory():
    h100, h200 = Hardware.named("h100"), Hardware.named("h200")

    assert h200.memory_bytes == 141e9
    assert (h200.attention[0].tflops == h100.attention[0].tflops).all()


def test_the_b200_is_scaled_and_says_that_nobody_measured_it():
    h100, b200 = Hardware.named("h100"), Hardware.named("b200")

    assert b200.source.startswith("NOT MEASURED")
    np.testing.assert_allclose(b200.attention[1].tflops / h100.attention[1].tflops, 2250 / 989)


def test_unknown_hardware_is_answered_with_the_nearest():
    with pytest.raises(SettingError, match=r"no hardware is called 'h1000'; nearest: h100"):
        Hardware.named("h1000")
    with pytest.raises(SettingError, match=f"nearest: {', '.join(sorted(MACHINES))}$"):
        Hardware.named("tpu")


def test_every_list_of_hardware_names_all_of_it():
    page = (Path(__file__).parents[2] / "docs/planning-cluster.md").read_text(encoding="utf-8")
    lists = {
        "docstring of Hardware.named": str(Hardware.named.__doc__),
        "help of --hardware in cli/plan.py": HardwareName.__metadata__[0].help,
        "docs/planning-cluster.md": page.partition("The rates of a name (")[2].partition(")")[0],
    }

    missing = {where: MACHINES.keys() - re.findall(r"\w+", text) for where, text in lists.items()}
    assert not any(missing.values()), missing


def test_a_name_that_contains_another_stands_before_it():
    names = list(MACHINES)

    assert [one for at, one in enumerate(names) for later in names[at + 1 :] if one in later] == []


def test_a_table_with_holes_is_refused_by_its_cells():
    cells = np.ones((3, 4))
    cells[1, 2], cells[2, 0], cells[0, 0] = np.nan, 0.0, -3.0

    with pytest.raises(
        SettingError,
        match=r"3 holes in 12 cells: 128 rows x 10 keys \(-3\), 256 rows x 30 keys \(nan\), 512 rows x 10 keys \(0\)",
    ):
        RateTable(query_rows=[128, 256, 512], key_lengths=[10, 20, 30, 40], tflops=cells)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"9 holes in 9 cells: 1 rows \(nan\), .*, …; measure them"):
        RateCurve(rows=np.arange(1, 10), tflops=np.full(9, np.nan))


@pytest.mark.parametrize(
    ("rows", "keys", "shape", "words"),
    [
        ([2, 1], [1, 2], (2, 2), "query_rows of a rate table must be above 0 and strictly increasing"),
        ([1, 2], [0, 2], (2, 2), "key_lengths of a rate table must be above 0 and strictly increasing"),
        ([1, 2], [1, 2], (2, 3), r"2 rows and 2 key lengths has tflops of shape \(2, 3\)"),
        ([[1, 2]], [1, 2], (2, 2), r"must have 1 dimensions; got shape \(1, 2\)"),
    ],
)
def test_a_table_off_its_grid_is_refused(rows, keys, shape, words):
    with pytest.raises(SettingError, match=words):
        RateTable(query_rows=rows, key_lengths=keys, tflops=np.ones(shape))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory_bytes": 0}, "hardware memory_bytes=0; it must be a number above 0"),
        ({"launch_s": -1.0}, "hardware launch_s=-1.0; it must be a number of at least 0"),
        ({"heads_exponent": float("nan")}, "heads_exponent=nan"),
    ],
)
def test_hardware_out_of_range_is_refused(changes, words):
    with pytest.raises(SettingError, match=words):
        dataclasses.replace(Hardware.named("h100"), **changes)


def test_a_link_without_bandwidth_is_refused():
    with pytest.raises(SettingError, match="bytes_per_s must be a number above 0"):
        Link(latency_s=0, bytes_per_s=0)


@pytest.mark.parametrize("wrong", [float("inf"), float("nan"), None, "fast", True])
def test_what_is_no_finite_number_is_refused(wrong):
    known = Hardware.named("h100")
    for name in ("memory_bytes", "peak_tflops", "gpus_per_node", "launch_s", "heads_exponent"):
        with pytest.raises(SettingError, match=f"hardware {name}="):
            dataclasses.replace(known, **{name: wrong})
    for name in ("latency_s", "bytes_per_s"):
        with pytest.raises(SettingError, match="a link of"):
            dataclasses.replace(known.intra, **{name: wrong})


def test_tables_stay_read_only_through_pickling():
    hardware = pickle.loads(pickle.dumps(Hardware.named("h100")))

    for array in (hardware.attention[0].tflops, hardware.gemm.rows):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def cost_of(hardware: Hardware) -> CostModel:
    return CostModel(model=ModelShape.named("llama-3-8b"), hardware=hardware)


def test_a_machine_comes_back_from_its_file_to_the_last_digit(tmp_path):
    table = RateTable(query_rows=[1, 3], key_lengths=[7], tflops=[[0.1], [1 / 3]])  # type: ignore[arg-type]
    curve = RateCurve(rows=np.array([5.0]), tflops=np.array([2 / 7]))
    for hardware in (
        Hardware.named("a100"),
        dataclasses.replace(
            Hardware.named("b200"), attention=(table, table), gemm_backward=curve, heads_exponent=0.3
        ),
        dataclasses.replace(Hardware.named("h100"), held_out_errors=(1 / 30, 0.2)),
    ):
        save_hardware(hardware, tmp_path / "machine.json")
        again = load_hardware(tmp_path / "machine.json")

        assert cost_of(again).fingerprint == cost_of(hardware).fingerprint
        assert again.source == hardware.source
        assert again.held_out_errors == hardware.held_out_errors


def test_a_file_without_held_out_errors_is_read_and_says_nothing_of_them(tmp_path):
    again = load_hardware(broken(tmp_path / "machine.json", {"held_out_errors": None}))

    assert (again.held_out_errors, again.held_out) == (None, "")


def test_a_fingerprint_sees_every_figure():
    cost = cost_of(Hardware.named("h100"))
    others = [
        cost.replace(recompute="full"),
        cost.replace(memory_fraction=0.9),
        cost.replace(adapter_share=0.1),
        cost.replace(adapter_share=0.1, adapter_width=8),
        cost.replace(optimizer_bytes=2),
        cost.replace(end_optimizer_bytes=2),
        cost.replace(precision="fp32"),
        cost.replace(hardware=dataclasses.replace(cost.hardware, launch_s=31e-6)),
        cost.replace(
            hardware=dataclasses.replace(cost.hardware, inter=Link(latency_s=0.0, bytes_per_s=5e10))
        ),
        cost.replace(model=dataclasses.replace(cost.model, window=5)),
        cost_of(Hardware.named("b200")),
    ]

    assert cost.fingerprint == cost_of(Hardware.named("h100")).fingerprint
    assert len({other.fingerprint for other in [cost, *others]}) == 12


NULL = object()
"""JSON's null as the value of a setting."""


def broken(path: Path, changes: dict[str, Any]) -> Path:
    save_hardware(Hardware.named("h100"), path)
    record = json.loads(path.read_text())
    for name, value in changes.items():
        if value is None:
            del record[name]
        else:
            record[name] = None if value is NULL else value
    path.write_text(json.dumps(record))
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"held_out_errors": [0.1]},
            r"held_out_errors=\[0.1\]; it must be two numbers of at least 0, or none",
        ),
        ({"held_out_errors": [0.1, -1]}, r"it must be two numbers of at least 0, or none"),
        ({"held_out_errors": "few"}, r"it must be two numbers of at least 0, or none"),
        ({"format": "torch 2"}, r"is of format 'torch 2', not 'varlen hardware 1'"),
        ({"launch_s": None, "colour": "red"}, r"lacks \['launch_s'\] and has unknown \['colour'\]"),
        ({"gemm": {"rows": [1, 2], "tflops": [5, None]}}, r"1 holes in 2 cells: 2 rows \(nan\)"),
        ({"gemm": {"rows": [1, 2]}}, r"gemm holds \['rows'\]; it must be an object of rows, tflops"),
        ({"attention": {"forward": {}}}, r"attention holds \['forward'\]; .* of forward, backward\. Measure"),
        ({"attention": NULL}, "attention is null; it must be an object of forward, backward"),
        ({"gemm": NULL}, "gemm is null; it must be an object of rows, tflops"),
        ({"inter": NULL}, "inter is null; it must be an object of latency_s, bytes_per_s"),
        ({"host": {"latency_s": 1, "bytes_per_s": 5, "mtu": 9}}, "host holds .*'mtu'"),
        ({"launch_s": NULL}, "hardware launch_s=None; it must be a number of at least 0"),
        ({"source": NULL}, "hardware source=None; it must be a string"),
        ({"gpus_per_node": 7.5}, "hardware gpus_per_node=7.5; it must be a whole number"),
        ({"gemm": {"rows": [[1], [1, 2]], "tflops": [1]}}, "rows of different lengths, or entries"),
        ({"intra": {"latency_s": "a", "bytes_per_s": 5}}, "bytes_per_s must be a number above 0"),
        ({"memory_bytes": "much"}, "hardware memory_bytes='much'; it must be a number above 0"),
    ],
)
def test_a_file_that_is_no_machine_is_refused(tmp_path, changes, words):
    with pytest.raises(SettingError, match=words):
        load_hardware(broken(tmp_path / "machine.json", changes))


def test_a_missing_file_says_how_to_make_one(tmp_path):
    with pytest.raises(SettingError, match=r"No such file.*measure it by varlen plan --calibrate"):
        load_hardware(tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(SettingError, match="is of format 'list'"):
        load_hardware(tmp_path / "list.json")


def test_forward_and_backward_on_different_grids_are_joined():
    h100 = Hardware.named("h100")
    forward, backward = h100.attention
    sparse = RateTable(
        query_rows=backward.query_rows[::3],
        key_lengths=backward.key_lengths[::2],
        tflops=backward.tflops[::3, ::2],
    )
    mixed = dataclasses.replace(h100, attention=(forward, sparse))

    rates, plain = cost_of(mixed).rates(Mesh()), cost_of(h100).rates(Mesh())

    # A saturating rate is met between grid points; keys end at 512K on every second one.
    np.testing.assert_allclose(rates.backward_s[:10, :13], plain.backward_s[:10, :13], rtol=1e-9)
    assert (rates.forward_s == plain.forward_s).all()


Rate = Callable[[FloatArray, FloatArray], FloatArray]
REPEATS = 5
SHAPE = ModelShape(hidden=512, ffn=1408, layers=4, heads=8, kv_heads=4, vocab=1000)


def true_tflops(rows: FloatArray, keys: FloatArray) -> FloatArray:
    return 720.0 * rows / (rows + 650.0) * keys / (keys + 500.0)


def backward_tflops(rows: FloatArray, keys: FloatArray) -> FloatArray:
    return 640.0 * rows / (rows + 1300.0) * keys / (keys + 1000.0)


def stepped_tflops(rows: FloatArray, keys: FloatArray) -> FloatArray:
    """A machine that runs a third slower from 4K rows on, as where a cache is full."""
    return true_tflops(rows, keys) / np.where(rows >= 4096, 1.33, 1.0)


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
    rows, keys = np.meshgrid(table.query_rows, table.key_lengths, indexing="ij")
    return np.abs(table.tflops / rate(rows, keys) - 1.0)


@pytest.mark.parametrize("rate", [true_tflops, backward_tflops])
@pytest.mark.parametrize("share", [1.0, 0.2])
def test_a_saturating_rate_is_recovered_exactly_from_few_points_too(rate, share):
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
def test_noise_of_five_percent_leaves_rates_within_one_on_average(seed):
    errors = error_of(fit_table(measured(true_tflops, noise=0.05, seed=seed)), true_tflops)

    assert errors.mean() < 0.01
    assert errors.max() < 0.05


def test_single_repeats_that_went_wrong_do_not_count():
    errors = error_of(fit_table(measured(true_tflops, outliers=0.05)), true_tflops)

    assert errors.mean() < 0.01


def test_a_machine_that_saturates_otherwise_is_followed():
    table = fit_table(measured(stepped_tflops))

    rows, keys = (grid.ravel() for grid in np.meshgrid([512.0, 1024.0, 8192.0], [16_384.0, 65_536.0]))
    ours = RateTableReader(table)(rows, keys)
    assert np.abs(ours / stepped_tflops(rows, keys) - 1).max() < 0.05


def test_no_rate_is_above_the_best_that_was_measured():
    samples = measured(lambda rows, keys: true_tflops(rows, keys) * np.where(rows * keys >= 2**24, 1.5, 1.0))
    kept = samples.rows * samples.keys < 2**26  # the corner with the highest rates wasn't measured
    columns = (samples.rows, samples.keys, samples.flops, samples.seconds)
    rows, keys, flops, seconds = (column[kept] for column in columns)

    table = fit_table(Samples(rows=rows, keys=keys, flops=flops, seconds=seconds))

    assert table.tflops.max() <= 1.000001e-12 * (flops / seconds).max()


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


def test_a_curve_is_recovered():
    exact, noisy = fit_curve(products(600, 512)), fit_curve(products(600, 512, noise=0.05))

    true = 600 * exact.rows / (exact.rows + 512)
    np.testing.assert_allclose(exact.tflops, true, rtol=1e-9)
    assert np.abs(noisy.tflops / true - 1).mean() < 0.025


def test_a_single_point_is_a_flat_rate():
    table = fit_table(Samples(rows=[512], keys=[1024], flops=[1e12], seconds=[0.25]))  # type: ignore[arg-type]

    assert table.tflops.tolist() == [[pytest.approx(4.0)]]


def test_repeats_become_their_median():
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
def test_noise_is_told_from_repeats(spread):
    _, noise = median_of_repeats(measured(true_tflops, noise=spread))

    # Of five repeats a median has about pi / 2 / 5 of their variance.
    assert noise == pytest.approx(spread**2 * np.pi / 2 / 5, rel=0.4)


@given(st.lists(st.floats(0.01, 100), min_size=4, max_size=4), st.integers(5, 30), st.integers(0, 1000))
def test_no_weight_is_negative_and_none_fits_better(weights, count, seed):
    random = np.random.default_rng(seed)
    parts = random.random((4, count)) / (np.array(weights)[:, None])

    found = _not_negative(parts)

    error = ((found @ parts - 1) ** 2).sum()
    assert (found >= 0).all()
    for other in np.abs(found + random.normal(0, 0.1, (20, 4)) * found.max()):
        assert ((other @ parts - 1) ** 2).sum() >= error - 1e-9


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8))
def test_more_rows_never_take_less_time_and_sound_rates_stay(per_flop):
    rows = np.exp2(np.arange(len(per_flop)))

    raised = _never_less(rows, np.array(per_flop))

    assert (np.diff(raised * rows) >= -1e-12).all()
    assert (raised >= np.array(per_flop) * (1 - 1e-12)).all()
    assert raised[0] == per_flop[0]


@given(st.integers(0, 50))
@settings(max_examples=10)
def test_a_calibrated_machine_predicts_what_it_did_not_measure(seed):
    """Held-out slices, of rows and keys off the grid, through the cost model's own prices."""
    machine = calibrated(
        Hardware.named("h100"),
        attention=(measured(true_tflops, 0.03, seed=seed), _backward(seed)),
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
    forward = flops * 1e-12 / true_tflops(rows, keys) + linear / 600e12 + 20e-6
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


def test_a_calibrated_machine_is_kept_as_a_file(tmp_path):
    machine = calibrated(
        Hardware.named("h100"),
        attention=(measured(true_tflops), measured(backward_tflops)),
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
def test_samples_that_were_not_measured_are_refused(changes, words):
    sound = {"rows": [1, 2, 3], "keys": [1, 2, 3], "flops": [1, 2, 3], "seconds": [1, 2, 3]}

    with pytest.raises(SettingError, match=words):
        Samples(**(sound | changes))  # type: ignore[arg-type]


def test_matrix_products_with_keys_are_refused():
    with pytest.raises(SettingError, match="samples of 9 key lengths were given"):
        fit_curve(measured(true_tflops))
