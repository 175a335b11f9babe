"""`Memory`: bytes of states on a GPU, and bytes that each row of a MicroPack allocates and frees.

Names: `again` is a layer that is recomputed fully; `stored` is one that stores its activations (all of them, or those
that selective recomputation doesn't recompute). A *row* is a token that a GPU computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from varlen.cost.shape import CACHE_SIZE, ModelShape, Stages
from varlen.cost.states import (
    ALL,
    ENTRY_BYTES,
    Gathered,
    Precision,
    States,
    Trained,
    Units,
    bytes_per_parameter,
    chunk_parameters,
    layer_parameters,
    units_of,
)
from varlen.step_plan import Mesh, Offload, Recompute
from varlen.types import FloatArray

Saved = Literal["layers", "stage"]
"""What recomputation starts from: the input of each layer, or the input of a chunk's first layer."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Memory:
    """Bytes on one GPU of each stage or chunk; read-only."""

    state_bytes: FloatArray
    """float64 `[pp]`: parameters, gradients, optimizer states; with fused kernels also the head's block of logits."""
    held_bytes: FloatArray
    """float64 `[num_chunks]`: per row, from its forward to the end of its backward pass."""
    gradient_bytes: FloatArray
    """float64 `[num_chunks]`: per row, dK and dV in float32, while its document is in backward."""
    near_bytes: FloatArray
    """float64 `[num_chunks]`: with keys and values in host memory, per token of a running MicroPack's documents up to
    the MicroPack's end; their float32 gradients besides in the backward pass."""
    kept_for_weight_bytes: FloatArray
    """float64 `[num_chunks]`: per row, from input gradients to weight gradients if these are separate tasks."""
    forward_peaks: FloatArray
    """float64 `[num_chunks, peaks, 9]`: bytes per count of a MicroPack (`OWN`, `AHEAD`, … below) at each moment that
    may be the peak of a forward task; its peak is the largest sum."""
    forward_left: FloatArray
    """float64 `[num_chunks, 9]`: bytes per count that a forward task leaves allocated."""
    backward_peaks: FloatArray
    """float64 `[num_chunks, peaks, 18]`: as `forward_peaks`."""
    backward_left: FloatArray
    """float64 `[num_chunks, 18]`: bytes that a backward task leaves allocated, less those that it frees."""
    first_bytes: FloatArray
    """float64 `[2, num_chunks]`: per row of the first MicroPack of each pass, received before any task runs."""
    limit_bytes: float
    """Bytes of the GPU that a plan may use."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False


def layers_again(layers: FloatArray, share: float) -> FloatArray:
    """Return a share of the layers of each chunk, rounded up to whole layers."""
    again: FloatArray = np.ceil(share * layers - 1e-9)
    return again


@functools.lru_cache(maxsize=CACHE_SIZE)
def memory_of(
    model: ModelShape,
    mesh: Mesh,
    stages: Stages,
    recompute: Recompute,
    offload: Offload,
    limit_bytes: float,
    kernels: Kernels = "fused",
    *,
    states: States = "masters",
    trained: Trained = ALL,
    precision: Precision = "bf16",
    gathered: Gathered = "unit",
    recompute_share: float = 1.0,
    saved: Saved = "layers",
    splits_backward: bool = False,
) -> Memory:
    """Count the bytes of one GPU of each stage; see `Memory`.

    - "none" stores all activations, "selective" all but norm outputs and the SwiGLU product, "full" a layer's input,
      and keys and values for later slices; then, one layer's activations exist while it runs. With a
      `recompute_share` below 1, this share of a chunk's layers recomputes fully, and the others selectively.
    - While a layer's backward pass runs, gradients of its widest activations exist too.
    - With kernels="eager", layers store more, and temporaries are those of transformers; logits exist only in
      backward tasks, and are freed before the first layer's backward pass.
    - Keys and values of a document that is cut are allocated at its first slice, for all of its tokens. With
      kernels="eager", those of a document that is whole in one MicroPack of each pass are a part of the graph: on the
      device, and only while its layer runs if that is recomputed.
    - With offload="kv", keys, values and their gradients of `LAYERS_ON_DEVICE` layers of running documents are on the
      GPU, and all others in host memory.
    - With saved="stage", rows hold the input of the first layer of their chunk, in host memory if keys and values
      are; while a MicroPack runs backward, the inputs of all recomputed layers exist for its rows.
    - Parameters that ranks divide are gathered unit by unit; see `Units`.
    - Frozen parameters have no gradients; see `Trained`. Of what adapters compute, what they store is counted.
    - With precision="fp32", numbers take twice the bytes, except those that are float32 in any precision.
    - If GPUs share a document, by a plan or by cp, eager layers gather its keys and values, one layer at a time, and
      those of a slice that ends within `AHEAD_TOKENS` a layer ahead; fused ones use a ring.
    """
    layers, layer = stages.layers, layer_bytes(model, mesh, recompute, kernels, trained, precision)
    entry = ENTRY_BYTES[precision]
    num_again = layers_again(layers, recompute_share) * (recompute == "full")
    held_inputs, made_inputs = _inputs(layers, num_again, offload, saved)
    is_far, is_eager = (offload == "kv") & (layers > LAYERS_ON_DEVICE), kernels == "eager"
    in_norm, in_product = head_bytes(model, precision)
    has_head = stages.has_head & is_eager
    chunks = Chunks(
        layers=layers,
        num_again=num_again,
        made_inputs=made_inputs,
        near=np.where(is_far, 0.0, layer.kv),
        far=np.where(is_far, layer.kv, 0.0),
        widening=4.0 / entry,
        in_norm=np.where(has_head, in_norm / mesh.tp, 0.0),
        in_product=np.where(has_head, in_product / mesh.tp, 0.0),
        # A product of float32 rows is added in place.
        head_matrix=np.where(
            has_head & (precision == "bf16"), trained.of_ends * 2.0 * model.head_parameters / mesh.tp, 0.0
        ),
        splits=splits_backward,
    )
    inputs = layer.hidden * held_inputs
    held: FloatArray = inputs + layer.kv * num_again + layer.stored * (layers - num_again)
    held += layer.shared * (num_again < layers) - chunks.far * layers
    held += 4 * model.hidden / mesh.tp * stages.has_head * (not is_eager)
    apart = layer.waiting_again * num_again + layer.waiting_stored * (layers - num_again)
    gradient: FloatArray = chunks.widening * chunks.near * layers
    units = None
    if mesh.sharding == "parameters" and gathered == "unit":
        units = units_of(model, mesh, stages, trained, precision)
    sent = messages(layer, num_again == layers, stages)
    taken, back_taken = sent.taken(FORWARD_COUNTS)[0], sent.taken(BACKWARD_COUNTS)[1]
    left, back_left = np.zeros_like(taken), np.zeros_like(back_taken)
    left[:, OWN], left[:, AHEAD] = held, chunks.near * layers
    # Recomputed layers keep no keys and values of whole documents, and graphs keep them on the device.
    left[:, WHOLE] = (chunks.far * (layers - num_again) - chunks.near * num_again) * is_eager
    back_left[:, OWN], back_left[:, RETURNED] = apart * splits_backward - (held - inputs), -inputs
    back_left[:, OPENED], back_left[:, CLOSED], back_left[:, WHOLE] = gradient, -gradient, -left[:, WHOLE]
    return Memory(
        state_bytes=_state_bytes(
            model,
            mesh,
            stages,
            kernels,
            trained,
            units,
            functools.partial(bytes_per_parameter, mesh, states, gathered, precision),
        ),
        held_bytes=held,
        gradient_bytes=gradient,
        near_bytes=LAYERS_ON_DEVICE * chunks.far,
        kept_for_weight_bytes=apart,
        forward_peaks=forward_peaks(layer, chunks, left, taken),
        forward_left=left + taken + sent.given(FORWARD_COUNTS)[0],
        backward_peaks=backward_peaks(layer, chunks, back_taken, units),
        backward_left=back_left + back_taken + sent.given(BACKWARD_COUNTS)[1],
        first_bytes=np.stack([sent.received_forward, sent.received_backward]),
        limit_bytes=limit_bytes,
    )


def _inputs(
    layers: FloatArray, num_again: FloatArray, offload: Offload, saved: Saved
) -> tuple[FloatArray, FloatArray]:
    """Return the number of layers whose inputs are stored, and whose inputs are recomputed, `[num_chunks]` each."""
    if saved == "layers":
        return num_again, np.zeros(len(layers))
    held = np.minimum(num_again, 1.0)
    near = held * ((offload == "none") | (layers <= LAYERS_ON_DEVICE))
    made: FloatArray = num_again - near
    return near, made


def _state_bytes(
    model: ModelShape,
    mesh: Mesh,
    stages: Stages,
    kernels: Kernels,
    trained: Trained,
    units: Units | None,
    bytes_of_one: Callable[..., float],
) -> FloatArray:
    """Return the bytes of states of each stage, float64 `[pp]`."""
    of_layer, of_end = (
        bytes_of_one(optimizer_bytes=kept, is_trained=not trained.adapter_share)
        for kept in (trained.optimizer_bytes, trained.end_optimizer_bytes)
    )
    own, of_layers = (
        each / mesh.tp for each in (chunk_parameters(model, stages), layer_parameters(model, stages))
    )
    chunks = own * of_layer + (own - of_layers) * (of_end - of_layer)
    if trained.adapter_share:
        chunks += of_layers * trained.adapter_share * bytes_of_one(optimizer_bytes=trained.optimizer_bytes)
    if units is not None:
        chunks += units.always * (np.arange(mesh.num_chunks) < mesh.pp)
    if kernels == "fused":
        chunks += LOGIT_ROWS * LOGIT_BYTES * model.vocab / mesh.tp * stages.has_head
    of_stages: FloatArray = chunks.reshape(mesh.virtual_stages, mesh.pp).sum(axis=0)
    return of_stages


Kernels = Literal["fused", "eager"]
"""Whether norms and gates are fused kernels, as in Megatron, or run operation by operation, as in transformers, which
stores more activations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes:
    """Bytes of a row in one layer, on one GPU; see the module for `again` and `stored`."""

    hidden: float
    """Input of a layer."""
    kv: float
    """Keys and values, stored for later slices."""
    stored: float
    """Activations that a stored layer has, keys and values included."""
    shared: float
    """Activations that all stored layers of a MicroPack share: the chunk's input and output, positions."""
    forward_again: float
    """Temporaries in the forward pass of a recomputed layer, besides its input."""
    forward_stored: float
    """Temporaries in the forward pass of a stored layer, besides `stored`."""
    backward_again: float
    """Recomputed activations and the widest gradients as the backward pass begins, besides the layer's input."""
    backward_stored: float
    """The widest gradients and the recomputed product in a stored layer, besides `stored`."""
    attention_forward: float
    """Activations while attention runs forward, besides the layer's input, keys and values."""
    attention_again: float
    """Activations while attention runs backward in a recomputed layer, besides its input, keys and values."""
    attention_stored: float
    """The same in a stored layer, less `stored` (except keys and values): activations after attention are freed."""
    made: float
    """Recomputed activations before the backward pass of a layer begins."""
    waiting_again: float
    """Inputs and output gradients of matrix products in a recomputed layer, which separate weight-gradient tasks
    need."""
    waiting_stored: float
    """The same in a stored layer, where recomputed norm outputs are stored for each matrix."""
    waiting_behind: float
    """The part of these after attention."""
    waiting_twice: float
    """The part of that which a stored layer has for each of two matrices."""
    waiting_first: float
    """The part that exists together with the widest gradients."""
    waiting_last: float
    """Temporaries while the first norm of a layer runs backward, besides what waits."""
    matrix: float
    """The gradient of the largest matrix before it is accumulated; not per row."""
    widened: float
    """The part of the widest gradients that is allocated after `matrix`."""
    is_eager: bool
    """Whether layers run as in `varlen.runtime`: ranks that share a document gather its keys and values instead of
    using a ring, and stages receive messages ahead."""


