"""Cut a model to one stage: modules of other stages are dropped, and the others keep their names.

So parameters have the same names as in the whole model, each on one stage (a tied embedding on two), and the
checkpoints of all stages together are that of the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from varlen.errors import ModelError, PlanError
from varlen.runtime.decoder import DecoderParts, attention_of, set_attention
from varlen.runtime.step import layers_of
from varlen.step_plan import Mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How a model was cut."""

    mesh: Mesh
    stage: int
    fingerprint: str  # of the whole model
    is_tied: bool  # whether embedding and head share a weight, held by first and last stage


class Elsewhere(nn.Module):
    """Stands in for a module that another stage holds.

    Plain values of that module, such as its sizes, stay readable.
    """

    def __init__(self, module: nn.Module, name: str, cut: Cut) -> None:
        super().__init__()
        for key, value in vars(module).items():
            if isinstance(value, int | float | str) and not key.startswith("_"):
                setattr(self, key, value)
        self.name, self.cut = name, cut

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuse."""
        raise ModelError(
            f"{self.name} is on another stage than {self.cut.stage} of {self.cut.mesh.pp}; a stage runs in "
            "SliceEngine.step alone"
        )


def model_fingerprint(model: Any) -> str:
    """Return 64 hexadecimal digits that models share whose parameters have the same names, shapes and dtypes."""
    parameters = sorted(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters())
    return hashlib.sha256("\n".join(parameters).encode()).hexdigest()


def cut_of(model: Any) -> Cut | None:
    """Return how a model was cut; None for a whole one."""
    return next((module.cut for module in model.modules() if isinstance(module, Elsewhere)), None)


def cut_to_stage(model: Any, mesh: Mesh, stage: int) -> Cut:
    """Drop in place what other stages hold, unless that was done before; `SliceEngine` does it by itself.

    To shard a stage by `fully_shard`, cut it first, so that shards are made of what stays.
    """
    before = cut_of(model)
    if before is not None:
        if (before.mesh.pp, before.mesh.virtual_stages, before.stage) != (
            mesh.pp,
            mesh.virtual_stages,
            stage,
        ):
            raise PlanError(
                f"the model was cut to stage {before.stage} of pp={before.mesh.pp}, "
                f"virtual_stages={before.mesh.virtual_stages}; stage {stage} of pp={mesh.pp}, "
                f"virtual_stages={mesh.virtual_stages} needs the whole model again"
            )
        return before
    attention = attention_of(model)
    parts = DecoderParts.of(model)
    set_attention(model, attention)
    check_cut(model, parts, mesh)
    cut = Cut(
        mesh=mesh,
        stage=stage,
        fingerprint=model_fingerprint(model),
        is_tied=getattr(parts.head, "weight", None) is getattr(parts.embedding, "weight", None),
    )
    if mesh.pp > 1:
        names = {id(module): name for name, module in model.named_modules()}
        for module in _of_other_stages(model, parts, mesh, stage):
            name = names[id(module)]
            model.set_submodule(name, Elsewhere(module, name, cut))
    unmade = [name for name, p in model.named_parameters() if p.is_meta]
    if unmade:
        raise ModelError(
            f'{unmade[0]} is on "meta" ({len(unmade):,} parameters are), and stage {stage} of {mesh.pp} holds it; '
            'only what other stages hold may stay on "meta"'
        )
    return cut


def check_cut(model: Any, parts: DecoderParts, mesh: Mesh) -> None:
    """Refuse a model that can't be cut into the chunks of a mesh."""
    layers = len(parts.layers)
    check_layers(layers, mesh)
    known = {id(p) for part in _pieces(parts) for p in part.parameters()}
    unknown = [name for name, p in model.named_parameters() if id(p) not in known]
    if unknown and mesh.pp > 1:
        raise ModelError(
            f"{unknown[0]} belongs to neither embedding, layers, norm nor head ({len(unknown):,} parameters in all), "
            "and it isn't known which stage holds it; run the model with pp=1"
        )
    planned = getattr(model.config.get_text_config(), "base_model_pp_plan", None)
    decoder = model.get_decoder()
    lists = [name for name in planned or () if isinstance(getattr(decoder, name, None), nn.ModuleList)]
    if planned and [id(layer) for name in lists for layer in getattr(decoder, name)] != list(
        map(id, parts.layers)
    ):
        raise ModelError(
            f"the model's own pipeline plan cuts {', '.join(lists) or 'no list of layers'}, but slices run "
            f"{layers} other layers; run the model with pp=1"
        )


def check_layers(layers: int, mesh: Mesh) -> None:
    """Require a layer for each chunk; chunks needn't have equally many."""
    if layers < mesh.num_chunks:
        fits = f"pp of at most {layers}" if layers > 1 else "pp=1"
        raise PlanError(
            f"{layers} layers can't be cut into {mesh.num_chunks} chunks (pp={mesh.pp}, "
            f"virtual_stages={mesh.virtual_stages}); each holds at least one layer: choose {fits} without virtual "
            "stages"
        )


def stage_dtype(layers: list[nn.Module]) -> torch.dtype:
    """Return the dtype of what layers give each other: that of their matrices."""
    return next(p.dtype for layer in layers for p in layer.parameters() if p.ndim > 1)


def _pieces(parts: DecoderParts) -> Iterator[nn.Module]:
    yield from (parts.embedding, *parts.layers, parts.rotary, parts.norm, parts.head)


def _of_other_stages(model: Any, parts: DecoderParts, mesh: Mesh, stage: int) -> Iterator[nn.Module]:
    if stage != 0:
        yield parts.embedding
    if stage != mesh.pp - 1:
        yield from (parts.norm, parts.head)
    for chunk, layers in enumerate(layers_of(model, mesh)):
        if chunk % mesh.pp != stage:
            yield from (parts.layers[layer] for layer in layers)
