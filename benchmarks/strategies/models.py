"""The models that strategies are compared on: a Llama, a Mixtral (routed experts) and a Gemma 3 (sliding windows).

All are tiny, with weights drawn from a seed. Gemma 3 stands for its family because SDPA computes it exactly; the soft
cap of Gemma 2 would force the padded runs onto eager attention.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from benchmarks.strategies.sets import VOCABULARY
from varlen.adapters import hf
from varlen.train.settings import OptimizerSettings

FAMILIES = ("llama", "mixtral", "gemma3")
HIDDEN = 64
LAYERS = 2
HEADS = 2
WINDOW = 128
"""Tokens that a token of Gemma's first layer sees."""
EXPERTS = 4
LORA_RANK = 8
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16_384,
    "tie_word_embeddings": True,
    "use_cache": False,
}


def build(family: str, seed: int, attention: str) -> Any:
    """Build a model.

    Equal seeds give equal weights whatever the attention: transformers' name of it, or "varlen".
    """
    hf.register()
    torch.manual_seed(seed)
    model: Any
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**_COMMON, intermediate_size=168))
    elif family == "mixtral":
        model = MixtralForCausalLM(
            MixtralConfig(
                **_COMMON, intermediate_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=2
            )
        )
    else:
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(
                **_COMMON,
                intermediate_size=168,
                head_dim=HIDDEN // HEADS,
                sliding_window=WINDOW,
                layer_types=["sliding_attention", "full_attention"],
            )
        )
    model.set_attn_implementation(attention)
    return model


def with_lora(model: Any, seed: int) -> Any:
    """Return a model whose weights are frozen, with adapters at every projection, which alone are trained."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules=names))


def bare(model: Any) -> Any:
    """Return the causal model inside adapters, whose head and layers are called apart from each other."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def make_optimizer(model: torch.nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Return AdamW without decay, which every strategy trains with."""
    settings = OptimizerSettings(learning_rate=learning_rate)
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=betas, eps=settings.epsilon, weight_decay=0.0
    )
