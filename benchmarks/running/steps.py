"""The steps that pipelines run: long-tailed documents of real data, and a plan of them by each method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import varlen as vl
from benchmarks.gpu.models import llama_sizes
from benchmarks.inputs import REAL_LENGTHS
from varlen.plan.search import Search
from varlen.simulate.dispatch import dispatch, pipelines_of
from varlen.simulate.graph import durations, stage_costs
from varlen.step_plan import StepPlan

CONFIG = llama_sizes(256, 704, 8, 4, layers=8, vocab=2048, positions=8192)
"""Large enough that a task takes tens of milliseconds on one core."""
CAPACITY = 4096
SHRINK = 16
"""Real lengths are divided by this, so that a step takes seconds on two cores."""
LEAST_ROWS = 128
SETS = ("code_src", "mix_pretrain_docs", "pub_distca_prolong")


@dataclass(frozen=True, kw_only=True)
class Step:
    """Documents, and a way to run them."""

    documents: str
    """Where their lengths are from."""
    method: str
    plan: StepPlan


def raw_lengths(name: str, count: int, seed: int = 0) -> np.ndarray:
    """Return lengths drawn from a set of real documents; from a log-normal one where the data isn't there."""
    rng = np.random.default_rng(seed)
    file = REAL_LENGTHS / f"{name}.npz"
    if not file.exists():
        return rng.lognormal(8.5, 1.6, count).clip(16).astype(np.int64)
    known = np.load(file)["lengths"]
    drawn: np.ndarray = known[rng.integers(0, len(known), count)]
    return drawn


def lengths_of(name: str, count: int, seed: int = 0) -> np.ndarray:
    return np.clip(raw_lengths(name, count, seed) // SHRINK, 8, CAPACITY).astype(np.int32)


def source_of(name: str) -> str:
    return name if (REAL_LENGTHS / f"{name}.npz").exists() else "log-normal"


def steps(name: str, lengths: np.ndarray, cost: vl.CostModel, mesh: vl.Mesh) -> list[Step]:
    """Plan a step in every way that is compared.

    `symmetric` and `asymmetric` differ in nothing but where the backward pass is cut: into half as many MicroPacks
    again as the forward pass has. `micropack` may cut it apart where the simulator gains 1 %.
    """
    whole = Search(
        splits_backward=False, asymmetric=False, least_rows=LEAST_ROWS, repairs=False, merges=False
    )
    given: dict[str, Any] = {"cost": cost, "mesh": mesh}
    packed = vl.plan_step(lengths, method="packed", capacity=CAPACITY, **given)
    tuned = vl.plan_step(lengths, method="packed", capacity=CAPACITY, tuned=True, **given)
    symmetric = vl.plan_step(lengths, search=replace(whole, micropacks_per_stage=(4,)), **given)
    finer = vl.plan_step(lengths, search=replace(whole, micropacks_per_stage=(6,)), **given)
    found = {
        "packed, as users run it": packed,
        "packed, tuned": tuned,
        "symmetric": symmetric,
        "asymmetric": crossed(symmetric, finer, cost),
        "micropack": vl.plan_step(
            lengths, search=replace(whole, splits_backward=True, asymmetric=True), **given
        ),
    }
    return [Step(documents=name, method=method, plan=plan) for method, plan in found.items()]


def crossed(ahead: StepPlan, back: StepPlan, cost: vl.CostModel) -> StepPlan:
    """Return a plan with the forward MicroPacks of one and the backward MicroPacks of another, in the best order."""
    costs = stage_costs(cost, ahead.mesh)
    plan = replace(ahead, backward=back.backward, answered_by="both passes cut apart")
    of = pipelines_of(plan, costs, durations(plan, cost))
    codes = [dispatch(of(rank)).codes for rank in range(plan.mesh.dp)]
    sizes = np.repeat([code.shape[1] for code in codes], plan.mesh.pp)
    return replace(
        plan,
        tasks=np.concatenate([code.ravel() for code in codes]),
        task_offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
    )
