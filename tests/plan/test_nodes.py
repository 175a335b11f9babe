"""Ranks that share a document stand in one node if one is enough, and more nodes are shared only where that pays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.plan.test_step import cost_of
from tests.support.rarely import examples

import varlen as vl
from varlen.plan.assign import grouped, merged_sizes
from varlen.plan.compose import TYPICAL_ROWS, seconds_of

NODE = vl.Hardware.named("h100").gpus_per_node
MESHES = [vl.Mesh(dp=dp, cp=cp, tp=tp, pp=2) for dp in (3, 8, 12, 32) for cp in (1, 2) for tp in (1, 2, 4, 8)]


def nodes_used(first_ranks: np.ndarray, num_ranks: np.ndarray, mesh: vl.Mesh) -> np.ndarray:
    """How many nodes each shared document touches, and how many would be enough; `[2, shared]`."""
    width = mesh.cp * mesh.tp  # GPUs are numbered tp fastest, then cp, then dp
    shared = num_ranks > 1
    first, last = first_ranks[shared] * width, (first_ranks + num_ranks)[shared] * width - 1
    stages = mesh.dp * width * np.arange(mesh.pp)[:, None]
    touched = ((stages + last) // NODE - (stages + first) // NODE + 1).max(axis=0)
    return np.stack([touched, -(-(last - first + 1) // NODE)])


@given(
    st.sampled_from(MESHES),
    st.lists(st.tuples(st.integers(1, 200_000), st.integers(0, 5)), min_size=1, max_size=40),
)
def test_no_group_touches_more_nodes_than_it_needs(mesh: vl.Mesh, documents: list[tuple[int, int]]) -> None:
    assume(mesh.dp * mesh.cp * mesh.tp % NODE == 0)  # else stages begin within a node
    lengths = np.array([length for length, _ in documents], np.int32)
    sizes = np.array([2**level for _, level in documents], np.int32)
    sizes = np.minimum(sizes, 2 ** int(np.log2(mesh.dp))).astype(np.int32)

    groups = grouped(lengths, sizes, mesh.dp, cost_of().rates(mesh))

    touched, enough = nodes_used(groups.first_ranks, groups.num_ranks, mesh)
    assert (touched == enough).all()
    assert (groups.first_ranks + groups.num_ranks <= mesh.dp).all()


@pytest.mark.parametrize("method", ["micropack", "dynamic_cp"])
@pytest.mark.parametrize("mesh", [vl.Mesh(dp=16, pp=2, tp=2), vl.Mesh(dp=8, pp=1, cp=2, tp=2)])
@examples(1, 3)
@given(seed=st.integers(0, 1000))
def test_plans_share_within_nodes(method: Any, mesh: vl.Mesh, seed: int) -> None:
    lengths = np.append(
        np.random.default_rng(seed).integers(100, 8000, 40), [120_000, 60_000, 60_000, 30_000]
    )

    plan = vl.plan_step(lengths, cost=cost_of(), mesh=mesh, method=method)

    assert plan.num_merged > 0
    touched, enough = nodes_used(plan.first_ranks, plan.num_ranks, mesh)
    assert (touched == enough).all()


def test_a_document_is_shared_beyond_its_node_only_where_that_pays() -> None:
    mesh, cost = vl.Mesh(dp=32, tp=2), cost_of()
    lengths = np.array([4_000, 12_000, 24_000, 60_000, 200_000, 1_000_000], np.int32)

    def sizes(rates: Any) -> list[int]:
        return [
            int(merged_sizes(one, 32, rates, threshold=0.001, most_ranks=32, most_rows=1e12)[0])
            for one in np.split(lengths, lengths.size)
        ]

    one_node = cost.replace(hardware=replace(cost.hardware, gpus_per_node=64))
    found = np.array(sizes(cost.rates(mesh)), np.int32)

    assert sizes(one_node.rates(mesh)) == [32] * 6
    assert found.tolist() == sorted(found)
    assert found[0] == NODE // mesh.tp
    assert found[-1] == 32
    taken, wider = (seconds_of(lengths, more * found, TYPICAL_ROWS, cost.rates(mesh)) for more in (1, 2))
    assert (wider[found < 32] >= 0.8 * taken[found < 32]).all()
