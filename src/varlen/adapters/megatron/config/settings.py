"""The settings of Megatron that decide how packed data is trained: names, kinds, defaults, arguments."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

Kind = Literal["size", "count", "integer", "flag", "text", "sizes", "words", "one or each", "number", "path"]
"""size: 1 or more; count: 0 or more; integer: any; words: names, one or several; one or each: one name, or a list
with one for each layer; path: of a file or folder."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: what kind of value it takes, and the releases' default."""

    kind: Kind
    default: Any = None


OFFLINE_OLD, OFFLINE_NEW = "dataset.packed_sequence_specs", "dataset.offline_packing_specs"
"""Where the specs of offline packing stand: up to release 0.5.1, and from 0.6.0 on."""
IN_BATCH_OLD, IN_BATCH_NEW = "dataset.pack_sequences_in_batch", "dataset.enable_in_batch_packing"
"""The switch of packing within a micro-batch, likewise."""
OFFLINE_FLAG = "dataset.enable_offline_packing"


def _each(kind: Kind, names: str, default: Any = None) -> dict[str, Setting]:
    return {name: Setting(kind, default) for name in names.split()}


_SPECS = {
    **_each("integer", "packed_sequence_size num_tokenizer_workers", -1),
    **_each("integer", "max_single_sequence_length"),
    **_each("integer", "pad_seq_to_mult", 1),
    **_each("text", "tokenizer_model_name"),
    **_each("path", "packed_train_data_path packed_val_data_path packed_metadata_path"),
    **_each("flag", "pad_cu_seqlens", False),
}

_MODEL = {
    **_each("size", "context_parallel_size tensor_model_parallel_size pipeline_model_parallel_size", 1),
    **_each("size", "expert_model_parallel_size", 1),
    **_each("size", "seq_length num_layers max_seqlen_per_dp_cp_rank"),
    **_each("count", "num_moe_experts mtp_num_layers"),
    **_each("flag", "sequence_parallel calculate_per_token_loss hybrid_context_parallel", False),
    **_each("flag", "enable_cuda_graph external_cuda_graph moe_router_enable_expert_bias", False),
    **_each("flag", "overlap_moe_expert_parallel_comm delay_wgrad_compute", False),
    **_each("one or each", "cp_comm_type"),
    **_each("sizes", "hierarchical_context_parallel_sizes"),
    **_each("text", "cuda_graph_impl vision_cuda_graph_impl", "none"),
    **_each("text", "hf_model_id"),
    **_each("words", "cuda_graph_scope cuda_graph_modules"),
    **_each("number", "moe_aux_loss_coeff", 0.0),
    **_each("number", "moe_z_loss_coeff"),
}

_DATASET = {
    **_each("size", "seq_length micro_batch_size"),
    **_each("integer", "packing_buffer_size"),
    **_each("integer", "seed", 1234),
    **_each("flag", "enable_offline_packing enable_in_batch_packing pack_sequences_in_batch", False),
    **_each("flag", "pad_to_max_length sft", False),
    **_each("flag", "do_validation", True),
    **_each("text", "dataloader_type hf_processor_path"),
}

SETTINGS: dict[str, Setting] = {
    **{f"model.{name}": setting for name, setting in _MODEL.items()},
    **{f"dataset.{name}": setting for name, setting in _DATASET.items()},
    **{f"{OFFLINE_OLD}.{name}": setting for name, setting in _SPECS.items()},
    **{f"{OFFLINE_NEW}.{name}": setting for name, setting in _SPECS.items()},
    "dataset.dataset_kwargs.pad_to_max_length": Setting("flag", False),
    "dataset.dataset_kwargs.virtual_tokens": Setting("count", 0),
    "dataset.dataset_kwargs.chat": Setting("flag", False),
    "dataset.task_encoder.hf_processor_path": Setting("text"),
    "model.dist_train.use_dist_train": Setting("flag", False),
    "train.micro_batch_size": Setting("size"),
    "train.global_batch_size": Setting("size"),
    "validation.eval_micro_batch_size": Setting("size"),
    "validation.eval_global_batch_size": Setting("size"),
    "ddp.average_in_collective": Setting("flag", False),
    "ddp.use_megatron_fsdp": Setting("flag", False),
    "dist.eval_context_parallel_size": Setting("size"),
    "dist.use_megatron_fsdp": Setting("flag", False),
    "comm_overlap.overlap_moe_expert_parallel_comm": Setting("flag", False),
    "comm_overlap.delay_wgrad_compute": Setting("flag", False),
    "tokenizer.tokenizer_model": Setting("text"),
    "peft.virtual_tokens": Setting("count", 0),
}
"""Every setting that a rule asks for, by the name that stands in Megatron-Bridge's ConfigContainer."""

