"""`Memory`: the bytes of a GPU that stay, and those that each row of a MicroPack adds and gives back."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Literal

import numpy as np

from varlen.cost.shape import ModelShape
from varlen.cost.stages import Stages
from varlen.step_plan import Mesh, Offload, Recompute
from varlen.types import FloatArray

Kernels = Literal["fused", "eager"]
"""Whether norms and gates are kernels of their own, as in Megatron, or run operation by operation, as in
transformers, which leaves more behind."""
Saved = Literal["layers", "stage"]
"""What layers are computed again from: what went into each of them, or what went into the first of a chunk."""
LOGIT_ROWS: Final = 1024
"""Rows whose logits are there at once: the loss is computed chunk by chunk."""
LOGIT_BYTES: Final = 6
"""bf16 logits, and their softmax in float32."""
LAYERS_ON_DEVICE: Final = 2
"""With keys and values in host memory: the layer that runs, and the one that is being fetched."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Memory:
    """Bytes of one GPU of each stage or chunk; "row" is a token that this GPU computes; read-only."""

    state_bytes: FloatArray
    """float64 `[pp]`: parameters, gradients, optimizer states, and the head's chunk of logits."""
    held_bytes: FloatArray
    """float64 `[num_chunks]`: per row, from its forward to the end of its backward pass."""
    gradient_bytes: FloatArray
    """float64 `[num_chunks]`: per row, dK and dV in float32, while its document is in backward."""
    passing_bytes: FloatArray
    """float64 `[num_chunks]`: per row, while its MicroPack runs."""
    kept_for_weight_bytes: FloatArray
    """float64 `[num_chunks]`: per row, from input gradients to weight gradients where they are apart."""
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


def kv_shards(model: ModelShape, mesh: Mesh) -> int:
    """Return among how many GPUs keys and values are divided: fewer key heads than GPUs are copied."""
    return mesh.tp if model.latent_rank else min(mesh.tp, model.kv_heads)


def activation_bytes(model: ModelShape) -> float:
    """Return bytes that a token leaves behind in one layer when everything is kept, not divided by tp.

    In bf16: both norms' inputs and outputs (8h), queries and attention's output, keys and values, the gate, the
    other branch and their product (6f), and attention's log-sum in float32. For grouped heads of h in all this is
    12h + 4·kv_heads·d + 6f + 4·heads; compare Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
    Transformer Models", arXiv 2205.05198, §4. Latent attention keeps its latents and what it expands them to;
    experts keep the rows sent to them and those that come back.
    """
    heads = 2 * model.heads * (model.head_dim + model.value_head_dim) + 4 * model.heads
    expanded = 2 * model.kv_heads * (model.head_dim + model.value_head_dim)
    latents = (model.kv_bytes_per_token_layer + 2 * model.query_rank) if model.latent_rank else 0
    routed = 4 * model.hidden * model.experts_per_token * (1 - model.num_dense_layers / model.layers)
    return 8 * model.hidden + heads + expanded + latents + ffn_bytes(model) + routed


def ffn_bytes(model: ModelShape) -> float:
    """Return bytes of one layer's inner activations of a token: three of width f with a gate, two without."""
    return (6 if model.gated else 4) * model.active_ffn


def eager_bytes(model: ModelShape) -> float:
    """Return bytes that a token leaves behind in one layer of transformers beside `activation_bytes`.

    Each norm keeps its input in float32, the normed and the scaled row (8h instead of 4h), and a root of its own; the
    gate's SiLU stands beside what it was made of.
    """
    return 8 * model.hidden + 8 + 2 * model.active_ffn * model.gated


def reused_bytes(model: ModelShape) -> float:
    """Return bytes of a token and layer that selective recomputation doesn't keep: norm outputs, the product."""
    return 4 * model.hidden + 2 * model.active_ffn