def layer_bytes(
    model: ModelShape,
    mesh: Mesh,
    recompute: Recompute,
    kernels: Kernels,
    trained: Trained,
    precision: Precision,
) -> LayerBytes:
    """Count the bytes of a row in one layer; with "full", stored layers recompute selectively."""
    entry = ENTRY_BYTES[precision]
    tp, hidden, gates = mesh.tp, entry * model.hidden, entry * model.active_ffn
    of_keys = entry * model.kv_heads * (model.head_dim + model.value_head_dim)
    expanded = of_keys / kv_shards(model, mesh)
    whole = (activation_bytes(model, precision) + entry * trained.adapter_width - of_keys) / tp + expanded
    is_eager, saves = kernels == "eager", recompute != "none"
    queries, outputs = entry * model.heads * model.head_dim, entry * model.heads * model.value_head_dim
    # A norm whose weight is frozen doesn't store the normed row, and so selective recomputation has nothing to save.
    normed = hidden * (is_eager and trained.adapter_share > 0)
    reused = reused_bytes(model, precision) - 2 * normed
    norm = 4.0 * model.hidden + 2 * hidden - normed + 4 if is_eager else hidden
    of_attention = norm + queries + outputs + 4 * model.heads
    # Gradients of the output, the residual and the queries (twice, since keys come in two parts).
    by_attention = hidden + outputs + 2 * queries
    positions = 2 * entry * model.head_dim if is_eager else 0.0
    # A layer's input, if it is float32 already, is what its first norm stores of it.
    alike = hidden * (is_eager and precision == "fp32")
    if is_eager:
        whole += (eager_bytes(model, precision) - 2 * normed) / tp
        ends, widest = 2 * hidden - alike, 2 * gates
        # Keys and values are in the cache; positions are recomputed.
        made = whole - expanded + (hidden - alike + positions + 8) / tp
        # The input is copied if several documents run.
        forward_again = (3 * hidden + (3 if model.gated else 2) * gates + positions + 8) / tp
        forward_stored = (3 * hidden + 8 + gates * saves) / tp
        backward_again = made + (hidden + widest) / tp
        backward_stored = (hidden + widest + gates * model.gated * saves) / tp
    else:
        ends, widest = 0.0, ffn_bytes(model, precision) + 2 * hidden
        made = whole
        forward_again = whole + widest / tp
        forward_stored = (widest + reused * saves) / tp
        backward_again, backward_stored = whole + widest / tp, forward_stored
    stored = whole - (reused / tp if saves else 0.0)
    # The incoming gradient and the activation that it belongs to exist until the layer is done.
    again = (of_attention - alike + by_attention + 2 * hidden + positions + 8 * is_eager) / tp + expanded
    beside = (of_attention - (hidden - normed) * saves + by_attention + hidden) / tp + expanded
    return LayerBytes(
        hidden=hidden / tp,
        kv=entry / 2 * model.kv_bytes_per_token_layer / kv_shards(model, mesh),
        stored=stored,
        shared=(ends + positions) / tp,
        forward_again=forward_again,
        forward_stored=forward_stored,
        backward_again=backward_again,
        backward_stored=backward_stored,
        attention_forward=(2 * hidden + queries + outputs + 4 * model.heads + positions) / tp,
        attention_again=again,
        attention_stored=beside + expanded - stored,
        made=made,
        is_eager=is_eager,
        **_waiting(model, mesh, entry, twice=saves and is_eager, is_eager=is_eager),
        matrix=trained.of_layers
        * hidden
        * max(model.ffn, model.shared_ffn, model.expert_ffn)
        / tp
        * is_eager,
        widened=gates / tp,
    )


