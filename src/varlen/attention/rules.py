"""What an attention layer of transformers computes: `LayerRules`, read from its call, and kinds of layers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from varlen.errors import ModelError
from varlen.types import IntArray

NOT_COMPUTED = ("position_bias", "sinks", "indices", "block_indices")
"""Arguments of some families that change which keys are attended to or how much, and that no kernel here computes."""
SELECTING = "indexed_attention"  # each token selects among the tokens that a mask leaves it
MASKED_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", SELECTING)
"""Kinds of layers (transformers' `config.layer_types`) whose documents an attention mask keeps apart."""
SINGLE_TOKENS = ("moe", "mlp")  # kinds of layers that mix no tokens
MASKLESS_KINDS = ("linear_attention", "conv", *SINGLE_TOKENS)  # where a mask means nothing


class LayerRules(NamedTuple):
    """How scores are made of queries and keys, and which of them count."""

    scale: float  # factor on the product of a query and a key
    window: int | None = None  # a token sees the last so many tokens, itself included; None for all
    softcap: float | None = None  # scores s become `softcap * tanh(s / softcap)` (Gemma 2); None for no cap
    dropout: float = 0.0  # share of attention weights set to 0; for whole packs only
    is_causal: bool = (
        True  # if not, a token sees later ones too, with a window as far as earlier ones; whole packs
    )
    chunk: int | None = None  # a token sees those of its own chunk of so many positions; trees


def rules_of_call(
    module: Any,
    query: torch.Tensor,
    name: str,
    /,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    takes_both_directions: bool = False,
    **rest: Any,
) -> LayerRules:
    """Return the rules in a call of the attention function `name`, and refuse what isn't computed.

    Args:
        module: the attention layer.
        query: `[..., head_dim]`.
        takes_both_directions: whether attention that isn't causal is computed.
    """
    layer = type(module).__name__
    otherwise = 'choose model.set_attn_implementation("sdpa")'
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if not causal and not takes_both_directions:
        raise ModelError(f'the "{name}" attention is causal, and {layer} attends in both directions')
    if given := [word for word in NOT_COMPUTED if rest.get(word) is not None]:
        raise ModelError(
            f'{layer} passes {", ".join(given)}, which the "{name}" attention doesn\'t compute; {otherwise}'
        )
    kinds, index = (
        getattr(getattr(module, "config", None), "layer_types", None),
        getattr(module, "layer_idx", None),
    )
    if sliding_window is None and kinds and index is not None and kinds[index] == "sliding_attention":
        raise ModelError(
            f"layer {index} slides a window, but {layer} doesn't pass its width to the "
            f'"{name}" attention; {otherwise}'
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return LayerRules(scale, sliding_window, softcap or None, dropout, causal)


def rotary_settings(config: Any) -> list[dict[str, Any]]:
    """Return the settings of rotary positions: those of all layers, and those of each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [each for each in (rope, *rope.values()) if isinstance(each, dict)]


def rotary_limits(config: Any) -> list[tuple[str, int]]:
    """Return the kinds of rotary frequencies that go by a batch's longest document, and where they change."""
    found = []
    for part in rotary_settings(config):
        kind = str(part.get("rope_type", ""))
        if kind == "longrope":
            found.append((kind, part.get("original_max_position_embeddings")))
        elif "dynamic" in kind:
            found.append((kind, getattr(config, "max_position_embeddings", None)))
    return [(kind, int(limit)) for kind, limit in found if limit]


def check_rotary(row_lengths: IntArray, config: Any, name: str) -> None:
    """Refuse rows of trees on both sides of a length at which rotary frequencies change for the whole batch.

    Args:
        row_lengths: int64 `[rows]`.
        config: of the text.
        name: of the model's class, for messages.
    """
    for kind, limit in rotary_limits(config):
        short = int(((row_lengths <= limit) & (row_lengths > 1)).sum())
        longer = int((row_lengths > limit).sum())
        if longer and short:
            raise ModelError(
                f"{name} chooses its rotary frequencies once per batch, by the longest row ({kind}): the batch has "
                f"{short:,} rows of up to {limit:,} tokens, which alone have those of short ones, and {longer:,} "
                "longer ones. Fold them apart, or give all rows the frequencies of long ones: "
                'model.config.rope_parameters["original_max_position_embeddings"] = 1'
            )
