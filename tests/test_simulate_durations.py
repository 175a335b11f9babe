"""A plan is priced by the cost model: layers and head of each chunk, rows of each message, gathers and syncs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_plans import random_plan, step_plans

from varlen.cost import kernels
from varlen.cost.hardware import Hardware
from varlen.cost.model import CostModel
from varlen.cost.shape import ModelShape
from varlen.simulate.api import simulate
from varlen.simulate.graph import durations
from varlen.step_plan import KINDS, Mesh, MicroPacks, StepPlan

COST = CostModel(model=ModelShape.named("llama-3-8b"), hardware=Hardware.named("h100"))


def in_blocks(plan: StepPlan, rows: int = 512) -> StepPlan:
    """The same plan with documents as long as on real hardware."""

    def longer(packs: MicroPacks) -> MicroPacks:
        return dataclasses.replace(packs, starts=packs.starts * rows, stops=packs.stops * rows)

    forward, backward = longer(plan.forward), longer(plan.backward)
    return dataclasses.replace(plan, lengths=plan.lengths * rows, forward=forward, backward=backward)


@given(step_plans())
def test_every_chunk_takes_its_layers_and_the_last_the_head(plan: StepPlan) -> None:
    plan = in_blocks(plan)

    found = durations(plan, COST)

    packs = plan.forward
    shared = plan.num_ranks[packs.document_ids]
    rates, stages = COST.rates(plan.mesh), COST.stages(plan.mesh)
    priced = kernels.price(packs.slice_offsets, packs.starts, packs.stops, shared, rates)
    for chunk in range(plan.mesh.num_chunks):
        expected = stages.layers[chunk] * priced[:, 0]
        expected += priced[:, 1] if chunk == plan.mesh.num_chunks - 1 else 0
        assert found.forward[chunk] == pytest.approx(expected)
    latency_s, row_s = COST.send_s(plan.mesh)
    assert found.send_forward == pytest.approx(row_s * found.forward_rows)
    assert found.latency_s == latency_s
    tokens = np.zeros(packs.num_micropacks)
    np.add.at(tokens, packs.micropack_of_slice, (packs.stops - packs.starts) / shared)
    assert found.forward_rows == pytest.approx(tokens / plan.mesh.cp)


@given(step_plans())
def test_of_eager_layers_the_head_runs_in_backward_tasks_alone(plan: StepPlan) -> None:
    plan = in_blocks(plan)
    # The same MicroPacks in both passes, so that what moves from one to the other is as much.
    plan = dataclasses.replace(plan, backward=plan.forward)

    fused, eager = durations(plan, COST), durations(plan, COST.replace(kernels="eager"))

    layers = COST.stages(plan.mesh).layers[-1]
    packs = plan.forward
    shared = plan.num_ranks[packs.document_ids]
    priced = kernels.price(packs.slice_offsets, packs.starts, packs.stops, shared, COST.rates(plan.mesh))
    assert eager.forward[-1] == pytest.approx(layers * priced[:, 0])
    assert eager.weight[-1] == pytest.approx(layers * priced[:, 4] * plan.splits_backward)
    for chunk in range(plan.mesh.num_chunks):
        totals = [seconds.forward + seconds.backward + seconds.weight for seconds in (fused, eager)]
        assert totals[1][chunk] == pytest.approx(totals[0][chunk])
        if chunk < plan.mesh.num_chunks - 1:
            assert np.array_equal(eager.forward[chunk], fused.forward[chunk])


@given(st.integers(0, 2**32 - 1))
def test_a_split_backward_takes_as_long_as_a_whole_one(seed: int) -> None:
    split = in_blocks(random_plan(seed, Mesh(dp=2, pp=2), True, 4))

    parts = durations(split, COST)
    whole = durations(dataclasses.replace(split, splits_backward=False), COST)

    assert parts.weight.min() > 0
    assert whole.weight.max() == 0
    assert parts.backward + parts.weight == pytest.approx(whole.backward)


@pytest.mark.parametrize("sharding", ["none", "optimizer", "parameters"])
def test_gathers_come_with_sharded_parameters_and_the_sync_without(sharding: str) -> None:
    mesh = Mesh(dp=2, pp=2, sharding=sharding)  # type: ignore[arg-type]

    found = durations(in_blocks(random_plan(0, mesh, False, 4)), COST)

    assert (found.gather > 0).all() == (sharding == "parameters")
    assert (found.sync > 0).all() == (sharding != "parameters")


@given(step_plans(), st.booleans(), st.booleans())
def test_real_costs_stay_above_work_and_chain(plan: StepPlan, overlap: bool, contention: bool) -> None:
    plan = in_blocks(plan)
    seconds = durations(plan, COST)

    timeline = simulate(plan, COST, overlap=overlap, contention=contention)

    work = seconds.forward.sum() + seconds.backward.sum() + seconds.weight.sum()
    assert timeline.busy_s.sum() == pytest.approx(work)
    least = max(work / timeline.busy_s.size, seconds.forward.sum(0).max())
    assert timeline.makespan_s >= least * (1 - 1e-12)  # sums of floats round
    path = timeline.critical_path
    waited = timeline.starts_s[path[1:]] - timeline.stops_s[path[:-1]]
    lengths = (timeline.stops_s - timeline.starts_s)[path]
    assert lengths.sum() + waited.sum() == pytest.approx(timeline.makespan_s)
    assert timeline.memory_limit_bytes == COST.limit_bytes


def test_the_recomputation_of_the_plan_is_what_is_simulated() -> None:
    plan = in_blocks(random_plan(1, Mesh(pp=2), False, 4))

    kept = simulate(plan, COST.replace(recompute="full"))
    again = simulate(dataclasses.replace(plan, recompute="full"), COST)

    assert kept.makespan_s == simulate(plan, COST).makespan_s
    assert again.makespan_s > kept.makespan_s
    assert again.peak_bytes < kept.peak_bytes
    assert (again.kinds < KINDS).sum() == (kept.kinds < KINDS).sum()
