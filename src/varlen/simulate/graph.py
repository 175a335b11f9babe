"""The task graph of a plan as flat arrays: dependencies and durations of tasks; and `StageCosts`, their prices."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from varlen import jit
from varlen.cost import kernels
from varlen.cost.memory import Memory
from varlen.cost.model import CostModel
from varlen.cost.rates import (
    FORWARD_HEAD,
    FORWARD_LAYER,
    INPUT_HEAD,
    INPUT_LAYER,
    ROWS,
    WEIGHT_HEAD,
    WEIGHT_LAYER,
    Rates,
)
from varlen.errors import PlanError
from varlen.step_plan import BACKWARD, FORWARD, KINDS, WEIGHT, Mesh, MicroPacks, StepPlan
from varlen.types import FloatArray, Int32Array, IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Graph:
    """Tasks ordered by stream: compute streams first, one for each stage of a rank."""

    stream_offsets: Int32Array
    """int32 `[num_streams + 1]`: the tasks of each stream; the first `dp * pp` streams compute."""
    afters: Int32Array
    """int32 `[num_tasks, 1]`: the task that must end first, besides the previous one in the stream; -1 for none."""
    lags_s: FloatArray
    """float64 `[num_tasks]`: seconds from a task's end until dependent tasks may start."""
    lengths_s: FloatArray
    """float64 `[num_tasks]`."""
    groups: Int32Array
    """int32 `[num_tasks]`: tasks of one group start together; -1 for no group."""
    num_groups: int
    """Upper bound of group numbers."""
    kinds: npt.NDArray[np.uint8]
    """uint8 `[num_tasks]`."""
    stage_ids: Int32Array
    """int32 `[num_tasks]`: `rank * pp + stage`."""
    chunks: Int32Array
    """int32 `[num_tasks]`; -1 for the gradient sync."""
    micropacks: Int32Array
    """int32 `[num_tasks]`: in the forward or backward MicroPacks; -1 for the gradient sync."""
    backward_of: npt.NDArray[np.bool_]
    """bool `[num_tasks]`: whether it belongs to a backward MicroPack."""


class _Draft:
    """Tasks by kind, each with its stream and its position there, before they are sorted."""

    def __init__(self, computes: Computes) -> None:
        count = len(computes.kinds)
        self.tasks = np.stack((computes.stage_ids, computes.chunks, computes.micropacks, computes.kinds))
        """int64 `[4, tasks so far]`: stage id, chunk, MicroPack, and the kind of the compute task."""
        self.kinds = computes.kinds
        self.streams = computes.stage_ids
        """int64 `[tasks so far]`: the stream of each."""
        self.turns = 4 * np.arange(count) + 4
        """int64 `[tasks so far]`: position in the stream, rising."""
        self.afters = np.full(count, -1)
        """int64 `[tasks so far]`: index of the task that must end first."""

    def add(self, kinds: npt.ArrayLike, tasks: IntArray, streams: IntArray, turns: npt.ArrayLike) -> IntArray:
        """Add tasks, given as columns of `tasks`, and return their indices."""
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
    """Build the streams of a plan's tasks, messages and collectives, in about a microsecond a task.

    - A stage of a rank computes its tasks in the plan's order.
    - Messages between stages use one link for each neighbour, in the order in which they are computed;
      without `contention`, each has a link of its own; without `overlap`, the sending stage waits.
    - Sharded parameters are gathered, and gradients scattered, layer by layer while a task computes: it takes as long
      as the longer of the two. Without `overlap`, they run one after the other.
    - Gradients are synchronized when all data-parallel ranks of a stage are done.

    `slowdown` has a factor for the seconds of each stage, `[dp * pp]`.
    """
    mesh = plan.mesh
    num_stage_ids = mesh.dp * mesh.pp
    computes = computes_of(plan)
    draft = _Draft(computes)
    send_of = _add_sends(draft, computes, mesh.pp, mesh.num_chunks, num_stage_ids, overlap, contention)
    _tie_computes(draft, computes, plan, send_of)
    if durations.gather.any():
        _add_gathers(draft, computes, num_stage_ids, overlap)
    if durations.sync.any():
        _add_syncs(draft, computes, num_stage_ids, overlap)
    return _sorted(draft, plan, durations, slowdown, overlap)


