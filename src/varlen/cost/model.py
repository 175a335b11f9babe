"""`CostModel`: seconds and bytes of a model on hardware, for the planner and the simulator."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from varlen.arguments import MEMORY_FRACTION, in_words
from varlen.cost import memory as memories
from varlen.cost.hardware import Hardware, Link, RateCurve, RateTable
from varlen.cost.memory import (
    LAYERS_ON_DEVICE,
    Kernels,
    Memory,
    Saved,
    communicator_bytes,
    kv_shards,
    layers_again,
    memory_of,
    reused_bytes,
)
from varlen.cost.rates import LAYER_LAUNCHES, SLICE_LAUNCHES, Rates
from varlen.cost.shape import (
    BACKWARD_RATIO,
    CACHE_SIZE,
    Flops,
    ModelShape,
    Stages,
    check_mesh,
    stages_of,
    step_flops,
)
from varlen.cost.states import (
    ALL,
    ENTRY_BYTES,
    Gathered,
    Precision,
    States,
    Trained,
    chunk_parameters,
    trained_parameters,
)
from varlen.errors import SettingError
from varlen.step_plan import KINDS, Mesh, Offload, Recompute, StepPlan
from varlen.types import ADDED, FloatArray, stored_fields

Mode = Literal["calibrated", "flops"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CostModel:
    """Seconds and bytes of any slice of a model on hardware.

    Mode "calibrated" looks rates up in the hardware's tables by rows and key length. Mode "flops" uses two
    rates, the best of the forward tables for attention and for matrix products, without launch time, so that
    attention's backward pass takes 2.5 times its forward pass and a matrix product's twice, as papers assume.
    """

    model: ModelShape
    hardware: Hardware
    recompute: Recompute = "none"
    """Which activations are recomputed in the backward pass."""
    recompute_share: float = 1.0
    """With recompute="full": the share of each chunk's layers, rounded up, that recompute fully; the others recompute
    selectively. All layers are priced alike, with the share of the stage that recomputes most."""
    offload: Offload = "none"
    """What is offloaded to host memory: "kv" keeps keys, values and their gradients of only two layers on the GPU.
    Each slice fetches those of its document's earlier tokens while the previous layer computes; only the time beyond
    that is priced."""
    saved: Saved = "layers"
    """What recomputation starts from: "layers", the input of each layer, or "stage", the input of a chunk's first
    layer, which takes one more forward pass of all layers but the last."""
    mode: Mode = "calibrated"
    """Whether seconds come from the hardware's tables or from FLOPs alone."""
    kernels: Kernels = "fused"
    """Whose layers run: Megatron's fused ones, or transformers' eager ones as `varlen.runtime` runs them, which store
    more activations; the vocabulary head then runs entirely in backward tasks."""
    states: States = "masters"
    """What an optimizer updates: "masters", float32 copies of half-precision weights as
    `SliceEngine.master_parameters` has them (with Adam 18 bytes a parameter; 6 + 12 / dp with sharding="optimizer");
    "weights", the half-precision weights themselves (12); "float32", weights in float32 (16)."""
    adapter_share: float = dataclasses.field(default=0.0, metadata=ADDED)
    """Parameters of adapters, such as LoRA's, over those of the layers; they alone are trained, and all other weights
    are frozen. 0: there are no adapters, and all weights are trained."""
    adapter_width: float = dataclasses.field(default=0.0, metadata=ADDED)
    """Numbers that adapters store of each row in an average layer for their own gradients: the rows between LoRA's
    two matrices; with DoRA also the two outputs of each layer that it scales."""
    optimizer_bytes: float | None = dataclasses.field(default=None, metadata=ADDED)
    """Bytes that the optimizer keeps of a trained parameter, without its master; None: Adam's two moments, 8, or
    4 with states="weights"."""
    end_optimizer_bytes: float | None = dataclasses.field(default=None, metadata=ADDED)
    """The same of embedding, head and last norm; None: `optimizer_bytes`. Muon leaves both ends to AdamW."""
    precision: Precision = dataclasses.field(default="bf16", metadata=ADDED)
    """Type of computation. With "fp32", activations and gathered parameters take four bytes each, in memory and on
    links. What is float32 in both, such as gradients of keys and values, takes the same."""
    gathered: Gathered = "unit"
    """How long parameters are whole that sharding="parameters" divides: while their layer runs, or all "step", as of
    `SliceEngine(gathered="step")`, which takes 6 bytes a parameter more and gathers and reduces only once."""
    memory_fraction: float = MEMORY_FRACTION
    """Share of a GPU's memory that a plan may use; the allocator and libraries use the rest."""
    tp_overlap: float = 0.0
    """Share of tensor-parallel collectives hidden behind matrix products; frameworks that split products into tiles
    (Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition") hide most."""
    exchange_overlap: float = 0.0
    """Share of attention that overlaps with the exchange of keys and values among GPUs that share a document: 0 as
    measured of `varlen.runtime` on CPUs, up to 1 as in ring attention (Liu et al. 2023, arXiv 2310.01889)."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, ModelShape) or not isinstance(self.hardware, Hardware):
            raise SettingError(
                f"model is a {type(self.model).__name__} and hardware a {type(self.hardware).__name__}; give a "
                "vl.ModelShape and a vl.Hardware, such as ModelShape.named('llama-3-8b') and Hardware.named('h100')"
            )
        for name, allowed in (
            ("recompute", Recompute),
            ("offload", Offload),
            ("saved", Saved),
            ("mode", Mode),
            ("kernels", Kernels),
            ("states", States),
            ("precision", Precision),
            ("gathered", Gathered),
        ):
            if getattr(self, name) not in get_args(allowed):
                raise SettingError(
                    f"cost {name}={getattr(self, name)!r}; it must be {in_words(get_args(allowed))}"
                )
        if not 0 < self.memory_fraction <= 1:
            raise SettingError(f"memory_fraction={self.memory_fraction!r}; it must be above 0 and at most 1")
        share = self.recompute_share
        is_number = isinstance(share, int | float | np.floating) and not isinstance(share, bool)
        if not is_number or not 0 < share <= 1 or (share < 1 and self.recompute != "full"):
            raise SettingError(
                f"recompute_share={share!r} with recompute={self.recompute!r}; it must be a number above 0 and at "
                "most 1, and 1 unless recompute='full'"
            )
        object.__setattr__(self, "recompute_share", float(share))
        for name in ("adapter_share", "adapter_width", "optimizer_bytes", "end_optimizer_bytes"):
            value = getattr(self, name)
            if value is None and name.endswith("_bytes"):
                continue
            is_number = isinstance(value, int | float | np.floating) and not isinstance(value, bool)
            if not is_number or not 0 <= value < math.inf:
                raise SettingError(f"{name}={value!r}; it must be a number from 0 on")
            object.__setattr__(self, name, float(value))
        for name in ("tp_overlap", "exchange_overlap"):
            if not 0 <= getattr(self, name) <= 1:
                raise SettingError(f"{name}={getattr(self, name)!r}; it must be from 0 to 1")

    def replace(self, **changes: Any) -> CostModel:
        """Return the same model with other settings.

        Args:
            changes: fields and their new values.
        """
        return dataclasses.replace(self, **changes)

    def as_planned(self, plan: StepPlan) -> CostModel:
        """Return the same model with the recomputation and offloading of a plan.

        Args:
            plan: the plan.
        """
        planned = (plan.recompute, plan.recompute_share, plan.offload)
        if planned == (self.recompute, self.recompute_share, self.offload):
            return self  # the same object hits the caches of rates and memory
        return self.replace(recompute=planned[0], recompute_share=planned[1], offload=planned[2])

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of a hash over all numbers: models with the same fingerprint give the same prices."""
        digest = hashlib.sha256()
        _digest(self, digest)
        return digest.hexdigest()[:16]

    @property
    def _trained(self) -> Trained:
        return Trained(
            adapter_share=self.adapter_share,
            adapter_width=self.adapter_width,
            optimizer_bytes=self.optimizer_bytes,
            end_optimizer_bytes=self.optimizer_bytes
            if self.end_optimizer_bytes is None
            else self.end_optimizer_bytes,
        )

    @property
    def limit_bytes(self) -> float:
        """Bytes of a GPU that a plan may use."""
        return self.memory_fraction * self.hardware.memory_bytes

    def stages(self, mesh: Mesh) -> Stages:
        """Return the layers of each chunk, distributed so that the heaviest stage is light.

        Args:
            mesh: how the model is cut.

        Raises:
            SettingError: a mesh that doesn't divide the model.
        """
        check_mesh(self.model, mesh)
        return stages_of(self.model, mesh)

    def memory(self, mesh: Mesh, stages: Stages | None = None, *, splits_backward: bool = False) -> Memory:
        """Return the bytes of states on a GPU, and those that rows add.

        Args:
            mesh: the GPUs.
            stages: layers of each chunk; by default those of `stages(mesh)`.
            splits_backward: whether weight gradients are separate tasks.
        """
        return memory_of(
            self.model,
            mesh,
            self.stages(mesh) if stages is None else stages,
            self.recompute,
            self.offload,
            self.limit_bytes,
            self.kernels,
            states=self.states,
            trained=self._trained,
            precision=self.precision,
            gathered=self.gathered,
            recompute_share=self.recompute_share,
            saved=self.saved,
            splits_backward=splits_backward,
        )

    def communicator_bytes(self, mesh: Mesh) -> FloatArray:
        """Return the bytes of NCCL's buffers on a GPU of each stage, float64 `[pp]`, estimated for A100s and H100s.

        Peaks don't contain them, since those are of tensors: they are a part of what `memory_fraction` leaves.

        Args:
            mesh: the GPUs.
        """
        return communicator_bytes(mesh)

    def send_s(self, mesh: Mesh) -> tuple[float, float]:
        """Return latency and seconds per row of a stage boundary, the same in both passes.

        Args:
            mesh: the GPUs; each tensor-parallel GPU sends a part of each row.
        """
        check_mesh(self.model, mesh)
        return boundary_s(self.model, self.hardware, mesh, self.precision)

    def gradient_sync_s(self, mesh: Mesh) -> FloatArray:
        """Return seconds of the gradients' synchronization at the step's end, float64 `[pp]`.

        Args:
            mesh: the GPUs, dp x cp of which synchronize, and the sharding.
        """
        return gradient_sync_s(
            self.model,
            self.hardware,
            mesh,
            self.stages(mesh),
            self.gathered,
            self._trained,
            self.precision,
        )

    def traffic_s(self, mesh: Mesh, *, splits_backward: bool = False) -> FloatArray:
        """Return seconds in which a task gathers parameters and reduces gradients, float64 `[3, num_chunks]`.

        In this order: forward, backward and weight-gradient tasks.

        Args:
            mesh: the GPUs, and the sharding; all 0 unless parameters are divided and gathered unit by unit.
            splits_backward: whether weight gradients are separate tasks, which reduce them.
        """
        stages = self.stages(mesh)
        if mesh.sharding != "parameters" or self.gathered == "step":
            return np.zeros((KINDS, mesh.num_chunks))
        again = layers_again(stages.layers, self.recompute_share) * (self.recompute == "full")
        made = np.maximum(again - 1, 0) * (self.saved == "stage")
        return traffic_s(
            self.model,
            self.hardware,
            mesh,
            stages,
            made,
            trained=self._trained,
            precision=self.precision,
            splits_backward=splits_backward,
        )

    def flops(self, lengths: npt.ArrayLike) -> Flops:
        """Return FLOPs of a step on whole documents: those that MFU counts, and those that are computed.

        Args:
            lengths: `[num_documents]`.
        """
        return step_flops(self.model, lengths, self.recompute, self.recompute_share)

    def rates(self, mesh: Mesh, best: bool = False) -> Rates:
        """Return the rates for the pricing kernels.

        Args:
            mesh: the GPUs.
            best: for lower bounds: the highest rate of any number of rows, no launch time and no latency.

        Raises:
            SettingError: a mesh that doesn't divide the model.
        """
        check_mesh(self.model, mesh)
        model, hardware = self.model, self.hardware
        pair_flops = 2.0 * model.heads * (model.head_dim + model.value_head_dim) / mesh.tp
        entry = ENTRY_BYTES[self.precision]
        kv = entry / 2 * model.kv_bytes_per_token_layer / kv_shards(model, mesh)
        queries = entry * model.heads * model.head_dim / mesh.tp
        outputs = entry * model.heads * model.value_head_dim / mesh.tp
        again = self._forwards_again(mesh) if self.recompute == "full" else 0.0
        is_quick = best or self.mode == "flops"
        is_far = self.offload == "kv" and stages_of(model, mesh).layers.max() > LAYERS_ON_DEVICE
        host_s = 1.0 / hardware.host.bytes_per_s if is_far else 0.0
        grids = (
            self._flop_rates()
            if self.mode == "flops"
            else _table_rates(
                hardware.attention, hardware.gemm, hardware.gemm_backward or hardware.gemm, best=best
            )
        )
        return Rates(
            **grids,
            link_latency_s=np.array([hardware.intra.latency_s, hardware.inter.latency_s]) * (not best),
            link_s_per_byte=np.array([1 / hardware.intra.bytes_per_s, 1 / hardware.inter.bytes_per_s]),
            row_scale=(model.heads / mesh.tp / hardware.measured_heads) ** hardware.heads_exponent,
            attention_flops=pair_flops * (1.0 - model.windowed_share),
            windowed_flops=pair_flops * model.windowed_share,
            window=float(model.window),
            backward_ratio=BACKWARD_RATIO,
            linear_flops=2.0 * model.linear_parameters_per_layer / mesh.tp,
            head_flops=2.0 * model.head_parameters / mesh.tp,
            weight_ratio=self._trained.of_layers,
            head_weight_ratio=self._trained.of_ends,
            num_layers=float(model.layers),
            launch_s=0.0 if is_quick else hardware.launch_s,
            **self._slice_launches(0.0 if is_quick else hardware.launch_s),
            recompute=again,
            reuse_s=self._reuse_s(mesh),
            collective_s=self._collective_s(mesh),
            cp=float(mesh.cp),
            node_group=float(max(hardware.gpus_per_node // mesh.tp, 1)),
            key_value_bytes=kv,
            **self._exchanges(kv, queries, outputs, again),
            exchange_overlap=self.exchange_overlap,
            host_s_per_token=kv * host_s,
            # Keys and values in, and their float32 gradients in and out on the other direction of the link.
            host_back_s_per_token=(1.0 + 4.0 / entry) * kv * host_s,
        )

    def _slice_launches(self, launch_s: float) -> dict[str, Any]:
        """Return seconds of what each slice with earlier tokens launches, as a share of what its layer does."""
        shares = [one / all_ for one, all_ in zip(SLICE_LAUNCHES, LAYER_LAUNCHES)]
        names = ("slice_launch_s", "slice_launch_back_s")
        return {name: launch_s * share * (self.kernels == "eager") for name, share in zip(names, shares)}

    def _exchanges(self, kv: float, queries: float, outputs: float, again: float) -> dict[str, Any]:
        """Return what GPUs that share a document exchange, except keys and values forward; bytes are per token."""
        if self.kernels == "fused":
            return {
                "exchanges_back": 2.0,
                "key_value_back_bytes": 2.0 * kv,
                "query_bytes": queries + outputs,
                "query_gradient_bytes": 2.0 * queries + outputs,
            }
        # Queries aren't sent. Keys and values are gathered again for the backward pass and for a recomputed forward
        # pass; their gradients are float32.
        return {
            "exchanges_back": 2.0 + again,
            "key_value_back_bytes": (1.0 + 4.0 / ENTRY_BYTES[self.precision] + again) * kv,
            "query_bytes": math.inf,
            "query_gradient_bytes": math.inf,
        }

    def _flop_rates(self) -> dict[str, Any]:
        """Return one rate for attention and one for matrix products: the best of each forward table."""
        attention = np.full((1, 1), 1e-12 / self.hardware.attention[0].tflops.max())
        gemm = np.full(1, 1e-12 / self.hardware.gemm.tflops.max())
        one = np.ones(1)
        return {
            "query_rows": one,
            "key_lengths": one,
            "forward_s": attention,
            "backward_s": attention,
            "gemm_rows": one,
            "gemm_s": gemm,
            "gemm_backward_s": gemm,
        }

    def _share_again(self, mesh: Mesh) -> float:
        """Return the largest share of a stage's layers that recompute fully."""
        layers = stages_of(self.model, mesh).layers.reshape(-1, mesh.pp)
        again = memories.layers_again(layers, self.recompute_share)
        return float((again.sum(axis=0) / layers.sum(axis=0)).max())

    def _forwards_again(self, mesh: Mesh) -> float:
        """Return the forward passes of an average layer in the backward pass, on the stage with the most."""
        layers = stages_of(self.model, mesh).layers.reshape(-1, mesh.pp)
        again = memories.layers_again(layers, self.recompute_share)
        runs = again + (self.saved == "stage") * np.maximum(again - 1, 0)
        return float((runs.sum(axis=0) / layers.sum(axis=0)).max())

    def _reuse_s(self, mesh: Mesh) -> float:
        """Return seconds per row and layer to recompute norms and the SwiGLU product: three passes over each."""
        if self.mode == "flops" or self.recompute == "none":
            return 0.0
        share = 1.0 if self.recompute == "selective" else 1.0 - self._share_again(mesh)
        moved = 3.0 * reused_bytes(self.model, self.precision) / mesh.tp
        return share * moved / self.hardware.memory_bytes_per_s

    def _collective_s(self, mesh: Mesh) -> float:
        """Return seconds per row, layer and pass of two all-gathers and two reduce-scatters of a row among tp GPUs.

        Sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198, §4.2.2); their latency is in `launch_s`.
        """
        link = self.hardware.intra if mesh.tp <= self.hardware.gpus_per_node else self.hardware.inter
        moved = 4.0 * ENTRY_BYTES[self.precision] * self.model.hidden * (mesh.tp - 1) / mesh.tp
        return (1.0 - self.tp_overlap) * moved / link.bytes_per_s


@functools.lru_cache(maxsize=CACHE_SIZE)
def _table_rates(
    attention: tuple[RateTable, RateTable], gemm: RateCurve, back: RateCurve, *, best: bool
) -> dict[str, Any]:
    """Return the hardware's tables on common grids."""
    forward, backward = attention
    rows = np.union1d(gemm.rows, back.rows)
    grids = {
        "query_rows": np.union1d(forward.query_rows, backward.query_rows),
        "key_lengths": np.union1d(forward.key_lengths, backward.key_lengths),
        "gemm_rows": rows,
        "gemm_s": _on_rows(rows, gemm.rows, 1e-12 / gemm.tflops),
        "gemm_backward_s": _on_rows(rows, back.rows, 1e-12 / back.tflops),
    }
    for name, table in (("forward_s", forward), ("backward_s", backward)):
        grids[name] = _on_grid(grids["query_rows"], grids["key_lengths"], table)
    if best:
        grids["query_rows"], grids["gemm_rows"] = np.ones(1), np.ones(1)
        for name in ("forward_s", "backward_s", "gemm_s", "gemm_backward_s"):
            grids[name] = grids[name].min(axis=0, keepdims=True)
    return grids


def _on_rows(rows: FloatArray, grid: FloatArray, seconds: FloatArray) -> FloatArray:
    """Interpolate seconds per FLOP on another grid, linearly in 1 / rows; fewer rows than the first take as long."""
    clipped = np.maximum(rows, grid[0])
    values: FloatArray = _interpolated(1.0 / clipped, 1.0 / grid[::-1], seconds[::-1]) * (clipped / rows)
    return values


def _interpolated(at: FloatArray, grid: FloatArray, values: FloatArray) -> FloatArray:
    """Do what `np.interp` does; that rounds differently on machines with fused multiply-add."""
    if len(grid) == 1:
        return np.full(at.shape, values[0])
    low = np.clip(np.searchsorted(grid, at, "right") - 1, 0, len(grid) - 2)
    slopes = (values[low + 1] - values[low]) / (grid[low + 1] - grid[low])
    between: FloatArray = slopes * (at - grid[low]) + values[low]
    return np.where(at >= grid[-1], values[-1], np.where(at <= grid[0], values[0], between))


def _on_grid(rows: FloatArray, keys: FloatArray, table: RateTable) -> FloatArray:
    """Interpolate a table's seconds per FLOP on other grids."""
    seconds = 1e-12 / table.tflops
    clipped = np.maximum(keys, table.key_lengths[0])
    wide = np.array([_on_rows(clipped, table.key_lengths, row) for row in seconds])
    return np.array([_on_rows(rows, table.query_rows, column) for column in wide.T]).T.copy()


def _digest(value: Any, digest: Any) -> None:
    """Add a value to a hash, fields by name and arrays by their bytes."""
    if dataclasses.is_dataclass(value):
        for field in stored_fields(value):
            if field.name == "held_out_errors":  # doesn't affect prices
                continue
            digest.update(field.name.encode())
            _digest(getattr(value, field.name), digest)
    elif isinstance(value, np.ndarray):
        digest.update(repr(value.shape).encode() + value.tobytes())
    elif isinstance(value, tuple):
        for item in value:
            _digest(item, digest)
    else:
        digest.update(repr(value).encode())


# Communication besides keys and values: stage boundaries, gradients, gathered parameters.


def boundary_s(
    model: ModelShape, hardware: Hardware, mesh: Mesh, precision: Precision = "bf16"
) -> tuple[float, float]:
    """Return latency and seconds per row of a stage boundary: h / tp numbers per row, either way.

    This is the slowest boundary: if the mesh is larger than a node, some neighbouring stages are on different nodes.
    """
    link = hardware.intra if mesh.num_gpus <= hardware.gpus_per_node else hardware.inter
    return link.latency_s, ENTRY_BYTES[precision] * model.hidden / mesh.tp / link.bytes_per_s


def peers_link(hardware: Hardware, mesh: Mesh) -> Link:
    """Return the link among GPUs that hold equal parameters, dp x cp of them, a stride of tp apart."""
    return hardware.intra if mesh.dp * mesh.cp * mesh.tp <= hardware.gpus_per_node else hardware.inter


def collective_s(link: Link, num_bytes: FloatArray, size: int) -> FloatArray:
    """Return seconds of one all-gather or reduce-scatter of `num_bytes` in all among `size` GPUs.

    A ring moves (size - 1) / size of the bytes; latency counts log2(size) times, as in a tree (Thakur et al. 2005,
    "Optimization of Collective Communication Operations in MPICH").
    """
    if size == 1:
        return np.zeros_like(num_bytes)
    return math.ceil(math.log2(size)) * link.latency_s + num_bytes * (size - 1) / size / link.bytes_per_s


def gradient_sync_s(
    model: ModelShape,
    hardware: Hardware,
    mesh: Mesh,
    stages: Stages,
    gathered: Gathered = "unit",
    trained: Trained = ALL,
    precision: Precision = "bf16",
) -> FloatArray:
    """Return seconds of the gradient synchronization at a step's end, float64 `[pp]`.

    Float32 gradients are all-reduced (sharding="none"), or reduced to shards, whose new parameters are gathered
    ("optimizer", and "parameters" if they are gathered once a step). Else gradients have been reduced by each
    MicroPack. Frozen parameters are gathered with sharding="parameters" alone.
    """
    peers = mesh.dp * mesh.cp
    if (mesh.sharding == "parameters" and gathered == "unit") or peers == 1:
        return np.zeros(mesh.pp)
    learning = trained_parameters(model, stages, trained)
    whole = learning
    if mesh.sharding == "parameters" and trained.adapter_share:
        whole = learning + chunk_parameters(model, stages)
    summed, back = (
        each.reshape(mesh.virtual_stages, mesh.pp).sum(axis=0) / mesh.tp for each in (learning, whole)
    )
    link = peers_link(hardware, mesh)
    entry = 4.0 if mesh.sharding == "none" else ENTRY_BYTES[precision]
    return collective_s(link, 4.0 * summed, peers) + collective_s(link, entry * back, peers)


def traffic_s(
    model: ModelShape,
    hardware: Hardware,
    mesh: Mesh,
    stages: Stages,
    made: FloatArray,
    *,
    trained: Trained,
    precision: Precision,
    splits_backward: bool,
) -> FloatArray:
    """Return seconds in which a task of each kind gathers and reduces, float64 `[3, num_chunks]`.

    Units are gathered in the type of computation, and reduced in float32 where they are trained. Forward tasks gather
    embedding and layers; backward tasks the head, the layers, and again those whose inputs are `made` again,
    `[num_chunks]`.
    """
    link, peers, entry = peers_link(hardware, mesh), mesh.dp * mesh.cp, ENTRY_BYTES[precision]
    layer, end = model.parameters_per_layer / mesh.tp, model.head_parameters / mesh.tp
    head, embedding = (has.astype(np.float64) for has in (stages.has_head, stages.has_embedding))

    def moved_s(layers: FloatArray, ends: FloatArray, bytes_of_layer: float, of_end: float) -> FloatArray:
        seconds = layers * collective_s(link, np.array(bytes_of_layer * layer), peers)
        found: FloatArray = seconds + ends * collective_s(link, np.array(of_end * end), peers)
        return found

    whole, none = entry * (1.0 + trained.adapter_share), 0 * head
    reduced = moved_s(stages.layers, none, 4.0 * trained.of_layers, 4.0)
    forward = moved_s(stages.layers, embedding, whole, entry)
    backward = moved_s(stages.layers + made, head, whole, entry)
    backward += moved_s(none, (head + embedding) * trained.of_ends, 4.0, 4.0)
    return np.stack([forward, backward + reduced * (not splits_backward), reduced * splits_backward])
