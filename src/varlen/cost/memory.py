"""`Memory`: the bytes of a GPU that stay, and those that each row of a MicroPack adds and gives back."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from varlen.cost.layer import Kernels, layer_bytes
from varlen.cost.phases import (
    AHEAD,
    BACKWARD_COUNTS,
    CLOSED,
    FORWARD_COUNTS,
    LAYERS_ON_DEVICE,
    LOGIT_ROWS,
    OPENED,
    OWN,
    RETURNED,
    Chunks,
    backward_peaks,
    forward_peaks,
    logit_bytes,
    messages,
)
from varlen.cost.shape import ModelShape
from varlen.cost.stages import KEPT, Stages
from varlen.step_plan import Mesh, Offload, Recompute
from varlen.types import FloatArray

Saved = Literal["layers", "stage"]
"""What layers are computed again from: what went into each of them, or what went into the first of a chunk."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Memory:
    """Bytes of one GPU of each stage or chunk; "row" is a token that this GPU computes; read-only."""

    state_bytes: FloatArray
    """float64 `[pp]`: parameters, gradients, optimizer states; of fused kernels, the head's chunk of logits."""
    held_bytes: FloatArray
    """float64 `[num_chunks]`: per row, from its forward to the end of its backward pass."""
    gradient_bytes: FloatArray
    """float64 `[num_chunks]`: per row, dK and dV in float32, while its document is in backward."""
    near_bytes: FloatArray
    """float64 `[num_chunks]`: with keys and values in host memory, of each token of a running MicroPack's documents
    up to its end; three times as many where it runs backward."""
    kept_for_weight_bytes: FloatArray
    """float64 `[num_chunks]`: per row, from input gradients to weight gradients where they are apart."""
    forward_peaks: FloatArray
    """float64 `[num_chunks, peaks, 7]`: what a forward task takes at its peaks, of each thing that
    `varlen.cost.phases` says a MicroPack counts; the largest is what it takes."""
    forward_left: FloatArray
    """float64 `[num_chunks, 7]`: what it leaves."""
    backward_peaks: FloatArray
    """float64 `[num_chunks, peaks, 14]`: as `forward_peaks`."""
    backward_left: FloatArray
    """float64 `[num_chunks, 14]`: what it leaves, less what it gives back."""
    first_bytes: FloatArray
    """float64 `[2, num_chunks]`: before any task runs, per row of the first MicroPack forward, and backward."""
    limit_bytes: float
    """What a plan may use of the card."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False


def bytes_per_parameter(mesh: Mesh) -> float:
    """Return bytes of a parameter's states on one GPU.

    18: a bf16 parameter, a float32 gradient, and Adam's master copy and two moments in float32. Sharded states
    (12) are divided among the GPUs that hold equal parameters, dp x cp (ZeRO; Rajbhandari et al. 2019,
    arXiv 1910.02054); with sharding="parameters" everything is.
    """
    shards = mesh.dp * mesh.cp
    return {"none": 18.0, "optimizer": 6.0 + 12.0 / shards, "parameters": 18.0 / shards}[mesh.sharding]


def layers_again(layers: FloatArray, share: float) -> FloatArray:
    """Return how many layers of each chunk a share of them is: whole ones, rounded up.

    Args:
        layers: `[chunks]`, of any shape.
        share: above 0, at most 1.
    """
    again: FloatArray = np.ceil(share * layers - 1e-9)
    return again


@functools.lru_cache(maxsize=KEPT)
def memory_of(
    model: ModelShape,
    mesh: Mesh,
    stages: Stages,
    recompute: Recompute,
    offload: Offload,
    limit_bytes: float,
    kernels: Kernels = "fused",
    *,
    recompute_share: float = 1.0,
    saved: Saved = "layers",
    splits_backward: bool = False,
) -> Memory:
    """Count the bytes of one GPU of each stage; see `Memory`.

    - "none" keeps all activations, "selective" all but norm outputs and the SwiGLU product, "full" a layer's
      input, and keys and values for later slices; one layer's activations then live while it runs. With a
      `recompute_share` below 1 so many layers of a chunk, rounded up, do, and the others as under "selective".
    - While a layer's backward pass runs, gradients of its widest activations live beside it.
    - With kernels="eager" layers leave more, and what passes is transformers' own; logits are there in backward tasks
      alone, and gone before the first layer's backward pass.
    - Keys and values of a whole document are there from its first slice on.
    - With offload="kv" keys, values and their gradients of `LAYERS_ON_DEVICE` layers are on the GPU, of the documents
      that run, and all others in host memory.
    - With saved="stage" rows hold what goes into the first layer of their chunk, in host memory if keys and values
      are; while a MicroPack runs backward, what goes into each layer that is computed again is there for its rows.
    - Where ranks share a document, eager layers have its keys and values gathered, of one layer at a time; fused ones
      pass them on in a ring.
    """
    layers, layer = stages.layers, layer_bytes(model, mesh, recompute, kernels)
    num_again = layers_again(layers, recompute_share) * (recompute == "full")
    held_inputs, made_inputs = _inputs(layers, num_again, offload, saved)
    is_far, is_eager = (offload == "kv") & (layers > LAYERS_ON_DEVICE), kernels == "eager"
    logits = logit_bytes(model, kernels) / mesh.tp
    chunks = Chunks(
        layers=layers,
        num_again=num_again,
        made_inputs=made_inputs,
        near=np.where(is_far, 0.0, layer.kv),
        far=np.where(is_far, layer.kv, 0.0),
        head=np.where(stages.has_head & is_eager, logits, 0.0),
        splits=splits_backward,
    )
    inputs = layer.hidden * held_inputs
    held: FloatArray = inputs + layer.kv * num_again + layer.kept * (layers - num_again)
    held += layer.shared * (num_again < layers) - chunks.far * layers
    held += 4 * model.hidden / mesh.tp * stages.has_head * (not is_eager)
    apart = layer.waiting_again * num_again + layer.waiting_kept * (layers - num_again)
    gradient: FloatArray = 2 * chunks.near * layers
    sent = messages(layer, num_again == layers, stages)
    taken, back_taken = sent.taken(FORWARD_COUNTS)[0], sent.taken(BACKWARD_COUNTS)[1]
    left, back_left = np.zeros_like(taken), np.zeros_like(back_taken)
    left[:, OWN], left[:, AHEAD] = held, chunks.near * layers
    back_left[:, OWN], back_left[:, RETURNED] = apart * splits_backward - (held - inputs), -inputs
    back_left[:, OPENED], back_left[:, CLOSED] = gradient, -gradient
    return Memory(
        state_bytes=_state_bytes(model, mesh, stages, kernels),
        held_bytes=held,
        gradient_bytes=gradient,
        near_bytes=LAYERS_ON_DEVICE * chunks.far,
        kept_for_weight_bytes=apart,
        forward_peaks=forward_peaks(layer, chunks, left, taken),
        forward_left=left + taken + sent.given(FORWARD_COUNTS)[0],
        backward_peaks=backward_peaks(layer, chunks, back_taken),
        backward_left=back_left + back_taken + sent.given(BACKWARD_COUNTS)[1],
        first_bytes=np.stack([sent.received_forward, sent.received_backward]),
        limit_bytes=limit_bytes,
    )


def _inputs(
    layers: FloatArray, num_again: FloatArray, offload: Offload, saved: Saved
) -> tuple[FloatArray, FloatArray]:
    """Of how many layers what goes in is held, and of how many it is made again; each float64 `[num_chunks]`."""
    if saved == "layers":
        return num_again, np.zeros(len(layers))
    held = np.minimum(num_again, 1.0)
    near = held * ((offload == "none") | (layers <= LAYERS_ON_DEVICE))
    made: FloatArray = num_again - near
    return near, made


def _state_bytes(model: ModelShape, mesh: Mesh, stages: Stages, kernels: Kernels) -> FloatArray:
    """float64 `[pp]`."""
    chunks = chunk_parameters(model, stages) / mesh.tp * bytes_per_parameter(mesh)
    if mesh.sharding == "parameters":
        # What is gathered is one layer at a time: its bf16 parameters, and its gradients on their way out.
        chunks += 4 * model.parameters_per_layer / mesh.tp * (np.arange(mesh.num_chunks) < mesh.pp)
    if kernels == "fused":
        chunks += LOGIT_ROWS * logit_bytes(model) / mesh.tp * stages.has_head
    states: FloatArray = chunks.reshape(mesh.virtual_stages, mesh.pp).sum(axis=0)
    return states


def chunk_parameters(model: ModelShape, stages: Stages) -> FloatArray:
    """Return parameters of each chunk, float64 `[num_chunks]`; a tied matrix stands at both ends of a pipeline."""
    ends = stages.has_embedding.astype(np.float64) + stages.has_head
    if model.tied and len(ends) == 1:
        ends = np.ones(1)
    own: FloatArray = (
        stages.layers * model.parameters_per_layer
        + ends * model.head_parameters
        + stages.has_head * model.hidden
    )
    return own