def _add_sends(
    draft: _Draft,
    computes: Computes,
    pp: int,
    num_chunks: int,
    num_stage_ids: int,
    overlap: bool,
    contention: bool,
) -> IntArray:
    """Add the message of each task that sends one; returns the index of each task's message, -1 for none."""
    onward = (computes.kinds == FORWARD) & (computes.chunks < num_chunks - 1)
    back = (computes.kinds == BACKWARD) & (computes.chunks > 0)
    senders = np.flatnonzero(onward | back)
    is_back = back[senders]
    if not overlap:
        streams = computes.stage_ids[senders]
    elif contention:  # each of two stages has only one link
        streams = num_stage_ids + 2 * computes.stage_ids[senders] + (is_back if pp > 2 else 0)
    else:
        streams = 5 * num_stage_ids + np.arange(len(senders))
    kinds = np.where(is_back, SEND_BACKWARD, SEND_FORWARD)
    sends = draft.add(kinds, draft.tasks[:, senders], streams, 4 * senders + 5)
    draft.afters[sends] = senders
    send_of = np.full(len(computes.kinds), -1)
    send_of[senders] = sends
    return send_of


def _tie_computes(draft: _Draft, computes: Computes, plan: StepPlan, send_of: IntArray) -> None:
    """Make each task wait for its input: a message, or at the last chunk the forward of the same documents."""
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


def _add_gathers(draft: _Draft, computes: Computes, num_stage_ids: int, overlap: bool) -> None:
    """Add the gather of parameters or scatter of gradients of each task, parallel to it or before it."""
    consumers = np.arange(len(computes.kinds))
    streams = 3 * num_stage_ids + computes.stage_ids if overlap else computes.stage_ids
    gathers = draft.add(GATHER, draft.tasks[:, consumers], streams, 4 * consumers + 3)
    draft.afters[gathers] = draft.afters[consumers]  # gathering begins when the task's input is available


def _add_syncs(draft: _Draft, computes: Computes, num_stage_ids: int, overlap: bool) -> None:
    """Add the gradient sync of each stage after its last task."""
    stage_ids, nothing = np.arange(num_stage_ids), np.full(num_stage_ids, -1)
    tasks = np.stack((stage_ids, nothing, nothing, np.zeros(num_stage_ids, np.int64)))
    streams = 4 * num_stage_ids + stage_ids if overlap else stage_ids
    syncs = draft.add(GRADIENT_SYNC, tasks, streams, 4 * len(computes.kinds) + 4)
    ends = np.searchsorted(computes.stage_ids, stage_ids, "right")
    some = ends > np.searchsorted(computes.stage_ids, stage_ids)
    draft.afters[syncs[some]] = ends[some] - 1


def _sorted(
    draft: _Draft, plan: StepPlan, durations: Durations, slowdown: FloatArray, overlap: bool
) -> Graph:
    """Sort tasks by stream and position, and add durations and groups."""
    num_stage_ids = plan.mesh.dp * plan.mesh.pp
    order = np.argsort(draft.streams * (draft.turns.max(initial=0) + 1) + draft.turns, kind="stable")
    number_of = np.full(len(order) + 1, -1, np.int32)  # the last entry maps -1 (none) to -1
    number_of[order] = np.arange(len(order))
    kinds, streams, tasks = draft.kinds[order], draft.streams[order], draft.tasks[:, order]
    compute_offsets = np.searchsorted(streams, np.arange(num_stage_ids))
    others = int(np.searchsorted(streams, num_stage_ids))
    begins = np.flatnonzero(np.diff(streams[others:], prepend=-1)) + others
    lengths, lags = _seconds(kinds, tasks, plan, durations, slowdown)
    groups, num_groups = _groups(kinds, tasks, plan, overlap)
    stage_ids, chunks, micropacks, passes = tasks.astype(np.int32)
    return Graph(
        stream_offsets=np.concatenate((compute_offsets, begins, [len(order)])).astype(np.int32),
        afters=number_of[draft.afters[order], np.newaxis],
        lags_s=lags,
        lengths_s=lengths,
        groups=groups,
        num_groups=num_groups,
        kinds=kinds.astype(np.uint8),
        stage_ids=stage_ids,
        chunks=chunks,
        micropacks=micropacks,
        backward_of=passes != FORWARD,
    )


