"""`Memory`: the bytes of a GPU that stay, and those that each row of a MicroPack adds and gives back."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from varlen.cost.shape import KEPT, ModelShape, Stages
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
    `varlen.cost.memory` says a MicroPack counts; the largest is what it takes."""
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

    `layers`: `[chunks]`, of any shape.
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


# Bytes of one row in one layer: what it leaves behind, what passes while the layer runs forward and backward.

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
    """Count the bytes of a row in one layer; with "full", layers that aren't computed again are selective."""
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


# What a task takes at its peaks, as factors of what its MicroPack counts: logits, layers and attention in turn.
#
# The head's logits are gone before the first layer runs backward, and gradients of keys and values come with
# each layer's attention, when what the layers behind it left is gone. So a backward task has its peak at the
# head, or where some layer's backward pass begins, or in some layer's attention; all of these are affine in
# the layers that are done, and the extremes are asked for alone.

LOGIT_ROWS: Final = 1024
"""Rows whose logits are there at once: the loss is computed chunk by chunk."""
LOGIT_BYTES: Final = 6
"""bf16 logits, and their softmax in float32."""
LAYERS_ON_DEVICE: Final = 2
"""With keys and values in host memory: the layer that runs, and the one that is being fetched."""
BACKWARD_KEYS: Final = 8192
"""Keys before a slice whose gradients attention's backward pass gives at once."""
PLACE_BYTES: Final = 24.0
"""Of a token of a shared document, while keys and values are gathered: where it stands among those of the ranks."""

OWN, AHEAD, NEAR, GATHERED, SHARED, NEXT, BEFORE = range(7)
"""What a forward MicroPack counts, on one GPU: its rows; rows of documents that begin in it, beyond its own, less its
own of documents that began before; tokens of its documents up to its end; all of those of the longest document that
ranks share, and this rank's; rows of the MicroPack that comes next, and of the one before."""
OPENED, CLOSED, KEYS, MOVED, HEAD, ANY, RETURNED, COPIED = 1, 7, 8, 9, 10, 11, 12, 13
"""What a backward MicroPack counts beside `OWN`, `NEAR`, `GATHERED`, `SHARED`, `NEXT` and `BEFORE`: earlier rows of
documents that end in it, whose dK/dV is opened; its rows that aren't at an end, whose dK/dV is closed; earlier tokens
of one document, up to `BACKWARD_KEYS`; the same, or what is copied as memory is given back, if that is more; rows of
its logits; 1 where it holds rows; rows of forward slices whose first row it holds, which came in one piece and go as
one; where it takes several pieces, its rows less those, below 0 perhaps. `NEAR` counts tokens that have gradients
three times, as their bytes are."""
FORWARD_COUNTS, BACKWARD_COUNTS = 7, 14


class Messages(NamedTuple):
    """Of a row, what a stage holds of what stages give each other, each float64 `[num_chunks]`.

    The next MicroPack is received ahead, and what was sent last stays until the next is.
    """

    received_forward: FloatArray
    received_backward: FloatArray
    sent_forward: FloatArray
    sent_backward: FloatArray

    def taken(self, counts: int) -> tuple[FloatArray, FloatArray]:
        """Return what changes as a task of each pass takes its message, float64 `[chunks, counts]` of its counts."""
        found = np.zeros((2, len(self.sent_forward), counts))
        for of_pass, received in zip(found, (self.received_forward, self.received_backward)):
            of_pass[:, OWN], of_pass[:, NEXT] = -received, received
        return found[0], found[1]

    def given(self, counts: int) -> tuple[FloatArray, FloatArray]:
        """Return what changes as a task of each pass gives its message, as `taken`."""
        found = np.zeros((2, len(self.sent_forward), counts))
        for of_pass, sent in zip(found, (self.sent_forward, self.sent_backward)):
            of_pass[:, OWN], of_pass[:, BEFORE] = sent, -sent
        return found[0], found[1]


