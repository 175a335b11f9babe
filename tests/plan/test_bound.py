"""The lower bound is what is written out by hand here: work, the longest document, filling, gradients."""

from __future__ import annotations

import numpy as np
import pytest
from tests.plan.test_step import cost_of

import varlen as vl
from varlen.plan.bound import lower_bound

COST = cost_of(recompute="none", mode="flops")
MODEL, HARDWARE = COST.model, COST.hardware
GEMM_S = 1e-12 / HARDWARE.gemm.tflops.max()
PAIR_S = 1e-12 / HARDWARE.attention[0].tflops.max() * 4 * MODEL.heads * MODEL.head_dim
EXACT = 1e-9


def attention_s(length: int) -> float:
    """A layer's, forward: every token attends to itself and all before it."""
    return PAIR_S * length * (length + 1) / 2


def layer_s(length: int) -> float:
    """A layer's, both passes: attention's backward costs 2.5 times its forward, a product's twice."""
    return 3.5 * attention_s(length) + 3 * length * 2 * MODEL.linear_parameters_per_layer * GEMM_S


def stages_s(length: int, mesh: vl.Mesh) -> np.ndarray:
    """A document's on each stage, both passes; the last has the vocabulary head."""
    seconds: np.ndarray = COST.stages(mesh).layers * layer_s(length)
    seconds[-1] += 3 * length * 2 * MODEL.head_parameters * GEMM_S
    return seconds


def filling_s(rows: int, mesh: vl.Mesh) -> np.ndarray:
    """When each stage can begin: the smallest MicroPack has gone forward through those before it."""
    latency_s, row_s = COST.send_s(mesh)
    forward = rows * (attention_s(1) + 2 * MODEL.linear_parameters_per_layer * GEMM_S)
    each = COST.stages(mesh).layers[:-1] * forward + latency_s + rows * row_s
    return np.cumsum(np.append(0.0, each))


def test_a_short_document_takes_its_own_work() -> None:
    mesh = vl.Mesh()

    found = lower_bound(np.array([0, 700], np.int32), COST, mesh)

    expected = MODEL.layers * layer_s(700) + 6 * 700 * MODEL.head_parameters * GEMM_S
    assert found.work_s == pytest.approx(expected, rel=EXACT)
    assert found.chain_s == pytest.approx(expected, rel=EXACT)
    assert found.seconds == pytest.approx(expected, rel=EXACT)


def test_a_giant_is_done_by_its_own_ranks_behind_a_pipeline_that_fills() -> None:
    mesh, rows = vl.Mesh(dp=4, pp=4), 2048
    lengths = np.array([90_000, 500, 700], np.int32)

    found = lower_bound(lengths, COST, mesh, least_rows=rows, most_merged_ranks=1)

    chain_s = (filling_s(rows, mesh) + stages_s(90_000, mesh)).max()
    sync_s = COST.gradient_sync_s(mesh).min()
    assert sync_s > 0
    assert found.chain_s == pytest.approx(chain_s, rel=EXACT)
    assert found.seconds == pytest.approx(chain_s + sync_s, rel=EXACT)


def test_many_documents_are_shared_evenly_by_all_ranks_behind_a_pipeline_that_fills() -> None:
    mesh, rows = vl.Mesh(dp=2, pp=4), 512
    lengths = np.array([3000, 2500, 900] * 30, np.int32)

    found = lower_bound(lengths, COST, mesh, least_rows=rows)

    work = 30 * sum(stages_s(length, mesh) for length in (3000, 2500, 900)) / mesh.dp
    assert found.work_s == pytest.approx((filling_s(rows, mesh) + work).max(), rel=EXACT)
    assert found.seconds == pytest.approx(found.work_s + COST.gradient_sync_s(mesh).min(), rel=EXACT)
    filling = filling_s(rows, mesh)[-1]
    assert 0 < filling < 0.1 * found.work_s
