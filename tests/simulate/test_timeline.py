"""What every timeline holds, and a stage's step as computing, exposed communication and bubble."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.step_plans import durations_of, equal_plan, memory_of, plan_of, priced_plans, step_plans

from varlen.errors import SettingError
from varlen.simulate.api import run_plan
from varlen.simulate.graph import GATHER, GRADIENT_SYNC, SEND_BACKWARD, SEND_FORWARD, Durations, last_forwards
from varlen.simulate.schedules import one_f_one_b
from varlen.simulate.timeline import Timeline
from varlen.step_plan import BACKWARD, FORWARD, Mesh, StepPlan

Priced = tuple[StepPlan, Durations]


def run(priced: Priced, **settings: Any) -> Timeline:
    plan, seconds = priced
    return run_plan(plan, seconds, memory_of(plan), **settings)


@given(priced_plans(), st.booleans(), st.booleans())
def test_the_critical_path_adds_up_to_the_makespan(priced, overlap, contention):
    timeline = run(priced, overlap=overlap, contention=contention)

    path = timeline.critical_path
    starts, stops, lags = timeline.starts_s[path], timeline.stops_s[path], timeline.lags_s[path[:-1]]
    waited = starts[1:] - stops[:-1]
    assert starts[0] == 0
    assert ((waited == 0) | (waited == lags)).all()  # a message's latency, or nothing at all
    assert (stops - starts).sum() + waited.sum() == stops[-1] == timeline.makespan_s


@given(priced_plans(), st.booleans(), st.booleans())
def test_no_step_is_faster_than_its_work(priced, overlap, contention):
    plan, seconds = priced

    timeline = run(priced, overlap=overlap, contention=contention)

    mesh, makespan_s = plan.mesh, timeline.makespan_s
    total = seconds.forward.sum() + seconds.backward.sum() + seconds.weight.sum()
    assert timeline.busy_s.sum() == total
    assert makespan_s >= timeline.busy_s.max() >= total / (mesh.dp * mesh.pp)


@given(priced_plans(), st.booleans(), st.booleans())
def test_no_step_is_faster_than_its_longest_chain(priced, overlap, contention):
    plan, seconds = priced

    timeline = run(priced, overlap=overlap, contention=contention)

    sends = (plan.mesh.num_chunks - 1) * (seconds.send_forward + seconds.latency_s)
    there = seconds.forward.sum(0) + sends
    back = seconds.backward.sum(0) + (plan.mesh.num_chunks - 1) * (seconds.send_backward + seconds.latency_s)
    for micropack, ahead in enumerate(last_forwards(plan).tolist()):
        if ahead >= 0:
            assert timeline.makespan_s >= there[ahead] + back[micropack] + seconds.weight[0, micropack]


@given(priced_plans(), st.booleans(), st.booleans())
def test_no_step_is_faster_than_filling_and_draining_allow(priced, overlap, contention):
    plan, seconds = priced

    timeline = run(priced, overlap=overlap, contention=contention)

    mesh = plan.mesh
    if mesh.virtual_stages == 1:
        for rank in range(mesh.dp):
            ahead = slice(*plan.forward.rank_offsets[rank : rank + 2])
            back = slice(*plan.backward.rank_offsets[rank : rank + 2])
            for stage in range(mesh.pp if ahead.stop > ahead.start else 0):
                fill = seconds.forward[:stage, ahead].sum(0).min()
                drain = seconds.backward[:stage, back].sum(0).min() * (not plan.splits_backward)
                assert timeline.makespan_s >= fill + timeline.busy_s[rank, stage] + drain


@given(priced_plans(), st.booleans(), st.booleans(), st.data())
def test_a_slower_gpu_makes_nothing_earlier(priced, overlap, contention, data):
    places = priced[0].mesh.dp * priced[0].mesh.pp
    slowdown = data.draw(st.lists(st.sampled_from([1.0, 2.0, 10.0]), min_size=places, max_size=places))

    even = run(priced, overlap=overlap, contention=contention)
    slowed = run(priced, overlap=overlap, contention=contention, slowdown=slowdown)

    assert (slowed.starts_s >= even.starts_s).all()
    assert (slowed.stops_s >= even.stops_s).all()
    assert (slowed.busy_s == even.busy_s * np.reshape(slowdown, even.busy_s.shape)).all()


@given(priced_plans())
def test_overlap_never_costs_time_and_contention_never_gains_it(priced):
    times = {
        (overlap, contention): run(priced, overlap=overlap, contention=contention).makespan_s
        for overlap in (True, False)
        for contention in (True, False)
    }

    assert times[True, False] <= times[True, True] <= times[False, True] == times[False, False]


def test_a_straggler_delays_everyone_at_the_gradient_sync():
    plan = equal_plan(one_f_one_b(2, 4), 4, Mesh(dp=2, pp=2))
    seconds = durations_of(plan, 1.0, 2.0, sync=3.0)

    timeline = run_plan(plan, seconds, memory_of(plan), slowdown=[[1, 1], [1, 2]])

    syncs = timeline.kinds == GRADIENT_SYNC
    assert timeline.starts_s[syncs].tolist() == [27.0, 25.0, 27.0, 25.0]
    assert timeline.makespan_s == 30.0
    assert timeline.imbalance == 36 / 30
    assert timeline.ranks[timeline.critical_path].tolist()[:-1] == [1] * (len(timeline.critical_path) - 1)


def test_messages_of_a_link_wait_for_each_other_unless_contention_is_off():
    plan = equal_plan(one_f_one_b(2, 2), 2, Mesh(pp=2))
    seconds = durations_of(plan, [[1.0, 1.0], [0.0, 0.0]], 0.0, send_forward=5.0, latency_s=0.5)

    def arrivals(**settings: bool) -> list[float]:
        timeline = run_plan(plan, seconds, memory_of(plan), **settings)
        return timeline.starts_s[(timeline.kinds == FORWARD) & (timeline.stages == 1)].tolist()

    assert arrivals() == [6.5, 11.5]
    assert arrivals(contention=False) == [6.5, 7.5]
    assert arrivals(overlap=False) == [6.5, 12.5]


def test_two_stages_with_several_chunks_send_both_ways_over_one_link():
    packs = [[[(0, 0, 1)], [(1, 0, 1)]]]
    stages = [[0, 0, 3, 4, 1, 3, 4, 1], [0, 3, 4, 0, 1, 3, 4, 1]]
    plan = plan_of(packs, packs, stages, Mesh(pp=2, virtual_stages=2))
    seconds = durations_of(plan, 1.0, 1.0, send_forward=10.0, send_backward=10.0)

    timeline = run_plan(plan, seconds, memory_of(plan))

    sends = (timeline.kinds > BACKWARD) & (timeline.stages == 1)
    assert timeline.kinds[sends].tolist() == [SEND_FORWARD, SEND_BACKWARD, SEND_FORWARD] + [SEND_BACKWARD] * 3
    # The second forward message is there at 36 and waits for the backward one, which leaves at 35.
    assert timeline.starts_s[sends].tolist() == [12, 35, 45, 57, 81, 103]


def test_ranks_that_share_a_document_start_together_and_end_together():
    shared = [[(0, 0, 8)]]
    stages = [[FORWARD, FORWARD, BACKWARD, BACKWARD], [FORWARD, BACKWARD]]
    plan = plan_of([[[(1, 0, 4)], *shared], shared], [[*shared, [(1, 0, 4)]], shared], stages, Mesh(dp=2))

    timeline = run_plan(plan, durations_of(plan, [[3.0, 5.0, 4.0]], [[1.0, 1.0, 2.0]]), memory_of(plan))

    assert timeline.starts_s.tolist() == [0, 3, 8, 10, 3, 8]
    assert timeline.stops_s.tolist() == [3, 8, 10, 11, 8, 10]
    assert timeline.work_s.tolist() == [3, 5, 1, 1, 4, 2]
    assert timeline.busy_s.tolist() == [[10.0], [6.0]]
    assert timeline.peaks_bytes.tolist() == [[8.0], [4.0]]  # each holds half of the shared document


def test_sharded_parameters_make_ranks_run_in_step():
    packs = [[[(0, 0, 1)], [(1, 0, 1)]], [[(2, 0, 1)], []]]
    order = [FORWARD, BACKWARD, FORWARD, BACKWARD]
    plan = plan_of(packs, packs, [order, order], Mesh(dp=2, sharding="parameters"))
    seconds = durations_of(plan, [[1.0, 4.0, 3.0, 0.0]], [[2.0, 2.0, 5.0, 0.0]], gather=2.0)

    hidden = run_plan(plan, seconds, memory_of(plan))
    exposed = run_plan(plan, seconds, memory_of(plan), overlap=False)

    first = hidden.kinds < GATHER
    # The slower of two ranks, or the traffic of the parameters: twice as much in the backward.
    assert hidden.starts_s[first].tolist() == [0, 3, 8, 12] * 2
    assert hidden.stops_s[first].tolist() == [3, 8, 12, 16] * 2
    first = exposed.kinds < GATHER
    assert exposed.starts_s[first].tolist() == [2, 9, 16, 24] * 2
    assert exposed.makespan_s == 26


def test_a_split_backward_gathers_for_inputs_and_scatters_for_weights():
    packs = [[[(0, 0, 1)]]]
    plan = plan_of(packs, packs, [[0, 1, 2]], Mesh(sharding="parameters"), splits_backward=True)

    timeline = run_plan(plan, durations_of(plan, 0.0, 0.0, 0.0, gather=2.0), memory_of(plan))

    assert timeline.stops_s[timeline.kinds == GATHER].tolist() == [2, 4, 6]


@given(step_plans(), st.integers(0, 2**32 - 1))
def test_memory_returns_to_where_it_began(plan, seed):
    random = np.random.default_rng(seed)
    names = ("held_bytes", "gradient_bytes", "passing_bytes", "kept_for_weight_bytes", "state_bytes")
    memory = memory_of(plan, **{name: float(random.integers(0, 9)) for name in names})

    timeline = run_plan(plan, durations_of(plan, 1.0, 1.0, 1.0 * plan.splits_backward), memory)

    begins, ends = timeline.memory_offsets[:-1], timeline.memory_offsets[1:] - 1
    np.testing.assert_allclose(timeline.memory_bytes[begins], np.tile(memory.state_bytes, plan.mesh.dp))
    np.testing.assert_allclose(
        timeline.memory_bytes[ends], np.tile(memory.state_bytes, plan.mesh.dp), atol=1e-9
    )
    assert (timeline.memory_bytes >= np.min(memory.state_bytes) - 1e-9).all()
    for first, last in zip(timeline.memory_offsets, timeline.memory_offsets[1:]):
        assert (np.diff(timeline.memory_times_s[first:last]) >= 0).all()


def test_memory_counts_what_the_backward_adds_and_gives_back():
    forward = [[[(0, 0, 10)], [(0, 10, 16)]]]
    backward = [[[(0, 12, 16)], [(0, 4, 12)], [(0, 0, 4)]]]
    plan = plan_of(forward, backward, [[0, 0, 1, 1, 1]], Mesh())
    memory = memory_of(plan, held_bytes=100.0, gradient_bytes=10.0, passing_bytes=1.0, state_bytes=7.0)

    timeline = run_plan(plan, durations_of(plan, 1.0, 1.0), memory)

    # A pair for each task: as it starts and as it stops. Rows held: 10, 16, 16 to 12, 12 to 4, 4 to 0. Accumulators
    # of 12 rows begin with the last slice; 8 and 4 of them end with the others.
    expected = [7, 1017, 1007, 1613, 1607, 1731, 1327, 1335, 447, 451, 7]
    assert timeline.memory_bytes.tolist() == expected
    assert timeline.memory_times_s.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert timeline.peak_bytes == 1731


def test_gpus_that_share_a_document_share_its_bytes():
    forward, backward = [[(0, 0, 16)]], [[(0, 8, 16)], [(0, 0, 8)]]
    plan = plan_of([forward] * 2, [backward] * 2, [[0, 1, 1]] * 2, Mesh(dp=2, cp=2))
    memory = memory_of(plan, held_bytes=100.0, gradient_bytes=10.0)

    timeline = run_plan(plan, durations_of(plan, 1.0, 1.0), memory)

    # Four GPUs hold 4 of 16 rows each, and 2 of the 8 whose gradients begin with the last slice.
    assert timeline.memory_bytes.tolist() == [0, 400, 400, 420, 220, 220, 0] * 2


def test_weight_gradients_keep_their_part_until_they_are_done():
    packs = [[[(0, 0, 2)]]]
    plan = plan_of(packs, packs, [[0, 1, 2]], Mesh(), splits_backward=True)
    memory = memory_of(plan, held_bytes=10.0, kept_for_weight_bytes=3.0, passing_bytes=1.0)

    timeline = run_plan(plan, durations_of(plan, 1.0, 1.0, 1.0), memory)

    assert timeline.memory_bytes.tolist() == [0, 22, 20, 22, 6, 6, 0]


@pytest.mark.parametrize(
    ("slowdown", "words"),
    [
        ([1.0], r"slowdown has 1 factors; the mesh has 4 stages of data-parallel ranks"),
        ([1.0, -1.0, np.nan, 1.0], r"slowdown -1.0 of stage 1 is negative or not finite \(2 of 4 are\)"),
    ],
)
def test_a_slowdown_of_the_wrong_shape_is_refused(slowdown, words):
    plan = equal_plan(one_f_one_b(2, 2), 2, Mesh(dp=2, pp=2))

    with pytest.raises(SettingError, match=words):
        run_plan(plan, durations_of(plan, 1.0, 1.0), memory_of(plan), slowdown=slowdown)


def test_a_timeline_is_read_only_also_behind_a_pickle():
    plan = equal_plan(one_f_one_b(2, 2), 2, Mesh(pp=2))
    timeline = run_plan(plan, durations_of(plan, 1.0, 1.0), memory_of(plan))

    for one in (timeline, pickle.loads(pickle.dumps(timeline))):
        with pytest.raises(ValueError, match="read-only"):
            one.starts_s[0] = 1.0
        assert max(len(repr(one)), len(repr(one.plan))) < 200


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
def test_exposed_is_what_collectives_take_while_nothing_is_computed(priced, overlap):
    plan, seconds = priced

    timeline = run_plan(plan, seconds, memory_of(plan), overlap=overlap)

    np.testing.assert_allclose(timeline.exposed_s, by_moments(timeline), atol=1e-9)


@given(priced_plans(), st.booleans())
def test_computing_exposed_communication_and_bubble_make_up_the_step(priced, overlap):
    plan, seconds = priced

    timeline = run_plan(plan, seconds, memory_of(plan), overlap=overlap)

    makespan_s = timeline.makespan_s
    whole = timeline.busy_s + timeline.exposed_s + timeline.bubble_ratios * makespan_s
    np.testing.assert_allclose(whole, makespan_s, atol=1e-9)
    assert (timeline.bubble_ratios >= 0).all()
    if makespan_s > 0:
        shares = timeline.busy_s.mean() / makespan_s + timeline.exposed_ratio + timeline.bubble_ratio
        assert shares == pytest.approx(1.0)


def test_the_gradient_sync_is_no_bubble_and_waiting_for_it_is():
    plan = equal_plan(one_f_one_b(1, 4), 4, Mesh(dp=2))
    seconds = durations_of(plan, 1.0, 2.0, sync=3.0)

    even = run_plan(plan, seconds, memory_of(plan))
    slowed = run_plan(plan, seconds, memory_of(plan), slowdown=[[1], [2]])

    assert even.makespan_s == 15.0
    assert even.exposed_s.tolist() == [[3.0], [3.0]]
    assert even.bubble_ratios.tolist() == [[0.0], [0.0]]
    assert slowed.exposed_s.tolist() == [[3.0], [3.0]]
    assert slowed.bubble_ratios[:, 0] * slowed.makespan_s == pytest.approx([12.0, 0.0])


def test_a_pipeline_of_equal_work_keeps_the_bubble_of_its_closed_form_beside_a_sync():
    plan = equal_plan(one_f_one_b(4, 8), 8, Mesh(dp=2, pp=4))

    timeline = run_plan(plan, durations_of(plan, 1.0, 2.0, sync=3.0), memory_of(plan))

    # The first stage ends last, and its sync comes behind; the others' syncs run while the first still computes.
    assert timeline.makespan_s == 3 * (8 + 3) + 3
    assert timeline.exposed_s == pytest.approx(3.0)
    assert timeline.bubble_ratios * timeline.makespan_s == pytest.approx(9.0)


def test_a_gather_is_exposed_only_by_what_computing_does_not_hide():
    packs = [[[(0, 0, 1)], [(1, 0, 1)]]]
    order = [FORWARD, BACKWARD, FORWARD, BACKWARD]
    plan = plan_of(packs, packs, [order], Mesh(sharding="parameters"))
    seconds = durations_of(plan, [[1.0, 4.0]], [[2.0, 5.0]], gather=2.0)

    hidden = run_plan(plan, seconds, memory_of(plan))
    exposed = run_plan(plan, seconds, memory_of(plan), overlap=False)

    # 1 of 2 in the forward, 2 of 4 in the backward that scatters too.
    assert hidden.exposed_s.tolist() == [[3.0]]
    assert exposed.exposed_s.tolist() == [[12.0]]
    assert hidden.bubble_ratio == exposed.bubble_ratio == 0.0
