"""`Timeline`: start and end of every task of a planned step, and the memory of each GPU over time."""

from __future__ import annotations

import gzip
import io
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from varlen import __version__
from varlen.files.ours import atomic_file
from varlen.simulate.graph import GATHER, GRADIENT_SYNC, KIND_NAMES
from varlen.step_plan import BACKWARD, FORWARD, KINDS, StepPlan
from varlen.types import FloatArray, Int32Array, IntArray, rebuilt


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """A simulated step as flat arrays; read-only.

    Tasks are ordered by stream, and by time within a stream: first the compute streams (rank 0 stage 0, rank 0 stage
    1 and so on), then links and collectives. Times are seconds since the step's beginning.
    """

    plan: StepPlan
    """The simulated plan."""
    kinds: npt.NDArray[np.uint8]
    """uint8 `[num_tasks]`: FORWARD, BACKWARD, WEIGHT, SEND_FORWARD, SEND_BACKWARD, GRADIENT_SYNC, GATHER."""
    ranks: Int32Array
    """int32 `[num_tasks]`: the data-parallel rank; a message stays within a rank."""
    stages: Int32Array
    """int32 `[num_tasks]`: the pipeline stage; of a message, the sending stage."""
    chunks: Int32Array
    """int32 `[num_tasks]`: the chunk of layers; -1 for the gradient sync of a stage."""
    micropacks: Int32Array
    """int32 `[num_tasks]`: index in `plan.forward` or `plan.backward`, see `backward_of`; -1 for the sync."""
    backward_of: npt.NDArray[np.bool_]
    """bool `[num_tasks]`: whether the task belongs to a MicroPack of `plan.backward`."""
    starts_s: FloatArray
    """float64 `[num_tasks]`."""
    stops_s: FloatArray
    """float64 `[num_tasks]`. Ranks that share a document end a task together, when the last of them is done."""
    work_s: FloatArray
    """float64 `[num_tasks]`: seconds of work; less than `stops_s - starts_s` if the task waits for others."""
    lags_s: FloatArray
    """float64 `[num_tasks]`: seconds from its end until dependent tasks may start: the latency of a message."""
    deciders: Int32Array
    """int32 `[num_tasks]`: the last task that this one waited for; -1 for none."""
    memory_offsets: IntArray
    """int64 `[dp * pp + 1]`: stage s of rank r has the points from `memory_offsets[r * pp + s]` to the next."""
    memory_times_s: FloatArray
    """float64 `[num_points]`: rising within a stage."""
    memory_bytes: FloatArray
    """float64 `[num_points]`: memory of one GPU of the stage from that time until the next point."""
    memory_limit_bytes: float
    """Bytes that a GPU may use."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False

    def __repr__(self) -> str:
        peak = self.peaks_bytes.max(initial=0.0) / 1e9
        return f"Timeline({self.makespan_s:.4g} s, {self.num_tasks:,} tasks, peak {peak:.1f} GB)"

    __reduce__ = rebuilt  # arrays are read-only in another process too

    @property
    def num_tasks(self) -> int:
        """Number of tasks of all streams."""
        return len(self.kinds)

    @property
    def makespan_s(self) -> float:
        """Seconds from the step's beginning to the end of its last task."""
        return float(self.stops_s.max(initial=0.0))

    @property
    def busy_s(self) -> FloatArray:
        """float64 `[dp, pp]`: seconds in which each stage computes; the rest is `exposed_s` and bubbles."""
        dp, pp = self.plan.mesh.dp, self.plan.mesh.pp
        computes = self.kinds < KINDS
        stage_ids = self.ranks[computes].astype(np.int64) * pp + self.stages[computes]  # rank * pp + stage
        busy = np.bincount(stage_ids, self.work_s[computes], dp * pp).astype(np.float64)
        return busy.reshape(dp, pp)

    @property
    def exposed_s(self) -> FloatArray:
        """float64 `[dp, pp]`: seconds of each stage's collectives that don't overlap with its computation.

        Collectives are the gradient sync, gathered parameters and scattered gradients.
        """
        dp, pp = self.plan.mesh.dp, self.plan.mesh.pp
        collects = (self.kinds == GRADIENT_SYNC) | (self.kinds == GATHER)
        if not collects.any():
            return np.zeros((dp, pp))
        some = np.flatnonzero(collects | (self.kinds < KINDS))
        stage_ids = self.ranks[some].astype(np.int64) * pp + self.stages[some]
        # The union of computation and collectives, less computation. Stages are shifted behind each other in time, so
        # that one running maximum of ends serves all of them.
        shift_s = stage_ids * self.makespan_s
        begins, ends = shift_s + self.starts_s[some], shift_s + self.starts_s[some] + self.work_s[some]
        order = np.lexsort((begins, stage_ids))
        begins, ends = begins[order], ends[order]
        covered_until = np.concatenate(([0.0], np.maximum.accumulate(ends)[:-1]))
        more_s = np.maximum(ends - np.maximum(begins, covered_until), 0.0)
        covered = np.bincount(stage_ids[order], more_s, dp * pp).reshape(dp, pp)
        return np.maximum(covered - self.busy_s, 0.0)

    @property
    def exposed_ratio(self) -> float:
        """The share of all stages' time in which they wait for their collectives; see `exposed_s`."""
        return float(self.exposed_s.mean() / self.makespan_s) if self.makespan_s > 0 else 0.0

    @property
    def bubble_ratios(self) -> FloatArray:
        """float64 `[dp, pp]`: the share of the step in which each stage neither computes nor runs a collective."""
        makespan = self.makespan_s
        used = self.busy_s + self.exposed_s
        return np.maximum(1 - used / makespan, 0.0) if makespan > 0 else np.zeros_like(used)

    @property
    def bubble_ratio(self) -> float:
        """The share of all stages' time in which they wait for other stages and ranks.

        It doesn't include exposed communication: the shares of work, `exposed_ratio` and this add up to 1.
        """
        return float(self.bubble_ratios.mean())

    @property
    def imbalance(self) -> float:
        """Work of the busiest data-parallel rank over the mean; 1.0 is even."""
        work = self.busy_s.sum(1)
        return float(work.max() / work.mean()) if work.sum() > 0 else 1.0

    @property
    def peaks_bytes(self) -> FloatArray:
        """float64 `[dp, pp]`: peak memory of one GPU of each stage."""
        dp, pp = self.plan.mesh.dp, self.plan.mesh.pp
        return np.maximum.reduceat(self.memory_bytes, self.memory_offsets[:-1]).reshape(dp, pp)

    @property
    def peak_bytes(self) -> float:
        """Peak memory of any GPU."""
        return float(self.memory_bytes.max())

    @property
    def critical_path(self) -> Int32Array:
        """int32 `[num_critical]`: tasks, first to last, each of which waited for the one before.

        Their durations `stops_s - starts_s`, and the `lags_s` of messages that the next task waited for, add up to
        the makespan.
        """
        path = []
        task = int(self.stops_s.argmax()) if self.num_tasks else -1
        while task >= 0:
            path.append(task)
            task = int(self.deciders[task])
        return np.array(path[::-1], np.int32)

    def to_trace(self, path: str | Path) -> None:
        """Write the timeline for https://ui.perfetto.dev or chrome://tracing.

        Args:
            path: of the JSON file to write; with the ending `.gz` it is compressed.
        """
        write_trace(self, path)