def messages(layer: LayerBytes, is_again: npt.NDArray[np.bool_], stages: Stages) -> Messages:
    """Return what stages hold of messages; nothing of layers that aren't eager.

    `is_again`: `[chunks]`: whether all layers are computed again; of others, what they give belongs to their graph.
    """
    row = layer.hidden * layer.is_eager
    comes, goes = np.where(stages.has_embedding, 0.0, row), np.where(stages.has_head, 0.0, row)
    return Messages(comes, goes, np.where(is_again, goes, 0.0), comes)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chunks:
    """How the layers of each chunk run; every array float64 `[num_chunks]`."""

    layers: FloatArray
    num_again: FloatArray
    """Layers that are computed again, the first ones."""
    made_inputs: FloatArray
    """Layers of which what goes in is made again."""
    near: FloatArray
    """Of keys and values, bytes per row and layer that stay on the device."""
    far: FloatArray
    """The same of those that wait in host memory."""
    head: FloatArray
    """Bytes of a row of logits that is there at once; 0 where there is no head, or it is counted apart."""
    splits: bool
    """Whether weight gradients are tasks of their own."""


def forward_peaks(layer: LayerBytes, chunks: Chunks, left: FloatArray, taken: FloatArray) -> FloatArray:
    """Return what a forward task takes at its peaks, float64 `[chunks, peaks, 7]`.

    Args:
        left: `[chunks, 7]`: what it leaves, messages apart.
        taken: `[chunks, 7]`: of messages.
    """
    has_kept = chunks.num_again < chunks.layers
    # What goes into the last layer, where that isn't left, and what was received, of which a copy may be left.
    beside = np.where(chunks.made_inputs > 0, layer.hidden, 0.0) + taken[:, NEXT]
    run, attention = left + taken, left + taken
    run[:, OWN] += np.where(has_kept, layer.forward_kept, layer.forward_again + beside)
    run[:, NEAR] = attention[:, NEAR] = LAYERS_ON_DEVICE * chunks.far
    if not layer.is_eager:
        return _needed([run])
    # Of the last layer; what it leaves isn't there before attention has run.
    attention[:, OWN] += layer.attention_forward - np.where(has_kept, layer.kept - layer.kv, 0.0)
    attention[:, GATHERED], attention[:, SHARED] = 2 * layer.kv + PLACE_BYTES, layer.kv
    return _needed([run, attention])


def backward_peaks(layer: LayerBytes, chunks: Chunks, taken: FloatArray) -> FloatArray:
    """Return what a backward task takes at its peaks, float64 `[chunks, peaks, 14]`.

    `taken`: `[chunks, 14]`: of messages.
    """
    num_kept, last = chunks.layers - chunks.num_again, chunks.layers - 1
    # Affine in the layers that are done, but where layers begin to be computed again, and until both layers' worth of
    # gradients is there.
    corners = [0 * last, np.maximum(num_kept - 1, 0), np.minimum(num_kept, last), last]
    corners += [np.minimum(some, last) for some in range(1, LAYERS_ON_DEVICE + 1) if chunks.far.any()]
    found = [peak for done in corners for peak in _in_layer(layer, chunks, taken, done)]
    if chunks.splits and layer.is_eager:
        ended = taken.copy()
        ended[:, OWN] += layer.waiting_last
        _finish(ended, layer, chunks, chunks.layers)
        _open(ended, chunks, chunks.layers)
        ended[:, NEAR] = LAYERS_ON_DEVICE * chunks.far
        found.append(ended)
    logits, is_made = taken.copy(), num_kept == 0
    logits[:, HEAD] = chunks.head
    logits[:, OWN] += layer.hidden + 4 + (layer.made + layer.hidden * chunks.made_inputs) * is_made
    logits[:, NEAR] = LAYERS_ON_DEVICE * chunks.far * is_made
    logits[:, COPIED] = _copied(layer, chunks, is_made)
    logits *= (chunks.head > 0)[:, np.newaxis]
    return _needed([*found, logits])


