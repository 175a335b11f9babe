"""The task graph of a plan: which stream runs which task after which others, as flat arrays for the engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from varlen.simulate.computes import Computes, computes_of, last_forwards
from varlen.simulate.durations import Durations, gathers_s
from varlen.simulate.groups import lock_steps
from varlen.simulate.kinds import GATHER, GRADIENT_SYNC, SEND_BACKWARD, SEND_FORWARD
from varlen.step_plan import BACKWARD, FORWARD, KINDS, WEIGHT, StepPlan
from varlen.types import FloatArray, Int32Array, IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Graph:
    """Tasks stream by stream, each stream in its order: compute streams first, one a stage of a rank."""

    stream_offsets: Int32Array
    """int32 `[num_streams + 1]`: the tasks of each stream; the first `dp * pp` compute."""
    afters: Int32Array
    """int32 `[num_tasks, 1]`: the task that must have ended, besides the one before in the stream; -1 for none."""
    lags_s: FloatArray
    """float64 `[num_tasks]`: seconds from a task's end until those after it may start."""
    lengths_s: FloatArray
    """float64 `[num_tasks]`."""
    groups: Int32Array
    """int32 `[num_tasks]`: tasks of one group start together; -1 for a task alone."""
    num_groups: int
    """How many groups there may be."""
    kinds: npt.NDArray[np.uint8]
    """uint8 `[num_tasks]`."""
    places: Int32Array
    """int32 `[num_tasks]`: `rank * pp + stage`."""
    chunks: Int32Array
    """int32 `[num_tasks]`; -1 for the gradient sync."""
    micropacks: Int32Array
    """int32 `[num_tasks]`: in the forward or backward MicroPacks; -1 for the gradient sync."""
    backward_of: npt.NDArray[np.bool_]
    """bool `[num_tasks]`: whether it belongs to a backward MicroPack."""


class _Draft:
    """Tasks kind after kind, each with its stream and its turn in there, before they are sorted by them."""

    def __init__(self, computes: Computes) -> None:
        count = len(computes.kinds)
        self.tasks = np.stack((computes.places, computes.chunks, computes.micropacks, computes.kinds))
        """int64 `[4, tasks so far]`: place, chunk, MicroPack, and the kind of the task that computes."""
        self.kinds = computes.kinds
        self.streams = computes.places
        """int64 `[tasks so far]`: a number for the stream of each."""
        self.turns = 4 * np.arange(count) + 4
        """int64 `[tasks so far]`: rises along a stream."""
        self.afters = np.full(count, -1)
        """int64 `[tasks so far]`: the task that must have ended before, by its number here."""

    def add(self, kinds: npt.ArrayLike, tasks: IntArray, streams: IntArray, turns: npt.ArrayLike) -> IntArray:
        """Add tasks, given as columns of `tasks`, and return their numbers."""
        first, count = len(self.kinds), tasks.shape[1]
        self.tasks = np.concatenate((self.tasks, tasks), axis=1)
        self.kinds = np.concatenate((self.kinds, np.broadcast_to(kinds, count)))
        self.streams = np.concatenate((self.streams, streams))
        self.turns = np.concatenate((self.turns, np.broadcast_to(turns, count)))
        self.afters = np.concatenate((self.afters, np.full(count, -1)))
        return np.arange(first, first + count)


