"""`check_plan`: validates a step's plan, independently of the planner."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from varlen.cost.model import CostModel
from varlen.errors import PlanError
from varlen.simulate.api import AGAIN, check_form, check_shares, first_of, simulate
from varlen.step_plan import BACKWARD, FORWARD, KINDS, WEIGHT, MicroPacks, StepPlan
from varlen.types import FloatArray, Int32Array, IntArray

Pass = Literal["forward", "backward"]
_PASSES: Final[tuple[Pass, ...]] = ("forward", "backward")


def check_plan(
    plan: StepPlan,
    cost: CostModel | None = None,
    *,
    capacity: int | None = None,
    peaks_bytes: npt.ArrayLike | None = None,
) -> None:
    """Require that a step can run this plan.

    Checked in this order, from the arrays alone:

    - arrays have the shapes and ranges that `StepPlan` defines;
    - documents are on neighbouring ranks, in aligned powers of two;
    - every token of every document is in exactly one slice per pass on each rank that shares it, forward slices first
      to last and backward slices last to first;
    - ranks that share a document cut it alike, in corresponding MicroPacks;
    - ranks run equally many MicroPacks if parameters are sharded;
    - the number of targets is right (`targets_per_document`);
    - the passes have different slices only if all layers recompute;
    - each stage runs each MicroPack once in each of its chunks, and no task waits for itself;
    - memory suffices, if `cost` is given; `peaks_bytes` is `Timeline.peaks_bytes` if the plan was simulated already.

    Cost: O(slices · log slices), and about 0.1 ms for each task of the stage that has most.
    """
    check_contents(plan)
    if capacity is not None:
        for name in _PASSES:
            _check_capacity(plan, name, capacity)
    check_tasks(plan)
    if cost is not None:
        peaks = (
            simulate(plan, cost).peaks_bytes if peaks_bytes is None else np.asarray(peaks_bytes, np.float64)
        )
        _check_memory(plan, peaks, cost.memory(plan.mesh).limit_bytes)


def check_contents(plan: StepPlan) -> None:
    """Require all of `check_plan` except that tasks can run in their order, and that memory suffices."""
    check_form(plan)
    check_shares(plan)
    for name in _PASSES:
        _check_coverage(plan, name)
        _check_merged(plan, name)
        if plan.mesh.sharding == "parameters":
            _check_sharded(plan, name)
        _check_targets(plan, name)
    check_same_packs(plan)
    check_counts(plan)


def targets_per_document(plan: StepPlan, of: Pass = "forward") -> IntArray:
    """Return how many tokens of each document are predicted in a pass, which must be its length minus one.

    Labels are shifted before documents are cut: the target of token p is token p + 1, in whichever slice that is, so
    every token but the document's last has a target. Slices of a shared document count once. The step's loss is
    divided by the sum, which must not depend on the cuts.
    """
    micropacks = plan.forward if of == "forward" else plan.backward
    documents = micropacks.document_ids
    is_first_rank = micropacks.ranks[micropacks.micropack_of_slice] == plan.first_ranks[documents]
    targets = micropacks.stops.astype(np.int64) - micropacks.starts
    targets -= micropacks.stops == plan.lengths[documents]
    totals = np.zeros(plan.num_documents, np.int64)
    np.add.at(totals, documents[is_first_rank], targets[is_first_rank])
    return totals


def _check_coverage(plan: StepPlan, name: Pass) -> None:
    """Require every token once on each rank of its document, and slices in the order of the pass."""
    micropacks: MicroPacks = getattr(plan, name)
    documents, dp = micropacks.document_ids, plan.mesh.dp
    ranks = micropacks.ranks[micropacks.micropack_of_slice]
    away = ranks - plan.first_ranks[documents]
    wrong = (away < 0) | (away >= plan.num_ranks[documents])
    if wrong.any():
        j = first_of(wrong)
        raise PlanError(
            f"{name} slice {j:,} of document {documents[j]:,} stands on rank {ranks[j]:,}, and the document on "
            f"{plan.num_ranks[documents[j]]:,} ranks from rank {plan.first_ranks[documents[j]]:,} "
            f"({int(wrong.sum()):,} of {wrong.size:,} slices are elsewhere); {AGAIN}"
        )
    keys = documents.astype(np.int64) * dp + ranks
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    is_first = np.append(True, keys[1:] != keys[:-1])[: keys.size]
    if name == "forward":
        begins, ends = micropacks.starts[order], micropacks.stops[order]
        origin = np.zeros(keys.size, np.int32)
        goal = plan.lengths[documents[order]]
    else:  # the same from the document's end
        begins, ends = micropacks.stops[order], micropacks.starts[order]
        origin = plan.lengths[documents[order]]
        goal = np.zeros(keys.size, np.int32)
    expected = np.where(is_first, origin, np.roll(ends, 1))
    is_last = np.roll(is_first, -1)
    wrong = (begins != expected) | (is_last & (ends != goal))
    if wrong.any():
        j = int(order[first_of(wrong)])
        direction = "first to last" if name == "forward" else "last to first"
        raise PlanError(
            f"{name} slice {j:,}, tokens {micropacks.starts[j]:,} to {micropacks.stops[j]:,} of document "
            f"{documents[j]:,} on rank {ranks[j]:,}, leaves tokens out, repeats some or comes too early "
            f"({int(wrong.sum()):,} of {wrong.size:,} slices do): a document's {name} slices run {direction}, one "
            f"after the other; {AGAIN}"
        )
    _check_present(plan, name, keys[is_first])


def _check_present(plan: StepPlan, name: Pass, present: IntArray) -> None:
    """Require slices of each document on each of its ranks; `present` is `document * dp + rank`, each once."""
    num = np.where(plan.lengths > 0, plan.num_ranks, 0)
    missing = num - np.bincount(present // plan.mesh.dp, minlength=plan.num_documents)
    if missing.any():
        j = first_of(missing > 0)
        raise PlanError(
            f"document {j:,} of {plan.lengths[j]:,} tokens has no {name} slice on {missing[j]:,} of its {num[j]:,} "
            f"ranks ({int((missing > 0).sum()):,} of {plan.num_documents:,} documents are not whole); {AGAIN}"
        )


def _check_merged(plan: StepPlan, name: Pass) -> None:
    """Require that ranks that share documents have the same slices, in the same order, in corresponding MicroPacks.

    Groups are aligned, so all ranks of a block of 2^k share the same documents among those of at least 2^k ranks. The
    slices of these, and where a new MicroPack begins among them, must be the same on every rank of the block.
    """
    micropacks: MicroPacks = getattr(plan, name)
    of_slice = micropacks.micropack_of_slice
    ranks, shares = micropacks.ranks[of_slice], plan.num_ranks[micropacks.document_ids]
    block = 2
    while block <= int(shares.max(initial=1)):
        chosen = np.flatnonzero(shares >= block)
        begins_new = np.append(True, np.diff(of_slice[chosen]) != 0)
        counts = np.bincount(ranks[chosen], minlength=plan.mesh.dp)
        offsets = np.cumsum(counts) - counts
        # Compare each slice with the one of the same index on the first rank of its block.
        lead = ranks[chosen] // block * block
        other = offsets[lead] + np.arange(chosen.size) - offsets[ranks[chosen]]
        wrong = begins_new != begins_new[other]
        for values in (micropacks.document_ids, micropacks.starts, micropacks.stops):
            wrong |= values[chosen] != values[chosen[other]]
        if wrong.any():
            j = int(chosen[first_of(wrong)])
            raise PlanError(
                f"{name} slice {j:,} of document {micropacks.document_ids[j]:,} on rank {ranks[j]:,} is not what "
                f"rank {ranks[j] // block * block:,} shares with it at this place ({int(wrong.sum()):,} shared "
                f"slices of {wrong.size:,} differ): ranks that share documents run the same slices of them in the "
                f"same order, together in a MicroPack or apart; {AGAIN}"
            )
        block *= 2


def _check_sharded(plan: StepPlan, name: Pass) -> None:
    """Require that ranks run corresponding MicroPacks if they gather parameters for each."""
    micropacks: MicroPacks = getattr(plan, name)
    counts = micropacks.counts
    if (counts != counts[0]).any():
        j = first_of(counts != counts[0])
        raise PlanError(
            f"parameters are sharded, and rank 0 runs {counts[0]:,} {name} MicroPacks, rank {j:,} runs {counts[j]:,} "
            f"({int((counts != counts[0]).sum()):,} of {counts.size:,} ranks differ); add empty ones where there are "
            "fewer"
        )
    of_slice = micropacks.micropack_of_slice
    ranks, documents = micropacks.ranks[of_slice], micropacks.document_ids
    turns = of_slice - micropacks.rank_offsets[ranks]
    order = np.lexsort((ranks, micropacks.starts, documents))
    same = (documents[order][1:] == documents[order][:-1]) & (
        micropacks.starts[order][1:] == micropacks.starts[order][:-1]
    )
    wrong = same & (turns[order][1:] != turns[order][:-1])
    if wrong.any():
        j = int(order[1:][first_of(wrong)])
        raise PlanError(
            f"parameters are sharded, so ranks run their n-th MicroPacks together, but {name} slice {j:,} of the "
            f"shared document {documents[j]:,} is in the MicroPack {turns[j]:,} of rank {ranks[j]:,} and in another "
            f"one of rank {ranks[j] - 1:,} ({int(wrong.sum()):,} slices are so); move them together with empty "
            "MicroPacks"
        )


def _check_capacity(plan: StepPlan, name: Pass, capacity: int) -> None:
    """Require that no MicroPack holds more tokens of a rank than allowed."""
    micropacks: MicroPacks = getattr(plan, name)
    parts = -(
        -(micropacks.stops.astype(np.int64) - micropacks.starts) // plan.num_ranks[micropacks.document_ids]
    )
    tokens = np.zeros(micropacks.num_micropacks, np.int64)
    np.add.at(tokens, micropacks.micropack_of_slice, parts)
    wrong = tokens > capacity
    if wrong.any():
        j = first_of(wrong)
        raise PlanError(
            f"{name} MicroPack {j:,} on rank {micropacks.ranks[j]:,} holds {tokens[j]:,} tokens, over the capacity "
            f"of {capacity:,} ({int(wrong.sum()):,} of {tokens.size:,} do, at most {int(tokens.max()):,}); cut its "
            "documents into more slices, or raise the capacity"
        )


def _check_targets(plan: StepPlan, name: Pass) -> None:
    """Require a target for each token but the last of each document.

    This follows from coverage, but is checked independently, since nothing else reveals a wrong divisor of the loss.
    """
    targets, wanted = targets_per_document(plan, name), np.maximum(plan.lengths - 1, 0)
    wrong = targets != wanted
    if wrong.any():
        j = first_of(wrong)
        raise PlanError(
            f"the {name} slices of document {j:,} have {targets[j]:,} targets, and the document {wanted[j]:,} "
            f"({int(wrong.sum()):,} of {wrong.size:,} documents differ): the loss would be divided wrongly; {AGAIN}"
        )


def _check_memory(plan: StepPlan, peaks_bytes: FloatArray, limit_bytes: float) -> None:
    """Require that no stage exceeds the memory of a GPU."""
    mesh = plan.mesh
    if peaks_bytes.shape != (mesh.dp, mesh.pp):
        raise PlanError(
            f"peaks_bytes has shape {peaks_bytes.shape}; pass one for each stage of each rank, ({mesh.dp}, {mesh.pp})"
        )
    wrong = ~(peaks_bytes <= limit_bytes)
    if wrong.any():
        rank, stage = (int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
        raise PlanError(
            f"stage {stage} of rank {rank} holds {peaks_bytes[rank, stage] / 1e9:,.2f} GB at its peak, over the "
            f"limit of {limit_bytes / 1e9:,.2f} GB ({int(wrong.sum()):,} of {wrong.size:,} stages do); cut "
            "smaller slices, merge the longest documents, recompute or offload more, or take more pipeline stages"
        )


_KIND_NAMES: Final = ("forward", "backward", "weight-gradient")


class _Waits(NamedTuple):
    """What MicroPacks wait for besides the order of their own rank."""

    needed: IntArray
    """int64 `[backward MicroPacks]`: number of forward MicroPacks of the rank that must run before each."""
    groups: tuple[IntArray, IntArray, IntArray]
    """int64 for each kind of task, `[MicroPacks]`: the group of MicroPacks that start together, or -1."""
    sizes: tuple[IntArray, IntArray, IntArray]
    """int64 for each kind of task, by group: number of MicroPacks."""


def check_same_packs(plan: StepPlan) -> None:
    """Require the same MicroPacks in both passes unless all layers recompute: activations belong to their slices."""
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
    """Return the rank and slices (document, start, stop) of each non-empty MicroPack."""
    slices = list(zip(packs.document_ids.tolist(), packs.starts.tolist(), packs.stops.tolist()))
    offsets, ranks = packs.slice_offsets.tolist(), packs.ranks.tolist()
    return {
        (rank, tuple(sorted(slices[first:stop])))
        for rank, first, stop in zip(ranks, offsets, offsets[1:])
        if stop > first
    }


def check_tasks(plan: StepPlan) -> None:
    """Require that tasks don't deadlock, in a plan that `check_contents` accepts.

    Runs all stages, one task at a time, until all are done or none can continue. A forward task waits for the
    previous chunk of layers; a backward task for the next chunk, at the last one for all forward slices of its
    documents; weight gradients for their backward task. MicroPacks that share a merged document start together on its
    ranks; if parameters are sharded, so do the n-th ones of all ranks.
    """
    mesh = plan.mesh
    waits = _waits(plan)
    num_stage_ids, stages = mesh.dp * mesh.pp, mesh.pp
    ranks, stage = np.divmod(np.arange(num_stage_ids), stages)
    # How many MicroPacks of each rank have passed each chunk: forward, backward, weight gradients.
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
                f"it ({active.size:,} of {num_stage_ids:,} stages wait, {int((ends - turn).sum()):,} tasks are left)"
                "; order the tasks as a schedule that runs"
            )
        gone = np.flatnonzero(is_ready)
        done[kinds[gone], ranks[active[gone]], chunks[gone]] += 1
        turn[active[gone]] += 1


def check_counts(plan: StepPlan) -> None:
    """Require that each stage runs each MicroPack of its rank once in each of its chunks."""
    mesh = plan.mesh
    codes = KINDS * mesh.virtual_stages
    stage_ids = np.repeat(np.arange(mesh.dp * mesh.pp), np.diff(plan.task_offsets))  # rank * pp + stage
    counts = np.bincount(stage_ids * codes + plan.tasks, minlength=mesh.dp * mesh.pp * codes)
    counts = counts.reshape(mesh.dp, mesh.pp, mesh.virtual_stages, KINDS)
    wanted = np.zeros((mesh.dp, 1, 1, KINDS), np.int64)
    wanted[:, 0, 0, FORWARD] = plan.forward.counts
    wanted[:, 0, 0, BACKWARD] = plan.backward.counts
    wanted[:, 0, 0, WEIGHT] = plan.backward.counts * plan.splits_backward
    wrong = counts != wanted
    if wrong.any():
        rank, stage, chunk, kind = (int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
        raise PlanError(
            f"stage {stage} of rank {rank} has {counts[rank, stage, chunk, kind]:,} {_KIND_NAMES[kind]} tasks for "
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
    """Whether each task has what it needs from its own rank."""
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
    """Whether all tasks that start together with each are ready too."""
    met = np.ones(kinds.size, np.bool_)
    for kind, micropacks in ((FORWARD, plan.forward), (BACKWARD, plan.backward), (WEIGHT, plan.backward)):
        tasks = np.flatnonzero((kinds == kind) & is_ready)
        groups = waits.groups[kind][micropacks.rank_offsets[ranks[tasks]] + numbers[tasks]]
        tasks, groups = tasks[groups >= 0], groups[groups >= 0]
        if tasks.size:
            sizes = waits.sizes[kind]
            keys = groups * plan.mesh.num_chunks + chunks[tasks]
            num_ready = np.bincount(keys, minlength=sizes.size * plan.mesh.num_chunks)
            met[tasks] = num_ready[keys] == sizes[groups]
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
    first, second = _groups(plan, forward), _groups(plan, backward)
    # Ranks compute weight gradients independently, unless they scatter them.
    are_sharded = plan.mesh.sharding == "parameters"
    third = second[0] if are_sharded else np.full(backward.num_micropacks, -1, np.int64)
    return _Waits(needed, (first[0], second[0], third), (first[1], second[1], second[1]))


def _groups(plan: StepPlan, micropacks: MicroPacks) -> tuple[IntArray, IntArray]:
    """Return the group of each MicroPack, -1 for one that starts independently, and the size of each group.

    Blocks are aligned, so MicroPacks that share slices belong to the widest block of ranks of any of their documents:
    the n-th MicroPacks of the ranks of a block, among those with this widest block, start together.
    """
    groups = np.full(micropacks.num_micropacks, -1, np.int64)
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
        index = np.arange(chosen.size) - (np.cumsum(counts) - counts)[ranks]
        _, numbers = np.unique(ranks // block * chosen.size + index, return_inverse=True)
        groups[chosen] = used + numbers
        count = int(numbers.max(initial=-1)) + 1
        sizes.append(np.full(count, block, np.int64))
        used, block = used + count, 2 * block
    return groups, np.concatenate(sizes) if sizes else np.zeros(0, np.int64)
