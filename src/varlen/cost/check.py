"""What a mesh or a document can't be for a model: errors that name what would do."""

from __future__ import annotations

import numpy as np

from varlen.cost.shape import ModelShape
from varlen.errors import ModelError, SettingError
from varlen.step_plan import Mesh
from varlen.types import Int32Array


def check_mesh(model: ModelShape, mesh: Mesh) -> None:
    """Refuse a mesh whose tensor-parallel GPUs don't divide the heads, or whose chunks outnumber the layers.

    Args:
        model: the model.
        mesh: the mesh.

    Raises:
        SettingError: names the numbers that would divide.
    """
    if not divides(model, mesh.tp):
        fit = [str(tp) for tp in range(1, model.heads + 1) if divides(model, tp)]
        raise SettingError(
            f"tp={mesh.tp} doesn't divide {model.heads} query heads and {model.kv_heads} key heads; "
            f"tp may be {', '.join(fit)}"
        )
    if model.layers < mesh.num_chunks:
        raise SettingError(
            f"{model.layers} layers can't fill pp={mesh.pp} x virtual_stages={mesh.virtual_stages} "
            f"= {mesh.num_chunks} chunks; pp x virtual_stages may be at most {model.layers}"
        )


def divides(model: ModelShape, tp: int) -> bool:
    """Return whether so many GPUs get equal query heads, and whole key heads or equal copies of them.

    Args:
        model: the model.
        tp: GPUs.
    """
    return model.heads % tp == 0 and (model.kv_heads % tp == 0 or tp % model.kv_heads == 0)


def check_positions(model: ModelShape, lengths: Int32Array) -> None:
    """Refuse documents longer than the model has positions.

    Args:
        model: the model.
        lengths: int32 `[num_documents]`.

    Raises:
        ModelError: names the first such document, and how many there are.
    """
    if model.max_positions is None:
        return
    over = np.flatnonzero(lengths > model.max_positions)
    if over.size:
        raise ModelError(
            f"document {over[0]:,} has {lengths[over[0]]:,} tokens, over the {model.max_positions:,} positions of "
            f"{model.name or 'the model'} ({over.size:,} of {lengths.size:,} documents are); truncate them to "
            f"{model.max_positions:,}, or extend the model's positions (max_positions=None plans any length)"
        )
