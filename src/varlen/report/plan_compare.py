"""One step planned by every method, simulated by one simulator: the figures of `varlen plan`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import cast

from varlen.cost.model import CostModel
from varlen.errors import PlanError, SettingError
from varlen.plan.api import plan_step
from varlen.plan.bound import lower_bound
from varlen.plan.search import Search
from varlen.report.plan_figures import TITLES, MethodFigures, PlanComparison
from varlen.report.plan_steps import StepDocuments
from varlen.report.plan_words import stretched
from varlen.simulate.api import simulate
from varlen.step_plan import Mesh, PlanMethod

OnProgress = Callable[[int, int, str], None]
METHODS = tuple(TITLES)
_TUNED = "packed_tuned"


def compare(
    documents: StepDocuments,
    *,
    cost: CostModel,
    mesh: Mesh,
    methods: Sequence[str] = METHODS,
    repairs: bool = True,
    name: str = "",
    are_bytes: bool = False,
    on_progress: OnProgress = lambda *_: None,
) -> PlanComparison:
    """Plan one step by several methods, and simulate each plan.

    Args:
        documents: of the step.
        cost: of the model on its hardware; its `recompute` and `offload` are the least that plans use.
        mesh: of the job.
        methods: names among `METHODS`.
        repairs: whether a method that doesn't fit into memory may recompute more and offload.
        name: of the data, for headings.
        are_bytes: whether lengths are of bytes.
        on_progress: called with methods done, all methods, and words.

    Raises:
        SettingError: an unknown method, or a mesh that the model can't be divided by.
    """
    check_methods(methods)
    rows = []
    on_progress(0, len(methods), "loading kernels")
    load_kernels(documents, methods, cost=cost, mesh=mesh)
    for done, method in enumerate(methods):
        on_progress(done, len(methods), f"planning {TITLES[method]}")
        rows.append(planned(documents, method, cost=cost, mesh=mesh, repairs=repairs))
    on_progress(len(methods), len(methods), "planned")
    rows.sort(key=lambda row: row.step_s)
    longest = int(documents.lengths.max())
    return PlanComparison(
        name=name,
        model=cost.model.name or "a model",
        hardware=cost.hardware.name,
        hardware_source=cost.hardware.source,
        mesh=mesh,
        capacity=documents.capacity,
        step=documents.step,
        num_documents=len(documents.lengths),
        num_tokens=documents.num_tokens,
        longest=longest,
        truncated_documents=documents.truncated_documents,
        truncated_tokens=documents.truncated_tokens,
        lower_bound_s=lower_bound(documents.lengths, cost, mesh).seconds,
        limit_bytes=float(cost.memory(mesh).limit_bytes),
        methods=tuple(rows),
        are_bytes=are_bytes,
        estimated=cost.hardware.held_out,
        stretched=stretched(cost.model, longest),
    )


def load_kernels(documents: StepDocuments, methods: Sequence[str], *, cost: CostModel, mesh: Mesh) -> None:
    """Plan a few short documents, so that the times of planning don't hold those of compiling."""
    import numba  # noqa: F401  # once it is loaded, kernels are compiled for small work too

    few = replace(documents, lengths=documents.lengths[:4].clip(max=2048))
    for method in methods:
        planned(few, method, cost=cost, mesh=mesh)


def planned(
    documents: StepDocuments, method: str, *, cost: CostModel, mesh: Mesh, repairs: bool = True
) -> MethodFigures:
    """Plan a step by one method, and simulate the plan.

    Args:
        documents: of the step.
        method: one of `METHODS`.
        cost: of the model on its hardware.
        mesh: of the job.
        repairs: whether memory may be repaired by recomputing more and offloading.
    """
    began = time.perf_counter()
    try:
        plan = plan_step(
            documents.lengths,
            cost=cost,
            mesh=mesh,
            method=cast("PlanMethod", "packed" if method == _TUNED else method),
            capacity=documents.capacity,
            tuned=method == _TUNED,
            search=Search(repairs=repairs),
        )
    except PlanError as error:
        return MethodFigures(name=method, planning_s=time.perf_counter() - began, refusal=str(error))
    planning_s = time.perf_counter() - began
    return MethodFigures(name=method, plan=plan, timeline=simulate(plan, cost), planning_s=planning_s)


def check_methods(methods: Sequence[str]) -> None:
    """Refuse methods that there aren't.

    Raises:
        SettingError: names the nearest one, and all.
    """
    for method in methods:
        if method not in METHODS:
            near = get_close_matches(method, METHODS, n=1)
            meant = f"did you mean {near[0]}? There" if near else "there"
            raise SettingError(f"no method is called {method!r}; {meant} are {', '.join(METHODS)}")
