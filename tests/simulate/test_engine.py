"""The event engine runs any graph as its reference does, and a trace holds all that it ran."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles import simulate as reference
from tests.support.step_plans import Slices, durations_of, equal_plan, memory_of, parties_with, priced_plans

from varlen.simulate import kernels
from varlen.simulate.api import run_plan
from varlen.simulate.graph import Durations
from varlen.simulate.schedules import interleaved, one_f_one_b
from varlen.simulate.timeline import Timeline
from varlen.step_plan import BACKWARD, FORWARD, KINDS, WEIGHT, Mesh, MicroPacks, StepPlan


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
def test_the_engine_equals_its_reference_on_any_graph(graph):
    count = len(graph[2])
    ran, results = [], []
    for engine in (kernels.run_tasks, reference.run_tasks):
        starts, stops, deciders = np.empty(count), np.empty(count), np.empty(count, np.int32)
        ran.append(engine(*graph, 4, starts, stops, deciders))
        results.append((starts, stops, deciders))

    assert ran[0] == ran[1]
    for compiled, readable in zip(*results):
        np.testing.assert_array_equal(compiled, readable)


def test_some_random_graphs_run_and_some_do_not():
    ended = set()

    @given(graphs())
    def run(graph: tuple[np.ndarray, ...]) -> None:
        count = len(graph[2])
        ran = kernels.run_tasks(*graph, 4, np.empty(count), np.empty(count), np.empty(count, np.int32))
        ended.add(ran == count)

    run()
    assert ended == {True, False}


@given(priced_plans(), st.booleans(), st.booleans())
def test_every_plan_runs_as_the_rules_say(priced, overlap, contention):
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
def test_memory_adds_up_as_its_reference_does(seed, num_stages):
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


Task = tuple[int, int, int, int]
"""Kind, rank, chunk, number in its rank."""


def slices_of(micropacks: MicroPacks) -> Slices:
    rows = list(zip(micropacks.document_ids.tolist(), micropacks.starts.tolist(), micropacks.stops.tolist()))
    ends = micropacks.slice_offsets.tolist()
    packs = [rows[first:last] for first, last in zip(ends, ends[1:])]
    ends = micropacks.rank_offsets.tolist()
    return [packs[first:last] for first, last in zip(ends, ends[1:])]


def orders_of(plan: StepPlan) -> list[list[Task]]:
    orders = []
    ends = plan.task_offsets.tolist()
    for place, (first, last) in enumerate(zip(ends, ends[1:])):
        counts: dict[int, int] = {}
        order = []
        for code in plan.tasks[first:last].tolist():
            number = counts.get(code, 0)
            counts[code] = number + 1
            rank, stage = divmod(place, plan.mesh.pp)
            order.append((code % 3, rank, code // 3 * plan.mesh.pp + stage, number))
        orders.append(order)
    return orders


def run_by_rules(
    plan: StepPlan, seconds: Durations, overlap: bool, contention: bool
) -> tuple[dict[Task, tuple[float, float]], float]:
    """Return when each task that computes starts and stops, and when everything is done."""
    rules = Rules(plan, seconds, overlap, contention)
    while rules.raise_starts():
        pass
    return {task: (rules.start[task], rules.stop(task)) for task in rules.tasks}, rules.end()


class Rules:
    """The rules of a plan, and starts that are raised until they hold."""

    def __init__(self, plan: StepPlan, seconds: Durations, overlap: bool, contention: bool) -> None:
        self.plan, self.seconds, self.overlap = plan, seconds, overlap
        self.last = plan.mesh.num_chunks - 1
        self.slices = {FORWARD: slices_of(plan.forward), BACKWARD: slices_of(plan.backward)}
        self.orders = orders_of(plan)
        self.tasks = [task for order in self.orders for task in order]
        packs = self.slices[FORWARD], self.slices[BACKWARD]
        self.party = {task: parties_with(task, *packs, plan.mesh) for task in self.tasks}
        self.length = {task: max(self.work(other) for other in self.party[task]) for task in self.tasks}
        self.start = dict.fromkeys(self.tasks, 0.0)
        self.sent = dict.fromkeys(self.tasks, 0.0)
        """When the message of each begins to leave."""
        self.free_from = dict.fromkeys(self.tasks, 0.0)
        """When the stage turns to a task; without overlap it gathers parameters as soon as its input is there too."""
        self.before = {b: a for order in self.orders for a, b in zip(order, order[1:])}
        self.link_before: dict[Task, Task] = {}
        """The message before each on its link."""
        directions = ([FORWARD, BACKWARD],) if plan.mesh.pp == 2 else ([FORWARD], [BACKWARD])
        for order in self.orders if overlap and contention else []:
            for kinds in directions:
                posts = [task for task in order if task[0] in kinds and self.sends(task)]
                self.link_before |= {b: a for a, b in zip(posts, posts[1:])}

    def micropack(self, task: Task) -> int:
        kind, rank, _, number = task
        packs = self.plan.forward if kind == FORWARD else self.plan.backward
        return int(packs.rank_offsets[rank]) + number

    def traffic(self, task: Task) -> float:
        return float(self.seconds.gather[task[0], task[2]])

    def work(self, task: Task) -> float:
        tables = (self.seconds.forward, self.seconds.backward, self.seconds.weight)
        own = float(tables[task[0]][task[2], self.micropack(task)])
        return max(own, self.traffic(task)) if self.overlap else own

    def sends(self, task: Task) -> bool:
        kind, _, chunk, _ = task
        return (kind == FORWARD and chunk < self.last) or (kind == BACKWARD and chunk > 0)

    def message_s(self, task: Task) -> float:
        seconds = self.seconds.send_forward if task[0] == FORWARD else self.seconds.send_backward
        return float(seconds[self.micropack(task)])

    def stop(self, task: Task) -> float:
        return self.start[task] + self.length[task]

    def free(self, task: Task) -> float:
        """When a stage is through with a task, its message included if it waits for that."""
        if self.overlap or not self.sends(task):
            return self.stop(task)
        return self.sent[task] + self.message_s(task)

    def arrival(self, task: Task) -> float:
        rows = self.seconds.forward_rows if task[0] == FORWARD else self.seconds.backward_rows
        latency_s = self.seconds.latency_s if rows[self.micropack(task)] > 0 else 0.0
        return self.sent[task] + self.message_s(task) + latency_s

    def inputs(self, task: Task) -> list[float]:
        kind, rank, chunk, number = task
        if kind == WEIGHT:
            return [self.stop((BACKWARD, rank, chunk, number))]
        if kind == FORWARD:
            return [self.arrival((FORWARD, rank, chunk - 1, number))] if chunk > 0 else []
        if chunk < self.last:
            return [self.arrival((BACKWARD, rank, chunk + 1, number))]
        held = {document for document, _, _ in self.slices[BACKWARD][rank][number]}
        return [
            self.stop((FORWARD, rank, self.last, ahead))
            for ahead, pack in enumerate(self.slices[FORWARD][rank])
            if held & {document for document, _, _ in pack}
        ]

    def raise_starts(self) -> bool:
        """Raise every start to what the others ask for; return whether any was."""
        old = dict(self.start), dict(self.sent), dict(self.free_from)
        gathers = not self.overlap and bool(self.seconds.gather.any())
        for task in self.tasks:
            if task in self.before:
                self.free_from[task] = max(self.free_from[task], self.free(self.before[task]))
        for task in self.tasks:
            begins = [max([self.free_from[other], *self.inputs(other)]) for other in self.party[task]]
            gathered_s = self.traffic(task) if gathers else 0.0
            self.start[task] = max(self.start[task], max(begins) + gathered_s)
        for task in self.tasks:
            self.start[task] = max(self.start[other] for other in self.party[task])
            self.sent[task] = max(self.sent[task], self.stop(task))
            if task in self.link_before:
                ahead = self.link_before[task]
                self.sent[task] = max(self.sent[task], self.sent[ahead] + self.message_s(ahead))
        return old != (self.start, self.sent, self.free_from)

    def end(self) -> float:
        """When the last stage has added up its gradients, and the last message is gone."""
        ends = [self.sent[task] + self.message_s(task) for task in self.tasks if self.sends(task)]
        for stage, sync in enumerate(self.seconds.sync.tolist()):
            orders = self.orders[stage :: self.plan.mesh.pp]
            ends.append(max((self.free(order[-1]) for order in orders if order), default=0.0) + sync)
        return max(ends)


Event = dict[str, Any]


def events_of(timeline: Timeline, path: Path) -> list[Event]:
    timeline.to_trace(path)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        trace = json.load(file)
    assert trace["displayTimeUnit"] == "ms"
    return list(trace["traceEvents"])


def check_events(timeline: Timeline, events: list[Event]) -> None:
    """Require what Perfetto wants: known phases, whole numbers for places, times, slices that don't overlap."""
    for event in events:
        assert event["ph"] in "MXbesfC"
        assert isinstance(event["pid"], int)
        assert event["ph"] == "M" or event["ts"] >= 0
    threads: dict[tuple[int, int], float] = {}
    for event in events:
        if event["ph"] == "X":
            place = event["pid"], event["tid"]
            assert event["ts"] >= threads.get(place, 0.0) - 1e-6
            threads[place] = event["ts"] + event["dur"]
    counts = Counter(event["ph"] for event in events)
    computes = int((timeline.kinds < KINDS).sum())
    assert counts["X"] == computes
    assert counts["b"] == counts["e"] == timeline.num_tasks - computes
    assert counts["s"] == counts["f"]
    assert counts["C"] == len(timeline.memory_times_s)
    begun = {event["id"]: event["ts"] for event in events if event["ph"] == "b"}
    assert all(begun[event["id"]] <= event["ts"] for event in events if event["ph"] == "e")


