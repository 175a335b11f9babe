"""The tasks of a plan that compute, MicroPack by MicroPack, and what a backward MicroPack waits for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from varlen.errors import PlanError
from varlen.simulate.kinds import KIND_NAMES
from varlen.step_plan import BACKWARD, FORWARD, KINDS, WEIGHT, MicroPacks, StepPlan
from varlen.types import Int32Array, IntArray


class Computes(NamedTuple):
    """The tasks of `plan.tasks`, with what their codes stand for; int64 `[num_tasks]` each."""

    kinds: IntArray
    places: IntArray
    """`rank * pp + stage`."""
    chunks: IntArray
    micropacks: IntArray
    """Number in `plan.forward` for FORWARD, in `plan.backward` for the others."""

    def table(self, kind: int, num_chunks: int, num_micropacks: int) -> IntArray:
        """Return int64 `[num_chunks, num_micropacks]`: the task of a kind for each chunk and MicroPack.

        Args:
            kind: FORWARD, BACKWARD or WEIGHT.
            num_chunks: of the mesh.
            num_micropacks: of the pass that the kind belongs to.
        """
        task_of = np.full((num_chunks, num_micropacks), -1, np.int64)
        tasks = np.flatnonzero(self.kinds == kind)
        task_of[self.chunks[tasks], self.micropacks[tasks]] = tasks
        return task_of


def computes_of(plan: StepPlan) -> Computes:
    """Return what each task of a plan is.

    Args:
        plan: the plan.

    Raises:
        PlanError: a stage does not run each MicroPack of its rank once in each of its chunks.

    Cost: O(tasks).
    """
    mesh = plan.mesh
    num_places, num_codes = mesh.dp * mesh.pp, KINDS * mesh.virtual_stages
    places = np.repeat(np.arange(num_places), np.diff(plan.task_offsets))
    if len(plan.task_offsets) != num_places + 1 or len(places) != len(plan.tasks):
        raise PlanError(
            f"the plan's task offsets hold {len(plan.task_offsets) - 1:,} stages and {len(places):,} tasks; the mesh "
            f"has {mesh.dp} x {mesh.pp} stages, the plan {len(plan.tasks):,} tasks"
        )
    codes = plan.tasks.astype(np.int64)
    if codes.max(initial=0) >= num_codes:
        raise PlanError(
            f"task code {codes.max()} stands for no task: {mesh.virtual_stages} chunks a stage have the codes 0 to "
            f"{num_codes - 1}, 3 * chunk on the stage + kind"
        )
    slots = places * num_codes + codes
    counts = np.bincount(slots, minlength=num_places * num_codes)
    _check_counts(plan, counts.reshape(num_places, num_codes))
    # Few enough slots make this a radix sort.
    order = np.argsort(slots.astype(np.min_scalar_type(num_places * num_codes)), kind="stable")
    turns = np.empty(len(codes), np.int64)
    turns[order] = np.arange(len(codes)) - np.repeat(np.cumsum(counts) - counts, counts)
    kinds, ranks = codes % KINDS, places // mesh.pp
    firsts = np.stack((plan.forward.rank_offsets[:-1], plan.backward.rank_offsets[:-1]))
    return Computes(
        kinds=kinds,
        places=places,
        chunks=codes // KINDS * mesh.pp + places % mesh.pp,
        micropacks=firsts[np.minimum(kinds, BACKWARD), ranks] + turns,
    )


def _check_counts(plan: StepPlan, counts: IntArray) -> None:
    """Require of each stage as many tasks of each kind and chunk as its rank has MicroPacks.

    Args:
        plan: the plan.
        counts: int64 `[dp * pp, 3 * virtual_stages]`: tasks of each code.

    Raises:
        PlanError: names the first stage that has more or fewer.
    """
    mesh = plan.mesh
    wanted = np.zeros((mesh.dp, KINDS), np.int64)
    wanted[:, FORWARD] = plan.forward.counts
    wanted[:, BACKWARD] = plan.backward.counts
    wanted[:, WEIGHT] = plan.backward.counts * plan.splits_backward
    wrong = counts != np.tile(np.repeat(wanted, mesh.pp, axis=0), mesh.virtual_stages)
    if wrong.any():
        place, code = (int(index) for index in np.unravel_index(wrong.argmax(), wrong.shape))
        kind, rank, stage = code % KINDS, place // mesh.pp, place % mesh.pp
        raise PlanError(
            f"stage {stage} of rank {rank} runs {counts[place, code]:,} tasks of {KIND_NAMES[kind]} in its chunk "
            f"{code // KINDS}, and its rank has {wanted[rank, kind]:,} such MicroPacks "
            f"({int(wrong.any(1).sum()):,} of {len(wrong):,} stages are so); each runs once in each chunk"
        )


def last_forwards(plan: StepPlan) -> IntArray:
    """Return the forward MicroPack that each backward MicroPack waits for, int64 `[num_backward]`; -1 for none.

    A document's backward begins at its end, so a MicroPack waits for every forward MicroPack of its rank that holds
    a slice of one of its documents: a stage runs those in order, so for the last of them.

    Args:
        plan: the plan.

    Raises:
        PlanError: a rank runs the backward of a document and not its forward.

    Cost: O(slices · log slices).
    """

    def keys(micropacks: MicroPacks, of_slice: Int32Array) -> IntArray:
        return (
            micropacks.ranks[of_slice].astype(np.int64) * (plan.num_documents + 1) + micropacks.document_ids
        )

    ahead, behind = plan.forward.micropack_of_slice, plan.backward.micropack_of_slice
    found, sought = keys(plan.forward, ahead), keys(plan.backward, behind)
    order = np.argsort(found, kind="stable")  # MicroPacks rise within a key
    where = np.searchsorted(found[order], sought, "right") - 1
    known = where >= 0
    known[known] = found[order][where[known]] == sought[known]
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
