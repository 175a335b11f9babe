"""Steps of many documents: each is looked at a bounded number of times, so that planning takes time in proportion."""

import resource
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import varlen as vl
from varlen.cost import kernels as cost_kernels
from varlen.plan import kernels, kernels_compose, micropack
from varlen.plan.assign import Groups, documents_of_ranks
from varlen.plan.baselines import dynamic_cp, packed
from varlen.plan.check import check_plan
from varlen.plan.micropack import narrowed

MESH = vl.Mesh(dp=16, pp=4, tp=8)
COST = vl.CostModel(model=vl.ModelShape.named("llama-3-8b"), hardware=vl.Hardware.named("h100"))


def short_ones(count: int) -> np.ndarray:
    """Lengths of 600 tokens in the mean, the longest some 40 times that."""
    return np.random.default_rng(0).lognormal(5.9, 1.0, count).astype(np.int32) + 1


@pytest.mark.parametrize("count", [5_000, 100_000])
def test_each_of_many_documents_is_weighed_dealt_and_priced_a_bounded_number_of_times(
    count, replace_kernel, monkeypatch
):
    looks: dict[str, float] = defaultdict(float)

    def counted(
        module: Any, name: str, replace: Callable[[Any, str, Any], None], place: int | None = None
    ) -> None:
        original = getattr(module, name)

        def call(*given: Any, **settings: Any) -> Any:
            looks[name] += 1 if place is None else len(given[place]) / count
            return original(*given, **settings)

        replace(module, name, call)

    counted(cost_kernels, "price", replace_kernel, 1)
    counted(cost_kernels, "document_seconds", replace_kernel, 0)
    counted(kernels_compose, "fill_lightest", replace_kernel, 0)
    counted(kernels, "karmarkar_karp", replace_kernel)
    counted(micropack, "grouped", monkeypatch.setattr)
    counted(micropack, "documents_of_ranks", monkeypatch.setattr)

    plan = vl.plan_step(short_ones(count), cost=COST, mesh=MESH)

    check_plan(plan, COST)
    # Of every way to share documents once, however many sizes of shared MicroPacks are tried with it.
    assert looks["documents_of_ranks"] == looks["grouped"]
    assert looks["document_seconds"] <= 6 * len(narrowed(MESH, vl.Search()))
    # A close look tries 24 settings on a block of ranks at most, with weight gradients apart and within.
    assert looks["fill_lightest"] <= 2 * 24
    # Whole documents are priced once for each way to divide them into micro-batches that is tried.
    assert looks["price"] <= 2 * 24 + 8 + 50 * len(narrowed(MESH, vl.Search()))
    # Dealt from heavy to light so many are even already; only balanced whole documents are always differenced.
    assert looks["karmarkar_karp"] <= 8 * len(narrowed(MESH, vl.Search()))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 5)), max_size=30))
def test_ranks_hold_what_is_theirs_shared_documents_first_and_then_by_work(documents):
    num_ranks = np.array([2**level for level, _, _ in documents], np.int32)
    blocks = np.array([block for _, block, _ in documents], np.int32)
    lengths = np.array([length for _, _, length in documents], np.int32)
    first = np.where(lengths > 0, blocks % (8 // num_ranks) * num_ranks, -1).astype(np.int32)
    made = Groups(first_ranks=first, num_ranks=num_ranks, work=lengths * 0.5)

    for rank, held in enumerate(documents_of_ranks(made, lengths, 8)):
        mine = [
            d for d in range(lengths.size) if first[d] >= 0 and first[d] <= rank < first[d] + num_ranks[d]
        ]
        mine.sort(key=lambda d: (-num_ranks[d], -lengths[d], d))
        assert held.document_ids.tolist() == mine
        assert held.lengths.tolist() == lengths[mine].tolist()
        assert held.num_ranks.tolist() == num_ranks[mine].tolist()
        assert held.work.tolist() == made.work[mine].tolist()


@pytest.mark.soak
@pytest.mark.parametrize("sigma", [1.0, 2.0])
def test_a_million_documents_are_planned(sigma):
    lengths = np.random.default_rng(0).lognormal(np.log(600) - sigma**2 / 2, sigma, 1_000_000)
    mesh = vl.Mesh(dp=64, pp=4, tp=8)

    plan = vl.plan_step(np.clip(lengths, 1, 131_072).astype(np.int32), cost=COST, mesh=mesh)

    check_plan(plan, COST)
    assert plan.num_documents == 1_000_000


@pytest.mark.parametrize("method", ["balanced", "dynamic_cp"])
def test_micro_batches_of_many_documents_are_as_many_as_can_be_filled_in_time(method):
    steps = {"balanced": packed._MOST_STEPS, "dynamic_cp": dynamic_cp.MOST_STEPS}[method]
    mesh = vl.Mesh(dp=4, pp=4, tp=4)

    many = packed.micro_batch_counts(short_ones(100_000), mesh, steps)
    few = packed.micro_batch_counts(short_ones(4_000), mesh, steps)

    assert many[-1] * 4 * 100_000 <= steps
    assert few[-1] == short_ones(4_000).sum() // (4 * packed.LEAST_TOKENS)


@pytest.mark.soak
@pytest.mark.parametrize("method", ["packed", "balanced", "sliced", "dynamic_cp", "micropack"])
@pytest.mark.parametrize("mesh", [vl.Mesh(dp=4, pp=4, tp=4), vl.Mesh(dp=16, pp=4, tp=8)], ids=str)
def test_a_step_of_100_000_documents_is_planned_by_every_method(method, mesh):
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts over from what other tests hold
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()

    plan = vl.plan_step(short_ones(100_000), cost=COST, mesh=mesh, method=method)

    check_plan(plan, COST)
    assert time.process_time() - begun < 240
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2_000_000