def build_graph(
    plan: StepPlan, durations: Durations, slowdown: FloatArray, overlap: bool, contention: bool
) -> Graph:
    """Lay a plan's tasks, messages and collectives out in streams.

    - A stage of a rank computes its tasks in the plan's order.
    - Messages between stages leave over one link for each neighbour, in the order in which they are computed;
      without `contention` each has a link of its own, without `overlap` the stage that sends waits.
    - Parameters, where they are sharded, are gathered layer by layer while a task computes, and its gradients
      scattered: the task takes as long as the longer of the two. Without `overlap` they come one after the other.
    - Gradients are added up when all data-parallel ranks of a stage are done.

    Args:
        plan: the plan.
        durations: of its tasks.
        slowdown: float64 `[dp * pp]`: what each stage's seconds are multiplied by.
        overlap: whether a stage computes while it sends and gathers.
        contention: whether the messages of a link wait for each other.

    Raises:
        PlanError: stages that leave out a MicroPack, a backward without its forward, unequal numbers of MicroPacks
            where parameters are sharded.

    Cost: O(tasks · log tasks) at most; about a microsecond a task.
    """
    mesh = plan.mesh
    num_places = mesh.dp * mesh.pp
    computes = computes_of(plan)
    draft = _Draft(computes)
    send_of = _add_sends(draft, computes, mesh.pp, mesh.num_chunks, num_places, overlap, contention)
    _tie_computes(draft, computes, plan, send_of)
    if durations.gather.any():
        _add_gathers(draft, computes, num_places, overlap)
    if durations.sync.any():
        _add_syncs(draft, computes, num_places, overlap)
    return _sorted(draft, plan, durations, slowdown, overlap)


def _add_sends(
    draft: _Draft,
    computes: Computes,
    pp: int,
    num_chunks: int,
    num_places: int,
    overlap: bool,
    contention: bool,
) -> IntArray:
    """Add a message behind each task that has one to send; return the message of each, -1 for none."""
    onward = (computes.kinds == FORWARD) & (computes.chunks < num_chunks - 1)
    back = (computes.kinds == BACKWARD) & (computes.chunks > 0)
    senders = np.flatnonzero(onward | back)
    is_back = back[senders]
    if not overlap:
        streams = computes.places[senders]
    elif contention:  # of two stages each has one link
        streams = num_places + 2 * computes.places[senders] + (is_back if pp > 2 else 0)
    else:
        streams = 5 * num_places + np.arange(len(senders))
    kinds = np.where(is_back, SEND_BACKWARD, SEND_FORWARD)
    sends = draft.add(kinds, draft.tasks[:, senders], streams, 4 * senders + 5)
    draft.afters[sends] = senders
    send_of = np.full(len(computes.kinds), -1)
    send_of[senders] = sends
    return send_of


def _tie_computes(draft: _Draft, computes: Computes, plan: StepPlan, send_of: IntArray) -> None:
    """Let each task wait for its input: a message, or at the last chunk the forward of the same documents."""
    last = plan.mesh.num_chunks - 1
    forwards = computes.table(FORWARD, last + 1, plan.forward.num_micropacks)
    backwards = computes.table(BACKWARD, last + 1, plan.backward.num_micropacks)
    draft.afters[forwards[1:]] = send_of[forwards[:-1]]
    draft.afters[backwards[:-1]] = send_of[backwards[1:]]
    waits = last_forwards(plan)
    some = waits >= 0
    draft.afters[backwards[last, some]] = forwards[last, waits[some]]
    if plan.splits_backward:
        weights = computes.table(WEIGHT, last + 1, plan.backward.num_micropacks)
        draft.afters[weights] = backwards


def _add_gathers(draft: _Draft, computes: Computes, num_places: int, overlap: bool) -> None:
    """Gather parameters for each task, or scatter its gradients, beside it or before it."""
    takers = np.arange(len(computes.kinds))
    streams = 3 * num_places + computes.places if overlap else computes.places
    gathers = draft.add(GATHER, draft.tasks[:, takers], streams, 4 * takers + 3)
    draft.afters[gathers] = draft.afters[takers]  # nothing is gathered before there is something to compute


def _add_syncs(draft: _Draft, computes: Computes, num_places: int, overlap: bool) -> None:
    """Add up gradients once a stage of each rank has nothing left to compute."""
    places, nothing = np.arange(num_places), np.full(num_places, -1)
    tasks = np.stack((places, nothing, nothing, np.zeros(num_places, np.int64)))
    streams = 4 * num_places + places if overlap else places
    syncs = draft.add(GRADIENT_SYNC, tasks, streams, 4 * len(computes.kinds) + 4)
    ends = np.searchsorted(computes.places, places, "right")
    some = ends > np.searchsorted(computes.places, places)
    draft.afters[syncs[some]] = ends[some] - 1