def _in_layer(layer: LayerBytes, chunks: Chunks, taken: FloatArray, done: FloatArray) -> list[FloatArray]:
    """What a task takes as the backward pass of a layer begins and in its attention, so many layers being done."""
    is_again = done >= chunks.layers - chunks.num_again
    made = np.where(is_again, layer.hidden * chunks.made_inputs, 0.0)
    begins, attention = taken.copy(), taken.copy()
    begins[:, OWN] += made + np.where(is_again, layer.backward_again, layer.backward_kept)
    attention[:, OWN] += made + np.where(is_again, layer.attention_again, layer.attention_kept)
    for peak in (begins, attention):
        _finish(peak, layer, chunks, done)
        peak[:, COPIED] += _copied(layer, chunks, is_again)
    if chunks.splits:
        begins[:, OWN] += layer.waiting_first
        attention[:, OWN] += layer.waiting_behind + np.where(is_again, 0.0, layer.waiting_twice)
    else:
        # What was received is held until the task is done; else it waits among the others.
        begins[:, OWN] += taken[:, NEXT] * (done > 0)
        attention[:, OWN] += taken[:, NEXT] * (done > 0)
    _open(begins, chunks, done)
    begins[:, NEAR] = LAYERS_ON_DEVICE * chunks.far * (is_again | (done > 0))
    attention[:, NEAR] = LAYERS_ON_DEVICE * chunks.far
    found = [begins]
    if layer.is_eager and not chunks.splits:
        # The gradient of the last matrix comes before gradients are at their widest.
        first = begins.copy()
        first[:, OWN] -= layer.widened
        first[:, ANY] = layer.matrix
        found.append(first)
    if layer.is_eager:
        # Gradients of what was gathered are scattered before dK/dV of this layer is opened.
        scattered = attention.copy()
        _open(scattered, chunks, done)
        scattered[:, OWN] -= layer.kv
        scattered[:, GATHERED], scattered[:, SHARED] = 5 * layer.kv + PLACE_BYTES, 2 * layer.kv
        found.append(scattered)
    _open(attention, chunks, done + 1)
    attention[:, KEYS], attention[:, MOVED] = chunks.far, chunks.near
    return [*found, attention]


def _finish(peak: FloatArray, layer: LayerBytes, chunks: Chunks, done: FloatArray) -> None:
    """Count what layers that are done leave waiting, less what they gave back.

    What went into a layer is given back in the pieces that forward slices came in, what was made again row by row,
    and dK/dV as it is closed.
    """
    num_kept = chunks.layers - chunks.num_again
    kept, again = np.minimum(done, num_kept), np.maximum(done - num_kept, 0)
    made = np.minimum(again, chunks.made_inputs)
    gone: FloatArray = kept * (layer.kept - chunks.far) + again * chunks.near + made * layer.hidden
    gone += layer.shared * ((done >= num_kept) & (num_kept > 0))
    peak[:, OWN] += chunks.splits * (layer.waiting_kept * kept + layer.waiting_again * again) - gone
    peak[:, RETURNED] -= (again - made) * layer.hidden
    peak[:, CLOSED] -= 2 * chunks.near * done


def _copied(layer: LayerBytes, chunks: Chunks, is_again: npt.NDArray[np.bool_]) -> FloatArray:
    """Bytes of each row that is copied from pieces on the device, so that they go at once; `[chunks]`."""
    is_copied = is_again & (chunks.num_again > chunks.made_inputs) & layer.is_eager
    return np.where(is_copied, layer.hidden, 0.0)


def _open(peak: FloatArray, chunks: Chunks, layers: FloatArray) -> None:
    """Count dK/dV of some layers."""
    peak[:, OPENED] = 2 * chunks.near * layers + 2 * chunks.far * np.minimum(layers, LAYERS_ON_DEVICE)


def logit_bytes(model: ModelShape, kernels: Kernels = "fused") -> float:
    """Return bytes of a row's logits, and of the final norm's backward pass where it is an eager one.

    Of that norm: 30h at its widest, 12h beside the logits, of which 2h are a gradient that is there for all rows.
    """
    logits = float(LOGIT_BYTES * model.vocab)
    return logits if kernels == "fused" else max(10 * model.hidden + logits, 28.0 * model.hidden)


def _needed(peaks: list[FloatArray]) -> FloatArray:
    """Stack peaks, without those that another one is never below."""
    kept: list[FloatArray] = []
    for number, peak in enumerate(peaks):
        others = kept + peaks[number + 1 :]
        if not any((other >= peak).all() and _is_alike(other, peak) for other in others):
            kept.append(peak)
    return np.stack(kept, axis=1)


def _is_alike(one: FloatArray, other: FloatArray) -> bool:
    """Whether two peaks ask the same of what may be below 0."""
    return bool((one[:, COPIED:] == other[:, COPIED:]).all())
