"""Which MicroPacks start together: those of a merged document, and those that gather parameters together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from varlen.errors import PlanError
from varlen.step_plan import MicroPacks, StepPlan
from varlen.types import Int32Array, IntArray


class LockSteps(NamedTuple):
    """The groups of MicroPacks that run together, each in every chunk of layers."""

    forward: Int32Array
    """int32 `[num_forward_micropacks]`: the group of each; -1 for one that waits for no other rank.
    Where parameters are sharded each has a group, with the traffic of its parameters."""
    backward: Int32Array
    """int32 `[num_backward_micropacks]`."""
    num_groups: int
    """Groups of the pass that has more."""


def lock_steps(plan: StepPlan) -> LockSteps:
    """Return which MicroPacks wait for each other because their ranks exchange keys and values, or parameters.

    MicroPacks that hold the same slice of a merged document run together; where parameters are sharded, so do those
    that are the n-th of their ranks. What two groups share joins them.

    Args:
        plan: the plan.

    Raises:
        PlanError: parameters are sharded and ranks have different numbers of MicroPacks.

    Cost: O(slices of merged documents · log of them), and O(MicroPacks) where parameters are sharded.
    """
    groups: list[Int32Array] = []
    most = 0
    for name, micropacks in (("forward", plan.forward), ("backward", plan.backward)):
        members, keys = _merged(plan, micropacks)
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
            members, keys = np.concatenate((members, everyone)), np.concatenate((keys, -1 - turns))
        joined, count = _joined(members, keys, micropacks.num_micropacks, smallest=1 if is_sharded else 2)
        groups.append(joined)
        most = max(most, count)
    return LockSteps(groups[0], groups[1], most)


def _merged(plan: StepPlan, micropacks: MicroPacks) -> tuple[IntArray, IntArray]:
    """The MicroPack and a number for the document and first token of each slice of a merged document."""
    if plan.num_merged == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    shared = np.flatnonzero(plan.num_ranks[micropacks.document_ids] > 1)
    keys = (micropacks.document_ids[shared].astype(np.int64) << 32) + micropacks.starts[shared]
    return micropacks.micropack_of_slice[shared].astype(np.int64), keys


def _joined(members: IntArray, keys: IntArray, num_micropacks: int, smallest: int) -> tuple[Int32Array, int]:
    """The groups that result where all members with one key belong together; -1 for those in smaller groups."""
    group_of = np.full(num_micropacks, -1, np.int32)
    if len(members) == 0:
        return group_of, 0
    _, numbers = np.unique(keys, return_inverse=True)
    label = np.arange(num_micropacks)
    while True:  # everyone takes the lowest label among those it shares a key with, until nothing changes
        lowest = np.full(numbers.max() + 1, num_micropacks)
        np.minimum.at(lowest, numbers, label[members])
        fresh = label.copy()
        np.minimum.at(fresh, members, lowest[numbers])
        if (fresh == label).all():
            break
        label = fresh
    sizes = np.bincount(label, minlength=num_micropacks)
    large = np.flatnonzero(sizes >= smallest)
    number_of = np.full(num_micropacks, -1, np.int32)
    number_of[large] = np.arange(len(large))
    return number_of[label], len(large)
