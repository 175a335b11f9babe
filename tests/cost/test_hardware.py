"""Hardware: rates against what was published, tables that can't have holes, machines kept as files."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from varlen.cost.hardware import Hardware, Link, RateCurve, RateTable, load_hardware, save_hardware
from varlen.cost.model import CostModel
from varlen.cost.shape import ModelShape
from varlen.errors import SettingError
from varlen.step_plan import Mesh

NAMES = ["h100", "h200", "a100", "b200"]
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
def test_named_hardware_says_where_its_figures_come_from(name: str) -> None:
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
def test_rates_saturate_as_published_slices_do(slice_shape: tuple[int, int], published: int) -> None:
    """FlashAttention 2 runs at half of FlashAttention 3's best rate."""
    ours = forward_tflops(Hardware.named("h100"), *slice_shape) * 360 / 720

    assert ours == pytest.approx(published, rel=0.11)


@pytest.mark.parametrize(("rows", "published"), MAGI.items())
def test_rates_stand_between_one_document_and_many_as_the_source_says(
    rows: int, published: tuple[int, int]
) -> None:
    hardware = Hardware.named("h100")
    alone, packed = forward_tflops(hardware, rows, rows), forward_tflops(hardware, rows, rows // 4)

    assert 0.75 <= alone / published[0] < 1.03
    assert 1.1 < packed / published[1] < 1.265
    assert "up to 25 % low" in hardware.source
    assert "10 to 26 % high" in hardware.source


@pytest.mark.parametrize(("keys", "published"), DAO.items())
def test_the_a100_has_published_rates_of_both_passes(keys: int, published: int) -> None:
    forward, backward = (_rate(table, 16_384, keys) for table in Hardware.named("a100").attention)

    assert 7 / (2 / forward + 5 / backward) == pytest.approx(published, rel=0.06)


def test_the_h200_is_an_h100_with_more_memory() -> None:
    h100, h200 = Hardware.named("h100"), Hardware.named("h200")

    assert h200.memory_bytes == 141e9
    assert (h200.attention[0].tflops == h100.attention[0].tflops).all()


def test_the_b200_is_scaled_and_says_that_nobody_measured_it() -> None:
    h100, b200 = Hardware.named("h100"), Hardware.named("b200")

    assert b200.source.startswith("NOT MEASURED")
    np.testing.assert_allclose(b200.attention[1].tflops / h100.attention[1].tflops, 2250 / 989)


def test_unknown_hardware_is_answered_with_the_nearest() -> None:
    with pytest.raises(SettingError, match=r"no hardware is called 'h1000'; nearest: h100"):
        Hardware.named("h1000")
    with pytest.raises(SettingError, match="nearest: a100, b200, h100, h200"):
        Hardware.named("tpu")


def test_a_table_with_holes_is_refused_by_its_cells() -> None:
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
        ([2, 1], [1, 2], (2, 2), "query_rows of a rate table must rise from above 0"),
        ([1, 2], [0, 2], (2, 2), "key_lengths of a rate table must rise from above 0"),
        ([1, 2], [1, 2], (2, 3), r"2 rows and 2 key lengths has tflops of shape \(2, 3\)"),
        ([[1, 2]], [1, 2], (2, 2), r"must have 1 dimensions; got shape \(1, 2\)"),
    ],
)
def test_a_table_off_its_grid_is_refused(rows: Any, keys: Any, shape: tuple[int, int], words: str) -> None:
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
def test_hardware_out_of_range_is_refused(changes: dict[str, float], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        dataclasses.replace(Hardware.named("h100"), **changes)


def test_a_link_without_bandwidth_is_refused() -> None:
    with pytest.raises(SettingError, match="bytes_per_s must be a number above 0"):
        Link(latency_s=0, bytes_per_s=0)


@pytest.mark.parametrize("wrong", [float("inf"), float("nan"), None, "fast", True])
def test_what_is_no_finite_number_is_refused(wrong: Any) -> None:
    known = Hardware.named("h100")
    for name in ("memory_bytes", "peak_tflops", "gpus_per_node", "launch_s", "heads_exponent"):
        with pytest.raises(SettingError, match=f"hardware {name}="):
            dataclasses.replace(known, **{name: wrong})
    for name in ("latency_s", "bytes_per_s"):
        with pytest.raises(SettingError, match="a link of"):
            dataclasses.replace(known.intra, **{name: wrong})


def test_tables_stay_read_only_through_pickling() -> None:
    hardware = pickle.loads(pickle.dumps(Hardware.named("h100")))

    for array in (hardware.attention[0].tflops, hardware.gemm.rows):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def cost_of(hardware: Hardware) -> CostModel:
    return CostModel(model=ModelShape.named("llama-3-8b"), hardware=hardware)


def test_a_machine_comes_back_from_its_file_to_the_last_digit(tmp_path: Path) -> None:
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


def test_a_file_without_held_out_errors_is_read_and_says_nothing_of_them(tmp_path: Path) -> None:
    again = load_hardware(broken(tmp_path / "machine.json", {"held_out_errors": None}))

    assert (again.held_out_errors, again.held_out) == (None, "")


def test_a_fingerprint_sees_every_figure() -> None:
    cost = cost_of(Hardware.named("h100"))
    others = [
        cost.replace(recompute="full"),
        cost.replace(memory_fraction=0.9),
        cost.replace(hardware=dataclasses.replace(cost.hardware, launch_s=31e-6)),
        cost.replace(
            hardware=dataclasses.replace(cost.hardware, inter=Link(latency_s=0.0, bytes_per_s=5e10))
        ),
        cost.replace(model=dataclasses.replace(cost.model, window=5)),
        cost_of(Hardware.named("b200")),
    ]

    assert cost.fingerprint == cost_of(Hardware.named("h100")).fingerprint
    assert len({other.fingerprint for other in [cost, *others]}) == 7


NULL = object()
"""JSON's null as the value of a setting."""


def broken(path: Path, changes: dict[str, Any]) -> Path:
    """A saved machine with something wrong."""
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
        ({"source": NULL}, "hardware source=None; it must be words"),
        ({"gpus_per_node": 7.5}, "hardware gpus_per_node=7.5; it must be a whole number"),
        ({"gemm": {"rows": [[1], [1, 2]], "tflops": [1]}}, "ragged or holds words"),
        ({"intra": {"latency_s": "a", "bytes_per_s": 5}}, "bytes_per_s must be a number above 0"),
        ({"memory_bytes": "much"}, "hardware memory_bytes='much'; it must be a number above 0"),
    ],
)
def test_a_file_that_is_no_machine_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        load_hardware(broken(tmp_path / "machine.json", changes))


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"No such file.*measure it by varlen plan --calibrate"):
        load_hardware(tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(SettingError, match="is of format 'list'"):
        load_hardware(tmp_path / "list.json")


def test_forward_and_backward_on_different_grids_are_joined() -> None:
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
