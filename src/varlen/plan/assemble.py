"""Ranks' compositions and orders of tasks become one StepPlan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from varlen.cost.model import CostModel
from varlen.plan.compose import Composition
from varlen.plan.groups import Groups
from varlen.step_plan import Mesh, MicroPacks, PlanMethod, StepPlan
from varlen.types import Int32Array, IntArray


def micropacks_of(compositions: Sequence[Composition], *, is_backward: bool) -> MicroPacks:
    """Join the MicroPacks of all ranks for one pass.

    Args:
        compositions: one a rank.
        is_backward: in the order of the backward pass.
    """
    sizes, slices, counts = [], [], []
    for composition in compositions:
        each = np.diff(composition.slice_offsets)
        table = composition.slices
        if is_backward:
            order = composition.backward_order
            table = table[:, _moved(composition.slice_offsets, order)]
            each = each[order]
        sizes.append(each)
        slices.append(table)
        counts.append(each.size)
    joined = np.concatenate(slices, axis=1)
    return MicroPacks(
        rank_offsets=_offsets(np.array(counts)),
        slice_offsets=_offsets(np.concatenate(sizes)),
        document_ids=joined[3].copy(),
        starts=joined[0].copy(),
        stops=joined[1].copy(),
    )


def _moved(offsets: Int32Array, order: IntArray) -> IntArray:
    """Where the slices of MicroPacks come from, in another order of MicroPacks."""
    sizes = np.diff(offsets)[order]
    behind = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    moved: IntArray = np.repeat(offsets[:-1][order], sizes) + behind
    return moved


def _offsets(sizes: npt.NDArray[np.integer]) -> Int32Array:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


def step_plan(
    lengths: Int32Array,
    groups: Groups,
    forward: Sequence[Composition],
    backward: Sequence[Composition],
    codes: Sequence[npt.NDArray[np.uint8]],
    cost: CostModel,
    mesh: Mesh,
    *,
    splits: bool,
    method: PlanMethod,
    answered_by: str,
) -> StepPlan:
    """Join what ranks run into the plan of the step.

    Args:
        lengths: int32 `[num_documents]`.
        groups: which ranks hold each document.
        forward: one a rank.
        backward: one a rank.
        codes: uint8 `[stages, tasks]`, one a rank.
        cost: its recomputation and offload are the plan's.
        mesh: the GPUs.
        splits: whether weight gradients are tasks of their own.
        method: of planning.
        answered_by: which candidate won.
    """
    return StepPlan(
        lengths=lengths,
        first_ranks=groups.first_ranks,
        num_ranks=groups.num_ranks,
        forward=micropacks_of(forward, is_backward=False),
        backward=micropacks_of(backward, is_backward=True),
        tasks=np.concatenate([code.ravel() for code in codes]),
        task_offsets=_offsets(np.repeat([code.shape[1] for code in codes], mesh.pp)),
        mesh=mesh,
        splits_backward=splits,
        method=method,
        recompute=cost.recompute,
        recompute_share=cost.recompute_share,
        offload=cost.offload,
        answered_by=answered_by,
    )
