"""A trace holds every task, message, arrow and point of memory in the form that Perfetto reads."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from step_plans import durations_of, equal_plan, memory_of, priced_plans

from varlen.simulate.api import run_plan
from varlen.simulate.graph import Durations
from varlen.simulate.schedules import interleaved, one_f_one_b
from varlen.simulate.timeline import Timeline
from varlen.step_plan import KINDS, Mesh, StepPlan

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
def test_every_timeline_becomes_a_trace(tmp_path_factory: Any, priced: tuple[StepPlan, Durations]) -> None:
    plan, seconds = priced
    timeline = run_plan(plan, seconds, memory_of(plan))

    check_events(timeline, events_of(timeline, tmp_path_factory.mktemp("trace") / "trace.json"))


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_tasks_stand_at_their_rank_stage_and_time(tmp_path: Path, name: str) -> None:
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


def test_arrows_lead_from_each_chunk_to_the_next(tmp_path: Path) -> None:
    plan = equal_plan(interleaved(2, 2, 2), 2, Mesh(pp=2, virtual_stages=2))
    timeline = run_plan(plan, durations_of(plan, 1.0, 1.0), memory_of(plan))

    events = events_of(timeline, tmp_path / "trace.json")

    givers, takers = ([event for event in events if event["ph"] == phase] for phase in "sf")
    assert len(givers) == 2 * 3 * 2
    for giver, taker in zip(givers, takers):
        assert giver["id"] == taker["id"]
        assert taker["ts"] > giver["ts"]
        assert taker["tid"] == 1 - giver["tid"]