@given(priced_plans())
def test_every_timeline_becomes_a_trace(tmp_path_factory, priced):
    plan, seconds = priced
    timeline = run_plan(plan, seconds, memory_of(plan))

    check_events(timeline, events_of(timeline, tmp_path_factory.mktemp("trace") / "trace.json"))


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_tasks_stand_at_their_rank_stage_and_time(tmp_path, name):
    plan = equal_plan(one_f_one_b(2, 2), 2, Mesh(dp=2, pp=2))
    memory = memory_of(plan, held_bytes=1e9)
    timeline = run_plan(plan, durations_of(plan, 0.001, 0.002, send_forward=0.5), memory)

    events = events_of(timeline, tmp_path / name)

    check_events(timeline, events)
    names = [event["args"]["name"] for event in events if event["name"] in ("process_name", "thread_name")]
    assert names == ["rank 0", "stage 0", "stage 1", "rank 1", "stage 0", "stage 1"]
    slices = [event for event in events if event["ph"] == "X" and event["pid"] == 0 and event["tid"] == 0]
    assert [event["name"] for event in slices] == ["forward 0", "forward 1", "backward 0", "backward 1"]
    assert slices[0] == {
        "ph": "X",
        "name": "forward 0",
        "cat": "forward",
        "pid": 0,
        "tid": 0,
        "ts": 0.0,
        "dur": 1000.0,
        "args": {"MicroPack": 0, "chunk": 0, "slices": 1, "critical": True, "work_us": 1000.0},
    }
    counters = [event for event in events if event["ph"] == "C" and event["name"] == "memory of stage 0"]
    assert max(event["args"]["GB"] for event in counters) == 2.0


def test_arrows_lead_from_each_chunk_to_the_next(tmp_path):
    plan = equal_plan(interleaved(2, 2, 2), 2, Mesh(pp=2, virtual_stages=2))
    timeline = run_plan(plan, durations_of(plan, 1.0, 1.0), memory_of(plan))

    events = events_of(timeline, tmp_path / "trace.json")

    producers, consumers = ([event for event in events if event["ph"] == phase] for phase in "sf")
    assert len(producers) == 2 * 3 * 2
    for producer, consumer in zip(producers, consumers):
        assert producer["id"] == consumer["id"]
        assert consumer["ts"] > producer["ts"]
        assert consumer["tid"] == 1 - producer["tid"]
