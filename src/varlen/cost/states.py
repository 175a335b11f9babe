"""Parameters of a stage on one GPU: bytes of their states, which of them are trained, and units that are gathered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from varlen.cost.shape import ModelShape, Stages
from varlen.step_plan import Mesh
from varlen.types import FloatArray

Gathered = Literal["unit", "step"]
"""How long parameters that ranks divide are whole: while their layer runs, or all step."""

Precision = Literal["bf16", "fp32"]
"""Type of computation: of activations, messages and gathered parameters."""

ENTRY_BYTES: Final[dict[Precision, float]] = {"bf16": 2.0, "fp32": 4.0}
"""Bytes of a number of that type."""

States = Literal["masters", "weights", "float32"]
"""What an optimizer updates: float32 masters of half-precision weights, these weights, or float32 weights."""


class _StateBytes(NamedTuple):
    """Bytes of a parameter that is trained; one that is frozen has its weight alone."""

    weight: float
    gradient: float
    """Of narrow weights `main_grad` in float32, and `.grad` where the optimizer updates them."""
    master: float
    optimizer: float
    """Adam's two moments."""


_STATE_BYTES: Final[dict[States, _StateBytes]] = {
    "masters": _StateBytes(2.0, 4.0, 4.0, 8.0),
    "weights": _StateBytes(2.0, 6.0, 0.0, 4.0),
    "float32": _StateBytes(4.0, 4.0, 0.0, 8.0),
}