def _sorted(
    draft: _Draft, plan: StepPlan, durations: Durations, slowdown: FloatArray, overlap: bool
) -> Graph:
    """Bring tasks into the order of their streams, and add what they take and with whom they start."""
    num_places = plan.mesh.dp * plan.mesh.pp
    order = np.argsort(draft.streams * (draft.turns.max(initial=0) + 1) + draft.turns, kind="stable")
    number_of = np.full(len(order) + 1, -1, np.int32)  # -1 stands for none, and finds the last
    number_of[order] = np.arange(len(order))
    kinds, streams, tasks = draft.kinds[order], draft.streams[order], draft.tasks[:, order]
    compute_offsets = np.searchsorted(streams, np.arange(num_places))
    others = int(np.searchsorted(streams, num_places))
    begins = np.flatnonzero(np.diff(streams[others:], prepend=-1)) + others
    lengths, lags = _seconds(kinds, tasks, plan, durations, slowdown)
    groups, num_groups = _groups(kinds, tasks, plan, overlap)
    places, chunks, micropacks, passes = tasks.astype(np.int32)
    return Graph(
        stream_offsets=np.concatenate((compute_offsets, begins, [len(order)])).astype(np.int32),
        afters=number_of[draft.afters[order], np.newaxis],
        lags_s=lags,
        lengths_s=lengths,
        groups=groups,
        num_groups=num_groups,
        kinds=kinds.astype(np.uint8),
        places=places,
        chunks=chunks,
        micropacks=micropacks,
        backward_of=passes != FORWARD,
    )


def _seconds(
    kinds: IntArray, tasks: IntArray, plan: StepPlan, durations: Durations, slowdown: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """The length and the lag of each task."""
    places, chunks, micropacks, passes = tasks
    lengths, lags = np.zeros(len(kinds)), np.zeros(len(kinds))
    for kind, table in (
        (FORWARD, durations.forward),
        (BACKWARD, durations.backward),
        (WEIGHT, durations.weight),
    ):
        some = kinds == kind
        lengths[some] = table[chunks[some], micropacks[some]] * slowdown[places[some]]
    for kind, seconds, rows in (
        (SEND_FORWARD, durations.send_forward, durations.forward_rows),
        (SEND_BACKWARD, durations.send_backward, durations.backward_rows),
    ):
        some = kinds == kind
        lengths[some] = seconds[micropacks[some]]
        lags[some] = np.where(rows[micropacks[some]] > 0, durations.latency_s, 0)
    some = kinds == GATHER
    gathers = gathers_s(durations.gather, splits=plan.splits_backward)
    lengths[some] = gathers[passes[some], chunks[some]]
    some = kinds == GRADIENT_SYNC
    lengths[some] = durations.sync[places[some] % plan.mesh.pp]
    return lengths, lags


def _groups(kinds: IntArray, tasks: IntArray, plan: StepPlan, overlap: bool) -> tuple[Int32Array, int]:
    """The group that each task starts with, and how many numbers there are for groups."""
    mesh = plan.mesh
    places, chunks, micropacks, passes = tasks
    steps = lock_steps(plan)
    groups, count = np.full(len(kinds), -1, np.int64), mesh.num_chunks * steps.num_groups
    # Weight gradients wait for other ranks only to be scattered.
    kinds_in_step = KINDS if mesh.sharding == "parameters" else KINDS - 1
    for kind, step_of in ((FORWARD, steps.forward), (BACKWARD, steps.backward), (WEIGHT, steps.backward))[
        :kinds_in_step
    ]:
        some = np.flatnonzero((passes == kind) & ((kinds == kind) | (kinds == GATHER)))
        step = step_of[micropacks[some]]
        slots = kind + KINDS * ((kinds[some] == GATHER) & (not overlap))
        groups[some] = np.where(step >= 0, slots * count + chunks[some] * steps.num_groups + step, -1)
    some = kinds == GRADIENT_SYNC
    groups[some] = 2 * KINDS * count + places[some] % mesh.pp
    return groups.astype(np.int32), 2 * KINDS * count + mesh.pp
