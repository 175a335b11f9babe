"""What GPUs that share a document take, and what they send each other: keys and values, or queries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.cost.test_price import COST, one

from varlen.cost.rates import FORWARD_LAYER, INPUT_LAYER, ROWS, WEIGHT_LAYER
from varlen.step_plan import Mesh

OPEN = COST.replace(exchange_overlap=0.0)
"""Nothing hides the exchange of shared documents."""


def test_ranks_that_share_a_slice_take_a_share_of_it_and_an_exchange() -> None:
    rates = OPEN.rates(Mesh(dp=8, tp=2))
    quiet = rates._replace(link_latency_s=np.zeros(2), link_s_per_byte=np.zeros(2), launch_s=0.0)

    alone, shared = one(0, 65_536, quiet), one(0, 65_536, quiet, num_ranks=4)

    assert shared[ROWS] == 16_384
    # A quarter of the work, at the lower rate of a quarter of the rows.
    assert alone[FORWARD_LAYER] / 4 < shared[FORWARD_LAYER] < alone[FORWARD_LAYER] / 4 * 1.05
    exchange = one(0, 65_536, rates, num_ranks=4)[FORWARD_LAYER] - shared[FORWARD_LAYER] - 30e-6
    # Keys and values of 4 heads a GPU, three quarters of which come from others within the node.
    assert exchange == pytest.approx(10e-6 + 65_536 * 4 * 256 * 2 * 0.75 / 360e9)


def test_context_parallel_gpus_count_like_merged_ranks() -> None:
    merged = one(4_096, 20_480, COST.rates(Mesh(dp=8, tp=2)), num_ranks=4)
    parallel = one(4_096, 20_480, COST.rates(Mesh(dp=2, cp=4, tp=2)))

    np.testing.assert_allclose(merged, parallel, rtol=1e-12)


def test_an_exchange_between_nodes_takes_the_network() -> None:
    rates = OPEN.rates(Mesh(dp=16, tp=2))
    quiet = rates._replace(link_latency_s=np.zeros(2), link_s_per_byte=np.zeros(2))

    exchange = one(0, 65_536, rates, num_ranks=8) - one(0, 65_536, quiet, num_ranks=8)

    assert rates.node_group == 4
    moved = 65_536 * 2_048 * 7 / 8 / 50e9
    assert exchange[FORWARD_LAYER] == pytest.approx(20e-6 + moved)
    # Keys and values again, and their gradients.
    assert exchange[INPUT_LAYER] == pytest.approx(2 * (20e-6 + moved))
    assert exchange[WEIGHT_LAYER] == 0


def test_a_late_slice_sends_its_queries_where_that_is_less_than_all_keys() -> None:
    rates = OPEN.rates(Mesh(dp=8, tp=1))._replace(link_latency_s=np.zeros(2))
    quiet = rates._replace(link_s_per_byte=np.zeros(2))

    exchange = one(1_000_000, 1_001_024, rates, 4) - one(1_000_000, 1_001_024, quiet, 4)

    # bf16 queries out and outputs back; then queries and output gradients out, and query gradients back.
    row = 1_024 * 2 * 32 * 128 * 0.75 / 360e9
    assert exchange[FORWARD_LAYER] == pytest.approx(2 * row)
    assert exchange[INPUT_LAYER] == pytest.approx(3 * row)


@pytest.mark.parametrize(("recompute", "back"), [("none", 3), ("full", 4)])
def test_the_engines_layers_gather_every_key_however_few_rows_see_them(recompute: Any, back: int) -> None:
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


def test_an_exchange_hides_behind_attention() -> None:
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
