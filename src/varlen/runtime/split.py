"""Cut a model to one stage, and divide its layers: modules of other stages are dropped, the others keep their names.

So parameters have the same names as in the whole model, each on one stage (a tied embedding on two), and the
checkpoints of all stages together are that of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from varlen.errors import ModelError, PlanError, SettingError
from varlen.runtime.attention import refused_sharing
from varlen.runtime.decoder import DecoderParts, attention_of, set_attention
from varlen.runtime.mesh.consistency import model_fingerprint
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


# `divide_layers`: tensor parallelism, by transformers' own `apply_tensor_parallelism` and the model's own plan of it.
#
#     embedding     rows of the vocabulary ──► sum over ranks ─┐
#     layers        heads and columns, sums over ranks inside ◄┘ transformers' plan
#     norm, head    rows of the vocabulary ──► maxima and sums over ranks ──► loss
#
# What is divided is a DTensor; what isn't, such as norms, all ranks hold and compute alike. `fully_shard` comes after
# it, and divides what each tp rank has among the replicas. (Megatron-LM: Shoeybi et al. 2019, arXiv 1909.08053.)

_PARTIAL = "replicated_with_grad_allreduce"
"""transformers' style of norms of single heads: each rank's gradient is of its own heads. It sums `.grad` whenever
autograd adds to it, which is wrong from a step's second backward pass on; the engine sums once, at the end."""
_SPLITTING = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input")
"""Styles of linear layers."""
_MARK = "_divided_by_varlen"


@dataclass(frozen=True, slots=True)
class Division:
    """How tensor parallelism has divided a model's parameters."""

    ranks: tuple[int, ...]
    names: tuple[str, ...]  # of what is divided; FSDP2's parameters are DTensors too


def division_of(model: Any) -> Division | None:
    """Return how `divide_layers` has divided a model; None for another one."""
    found: Division | None = getattr(model, _MARK, None)
    return found


def devices_of(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """Return the mesh's processes as PyTorch's (pp, replicas, tp), replicas being dp x cp; all call it at once."""
    shape = (mesh.pp, mesh.dp * mesh.cp, mesh.tp)
    return init_device_mesh(device.type, shape, mesh_dim_names=("pp", "replicas", "tp"))


def is_divided(model: Any) -> bool:
    """Return whether tensor parallelism has divided any of a model's parameters."""
    if not isinstance(model, nn.Module):
        return False
    if division_of(model) is not None:
        return True
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    return not is_sharded and any(isinstance(parameter, DTensor) for parameter in model.parameters())


def divide_layers(model: Any, devices: DeviceMesh | None) -> list[str]:
    """Divide in place what a stage holds among tp ranks, unless that was done before; `SliceEngine` does it too.

    To shard what each rank has by `fully_shard`, divide the model first, by the same `devices_of`.

    Args:
        devices: the tp ranks; None where there is one.

    Returns:
        The parameters that all ranks hold, and of which each has a part of the gradient only.
    """
    if devices is None:
        return []
    styles = _styles(model, devices.size())
    partial = {name for name, style in styles.items() if style == _PARTIAL}
    if "colwise" in styles.values():  # xIELU's, which act on the columns of a rank
        partial |= {name for name, _ in model.named_parameters() if ".act_fn." in name}
    if not is_divided(model):
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        is_tied = getattr(head, "weight", None) is getattr(embedding, "weight", ())
        apply_tensor_parallelism(model, devices, {n: how for n, how in styles.items() if how != _PARTIAL})
        if is_tied:
            head.weight = embedding.weight
        for name, module in model.named_modules():
            if name.endswith(".shared_expert"):  # Llama 4 adds to its output in place, which must be no view
                module.register_forward_hook(_cloned)
        names = tuple(name for name, p in model.named_parameters() if isinstance(p, DTensor))
        setattr(model, _MARK, Division(tuple(devices.mesh.tolist()), names))
    return [name for name, _ in model.named_parameters() if name in partial]


def _cloned(_module: nn.Module, _given: Any, output: Any) -> Any:
    """Return a copy of a module's output; a function by name, so that models with this hook can be pickled."""
    return output.clone()


def _styles(model: Any, ranks: int) -> dict[str, str]:
    """Return the style of each module and parameter that a stage holds and that ranks divide or sum."""
    attention = model.config._attn_implementation
    parts = DecoderParts.of(model)
    model.set_attn_implementation(attention)
    _check_divisible(model, parts, ranks)
    modules = dict(model.named_modules())
    ends = {n: module for n, module in modules.items() if module in (parts.embedding, parts.head)}
    styles = {
        name: style
        for name, style in model._expand_parallel_plan(dict(model.tp_plan)).items()
        if not isinstance(modules.get(name), Elsewhere)
        and name.rpartition(".")[0] not in ends
        and name not in ends
    }
    # As parameters alone: a step looks up and multiplies by itself. The same for both, since they may be one.
    known = dict(model.named_parameters())
    for name, module in ends.items():
        rows = "embedding_rowwise" if module is parts.embedding else "colwise_gather_output"
        keys = [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)]
        styles.update({key: rows for key in keys if key in known})
    odd = [
        name
        for name, style in styles.items()
        if style in _SPLITTING and name in modules and not isinstance(modules[name], nn.Linear)
    ]
    if odd:
        raise ModelError(
            f"{odd[0]} is a {type(modules[odd[0]]).__name__} ({len(odd):,} modules are so), and tp divides plain "
            "linear layers; merge adapters, or run the model with tp=1"
        )
    return styles


