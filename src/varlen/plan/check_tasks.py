"""`check_tasks`: every stage runs each MicroPack once in each chunk of layers, in an order without a circle."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from varlen.errors import PlanError
from varlen.step_plan import BACKWARD, FORWARD, KINDS, WEIGHT, MicroPacks, StepPlan
from varlen.types import Int32Array, IntArray

_KIND_NAMES: Final = ("forward", "backward", "weight-gradient")


class _Waits(NamedTuple):
    """What MicroPacks wait for besides their own rank's order."""

    needed: IntArray
    """int64 `[backward MicroPacks]`: forward MicroPacks of its rank that must be done before each."""
    meetings: tuple[IntArray, IntArray, IntArray]
    """int64 for each kind of task, `[MicroPacks]`: a number that those have in common which start together, or -1."""
    sizes: tuple[IntArray, IntArray, IntArray]
    """int64 for each kind of task, by number: how many those are."""


def check_kept(plan: StepPlan) -> None:
    """Require that both passes run the same MicroPacks, unless all layers recompute: what is kept belongs to them.

    Args:
        plan: the plan; each token stands in one slice of each pass.

    Raises:
        PlanError: a MicroPack stands in one pass alone.

    Cost: O(slices).
    """
    if plan.recompute == "full" and plan.recompute_share == 1:
        return
    apart = _contents(plan.forward) ^ _contents(plan.backward)
    if apart:
        rank, slices = min(apart)
        document, start, stop = slices[0]
        raise PlanError(
            f"rank {rank} runs tokens {start:,} to {stop:,} of document {document} in a MicroPack that stands in one "
            f"pass alone ({len(apart):,} do); passes may be cut apart only where all layers recompute, and here "
            f"recompute={plan.recompute!r}, recompute_share={plan.recompute_share:g}"
        )


def _contents(packs: MicroPacks) -> set[tuple[int, tuple[tuple[int, int, int], ...]]]:
    """Rank and slices (document, start, stop) of each MicroPack that holds any."""
    slices = list(zip(packs.document_ids.tolist(), packs.starts.tolist(), packs.stops.tolist()))
    offsets, ranks = packs.slice_offsets.tolist(), packs.ranks.tolist()
    return {
        (rank, tuple(sorted(slices[first:stop])))
        for rank, first, stop in zip(ranks, offsets, offsets[1:])
        if stop > first
    }


def check_tasks(plan: StepPlan) -> None:
    """Require that each stage has the tasks that it needs, and that none of them waits, by way of others, for itself.

    Every stage goes on as far as it can, one task at a time, until all are done or none can go on.

    A forward task waits for the chunk of layers before it, a backward task for the chunk after it, at the last one
    for all forward slices of its documents, and weight gradients for their backward task. MicroPacks that share a
    merged document start together on its ranks; where parameters are sharded, so do the n-th ones of all ranks.

    Args:
        plan: the plan; all else about it is right.

    Raises:
        PlanError: a stage has more or fewer tasks, or some wait for each other; names one.

    Cost: about 0.1 ms for each task of the stage that has most.
    """
    check_counts(plan)
    mesh = plan.mesh
    waits = _waits(plan)
    num_places, stages = mesh.dp * mesh.pp, mesh.pp
    ranks, stage = np.divmod(np.arange(num_places), stages)
    # How many MicroPacks of each rank have passed each chunk, forward, backward and for their weight gradients.
    done = np.zeros((KINDS, mesh.dp, mesh.num_chunks), np.int64)
    turn, ends = plan.task_offsets[:-1].astype(np.int64), plan.task_offsets[1:]
    while (active := np.flatnonzero(turn < ends)).size:
        codes = plan.tasks[turn[active]].astype(np.int64)
        kinds, chunks = codes % KINDS, codes // KINDS * stages + stage[active]
        numbers = done[kinds, ranks[active], chunks]
        is_ready = _ready(plan, waits, done, kinds, ranks[active], chunks, numbers)
        is_ready &= _met(plan, waits, is_ready, kinds, ranks[active], chunks, numbers)
        if not is_ready.any():
            first = int(active[0])
            kind, chunk, number = int(kinds[0]), int(chunks[0]), int(numbers[0])
            raise PlanError(
                f"the order of tasks waits in a circle: stage {stage[first]} of rank {ranks[first]} waits to run the "
                f"{_KIND_NAMES[kind]} task of its MicroPack {number:,} in chunk {chunk} for what can't come before "
                f"it ({active.size:,} of {num_places:,} stages wait, {int((ends - turn).sum()):,} tasks are left); "
                "order the tasks as a schedule that runs"
            )
        gone = np.flatnonzero(is_ready)
        done[kinds[gone], ranks[active[gone]], chunks[gone]] += 1
        turn[active[gone]] += 1


