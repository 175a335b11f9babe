"""`affordable`: the plan of a step with the least recomputation that memory asks for, of what the engine runs.

It is called in the process that plans ahead too, which loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from varlen.cost.model import CostModel
from varlen.errors import PlanError
from varlen.plan.api import plan_step
from varlen.plan.search import Search
from varlen.step_plan import Mesh, PlanMethod, Recompute, StepPlan
from varlen.types import Int32Array


def affordable(
    lengths: Int32Array,
    *,
    cost: CostModel,
    mesh: Mesh,
    method: PlanMethod,
    search: Search,
    recompute: Sequence[Recompute],
) -> StepPlan:
    """Plan a step by the first of some ways to recompute with which it fits into memory.

    Args:
        lengths: int32 `[num_documents]`.
        cost: seconds and bytes.
        mesh: the GPUs.
        method: of `vl.plan_step`.
        search: what may be tried; it repairs nothing, as that would recompute what the engine doesn't.
        recompute: ways, in the order in which they are tried; at least one.

    Raises:
        PlanError: none fits; as `vl.plan_step` says it of the last.
        VarlenError: what `vl.plan_step` raises else.
    """
    for tried in recompute[:-1]:
        try:
            return plan_step(
                lengths, cost=cost.replace(recompute=tried), mesh=mesh, method=method, search=search
            )
        except PlanError:
            continue
    last = cost.replace(recompute=recompute[-1])
    return plan_step(lengths, cost=last, mesh=mesh, method=method, search=search)