def _waiting(model: ModelShape, mesh: Mesh, entry: float, *, twice: bool, is_eager: bool) -> dict[str, float]:
    """Return the bytes of `LayerBytes` for separate weight gradients; `twice` where norm outputs are recomputed."""
    tp, hidden, gates = mesh.tp, entry * model.hidden, entry * model.active_ffn
    heads = entry * model.heads * (model.head_dim + model.value_head_dim)
    expanded = entry * model.kv_heads * (model.head_dim + model.value_head_dim) / kv_shards(model, mesh)
    inner = 3 if model.gated else 2
    # Outputs of norms and attention, the product; gradients of both outputs, queries, keys, values and gates.
    waiting = (4 * hidden + heads + inner * gates) / tp + expanded
    return {
        "waiting_again": waiting,
        "waiting_stored": waiting + inner * hidden / tp * twice,
        "waiting_behind": (hidden + inner * gates) / tp,
        "waiting_twice": hidden / tp * (twice and model.gated),
        "waiting_first": gates / tp * is_eager,
        "waiting_last": 14 * hidden / tp,
    }


def kv_shards(model: ModelShape, mesh: Mesh) -> int:
    """Return the number of GPUs that keys and values are divided among; fewer key heads than GPUs are copied."""
    return mesh.tp if model.latent_rank else min(mesh.tp, model.kv_heads)