def layers_again(layers: FloatArray, share: float) -> FloatArray:
    """Return how many layers of each chunk a share of them is: whole ones, rounded up.

    Args:
        layers: `[chunks]`, of any shape.
        share: above 0, at most 1.
    """
    again: FloatArray = np.ceil(share * layers - 1e-9)
    return again


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
) -> Memory:
    """Count the bytes of one GPU of each stage; see `Memory`.

    - "none" keeps all activations, "selective" all but norm outputs and the SwiGLU product, "full" a layer's
      input, and keys and values for later slices; one layer's activations then live while it runs. With a
      `recompute_share` below 1 so many layers of a chunk, rounded up, do, and the others as under "selective".
    - While a layer's backward pass runs, gradients of its widest activations live beside it.
    - With kernels="eager" layers leave `eager_bytes` more, and what passes is transformers' own.
    - With offload="kv" keys, values and their gradients of `LAYERS_ON_DEVICE` layers are on the GPU, of the others
      in host memory.
    - With saved="stage" rows hold what goes into the first layer of their chunk, in host memory if keys and values
      are; while a MicroPack runs backward, what goes into each layer that is computed again is there for its rows.
    """
    layers, tp = stages.layers, mesh.tp
    kv = model.kv_bytes_per_token_layer / kv_shards(model, mesh)
    expanded = 2 * model.kv_heads * (model.head_dim + model.value_head_dim) / kv_shards(model, mesh)
    whole = (activation_bytes(model) - expanded * kv_shards(model, mesh)) / tp + expanded
    gradients = (ffn_bytes(model) + 4 * model.hidden) / tp
    if kernels == "eager":
        whole += eager_bytes(model) / tp
        gradients = 4 * model.active_ffn / tp
    kept = whole - (reused_bytes(model) / tp if recompute != "none" else 0.0)
    num_again = layers_again(layers, recompute_share) * (recompute == "full")
    held_inputs, made_inputs = _inputs(layers, num_again, offload, saved)
    held = 2 * model.hidden / tp * held_inputs + kv * num_again + kept * (layers - num_again)
    again, ends = whole, 4 * model.hidden / tp * stages.has_head
    if kernels == "eager":
        # Keys and values stand in the cache already, and a layer's input and output beside what they leave; what
        # the final norm takes is made again.
        again += 4 * model.hidden / tp - expanded
        ends = ends * (num_again < layers)
    passing = gradients + {"none": 0.0, "selective": reused_bytes(model) / tp, "full": again}[recompute]
    passing_bytes: FloatArray = passing + 2 * model.hidden / tp * made_inputs
    near = np.minimum(layers, LAYERS_ON_DEVICE) if offload == "kv" else layers
    linear_inputs: float = 4 * model.hidden + 2 * model.heads * model.value_head_dim + 2 * model.active_ffn
    linear_gradients: float = 4 * model.hidden + 2 * model.heads * model.head_dim
    linear_gradients += (4 if model.gated else 2) * model.active_ffn
    return Memory(
        state_bytes=_state_bytes(model, mesh, stages, kernels),
        held_bytes=held - kv * (layers - near) + ends,
        gradient_bytes=2 * kv * near,
        passing_bytes=passing_bytes,
        kept_for_weight_bytes=layers * ((linear_inputs + linear_gradients) / tp + expanded),
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
    chunks += LOGIT_ROWS * logit_bytes(model, kernels) / mesh.tp * stages.has_head
    states: FloatArray = chunks.reshape(mesh.virtual_stages, mesh.pp).sum(axis=0)
    return states


def logit_bytes(model: ModelShape, kernels: Kernels = "fused") -> float:
    """Return bytes of a row's logits.

    Of eager layers: what the final norm in float32 (30h at its widest, 12h beside the logits) and the logits take
    beyond the layers' gradients, which pass at another time.
    """
    logits = float(LOGIT_BYTES * model.vocab)
    if kernels == "fused":
        return logits
    return max(12 * model.hidden + logits, 30.0 * model.hidden, 4 * model.active_ffn) - 4 * model.active_ffn


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
