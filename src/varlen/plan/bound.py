"""A lower bound on the time of any plan of a step: even work, the longest document, filling of the pipeline."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from varlen.cost.model import CostModel
from varlen.cost.rates import (
    FORWARD_HEAD,
    FORWARD_LAYER,
    INPUT_HEAD,
    INPUT_LAYER,
    WEIGHT_HEAD,
    WEIGHT_LAYER,
)
from varlen.simulate.graph import StageCosts, durations_of_prices, priced, stage_costs
from varlen.step_plan import Mesh, PlanMethod
from varlen.types import FloatArray, Int32Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Lower bounds on the seconds of any plan of a step."""

    work_s: float
    """The busiest stage's work at the highest rates, shared evenly by all ranks, after the pipeline has filled."""
    chain_s: float
    """The longest document, whose backward begins after its forward, on as many ranks as may share it."""
    sync_s: float
    """The gradient sync after the last backward."""

    @property
    def seconds(self) -> float:
        """The larger bound, and the gradient sync."""
        return max(self.work_s, self.chain_s) + self.sync_s


def lower_bound(
    lengths: Int32Array,
    cost: CostModel,
    mesh: Mesh,
    *,
    least_rows: int = 1,
    most_merged_ranks: int | None = None,
) -> Bound:
    """Return bounds for plans whose MicroPacks hold at least `least_rows` rows per GPU, or a rank's part of the step.

    Work is counted at the highest rate of any number of rows and without launches, so no plan reaches the bound if
    rates depend on rows. Weight gradients can run at any time, so a pipeline needs no time to drain.
    """
    costs, best = stage_costs(cost, mesh), _at_best(cost, mesh)
    filled = lengths[lengths > 0]
    work = _seconds(best, filled, np.ones(filled.size, np.int32))
    rows = int(min(least_rows, filled.sum(dtype=np.int64) / mesh.dp / mesh.cp))
    first = _smallest_forward(costs, max(rows, 1)) + costs.send_latency_s + costs.send_s_per_row * rows
    fill = np.cumsum(np.append(0.0, first))[: mesh.pp]
    longest = filled[[int(work.sum(axis=0).argmax())]]
    most = min(most_merged_ranks or mesh.dp, mesh.dp)
    sizes = 2 ** np.arange(most.bit_length(), dtype=np.int32)
    chains = [float((fill + _seconds(best, longest, size)[:, 0]).max()) for size in sizes[:, None]]
    return Bound(
        work_s=float((fill + work.sum(axis=1) / mesh.dp).max()),
        chain_s=min(chains),
        sync_s=float(costs.sync_s.min()),
    )


def least_possible(
    lengths: Int32Array, cost: CostModel, mesh: Mesh, method: PlanMethod, *, least_rows: int
) -> float:
    """Return a lower bound on the seconds of one method's plans, of which only "dynamic_cp" shares documents.

    Whole documents run through all stages and back.
    """
    rows, most_ranks = least_rows if method == "sliced" else 1, mesh.dp if method == "dynamic_cp" else 1
    bound = lower_bound(lengths, cost, mesh, least_rows=rows, most_merged_ranks=most_ranks)
    if method == "sliced":
        return bound.seconds
    costs = stage_costs(cost, mesh, splits=True)
    most = most_ranks.bit_length()
    ranks = 2 ** np.arange(most, dtype=np.int32)
    longest = np.full(most, lengths.max(), np.int32)
    prices = priced(costs, np.arange(most + 1, dtype=np.int32), np.stack([0 * longest, longest, ranks]))
    seconds = durations_of_prices(costs, prices, prices)
    chain_s = float((seconds.forward.sum(axis=0) + seconds.backward.sum(axis=0)).min())
    return max(bound.seconds, chain_s + bound.sync_s)


def _seconds(costs: StageCosts, lengths: Int32Array, num_ranks: Int32Array) -> FloatArray:
    """Return seconds of each document in both passes on each stage, float64 `[pp, num_documents]`."""
    offsets = np.arange(lengths.size + 1, dtype=np.int32)
    prices = priced(costs, offsets, np.stack([np.zeros_like(lengths), lengths, num_ranks]))
    layer = prices[:, [FORWARD_LAYER, INPUT_LAYER, WEIGHT_LAYER]].sum(axis=1)
    head = prices[:, [FORWARD_HEAD, INPUT_HEAD, WEIGHT_HEAD]].sum(axis=1)
    chunks = costs.layers[:, None] * layer + costs.has_head[:, None] * head
    seconds: FloatArray = chunks.reshape(costs.mesh.virtual_stages, costs.mesh.pp, -1).sum(axis=0)
    return seconds


@functools.lru_cache(maxsize=64)
def _at_best(cost: CostModel, mesh: Mesh) -> StageCosts:
    """Return the costs at the highest rates, without launches."""
    return replace(stage_costs(cost, mesh), rates=cost.rates(mesh, best=True))


def _smallest_forward(costs: StageCosts, rows: int) -> FloatArray:
    """Return seconds of a forward MicroPack of documents of one token, the cheapest rows, float64 `[chunks]`."""
    ones = np.ones(rows * costs.mesh.cp, np.int32)
    prices = priced(costs, np.array([0, ones.size], np.int32), np.stack([0 * ones, ones, ones]))
    seconds: FloatArray = costs.layers * prices[0, FORWARD_LAYER] + costs.has_head * prices[0, FORWARD_HEAD]
    return seconds