def activation_bytes(model: ModelShape, precision: Precision = "bf16") -> float:
    """Return bytes of all activations of a token in one layer, not divided by tp.

    In bf16: both norms' inputs and outputs (8h), queries and attention's output, keys and values, the gate, the
    other branch and their product (6f), and attention's log-sum-exp in float32. With heads of total width h, this is
    12h + 4·kv_heads·d + 6f + 4·heads; compare Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
    Transformer Models", arXiv 2205.05198, §4. Latent attention stores latents and their expansions; experts store
    their input and output rows.
    """
    entry = ENTRY_BYTES[precision]
    heads = entry * model.heads * (model.head_dim + model.value_head_dim) + 4 * model.heads
    expanded = entry * model.kv_heads * (model.head_dim + model.value_head_dim)
    latents = entry * (model.kv_bytes_per_token_layer / 2 + model.query_rank) if model.latent_rank else 0
    routed = 2 * entry * model.hidden * model.experts_per_token * (1 - model.num_dense_layers / model.layers)
    return 4 * entry * model.hidden + heads + expanded + latents + ffn_bytes(model, precision) + routed


def ffn_bytes(model: ModelShape, precision: Precision = "bf16") -> float:
    """Return bytes of one layer's inner activations of a token: three of width f with a gate, two without."""
    return (3 if model.gated else 2) * ENTRY_BYTES[precision] * model.active_ffn


def eager_bytes(model: ModelShape, precision: Precision = "bf16") -> float:
    """Return bytes of a token's activations in one layer of transformers, in addition to `activation_bytes`.

    Each norm stores its input in float32, the normed and the scaled row (8h instead of 4h; in float32 12h instead of
    8h), and the inverse root; the gate's SiLU is stored in addition to its input.
    """
    return 8 * model.hidden + 8 + ENTRY_BYTES[precision] * model.active_ffn * model.gated


def reused_bytes(model: ModelShape, precision: Precision = "bf16") -> float:
    """Return bytes of a token and layer that selective recomputation saves: norm outputs, the product."""
    return ENTRY_BYTES[precision] * (2 * model.hidden + model.active_ffn)


# NCCL's communicators, which the margin beside `limit_bytes` holds.

CHANNEL_CTAS: Final = 8
"""Thread blocks, and so parts of buffers, that a message between stages may use; NCCL's own limit is 32."""
_COLLECTIVE_BYTES: Final = 688e6
"""Of a communicator after an all-reduce, measured by `nvidia-smi` on A100s with NVLink: 688 MB, and 544 of two GPUs
(github.com/NVIDIA/nccl/issues/964). They are proportional to NCCL's channels, and don't grow with GPUs beyond two
nodes (github.com/NVIDIA/nccl/issues/864)."""
_CTA_BYTES: Final = 10485760 + 2097152
"""Of each thread block's buffers for one peer, from NCCL's log of allocations on H100s
(github.com/NVIDIA/nccl/issues/1685)."""


