"""Tiny models of every family that slices run."""

from typing import Any

import torch
import transformers
from tests.support.sliced import SIZES, tiny
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "experts_implementation": "eager",
}

GROUPED_EXPERTS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
BOTH = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
}


SCALED = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0},
    **{
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 7,
        "llama_4_scaling_beta": 0.4,
    },
}
"""Queries that grow with their positions, from the 7th on."""

SETTINGS: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3, **BOTH},
    "cwm": BOTH,
    "deepseek_v3": {
        **LATENT,
        **GROUPED_EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "experts_implementation": "eager",
    },
    "dots1": {**EXPERTS, **BOTH, **GROUPED_EXPERTS, "n_shared_experts": 1},
    "exaone4": BOTH,
    "flex_olmo": EXPERTS,
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "attn_logit_softcapping": 0.7, "final_logit_softcapping": 0.9, **BOTH},
    "gemma3_text": {"head_dim": 8, "final_logit_softcapping": 0.9, **BOTH},
    "gemma4_text": {
        **{"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        **{"hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
        **{"moe_intermediate_size": 24, "final_logit_softcapping": 0.9, "experts_implementation": "eager"},
        **BOTH,
    },
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "glm4_moe": {**EXPERTS, **GROUPED_EXPERTS, "head_dim": 8},
    "glm4_moe_lite": {**LATENT, **EXPERTS, **GROUPED_EXPERTS, "mlp_layer_types": ["dense", "sparse"]},
    "gpt_neox": {"num_key_value_heads": 4},
    "gpt_oss": {**LOCAL_EXPERTS, **BOTH, "head_dim": 8},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 0.7,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "granitemoe": {**LOCAL_EXPERTS, "embedding_multiplier": 3.0, "logits_scaling": 0.7},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "llama4_text": {
        **{
            "head_dim": 8,
            "attention_chunk_size": 8,
            "intermediate_size_mlp": 24,
            "interleave_moe_layer_step": 2,
        },
        **{
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "floor_scale": 3,
        },
        **LOCAL_EXPERTS,
    },
    "minimax_m2": {**LOCAL_EXPERTS, "head_dim": 8},
    "ministral": {"head_dim": 8, **BOTH},
    "ministral3": {"head_dim": 8, "sliding_window": 9, "rope_parameters": SCALED},
    "mistral": {"sliding_window": 9},
    "mistral4": {**LATENT, **EXPERTS, **GROUPED_EXPERTS, "rope_parameters": SCALED},
    "mixtral": {**LOCAL_EXPERTS, "sliding_window": 7},
    "olmo3": BOTH,
    "olmoe": EXPERTS,
    "phi3": {"sliding_window": 6},
    "qwen2": {"use_sliding_window": True, **BOTH},
    "qwen2_moe": EXPERTS,
    "qwen3": {"head_dim": 16},
    "qwen3_moe": EXPERTS,
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0, "head_dim": 8},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": {"sliding_window": 7},
    "vaultgemma": {"head_dim": 8, "attn_logit_softcapping": 0.7, "final_logit_softcapping": 0.9, **BOTH},
    "youtu": LATENT,
}
"""What makes a tiny model of each family use all that sets it apart."""

FAMILIES = (
    *(
        "apertus",
        "arcee",
        "cohere",
        "cohere2",
        "cwm",
        "deepseek_v3",
        "dots1",
        "ernie4_5",
        "exaone4",
        "flex_olmo",
    ),
    *(
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "glm4_moe",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "granitemoe",
    ),
    *(
        "helium",
        "hunyuan_v1_dense",
        "llama",
        "ministral",
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
    ),
    *(
        "persimmon",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "starcoder2",
    ),
    *("vaultgemma", "youtu"),
    *("gemma4_text", "glm4_moe_lite", "llama4_text", "minimax_m2", "ministral3", "mistral4"),
)
"""Families that are held to their uncut models; others are admitted by the same look and probe."""


class Wide(TorchFunctionMode):
    """What a float64 model computes in float32, norms and positions among it, it computes in float64 here.

    Else its rounding, and not how it is cut, is what a test would see.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        wide = [torch.float64 if x is torch.float32 else x for x in args]
        named = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return function(*wide, **named)


def family(name: str, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    """A tiny model with random weights in all its parameters.

    None is narrower than asked for: from transformers 5.24 on, some routers are in float32 in any model.
    """
    model = tiny(name, dtype, **{**SETTINGS.get(name, {}), **more})
    made = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.to(torch.promote_types(parameter.dtype, dtype))
            parameter += 0.2 * torch.randn(parameter.shape, generator=made, dtype=torch.float64).to(dtype)
    return model


def by_scores(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as papers write it, with transformers' own mask: windows and causality are the model's word."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + attention_mask[..., : scores.shape[-1]]
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2), None


AttentionInterface.register("by_scores", by_scores)
AttentionMaskInterface.register("by_scores", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
TOWER = {
    **{
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "depth": 1,
    },
    **{"image_size": 16, "patch_size": 8, "num_heads": 2},
}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
VISION: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3ForConditionalGeneration", SETTINGS["gemma3_text"], TOWER),
    "llama4": ("Llama4ForConditionalGeneration", SETTINGS["llama4_text"], TOWER),
    "mistral3": ("Mistral3ForConditionalGeneration", {"head_dim": 8}, TOWER),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", {"rope_parameters": SECTIONS}, TOWER),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {"head_dim": 8, "rope_parameters": SECTIONS},
        {**TOWER, "deepstack_visual_indexes": [0]},
    ),
}
"""By family with a vision tower: its class, and settings of its text and of its tower."""


FAILING = {"llama4"} if transformers.__version__ == "5.24.0" else set[str]()
"""Of these, transformers' class with a vision tower fails in its own forward, whatever it is given."""


def with_vision(name: str) -> Any:
    """A tiny model with a vision tower and random weights, none of which learn outside of its language model."""
    kind, text, tower = VISION[name]
    given = {"text_config": {**SIZES, **text}, "vision_config": tower}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(name, **given, experts_implementation="eager")
        model = getattr(transformers, kind)._from_config(config, dtype=torch.float64).train()
        for path, parameter in model.named_parameters():
            parameter.requires_grad_("language_model" in path or "lm_head" in path)
            parameter.data += 0.2 * torch.randn(parameter.shape, dtype=torch.float64)
    return model