def _check_divisible(model: Any, parts: DecoderParts, ranks: int) -> None:
    """Refuse a model that tensor parallelism would compute wrongly."""
    config, family = model.config.get_text_config(), model.config.model_type
    if not hasattr(model, "_expand_parallel_plan"):
        raise SettingError(
            "tp needs transformers 5.23 or later, which divides models; install it, or take tp=1"
        )
    if division_of(model) is None and any(isinstance(module, FSDPModule) for module in model.modules()):
        raise SettingError(
            f"fully_shard has divided the model, and tp={ranks} would divide shards; load the model again, and call "
            "divide_layers of varlen.runtime.split before fully_shard, or take tp=1"
        )
    if not parts.head_is_plain:
        raise ModelError(
            "the head has an adapter or a hook, and tp divides plain heads; merge it, or run the model with tp=1"
        )
    divided = [name for name in model.tp_plan if name.rpartition(".")[2] in ("k_proj", "query_key_value")]
    counts = _head_counts(config)
    if divided and any(count % ranks for both in counts for count in both):
        fit = [
            str(n) for n in range(1, max(counts)[1] + 1) if not any(c % n for both in counts for c in both)
        ]
        said = " or ".join(f"{heads} query heads and {keys} key heads" for heads, keys in counts)
        raise ModelError(
            f"tp={ranks} doesn't divide the {said} of this {family} model; tp may be {', '.join(fit)}"
        )


def _head_counts(config: Any) -> list[tuple[int, int]]:
    """Return the numbers of query heads and key heads that layers have, each pair once."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    pairs = [(layer.num_attention_heads, getattr(layer, "num_key_value_heads", None)) for layer in layers]
    return sorted({(heads, heads if keys is None else keys) for heads, keys in pairs})


def check_ranks(model: Any, mesh: Mesh) -> None:
    """Refuse a model that tp or cp ranks of a mesh can't share, whatever it is divided by; it may be on "meta"."""
    config = model.config.get_text_config()
    if mesh.cp > 1 and "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise refused_sharing(int(config.attention_chunk_size))
    if mesh.tp > 1:
        _styles(model, mesh.tp)


def check_division(model: Any, devices: DeviceMesh | None) -> None:
    """Refuse a model that is divided in another way than `divide_layers` would for these ranks."""
    if not is_divided(model):
        return
    ranks = [] if devices is None else devices.mesh.tolist()
    division = division_of(model)
    if division is None:
        name, parameter = next((n, p) for n, p in model.named_parameters() if isinstance(p, DTensor))
        size = parameter.device_mesh.size()
        raise ModelError(
            f"{name} is divided among {size} processes, not by the engine; give it the undivided model and the "
            f"mesh (vl.Mesh(tp={size}, ...)), and it divides the model in place"
        )
    if list(division.ranks) != ranks:
        raise ModelError(
            f"{division.names[0]} is divided among the ranks {list(division.ranks)}, and the mesh of this engine has "
            f"{ranks or 'tp=1'}; load the model again"
        )