def num_communicators(mesh: Mesh) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the communicators of a GPU of each stage: of collectives, and of messages, each int64 `[pp]`.

    Collectives of the same ranks share one: of all, of the replicas, of the tp ranks, and of the first and last stage
    of a pipeline. Each boundary of chunks has one in each direction. Not among them are those of others: PyTorch's
    own, FSDP2's, transformers' for tp; nor those of ranks that share documents by a plan.
    """
    pp, replicas, stages = mesh.pp, mesh.dp * mesh.cp, np.arange(mesh.pp)
    is_line = sum(n > 1 for n in (pp, replicas, mesh.tp)) == 1  # all GPUs are of one axis
    collectives = np.full(pp, int(mesh.num_gpus > 1), np.int64)
    if not is_line:
        collectives += int(replicas > 1) + int(mesh.tp > 1)
    if pp > 2 or (pp == 2 and not is_line):
        collectives += (stages == 0) | (stages == pp - 1)
    chunks = np.arange(1, mesh.num_chunks)
    messages = np.array([2 * int(((chunks % pp == s) | ((chunks - 1) % pp == s)).sum()) for s in stages])
    return collectives, messages * int(pp > 1)


def communicator_bytes(mesh: Mesh) -> FloatArray:
    """Return the bytes of NCCL's buffers on a GPU of each stage, float64 `[pp]`, by measurements of others.

    They are no part of peaks, which are of tensors, but of what `memory_fraction` leaves. With gloo there are none.
    """
    collectives, messages = num_communicators(mesh)
    found: FloatArray = collectives * _COLLECTIVE_BYTES + messages * float(CHANNEL_CTAS * _CTA_BYTES)
    return found


# The peaks of a task, as bytes per count of its MicroPack.
#
# The head's logits are freed before the first layer runs backward. Gradients of keys and values are allocated in each
# layer's attention, after the activations of later layers are freed. So a backward task has its peak at the head, at
# the beginning of some layer's backward pass, or in some layer's attention. All of these are affine in the number of
# finished layers, so only the extremes are computed.

LOGIT_ROWS: Final = 1024
"""Rows of a block of logits; the loss is computed block by block."""
LOGIT_BYTES: Final = 6
"""bf16 logits, and their softmax in float32, which takes the place of float32 logits."""
LAYERS_ON_DEVICE: Final = 2
"""With keys and values in host memory: the running layer, and the one that is being fetched."""
BACKWARD_KEYS: Final = 8192
"""Most keys before a slice whose gradients attention's backward pass returns at once."""
AHEAD_TOKENS: Final = 131072
"""Most tokens up to the end of a slice whose keys and values ranks gather a layer ahead: half a gigabyte with 8 key
heads of 128. Those of longer documents would take memory that slices need."""
INDEX_BYTES: Final = 24.0
"""Index of a token of a shared document among the ranks, while keys and values are gathered."""

# Counts of a forward MicroPack, on one GPU:
# OWN: its rows. AHEAD: rows of documents that begin in it beyond its own, less its own rows of documents that began
# earlier. NEAR: tokens of its documents up to its end. GATHERED, SHARED: tokens of the longest document that GPUs
# share, of all of them and of this one. NEXT, BEFORE: rows of the next and the previous MicroPack. WHOLE: rows of
# documents that are whole in one MicroPack of each pass, whose keys and values are in no cache. EARLY: tokens before
# the slice that ranks gather a layer ahead, and this rank's part of them, which it sends.
OWN, AHEAD, NEAR, GATHERED, SHARED, NEXT, BEFORE, WHOLE, EARLY = range(9)
# Counts of a backward MicroPack, besides OWN, NEAR, GATHERED, SHARED, NEXT, BEFORE, WHOLE and EARLY:
# OPENED: earlier rows of documents that end in it, whose dK/dV is allocated. CLOSED: its other rows, whose dK/dV is
# freed. KEYS: earlier tokens of one document, up to BACKWARD_KEYS. MOVED: the same, or the rows copied as memory is
# freed, if these are more. HEAD: rows of its logits. ANY: 1 if it holds rows. RETURNED: rows of the forward slices
# whose first row it holds, which are freed as a whole. KNOWN: as EARLY, of the tokens up to that slice's end. LATER:
# as NEAR, of documents that don't end in it, so that there are gradients of these tokens. COPIED: if it reads several
# pieces, its rows less those (may be < 0).
OPENED, CLOSED, KEYS, MOVED, HEAD, ANY, RETURNED, KNOWN, LATER, COPIED = 1, 9, 10, 11, 12, 13, 14, 15, 16, 17
FORWARD_COUNTS, BACKWARD_COUNTS = 9, 18


