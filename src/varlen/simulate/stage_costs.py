"""What simulating and planning ask of a cost model on one mesh, computed once: rates, layers, bytes, limits."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from varlen.cost import kernels
from varlen.cost.memory import Memory
from varlen.cost.model import CostModel
from varlen.cost.rates import Rates
from varlen.step_plan import Mesh
from varlen.types import FloatArray, Int32Array

KEPT = 64
"""Of the last meshes and cost models asked for."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageCosts:
    """A cost model on one mesh, as arrays over its chunks of layers."""

    mesh: Mesh
    rates: Rates
    layers: FloatArray
    """float64 `[chunks]`: layers of each."""
    heads: FloatArray
    """float64 `[chunks]`: 1 for the chunk that has the vocabulary head."""
    gather_s: FloatArray
    """float64 `[chunks]`: seconds to gather a chunk's parameters, where they are sharded."""
    send_latency_s: float
    send_s_per_row: float
    sync_s: FloatArray
    """float64 `[stages]`: seconds that data-parallel ranks add up gradients."""
    memory: Memory
    """Bytes of rows."""
    limits: FloatArray
    """float64 `[stages]`: bytes that are left beside states."""
    splits: bool = False
    """Whether weight gradients are tasks of their own."""
    head_at_once: bool = False
    """Whether the vocabulary head runs in backward tasks alone, its forward pass too, as `varlen.runtime` has it:
    logits are then gone as soon as they are there."""


@functools.lru_cache(maxsize=KEPT)
def stage_costs(cost: CostModel, mesh: Mesh, *, splits: bool = False) -> StageCosts:
    """Ask a cost model for all that a step on a mesh needs.

    Args:
        cost: the model on its hardware.
        mesh: the GPUs.
        splits: whether weight gradients are tasks of their own.

    Raises:
        SettingError: the mesh doesn't divide the model.

    Cost: a millisecond at first; the last ones asked for are kept.
    """
    stages, memory = cost.stages(mesh), cost.memory(mesh, splits_backward=splits)
    latency, per_row = cost.send_s(mesh)
    return StageCosts(
        mesh=mesh,
        rates=cost.rates(mesh),
        layers=stages.layers,
        heads=stages.has_head.astype(np.float64),
        gather_s=cost.gather_s(mesh),
        send_latency_s=latency,
        send_s_per_row=per_row,
        sync_s=cost.gradient_sync_s(mesh),
        memory=memory,
        limits=memory.limit_bytes - memory.state_bytes,
        splits=splits,
        head_at_once=cost.kernels == "eager",
    )


def priced(costs: StageCosts, slice_offsets: Int32Array, slices: Int32Array) -> FloatArray:
    """Price MicroPacks; float64 `[num_micropacks, 7]`.

    Args:
        costs: of the mesh.
        slice_offsets: int32 `[num_micropacks + 1]`.
        slices: int32 `[3 or more, num_slices]`: starts, stops, ranks that share the slice.
    """
    result: FloatArray = kernels.price(slice_offsets, slices[0], slices[1], slices[2], costs.rates)
    return result