def check_counts(plan: StepPlan) -> None:
    """Require that each stage runs each MicroPack of its rank once in each of its chunks.

    Args:
        plan: the plan; all else about it is right, but for the order of tasks.

    Raises:
        PlanError: one runs more or fewer.
    """
    mesh = plan.mesh
    codes = KINDS * mesh.virtual_stages
    places = np.repeat(np.arange(mesh.dp * mesh.pp), np.diff(plan.task_offsets))
    found = np.bincount(places * codes + plan.tasks, minlength=mesh.dp * mesh.pp * codes)
    found = found.reshape(mesh.dp, mesh.pp, mesh.virtual_stages, KINDS)
    wanted = np.zeros((mesh.dp, 1, 1, KINDS), np.int64)
    wanted[:, 0, 0, FORWARD] = plan.forward.counts
    wanted[:, 0, 0, BACKWARD] = plan.backward.counts
    wanted[:, 0, 0, WEIGHT] = plan.backward.counts * plan.splits_backward
    wrong = found != wanted
    if wrong.any():
        rank, stage, chunk, kind = (int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
        raise PlanError(
            f"stage {stage} of rank {rank} has {found[rank, stage, chunk, kind]:,} {_KIND_NAMES[kind]} tasks for "
            f"chunk {chunk * mesh.pp + stage}, and its rank {wanted[rank, 0, 0, kind]:,} MicroPacks to run so "
            f"({int(wrong.any((2, 3)).sum()):,} of {mesh.dp * mesh.pp:,} stages differ); plan the step again"
        )


def _ready(
    plan: StepPlan,
    waits: _Waits,
    done: IntArray,
    kinds: IntArray,
    ranks: IntArray,
    chunks: IntArray,
    numbers: IntArray,
) -> npt.NDArray[np.bool_]:
    """Whether each task has what it needs of its own rank."""
    last = plan.mesh.num_chunks - 1
    before = done[FORWARD, ranks, np.maximum(chunks - 1, 0)]
    after = done[BACKWARD, ranks, np.minimum(chunks + 1, last)]
    micropacks = plan.backward.rank_offsets[ranks] + numbers
    needed = np.append(waits.needed, 0)[np.minimum(micropacks, waits.needed.size)]
    forward = (chunks == 0) | (before > numbers)
    backward = (done[FORWARD, ranks, chunks] >= needed) & ((chunks == last) | (after > numbers))
    weight = done[BACKWARD, ranks, chunks] > numbers
    return np.select([kinds == FORWARD, kinds == BACKWARD], [forward, backward], weight)


def _met(
    plan: StepPlan,
    waits: _Waits,
    is_ready: npt.NDArray[np.bool_],
    kinds: IntArray,
    ranks: IntArray,
    chunks: IntArray,
    numbers: IntArray,
) -> npt.NDArray[np.bool_]:
    """Whether all that each task starts together with are ready too."""
    met = np.ones(kinds.size, np.bool_)
    for kind, micropacks in ((FORWARD, plan.forward), (BACKWARD, plan.backward), (WEIGHT, plan.backward)):
        here = np.flatnonzero((kinds == kind) & is_ready)
        meetings = waits.meetings[kind][micropacks.rank_offsets[ranks[here]] + numbers[here]]
        here, meetings = here[meetings >= 0], meetings[meetings >= 0]
        if here.size:
            sizes = waits.sizes[kind]
            places = meetings * plan.mesh.num_chunks + chunks[here]
            come = np.bincount(places, minlength=sizes.size * plan.mesh.num_chunks)
            met[here] = come[places] == sizes[meetings]
    return met


def _waits(plan: StepPlan) -> _Waits:
    forward, backward = plan.forward, plan.backward
    ahead, behind = forward.micropack_of_slice, backward.micropack_of_slice
    keys = forward.ranks[ahead].astype(np.int64) * plan.num_documents + forward.document_ids
    order = np.argsort(keys, kind="stable")  # MicroPacks rise within a key
    sought = backward.ranks[behind].astype(np.int64) * plan.num_documents + backward.document_ids
    last = ahead[order][np.searchsorted(keys[order], sought, "right") - 1]
    needed = np.zeros(backward.num_micropacks, np.int64)
    np.maximum.at(needed, behind, last - forward.rank_offsets[forward.ranks[last]] + 1)
    first, second = _meetings(plan, forward), _meetings(plan, backward)
    # Weight gradients are each rank's own, but for ranks that scatter them.
    are_sharded = plan.mesh.sharding == "parameters"
    third = second[0] if are_sharded else np.full(backward.num_micropacks, -1, np.int64)
    return _Waits(needed, (first[0], second[0], third), (first[1], second[1], second[1]))


def _meetings(plan: StepPlan, micropacks: MicroPacks) -> tuple[IntArray, IntArray]:
    """A number for MicroPacks that start together, -1 for one alone, and how many have each number.

    The MicroPacks that share slices with one share all of the widest block of ranks that any of them has, since
    blocks are aligned; so the n-th of a block's, counted on each rank alone, meet.
    """
    meetings = np.full(micropacks.num_micropacks, -1, np.int64)
    turns = np.arange(micropacks.num_micropacks) - micropacks.rank_offsets[micropacks.ranks]
    if plan.mesh.sharding == "parameters":
        return turns, np.full(int(turns.max(initial=-1)) + 1, plan.mesh.dp, np.int64)
    widest = np.ones(micropacks.num_micropacks, np.int64)
    np.maximum.at(widest, micropacks.micropack_of_slice, plan.num_ranks[micropacks.document_ids])
    sizes: list[IntArray] = []
    used, block = 0, 2
    while block <= int(widest.max(initial=1)):
        chosen = np.flatnonzero(widest == block)
        ranks: Int32Array = micropacks.ranks[chosen]
        counts = np.bincount(ranks, minlength=plan.mesh.dp)
        place = np.arange(chosen.size) - (np.cumsum(counts) - counts)[ranks]
        _, numbers = np.unique(ranks // block * chosen.size + place, return_inverse=True)
        meetings[chosen] = used + numbers
        count = int(numbers.max(initial=-1)) + 1
        sizes.append(np.full(count, block, np.int64))
        used, block = used + count, 2 * block
    return meetings, np.concatenate(sizes) if sizes else np.zeros(0, np.int64)