def _seconds(
    kinds: IntArray, tasks: IntArray, plan: StepPlan, durations: Durations, slowdown: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the duration and the lag of each task."""
    stage_ids, chunks, micropacks, passes = tasks
    lengths, lags = np.zeros(len(kinds)), np.zeros(len(kinds))
    for kind, table in (
        (FORWARD, durations.forward),
        (BACKWARD, durations.backward),
        (WEIGHT, durations.weight),
    ):
        some = kinds == kind
        lengths[some] = table[chunks[some], micropacks[some]] * slowdown[stage_ids[some]]
    for kind, seconds, rows in (
        (SEND_FORWARD, durations.send_forward, durations.forward_rows),
        (SEND_BACKWARD, durations.send_backward, durations.backward_rows),
    ):
        some = kinds == kind
        lengths[some] = seconds[micropacks[some]]
        lags[some] = np.where(rows[micropacks[some]] > 0, durations.latency_s, 0)
    some = kinds == GATHER
    lengths[some] = durations.gather[passes[some], chunks[some]]
    some = kinds == GRADIENT_SYNC
    lengths[some] = durations.sync[stage_ids[some] % plan.mesh.pp]
    return lengths, lags


def _groups(kinds: IntArray, tasks: IntArray, plan: StepPlan, overlap: bool) -> tuple[Int32Array, int]:
    """Return the group of each task, and the upper bound of group numbers."""
    mesh = plan.mesh
    stage_ids, chunks, micropacks, passes = tasks
    steps = lock_steps(plan)
    groups, count = np.full(len(kinds), -1, np.int64), mesh.num_chunks * steps.num_groups
    # Weight gradients wait for other ranks only if they are scattered.
    kinds_in_step = KINDS if mesh.sharding == "parameters" else KINDS - 1
    for kind, step_of in ((FORWARD, steps.forward), (BACKWARD, steps.backward), (WEIGHT, steps.backward))[
        :kinds_in_step
    ]:
        some = np.flatnonzero((passes == kind) & ((kinds == kind) | (kinds == GATHER)))
        step = step_of[micropacks[some]]
        slots = kind + KINDS * ((kinds[some] == GATHER) & (not overlap))
        groups[some] = np.where(step >= 0, slots * count + chunks[some] * steps.num_groups + step, -1)
    some = kinds == GRADIENT_SYNC
    groups[some] = 2 * KINDS * count + stage_ids[some] % mesh.pp
    return groups.astype(np.int32), 2 * KINDS * count + mesh.pp


class Computes(NamedTuple):
    """The decoded tasks of `plan.tasks`; int64 `[num_tasks]` each."""

    kinds: IntArray
    stage_ids: IntArray
    """`rank * pp + stage`."""
    chunks: IntArray
    micropacks: IntArray
    """Index in `plan.forward` for FORWARD, in `plan.backward` for the others."""

    def table(self, kind: int, num_chunks: int, num_micropacks: int) -> IntArray:
        """Return int64 `[num_chunks, num_micropacks]`: the task of a kind for each chunk and MicroPack."""
        task_of = np.full((num_chunks, num_micropacks), -1, np.int64)
        tasks = np.flatnonzero(self.kinds == kind)
        task_of[self.chunks[tasks], self.micropacks[tasks]] = tasks
        return task_of


def computes_of(plan: StepPlan) -> Computes:
    """Decode the tasks of a plan."""
    mesh = plan.mesh
    num_stage_ids, num_codes = mesh.dp * mesh.pp, KINDS * mesh.virtual_stages
    stage_ids = np.repeat(np.arange(num_stage_ids), np.diff(plan.task_offsets))
    if len(plan.task_offsets) != num_stage_ids + 1 or len(stage_ids) != len(plan.tasks):
        raise PlanError(
            f"the plan's task offsets hold {len(plan.task_offsets) - 1:,} stages and {len(stage_ids):,} tasks; the "
            f"mesh has {mesh.dp} x {mesh.pp} stages, the plan {len(plan.tasks):,} tasks"
        )
    codes = plan.tasks.astype(np.int64)
    if codes.max(initial=0) >= num_codes:
        raise PlanError(
            f"task code {codes.max()} stands for no task: {mesh.virtual_stages} chunks a stage have the codes 0 to "
            f"{num_codes - 1}, 3 * chunk on the stage + kind"
        )
    slots = stage_ids * num_codes + codes
    counts = np.bincount(slots, minlength=num_stage_ids * num_codes)
    _check_counts(plan, counts.reshape(num_stage_ids, num_codes))
    # With a small dtype, this is a radix sort.
    order = np.argsort(slots.astype(np.min_scalar_type(num_stage_ids * num_codes)), kind="stable")
    turns = np.empty(len(codes), np.int64)
    turns[order] = np.arange(len(codes)) - np.repeat(np.cumsum(counts) - counts, counts)
    kinds, ranks = codes % KINDS, stage_ids // mesh.pp
    firsts = np.stack((plan.forward.rank_offsets[:-1], plan.backward.rank_offsets[:-1]))
    return Computes(
        kinds=kinds,
        stage_ids=stage_ids,
        chunks=codes // KINDS * mesh.pp + stage_ids % mesh.pp,
        micropacks=firsts[np.minimum(kinds, BACKWARD), ranks] + turns,
    )


def _check_counts(plan: StepPlan, counts: IntArray) -> None:
    """Require that each stage has a task of each kind and chunk for each MicroPack of its rank."""
    mesh = plan.mesh
    wanted = np.zeros((mesh.dp, KINDS), np.int64)
    wanted[:, FORWARD] = plan.forward.counts
    wanted[:, BACKWARD] = plan.backward.counts
    wanted[:, WEIGHT] = plan.backward.counts * plan.splits_backward
    wrong = counts != np.tile(np.repeat(wanted, mesh.pp, axis=0), mesh.virtual_stages)
    if wrong.any():
        stage_id, code = (int(index) for index in np.unravel_index(wrong.argmax(), wrong.shape))
        kind, rank, stage = code % KINDS, stage_id // mesh.pp, stage_id % mesh.pp
        raise PlanError(
            f"stage {stage} of rank {rank} runs {counts[stage_id, code]:,} tasks of {KIND_NAMES[kind]} in its chunk "
            f"{code // KINDS}, and its rank has {wanted[rank, kind]:,} such MicroPacks "
            f"({int(wrong.any(1).sum()):,} of {len(wrong):,} stages are so); each runs once in each chunk"
        )


def last_forwards(plan: StepPlan) -> IntArray:
    """Return the forward MicroPack that each backward MicroPack waits for, int64 `[num_backward]`; -1 for none.

    A document's backward begins at its end, so a MicroPack waits for the last forward MicroPack of its rank that
    holds a slice of one of its documents.
    """
    if plan.backward is plan.forward and not plan.forward.starts.any():  # whole documents
        numbers = np.arange(plan.forward.num_micropacks)
        return np.where(np.diff(plan.forward.slice_offsets) > 0, numbers, -1)

    def keys(micropacks: MicroPacks, of_slice: Int32Array) -> IntArray:
        return (
            micropacks.ranks[of_slice].astype(np.int64) * (plan.num_documents + 1) + micropacks.document_ids
        )

    ahead, behind = plan.forward.micropack_of_slice, plan.backward.micropack_of_slice
    present, sought = keys(plan.forward, ahead), keys(plan.backward, behind)
    order = np.argsort(present, kind="stable")  # MicroPacks rise within a key
    where = np.searchsorted(present[order], sought, "right") - 1
    known = where >= 0
    known[known] = present[order][where[known]] == sought[known]
    if not known.all():
        first = int(np.flatnonzero(~known)[0])
        micropack, rank = behind[first], int(plan.backward.ranks[behind[first]])
        raise PlanError(
            f"backward MicroPack {micropack - plan.backward.rank_offsets[rank]} of rank {rank} holds document "
            f"{plan.backward.document_ids[first]}, which no forward MicroPack of this rank holds "
            f"({int((~known).sum()):,} of {len(known):,} backward slices are so)"
        )
    last = np.full(plan.backward.num_micropacks, -1, np.int64)
    np.maximum.at(last, behind, ahead[order][where])
    return last


class LockSteps(NamedTuple):
    """The groups of MicroPacks that run together in every chunk of layers."""

    forward: Int32Array
    """int32 `[num_forward_micropacks]`: the group of each; -1 for one that waits for no other rank.
    If parameters are sharded, each has a group."""
    backward: Int32Array
    """int32 `[num_backward_micropacks]`."""
    num_groups: int
    """Number of groups of the pass that has more."""


def lock_steps(plan: StepPlan) -> LockSteps:
    """Return which MicroPacks run together because their ranks exchange keys and values, or parameters.

    MicroPacks that hold the same slice of a merged document run together; if parameters are sharded, so do the n-th
    ones of all ranks. Groups with a common MicroPack are joined.
    """
    groups: list[Int32Array] = []
    most = 0
    for name, micropacks in (("forward", plan.forward), ("backward", plan.backward)):
        packs, keys = _merged(plan, micropacks)
        is_sharded = plan.mesh.sharding == "parameters"
        if is_sharded:
            counts = micropacks.counts
            if (counts != counts[0]).any():
                odd = int((counts != counts[0]).argmax())
                raise PlanError(
                    f"parameters are sharded, but rank 0 runs {counts[0]:,} {name} MicroPacks and rank {odd} runs "
                    f"{counts[odd]:,} ({len(np.unique(counts))} different numbers on {len(counts)} ranks): they "
                    "gather parameters together, so give each as many, empty ones where work is lacking"
                )
            everyone = np.arange(micropacks.num_micropacks)
            turns = everyone - micropacks.rank_offsets[micropacks.ranks]
            packs, keys = np.concatenate((packs, everyone)), np.concatenate((keys, -1 - turns))
        joined, count = _joined(packs, keys, micropacks.num_micropacks, smallest=1 if is_sharded else 2)
        groups.append(joined)
        most = max(most, count)
    return LockSteps(groups[0], groups[1], most)


def _merged(plan: StepPlan, micropacks: MicroPacks) -> tuple[IntArray, IntArray]:
    """Return the MicroPack of each slice of a merged document, and a key of its document and first token."""
    if plan.num_merged == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    shared = np.flatnonzero(plan.num_ranks[micropacks.document_ids] > 1)
    keys = (micropacks.document_ids[shared].astype(np.int64) << 32) + micropacks.starts[shared]
    return micropacks.micropack_of_slice[shared].astype(np.int64), keys


def _joined(packs: IntArray, keys: IntArray, num_micropacks: int, smallest: int) -> tuple[Int32Array, int]:
    """Return the connected components of MicroPacks with equal keys; -1 for those of fewer than `smallest`."""
    group_of = np.full(num_micropacks, -1, np.int32)
    if len(packs) == 0:
        return group_of, 0
    _, numbers = np.unique(keys, return_inverse=True)
    label = np.arange(num_micropacks)
    while True:  # take the lowest label among those with the same key, until nothing changes
        lowest = np.full(numbers.max() + 1, num_micropacks)
        np.minimum.at(lowest, numbers, label[packs])
        fresh = label.copy()
        np.minimum.at(fresh, packs, lowest[numbers])
        if (fresh == label).all():
            break
        label = fresh
    sizes = np.bincount(label, minlength=num_micropacks)
    large = np.flatnonzero(sizes >= smallest)
    number_of = np.full(num_micropacks, -1, np.int32)
    number_of[large] = np.arange(len(large))
    return number_of[label], len(large)


# Kinds of tasks besides FORWARD, BACKWARD and WEIGHT of `varlen.step_plan`.

SEND_FORWARD: Final = 3
"""Send the output of a chunk of layers to the stage of the next chunk."""
SEND_BACKWARD: Final = 4
"""Send the gradient of a chunk's input to the stage of the previous chunk."""
GRADIENT_SYNC: Final = 5
"""Synchronize the gradients of data-parallel ranks, once per step."""
GATHER: Final = 6
"""Gather a chunk's parameters, or scatter its gradients (`sharding="parameters"`)."""
KIND_NAMES: Final = (
    "forward",
    "backward",
    "weight gradients",
    "send forward",
    "send backward",
    "gradient sync",
    "gather parameters",
)
"""The name of each kind."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Durations:
    """Seconds and rows of every task of a plan, as flat arrays; read-only."""

    forward: FloatArray
    """float64 `[num_chunks, num_forward_micropacks]`: seconds of each forward MicroPack in each chunk of layers."""
    backward: FloatArray
    """float64 `[num_chunks, num_backward_micropacks]`: the whole backward pass, or only its input gradients."""
    weight: FloatArray
    """float64 as `backward`: the weight gradients if the backward is split, else 0."""
    send_forward: FloatArray
    """float64 `[num_forward_micropacks]`: seconds for which a MicroPack's output occupies a link."""
    send_backward: FloatArray
    """float64 `[num_backward_micropacks]`: seconds for which the gradient of its input occupies a link."""
    latency_s: float
    """Further seconds until a message arrives, in which the link is free."""
    gather: FloatArray
    """float64 `[3, num_chunks]`: seconds in which a task of each kind gathers parameters and reduces gradients; 0
    unless they are sharded. With overlap, a task takes as long as the longer of this and its computation."""
    sync: FloatArray
    """float64 `[pp]`: seconds of the gradient sync of a stage at the step's end."""
    forward_rows: FloatArray
    """float64 `[num_forward_micropacks]`: rows (tokens) that one GPU computes."""
    backward_rows: FloatArray
    """float64 `[num_backward_micropacks]`."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False


def durations(plan: StepPlan, cost: CostModel) -> Durations:
    """Price every task of a plan."""
    costs = stage_costs(cost, plan.mesh, splits=plan.splits_backward)
    with jit.sized(1e-4 * (len(plan.forward.starts) + len(plan.backward.starts))):
        prices = [prices_of(plan, micropacks, costs) for micropacks in (plan.forward, plan.backward)]
    return durations_of_prices(costs, *prices)


def prices_of(plan: StepPlan, micropacks: MicroPacks, costs: StageCosts) -> FloatArray:
    """Price MicroPacks of a plan, float64 `[num_micropacks, 7]`."""
    slices = np.stack([micropacks.starts, micropacks.stops, plan.num_ranks[micropacks.document_ids]])
    # A copy, since numba would compile the kernel again for read-only arrays.
    return priced(costs, micropacks.slice_offsets.copy(), slices)


def durations_of_prices(costs: StageCosts, forward: FloatArray, backward: FloatArray) -> Durations:
    """Return seconds of tasks in each chunk of layers, given the prices of their MicroPacks (`[MicroPacks, 7]`)."""
    layers, has_head = costs.layers[:, np.newaxis], costs.has_head[:, np.newaxis]
    inputs = layers * backward[:, INPUT_LAYER] + has_head * backward[:, INPUT_HEAD]
    weights = layers * backward[:, WEIGHT_LAYER]
    ahead = layers * forward[:, FORWARD_LAYER]
    if costs.head_at_once:
        inputs = inputs + has_head * (backward[:, FORWARD_HEAD] + backward[:, WEIGHT_HEAD])
    else:
        ahead = ahead + has_head * forward[:, FORWARD_HEAD]
        weights = weights + has_head * backward[:, WEIGHT_HEAD]
    return Durations(
        forward=ahead,
        backward=inputs if costs.splits else inputs + weights,
        weight=weights if costs.splits else np.zeros_like(weights),
        send_forward=forward[:, ROWS] * costs.send_s_per_row,
        send_backward=backward[:, ROWS] * costs.send_s_per_row,
        latency_s=costs.send_latency_s,
        gather=costs.gather_s,
        sync=costs.sync_s,
        forward_rows=forward[:, ROWS],
        backward_rows=backward[:, ROWS],
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageCosts:
    """All numbers of a cost model on one mesh that simulation and planning need, by chunk of layers."""

    mesh: Mesh
    rates: Rates
    layers: FloatArray
    """float64 `[chunks]`: number of layers."""
    has_head: FloatArray
    """float64 `[chunks]`: 1 for the chunk that has the vocabulary head."""
    gather_s: FloatArray
    """float64 `[3, chunks]`: as `Durations.gather`."""
    send_latency_s: float
    send_s_per_row: float
    sync_s: FloatArray
    """float64 `[stages]`: seconds of the gradient sync."""
    memory: Memory
    """Bytes of rows."""
    limits: FloatArray
    """float64 `[stages]`: bytes left beside the states."""
    splits: bool = False
    """Whether weight gradients are separate tasks."""
    head_at_once: bool = False
    """Whether the vocabulary head runs both passes in backward tasks, as in `varlen.runtime`, which frees logits
    immediately."""


@functools.lru_cache(maxsize=64)
def stage_costs(cost: CostModel, mesh: Mesh, *, splits: bool = False) -> StageCosts:
    """Return the numbers of a cost model on a mesh; takes a millisecond, and is cached."""
    stages, memory = cost.stages(mesh), cost.memory(mesh, splits_backward=splits)
    latency, per_row = cost.send_s(mesh)
    return StageCosts(
        mesh=mesh,
        rates=cost.rates(mesh),
        layers=stages.layers,
        has_head=stages.has_head.astype(np.float64),
        gather_s=cost.traffic_s(mesh, splits_backward=splits),
        send_latency_s=latency,
        send_s_per_row=per_row,
        sync_s=cost.gradient_sync_s(mesh),
        memory=memory,
        limits=memory.limit_bytes - memory.state_bytes,
        splits=splits,
        head_at_once=cost.kernels == "eager",
    )


def priced(costs: StageCosts, slice_offsets: Int32Array, slices: Int32Array) -> FloatArray:
    """Price MicroPacks, float64 `[num_micropacks, 7]`; rows of `slices` are starts, stops, numbers of ranks."""
    result: FloatArray = kernels.price(slice_offsets, slices[0], slices[1], slices[2], costs.rates)
    return result
