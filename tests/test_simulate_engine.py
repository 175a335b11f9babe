"""The event engine runs any graph as its reference does, and every plan as the rules say."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from oracles import simulate as reference
from simulate_oracle import run_by_rules
from step_plans import memory_of, priced_plans

from varlen.simulate import kernels
from varlen.simulate.api import run_plan
from varlen.simulate.graph import Durations
from varlen.step_plan import KINDS, StepPlan


@st.composite
def graphs(draw: st.DrawFn) -> tuple[np.ndarray, ...]:
    """Random streams, waits, lags and groups: most can run, some are deadlocks."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_streams, num_tasks = draw(st.integers(1, 6)), draw(st.integers(0, 40))
    offsets = np.sort(random.integers(0, num_tasks + 1, num_streams + 1)).astype(np.int32)
    offsets[0], offsets[-1] = 0, num_tasks
    streams = np.repeat(np.arange(num_streams), np.diff(offsets))
    # A time for each task in which everything could run: waits and groups follow it, but for a few.
    times = np.empty(num_tasks)
    for stream in range(num_streams):
        times[offsets[stream] : offsets[stream + 1]] = np.sort(random.random(np.diff(offsets)[stream]))
    afters = np.full((num_tasks, draw(st.integers(0, 3))), -1, np.int32)
    for task in range(num_tasks):
        earlier = np.flatnonzero(times < times[task])
        for column in range(afters.shape[1]):
            if len(earlier) and random.random() < 0.5:
                afters[task, column] = random.choice(earlier)
    groups = np.full(num_tasks, -1, np.int32)
    by_time = np.argsort(times)
    for group in range(draw(st.integers(0, 4))):
        if num_tasks:
            at = random.integers(num_tasks)
            near = by_time[at : at + 3]
            near = near[groups[near] < 0]
            _, firsts = np.unique(streams[near], return_index=True)
            groups[near[firsts]] = group
    if num_tasks and afters.shape[1] and draw(st.integers(0, 9)) == 0:
        afters[random.integers(num_tasks), 0] = random.integers(num_tasks)
    largest = draw(st.sampled_from([1, 3, 1000]))
    lengths, lags = random.integers(0, largest + 1, (2, num_tasks)).astype(np.float64)
    return offsets, afters, lags, lengths, groups


@given(graphs())
def test_the_engine_equals_its_reference_on_any_graph(graph: tuple[np.ndarray, ...]) -> None:
    count = len(graph[2])
    ran, results = [], []
    for engine in (kernels.run_tasks, reference.run_tasks):
        starts, stops, deciders = np.empty(count), np.empty(count), np.empty(count, np.int32)
        ran.append(engine(*graph, 4, starts, stops, deciders))
        results.append((starts, stops, deciders))

    assert ran[0] == ran[1]
    for compiled, readable in zip(*results):
        np.testing.assert_array_equal(compiled, readable)


def test_some_random_graphs_run_and_some_do_not() -> None:
    ended = set()

    @given(graphs())
    def run(graph: tuple[np.ndarray, ...]) -> None:
        count = len(graph[2])
        ran = kernels.run_tasks(*graph, 4, np.empty(count), np.empty(count), np.empty(count, np.int32))
        ended.add(ran == count)

    run()
    assert ended == {True, False}


@given(priced_plans(), st.booleans(), st.booleans())
def test_every_plan_runs_as_the_rules_say(
    priced: tuple[StepPlan, Durations], overlap: bool, contention: bool
) -> None:
    plan, seconds = priced

    timeline = run_plan(plan, seconds, memory_of(plan), overlap=overlap, contention=contention)

    times, makespan_s = run_by_rules(plan, seconds, overlap, contention)
    computes = np.flatnonzero(timeline.kinds < KINDS)
    firsts = (plan.forward.rank_offsets, plan.backward.rank_offsets)
    found = {}
    for task in computes.tolist():
        rank, behind = int(timeline.ranks[task]), bool(timeline.backward_of[task])
        number = int(timeline.micropacks[task] - firsts[behind][rank])
        name = (int(timeline.kinds[task]), rank, int(timeline.chunks[task]), number)
        found[name] = (timeline.starts_s[task], timeline.stops_s[task])
    assert found == times
    assert timeline.makespan_s == makespan_s


@given(st.integers(0, 2**32 - 1), st.integers(0, 5))
def test_memory_adds_up_as_its_reference_does(seed: int, num_stages: int) -> None:
    random = np.random.default_rng(seed)
    offsets = np.cumsum([0, *random.integers(0, 5, num_stages)]).astype(np.int32)
    count = int(offsets[-1])
    given_arrays = [random.integers(-9, 9, count).astype(np.float64) for _ in range(4)]
    begins = random.random(num_stages)
    results = []
    for curves in (kernels.memory_curves, reference.memory_curves):
        times, sizes = np.empty(2 * count + num_stages), np.empty(2 * count + num_stages)
        curves(offsets, *given_arrays, begins, times, sizes)
        results.append((times, sizes))

    np.testing.assert_array_equal(results[0], results[1])
