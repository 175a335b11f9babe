"""Every causal family of the installed transformers as a tiny model: the same layers, a few thousand weights.

Windows, chunks and selections are made narrower than the documents of a check, so that they matter in it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from varlen.errors import ModelError
from varlen.verify.models.trial import named

VOCABULARY = 97
POSITIONS = 256
WINDOW = 6
_LARGEST = 3_000_000
"""Weights; a model with more wasn't made small, and would take the time of all others."""

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size", "out_hidden_size"), 32),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "decoder_layers",
            "encoder_layers",
            "depth",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "decoder_attention_heads",
            "encoder_attention_heads",
            "swa_num_attention_heads",
            "linear_num_value_heads",
        ),
        4,
    ),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "dim_head", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("v_head_dim", "index_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(
        (
            "intermediate_size",
            "n_inner",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "ffn_hidden_size",
            "dim_ff",
            "dff",
        ),
        64,
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "zero_expert_num"), 2),
    **dict.fromkeys(
        ("num_shared_experts", "n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1
    ),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(
        ("mamba_n_heads", "mamba_num_heads", "mamba_d_head", "mamba_head_dim", "mamba_d_state"), 8
    ),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size", "window_size"), WINDOW),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), POSITIONS),
    **dict.fromkeys(("hidden_size_per_layer_input", "index_topk"), 8),
    "index_n_heads": 32,  # fewer give many tokens the same score, and which of them is selected is left to chance
    "mamba_chunk_size": 16,
    "rotary_dim": 4,
    "image_size": 28,
    "is_decoder": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes by the names that configurations have for them."""

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_LAYER_LISTS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")
"""What says of each layer which kind it is."""
_BOTH = ["linear_attention", "linear_attention", "hybrid"]
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 100, "vocab_size": 260},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "o_groups": 2,
        "o_lora_rank": 8,
    },
    "dots3_note_text": {"num_key_value_heads": 4, "head_dim": 16, "per_layer_config": {}},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"], "per_layer_config": {}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "kimi_linear": {
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_experts_per_token": 2,
        "num_expert_group": 1,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "mamba_dt_rank": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "n_groups": 1, "chunk_size": 16, "state_size": 8},
    "minicpm3": {"num_key_value_heads": 4},
    "minimax_m3_vl_text": {"index_block_size": 4, "index_topk_blocks": 2, "index_head_dim": 8},
    "reformer": {
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [16, 16],
        "attention_head_size": 8,
        "feed_forward_size": 64,
        "attn_layers": ["local", "lsh"],
    },
    "roc_bert": {"pronunciation_embed_dim": 8, "shape_embed_dim": 8, "shape_vocab_size": 20},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 1,
    },
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 6,
        "layers_block_type": _BOTH * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        "num_hidden_layers": 6,
        "layers_block_type": _BOTH * 2,
        "num_key_value_heads": 4,
        "mamba_headdim": 8,
        "chunk_size": 16,
        "adapter_rank": 4,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 8},
}
"""What single families need besides, mostly because their layers must fit together."""


def families() -> tuple[str, ...]:
    """Return the names of all causal families of the installed transformers, in their order."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str) -> Any:
    """Return the configuration of a family's smallest model with layers of all its kinds."""
    from transformers import CONFIG_MAPPING

    if family not in CONFIG_MAPPING:
        raise ModelError(
            f"the installed transformers knows no model type {family!r}; it has such as llama, qwen3, mixtral"
        )
    kind = CONFIG_MAPPING[family]
    try:
        return kind(**_arguments(kind))
    except Exception as error:
        raise ModelError(f"no tiny configuration of {family}: {named(error, 200)}") from error


def tiny_model(
    family: str, *, dtype: torch.dtype = torch.float32, attention: str = "eager", seed: int = 0
) -> Any:
    """Return a family's tiny model, its random weights large enough that every visible token matters."""
    from transformers import AutoModelForCausalLM

    kind: Any = AutoModelForCausalLM
    config = tiny_config(family)
    try:
        with torch.device("meta"):
            size = sum(weight.numel() for weight in kind.from_config(config).parameters())
    except Exception as error:
        raise ModelError(f"no tiny model of {family}: {named(error, 200)}") from error
    if size > _LARGEST:
        raise ModelError(
            f"the smallest model of {family} that was found has {size:,} weights, above {_LARGEST:,}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            # Experts one by one: their grouped kernels know no float64, and round by what else is in a group.
            model = kind.from_config(config, attn_implementation=attention, experts_implementation="eager")
        except Exception as error:
            raise ModelError(f"no tiny model of {family}: {named(error, 200)}") from error
        _enlarge(model)
    return model.to(dtype).eval()


def _enlarge(model: Any) -> None:
    """Draw matrices anew, wider than a model is begun with, whose tokens would hardly matter to each other."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1 and weight.is_floating_point():
                weight.normal_(0, 0.2)


def _arguments(kind: Any) -> dict[str, Any]:
    """Return what a configuration class is made with, and the configurations within it."""
    named = _named(kind)
    found = {name: size for name, size in _SIZES.items() if name in named}
    if "kv_lora_rank" in named and "num_key_value_heads" in named:
        found["num_key_value_heads"] = found["num_attention_heads"]  # latent attention shares no heads
    found |= _kinds(kind, named)
    found |= _OF_FAMILY.get(kind.model_type, {})
    parts = {name: part for name, part in (getattr(kind, "sub_configs", None) or {}).items() if name in named}
    for name, part in parts.items():
        found[name] = _part(kind, name, part)
    if "text_config" in parts:
        found = {name: value for name, value in found.items() if name in parts or name in _OF_FAMILY}
    return {name: value for name, value in found.items() if value is not None}


def _kinds(kind: Any, named: set[str]) -> dict[str, Any]:
    """Return lists with a layer of each kind that the family's usual model has, and how many layers that makes."""
    try:
        usual = kind()
    except Exception:  # some have no usual model
        return {}
    lists = {name: getattr(usual, name, None) for name in _LAYER_LISTS if name in named}
    each = {
        name: list(dict.fromkeys(kinds)) for name, kinds in lists.items() if isinstance(kinds, list) and kinds
    }
    if not each:
        return {}
    count = max(2, *map(len, each.values()))
    counts = {name: count for name in _LAYER_COUNTS if name in named}
    return counts | {name: (kinds * count)[:count] for name, kinds in each.items()}


def _part(kind: Any, name: str, part: Any) -> dict[str, Any] | None:
    """Return a configuration within another, as a mapping; None where it has none."""
    if part.__name__ == "AutoConfig":
        usual = getattr(kind(), name, None)
        if usual is None:
            return None
        return {"model_type": usual.model_type, **_arguments(type(usual))}
    return _arguments(part)


def _named(kind: Any) -> set[str]:
    """Return the settings that a configuration class takes."""
    found: set[str] = set()
    for each in kind.__mro__[:-1]:
        found |= set(vars(each).get("__annotations__", {}))
        if "__init__" in vars(each):
            found |= set(inspect.signature(each.__init__).parameters)
    return found
