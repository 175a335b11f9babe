"""Transformers' configurations, read as the settings of a `ModelShape`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from varlen.errors import SettingError

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
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_UNGATED: Final = frozenset(
    [
        "gpt2",
        "gpt_neo",
        "gpt_neox",
        "gptj",
        "gpt_bigcode",
        "opt",
        "falcon",
        "bloom",
        "starcoder2",
        "phi",
        "nemotron",
        "codegen",
        "mpt",
    ]
)
"""Families whose feed-forward part has two matrices."""
_FOUR_TIMES: Final = frozenset(
    ["gpt2", "gpt_neo", "gptj", "gpt_bigcode", "codegen", "falcon", "bloom", "mpt"]
)
"""Families whose inner width is four times the hidden size where none is given."""
_WINDOWED: Final = ("sliding_attention", "chunked_attention")


def read(config: Any) -> dict[str, Any]:
    """Return the settings of a shape.

    Args:
        config: a transformers configuration, or the mapping it is saved as; of several modalities the text part.

    Raises:
        SettingError: names what is missing, or which layers have no attention to price.
    """
    given = _text_part(_mapping(config))
    found = {name: _first(given, keys) for name, keys in _NAMES.items()}
    lacking = [" or ".join(_NAMES[name]) for name, value in found.items() if value is None]
    width = _width(given, found["hidden"])
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
        **found,
        "ffn": width or 0,
        "gated": kind not in _UNGATED,
        "max_positions": _first(given, _POSITIONS),
        "tied": bool(given.get("tie_word_embeddings", False)),
        **_attention(given, found["heads"]),
        **_windows(given, found["layers"]),
        **_mixture(given, found["layers"], kind),
    }


def _mapping(config: Any) -> Mapping[str, Any]:
    """The configuration as a mapping."""
    if isinstance(config, Mapping):
        return config
    if hasattr(config, "to_dict"):
        saved: Mapping[str, Any] = config.to_dict()
        return saved
    if hasattr(config, "__dict__"):
        attributes: Mapping[str, Any] = vars(config)
        return attributes
    raise SettingError(
        f"a configuration must be a mapping or a transformers configuration; got {type(config).__name__}"
    )


def _text_part(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The decoder's part of a configuration of several modalities."""
    for name in _TEXT_PARTS:
        if given.get(name) is not None:
            return _text_part(_mapping(given[name]))
    return given


def _first(given: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """The first of these settings that is there and not None."""
    return next((given[name] for name in names if given.get(name) is not None), None)


def _width(given: Mapping[str, Any], hidden: int | None) -> Any:
    """Inner width of a dense layer."""
    if given.get("intermediate_size_mlp") is not None:  # Llama 4, whose other width is that of experts
        return given["intermediate_size_mlp"]
    width = _first(given, _WIDTHS)
    if width is None and hidden is not None and given.get("model_type") in _FOUR_TIMES:
        return 4 * hidden
    return width


def _check_layers(given: Mapping[str, Any], kind: str) -> None:
    """Refuse layers that mix tokens otherwise than by attention."""
    known = (*_WINDOWED, "full_attention", "attention")
    others = [layer for layer in given.get("layer_types") or () if layer not in known]
    if others:
        raise SettingError(
            f"{len(others)} layers of a model of type {kind!r} are {', '.join(sorted(set(others)))}; the cost model "
            "knows attention only, and slices of such layers can't be priced by their keys"
        )


def _attention(given: Mapping[str, Any], heads: int) -> dict[str, Any]:
    """Heads of keys and values, and latents."""
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
    """The window, and how many layers have it."""
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
    """Experts, and how many layers have none."""
    experts = _first(given, _EXPERTS) or 0
    if not experts:
        return {}
    width = _first(given, ("moe_intermediate_size", "intermediate_size"))
    shared = given.get("shared_expert_intermediate_size") or (given.get("n_shared_experts") or 0) * width
    return {
        "experts": experts,
        "experts_per_token": _first(given, ("num_experts_per_tok", "experts_per_token")) or 0,
        "expert_ffn": width,
        # Llama 4 has one shared expert, as wide as the others, and no setting that says so.
        "shared_ffn": width if kind.startswith("llama4") else shared,
        "dense_layers": _dense_layers(given, layers),
    }


def _dense_layers(given: Mapping[str, Any], layers: int) -> int:
    """Layers without experts, by whichever setting says so."""
    kinds = given.get("mlp_layer_types")
    if kinds is not None:
        return sum(kind == "dense" for kind in kinds)
    sparse = given.get("moe_layers")
    if sparse is not None:
        return layers - len(sparse)
    first = given.get("first_k_dense_replace")
    if first is not None:
        return min(int(first), layers)
    step = int(_first(given, ("decoder_sparse_step", "interleave_moe_layer_step")) or 1)
    dense = set(given.get("mlp_only_layers") or ())
    return sum((layer + 1) % step != 0 or layer in dense for layer in range(layers))
