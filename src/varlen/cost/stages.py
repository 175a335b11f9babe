"""`Stages`: which layers each chunk of the pipeline holds, moved so that the heaviest stage is lightest."""

from __future__ import annotations

import functools
import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.cost.shape import ModelShape
from varlen.step_plan import Mesh
from varlen.types import FloatArray

KEPT = 256
"""Cuts and bytes that are kept, of the last asked for."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stages:
    """How a model is cut into the chunks of a mesh; read-only."""

    layers: FloatArray
    """float64 `[num_chunks]`: whole numbers of at least 1."""
    has_head: npt.NDArray[Any]
    """bool `[num_chunks]`: the last."""
    has_embedding: npt.NDArray[Any]
    """bool `[num_chunks]`: the first."""

    def __post_init__(self) -> None:
        for array in (self.layers, self.has_head, self.has_embedding):
            array.flags.writeable = False


@functools.lru_cache(maxsize=KEPT)
def stages_of(model: ModelShape, mesh: Mesh) -> Stages:
    """Cut a model into chunks so that the heaviest stage, the vocabulary head included, is as light as can be.

    The head counts as the layers whose matrix products equal its own. Layers are dealt one at a time to the
    lightest stage, which is optimal for items of equal weight; ties go to later stages, where fewer MicroPacks
    wait for their backward pass and so less memory is held. Within a stage the last chunks get less.

    Args:
        model: with at least as many layers as chunks.
        mesh: the mesh.
    """
    head = model.head_parameters / model.linear_parameters_per_layer
    counts = np.full(mesh.pp, mesh.virtual_stages)
    loads = [(float(counts[s]) + (head if s == mesh.pp - 1 else 0.0), -s) for s in range(mesh.pp)]
    heapq.heapify(loads)
    for _ in range(model.layers - mesh.num_chunks):
        load, stage = heapq.heappop(loads)
        counts[-stage] += 1
        heapq.heappush(loads, (load + 1.0, stage))
    each, more = np.divmod(counts, mesh.virtual_stages)
    layers = each[None, :] + (np.arange(mesh.virtual_stages)[:, None] < more[None, :])
    chunks = np.arange(mesh.num_chunks)
    return Stages(
        layers=layers.ravel().astype(np.float64),
        has_head=chunks == mesh.num_chunks - 1,
        has_embedding=chunks == 0,
    )
