"""Plans are priced by the cost model, and equal costs give the closed forms of each schedule."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.step_plans import durations_of, equal_plan, memory_of, random_plan, step_plans, zero_bubble

from varlen.cost import kernels
from varlen.cost.hardware import Hardware
from varlen.cost.model import CostModel
from varlen.cost.shape import ModelShape
from varlen.errors import SettingError
from varlen.simulate.api import run_plan, simulate
from varlen.simulate.graph import durations
from varlen.simulate.schedules import interleaved, one_f_one_b, sliced
from varlen.simulate.timeline import Timeline
from varlen.step_plan import KINDS, Mesh, MicroPacks, StepPlan

SECONDS = st.integers(0, 9).map(float)


def run_1f1b(pp: int, count: int, forward: float, backward: float, dp: int = 1) -> Timeline:
    plan = equal_plan(one_f_one_b(pp, count), count, Mesh(dp=dp, pp=pp))
    return run_plan(plan, durations_of(plan, forward, backward), memory_of(plan))


@given(st.integers(1, 6), st.integers(1, 12), SECONDS, SECONDS, st.integers(1, 2))
def test_1f1b_takes_exactly_what_its_closed_form_says(pp, count, forward, backward, dp):
    timeline = run_1f1b(pp, count, forward, backward, dp)

    assert timeline.makespan_s == (count + pp - 1) * (forward + backward)


@given(st.integers(1, 6), st.integers(1, 12))
def test_1f1b_holds_as_many_micropacks_as_stages_follow(pp, count):
    timeline = run_1f1b(pp, count, 1.0, 2.0)

    assert timeline.peaks_bytes.tolist() == [[min(count, pp - stage) for stage in range(pp)]]


@given(st.integers(1, 6), st.integers(1, 12))
def test_the_bubble_is_that_of_filling_and_draining(pp, count):
    timeline = run_1f1b(pp, count, 1.0, 2.0, dp=2)

    expected = (pp - 1) / (count + pp - 1)
    assert timeline.bubble_ratio == pytest.approx(expected)
    assert timeline.bubble_ratios == pytest.approx(np.full((2, pp), expected))
    assert timeline.busy_s.tolist() == [[3.0 * count] * pp] * 2
    assert timeline.imbalance == 1.0


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 4), SECONDS, SECONDS)
def test_interleaving_divides_the_bubble_by_the_chunks(pp, virtual, rounds, forward, backward):
    count = pp * rounds
    plan = equal_plan(interleaved(pp, virtual, count), count, Mesh(pp=pp, virtual_stages=virtual))

    timeline = run_plan(plan, durations_of(plan, forward, backward), memory_of(plan))

    assert timeline.makespan_s == (count * virtual + pp - 1) * (forward + backward)


@given(st.integers(2, 5), st.integers(2, 4), st.integers(1, 4))
def test_interleaving_holds_more_chunks_than_1f1b(pp, virtual, rounds):
    count = pp * rounds
    plan = equal_plan(interleaved(pp, virtual, count), count, Mesh(pp=pp, virtual_stages=virtual))

    timeline = run_plan(plan, durations_of(plan, 1.0, 2.0), memory_of(plan))

    ahead = [2 * (pp - stage - 1) + (virtual - 1) * pp + 1 for stage in range(pp)]
    assert timeline.peaks_bytes.tolist() == [[min(count * virtual, held) for held in ahead]]


@given(st.integers(1, 6), st.integers(0, 8), SECONDS, SECONDS, SECONDS)
def test_zero_bubble_leaves_exactly_the_bubble_of_its_paper(pp, more, forward, inputs, weights):
    count = pp + more
    weights = min(weights, inputs, forward)
    plan = equal_plan(zero_bubble(pp, count), count, Mesh(pp=pp), splits_backward=True)

    timeline = run_plan(plan, durations_of(plan, forward, inputs, weights), memory_of(plan))

    work = count * (forward + inputs + weights)
    assert timeline.makespan_s == work + (pp - 1) * (forward + inputs - weights)


@given(st.integers(1, 6), st.integers(1, 12))
def test_zero_bubble_holds_no_more_micropacks_than_1f1b_on_its_first_stage(pp, count):
    plan = equal_plan(zero_bubble(pp, count), count, Mesh(pp=pp), splits_backward=True)

    kept = memory_of(plan, kept_for_weight_bytes=1.0)
    timeline = run_plan(plan, durations_of(plan, 1.0, 1.0, 1.0), kept)

    assert timeline.peak_bytes == min(pp, count)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_slices_hold_one_document_and_what_the_pipeline_needs(pp, slices, documents):
    count = slices * documents
    plan = equal_plan(sliced(pp, count, slices), count, Mesh(pp=pp), slices=slices)

    timeline = run_plan(plan, durations_of(plan, 1.0, 2.0), memory_of(plan))

    assert timeline.peaks_bytes.tolist() == [[min(count, pp - stage + slices - 1) for stage in range(pp)]]


def test_a_document_in_slices_waits_for_its_end():
    plan = equal_plan(sliced(1, 4, 4), 4, Mesh(), slices=4)

    timeline = run_plan(plan, durations_of(plan, 1.0, 2.0), memory_of(plan))

    assert timeline.kinds.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert timeline.starts_s.tolist() == [0, 1, 2, 3, 4, 6, 8, 10]


@pytest.mark.parametrize(
    ("schedule", "arguments", "words"),
    [
        (one_f_one_b, (0, 4), r"pp=0; a schedule needs a whole number of at least 1"),
        (one_f_one_b, (4, -1), r"count=-1; a schedule needs a whole number of at least 0"),
        (interleaved, (4, 2.0, 8), r"virtual=2.0; a schedule needs a whole number"),
        (interleaved, (4, 2, 10), r"10 MicroPacks can't go in rounds of 4 stages; make it 8 or 12"),
        (sliced, (4, 10, 3), r"10 MicroPacks can't go in rounds of 3 slices per document; make it 9 or 12"),
    ],
)
def test_an_impossible_schedule_is_refused_with_a_way_out(schedule, arguments, words):
    with pytest.raises(SettingError, match=words):
        schedule(*arguments)  # type: ignore[operator]


def test_no_micropacks_make_an_empty_step():
    plan = equal_plan(one_f_one_b(3, 0), 0, Mesh(dp=2, pp=3))

    timeline = run_plan(plan, durations_of(plan, 1.0, 1.0), memory_of(plan, state_bytes=5.0))

    assert (timeline.num_tasks, timeline.makespan_s, timeline.bubble_ratio, timeline.imbalance) == (
        0,
        0,
        0,
        1,
    )
    assert timeline.peak_bytes == 5.0
    assert timeline.critical_path.tolist() == []


COST = CostModel(model=ModelShape.named("llama-3-8b"), hardware=Hardware.named("h100"))


def in_blocks(plan: StepPlan, rows: int = 512) -> StepPlan:
    """The same plan with documents as long as on real hardware."""

    def longer(packs: MicroPacks) -> MicroPacks:
        return dataclasses.replace(packs, starts=packs.starts * rows, stops=packs.stops * rows)

    forward, backward = longer(plan.forward), longer(plan.backward)
    return dataclasses.replace(plan, lengths=plan.lengths * rows, forward=forward, backward=backward)


@given(step_plans())
def test_every_chunk_takes_its_layers_and_the_last_the_head(plan):
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
def test_of_eager_layers_the_head_runs_in_backward_tasks_alone(plan):
    plan = in_blocks(plan)
    # The same MicroPacks in both passes, so that what moves from one to the other is as much.
    plan = dataclasses.replace(plan, backward=plan.forward)

    # Nor is anything launched or exchanged, of which eager layers price more: for slices with earlier tokens, and for
    # float32 gradients of shared keys and values.
    quick = dataclasses.replace(COST.hardware, launch_s=0.0)
    cost = COST.replace(hardware=quick, exchange_overlap=1.0)

    fused, eager = durations(plan, cost), durations(plan, cost.replace(kernels="eager"))

    layers = COST.stages(plan.mesh).layers[-1]
    packs = plan.forward
    shared = plan.num_ranks[packs.document_ids]
    priced = kernels.price(packs.slice_offsets, packs.starts, packs.stops, shared, cost.rates(plan.mesh))
    assert eager.forward[-1] == pytest.approx(layers * priced[:, 0])
    assert eager.weight[-1] == pytest.approx(layers * priced[:, 4] * plan.splits_backward)
    for chunk in range(plan.mesh.num_chunks):
        totals = [seconds.forward + seconds.backward + seconds.weight for seconds in (fused, eager)]
        assert totals[1][chunk] == pytest.approx(totals[0][chunk])
        if chunk < plan.mesh.num_chunks - 1:
            assert np.array_equal(eager.forward[chunk], fused.forward[chunk])


@given(st.integers(0, 2**32 - 1))
def test_a_split_backward_takes_as_long_as_a_whole_one(seed):
    split = in_blocks(random_plan(seed, Mesh(dp=2, pp=2), True, 4))

    parts = durations(split, COST)
    whole = durations(dataclasses.replace(split, splits_backward=False), COST)

    assert parts.weight.min() > 0
    assert whole.weight.max() == 0
    assert parts.backward + parts.weight == pytest.approx(whole.backward)


@pytest.mark.parametrize("sharding", ["none", "optimizer", "parameters"])
def test_gathers_come_with_sharded_parameters_and_the_sync_without(sharding):
    mesh = Mesh(dp=2, pp=2, sharding=sharding)  # type: ignore[arg-type]

    found = durations(in_blocks(random_plan(0, mesh, False, 4)), COST)

    assert (found.gather[:2] > 0).all() == (sharding == "parameters")
    assert (found.sync > 0).all() == (sharding != "parameters")


@given(step_plans(), st.booleans(), st.booleans())
def test_real_costs_stay_above_work_and_chain(plan, overlap, contention):
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


def test_the_recomputation_of_the_plan_is_what_is_simulated():
    plan = in_blocks(random_plan(1, Mesh(pp=2), False, 4))

    kept = simulate(plan, COST.replace(recompute="full"))
    again = simulate(dataclasses.replace(plan, recompute="full"), COST)

    assert kept.makespan_s == simulate(plan, COST).makespan_s
    assert again.makespan_s > kept.makespan_s
    assert again.peak_bytes < kept.peak_bytes
    assert (again.kinds < KINDS).sum() == (kept.kinds < KINDS).sum()
