"""What travels between GPUs besides keys and values: stage boundaries, gradients, gathered parameters."""

from __future__ import annotations

import math

import numpy as np

from varlen.cost.hardware import Hardware, Link
from varlen.cost.memory import chunk_parameters
from varlen.cost.shape import ModelShape
from varlen.cost.stages import Stages
from varlen.step_plan import Mesh
from varlen.types import FloatArray


def boundary_s(model: ModelShape, hardware: Hardware, mesh: Mesh) -> tuple[float, float]:
    """Return latency and seconds per row of a stage boundary: 2·h / tp bytes a row, either way.

    The slowest boundary counts: where the mesh is larger than a node, some stages are in another one.
    """
    link = hardware.intra if mesh.num_gpus <= hardware.gpus_per_node else hardware.inter
    return link.latency_s, 2 * model.hidden / mesh.tp / link.bytes_per_s


def peers_link(hardware: Hardware, mesh: Mesh) -> Link:
    """Return the link among GPUs that hold equal parameters, dp x cp of them, a stride of tp apart."""
    return hardware.intra if mesh.dp * mesh.cp * mesh.tp <= hardware.gpus_per_node else hardware.inter


def collective_s(link: Link, num_bytes: FloatArray, size: int) -> FloatArray:
    """Return seconds of one all-gather or reduce-scatter of `num_bytes` in all among `size` GPUs.

    A ring moves (size - 1) / size of the bytes; latency counts once a halving, as in a tree (Thakur et al. 2005,
    "Optimization of Collective Communication Operations in MPICH").
    """
    if size == 1:
        return np.zeros_like(num_bytes)
    return math.ceil(math.log2(size)) * link.latency_s + num_bytes * (size - 1) / size / link.bytes_per_s


def gradient_sync_s(model: ModelShape, hardware: Hardware, mesh: Mesh, stages: Stages) -> FloatArray:
    """Return seconds at a step's end, float64 `[pp]`.

    Gradients are float32: reduced and gathered whole (sharding="none"), or reduced to shards, whose new bf16
    parameters are gathered ("optimizer"). With "parameters" gradients were reduced MicroPack by MicroPack, and
    nothing is left.
    """
    peers = mesh.dp * mesh.cp
    if mesh.sharding == "parameters" or peers == 1:
        return np.zeros(mesh.pp)
    own = chunk_parameters(model, stages).reshape(mesh.virtual_stages, mesh.pp).sum(axis=0) / mesh.tp
    link = peers_link(hardware, mesh)
    back = 4.0 if mesh.sharding == "none" else 2.0
    return collective_s(link, 4.0 * own, peers) + collective_s(link, back * own, peers)


def gather_s(model: ModelShape, hardware: Hardware, mesh: Mesh, stages: Stages) -> FloatArray:
    """Return seconds that gathering a chunk's bf16 parameters takes, float64 `[num_chunks]`; 0 unless sharded.

    A forward MicroPack gathers once; a backward one gathers again and reduces as many bytes of gradients to shards.
    """
    if mesh.sharding != "parameters":
        return np.zeros(mesh.num_chunks)
    own = 2.0 * chunk_parameters(model, stages) / mesh.tp
    return collective_s(peers_link(hardware, mesh), own, mesh.dp * mesh.cp)
