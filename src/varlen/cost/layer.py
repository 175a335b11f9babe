"""Bytes of one row in one layer: what it leaves behind, what passes while the layer runs forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from varlen.cost.shape import ModelShape
from varlen.step_plan import Mesh, Recompute

Kernels = Literal["fused", "eager"]
"""Whether norms and gates are kernels of their own, as in Megatron, or run operation by operation, as in
transformers, which leaves more behind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes:
    """Bytes of a row in one layer, on one GPU."""

    hidden: float
    """What goes into a layer."""
    kv: float
    """Keys and values, kept for later slices."""
    kept: float
    """What a layer that isn't computed again leaves behind, keys and values among it."""
    shared: float
    """What all layers of a MicroPack that keep graphs hold together: what went in, what came out, positions."""
    forward_again: float
    """What passes in the forward pass of a layer that leaves its input alone, beside that."""
    forward_kept: float
    """What passes in the forward pass of a layer that leaves `kept`, beside that."""
    backward_again: float
    """What a layer computed again takes as its backward pass begins, gradients at their widest, beside its input."""
    backward_kept: float
    """Gradients at their widest, and what is multiplied again, beside `kept`."""
    attention_forward: float
    """What is there while attention runs forward, beside its input, keys and values."""
    attention_again: float
    """What is there while attention runs backward, of a layer computed again, beside its input, keys and values."""
    attention_kept: float
    """The same where the layer left `kept`, less that, keys and values apart: what was made of attention is gone."""
    made: float
    """What a layer computed again has made before its backward pass begins."""
    waiting_again: float
    """Of a layer computed again, what waits for weight gradients where they are tasks of their own: what went into
    matrix products, and what came back."""
    waiting_kept: float
    """The same of a layer that left `kept`; products of norms that are made again are made for each matrix."""
    waiting_behind: float
    """What of it lies behind attention."""
    waiting_twice: float
    """What of that is made again for each of two matrices, in a layer that left `kept`."""
    waiting_first: float
    """What of it stays beside gradients at their widest."""
    waiting_last: float
    """What passes while the first norm of a layer runs backward, beside what waits."""
    matrix: float
    """Not of a row: the gradient of the largest matrix, on its way to where gradients are added up."""
    widened: float
    """Of gradients at their widest, what comes after that."""
    is_eager: bool
    """Whether it runs as in `varlen.runtime`: ranks that share a document then gather its keys and values, where
    others form a ring, and stages receive ahead."""


def layer_bytes(model: ModelShape, mesh: Mesh, recompute: Recompute, kernels: Kernels) -> LayerBytes:
    """Count the bytes of a row in one layer; with "full", layers that aren't computed again are selective.

    Args:
        model: its widths.
        mesh: tensor-parallel GPUs divide rows.
        recompute: what is computed again in the backward pass.
        kernels: whose layers run.
    """
    tp, hidden, gates = mesh.tp, 2.0 * model.hidden, 2.0 * model.active_ffn
    expanded = 2 * model.kv_heads * (model.head_dim + model.value_head_dim) / kv_shards(model, mesh)
    whole = (
        activation_bytes(model) - 2 * model.kv_heads * (model.head_dim + model.value_head_dim)
    ) / tp + expanded
    is_eager, saves = kernels == "eager", recompute != "none"
    queries, outputs = 2.0 * model.heads * model.head_dim, 2.0 * model.heads * model.value_head_dim
    norm = 4 * hidden + 4 if is_eager else hidden
    of_attention = norm + queries + outputs + 4 * model.heads
    # Of the output and of the residual, of queries twice where their keys come in two parts, and of own keys.
    by_attention = hidden + outputs + 2 * queries
    positions = 4.0 * model.head_dim if is_eager else 0.0
    if is_eager:
        whole += eager_bytes(model) / tp
        ends, widest = 2 * hidden, 2 * gates
        # Keys and values stand in the cache already; positions are made again.
        made = whole - expanded + (hidden + positions + 8) / tp
        # What goes in is copied where several documents run.
        forward_again = (3 * hidden + (3 if model.gated else 2) * gates + positions + 8) / tp
        forward_kept = (3 * hidden + 8 + gates * saves) / tp
        backward_again = made + (hidden + widest) / tp
        backward_kept = (hidden + widest + gates * model.gated * saves) / tp
    else:
        ends, widest = 0.0, float(ffn_bytes(model)) + 2 * hidden
        made = whole
        forward_again = whole + widest / tp
        forward_kept = (widest + reused_bytes(model) * saves) / tp
        backward_again, backward_kept = whole + widest / tp, forward_kept
    kept = whole - (reused_bytes(model) / tp if saves else 0.0)
    # Both norms' outputs and attention's, the product; gradients of both outputs, queries, keys, values and gates.
    waiting = (4 * hidden + queries + outputs + (3 if model.gated else 2) * gates) / tp + expanded
    # A gradient comes in and what it is of stays until the layer is done.
    again = (of_attention + by_attention + 2 * hidden + positions + 8 * is_eager) / tp + expanded
    beside = (of_attention - hidden * saves + by_attention + hidden) / tp + expanded
    return LayerBytes(
        hidden=hidden / tp,
        kv=model.kv_bytes_per_token_layer / kv_shards(model, mesh),
        kept=kept,
        shared=(ends + positions) / tp,
        forward_again=forward_again,
        forward_kept=forward_kept,
        backward_again=backward_again,
        backward_kept=backward_kept,
        attention_forward=(2 * hidden + queries + outputs + 4 * model.heads + positions) / tp,
        attention_again=again,
        attention_kept=beside + expanded - kept,
        made=made,
        is_eager=is_eager,
        waiting_again=waiting,
        waiting_kept=waiting + (3 if model.gated else 2) * hidden / tp * (saves and is_eager),
        waiting_behind=(hidden + (3 if model.gated else 2) * gates) / tp,
        waiting_twice=hidden / tp * (saves and is_eager and model.gated),
        waiting_first=gates / tp * is_eager,
        waiting_last=14 * hidden / tp,
        matrix=hidden * max(model.ffn, model.shared_ffn, model.expert_ffn) / tp * is_eager,
        widened=gates / tp,
    )


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