class Messages(NamedTuple):
    """Bytes per row of messages between stages, each float64 `[num_chunks]`.

    The next MicroPack is received ahead, and the last message sent stays allocated until the next one is sent.
    """

    received_forward: FloatArray
    received_backward: FloatArray
    sent_forward: FloatArray
    sent_backward: FloatArray

    def taken(self, counts: int) -> tuple[FloatArray, FloatArray]:
        """Return the bytes per count by which receiving changes memory, for both passes, `[chunks, counts]` each."""
        changes = np.zeros((2, len(self.sent_forward), counts))
        for of_pass, received in zip(changes, (self.received_forward, self.received_backward)):
            of_pass[:, OWN], of_pass[:, NEXT] = -received, received
        return changes[0], changes[1]

    def given(self, counts: int) -> tuple[FloatArray, FloatArray]:
        """Return the same for sending."""
        changes = np.zeros((2, len(self.sent_forward), counts))
        for of_pass, sent in zip(changes, (self.sent_forward, self.sent_backward)):
            of_pass[:, OWN], of_pass[:, BEFORE] = sent, -sent
        return changes[0], changes[1]


def messages(layer: LayerBytes, is_again: npt.NDArray[np.bool_], stages: Stages) -> Messages:
    """Return the messages that stages hold, none for fused layers.

    Chunks that don't recompute all layers (`is_again`) store their output as a part of their graph.
    """
    row = layer.hidden * layer.is_eager
    comes, goes = np.where(stages.has_embedding, 0.0, row), np.where(stages.has_head, 0.0, row)
    return Messages(comes, goes, np.where(is_again, goes, 0.0), comes)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chunks:
    """How the layers of each chunk run; every array float64 `[num_chunks]`."""

    layers: FloatArray
    num_again: FloatArray
    """Number of recomputed layers, the first ones."""
    made_inputs: FloatArray
    """Number of layers whose inputs are recomputed."""
    near: FloatArray
    """Bytes of keys and values per row and layer on the device."""
    far: FloatArray
    """Bytes of keys and values per row and layer in host memory."""
    widening: float
    """Bytes of a float32 gradient over those of what it is of."""
    in_norm: FloatArray
    """Bytes of a row in the head, as `head_bytes`; 0 without a head, or if it is counted elsewhere."""
    in_product: FloatArray
    """The same while `head_matrix` exists."""
    head_matrix: FloatArray
    """Bytes of a product of the head's shape, before it is accumulated; 0 as of `in_norm`."""
    splits: bool
    """Whether weight gradients are separate tasks."""


def forward_peaks(layer: LayerBytes, chunks: Chunks, left: FloatArray, taken: FloatArray) -> FloatArray:
    """Return bytes per count at the peaks of a forward task, float64 `[chunks, peaks, 9]`.

    `left` is what it leaves, without messages; `taken` is that of messages; both `[chunks, 9]`.
    """
    has_stored = chunks.num_again < chunks.layers
    # The input of the last layer, if it isn't stored, and the received message, which may have been copied.
    beside = np.where(chunks.made_inputs > 0, layer.hidden, 0.0) + taken[:, NEXT]
    run, attention = left + taken, left + taken
    run[:, OWN] += np.where(has_stored, layer.forward_stored, layer.forward_again + beside)
    run[:, NEAR] = attention[:, NEAR] = LAYERS_ON_DEVICE * chunks.far
    if not layer.is_eager:
        return _needed([run])
    # In the last layer; the activations after attention don't exist yet.
    attention[:, OWN] += layer.attention_forward - np.where(has_stored, layer.stored - layer.kv, 0.0)
    attention[:, GATHERED], attention[:, SHARED] = 2 * layer.kv + INDEX_BYTES, layer.kv
    attention[:, WHOLE] += np.where(has_stored, 0.0, layer.kv)
    ahead = _run_before_last(layer, chunks, run)
    for peak in (run, attention, ahead):
        peak[:, WHOLE] -= peak[:, NEAR]
    return _needed([run, attention, ahead])


def _run_before_last(layer: LayerBytes, chunks: Chunks, run: FloatArray) -> FloatArray:
    """Return the peak of the layer before the last, given the last's, for which keys and values are gathered then.

    In attention itself these add nothing to the peak: while the running layer's are put in order, which takes them
    twice, the next gather hasn't begun.
    """
    num_stored, ahead = chunks.layers - chunks.num_again, run.copy()
    held = np.where(
        num_stored > 0,
        layer.stored + layer.shared * (num_stored == 1),
        layer.kv + layer.hidden * (chunks.made_inputs == 0),
    )
    ahead[:, OWN] += (num_stored == 1) * (layer.forward_again - layer.forward_stored) - held
    ahead[:, AHEAD] -= chunks.near
    ahead[:, WHOLE] += np.where(num_stored > 0, 0.0, chunks.near)
    ahead[:, EARLY] = layer.kv
    ahead *= _is_ahead(chunks)[:, np.newaxis] & (chunks.layers > 1)[:, np.newaxis]
    return ahead


def _is_ahead(chunks: Chunks) -> npt.NDArray[np.bool_]:
    """Return where keys and values of shared documents may be gathered ahead: where they stay on the device."""
    is_near: npt.NDArray[np.bool_] = chunks.far == 0
    return is_near


