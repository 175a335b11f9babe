"""Facts about transformers' model families, by `config.model_type`: one row each, shared by all rooms.

Everything else is read from a model's config, its modules and its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Sliced:
    """A family's operations around its layers, as names of the decoder's modules and of its config's fields."""

    embedding: str = "embed_tokens"
    norm: str = "norm"  # after the last layer
    # Whether all layers share rotary positions, or there is one set per entry of `config.layer_types` (Gemma 3).
    rotary: Literal["shared", "by_layer_type"] = "shared"
    embedding_factor: str = ""  # field that multiplies embeddings outside of their module (Granite)
    logit_factor: str = ""  # field that multiplies logits (Cohere)
    logit_divisor: str = ""  # field that divides logits (Granite)
    # Field with c, where logits z become `c * tanh(z / c)` (Gemma 2); may be None in a config.
    logit_cap: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One row; the defaults apply to families without one."""

    sliced: Sliced | None = None  # how it runs in slices; None where tokens may mix outside of its attention
    # Whether some layers pass a state, or the last few tokens, from token to token.
    is_recurrent: bool = False
    has_own_attention: bool = False  # computes its own scores, or ignores its layer's parameters
    # Arguments for recurrent and convolution kernels: `seq_idx`, the segment number of every token ("numbers"), or
    # that for convolutions and `cu_seqlens` for the recurrence, of a single row ("ends"). Determined by running each
    # family with stand-ins for its kernels (`varlen.verify.models.backends`), which the tests repeat; where the
    # kernels' packages aren't installed, transformers itself rejects boundaries.
    boundaries: Literal["", "numbers", "ends"] = ""
    takes_flat_masks: bool = False  # whether its code accepts only padding masks, and fails with a 4-D mask
    # For families whose only positions are distances between tokens (ALiBi), the same wherever a document stands in
    # its row: the setting that bounds a row's width.
    widest: str = ""
    is_gated: bool = True  # whether its feed-forward part has three matrices instead of two
    is_four_times: bool = False  # whether its inner width defaults to four times the hidden size


PLAIN = Sliced()
GEMMA_2 = Sliced(logit_cap="final_logit_softcapping")
GEMMA_3 = Sliced(logit_cap="final_logit_softcapping", rotary="by_layer_type")
GRANITE = Sliced(embedding_factor="embedding_multiplier", logit_divisor="logits_scaling")
LLAMA_LIKE, RECURRENT = Family(sliced=PLAIN), Family(is_recurrent=True)

# Those that run in slices are tested against their unsliced models.
FAMILIES: dict[str, Family] = {
    "apertus": LLAMA_LIKE,
    "arcee": LLAMA_LIKE,
    "bailing_hybrid": RECURRENT,
    "bamba": Family(is_recurrent=True, boundaries="numbers"),
    "bloom": Family(has_own_attention=True, is_gated=False, is_four_times=True),
    "codegen": Family(has_own_attention=True, is_gated=False, is_four_times=True),
    "cohere": Family(sliced=Sliced(logit_factor="logit_scale")),
    "cohere2": Family(sliced=Sliced(logit_factor="logit_scale")),
    "cwm": LLAMA_LIKE,
    "deepseek_v3": LLAMA_LIKE,
    "dots1": LLAMA_LIKE,
    "ernie4_5": LLAMA_LIKE,
    "esm": Family(takes_flat_masks=True),
    "exaone4": LLAMA_LIKE,
    "falcon": Family(has_own_attention=True, is_gated=False, is_four_times=True),
    "falcon_h1": Family(is_recurrent=True, boundaries="numbers"),
    "falcon_mamba": RECURRENT,
    "flaubert": Family(takes_flat_masks=True),
    "flex_olmo": LLAMA_LIKE,
    "gemma": LLAMA_LIKE,
    "gemma2": Family(sliced=GEMMA_2),
    "gemma3_text": Family(sliced=GEMMA_3),
    "glm": LLAMA_LIKE,
    "glm4": LLAMA_LIKE,
    "glm4_moe": LLAMA_LIKE,
    "gpt2": Family(is_gated=False, is_four_times=True),
    "gpt_bigcode": Family(is_gated=False, is_four_times=True),
    "gpt_neo": Family(has_own_attention=True, is_gated=False, is_four_times=True),
    "gpt_neox": Family(sliced=Sliced(embedding="embed_in", norm="final_layer_norm"), is_gated=False),
    "gpt_neox_japanese": Family(has_own_attention=True),
    "gpt_oss": LLAMA_LIKE,
    "gptj": Family(has_own_attention=True, is_gated=False, is_four_times=True),
    "granite": Family(sliced=GRANITE),
    "granitemoe": Family(sliced=GRANITE),
    "granitemoehybrid": Family(is_recurrent=True, boundaries="numbers"),
    "helium": LLAMA_LIKE,
    "hunyuan_v1_dense": LLAMA_LIKE,
    "jamba": RECURRENT,
    "kimi_linear": RECURRENT,
    "lfm2": Family(is_recurrent=True, boundaries="numbers"),
    "lfm2_moe": Family(is_recurrent=True, boundaries="numbers"),
    "lfm3": RECURRENT,
    "llama": LLAMA_LIKE,
    "mamba": RECURRENT,
    "mamba2": RECURRENT,
    "minimax": RECURRENT,
    "ministral": LLAMA_LIKE,
    "mistral": LLAMA_LIKE,
    "mixtral": LLAMA_LIKE,
    "mpt": Family(has_own_attention=True, widest="max_seq_len", is_gated=False, is_four_times=True),
    "nemotron": Family(has_own_attention=True, is_gated=False),
    "nemotron_h": Family(is_recurrent=True, boundaries="numbers"),
    "olmo": LLAMA_LIKE,
    "olmo2": LLAMA_LIKE,
    "olmo3": Family(sliced=Sliced(rotary="by_layer_type")),
    "olmo_hybrid": Family(is_recurrent=True, boundaries="ends"),
    "olmoe": LLAMA_LIKE,
    "openai-gpt": Family(takes_flat_masks=True),
    "opt": Family(is_gated=False),
    "persimmon": Family(sliced=Sliced(norm="final_layernorm")),
    "phi": Family(sliced=Sliced(norm="final_layernorm"), is_gated=False),
    "phi3": LLAMA_LIKE,
    "qwen2": LLAMA_LIKE,
    "qwen2_moe": LLAMA_LIKE,
    "qwen3": LLAMA_LIKE,
    "qwen3_5": RECURRENT,
    "qwen3_5_moe": RECURRENT,
    "qwen3_5_moe_text": Family(is_recurrent=True, boundaries="ends"),
    "qwen3_5_text": Family(is_recurrent=True, boundaries="ends"),
    "qwen3_moe": LLAMA_LIKE,
    "qwen3_next": Family(is_recurrent=True, boundaries="ends"),
    "qwen4_exp_text": Family(is_recurrent=True, boundaries="ends"),
    "recurrent_gemma": RECURRENT,
    "reformer": Family(takes_flat_masks=True),
    "rwkv": RECURRENT,
    "seed_oss": LLAMA_LIKE,
    "smollm3": LLAMA_LIKE,
    "stablelm": Family(has_own_attention=True),
    "starcoder2": Family(sliced=PLAIN, is_gated=False),
    "vaultgemma": Family(sliced=GEMMA_2),
    "xglm": Family(has_own_attention=True),
    "xlm": Family(takes_flat_masks=True),
    "xlstm": RECURRENT,
    "youtu": LLAMA_LIKE,
    "zamba": RECURRENT,
    "zamba2": Family(is_recurrent=True, boundaries="numbers"),
    "zaya": RECURRENT,
}
UNKNOWN = Family()
