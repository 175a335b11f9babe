"""A timeline as a Chrome trace, which Perfetto and chrome://tracing draw: written event by event."""

from __future__ import annotations

import gzip
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from varlen import __version__
from varlen.files.token_tables import unfinished
from varlen.simulate.kinds import KIND_NAMES
from varlen.step_plan import BACKWARD, FORWARD, KINDS

if TYPE_CHECKING:
    from varlen.simulate.timeline import Timeline

_Event = dict[str, Any]
_MICROSECONDS = 1e6


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Write a timeline as JSON in the form of Chrome's Trace Event Format.

    A data-parallel rank is a process, a pipeline stage a thread of it. Messages and collectives, which may overlap
    each other, are asynchronous events of the process; arrows lead from each task to the one that takes its output;
    memory is a counter of each stage, in GB of 1e9 bytes.

    Args:
        timeline: what to write.
        path: of the file; with the ending `.gz` it is compressed.

    Cost: O(tasks) time, and the memory of a few numbers a task.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # a pipe or a device
        return _write(timeline, path, is_packed=path.suffix == ".gz")
    part = unfinished(path)
    try:
        _write(timeline, part, is_packed=path.suffix == ".gz")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write(timeline: Timeline, path: Path, *, is_packed: bool) -> None:
    with _opened(path, is_packed=is_packed) as file:
        writer = json.dumps({"writer": f"varlen {__version__}"}, separators=(",", ":"))
        file.write(f'{{"otherData":{writer},"displayTimeUnit":"ms","traceEvents":[\n')
        between = ""
        for event in itertools.chain(
            _places(timeline), _tasks(timeline), _arrows(timeline), _memory(timeline)
        ):
            file.write(between + json.dumps(event, separators=(",", ":")))
            between = ",\n"
        file.write("\n]}\n")


def _opened(path: Path, *, is_packed: bool) -> IO[str]:
    """A file to write text to."""
    if is_packed:
        return io.TextIOWrapper(gzip.open(path, "wb", compresslevel=5), encoding="utf-8")
    return path.open("w", encoding="utf-8")


def _places(timeline: Timeline) -> Iterator[_Event]:
    """What processes and threads are called, and in which order they stand."""
    mesh = timeline.plan.mesh
    for rank in range(mesh.dp):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for stage in range(mesh.pp):
            place = {"ph": "M", "pid": rank, "tid": stage}
            yield {**place, "name": "thread_name", "args": {"name": f"stage {stage}"}}
            yield {**place, "name": "thread_sort_index", "args": {"sort_index": stage}}


def _tasks(timeline: Timeline) -> Iterator[_Event]:
    """Every task: one event if it computes, begin and end if it is a message or a collective."""
    plan = timeline.plan
    passes = (plan.forward, plan.backward)
    firsts = [pack.rank_offsets.tolist() for pack in passes]
    slices = [np.diff(pack.slice_offsets).tolist() for pack in passes]
    critical = set(timeline.critical_path.tolist())
    columns = (
        timeline.kinds,
        timeline.ranks,
        timeline.stages,
        timeline.chunks,
        timeline.micropacks,
        timeline.backward_of,
        timeline.starts_s * _MICROSECONDS,
        timeline.stops_s * _MICROSECONDS,
        timeline.work_s * _MICROSECONDS,
    )
    for task, (kind, rank, stage, chunk, micropack, of, start, stop, work) in enumerate(
        zip(*(column.tolist() for column in columns))
    ):
        event: _Event = {
            "name": KIND_NAMES[kind],
            "cat": KIND_NAMES[kind],
            "pid": rank,
            "tid": stage,
            "ts": start,
        }
        if micropack >= 0:
            number = micropack - firsts[of][rank]
            event["args"] = {"MicroPack": number, "chunk": chunk, "slices": slices[of][micropack]}
            event["args"]["critical"] = task in critical
        if kind < KINDS:
            event["name"] = f"{KIND_NAMES[kind]} {number}"
            event["args"]["work_us"] = work
            yield {"ph": "X", "dur": stop - start, **event}
        else:
            event["name"] = f"stage {stage}: {KIND_NAMES[kind]}"
            yield {"ph": "b", "id": task, **event}
            yield {"ph": "e", "id": task, **event, "ts": stop}


def _arrows(timeline: Timeline) -> Iterator[_Event]:
    """From each task to that of the next chunk, which takes its output."""
    middles = ((timeline.starts_s + timeline.stops_s) / 2 * _MICROSECONDS).tolist()
    ranks, stages = timeline.ranks.tolist(), timeline.stages.tolist()
    number = 0
    for kind, pack in ((FORWARD, timeline.plan.forward), (BACKWARD, timeline.plan.backward)):
        task_of = np.full((timeline.plan.mesh.num_chunks, pack.num_micropacks), -1, np.int64)
        tasks = np.flatnonzero(timeline.kinds == kind)
        task_of[timeline.chunks[tasks], timeline.micropacks[tasks]] = tasks
        path = task_of if kind == FORWARD else task_of[::-1]
        for giver, taker in zip(path[:-1].ravel().tolist(), path[1:].ravel().tolist()):
            for phase, task in (("s", giver), ("f", taker)):
                arrow = {"ph": phase, "id": number, "name": "output", "cat": KIND_NAMES[kind]}
                place = {"pid": ranks[task], "tid": stages[task], "ts": middles[task]}
                yield {**arrow, **place, "bp": "e"}
            number += 1


def _memory(timeline: Timeline) -> Iterator[_Event]:
    """A counter of each stage, a point wherever it changes."""
    pp = timeline.plan.mesh.pp
    for place, (first, last) in enumerate(itertools.pairwise(timeline.memory_offsets.tolist())):
        times = (timeline.memory_times_s[first:last] * _MICROSECONDS).tolist()
        sizes = (timeline.memory_bytes[first:last] / 1e9).tolist()
        counter = {"ph": "C", "pid": place // pp, "name": f"memory of stage {place % pp}"}
        for time, size in zip(times, sizes):
            yield {**counter, "ts": time, "args": {"GB": size}}
