"""The least time that any plan of a step needs: work over ranks, the longest document, a pipeline's filling."""

from __future__ import annotations

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
from varlen.simulate.graph import StageCosts, priced, stage_costs
from varlen.step_plan import Mesh
from varlen.types import FloatArray, Int32Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Seconds that no plan of a step can go below, and the two reasons for them."""

    work_s: float
    """The busiest stage's work at the highest rates, shared evenly by all ranks, behind a pipeline that fills."""
    chain_s: float
    """The longest document: its backward begins when its forward has ended, on as many ranks as may share it."""
    sync_s: float
    """Gradients, added up when the last backward is done."""

    @property
    def seconds(self) -> float:
        """The larger of the two, and the gradients."""
        return max(self.work_s, self.chain_s) + self.sync_s


def lower_bound(
    lengths: Int32Array,
    cost: CostModel,
    mesh: Mesh,
    *,
    least_rows: int = 1,
    most_merged_ranks: int | None = None,
) -> Bound:
    """Return what no plan of a step goes below, whose MicroPacks hold at least `least_rows` rows a GPU.

    Work is counted at the highest rate over all rows and without launches, so that with rates that depend on rows
    no plan reaches it. Weight gradients may run whenever, so that a pipeline needs no time to drain.

    Args:
        lengths: int32 `[num_documents]`.
        cost: seconds.
        mesh: the GPUs.
        least_rows: of a MicroPack; fewer where a rank's part of the step is smaller.
        most_merged_ranks: that may share a document; as many as there are if not said.

    Cost: O(num_documents).
    """
    costs = stage_costs(cost, mesh)
    best = replace(costs, rates=cost.rates(mesh, best=True))
    held = lengths[lengths > 0]
    work = _seconds(best, held, np.ones(held.size, np.int32))
    rows = int(min(least_rows, held.sum(dtype=np.int64) / mesh.dp / mesh.cp))
    first = _smallest_forward(costs, max(rows, 1)) + costs.send_latency_s + costs.send_s_per_row * rows
    fill = np.cumsum(np.append(0.0, first))[: mesh.pp]
    longest = held[[int(work.sum(axis=0).argmax())]]
    most = min(most_merged_ranks or mesh.dp, mesh.dp)
    sizes = 2 ** np.arange(most.bit_length(), dtype=np.int32)
    chains = [float((fill + _seconds(best, longest, size)[:, 0]).max()) for size in sizes[:, None]]
    return Bound(
        work_s=float((fill + work.sum(axis=1) / mesh.dp).max()),
        chain_s=min(chains),
        sync_s=float(costs.sync_s.min()),
    )


def _seconds(costs: StageCosts, lengths: Int32Array, num_ranks: Int32Array) -> FloatArray:
    """Seconds of each document in both passes on each stage, float64 `[pp, num_documents]`."""
    offsets = np.arange(lengths.size + 1, dtype=np.int32)
    prices = priced(costs, offsets, np.stack([np.zeros_like(lengths), lengths, num_ranks]))
    layer = prices[:, [FORWARD_LAYER, INPUT_LAYER, WEIGHT_LAYER]].sum(axis=1)
    head = prices[:, [FORWARD_HEAD, INPUT_HEAD, WEIGHT_HEAD]].sum(axis=1)
    chunks = costs.layers[:, None] * layer + costs.heads[:, None] * head
    seconds: FloatArray = chunks.reshape(costs.mesh.virtual_stages, costs.mesh.pp, -1).sum(axis=0)
    return seconds


def _smallest_forward(costs: StageCosts, rows: int) -> FloatArray:
    """Seconds of a forward MicroPack of documents of one token, float64 `[chunks]`; none of its rows takes less."""
    ones = np.ones(rows * costs.mesh.cp, np.int32)
    prices = priced(costs, np.array([0, ones.size], np.int32), np.stack([0 * ones, ones, ones]))
    seconds: FloatArray = costs.layers * prices[0, FORWARD_LAYER] + costs.heads * prices[0, FORWARD_HEAD]
    return seconds
