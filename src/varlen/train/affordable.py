"""The plan of a step with as little recomputation and offloading as fits in memory and settings allow.

The process that plans ahead imports this file, which therefore loads no torch: that would take seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from varlen.cost.model import CostModel
from varlen.errors import PlanError
from varlen.plan.api import plan_step, repairs
from varlen.plan.search import Search
from varlen.step_plan import Mesh, Offload, PlanMethod, Recompute, StepPlan
from varlen.types import Int32Array

Auto = Literal["auto"]


def affordable(
    lengths: Int32Array,
    *,
    cost: CostModel,
    mesh: Mesh,
    method: PlanMethod,
    search: Search,
    recompute: Recompute | Auto,
    offload: Offload | Auto,
) -> StepPlan:
    """Plan a step, recomputing and offloading what settings say or, for "auto", what the planner chooses.

    Where the planner may choose only one of the two, this function tries the other one's ways and takes the first
    that fits in memory.

    Args:
        lengths: int32 `[num_documents]`.
    """
    try:
        return _planned(lengths, cost, mesh, method, search, recompute, offload)
    except PlanError as error:
        more = []
        if recompute not in ("auto", "full") or offload == "none":
            more.append(
                f'plan.recompute = "{recompute}" and plan.offload = "{offload}" limit what fits; set both to "auto"'
            )
        if mesh.dp > 1 and not search.merges:
            more.append("plan.merges = true would let ranks share documents")
        if error.axes & {"cp", "tp"}:
            more.append('what divides a run is plan.pp, plan.cp, plan.tp and run.parallel = "fsdp"')
        if not more:
            raise
        raise PlanError("; ".join([str(error), *more])) from None


def _planned(
    lengths: Int32Array,
    cost: CostModel,
    mesh: Mesh,
    method: PlanMethod,
    search: Search,
    recompute: Recompute | Auto,
    offload: Offload | Auto,
) -> StepPlan:
    """Do what `affordable` does; its errors don't say yet what would help."""
    if recompute == "auto":
        least = cost.replace(recompute="none", offload="kv" if offload == "kv" else "none")
        plan = plan_step(lengths, cost=least, mesh=mesh, method=method, search=search)
        if offload in ("auto", plan.offload):
            return plan
    fault = PlanError()
    for way in _ways(cost, mesh, recompute, offload):
        try:
            return plan_step(
                lengths, cost=way, mesh=mesh, method=method, search=replace(search, repairs=False)
            )
        except PlanError as error:
            fault = error
    raise fault


def _ways(
    cost: CostModel, mesh: Mesh, recompute: Recompute | Auto, offload: Offload | Auto
) -> Iterator[CostModel]:
    """Yield cost models of what settings allow, the fastest first."""
    if recompute == "auto":
        least = cost.replace(recompute="none", offload="none")
        yield from (way for way in repairs(least, mesh) if way.offload == offload)
        return
    offloads: tuple[Offload, ...] = ("none", "kv") if offload == "auto" else (offload,)
    yield from (cost.replace(recompute=recompute, offload=each) for each in offloads)
