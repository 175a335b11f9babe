"""Methods that move documents between steps, beside those that don't: 64 steps with the same documents in all.

Outlier delay (`vl.delay_outliers`, of WLB-LLM) holds long documents back until there is one for each micro-batch. The
steps of a run then have other documents, so that it can't be compared step by step: what counts is the time of all
steps, which have equal tokens.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.plan.grid import Cell, Int32Array, drawn_from
from benchmarks.plan.methods import warm_up
from varlen.cost.model import CostModel
from varlen.errors import PlanError
from varlen.plan.api import plan_step
from varlen.plan.delay import delay_outliers
from varlen.plan.search import Search
from varlen.simulate.api import simulate
from varlen.step_plan import Mesh, PlanMethod

STEPS = 64
TUNING_STEPS = 8
"""Of which the best context parallelism, threshold and number of documents that wait for each other is chosen."""
DOCUMENTS = 256
MOST_STEPS = 8
"""For which a document waits."""
SHARES = (0.5, 0.25)
"""Thresholds to try, of the capacity."""
ROUNDS = (1, 4)
"""Numbers of long documents that go together, as multiples of the data-parallel ranks."""
DELAYED_CELLS = [
    Cell(name, 131_072, DOCUMENTS, "llama-2-7b", dp, 4, 8, seed=1)
    for name, dp in itertools.product(("code_src", "mix_pretrain_docs", "pub_distca_wlbllm"), (4, 8))
]
WAYS: tuple[PlanMethod, ...] = ("balanced", "micropack")


class _Order(NamedTuple):
    """The documents of all steps in the order in which they are trained."""

    ids: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    def steps(self, lengths: Int32Array, count: int) -> list[Int32Array]:
        return [lengths[self.ids[a:b]] for a, b in itertools.pairwise(self.offsets[: count + 1])]


def delayed(cell: Cell, num_steps: int = STEPS) -> dict[str, Any]:
    """Plan the steps of a cell as they were drawn and with long documents delayed; return plain data."""
    warm_up(WAYS)
    lengths = drawn_from(cell, num_steps)
    drawn = _Order(np.arange(lengths.size), np.arange(num_steps + 1) * cell.documents)
    ways = {}
    for method in WAYS:
        ways[method] = _run(lengths, [({}, drawn)], cell, method)
        ways[f"{method}, delayed"] = _run(lengths, list(_orders(lengths, drawn, cell)), cell, method)
    return {
        "cell": asdict(cell),
        "steps": num_steps,
        "tokens": int(lengths.sum(dtype=np.int64)),
        "ways": ways,
    }


def _orders(lengths: Int32Array, drawn: _Order, cell: Cell) -> list[tuple[dict[str, float], _Order]]:
    found = []
    for share, rounds in itertools.product(SHARES, ROUNDS):
        threshold, count = int(share * cell.capacity), rounds * cell.dp
        order = _Order(
            *delay_outliers(
                lengths, drawn.offsets, thresholds=[threshold], count=count, most_steps=MOST_STEPS
            )
        )
        found.append(({"threshold": threshold, "count": count, **_waits(drawn, order)}, order))
    return found


def _waits(drawn: _Order, order: _Order) -> dict[str, float]:
    """Return the share of documents that wait, and for how many steps those do in the mean."""
    steps = np.arange(len(drawn.offsets) - 1)
    before = np.repeat(steps, np.diff(drawn.offsets))
    after = np.empty_like(before)
    after[order.ids] = np.repeat(steps, np.diff(order.offsets))
    waited = (after - before)[after > before]
    return {
        "waiting_share": waited.size / before.size,
        "waited_steps": float(waited.mean()) if waited.size else 0.0,
    }


def _run(
    lengths: Int32Array, orders: list[tuple[dict[str, float], _Order]], cell: Cell, method: PlanMethod
) -> dict[str, Any]:
    """Return the seconds of all steps at the setting that is fastest in the first ones."""
    cost = cell.cost()
    meshes = cell.meshes if method != "micropack" else [cell.mesh]  # which tries the others by itself
    best, least_s = None, np.inf
    for (setting, order), mesh in itertools.product(orders, meshes):
        taken_s = _seconds(
            order.steps(lengths, min(TUNING_STEPS, len(order.offsets) - 1)), cost, mesh, method
        )
        if taken_s < least_s:
            best, least_s = (setting, order, mesh), taken_s
    if best is None:
        return {"refused": "no plan of the first steps fits"}
    setting, order, mesh = best
    return {
        **setting,
        "cp": mesh.cp,
        "seconds": _seconds(order.steps(lengths, len(order.offsets)), cost, mesh, method),
    }


def _seconds(steps: list[Int32Array], cost: CostModel, mesh: Mesh, method: PlanMethod) -> float:
    """Return the simulated seconds of steps; infinity where one of them doesn't fit."""
    try:
        plans = [plan_step(each, cost=cost, mesh=mesh, method=method, search=Search()) for each in steps]
    except PlanError:
        return np.inf
    return float(sum(simulate(plan, cost).makespan_s for plan in plans))
