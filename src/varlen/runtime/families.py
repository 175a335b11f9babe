"""The families of transformers models that run in slices: what each does around its layers, and who is refused, why.

Inside its layers a family does what it likes, its own modules run; what a step needs to know is how ids become what
goes into the first layer, which rotary positions a layer is told, and what is done to what the head gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from varlen.errors import ModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What a family does around its layers, as names of the decoder's modules and of its config's fields."""

    embedding: str = "embed_tokens"
    norm: str = "norm"
    """After the last layer."""
    rotary: Literal["shared", "by_layer_type"] = "shared"
    """Whether all layers get the same rotary positions, or one per entry of `config.layer_types` (Gemma 3)."""
    embedding_factor: str = ""
    """Field by which embeddings are multiplied outside of their module (Granite)."""
    logit_factor: str = ""
    """Field by which logits are multiplied (Cohere)."""
    logit_divisor: str = ""
    """Field by which logits are divided (Granite)."""
    logit_cap: str = ""
    """Field of c where logits z become `c * tanh(z / c)` (Gemma 2); may be None in a config."""


PLAIN = Family()
GEMMA_2 = Family(logit_cap="final_logit_softcapping")
GEMMA_3 = Family(logit_cap="final_logit_softcapping", rotary="by_layer_type")
GRANITE = Family(embedding_factor="embedding_multiplier", logit_divisor="logits_scaling")

FAMILIES: dict[str, Family] = {
    "apertus": PLAIN,
    "arcee": PLAIN,
    "cohere": Family(logit_factor="logit_scale"),
    "cohere2": Family(logit_factor="logit_scale"),
    "cwm": PLAIN,
    "deepseek_v3": PLAIN,
    "dots1": PLAIN,
    "ernie4_5": PLAIN,
    "exaone4": PLAIN,
    "flex_olmo": PLAIN,
    "gemma": PLAIN,
    "gemma2": GEMMA_2,
    "gemma3_text": GEMMA_3,
    "glm": PLAIN,
    "glm4": PLAIN,
    "glm4_moe": PLAIN,
    "gpt_neox": Family(embedding="embed_in", norm="final_layer_norm"),
    "gpt_oss": PLAIN,
    "granite": GRANITE,
    "granitemoe": GRANITE,
    "helium": PLAIN,
    "hunyuan_v1_dense": PLAIN,
    "llama": PLAIN,
    "ministral": PLAIN,
    "mistral": PLAIN,
    "mixtral": PLAIN,
    "olmo": PLAIN,
    "olmo2": PLAIN,
    "olmo3": Family(rotary="by_layer_type"),
    "olmoe": PLAIN,
    "persimmon": Family(norm="final_layernorm"),
    "phi": Family(norm="final_layernorm"),
    "phi3": PLAIN,
    "qwen2": PLAIN,
    "qwen2_moe": PLAIN,
    "qwen3": PLAIN,
    "qwen3_moe": PLAIN,
    "seed_oss": PLAIN,
    "smollm3": PLAIN,
    "starcoder2": PLAIN,
    "vaultgemma": GEMMA_2,
    "youtu": PLAIN,
}
"""Families that run in slices, by `config.model_type`; each is tested against its uncut model."""

RECURRENT = (
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2",
    "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya",
)  # fmt: skip
"""Families some of whose layers hand a state, or the last few tokens, from token to token."""
OWN_ATTENTION = (
    "bloom", "codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "mpt", "nemotron", "stablelm", "xglm",
)  # fmt: skip
"""Families whose attention computes its own scores, or isn't handed what its layer is."""


def family_of(model: Any) -> tuple[str, Family]:
    """Return what a model's family does around its layers, and its name."""
    name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if name in FAMILIES:
        return name, FAMILIES[name]
    if name in RECURRENT:
        raise ModelError(
            f"slices don't run {name} models: some of their layers hand a state on from token to token, and a slice "
            'keeps keys and values alone; train them unsliced, or cut their documents with overlong="split"'
        )
    if name in OWN_ATTENTION:
        raise ModelError(
            f"slices don't run {name} models: their attention computes its own scores, or their layers don't hand it "
            "what they are told, so no function of transformers' registry can take its place; train them unsliced"
        )
    raise ModelError(
        f"slices don't run {name} models, which aren't known to mix tokens in their attention alone; they run "
        f"{', '.join(FAMILIES)}"
    )


def check_settings(name: str, model: Any) -> None:
    """Refuse settings of a model under which slices would learn something else than the whole model does."""
    config = model.config
    if getattr(config, "use_bidirectional_attention", False):
        raise ModelError(
            f"this {name} model attends to later tokens (use_bidirectional_attention=True), which no slice has; "
            "set it to False in the config"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}
    if "dynamic" in kinds:
        raise ModelError(
            f'this {name} model\'s rotary positions depend on the longest text it has seen (rope_type="dynamic"); '
            'train with "yarn", "linear" or "longrope", which don\'t'
        )
    if model.training:
        _check_noise(name, model)
        _check_balance(name, config)


def rope_by_length(config: Any) -> bool:
    """Return whether rotary positions depend on how long a document is in all (`rope_type="longrope"`)."""
    rope = getattr(config, "rope_parameters", None) or {}
    return any(
        each.get("rope_type") == "longrope" for each in (rope, *rope.values()) if isinstance(each, dict)
    )


def _check_noise(name: str, model: nn.Module) -> None:
    """Refuse dropout and jitter, which would differ between a slice's forward and its recomputation."""
    found = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            found.append(f"{path}.p={module.p:g}")
        for word, value in vars(module).items():
            noisy = "dropout" in word or "jitter" in word
            if noisy and isinstance(value, float) and value > 0:
                found.append(f"{path}.{word}={value:g}")
    if found:
        raise ModelError(
            f"this {name} model draws random numbers as it trains ({found[0]}; {len(found):,} such settings in all), "
            "and a slice computed again would draw others. Set its dropout and jitter to 0 in the config, or call "
            "model.eval(), in which it draws none"
        )


def _check_balance(name: str, config: Any) -> None:
    """Refuse a loss that balances experts: it is of all tokens of a batch together, and no sum over slices."""
    weight = getattr(config, "router_aux_loss_coef", 0.0) or 0.0
    if getattr(config, "output_router_logits", False) and weight:
        raise ModelError(
            f"this {name} model adds a loss that balances its experts (output_router_logits=True, "
            f"router_aux_loss_coef={weight:g}), which is of all tokens of a batch together and isn't computed in "
            "slices; set output_router_logits=False in the config"
        )
