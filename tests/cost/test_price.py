"""Slices are priced, exchanged and cut: kernels equal their references, parts add up, more work never costs less."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles import cost as reference

from varlen import jit
from varlen.cost import kernels
from varlen.cost.hardware import Hardware
from varlen.cost.memory import OWN
from varlen.cost.model import CostModel
from varlen.cost.rates import (
    FORWARD_HEAD,
    FORWARD_LAYER,
    INPUT_HEAD,
    INPUT_LAYER,
    LAYER_LAUNCHES,
    NUM_COLUMNS,
    ROWS,
    SLICE_LAUNCHES,
    WEIGHT_HEAD,
    WEIGHT_LAYER,
    Rates,
)
from varlen.cost.shape import ModelShape, slice_flops
from varlen.step_plan import Mesh

H100 = Hardware.named("h100")
LLAMA = ModelShape.named("llama-3-8b")
SHAPES = ["llama-2-7b", "llama-3-70b", "mistral-7b-v0.1", "mixtral-8x7b", "deepseek-v3"]
COST = CostModel(model=LLAMA, hardware=H100)
Packs = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@st.composite
def costs(draw: st.DrawFn) -> tuple[CostModel, Mesh]:
    """A model on hardware whose few heads fill it less or not, and a mesh that divides it."""
    hardware = Hardware.named(draw(st.sampled_from(["h100", "a100"])))
    hardware = dataclasses.replace(hardware, heads_exponent=draw(st.sampled_from([0.0, 0.5, 1.0])))
    cost = CostModel(
        model=ModelShape.named(draw(st.sampled_from(SHAPES))),
        hardware=hardware,
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        offload=draw(st.sampled_from(["none", "kv"])),
        mode=draw(st.sampled_from(["calibrated", "flops"])),
        exchange_overlap=draw(st.sampled_from([0.0, 0.3, 1.0])),
        kernels=draw(st.sampled_from(["fused", "eager"])),
    )
    mesh = Mesh(dp=16, pp=4, cp=draw(st.sampled_from([1, 2, 4])), tp=draw(st.sampled_from([1, 2, 4, 8])))
    return cost, mesh


@st.composite
def packs(draw: st.DrawFn) -> Packs:
    """MicroPacks of slices of all sizes, some without any, some shared by merged ranks."""
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    starts, stops, ranks = [], [], []
    for _ in range(sum(sizes)):
        scale = draw(st.sampled_from([10, 1_000, 100_000, 2_000_000]))
        starts.append(draw(st.integers(0, scale)))
        stops.append(starts[-1] + draw(st.integers(1, scale)))
        ranks.append(draw(st.sampled_from([1, 1, 2, 8])))
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return tuple(np.array(values, np.int32) for values in (offsets, starts, stops, ranks))  # type: ignore[return-value]


def one(start: int, stop: int, rates: Rates, num_ranks: int = 1) -> np.ndarray:
    """The price of a MicroPack of one slice."""
    columns = ([0, 1], [start], [stop], [num_ranks])
    return kernels.price(*(np.array(column, np.int32) for column in columns), rates)[0]


def seconds(priced: np.ndarray) -> float:
    """Of a layer and the head, both passes."""
    return float(priced[:ROWS].sum())


@given(packs(), costs())
@settings(max_examples=150)
def test_prices_equal_their_reference(given_packs, given_cost):
    cost, mesh = given_cost
    for best in (False, True):
        rates = cost.rates(mesh, best=best)
        compiled, readable = kernels.price(*given_packs, rates), reference.price(*given_packs, rates)

        np.testing.assert_array_equal(compiled, readable)
        assert (compiled >= 0).all()
        assert (compiled[np.diff(given_packs[0]) == 0] == 0).all()


@given(
    st.integers(0, 2_000_000),
    st.integers(1, 200_000),
    st.sampled_from([1, 2, 16]),
    st.integers(1, 400_000),
    costs(),
)
def test_seconds_of_a_slice_equal_their_reference(start, length, num_ranks, rows, given_cost):
    cost, mesh = given_cost
    rates = cost.rates(mesh)

    compiled = kernels.slice_seconds(start, start + length, num_ranks, rows, rates)

    readable = reference.slice_seconds(start, start + length, num_ranks, rows, rates)
    np.testing.assert_array_equal(compiled, readable)


@given(st.integers(0, 300), st.integers(0, 300), st.sampled_from([0, 1, 2, 7, 100, 301]))
def test_pairs_equal_those_counted_one_by_one(start, length, window):
    stop = start + length
    counted = sum(min(query + 1, window) if window else query + 1 for query in range(start, stop))

    assert kernels.pairs(start, stop, window) == counted
    assert reference.pairs(start, stop, window) == counted


@given(packs(), st.sampled_from(SHAPES))
def test_slices_add_up_to_their_micropack_but_for_what_is_paid_once(given_packs, name):
    cost = CostModel(model=ModelShape.named(name), hardware=H100, recompute="full")
    rates = cost.rates(Mesh(dp=16, pp=4, tp=8))._replace(launch_s=0.0, link_latency_s=np.zeros(2))
    offsets, starts, stops, ranks = given_packs
    priced = kernels.price(*given_packs, rates)
    layers = cost.model.layers

    for pack, (first, last) in enumerate(zip(offsets, offsets[1:])):
        rows = priced[pack, ROWS]
        parts = [
            kernels.slice_seconds(starts[i], stops[i], ranks[i], rows, rates) for i in range(first, last)
        ]
        forward, backward, weight = np.sum(parts, axis=0) if parts else (0.0, 0.0, 0.0)
        own = priced[pack]
        assert forward == pytest.approx(own[FORWARD_LAYER] + own[FORWARD_HEAD] / layers, rel=1e-9)
        assert backward == pytest.approx(own[INPUT_LAYER] + own[INPUT_HEAD] / layers, rel=1e-9)
        assert weight == pytest.approx(own[WEIGHT_LAYER] + own[WEIGHT_HEAD] / layers, rel=1e-9)


@given(st.integers(0, 500_000), st.integers(1, 100_000), st.integers(1, 5_000), costs())
def test_more_rows_of_a_document_never_cost_less(start, length, more, given_cost):
    cost, mesh = given_cost
    rates = cost.rates(mesh)
    # Under the first row of a table a slice takes as long as that row, and later keys are read a little faster.
    length = max(length, int(np.ceil(rates.query_rows[0] / rates.row_scale * mesh.cp)))

    less, longer = one(start, start + length, rates), one(start, start + length + more, rates)
    later = one(start + more, start + more + length, rates)

    assert (longer >= less * (1 - 1e-12)).all()
    assert later[FORWARD_LAYER] >= less[FORWARD_LAYER] * (1 - 1e-12)
    assert later[INPUT_LAYER] >= less[INPUT_LAYER] * (1 - 1e-12)


@given(packs(), costs())
def test_the_best_rates_are_never_slower(given_packs, given_cost):
    cost, mesh = given_cost

    usual = kernels.price(*given_packs, cost.rates(mesh))
    best = kernels.price(*given_packs, cost.rates(mesh, best=True))

    assert (best <= usual * (1 + 1e-12)).all()


def test_a_saturating_rate_is_met_between_grid_points_too():
    rates = COST.rates(Mesh())
    attention = rates._replace(linear_flops=0.0, launch_s=0.0)
    for rows, stop in ((700, 9_001), (3_000, 3_000), (150_000, 700_000)):
        pairs = reference.pairs(stop - rows, stop, 0)
        flops = 4 * 32 * 128 * pairs

        forward = flops / (720e12 * rows / (rows + 650) * stop / (stop + 500))
        backward = 2.5 * flops / (640e12 * rows / (rows + 1300) * stop / (stop + 1000))

        priced = one(stop - rows, stop, attention)
        assert priced[FORWARD_LAYER] == pytest.approx(forward, rel=1e-9)
        assert priced[INPUT_LAYER] == pytest.approx(backward, rel=1e-9)


def test_matrix_products_take_what_their_curve_says_and_three_times_that_in_all():
    rates = COST.rates(Mesh())._replace(attention_flops=0.0, launch_s=0.0)
    rows = 3_000

    priced = one(0, rows, rates)

    per_layer = 2 * LLAMA.linear_parameters_per_layer * (rows + 512) / 600e12
    assert priced[FORWARD_LAYER] == pytest.approx(per_layer)
    assert priced[INPUT_LAYER] == pytest.approx(per_layer)
    assert priced[WEIGHT_LAYER] == pytest.approx(per_layer)
    assert priced[WEIGHT_HEAD] == pytest.approx(2 * LLAMA.head_parameters * (rows + 512) / 600e12)
    assert priced[ROWS] == rows


def test_fewer_rows_than_measured_take_as_long_as_those():
    rates = COST.rates(Mesh())._replace(attention_flops=0.0, launch_s=0.0)

    assert one(0, 3, rates)[FORWARD_LAYER] == pytest.approx(one(0, 128, rates)[FORWARD_LAYER])
    assert one(0, 129, rates)[FORWARD_LAYER] > one(0, 128, rates)[FORWARD_LAYER]


def test_a_launch_is_paid_once_a_layer_and_pass():
    with_launch, without = COST.rates(Mesh()), COST.rates(Mesh())._replace(launch_s=0.0)

    apart = one(0, 4096, with_launch) - one(0, 4096, without)

    np.testing.assert_allclose(apart, [30e-6] * ROWS + [0.0], rtol=1e-6)
    full = COST.replace(recompute="full").rates(Mesh())
    twice = one(0, 4096, full) - one(0, 4096, full._replace(launch_s=0.0))
    assert twice[INPUT_LAYER] == pytest.approx(60e-6)


def test_slices_with_earlier_tokens_launch_more_in_the_engine_and_documents_nothing():
    cost = COST.replace(kernels="eager")
    rates, none = cost.rates(Mesh()), cost.rates(Mesh())._replace(launch_s=0.0)
    none = none._replace(slice_launch_s=0.0, slice_launch_back_s=0.0)

    def launched(cuts: list[tuple[int, int]]) -> np.ndarray:
        columns = ([0, len(cuts)], [a for a, _ in cuts], [b for _, b in cuts], [1] * len(cuts))
        arrays = [np.array(column, np.int32) for column in columns]
        return (kernels.price(*arrays, rates) - kernels.price(*arrays, none))[0]  # type: ignore[no-any-return]

    np.testing.assert_allclose(launched([(0, 8)] * 512), launched([(0, 4096)]), rtol=1e-6)
    more = launched([(0, 8), (4096, 8192), (4096, 8192)]) - launched([(0, 8)])
    forward, backward = (one / every for one, every in zip(SLICE_LAUNCHES, LAYER_LAUNCHES))
    assert more[FORWARD_LAYER] == pytest.approx(2 * 30e-6 * forward)
    assert more[INPUT_LAYER] == pytest.approx(2 * 30e-6 * backward)
    assert COST.rates(Mesh()).slice_launch_s == 0
    assert cost.rates(Mesh(), best=True).slice_launch_back_s == 0


def test_equal_rates_keep_the_ratios_of_papers():
    rates = COST.replace(mode="flops").rates(Mesh())
    attention, linear = rates._replace(linear_flops=0.0), rates._replace(attention_flops=0.0)

    for start, stop in ((0, 50), (100_000, 108_192)):
        attended, multiplied = one(start, stop, attention), one(start, stop, linear)
        assert attended[INPUT_LAYER] == pytest.approx(2.5 * attended[FORWARD_LAYER])
        assert multiplied[INPUT_LAYER] + multiplied[WEIGHT_LAYER] == pytest.approx(
            2 * multiplied[FORWARD_LAYER]
        )


def test_equal_rates_price_flops_alone():
    """Attention and matrix products have a rate each; at one and the same, seconds are FLOPs."""
    rates = COST.replace(mode="flops").rates(Mesh())
    rates = rates._replace(forward_s=np.full((1, 1), 1e-15), backward_s=np.full((1, 1), 1e-15))
    rates = rates._replace(gemm_s=np.full(1, 1e-15), gemm_backward_s=np.full(1, 1e-15))

    priced = one(70_000, 90_000, rates)

    forward, backward = slice_flops(LLAMA, [70_000], [90_000])[0]
    assert 32 * priced[FORWARD_LAYER] + priced[FORWARD_HEAD] == pytest.approx(forward * 1e-15)
    rest = priced[[INPUT_LAYER, WEIGHT_LAYER]].sum() * 32 + priced[[INPUT_HEAD, WEIGHT_HEAD]].sum()
    assert rest == pytest.approx(backward * 1e-15)


def test_full_recomputation_adds_one_forward_pass_to_the_backward_and_nothing_else():
    none, full = (COST.replace(recompute=way).rates(Mesh(tp=4)) for way in ("none", "full"))  # type: ignore[arg-type]

    before, after = one(8_192, 16_384, none), one(8_192, 16_384, full)

    assert after[INPUT_LAYER] - before[INPUT_LAYER] == pytest.approx(before[FORWARD_LAYER])
    others = np.delete(np.arange(NUM_COLUMNS), INPUT_LAYER)
    assert (after[others] == before[others]).all()


def test_selective_recomputation_takes_a_few_percent_at_most():
    none, some = (COST.replace(recompute=way).rates(Mesh(tp=4)) for way in ("none", "selective"))  # type: ignore[arg-type]

    ratio = one(0, 8_192, some)[INPUT_LAYER] / one(0, 8_192, none)[INPUT_LAYER]

    assert 1 < ratio < 1.06


def test_the_best_rate_is_found_where_many_rows_run_slower():
    forward, backward = H100.attention
    tflops = forward.tflops.copy()
    tflops[-1] /= 2
    hardware = dataclasses.replace(H100, attention=(dataclasses.replace(forward, tflops=tflops), backward))

    rates = COST.replace(hardware=hardware).rates(Mesh(), best=True)

    assert rates.forward_s.tolist() == [(1e-12 / forward.tflops[-2]).tolist()]


def test_tensor_parallel_collectives_count_by_rows():
    rates = COST.rates(Mesh(tp=8))

    apart = one(0, 8_192, rates) - one(0, 8_192, rates._replace(collective_s=0.0))

    # Twice an all-gather and a reduce-scatter of a bf16 row, of which 7/8 travel.
    expected = 8_192 * 4 * 2 * 4_096 * 7 / 8 / 360e9
    assert apart[FORWARD_LAYER] == pytest.approx(expected)
    assert apart[INPUT_LAYER] == pytest.approx(expected)
    assert apart[WEIGHT_LAYER] == 0
    assert COST.replace(tp_overlap=0.75).rates(Mesh(tp=8)).collective_s == rates.collective_s / 4


def test_offload_counts_only_where_it_takes_longer_than_computing():
    near, far = COST.rates(Mesh(tp=1)), COST.replace(offload="kv").rates(Mesh(tp=1))

    # 8K rows compute for milliseconds; fetching the keys of 8K earlier tokens takes 0.6 ms.
    assert (one(8_192, 16_384, far) == one(8_192, 16_384, near)).all()
    # 128 rows after a million tokens wait for them: 4 KiB a token at 54 GB/s, three times that backward.
    late = one(1_000_000, 1_000_128, far)
    assert late[FORWARD_LAYER] == pytest.approx(1_000_000 * 4_096 / 54e9)
    assert late[INPUT_LAYER] == pytest.approx(3 * 1_000_000 * 4_096 / 54e9)


def test_few_heads_fill_a_gpu_less_where_the_hardware_says_so():
    hardware = dataclasses.replace(H100, heads_exponent=1.0, measured_heads=64)
    usual = COST.rates(Mesh(tp=8))._replace(linear_flops=0.0, launch_s=0.0, collective_s=0.0)
    cost = COST.replace(hardware=hardware)
    slow = cost.rates(Mesh(tp=8))._replace(linear_flops=0.0, launch_s=0.0, collective_s=0.0)

    # 4 heads of 64: 16,384 rows run at the rate of 1,024.
    assert slow.row_scale == 1 / 16
    ratio = one(0, 16_384, slow)[FORWARD_LAYER] / one(0, 16_384, usual)[FORWARD_LAYER]
    assert ratio == pytest.approx((1 + 650 / 1_024) / (1 + 650 / 16_384))


def test_without_kernels_prices_are_the_same(monkeypatch):
    rates = COST.rates(Mesh(dp=4, tp=2))
    columns: list[Any] = [np.array(x, np.int32) for x in ([0, 2, 2], [0, 10], [5_000, 900], [1, 2])]
    compiled = kernels.price(*columns, rates)
    monkeypatch.setattr(jit, "_is_enabled", False)

    readable = kernels.price(*columns, rates)

    np.testing.assert_array_equal(compiled, readable)


OPEN = COST.replace(exchange_overlap=0.0)
"""Nothing hides the exchange of shared documents."""


def test_ranks_that_share_a_slice_take_a_share_of_it_and_an_exchange():
    rates = OPEN.rates(Mesh(dp=8, tp=2))
    quiet = rates._replace(link_latency_s=np.zeros(2), link_s_per_byte=np.zeros(2), launch_s=0.0)

    alone, shared = one(0, 65_536, quiet), one(0, 65_536, quiet, num_ranks=4)

    assert shared[ROWS] == 16_384
    # A quarter of the work, at the lower rate of a quarter of the rows.
    assert alone[FORWARD_LAYER] / 4 < shared[FORWARD_LAYER] < alone[FORWARD_LAYER] / 4 * 1.05
    exchange = one(0, 65_536, rates, num_ranks=4)[FORWARD_LAYER] - shared[FORWARD_LAYER] - 30e-6
    # Keys and values of 4 heads a GPU, three quarters of which come from others within the node.
    assert exchange == pytest.approx(10e-6 + 65_536 * 4 * 256 * 2 * 0.75 / 360e9)


def test_context_parallel_gpus_count_like_merged_ranks():
    merged = one(4_096, 20_480, COST.rates(Mesh(dp=8, tp=2)), num_ranks=4)
    parallel = one(4_096, 20_480, COST.rates(Mesh(dp=2, cp=4, tp=2)))

    np.testing.assert_allclose(merged, parallel, rtol=1e-12)


def test_an_exchange_between_nodes_takes_the_network():
    rates = OPEN.rates(Mesh(dp=16, tp=2))
    quiet = rates._replace(link_latency_s=np.zeros(2), link_s_per_byte=np.zeros(2))

    exchange = one(0, 65_536, rates, num_ranks=8) - one(0, 65_536, quiet, num_ranks=8)

    assert rates.node_group == 4
    moved = 65_536 * 2_048 * 7 / 8 / 50e9
    assert exchange[FORWARD_LAYER] == pytest.approx(20e-6 + moved)
    # Keys and values again, and their gradients.
    assert exchange[INPUT_LAYER] == pytest.approx(2 * (20e-6 + moved))
    assert exchange[WEIGHT_LAYER] == 0


def test_a_late_slice_sends_its_queries_where_that_is_less_than_all_keys():
    rates = OPEN.rates(Mesh(dp=8, tp=1))._replace(link_latency_s=np.zeros(2))
    quiet = rates._replace(link_s_per_byte=np.zeros(2))

    exchange = one(1_000_000, 1_001_024, rates, 4) - one(1_000_000, 1_001_024, quiet, 4)

    # bf16 queries out and outputs back; then queries and output gradients out, and query gradients back.
    row = 1_024 * 2 * 32 * 128 * 0.75 / 360e9
    assert exchange[FORWARD_LAYER] == pytest.approx(2 * row)
    assert exchange[INPUT_LAYER] == pytest.approx(3 * row)


@pytest.mark.parametrize(("recompute", "back"), [("none", 3), ("full", 4)])
def test_the_engines_layers_gather_every_key_however_few_rows_see_them(recompute, back):
    cost = OPEN.replace(kernels="eager", recompute=recompute)
    rates = cost.rates(Mesh(dp=8, tp=1))._replace(link_latency_s=np.zeros(2))
    quiet = rates._replace(link_s_per_byte=np.zeros(2))

    exchange = one(1_000_000, 1_001_024, rates, 4) - one(1_000_000, 1_001_024, quiet, 4)

    # bf16 keys and values; backward the same again, gradients of both in float32, and what a layer run again gathers.
    keys = 1_001_024 * 2 * 2 * 8 * 128 * 0.75 / 360e9
    assert exchange[FORWARD_LAYER] == pytest.approx(keys)
    assert exchange[INPUT_LAYER] == pytest.approx(back * keys)
    late = one(1_000_000, 1_001_024, quiet._replace(link_latency_s=np.ones(2)), 4)
    assert late[FORWARD_LAYER] == pytest.approx(1, rel=0.1)
    assert late[INPUT_LAYER] == pytest.approx(back - 1, rel=0.1)


def test_an_exchange_hides_behind_attention():
    mesh = Mesh(dp=16, tp=1)
    rates = OPEN.rates(mesh)._replace(link_latency_s=np.zeros(2), launch_s=0.0, linear_flops=0.0)
    quiet = rates._replace(link_s_per_byte=np.zeros(2))
    for stop in (2_048, 262_144):
        attention, shown = one(0, stop, quiet, 16), one(0, stop, rates, 16)
        exchange = shown[FORWARD_LAYER] - attention[FORWARD_LAYER]

        hidden = one(0, stop, rates._replace(exchange_overlap=1.0), 16)
        half = one(0, stop, rates._replace(exchange_overlap=0.5), 16)

        assert hidden[FORWARD_LAYER] == pytest.approx(max(attention[FORWARD_LAYER], exchange))
        least = attention[FORWARD_LAYER] + max(0.0, exchange - attention[FORWARD_LAYER] / 2)
        assert half[FORWARD_LAYER] == pytest.approx(least)


def test_recomputing_some_layers_takes_their_share_between_selective_and_full():
    rates = [
        COST.replace(recompute=way, recompute_share=share).rates(Mesh(tp=4))  # type: ignore[arg-type]
        for way, share in (("selective", 1.0), ("full", 0.25), ("full", 1.0))
    ]

    none, some, whole = (one(8_192, 16_384, each)[INPUT_LAYER] for each in rates)

    assert none < some < whole
    assert some == pytest.approx(0.75 * none + 0.25 * whole)


def test_layers_that_memory_counts_as_recomputed_take_their_time():
    """A chunk of one layer recomputes it whole, however small the share."""
    mesh = Mesh(pp=8, virtual_stages=4)
    whole, some = (COST.replace(recompute="full", recompute_share=share) for share in (1.0, 0.01))

    assert COST.stages(mesh).layers.max() == 1
    assert some.memory(mesh).held_bytes.tolist() == whole.memory(mesh).held_bytes.tolist()
    assert one(0, 8_192, some.rates(mesh)).tolist() == one(0, 8_192, whole.rates(mesh)).tolist()


@pytest.mark.parametrize(("share", "layers"), [(0.1, 1), (1 / 9, 1), (0.25, 3), (0.5, 5), (1.0, 9)])
def test_a_share_of_a_chunks_layers_rounded_up_recomputes_fully(share, layers):
    some, none = (
        COST.replace(recompute=way, recompute_share=part).memory(Mesh(pp=4))
        for way, part in (("full", share), ("selective", 1.0))
    )
    whole = COST.replace(recompute="full").memory(Mesh(pp=4))

    expected = none.held_bytes[1] + layers / 9 * (whole.held_bytes[1] - none.held_bytes[1])
    assert COST.stages(Mesh(pp=4)).layers[1] == 9
    assert some.held_bytes[1] == pytest.approx(expected)
    assert some.backward_peaks[1, :, OWN].max() <= whole.backward_peaks[1, :, OWN].max()


RATES = COST.rates(Mesh(dp=8, pp=4, tp=2))
Documents = tuple[np.ndarray, np.ndarray, float]


@st.composite
def documents(draw: st.DrawFn) -> Documents:
    """Lengths, the ranks that share each, and how much of the forward pass counts."""
    lengths = draw(st.lists(st.integers(1, 400_000), min_size=1, max_size=6))
    ranks = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=len(lengths), max_size=len(lengths)))
    return np.array(lengths, np.int32), np.array(ranks, np.int32), draw(st.sampled_from([0.0, 1.0]))


def work_of(given_documents: Documents, rows: float = 8_192.0) -> np.ndarray:
    """Seconds of each document, by the readable reference."""
    return reference.document_seconds(given_documents[0], given_documents[1], rows, given_documents[2], RATES)


@given(documents(), st.integers(1, 100_000))
def test_seconds_of_documents_equal_their_reference(given_documents, rows):
    lengths, ranks, part = given_documents
    lengths = np.append(lengths, 0).astype(np.int32)
    ranks = np.append(ranks, 1).astype(np.int32)

    seconds = kernels.document_seconds(lengths, ranks, float(rows), part, RATES)

    readable = reference.document_seconds(lengths, ranks, float(rows), part, RATES)
    np.testing.assert_array_equal(seconds, readable)
    assert seconds[-1] == 0
    for seen, length, count in zip(seconds[:-1], lengths, ranks):
        forward, inputs, weights = kernels.slice_seconds(0, length, count, rows, RATES)
        assert seen == pytest.approx(part * forward + inputs + weights)


@given(
    documents(), st.sampled_from([0.3, 1.0, 7.0]), st.sampled_from([512, 2_048]), st.sampled_from([1, 128])
)
def test_cuts_equal_their_reference(given_documents, finer, least_rows, multiple):
    lengths, ranks, part = given_documents
    work = work_of(given_documents)
    most = np.full(len(work), work.max() / finer)
    columns = lengths, ranks, work, most, least_rows, multiple, part, RATES

    compiled, readable = kernels.cut_evenly(*columns), reference.cut_evenly(*columns)

    assert [column.tolist() for column in compiled] == [column.tolist() for column in readable]
    assert [column.dtype for column in compiled] == [np.int32] * 3


@given(documents(), st.sampled_from([1.0, 5.0, 40.0]), st.sampled_from([512, 2_048]))
def test_cuts_cover_every_document_once_in_slices_of_enough_rows(given_documents, finer, least_rows):
    lengths, ranks, part = given_documents
    work = work_of(given_documents)

    of, starts, stops = kernels.cut_evenly(
        lengths, ranks, work, np.full(len(work), work.max() / finer), least_rows, 128, part, RATES
    )

    for document, (length, count) in enumerate(zip(lengths, ranks)):
        mine = of == document
        assert starts[mine].tolist() == [0, *stops[mine][:-1].tolist()]
        assert stops[mine][-1] == length
        assert (stops[mine][:-1] % (128 * count) == 0).all()
        if mine.sum() > 1:
            assert (stops[mine] - starts[mine]).min() >= least_rows * count
    assert (np.diff(of) >= 0).all()


@pytest.mark.parametrize("parts", [2, 5, 8])
def test_cuts_are_those_of_the_closed_form_where_rates_are_equal(parts):
    """b_i = (-c2 + sqrt(c2² + 2·c1·W·i / k)) / c1, at c1·x + c2 seconds for the token after x others."""
    rates = COST.replace(mode="flops").rates(Mesh())
    length = 262_144
    lengths, one = np.array([length], np.int32), np.ones(1, np.int32)
    work = reference.document_seconds(lengths, one, 8_192.0, 1.0, rates)

    _, _, stops = kernels.cut_evenly(lengths, one, work, work / parts, 512, 1, 1.0, rates)

    c1 = 3.5 * rates.attention_flops * rates.forward_s[0, 0]
    c2 = 3 * (rates.linear_flops + rates.head_flops / 32) * rates.gemm_s[0] + c1 / 2
    whole = c1 * length**2 / 2 + c2 * length
    ends = [(-c2 + math.sqrt(c2**2 + 2 * c1 * whole * i / parts)) / c1 for i in range(1, parts + 1)]
    assert len(stops) == parts
    assert stops.tolist() == pytest.approx(ends, abs=2)


def test_slices_of_a_long_document_cost_alike_at_calibrated_rates():
    lengths, one = np.array([262_144], np.int32), np.ones(1, np.int32)
    work = reference.document_seconds(lengths, one, 8_192.0, 1.0, RATES)

    _, starts, stops = kernels.cut_evenly(lengths, one, work, work / 12, 2_048, 128, 1.0, RATES)

    columns = (np.arange(len(stops) + 1), starts, stops, np.ones(len(stops)))
    priced = kernels.price(*(column.astype(np.int32) for column in columns), RATES)
    seconds = priced[:, [0, 2, 4]].sum(axis=1)
    assert len(stops) == 12
    # Late slices have fewer rows, whose rates are lower than those that the cuts count with.
    assert seconds.max() / seconds.mean() < 1.15
    assert (np.diff(stops - starts) <= 0).all()
