"""Each thing that the search tries brings something on the step that it is there for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.plan.test_large import took
from tests.plan.test_step import cost_of, long_tailed

import varlen as vl
from varlen.plan import micropack
from varlen.plan.api import _work
from varlen.plan.baselines.dynamic_cp import dynamic_cp_candidates
from varlen.plan.baselines.packed import balanced_candidates, micro_batch_counts
from varlen.plan.score import best_plan, score

ROOMY = vl.Hardware(
    **{
        name: getattr(vl.Hardware.named("h100"), name)
        for name in vl.Hardware.__dataclass_fields__
        if name != "memory_bytes"
    },
    memory_bytes=1e13,
)


def test_a_document_over_a_rank_s_share_of_work_is_shared_however_much_memory_there_is() -> None:
    cost, mesh = cost_of("llama-3-8b", hardware=ROOMY, recompute="none"), vl.Mesh(dp=4, tp=8)
    lengths = np.array([8000, *[200] * 20], np.int32)

    plan = vl.plan_step(lengths, cost=cost, mesh=mesh)
    alone_s = took(lengths, cost, mesh, search=vl.Search(merges=False))

    assert plan.num_ranks[0] > 1
    assert plan.num_merged == 1
    assert vl.simulate(plan, cost).makespan_s < 0.75 * alone_s


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_small_micropacks_fill_a_deep_pipeline_faster(recompute: Any) -> None:
    cost, mesh = cost_of(recompute=recompute), vl.Mesh(pp=8, tp=8)
    lengths = long_tailed(150, 8000)

    plan = vl.plan_step(lengths, cost=cost, mesh=mesh)
    even_s = took(lengths, cost, mesh, search=vl.Search(grades=False))

    rows = np.add.reduceat(plan.forward.stops - plan.forward.starts, plan.forward.slice_offsets[:-1])
    assert rows[0] < 0.8 * np.median(rows)
    assert vl.simulate(plan, cost).makespan_s < 0.975 * even_s


def test_the_way_to_share_that_a_quick_look_likes_best_is_not_always_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cost = cost_of()
    steps = [(long_tailed(60, 80_000, seed), vl.Mesh(dp=4, pp=4, tp=4)) for seed in range(8)]

    several = [took(lengths, cost, mesh) for lengths, mesh in steps]
    monkeypatch.setattr(micropack, "_KEPT", 1)
    first = [took(lengths, cost, mesh) for lengths, mesh in steps]

    assert sum(several) < 0.999 * sum(first)


def counted(lengths: Any, cost: vl.CostModel, mesh: vl.Mesh, method: Any) -> dict[int, float]:
    """Seconds of the best plan at each number of micro-batches, one for one, inf where none fits."""
    work, longest = _work(lengths, cost, mesh), int(lengths.max())
    found = {}
    for count in micro_batch_counts(lengths, mesh):
        if method == "balanced":
            candidates = balanced_candidates(lengths, work[:, 0], mesh, counts=(count,))
        else:
            candidates = dynamic_cp_candidates(lengths, work, mesh, -(-longest // 128) * 128, counts=(count,))
        plan = best_plan(lambda _, c=candidates: c, (0,), lengths, cost, mesh, method)
        found[count] = score(plan, cost) if plan else float("inf")
    return found


@pytest.mark.parametrize("method", ["balanced", "dynamic_cp"])
def test_peers_have_as_many_micro_batches_as_is_best_for_them(method: Any) -> None:
    cost, mesh = cost_of(recompute="none"), vl.Mesh(dp=2, pp=2, tp=8)
    lengths = long_tailed(600, 20_000)

    every = counted(lengths, cost, mesh, method)
    best = min(every, key=lambda count: every[count])
    found_s = took(lengths, cost, mesh, method=method, search=vl.Search(repairs=False))

    assert max(every) > 4 * best > 4 * 12 * mesh.pp
    assert found_s <= every[best] * (1 + 1e-9)


@pytest.mark.soak
def test_peers_are_given_small_micro_batches_where_memory_wants_them() -> None:
    cost, mesh = cost_of("llama-3-8b", recompute="none"), vl.Mesh(dp=8)
    lengths = np.full(2000, 2000, np.int32)

    plans = [vl.plan_step(lengths, cost=cost, mesh=mesh, method=m) for m in ("balanced", "dynamic_cp")]

    assert all(plan.forward.counts.max() > 12 for plan in plans)
