"""What a refusal says would fit does fit, and a token more doesn't."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from rarely import mostly
from sliced import one_gpu_plan
from test_plan_step import cost_of

import varlen as vl
from varlen.errors import PlanError
from varlen.plan.micropack import _groupings
from varlen.simulate.graph import stage_costs

SHORT = (900, 4000, 17_000, 60, 2500)
CASES: list[tuple[Any, vl.Mesh, int, int]] = [
    ("micropack", vl.Mesh(dp=1, pp=2, tp=8), 5_000_000, 1),
    ("micropack", vl.Mesh(dp=3, pp=2, tp=8), 9_000_000, 2),
    ("micropack", vl.Mesh(dp=16, pp=1, tp=8), 30_000_000, 16),
    ("micropack", vl.Mesh(dp=2, pp=2, cp=2, tp=4, sharding="parameters"), 20_000_000, 4),
    ("sliced", vl.Mesh(dp=4, pp=2, tp=8), 5_000_000, 1),
    ("dynamic_cp", vl.Mesh(dp=4, pp=2, tp=8), 20_000_000, 4),
    ("packed", vl.Mesh(dp=4, pp=2, tp=8), 3_000_000, 1),
    ("balanced", vl.Mesh(dp=4, pp=2, tp=8), 3_000_000, 1),
]
"""Method, mesh, tokens of a document that is too long, and the ranks that may share it."""


def long_cost(**settings: Any) -> vl.CostModel:
    cost = cost_of(**settings)
    return cost.replace(model=replace(cost.model, max_positions=None))


def refused(lengths: Any, **settings: Any) -> str:
    with pytest.raises(PlanError) as caught:
        vl.plan_step(lengths, **settings)
    return str(caught.value)


def number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, text
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize(("method", "mesh", "longest", "ranks"), mostly([*CASES[:2], *CASES[3:]], CASES))
def test_a_document_of_the_length_that_would_fit_does_and_a_longer_one_does_not(
    method: Any, mesh: vl.Mesh, longest: int, ranks: int
) -> None:
    asked: dict[str, Any] = {"cost": long_cost(), "mesh": mesh, "method": method}

    said = refused([*SHORT, longest, longest - 1], **asked)

    assert said.startswith(f"document {len(SHORT)} has {longest:,} tokens, too many for the {ranks} rank")
    assert "(2 documents are too long)" in said
    fits = number(r"alone, documents of up to ([\d,]+) tokens would fit", said)
    assert vl.plan_step([fits], **asked).num_tokens == fits
    assert f"has {fits + 1:,} tokens" in refused([fits + 1], **asked)
    wider = replace(mesh, cp=number(r"or a mesh of cp=(\d+)$", said))
    assert vl.plan_step([*SHORT, longest], **(asked | {"mesh": wider})).num_documents == len(SHORT) + 1


def test_without_merging_a_document_has_one_rank() -> None:
    search = vl.Search(merges=False, repairs=False)
    asked: dict[str, Any] = {"cost": long_cost(), "mesh": vl.Mesh(dp=4, pp=2, tp=8), "search": search}

    said = refused([9_000_000], **asked)

    assert "too many for the 1 rank that may share it (1 document is too long)" in said
    assert "(recompute='full', offload='none', and no more of them may be tried)" in said
    fits = number(r"up to ([\d,]+) tokens", said)
    assert vl.plan_step([fits], **asked).num_merged == 0
    refused([fits + 1], **asked)


def test_documents_that_fit_alone_and_not_beside_each_other_are_said_to() -> None:
    lengths = np.full(8, 700_000, np.int32)
    asked: dict[str, Any] = {"cost": long_cost(), "mesh": vl.Mesh(pp=4, tp=4), "method": "packed"}

    said = refused(lengths, **asked)

    assert said.startswith("no plan of this method fits into the 73.6 GB")
    assert "(up to recompute='full', offload='kv')" in said
    assert "though each document would alone; use another method" in said
    assert vl.plan_step(lengths[:1], **asked).num_tokens == 700_000
    assert vl.plan_step(lengths, **(asked | {"method": "micropack"})).num_tokens == 8 * 700_000


@pytest.mark.parametrize(
    ("model", "dp", "tp"), [("llama-2-70b", 1, 2), ("llama-2-70b", 16, 1), ("llama-2-7b", 2, 1)]
)
def test_states_that_do_not_fit_are_said_to_with_the_least_mesh_and_sharding_that_hold_them(
    model: str, dp: int, tp: int
) -> None:
    cost, mesh = cost_of(model), vl.Mesh(dp=dp, tp=tp)

    def holds(on: vl.Mesh) -> bool:
        return bool((cost.memory(on).state_bytes < cost.limit_bytes).all())

    said = refused([100], cost=cost, mesh=mesh)

    assert re.match(r"parameters, gradients and optimizer states take [\d,.]+ GB on stage 0 of 1", said)
    least, pp, wide = (
        number(pattern, said) for pattern in (r"at least ([\d,]+) would", r"\(pp=(\d+)", r", tp=(\d+);")
    )
    assert least == pp * wide
    assert holds(replace(mesh, pp=pp, tp=wide))
    heads = cost.model.heads
    fewer = [(a, b) for a in range(1, 81) for b in (1, 2, 4, 8, 16) if a * b < least and heads % b == 0]
    assert not any(holds(replace(mesh, pp=a, tp=b)) for a, b in fewer if a <= cost.model.layers)
    sharded = number(r"sharding='parameters' with dp=([\d,]+)", said) if "with dp" in said else dp
    assert holds(replace(mesh, dp=sharded, sharding="parameters"))
    assert sharded == dp or not holds(replace(mesh, dp=sharded // 2, sharding="parameters"))


@pytest.mark.parametrize("kernels", ["fused", "eager"])
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_a_document_that_some_plan_holds_is_never_left_out_unseen(kernels: Any, kv_heads: int) -> None:
    length, cost = 131_072, long_cost(kernels=kernels, recompute="full")
    cost = cost.replace(model=replace(cost.model, kv_heads=kv_heads))
    peaks = []
    for count in (16, 24, 32):
        cuts = pairwise(np.linspace(0, length, count + 1).astype(int).tolist())
        plan = one_gpu_plan([length], [[(0, *each)] for each in cuts], recompute="full")
        peaks.append(float(vl.simulate(plan, cost).peak_bytes))
    enough = replace(cost.hardware, memory_bytes=1.0001 * min(peaks) / cost.memory_fraction)
    costs = stage_costs(cost.replace(hardware=enough), vl.Mesh())

    assert list(_groupings(np.array([length], np.int32), costs, vl.Search()))