_Event = dict[str, Any]
_MICROSECONDS = 1e6


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Write a timeline as JSON in Chrome's Trace Event Format.

    A data-parallel rank is a process, a pipeline stage a thread of it. Messages and collectives, which may overlap
    each other, are asynchronous events of the process; arrows lead from each task to the one that uses its output;
    memory is a counter of each stage, in GB of 1e9 bytes.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # a pipe or a device
        _write(timeline, path, is_packed=path.suffix == ".gz")
        return
    with atomic_file(path, is_synced=False) as part:
        _write(timeline, part, is_packed=path.suffix == ".gz")


def _write(timeline: Timeline, path: Path, *, is_packed: bool) -> None:
    with _opened(path, is_packed=is_packed) as file:
        writer = json.dumps({"writer": f"varlen {__version__}"}, separators=(",", ":"))
        file.write(f'{{"otherData":{writer},"displayTimeUnit":"ms","traceEvents":[\n')
        between = ""
        for event in itertools.chain(
            _track_names(timeline), _tasks(timeline), _arrows(timeline), _memory(timeline)
        ):
            file.write(between + json.dumps(event, separators=(",", ":")))
            between = ",\n"
        file.write("\n]}\n")


def _opened(path: Path, *, is_packed: bool) -> IO[str]:
    if is_packed:
        return io.TextIOWrapper(gzip.open(path, "wb", compresslevel=5), encoding="utf-8")
    return path.open("w", encoding="utf-8")


def _track_names(timeline: Timeline) -> Iterator[_Event]:
    """Yield names and order of processes and threads."""
    mesh = timeline.plan.mesh
    for rank in range(mesh.dp):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for stage in range(mesh.pp):
            track = {"ph": "M", "pid": rank, "tid": stage}
            yield {**track, "name": "thread_name", "args": {"name": f"stage {stage}"}}
            yield {**track, "name": "thread_sort_index", "args": {"sort_index": stage}}


def _tasks(timeline: Timeline) -> Iterator[_Event]:
    """Yield every task: one event if it computes, a begin and an end event if it is a message or a collective."""
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
    """Yield arrows from each task to that of the next chunk, which uses its output."""
    middles = ((timeline.starts_s + timeline.stops_s) / 2 * _MICROSECONDS).tolist()
    ranks, stages = timeline.ranks.tolist(), timeline.stages.tolist()
    number = 0
    for kind, pack in ((FORWARD, timeline.plan.forward), (BACKWARD, timeline.plan.backward)):
        task_of = np.full((timeline.plan.mesh.num_chunks, pack.num_micropacks), -1, np.int64)
        tasks = np.flatnonzero(timeline.kinds == kind)
        task_of[timeline.chunks[tasks], timeline.micropacks[tasks]] = tasks
        path = task_of if kind == FORWARD else task_of[::-1]
        for producer, consumer in zip(path[:-1].ravel().tolist(), path[1:].ravel().tolist()):
            for phase, task in (("s", producer), ("f", consumer)):
                arrow = {"ph": phase, "id": number, "name": "output", "cat": KIND_NAMES[kind]}
                point = {"pid": ranks[task], "tid": stages[task], "ts": middles[task]}
                yield {**arrow, **point, "bp": "e"}
            number += 1


def _memory(timeline: Timeline) -> Iterator[_Event]:
    """Yield the memory counters of stages."""
    pp = timeline.plan.mesh.pp
    for stage_id, (first, last) in enumerate(itertools.pairwise(timeline.memory_offsets.tolist())):
        times = (timeline.memory_times_s[first:last] * _MICROSECONDS).tolist()
        sizes = (timeline.memory_bytes[first:last] / 1e9).tolist()
        counter = {"ph": "C", "pid": stage_id // pp, "name": f"memory of stage {stage_id % pp}"}
        for time, size in zip(times, sizes):
            yield {**counter, "ts": time, "args": {"GB": size}}
