"""What a transformers model is and what it can't do: the questions asked before a batch is handed to it."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from varlen.batch.packed import PackedBatch
from varlen.errors import ModelError

MASKED_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers (transformers' `config.layer_types`) whose documents an attention mask keeps apart."""


def unwrap(model: Any) -> Any:
    """Return the transformers model inside DDP, FSDP, `torch.compile` or PEFT wrappers."""
    while True:
        if isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner
        elif not hasattr(model, "config") and isinstance(inner := getattr(model, "module", None), torch.nn.Module):
            model = inner
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model


def text_config(model: Any) -> Any:
    """Return the configuration of the model's text decoder.

    Raises:
        ModelError: the object isn't a transformers model.
    """
    config = getattr(unwrap(model), "config", None)
    if not hasattr(config, "get_text_config"):
        raise ModelError(
            f"{type(model).__name__} is not a transformers model: it has no config; pass a PreTrainedModel"
        )
    return config.get_text_config(decoder=True)


def implementation(model: Any) -> str:
    """Return the name of the attention function the model is set to, "eager" where none is named."""
    return getattr(text_config(model), "_attn_implementation", None) or "eager"


def layer_kinds(config: Any) -> tuple[str, ...]:
    """Return the distinct kinds of attention among the layers, in order of first use; empty where unnamed."""
    return tuple(dict.fromkeys(getattr(config, "layer_types", None) or ()))


def accepts(model: Any, name: str) -> bool:
    """Return whether the model's forward takes an argument of this name, by itself or through `**kwargs`."""
    parameters = inspect.signature(unwrap(model).forward).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def check_family(model: Any) -> None:
    """Refuse models whose documents no argument keeps apart.

    Raises:
        ModelError: encoder-decoders, models that attend in both directions, and models that mix tokens
            outside attention (recurrence, convolution).
    """
    base, config = unwrap(model), text_config(model)
    name = type(base).__name__
    if getattr(base.config, "is_encoder_decoder", False):
        raise ModelError(
            f"{name} is an encoder-decoder: its inputs and targets are two sequences, and a PackedBatch holds "
            "one; packing serves decoder-only models"
        )
    if getattr(config, "is_causal", True) is False:
        raise ModelError(f"{name} attends in both directions (config.is_causal is False); packing serves causal models")
    foreign = [kind for kind in layer_kinds(config) if kind not in MASKED_LAYERS]
    if foreign:
        count = sum(kind in foreign for kind in config.layer_types)
        raise ModelError(
            f"{name} has {count:,} of {len(config.layer_types):,} layers of kind {', '.join(foreign)}, which "
            "no attention mask keeps apart; train it on one document a row (padded)"
        )
    if getattr(base, "_is_stateful", False) or getattr(config, "model_type", "") in ("minimax",):
        raise ModelError(
            f"{name} carries a recurrent state from token to token, which runs across documents; train it on "
            "one document a row (padded)"
        )
    if mixer := _first_mixer(base):
        raise ModelError(
            f"{name} mixes neighbouring tokens outside attention ({mixer}), across documents too; train it on "
            "one document a row (padded)"
        )


def _first_mixer(model: Any) -> str | None:
    """Name the first module of the decoder that convolves over tokens."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    for name, module in decoder.named_modules():
        if isinstance(module, torch.nn.Conv1d):
            return f"{name}: {type(module).__name__}"
    return None


def check_size(batch: PackedBatch, model: Any) -> None:
    """Refuse a batch with longer documents or larger token ids than the model was made for.

    Raises:
        ModelError: too few positions or too small a vocabulary.
    """
    base, config = unwrap(model), text_config(model)
    name = type(base).__name__
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < batch.max_seqlen:
        raise ModelError(
            f"the longest document has {batch.max_seqlen:,} tokens, but {name} has {positions:,} positions "
            f'(config.max_position_embeddings); pack with overlong="split" or "truncate" at most {positions:,}'
        )
    vocabulary = vocabulary_size(model)
    if batch.max_token_id >= vocabulary:
        raise ModelError(
            f"the batch holds token id {batch.max_token_id:,}, but {name} embeds ids below {vocabulary:,}; "
            "use the model's own tokenizer, or model.resize_token_embeddings"
        )
    if not 0 <= batch.pad_id < vocabulary:
        raise ModelError(
            f"padding is token id {batch.pad_id:,}, but {name} embeds ids 0 to {vocabulary - 1:,}; collate with "
            "pad_id=0 (padding is never attended to by documents, so any id serves)"
        )


def vocabulary_size(model: Any) -> int:
    """Return how many token ids the model embeds."""
    size = getattr(unwrap(model).get_input_embeddings(), "num_embeddings", None)
    return int(text_config(model).vocab_size if size is None else size)