def backward_peaks(
    layer: LayerBytes, chunks: Chunks, taken: FloatArray, units: Units | None = None
) -> FloatArray:
    """Return bytes per count at the peaks of a backward task, float64 `[chunks, peaks, 18]`; `taken` of messages."""
    num_stored, last = chunks.layers - chunks.num_again, chunks.layers - 1
    # Affine in the finished layers, except where recomputation begins and while the first gradients are allocated.
    corners = [0 * last, np.maximum(num_stored - 1, 0), np.minimum(num_stored, last), last]
    corners += [np.minimum(some, last) for some in range(1, LAYERS_ON_DEVICE + 1) if chunks.far.any()]
    if layer.is_eager:
        # Nothing is gathered ahead of the first layer, nor in the last; more is ahead of stored ones.
        corners += [np.minimum(1, last), np.maximum(last - 1, 0), np.maximum(num_stored - 2, 0)]
    elif units is not None:  # no message is there at first, and no next layer at last
        corners += [np.minimum(1, last), np.maximum(last - 1, 0)]
    peaks = [peak for done in corners for peak in _in_layer(layer, chunks, taken, done, units)]
    if chunks.splits and layer.is_eager:
        ended = taken.copy()
        ended[:, OWN] += layer.waiting_last
        _finish(ended, layer, chunks, chunks.layers)
        _open(ended, chunks, chunks.layers)
        ended[:, NEAR] = LAYERS_ON_DEVICE * chunks.far
        peaks.append(ended)
    peaks += _in_head(layer, chunks, taken, units)
    if units is not None:
        embedding = taken.copy()
        # The gradient of what came in, in float32 too.
        embedding[:, OWN] += layer.hidden * (1 + chunks.widening * (chunks.widening > 1))
        _finish(embedding, layer, chunks, chunks.layers)
        _open(embedding, chunks, chunks.layers)
        gradient = units.by_embedding
        embedding[:, ANY] = np.maximum(units.message + gradient, gradient * units.sums) - units.always
        embedding *= (units.by_embedding > 0)[:, np.newaxis]
        peaks.append(embedding)
    for peak in peaks:
        peak[:, LATER] = chunks.widening * peak[:, NEAR]
        # NEAR counts whole documents too.
        peak[:, WHOLE] = (peak[:, WHOLE] - peak[:, NEAR]) * layer.is_eager
    return _needed(peaks)


def _in_head(layer: LayerBytes, chunks: Chunks, taken: FloatArray, units: Units | None) -> list[FloatArray]:
    """Return the peaks in the head: while the gradient of its matrix is computed, and after that."""
    is_made = chunks.num_again == chunks.layers
    product = taken.copy()
    product[:, OWN] += layer.hidden + 4 + (layer.made + layer.hidden * chunks.made_inputs) * is_made
    product[:, NEAR] = LAYERS_ON_DEVICE * chunks.far * is_made
    product[:, COPIED] = _copied(layer, chunks, is_made)
    product[:, KNOWN] = layer.kv * layer.is_eager * is_made * _is_ahead(chunks)
    product[:, WHOLE] = layer.kv * is_made
    has_head = chunks.in_norm > 0
    if units is not None:
        # Parameters of both ends, which one module may hold; the head's gradients; parameters of the next layer, and
        # of one that was made again.
        ends = units.head + units.by_head + units.embedding * ~units.is_tied
        product[:, ANY] = ends + units.layer * (1 + is_made) - units.always
        has_head = units.head > 0
    norm = product.copy()
    product[:, HEAD], norm[:, HEAD] = chunks.in_product, chunks.in_norm
    product[:, ANY] += chunks.head_matrix  # added to the gradient, and freed, before the norm's backward pass
    return [peak * has_head[:, np.newaxis] for peak in (product, norm)]


