"""A stage's step is computing, exposed communication and bubble: what each is, and that they add up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_plans import durations_of, equal_plan, memory_of, plan_of, priced_plans

from varlen.simulate.api import run_plan
from varlen.simulate.graph import GATHER, GRADIENT_SYNC, Durations
from varlen.simulate.schedules import one_f_one_b
from varlen.simulate.timeline import Timeline
from varlen.step_plan import BACKWARD, FORWARD, Mesh, StepPlan


def by_moments(timeline: Timeline) -> np.ndarray:
    """Exposed seconds, stage by stage and moment by moment between any two ends: the definition, read aloud."""
    mesh = timeline.plan.mesh
    exposed = np.zeros((mesh.dp, mesh.pp))
    for rank in range(mesh.dp):
        for stage in range(mesh.pp):
            own = (timeline.ranks == rank) & (timeline.stages == stage)
            begins, ends = timeline.starts_s, timeline.starts_s + timeline.work_s
            computes = own & (timeline.kinds < 3)
            collects = own & ((timeline.kinds == GATHER) | (timeline.kinds == GRADIENT_SYNC))
            moments = np.unique(np.concatenate((begins[own], ends[own])))
            for one, next_ in zip(moments, moments[1:]):
                middle = (one + next_) / 2
                runs = (begins < middle) & (middle < ends)
                if (runs & collects).any() and not (runs & computes).any():
                    exposed[rank, stage] += next_ - one
    return exposed


@given(priced_plans(), st.booleans())
def test_exposed_is_what_collectives_take_while_nothing_is_computed(
    priced: tuple[StepPlan, Durations], overlap: bool
) -> None:
    plan, seconds = priced

    timeline = run_plan(plan, seconds, memory_of(plan), overlap=overlap)

    np.testing.assert_allclose(timeline.exposed_s, by_moments(timeline), atol=1e-9)


@given(priced_plans(), st.booleans())
def test_computing_exposed_communication_and_bubble_make_up_the_step(
    priced: tuple[StepPlan, Durations], overlap: bool
) -> None:
    plan, seconds = priced

    timeline = run_plan(plan, seconds, memory_of(plan), overlap=overlap)

    makespan_s = timeline.makespan_s
    whole = timeline.busy_s + timeline.exposed_s + timeline.bubble_ratios * makespan_s
    np.testing.assert_allclose(whole, makespan_s, atol=1e-9)
    assert (timeline.bubble_ratios >= 0).all()
    if makespan_s > 0:
        shares = timeline.busy_s.mean() / makespan_s + timeline.exposed_ratio + timeline.bubble_ratio
        assert shares == pytest.approx(1.0)


def test_the_gradient_sync_is_no_bubble_and_waiting_for_it_is() -> None:
    plan = equal_plan(one_f_one_b(1, 4), 4, Mesh(dp=2))
    seconds = durations_of(plan, 1.0, 2.0, sync=3.0)

    even = run_plan(plan, seconds, memory_of(plan))
    slowed = run_plan(plan, seconds, memory_of(plan), slowdown=[[1], [2]])

    assert even.makespan_s == 15.0
    assert even.exposed_s.tolist() == [[3.0], [3.0]]
    assert even.bubble_ratios.tolist() == [[0.0], [0.0]]
    assert slowed.exposed_s.tolist() == [[3.0], [3.0]]
    assert slowed.bubble_ratios[:, 0] * slowed.makespan_s == pytest.approx([12.0, 0.0])


def test_a_pipeline_of_equal_work_keeps_the_bubble_of_its_closed_form_beside_a_sync() -> None:
    plan = equal_plan(one_f_one_b(4, 8), 8, Mesh(dp=2, pp=4))

    timeline = run_plan(plan, durations_of(plan, 1.0, 2.0, sync=3.0), memory_of(plan))

    # The first stage ends last, and its sync comes behind; the others' syncs run while the first still computes.
    assert timeline.makespan_s == 3 * (8 + 3) + 3
    assert timeline.exposed_s == pytest.approx(3.0)
    assert timeline.bubble_ratios * timeline.makespan_s == pytest.approx(9.0)


def test_a_gather_is_exposed_only_by_what_computing_does_not_hide() -> None:
    packs = [[[(0, 0, 1)], [(1, 0, 1)]]]
    order = [FORWARD, BACKWARD, FORWARD, BACKWARD]
    plan = plan_of(packs, packs, [order], Mesh(sharding="parameters"))
    seconds = durations_of(plan, [[1.0, 4.0]], [[2.0, 5.0]], gather=2.0)

    hidden = run_plan(plan, seconds, memory_of(plan))
    exposed = run_plan(plan, seconds, memory_of(plan), overlap=False)

    assert hidden.exposed_s.tolist() == [
        [3.0]
    ]  # 1 of 2 in the forward, 2 of 4 in the backward that scatters too
    assert exposed.exposed_s.tolist() == [[12.0]]
    assert hidden.bubble_ratio == exposed.bubble_ratio == 0.0
