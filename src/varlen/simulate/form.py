"""The form of a plan: shapes, dtypes and ranges of its arrays, so that whoever reads it may index by them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from varlen.counts import many
from varlen.errors import PlanError
from varlen.step_plan import KINDS, Mesh, MicroPacks, StepPlan

AGAIN: Final = "the plan was changed or made by other code; plan the step again"
_PASSES: Final = ("forward", "backward")


def first_of(wrong: npt.NDArray[np.bool_]) -> int:
    """Return the place of the first True.

    Args:
        wrong: bool `[any]`, one of them True.
    """
    return int(np.argmax(wrong))


def check_form(plan: StepPlan) -> None:
    """Require shapes, dtypes and ranges, so that what follows may index by them.

    Args:
        plan: the plan.

    Raises:
        PlanError: one is wrong.
    """
    _check_parts(plan)
    mesh, count = plan.mesh, plan.num_documents
    _check_array("lengths", plan.lengths, np.int32, None, 0, None)
    _check_array("first_ranks", plan.first_ranks, np.int32, count, -1, mesh.dp)
    _check_array("num_ranks", plan.num_ranks, np.int32, count, 1, mesh.dp + 1)
    for name in _PASSES:
        micropacks: MicroPacks = getattr(plan, name)
        _check_array(f"{name}.document_ids", micropacks.document_ids, np.int32, None, 0, count)
        size = micropacks.document_ids.size
        _check_array(f"{name}.starts", micropacks.starts, np.int32, size, 0, None)
        _check_array(f"{name}.stops", micropacks.stops, np.int32, size, 0, None)
        _check_offsets(f"{name}.slice_offsets", micropacks.slice_offsets, None, size)
        _check_offsets(f"{name}.rank_offsets", micropacks.rank_offsets, mesh.dp, micropacks.num_micropacks)
        ends = plan.lengths[micropacks.document_ids]
        wrong = (micropacks.starts >= micropacks.stops) | (micropacks.stops > ends)
        if wrong.any():
            j = first_of(wrong)
            raise PlanError(
                f"{name} slice {j:,} is the tokens {micropacks.starts[j]:,} to {micropacks.stops[j]:,} of document "
                f"{micropacks.document_ids[j]:,}, which has {ends[j]:,} ({int(wrong.sum()):,} of {size:,} slices are "
                f"empty or end outside); {AGAIN}"
            )
    _check_array("tasks", plan.tasks, np.uint8, None, 0, KINDS * mesh.virtual_stages)
    _check_offsets("task_offsets", plan.task_offsets, mesh.dp * mesh.pp, plan.tasks.size)


def _check_parts(plan: StepPlan) -> None:
    """Require a mesh, and MicroPacks of both passes.

    Raises:
        PlanError: one is something else.
    """
    for name, kind in (("mesh", Mesh), ("forward", MicroPacks), ("backward", MicroPacks)):
        part = getattr(plan, name)
        if not isinstance(part, kind):
            raise PlanError(f"{name} of the plan is a {type(part).__name__}, no {kind.__name__}; {AGAIN}")


def _check_array(
    name: str, array: npt.NDArray[Any], dtype: type, size: int | None, least: int, end: int | None
) -> None:
    """Require one dimension, a dtype, a size if given, and values from `least` to below `end`.

    Raises:
        PlanError: it is otherwise.
    """
    if array.ndim != 1 or array.dtype != dtype or (size is not None and array.size != size):
        wanted = "any size" if size is None else f"size {size:,}"
        raise PlanError(
            f"{name} is {array.dtype} of shape {array.shape}; a plan has {np.dtype(dtype)} in one dimension of "
            f"{wanted}"
        )
    wrong = (array < least) | (array >= (np.iinfo(np.int64).max if end is None else end))
    if wrong.any():
        j = first_of(wrong)
        limit = "any above" if end is None else f"{end - 1:,}"
        raise PlanError(
            f"{name}[{j:,}] is {array[j]:,}; it may be {least:,} to {limit} ({int(wrong.sum()):,} of "
            f"{array.size:,} are out of range); {AGAIN}"
        )


def _check_offsets(name: str, offsets: npt.NDArray[Any], parts: int | None, whole: int) -> None:
    """Require offsets that rise from 0 to how many there are.

    Raises:
        PlanError: they don't.
    """
    _check_array(name, offsets, np.int32, None if parts is None else parts + 1, 0, whole + 1)
    if not offsets.size or offsets[0] != 0 or offsets[-1] != whole or (np.diff(offsets) < 0).any():
        said = "has no entry" if not offsets.size else f"runs from {offsets[0]:,} to {offsets[-1]:,}"
        raise PlanError(f"{name} {said}; it must rise from 0 to {whole:,} without a step back; {AGAIN}")


def check_shares(plan: StepPlan) -> None:
    """Require that each document stands on an aligned power of two of neighbouring ranks.

    Args:
        plan: the plan.

    Raises:
        PlanError: one doesn't.
    """
    first, num, dp = plan.first_ranks, plan.num_ranks, plan.mesh.dp
    is_empty = plan.lengths == 0
    wrong = (num & (num - 1)) != 0
    wrong |= np.where(
        is_empty, (first != -1) | (num != 1), (first < 0) | (first % num != 0) | (first + num > dp)
    )
    if wrong.any():
        j = first_of(wrong)
        raise PlanError(
            f"document {j:,} of {plan.lengths[j]:,} tokens stands on {num[j]:,} ranks from rank {first[j]:,}; it "
            f"must be a power of two of them from a multiple of it, within {dp:,} ranks, or 1 from rank -1 for an "
            f"empty document ({int(wrong.sum()):,} of {num.size:,} documents are otherwise); {AGAIN}"
        )


def check_places(plan: StepPlan) -> None:
    """Require that slices stand on their documents' ranks, as many tokens of them as each document has.

    Less than `varlen.plan.check.check_plan`, which also asks for each token once and for their order.

    Args:
        plan: of good form and shares.

    Raises:
        PlanError: one doesn't, or tokens are missing or too many.

    Cost: O(slices).
    """
    for name in _PASSES:
        micropacks: MicroPacks = getattr(plan, name)
        documents, sizes = micropacks.document_ids, micropacks.stops - micropacks.starts
        places = micropacks.ranks[micropacks.micropack_of_slice] - plan.first_ranks[documents]
        wrong = (places < 0) | (places >= plan.num_ranks[documents])
        if wrong.any():
            j = first_of(wrong)
            first, ranks = plan.first_ranks[documents[j]], many(int(plan.num_ranks[documents[j]]), "rank")
            raise PlanError(
                f"{name} slice {j:,} of document {documents[j]:,} is on rank {places[j] + first:,}, and the document "
                f"on {ranks} from rank {first:,} ({int(wrong.sum()):,} of {wrong.size:,} are elsewhere); {AGAIN}"
            )
        held = np.bincount(documents, sizes, plan.num_documents)
        wanted = plan.lengths.astype(np.float64) * plan.num_ranks
        wrong = held != wanted
        if wrong.any():
            j = first_of(wrong)
            ranks = many(int(plan.num_ranks[j]), "rank")
            raise PlanError(
                f"the {name} slices of document {j:,} hold {held[j]:,.0f} tokens of its {wanted[j]:,.0f} on {ranks} "
                f"({int(wrong.sum()):,} of {wrong.size:,} documents differ); {AGAIN}"
            )