def _in_layer(
    layer: LayerBytes, chunks: Chunks, taken: FloatArray, done: FloatArray, units: Units | None
) -> list[FloatArray]:
    """Return the peaks at the beginning of a layer's backward pass and in its attention, after `done` layers."""
    is_again = done >= chunks.layers - chunks.num_again
    made = np.where(is_again, layer.hidden * chunks.made_inputs, 0.0)
    begins, attention = taken.copy(), taken.copy()
    begins[:, OWN] += made + np.where(is_again, layer.backward_again, layer.backward_stored)
    attention[:, OWN] += made + np.where(is_again, layer.attention_again, layer.attention_stored)
    for peak in (begins, attention):
        peak[:, WHOLE] += np.where(is_again, layer.kv, 0.0)  # of the layer that runs
        _finish(peak, layer, chunks, done)
        peak[:, COPIED] += _copied(layer, chunks, is_again)
    if chunks.splits:
        begins[:, OWN] += layer.waiting_first
        attention[:, OWN] += layer.waiting_behind + np.where(is_again, 0.0, layer.waiting_twice)
    else:
        # The received gradient is held until the task is done; with separate weight gradients it is counted there.
        begins[:, OWN] += taken[:, NEXT] * (done > 0)
        attention[:, OWN] += taken[:, NEXT] * (done > 0)
    _open(begins, chunks, done)
    begins[:, NEAR] = LAYERS_ON_DEVICE * chunks.far * (is_again | (done > 0))
    attention[:, NEAR] = LAYERS_ON_DEVICE * chunks.far
    is_ahead = _is_ahead(chunks) & layer.is_eager
    begins[:, KNOWN] = attention[:, KNOWN] = layer.kv * (is_ahead & (is_again | (done > 0)))
    peaks = [begins]
    if units is not None:
        begins[:, ANY] = units.at_layer(done, chunks.layers) + layer.matrix * (not chunks.splits)
        attention[:, ANY] = units.at_layer(done, chunks.layers) + units.after_attention * (not chunks.splits)
    elif layer.is_eager and not chunks.splits:
        # The gradient of the last matrix is computed before the widest gradients.
        first = begins.copy()
        first[:, OWN] -= layer.widened
        first[:, ANY] = layer.matrix
        peaks.append(first)
    if layer.is_eager:
        # Gradients of gathered keys and values are scattered before dK/dV of this layer is allocated. The keys and
        # values are freed by then, and those of the next visit are on their way.
        scattered, has_next = attention.copy(), is_ahead & (done < chunks.layers - 1)
        is_next_again = done >= chunks.layers - chunks.num_again - 1
        scattered[:, KNOWN] = layer.kv * (has_next & ~is_next_again)
        scattered[:, EARLY] = layer.kv * (has_next & is_next_again)
        _open(scattered, chunks, done)
        scattered[:, OWN] -= layer.kv
        sent = chunks.widening * layer.kv
        if chunks.widening == 1:
            # Before that, what attention gives is added to their gradients, which are no wider, while all are there.
            summed = scattered.copy()
            summed[:, GATHERED] = 2 * layer.kv + sent
            peaks.append(summed)
        scattered[:, GATHERED], scattered[:, SHARED] = 2 * sent + INDEX_BYTES, sent
        peaks.append(scattered)
    _open(attention, chunks, done + 1)
    attention[:, KEYS], attention[:, MOVED] = chunks.far, chunks.near
    return [*peaks, attention]


def _finish(peak: FloatArray, layer: LayerBytes, chunks: Chunks, done: FloatArray) -> None:
    """Add what finished layers store for weight gradients, less what they freed.

    Inputs of layers are freed by forward slices, recomputed activations by rows, and dK/dV as it is closed.
    """
    num_stored = chunks.layers - chunks.num_again
    stored, again = np.minimum(done, num_stored), np.maximum(done - num_stored, 0)
    made = np.minimum(again, chunks.made_inputs)
    freed: FloatArray = stored * (layer.stored - chunks.far) + again * chunks.near + made * layer.hidden
    freed += layer.shared * ((done >= num_stored) & (num_stored > 0))
    peak[:, OWN] += chunks.splits * (layer.waiting_stored * stored + layer.waiting_again * again) - freed
    peak[:, RETURNED] -= (again - made) * layer.hidden
    peak[:, CLOSED] -= chunks.widening * chunks.near * done
    # Of whole documents, recomputed layers held no keys and values, and graphs did.
    peak[:, WHOLE] += again * chunks.near - stored * chunks.far


def _copied(layer: LayerBytes, chunks: Chunks, is_again: npt.NDArray[np.bool_]) -> FloatArray:
    """Return bytes of each row that is copied out of forward slices, so that these can be freed; `[chunks]`."""
    is_copied = is_again & (chunks.num_again > chunks.made_inputs) & layer.is_eager
    return np.where(is_copied, layer.hidden, 0.0)


def _open(peak: FloatArray, chunks: Chunks, layers: FloatArray) -> None:
    """Set the bytes of dK/dV of some layers."""
    own = chunks.near * layers + chunks.far * np.minimum(layers, LAYERS_ON_DEVICE)
    peak[:, OPENED] = chunks.widening * own


def head_bytes(model: ModelShape, precision: Precision) -> tuple[float, float]:
    """Return bytes of a row in an eager head, besides a gradient of 2h, which is counted elsewhere.

    While the gradient of its matrix is computed, the final norm stores 8h, and the logits exist. Then there is the
    gradient of the norm's output, 2h more (4h in float32); or, without logits, the norm's backward pass, 28h, if that
    takes more.

    Returns:
        The most after the matrix's gradient was computed, and the bytes while it is.
    """
    logits = float(LOGIT_BYTES * model.vocab) if precision == "bf16" else 4.0 * model.vocab
    stored = 8 * model.hidden + logits
    return max(stored + ENTRY_BYTES[precision] * model.hidden, 28.0 * model.hidden), stored


def _needed(peaks: list[FloatArray]) -> FloatArray:
    """Stack peaks, without those that another one always exceeds."""
    needed: list[FloatArray] = []
    for number, peak in enumerate(peaks):
        others = needed + peaks[number + 1 :]
        # The count COPIED may be negative, so its bytes must be equal.
        if not any(
            (other >= peak).all() and (other[:, COPIED:] == peak[:, COPIED:]).all() for other in others
        ):
            needed.append(peak)
    return np.stack(needed, axis=1)
