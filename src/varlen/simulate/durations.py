"""`Durations`: what each task of a plan takes, in seconds, as arrays that the engine and a dispatcher read."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

import numpy as np

from varlen import jit
from varlen.cost.model import CostModel
from varlen.cost.rates import (
    FORWARD_HEAD,
    FORWARD_LAYER,
    INPUT_HEAD,
    INPUT_LAYER,
    ROWS,
    WEIGHT_HEAD,
    WEIGHT_LAYER,
)
from varlen.step_plan import MicroPacks, StepPlan
from varlen.types import FloatArray

_kernel = functools.partial(jit.kernel, "varlen.cost", "kernels")


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
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False


def durations(plan: StepPlan, cost: CostModel) -> Durations:
    """Price every task of a plan.

    Args:
        plan: the plan.
        cost: what slices, messages and collectives take.

    Raises:
        SettingError: a mesh that doesn't divide the model.

    Cost: O(slices + tasks).
    """
    mesh, rates, stages = plan.mesh, cost.rates(plan.mesh), cost.stages(plan.mesh)
    layers = stages.layers[:, np.newaxis]
    head = stages.has_head[:, np.newaxis].astype(np.float64)

    def priced(micropacks: MicroPacks) -> FloatArray:
        shared = plan.num_ranks[micropacks.document_ids]
        priced: FloatArray = _kernel("price")(
            micropacks.slice_offsets, micropacks.starts, micropacks.stops, shared, rates
        )
        return priced

    with jit.sized(1e-4 * (len(plan.forward.starts) + len(plan.backward.starts))):
        ahead, back = priced(plan.forward), priced(plan.backward)
    inputs = layers * back[:, INPUT_LAYER] + head * back[:, INPUT_HEAD]
    weights = layers * back[:, WEIGHT_LAYER] + head * back[:, WEIGHT_HEAD]
    latency_s, row_s = cost.send_s(mesh)
    return Durations(
        forward=layers * ahead[:, FORWARD_LAYER] + head * ahead[:, FORWARD_HEAD],
        backward=inputs if plan.splits_backward else inputs + weights,
        weight=weights if plan.splits_backward else np.zeros_like(weights),
        send_forward=ahead[:, ROWS] * row_s,
        send_backward=back[:, ROWS] * row_s,
        latency_s=latency_s,
        gather=cost.gather_s(mesh),
        sync=cost.gradient_sync_s(mesh),
        forward_rows=ahead[:, ROWS],
        backward_rows=back[:, ROWS],
    )