def bytes_per_parameter(
    mesh: Mesh,
    states: States = "masters",
    gathered: Gathered = "unit",
    precision: Precision = "bf16",
    *,
    optimizer_bytes: float | None = None,
    is_trained: bool = True,
) -> float:
    """Return bytes of a parameter's states on one GPU.

    With sharding="optimizer", GPUs that hold equal parameters, dp x cp, divide what the optimizer holds (ZeRO;
    Rajbhandari et al. 2019, arXiv 1910.02054): the masters of narrow weights, or those of float32 weights, which then
    have masters too. With sharding="parameters" they divide everything; with gathered="step", each also has whole
    parameters and float32 gradients. A frozen parameter has no gradient, no master and nothing of the optimizer.

    Args:
        mesh: the GPUs, and the sharding.
        states: what the optimizer updates.
        gathered: how long parameters that ranks divide are whole.
        precision: of parameters that are gathered.
        optimizer_bytes: that the optimizer keeps; None for Adam's two moments.
        is_trained: whether the parameter is trained.
    """
    weight, gradient, master, adam = _STATE_BYTES[states]
    shards = mesh.dp * mesh.cp
    is_whole = mesh.sharding == "parameters" and gathered == "step"
    if not is_trained:
        return (
            weight / shards + ENTRY_BYTES[precision] * is_whole if mesh.sharding == "parameters" else weight
        )
    optimizer = adam if optimizer_bytes is None else optimizer_bytes
    if mesh.sharding == "parameters":
        # Gathered once a step, gradients are divided after the tasks, and take the place of the whole ones.
        whole = ENTRY_BYTES[precision] + 4.0 - 4.0 / shards if is_whole else 0.0
        return (weight + gradient + master + optimizer) / shards + whole
    if mesh.sharding == "none" or states == "weights":
        return weight + gradient + master + optimizer
    return weight + gradient + ((master or 4.0) + optimizer) / shards


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What is trained of a model, and what the optimizer keeps of it; see `CostModel`."""

    adapter_share: float = 0.0
    adapter_width: float = 0.0
    optimizer_bytes: float | None = None
    end_optimizer_bytes: float | None = None

    @property
    def of_layers(self) -> float:
        """Trained parameters of a layer over those that it has without adapters."""
        return self.adapter_share or 1.0

    @property
    def of_ends(self) -> float:
        """The same of embedding and head."""
        return 0.0 if self.adapter_share else 1.0


ALL: Final = Trained()
"""All parameters are trained, by Adam."""


def trained_parameters(model: ModelShape, stages: Stages, trained: Trained) -> FloatArray:
    """Return trained parameters of each chunk, float64 `[num_chunks]`."""
    if not trained.adapter_share:
        return chunk_parameters(model, stages)
    return layer_parameters(model, stages) * trained.adapter_share


def layer_parameters(model: ModelShape, stages: Stages) -> FloatArray:
    """Return parameters of the layers of each chunk, without adapters, float64 `[num_chunks]`."""
    found: FloatArray = stages.layers * model.parameters_per_layer
    return found


def chunk_parameters(model: ModelShape, stages: Stages) -> FloatArray:
    """Return parameters of each chunk, float64 `[num_chunks]`; both ends of a pipeline hold a tied matrix.

    Adapters aren't among them.
    """
    ends = stages.has_embedding.astype(np.float64) + stages.has_head
    if model.tied and len(ends) == 1:
        ends = np.ones(1)
    own: FloatArray = (
        layer_parameters(model, stages) + ends * model.head_parameters + stages.has_head * model.hidden
    )
    return own


@dataclass(frozen=True, kw_only=True, slots=True)
class Units:
    """Bytes of parameters that ranks divide, and of their gradients, while a unit of the model runs.

    - A layer's parameters are there, in the type of computation, and the next one's are being gathered.
    - A backward pass makes a layer's gradients in that type, and those of head and embedding in float32.
    - Then they are summed in float32; the message, and its sum, are there until the next unit's gradients are.

    Every array float64 `[num_chunks]`.
    """

    layer: float  # parameters of a layer
    gradients: float  # gradients of a layer in float32
    after_attention: float  # gradients of a layer that are there while its attention runs backward
    sums: float  # 1 + the share of a gradient that a rank gets
    head: FloatArray  # parameters of the head, where it is
    embedding: FloatArray
    by_head: FloatArray  # gradients of the head in float32
    by_embedding: FloatArray
    kept: FloatArray  # gradients of a tied weight, from the head to the embedding
    is_tied: npt.NDArray[np.bool_]

    @property
    def message(self) -> float:
        """Gradients of a layer in float32, and this rank's part of the sum."""
        return self.gradients * self.sums

    @property
    def always(self) -> float:
        """Bytes counted as states; the peaks of tasks count the difference."""
        return 2 * self.layer

    def at_layer(self, done: FloatArray, layers: FloatArray) -> FloatArray:
        """Return that difference when a layer's backward pass begins, after `done` others of so many."""
        from_head = self.by_head * self.sums * ~self.is_tied
        ahead = self.layer * (done < layers - 1)
        found: FloatArray = self.layer + ahead + self.kept - self.always
        return found + np.where(done > 0, self.message, from_head)


def units_of(model: ModelShape, mesh: Mesh, stages: Stages, trained: Trained, precision: Precision) -> Units:
    """Return the bytes of units."""
    entry, own = ENTRY_BYTES[precision], model.parameters_per_layer / mesh.tp
    matrix = model.head_parameters / mesh.tp
    is_tied = stages.has_head & stages.has_embedding & model.tied
    before = (model.attention_parameters - model.heads * model.value_head_dim * model.hidden) / mesh.tp
    by_head, by_embedding = (
        4.0 * trained.of_ends * matrix * has for has in (stages.has_head, stages.has_embedding)
    )
    return Units(
        layer=entry * own * (1.0 + trained.adapter_share),
        gradients=4.0 * trained.of_layers * own,
        after_attention=entry * trained.of_layers * (own - before),
        sums=1 + 1 / (mesh.dp * mesh.cp),
        head=entry * matrix * stages.has_head,
        embedding=entry * matrix * stages.has_embedding,
        by_head=by_head,
        by_embedding=by_embedding,
        kept=by_head * is_tied,
        is_tied=is_tied,
    )
