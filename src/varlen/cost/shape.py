"""`ModelShape`: the sizes of a decoder, from which FLOPs and bytes follow; and its division into pipeline stages."""

from __future__ import annotations

import difflib
import functools
import heapq
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from varlen.errors import ModelError, SettingError
from varlen.model_families import FAMILIES, UNKNOWN
from varlen.step_plan import Mesh, Recompute
from varlen.types import FloatArray, Int32Array

_LEAST_ONE = ("hidden", "layers", "heads", "vocab")
_MAY_BE_NONE = ("name", "max_positions")


def _words(name: str) -> list[str]:
    """Split a name into letters and numbers: llama, 3, 8 and b of llama-3-8b."""
    return re.findall(r"[a-z]+|[0-9.]+", name)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder's shape: grouped or latent attention, dense or mixture-of-experts layers, windows, the head.

    Layers that differ are averaged: the planner moves whole layers between stages and treats them alike. Experts are
    divided among tensor-parallel GPUs like every other column, and run at the rate of all rows of a MicroPack; expert
    parallelism over data-parallel ranks, its all-to-all and uneven routing are not modelled. Latents are expanded
    once per token, not again for each later slice. Multi-token prediction is not counted.
    """

    name: str = ""
    hidden: int
    layers: int
    heads: int
    """Query heads."""
    vocab: int
    ffn: int = 0
    """Inner width of a dense layer; may be 0 if every layer has experts."""
    kv_heads: int = 0
    """Heads of keys and values; 0 means `heads`. Latent attention expands its latents to all heads."""
    head_dim: int = 0
    """Dimensions of queries and keys; 0 means `hidden / heads`."""
    value_head_dim: int = 0
    """0 means `head_dim`."""
    gated: bool = True
    """Whether a layer has three matrices of width `ffn` (SwiGLU), or two."""
    latent_rank: int = 0
    """Width of the latent of keys and values (MLA; DeepSeek-AI 2024, arXiv 2405.04434); 0 without latents."""
    latent_rope_dim: int = 0
    """Dimensions of the rotated key that all heads share; part of `head_dim`."""
    query_rank: int = 0
    """Width of the latent of queries; 0 if they come from the hidden state."""
    experts: int = 0
    """Routed experts of a layer; 0 for a dense model."""
    experts_per_token: int = 0
    expert_ffn: int = 0
    """Inner width of one expert."""
    shared_ffn: int = 0
    """Total inner width of the experts that process every token."""
    dense_layers: int = 0
    """Layers without experts in a model with experts."""
    window: int = 0
    """Keys that a query of a windowed layer attends to, itself included."""
    windowed_layers: int = 0
    max_positions: int | None = None
    """The longest document; None for any."""
    tied: bool = False
    """Whether embedding and head are one matrix."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool | str) or (value is None and field.name in _MAY_BE_NONE):
                continue
            least = 1 if field.name in (*_LEAST_ONE, "max_positions") else 0
            if not isinstance(value, int) or value < least:
                raise SettingError(
                    f"model {field.name}={value!r}; it must be a whole number of at least {least}"
                )
        for name, value in (("kv_heads", self.heads), ("head_dim", self.hidden // self.heads)):
            if getattr(self, name) == 0:
                object.__setattr__(self, name, value)
        if self.value_head_dim == 0:
            object.__setattr__(self, "value_head_dim", self.head_dim)
        self._check()

    def _check(self) -> None:
        """Refuse numbers that contradict each other."""
        if self.heads % self.kv_heads:
            raise SettingError(
                f"{self.heads} query heads can't share {self.kv_heads} key heads; kv_heads must divide heads"
            )
        if self.windowed_layers > self.layers or self.dense_layers > self.layers:
            raise SettingError(
                f"windowed_layers={self.windowed_layers} and dense_layers={self.dense_layers}: "
                f"the model has {self.layers} layers"
            )
        if self.windowed_layers and not self.window:
            raise SettingError(f"windowed_layers={self.windowed_layers} but window is 0; give the window")
        if self.experts and not (self.expert_ffn and 0 < self.experts_per_token <= self.experts):
            raise SettingError(
                f"experts={self.experts} need expert_ffn (got {self.expert_ffn}) and "
                f"experts_per_token from 1 to {self.experts} (got {self.experts_per_token})"
            )
        if not self.ffn and self.num_dense_layers:
            raise SettingError(
                f"ffn is 0, but {self.num_dense_layers} layers are dense; give their inner width"
            )

    @classmethod
    def named(cls, name: str) -> ModelShape:
        """Return a known shape without a limit of positions; `published_positions` has that of its checkpoint.

        Args:
            name: such as "llama-3-8b"; upper case and underscores are accepted.

        Raises:
            SettingError: an unknown name; the nearest ones are named.

        >>> ModelShape.named("llama-3-8b").kv_bytes_per_token_layer * 32 // 1024
        128
        """
        key = str(name).lower().replace("_", "-")
        if key not in SHAPES:
            # Names with the same first words come first: llama3 means llama-3-8b rather than llama-30b.
            words = _words(key)
            prefixed = [known for known in SHAPES if words and _words(known)[: len(words)] == words]
            similar = difflib.get_close_matches(key, SHAPES, n=3, cutoff=0.5)
            near = list(dict.fromkeys([*prefixed, *similar]))[:3] or sorted(SHAPES)
            raise SettingError(f"no model is called {name!r}; nearest: {', '.join(near)}")
        return cls(name=key, **SHAPES[key])

    @classmethod
    def from_config(cls, config_like: Any, *, name: str = "") -> ModelShape:
        """Read a shape from a transformers configuration.

        Args:
            config_like: the object, or its mapping (`config.json`); of a multimodal model, its text part is read.
            name: the shape's name; by default the model type.

        Raises:
            SettingError: the configuration lacks settings, which the message names.
        """
        settings: Mapping[str, Any] = shape_settings(config_like)
        return cls(**{**settings, "name": name or settings["name"]})

    @property
    def published_positions(self) -> int | None:
        """Positions of the published checkpoint of a known shape; None for another name.

        >>> ModelShape.named("llama-3-8b").published_positions
        8192
        """
        return POSITIONS.get(self.name)

    @property
    def num_dense_layers(self) -> int:
        """Layers without experts."""
        return self.dense_layers if self.experts else self.layers

    @property
    def active_ffn(self) -> float:
        """Inner width that a token uses in an average layer."""
        routed = self.experts_per_token * self.expert_ffn + self.shared_ffn
        dense = self.num_dense_layers
        return (dense * self.ffn + (self.layers - dense) * routed) / self.layers

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's projections."""
        out = self.heads * self.value_head_dim * self.hidden
        if not self.latent_rank:
            keys_and_values = self.kv_heads * (self.head_dim + self.value_head_dim)
            return self.hidden * (self.heads * self.head_dim + keys_and_values) + out
        unrotated = self.head_dim - self.latent_rope_dim
        down = self.hidden * (self.latent_rank + self.latent_rope_dim)
        up = self.latent_rank * self.heads * (unrotated + self.value_head_dim)
        queries = self.heads * self.head_dim
        into = self.query_rank * (self.hidden + queries) if self.query_rank else self.hidden * queries
        return into + down + up + out

    @property
    def linear_parameters_per_layer(self) -> float:
        """Parameters that a token is multiplied with in an average layer; FLOPs are twice that."""
        router = self.hidden * self.experts * (1 - self.num_dense_layers / self.layers)
        return self.attention_parameters + self._matrices * self.hidden * self.active_ffn + router

    @property
    def parameters_per_layer(self) -> float:
        """Parameters of an average layer, all experts and both norms."""
        sparse = self.layers - self.num_dense_layers
        idle = self._matrices * self.hidden * self.expert_ffn * (self.experts - self.experts_per_token)
        return self.linear_parameters_per_layer + idle * sparse / self.layers + 2 * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the vocabulary head; of the embedding too."""
        return self.hidden * self.vocab

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model."""
        ends = self.head_parameters * (1 if self.tied else 2) + self.hidden
        return round(self.parameters_per_layer * self.layers) + ends

    @property
    def num_active_parameters(self) -> int:
        """Parameters that a token is multiplied with: the layers' and the head's."""
        return round(self.linear_parameters_per_layer * self.layers) + self.head_parameters

    @property
    def kv_bytes_per_token_layer(self) -> int:
        """Bytes of a token in one layer that later slices need: keys and values, or their latents."""
        if self.latent_rank:
            return 2 * (self.latent_rank + self.latent_rope_dim)
        return 2 * self.kv_heads * (self.head_dim + self.value_head_dim)

    @property
    def windowed_share(self) -> float:
        """Share of layers with a window."""
        return self.windowed_layers / self.layers

    @property
    def _matrices(self) -> int:
        """Matrices of one feed-forward part."""
        return 3 if self.gated else 2


# Known shapes, from their published configurations, and the positions of their checkpoints.
#
# Named shapes don't limit positions, since long-context training first extends those of a checkpoint. `POSITIONS` is
# only used to warn that a plan assumes such an extension.


def _dense(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    """A SwiGLU decoder with heads of 128."""
    return {
        "hidden": hidden,
        "ffn": ffn,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": 128,
        "vocab": vocab,
    }


def _gpt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    """GPT-3's layer (two matrices of 4h; Brown et al. 2020, arXiv 2005.14165) at Llama's widths."""
    return _dense(hidden, 4 * hidden, layers, heads, heads, 50304) | {"gated": False, "tied": True}


def _experts(count: int, each: int, ffn: int) -> dict[str, Any]:
    """Routed experts, of which each token uses `each`."""
    return {"experts": count, "experts_per_token": each, "expert_ffn": ffn}


SHAPES: Final[dict[str, dict[str, Any]]] = {
    # Touvron et al. 2023, "LLaMA", arXiv 2302.13971, table 2; 30B is the one called 33B there.
    "llama-7b": _dense(4096, 11008, 32, 32, 32, 32000),
    "llama-13b": _dense(5120, 13824, 40, 40, 40, 32000),
    "llama-30b": _dense(6656, 17920, 60, 52, 52, 32000),
    "llama-65b": _dense(8192, 22016, 80, 64, 64, 32000),
    # Touvron et al. 2023, "Llama 2", arXiv 2307.09288.
    "llama-2-7b": _dense(4096, 11008, 32, 32, 32, 32000),
    "llama-2-13b": _dense(5120, 13824, 40, 40, 40, 32000),
    "llama-2-70b": _dense(8192, 28672, 80, 64, 8, 32000),
    # Grattafiori et al. 2024, "The Llama 3 Herd of Models", arXiv 2407.21783, table 3.
    "llama-3-8b": _dense(4096, 14336, 32, 32, 8, 128256),
    "llama-3-70b": _dense(8192, 28672, 80, 64, 8, 128256),
    "llama-3-405b": _dense(16384, 53248, 126, 128, 8, 128256),
    # The same paper's later checkpoints: the same shapes with more positions.
    "llama-3.1-8b": _dense(4096, 14336, 32, 32, 8, 128256),
    "llama-3.1-70b": _dense(8192, 28672, 80, 64, 8, 128256),
    "llama-3.1-405b": _dense(16384, 53248, 126, 128, 8, 128256),
    # Qwen team 2024, "Qwen2.5 Technical Report", arXiv 2412.15115.
    "qwen2.5-7b": _dense(3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-14b": _dense(5120, 13824, 48, 40, 8, 152064),
    "qwen2.5-32b": _dense(5120, 27648, 64, 40, 8, 152064),
    "qwen2.5-72b": _dense(8192, 29568, 80, 64, 8, 152064),
    # Qwen team 2025, "Qwen3 Technical Report", arXiv 2505.09388.
    "qwen3-8b": _dense(4096, 12288, 36, 32, 8, 151936),
    "qwen3-14b": _dense(5120, 17408, 40, 40, 8, 151936),
    "qwen3-32b": _dense(5120, 25600, 64, 64, 8, 151936),
    "qwen3-30b-a3b": _dense(2048, 0, 48, 32, 4, 151936) | _experts(128, 8, 768),
    "qwen3-235b-a22b": _dense(4096, 0, 94, 64, 4, 151936) | _experts(128, 8, 1536),
    # Jiang et al. 2023, "Mistral 7B", arXiv 2310.06825; the window went with version 0.2.
    "mistral-7b": _dense(4096, 14336, 32, 32, 8, 32768),
    "mistral-7b-v0.1": _dense(4096, 14336, 32, 32, 8, 32000) | {"window": 4096, "windowed_layers": 32},
    # Jiang et al. 2024, "Mixtral of Experts", arXiv 2401.04088.
    "mixtral-8x7b": _dense(4096, 0, 32, 32, 8, 32000) | _experts(8, 2, 14336),
    "mixtral-8x22b": _dense(6144, 0, 56, 48, 8, 32768) | _experts(8, 2, 16384),
    # DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv 2412.19437, §4.2.
    "deepseek-v3": _dense(7168, 18432, 61, 128, 128, 129280)
    | _experts(256, 8, 2048)
    | {"head_dim": 192, "value_head_dim": 128, "latent_rank": 512, "latent_rope_dim": 64, "query_rank": 1536}
    | {"shared_ffn": 2048, "dense_layers": 3},
    # What papers on slices and balance train: FlexSP (arXiv 2412.01523) and others.
    "gpt-7b": _gpt(4096, 32, 32),
    "gpt-13b": _gpt(5120, 40, 40),
    "gpt-30b": _gpt(6656, 60, 52),
}

POSITIONS: Final[dict[str, int]] = {
    # Of "LLaMA", which came without a config.json: max_seq_len of ModelArgs in the code that came with it.
    **dict.fromkeys(("llama-7b", "llama-13b", "llama-30b", "llama-65b"), 2048),
    # All others: max_position_embeddings of meta-llama/Llama-2-7b-hf, -13b-hf and -70b-hf,
    **dict.fromkeys(("llama-2-7b", "llama-2-13b", "llama-2-70b"), 4096),
    # meta-llama/Meta-Llama-3-8B and -70B,
    **dict.fromkeys(("llama-3-8b", "llama-3-70b"), 8192),
    # meta-llama/Llama-3.1-8B, -70B and -405B (of 405B there is no earlier one),
    **dict.fromkeys(("llama-3-405b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"), 131_072),
    # Qwen/Qwen2.5-7B, -14B, -32B and -72B,
    **dict.fromkeys(("qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b"), 131_072),
    # Qwen/Qwen3-8B, -14B, -32B, -30B-A3B and -235B-A22B,
    **dict.fromkeys(("qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b"), 40_960),
    # mistralai/Mistral-7B-v0.3 and -v0.1, Mixtral-8x7B-v0.1, Mixtral-8x22B-v0.1,
    **dict.fromkeys(("mistral-7b", "mistral-7b-v0.1", "mixtral-8x7b"), 32_768),
    "mixtral-8x22b": 65_536,
    # and deepseek-ai/DeepSeek-V3.
    "deepseek-v3": 163_840,
}
"""Positions of published checkpoints. The shapes that papers train at several lengths (gpt-…) have none."""


# Reading transformers' configurations.

_TEXT_PARTS: Final = ("text_config", "llm_config", "language_config", "thinker_config")
_NAMES: Final = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
}
_KEY_HEADS: Final = ("num_key_value_heads", "num_kv_heads")
_WIDTHS: Final = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_seq_len")
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN: Final = ("num_experts_per_tok", "experts_per_token", "top_k_experts", "moe_k")
_SHARED_EXPERTS: Final = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_WINDOWED: Final = ("sliding_attention", "chunked_attention")


def shape_settings(config: Any) -> dict[str, Any]:
    """Return the settings of a `ModelShape` from a configuration."""
    given = _text_part(_mapping(config))
    sizes = {name: _first(given, keys) for name, keys in _NAMES.items()}
    lacking = [" or ".join(_NAMES[name]) for name, value in sizes.items() if value is None]
    width = _width(given, sizes["hidden"])
    if width is None and _first(given, ("moe_intermediate_size",)) is None:
        lacking.append(" or ".join(_WIDTHS))
    kind = given.get("model_type") or "unnamed"
    if lacking:
        raise SettingError(
            f"the configuration of a model of type {kind!r} lacks {'; '.join(lacking)}; "
            "give a decoder's configuration, or its numbers: ModelShape(hidden=…, layers=…, heads=…, vocab=…, ffn=…)"
        )
    _check_layers(given, kind)
    return {
        "name": kind,
        **sizes,
        "ffn": width or 0,
        "gated": FAMILIES.get(str(kind), UNKNOWN).is_gated,
        "max_positions": _first(given, _POSITIONS),
        "tied": bool(given.get("tie_word_embeddings", False)),
        **_attention(given, sizes["heads"]),
        **_windows(given, sizes["layers"]),
        **_mixture(given, sizes["layers"], kind),
    }


def _mapping(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if hasattr(config, "to_dict"):
        mapping: Mapping[str, Any] = config.to_dict()
        return mapping
    if hasattr(config, "__dict__"):
        return dict(vars(config))
    raise SettingError(
        f"a configuration must be a mapping or a transformers configuration; got {type(config).__name__}"
    )


def _text_part(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the decoder's part of a multimodal configuration."""
    for name in _TEXT_PARTS:
        if given.get(name) is not None:
            return _text_part(_mapping(given[name]))
    return given


def _first(given: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Return the first of these settings that is present and not None."""
    return next((given[name] for name in names if given.get(name) is not None), None)


def _width(given: Mapping[str, Any], hidden: int | None) -> Any:
    """Return the inner width of a dense layer."""
    if given.get("intermediate_size_mlp") is not None:  # Llama 4; its intermediate_size is that of experts
        return given["intermediate_size_mlp"]
    width = _first(given, _WIDTHS)
    if (
        width is None
        and hidden is not None
        and FAMILIES.get(str(given.get("model_type")), UNKNOWN).is_four_times
    ):
        return 4 * hidden
    return width


def _check_layers(given: Mapping[str, Any], kind: str) -> None:
    """Refuse layers that mix tokens by other means than attention, and embeddings of their own."""
    if FAMILIES.get(str(kind), UNKNOWN).is_recurrent:
        raise SettingError(
            f"a model of type {kind!r} passes a state from token to token; the cost model knows attention only, and "
            "slices of such layers can't be priced by their keys"
        )
    if given.get("hidden_size_per_layer_input"):
        raise SettingError(
            f"each layer of this model of type {kind!r} has an embedding of its own (hidden_size_per_layer_input="
            f"{given['hidden_size_per_layer_input']}), which neither the cost model nor slices know"
        )
    known = (*_WINDOWED, "full_attention", "attention")
    others = [layer for layer in given.get("layer_types") or () if layer not in known]
    if others:
        raise SettingError(
            f"{len(others)} layers of a model of type {kind!r} are {', '.join(sorted(set(others)))}; the cost model "
            "knows attention only, and slices of such layers can't be priced by their keys"
        )


def _attention(given: Mapping[str, Any], heads: int) -> dict[str, Any]:
    """Return the heads of keys and values, and latents."""
    if given.get("kv_lora_rank"):
        rope = given["qk_rope_head_dim"]
        return {
            "kv_heads": heads,
            "head_dim": given["qk_nope_head_dim"] + rope,
            "value_head_dim": given["v_head_dim"],
            "latent_rank": given["kv_lora_rank"],
            "latent_rope_dim": rope,
            "query_rank": given.get("q_lora_rank") or 0,
        }
    shared = 1 if given.get("multi_query") and not given.get("new_decoder_architecture") else None
    return {"kv_heads": shared or _first(given, _KEY_HEADS) or heads, "head_dim": given.get("head_dim") or 0}


def _windows(given: Mapping[str, Any], layers: int) -> dict[str, int]:
    """Return the window, and the number of layers with it."""
    window = _first(given, ("sliding_window", "attention_chunk_size")) or 0
    kinds = given.get("layer_types")
    every = _first(given, ("sliding_window_pattern", "_sliding_window_pattern"))
    if kinds is not None:
        count = sum(kind in _WINDOWED for kind in kinds)
    elif given.get("use_sliding_window") is False:
        count = 0
    elif given.get("use_sliding_window"):
        count = max(layers - int(given.get("max_window_layers") or 0), 0)
    elif every:
        count = layers - layers // int(every)
    else:
        count = layers // 2 if given.get("model_type") == "gemma2" else layers
    return {"window": window, "windowed_layers": count} if window and count else {}


def _mixture(given: Mapping[str, Any], layers: int, kind: str) -> dict[str, int]:
    """Return the experts, and the number of layers without them."""
    experts = _first(given, _EXPERTS) or 0
    if not experts:
        return {}
    width = _first(given, ("moe_intermediate_size", "intermediate_size")) or 0
    if isinstance(experts, list):
        raise SettingError(
            f"a model of type {kind!r} has {' and '.join(map(str, experts))} experts for different tokens; the cost "
            "model knows one set of experts"
        )
    shared = given.get("shared_expert_intermediate_size") or (_first(given, _SHARED_EXPERTS) or 0) * width
    # Neither has a setting for it: Llama 4's shared expert is as wide as the others, Gemma 4's is its dense part.
    if kind.startswith("llama4"):
        shared = width
    elif kind.startswith("gemma4"):
        shared = given["intermediate_size"]
    return {
        "experts": experts,
        "experts_per_token": _first(given, _EXPERTS_PER_TOKEN) or 0,
        "expert_ffn": width,
        "shared_ffn": shared,
        "dense_layers": _dense_layers(given, layers),
    }


def _dense_layers(given: Mapping[str, Any], layers: int) -> int:
    """Return the number of layers without experts."""
    kinds = given.get("mlp_layer_types")
    if kinds is not None:
        return sum(kind == "dense" for kind in kinds)
    sparse = given.get("moe_layers")
    if sparse is not None:
        return layers - len(sparse)
    first = _first(given, ("first_k_dense_replace", "moe_layer_start_index"))
    if first is not None:
        return min(int(first), layers)
    step = int(_first(given, ("decoder_sparse_step", "interleave_moe_layer_step")) or 1)
    dense = set(given.get("mlp_only_layers") or ())
    return sum((layer + 1) % step != 0 or layer in dense for layer in range(layers))


CACHE_SIZE = 256
"""Size of the caches of stages, rates and memory."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stages:
    """The division of a model into the chunks of a mesh; read-only."""

    layers: FloatArray
    """float64 `[num_chunks]`: whole numbers of at least 1."""
    has_head: npt.NDArray[Any]
    """bool `[num_chunks]`: the last."""
    has_embedding: npt.NDArray[Any]
    """bool `[num_chunks]`: the first."""

    def __post_init__(self) -> None:
        for array in (self.layers, self.has_head, self.has_embedding):
            array.flags.writeable = False


@functools.lru_cache(maxsize=CACHE_SIZE)
def stages_of(model: ModelShape, mesh: Mesh) -> Stages:
    """Cut a model into chunks so that the heaviest stage, the vocabulary head included, is as light as possible.

    The head counts as the layers whose matrix products equal its own. Layers are dealt one at a time to the
    lightest stage, which is optimal for items of equal weight; ties go to later stages, which hold the activations of
    fewer MicroPacks. Within a stage, the last chunks get fewer layers.
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


def check_mesh(model: ModelShape, mesh: Mesh) -> None:
    """Refuse a mesh whose tensor-parallel GPUs don't divide the heads, or whose chunks outnumber the layers."""
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
    """Return whether `tp` GPUs get equally many query heads, and whole key heads or equal copies of them."""
    return model.heads % tp == 0 and (model.kv_heads % tp == 0 or tp % model.kv_heads == 0)


def check_positions(model: ModelShape, lengths: Int32Array) -> None:
    """Refuse documents longer than the model's positions."""
    if model.max_positions is None:
        return
    over = np.flatnonzero(lengths > model.max_positions)
    if over.size:
        raise ModelError(
            f"document {over[0]:,} has {lengths[over[0]]:,} tokens, over the {model.max_positions:,} positions of "
            f"{model.name or 'the model'} ({over.size:,} of {lengths.size:,} documents are); truncate them to "
            f"{model.max_positions:,}, or extend the model's positions (max_positions=None plans any length)"
        )


BACKWARD_RATIO = 2.5
"""Attention has five matrix products in the backward pass and two in the forward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """FLOPs of a whole step on all GPUs."""

    model: float
    """FLOPs for MFU: forward, and twice that backward (Chowdhery et al. 2022, arXiv 2204.02311, appendix B). Causal
    attention counts the pairs within the mask."""
    hardware: float
    """FLOPs that are computed: attention's backward pass at 2.5 times its forward pass, and recomputation."""
    attention: float
    """The part of `hardware` in attention."""


def pairs_of(starts: FloatArray, stops: FloatArray, window: int = 0) -> FloatArray:
    """Return the number of query-key pairs of each slice; query t attends to min(t + 1, window) keys.

    >>> pairs_of(np.array([2.0]), np.array([4.0])).tolist()
    [7.0]
    """
    whole: FloatArray = (stops * (stops + 1.0) - starts * (starts + 1.0)) / 2.0
    if window <= 0:
        return whole
    inside = np.minimum(stops, window)
    first = np.minimum(starts, inside)
    near: FloatArray = (inside * (inside + 1.0) - first * (first + 1.0)) / 2.0
    far: FloatArray = (stops - np.maximum(starts, inside)) * float(window)
    return near + far


def slice_flops(model: ModelShape, starts: npt.ArrayLike, stops: npt.ArrayLike) -> FloatArray:
    """Return FLOPs of slices without recomputation, float64 `[num_slices, 2]`: forward and backward.

    Per layer 2·heads·(head_dim + value_head_dim) a pair and 2 a linear parameter and row, and the vocabulary head;
    backward 2.5 and 2 times that.
    """
    attention, linear = _forward(model, np.asarray(starts, np.float64), np.asarray(stops, np.float64))
    return np.stack([attention + linear, BACKWARD_RATIO * attention + 2.0 * linear], axis=-1)


def step_flops(
    model: ModelShape, lengths: npt.ArrayLike, recompute: Recompute = "none", recompute_share: float = 1.0
) -> Flops:
    """Return FLOPs of training on whole documents once."""
    stops = np.asarray(lengths, np.float64)
    each, products = _forward(model, np.zeros_like(stops), stops)
    attention, linear = float(each.sum()), float(products.sum())
    head = 2.0 * model.head_parameters * float(stops.sum())
    again = recompute_share if recompute == "full" else 0.0
    attended = attention * (1.0 + BACKWARD_RATIO + again)
    return Flops(
        model=3.0 * (attention + linear),
        hardware=attended + 3.0 * linear + again * (linear - head),
        attention=attended,
    )


def adapter_flops(
    model: ModelShape, lengths: npt.ArrayLike, parameters: int, backward_share: float = 1.0
) -> float:
    """Return FLOPs for MFU of training an adapter on whole documents once: frozen weights have no gradients.

    A frozen parameter and row take 2 forward and 2 backward, one of the adapter 2 and 4. It counts the gradients of
    all inputs of the layers that it passes backward, two projections of the lowest one too many.

    Args:
        model: without the adapter.
        lengths: of the documents.
        parameters: of the adapter.
        backward_share: share of the layers that are passed backward: those from the lowest adapted one on.
    """
    stops = np.asarray(lengths, np.float64)
    attention, linear = (float(each.sum()) for each in _forward(model, np.zeros_like(stops), stops))
    head = 2.0 * model.head_parameters * float(stops.sum())
    layers = attention * (1.0 + 2.0 * backward_share) + (linear - head) * (1.0 + backward_share)
    return layers + 2.0 * head + 6.0 * parameters * float(stops.sum())


def _forward(model: ModelShape, starts: FloatArray, stops: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return forward FLOPs of attention and of matrix products, all layers and the head, `[num_slices]` each."""
    per_pair = 2.0 * model.heads * (model.head_dim + model.value_head_dim)
    seen = pairs_of(starts, stops) * (model.layers - model.windowed_layers)
    seen += pairs_of(starts, stops, model.window) * model.windowed_layers
    weights = model.linear_parameters_per_layer * model.layers + model.head_parameters
    return per_pair * seen, 2.0 * weights * (stops - starts)
