"""`Durations`: what each task of a plan takes, in seconds, as arrays that the engine and a dispatcher read."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from varlen import jit
from varlen.cost import kernels
from varlen.cost.memory import Memory
from varlen.cost.model import CostModel
from varlen.cost.rates import (
    FORWARD_HEAD,
    FORWARD_LAYER,
    INPUT_HEAD,
    INPUT_LAYER,
    ROWS,
    WEIGHT_HEAD,
    WEIGHT_LAYER,
    Rates,
)
from varlen.step_plan import Mesh, MicroPacks, StepPlan
from varlen.types import FloatArray, Int32Array


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Durations:
    """Seconds and rows of every task of a plan, as flat arrays; read-only."""

    forward: FloatArray
    """float64 `[num_chunks, num_forward_micropacks]`: seconds of each forward MicroPack in each chunk of layers."""
    backward: FloatArray
    """float64 `[num_chunks, num_backward_micropacks]`: all of the backward pass, or its input gradients alone."""
    weight: FloatArray
    """float64 as `backward`: the weight gradients where the backward is split, else 0."""
    send_forward: FloatArray
    """float64 `[num_forward_micropacks]`: seconds for which a MicroPack's output occupies a link."""
    send_backward: FloatArray
    """float64 `[num_backward_micropacks]`: seconds for which the gradient of its input occupies a link."""
    latency_s: float
    """Seconds more until a message has arrived, in which the link carries others."""
    gather: FloatArray
    """float64 `[num_chunks]`: seconds to gather a chunk's parameters, or to scatter its gradients; 0 where each
    data-parallel rank has its own."""
    sync: FloatArray
    """float64 `[pp]`: seconds to add up the gradients of a stage at the step's end."""
    forward_rows: FloatArray
    """float64 `[num_forward_micropacks]`: rows (tokens) that one GPU computes."""
    backward_rows: FloatArray
    """float64 `[num_backward_micropacks]`."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False


def durations(plan: StepPlan, cost: CostModel) -> Durations:
    """Price every task of a plan.

    Cost: O(slices + tasks).
    """
    costs = stage_costs(cost, plan.mesh, splits=plan.splits_backward)
    with jit.sized(1e-4 * (len(plan.forward.starts) + len(plan.backward.starts))):
        prices = [_priced(plan, micropacks, costs) for micropacks in (plan.forward, plan.backward)]
    return durations_of_prices(costs, *prices)


def _priced(plan: StepPlan, micropacks: MicroPacks, costs: StageCosts) -> FloatArray:
    """The MicroPacks of a pass, priced."""
    slices = np.stack([micropacks.starts, micropacks.stops, plan.num_ranks[micropacks.document_ids]])
    # Of arrays that can't be written the kernel would be compiled once more.
    return priced(costs, micropacks.slice_offsets.copy(), slices)


def durations_of_prices(costs: StageCosts, forward: FloatArray, backward: FloatArray) -> Durations:
    """Return what tasks take in each chunk of layers, given what their MicroPacks take in an average layer.

    Args:
        forward: float64 `[forward MicroPacks, 7]`, priced.
        backward: float64 `[backward MicroPacks, 7]`, priced.
    """
    layers, heads = costs.layers[:, np.newaxis], costs.heads[:, np.newaxis]
    inputs = layers * backward[:, INPUT_LAYER] + heads * backward[:, INPUT_HEAD]
    weights = layers * backward[:, WEIGHT_LAYER]
    ahead = layers * forward[:, FORWARD_LAYER]
    if costs.head_at_once:
        inputs = inputs + heads * (backward[:, FORWARD_HEAD] + backward[:, WEIGHT_HEAD])
    else:
        ahead = ahead + heads * forward[:, FORWARD_HEAD]
        weights = weights + heads * backward[:, WEIGHT_HEAD]
    return Durations(
        forward=ahead,
        backward=inputs if costs.splits else inputs + weights,
        weight=weights if costs.splits else np.zeros_like(weights),
        send_forward=forward[:, ROWS] * costs.send_s_per_row,
        send_backward=backward[:, ROWS] * costs.send_s_per_row,
        latency_s=costs.send_latency_s,
        gather=costs.gather_s,
        sync=costs.sync_s,
        forward_rows=forward[:, ROWS],
        backward_rows=backward[:, ROWS],
    )


def gathers_s(gather: FloatArray, *, splits: bool) -> FloatArray:
    """Return seconds that a task of each kind gathers parameters and scatters gradients, float64 `[3, num_chunks]`.

    A backward task does both, unless its weight gradients, which are what is scattered, come later. A task takes as
    long as the longer of this and its computing where the two overlap.

    Args:
        gather: float64 `[num_chunks]`, as `Durations.gather`.
    """
    return np.array([1, 1 if splits else 2, 1])[:, np.newaxis] * gather


# What simulating and planning ask of a cost model on one mesh, computed once: rates, layers, bytes, limits.

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
        slice_offsets: int32 `[num_micropacks + 1]`.
        slices: int32 `[3 or more, num_slices]`: starts, stops, ranks that share the slice.
    """
    result: FloatArray = kernels.price(slice_offsets, slices[0], slices[1], slices[2], costs.rates)
    return result
