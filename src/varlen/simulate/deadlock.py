"""Why a plan's tasks can't all run: the circle in which they wait for each other, in words."""

from __future__ import annotations

import numpy as np

from varlen.simulate.graph import Graph
from varlen.simulate.kinds import GRADIENT_SYNC, KIND_NAMES
from varlen.step_plan import StepPlan
from varlen.types import FloatArray


def explain(plan: StepPlan, graph: Graph, stops: FloatArray) -> str:
    """Return the circle of waiting tasks of a graph that the engine could not finish.

    Each stream that isn't done stands at its first task that hasn't run. From there the way leads to what that task
    waits for, or to a task of its group whose turn has not come; and if that isn't the first of its own stream
    either, to the one that is. A way without end among finitely many streams runs in a circle.

    Args:
        plan: the plan.
        graph: its tasks.
        stops: float64 `[num_tasks]`: when each ended, NaN for those that didn't.

    Cost: O(tasks).
    """
    offsets = graph.stream_offsets
    missing = np.isnan(stops)
    stream_of = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    heads = np.full(len(offsets) - 1, -1)
    stuck = np.flatnonzero(missing)[::-1]
    heads[stream_of[stuck]] = stuck  # of several the last written, the first of the stream
    path: list[int] = [int(heads[heads >= 0][0])]
    said: list[str] = []
    while True:
        task = path[-1]
        waited, together = _waited_for(task, graph, missing, stream_of, heads)
        head = int(heads[stream_of[waited]])
        words = f"{_place(plan, graph, task)} waits in {_task(plan, graph, task)} for {_task(plan, graph, waited)}"
        if graph.places[waited] != graph.places[task]:
            words += f" on {_place(plan, graph, waited)}"
        words += ", which is to start together with it" if together else ""
        if head != waited:
            words += f"{' and' if together else ', which'} comes there after {_task(plan, graph, head)}"
        said.append(words)
        if head in path:
            circle = said[path.index(head) :]
            break
        path.append(head)
    return (
        f"the order of tasks waits in a circle: {'; '.join(circle)}. {int(missing.sum()):,} of {len(stops):,} tasks "
        "can't run. A backward MicroPack must come after every forward MicroPack with slices of its documents, and "
        "ranks that run MicroPacks together must have them in one order"
    )


def _waited_for(
    task: int, graph: Graph, missing: np.ndarray, stream_of: np.ndarray, heads: np.ndarray
) -> tuple[int, bool]:
    """The task that the first task of a stream waits for, and whether the two start together."""
    for other in graph.afters[task].tolist():
        if other >= 0 and missing[other]:
            return other, False
    members = np.flatnonzero(graph.groups == graph.groups[task])
    for member in members[members != task].tolist():
        is_there = heads[stream_of[member]] == member
        if not is_there or any(other >= 0 and missing[other] for other in graph.afters[member].tolist()):
            return member, True
    raise AssertionError("a task that waits for nothing has run")


def _place(plan: StepPlan, graph: Graph, task: int) -> str:
    place = int(graph.places[task])
    return f"stage {place % plan.mesh.pp} of rank {place // plan.mesh.pp}"


def _task(plan: StepPlan, graph: Graph, task: int) -> str:
    kind = int(graph.kinds[task])
    if kind == GRADIENT_SYNC:
        return KIND_NAMES[kind]
    micropacks = plan.backward if graph.backward_of[task] else plan.forward
    number = graph.micropacks[task] - micropacks.rank_offsets[graph.places[task] // plan.mesh.pp]
    chunk = f" (chunk {graph.chunks[task]})" if plan.mesh.virtual_stages > 1 else ""
    return f"{KIND_NAMES[kind]} of MicroPack {number}{chunk}"