CONTAINERS: dict[str, str] = {
    **{name: name for name in (full.rpartition(".")[0] for full in SETTINGS)},
    "dataset.preprocessing": "dataset.preprocessing",
    # From release 0.6 on some models keep their sizes one level deeper.
    "model.transformer": "model",
}
"""What holds settings, and under which name they are known."""

RENAMED = {"dataset.sequence_length": "dataset.seq_length"}  # Megatron Core's second name

SECTIONS = ("model", "train", "dataset")  # a configuration of Megatron-Bridge has one of these at least

ARGUMENTS: dict[str, tuple[str, ...]] = {
    **{name: (f"model.{name}",) for name in _MODEL if name not in ("seq_length", "hf_model_id")},
    "seq_length": ("model.seq_length", "dataset.seq_length"),
    "num_experts": ("model.num_moe_experts",),
    **{name: (f"train.{name}",) for name in ("micro_batch_size", "global_batch_size")},
    **{name: (f"validation.{name}",) for name in ("eval_micro_batch_size", "eval_global_batch_size")},
    "dataloader_type": ("dataset.dataloader_type",),
    "ddp_average_in_collective": ("ddp.average_in_collective",),
    "use_megatron_fsdp": ("ddp.use_megatron_fsdp",),
    "tokenizer_model": ("tokenizer.tokenizer_model",),
    "sft": ("dataset.sft",),
}
"""Megatron-LM's own arguments (`--context-parallel-size` as argparse keeps it), and what they are here."""

_NEIGHBOURS = """
average_in_collective context_length data_path defer_in_batch_packing_to_step eval_iters expert_tensor_parallel_size
hf_processor_kwargs in_batch_packing_pad_to_multiple_of max_position_embeddings max_sequence_length
moe_aux_loss_coeffs num_layers_in_first_pipeline_stage num_query_groups num_workers pad_to_multiple_of pin_memory
rampup_batch_size seq_len_interpolation_factor sequence_length use_dist_train use_torch_fsdp2
virtual_pipeline_model_parallel_size vision_cuda_graph_modules vision_cuda_graph_scope
"""
REAL_NEIGHBOURS = frozenset(_NEIGHBOURS.split())
"""Names of Megatron that look like one of the settings above, and are no slips of the pen."""


# Values of settings: each of its kind, however a configuration writes it.


GRAPH_SCOPES = ("", "full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
"""Parts that CUDA graphs hold, by their numbers in Megatron Core 0.16's `CudaGraphScope`, which is what YAML has."""


def _integer(value: Any, least: int | None = None) -> int:
    if isinstance(value, bool):
        raise TypeError
    number = operator.index(value)
    if least is not None and number < least:
        raise TypeError
    return number


def _flag(value: Any) -> bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise TypeError


def _text(value: Any) -> str:
    word = _word(value)
    if word is None:
        raise TypeError
    return word


def _word(value: Any) -> str | None:
    """Return a name, an enumeration's member by its own; None for anything else."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping) and "_target_" in value:
        arguments = value.get("_args_")
        if isinstance(arguments, Sequence) and len(arguments) == 1:
            (number,) = arguments
            if isinstance(number, int) and 0 < number < len(GRAPH_SCOPES):
                return GRAPH_SCOPES[number]
            return number if isinstance(number, str) else None
        return None
    return value if isinstance(value, str) else None


def _words(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, (Sequence, Set)) and not isinstance(value, bytes):
        return tuple(_text(part).rsplit(".", 1)[-1] for part in value)
    return (_text(value),)


def _one_or_each(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(_text(part) for part in value)
    return _text(value)


def _sizes(value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes, Mapping)):
        raise TypeError
    return tuple(_integer(part, 1) for part in value)


def _number(value: Any) -> float:
    # One for each kind of balancing loss; any of them counts.
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return max((_number(part) for part in value), default=0.0)
    if isinstance(value, (bool, str)):
        raise TypeError
    return float(value)


def _path(value: Any) -> str:
    path = os.fspath(value)
    if not isinstance(path, str):
        raise TypeError
    return path


KINDS: dict[Kind, tuple[str, Callable[[Any], Any]]] = {
    "size": ("a whole number of 1 or more", lambda value: _integer(value, 1)),
    "count": ("a whole number of 0 or more", lambda value: _integer(value, 0)),
    "integer": ("a whole number", _integer),
    "flag": ("true or false", _flag),
    "text": ("a name", _text),
    "sizes": ("a list of whole numbers of 1 or more", _sizes),
    "words": ("a name, or a list of names", _words),
    "one or each": ("a name, or a list of names", _one_or_each),
    "number": ("a number", _number),
    "path": ("a path", _path),
}
"""What is expected of a value of each kind, and what reads it."""
