"""What a transformers model is and what it can't do: the questions asked before a batch is handed to it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import starmap
from typing import Any
from weakref import WeakKeyDictionary

import torch

from varlen.adapters.hf.recurrent import SINGLE_TOKENS, TOLD
from varlen.batch.packed import PackedBatch
from varlen.errors import ModelError

SELECTING = "indexed_attention"
"""Layers in which every token selects the tokens it attends to, among those that a mask leaves it."""
MASKED_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", SELECTING)
"""Kinds of layers (transformers' `config.layer_types`) whose documents an attention mask keeps apart."""
BY_DISTANCE = {"mpt": "max_seq_len"}
"""Families whose only positions are distances between tokens (ALiBi), the same wherever a document stands in its row;
each with the setting that bounds how wide a row may be."""
FLAT_MASKS = frozenset(("openai-gpt", "reformer", "xlm"))
"""Families whose code takes masks of padding alone: a finished 4-D one makes it fail."""
CROSS_ATTENTION = ("encoder_attn", "crossattention", "cross_attn")
"""Modules that aren't called where there is no encoder."""

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""How configurations call their number of routed experts."""

_LOOKED_THROUGH: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()
"""Decoders whose modules were looked through, each with the first reason found to refuse it, or None."""

_FIRST_POSITIONS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Likewise, where their positions begin."""


def unwrap(model: Any) -> Any:
    """Return the transformers model inside DDP, FSDP, `torch.compile` or PEFT wrappers.

    Args:
        model: a transformers model, bare or wrapped.
    """
    *_, inner = _wrappers(model)
    return inner


def _wrappers(model: Any) -> Iterator[Any]:
    """Yield a model, what it wraps, and so on."""
    while True:
        yield model
        wrapped = getattr(model, "_orig_mod", None)
        if wrapped is None:  # FSDP's first version hands all questions on, that for the config among them
            wrapped = getattr(model, "_fsdp_wrapped_module", None)
        if wrapped is None and not hasattr(model, "config"):
            wrapped = getattr(model, "module", None)
        if wrapped is None and hasattr(model, "get_base_model"):
            wrapped = model.get_base_model()
        if not isinstance(wrapped, torch.nn.Module):
            return
        model = wrapped


def text_decoder(model: Any) -> Any:
    """Return the module that mixes tokens: the decoder without its head, or the text part of several.

    Args:
        model: a transformers model, bare or wrapped.
    """
    base = unwrap(model)
    return base.get_decoder() if hasattr(base, "get_decoder") else base


def text_config(model: Any) -> Any:
    """Return the configuration of the model's text decoder.

    Args:
        model: a transformers model, bare or wrapped.

    Raises:
        ModelError: not a transformers model.
    """
    config = getattr(unwrap(model), "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise ModelError(f"{type(model).__name__} has no transformers config; pass a PreTrainedModel")
    return config.get_text_config(decoder=True)


def model_type(model: Any) -> str:
    """Return the family of the model's text decoder, as transformers names it.

    Args:
        model: a transformers model, bare or wrapped.
    """
    return getattr(text_config(model), "model_type", "")


def first_position(model: Any) -> int:
    """Return the position of a document's first token: 0, but one behind the padding's where that has a position.

    RoBERTa and its kin embed positions from `padding_idx + 1` on.

    Args:
        model: a transformers model, bare or wrapped.
    """
    decoder = text_decoder(model)
    if decoder not in _FIRST_POSITIONS:
        padding = (
            getattr(module, "padding_idx", None)
            for name, module in decoder.named_modules()
            if name.endswith("position_embeddings")
        )
        found = next((index for index in padding if index is not None), None)
        _FIRST_POSITIONS[decoder] = 0 if found is None else found + 1
    return _FIRST_POSITIONS[decoder]


def implementation(model: Any) -> str:
    """Return the name of the attention function that the model is set to, "eager" where none is named.

    Args:
        model: a transformers model, bare or wrapped.
    """
    return getattr(text_config(model), "_attn_implementation", None) or "eager"


def named_kinds(config: Any) -> tuple[str, ...]:
    """Return the kinds of attention among the layers, by first use; empty where they have no names.

    Args:
        config: of the text decoder.
    """
    return tuple(dict.fromkeys(getattr(config, "layer_types", None) or ()))


def only_kind(model: Any) -> str:
    """Return the kind of attention of a model whose layers are all alike and have no names.

    A window in the config is not enough: some models (Moshi) carry one that they never use. So the source
    of the model is asked whether it makes windowed masks, as transformers does for such questions.

    Args:
        model: a transformers model, bare or wrapped.
    """
    config = text_config(model)
    if getattr(config, "sliding_window", None) is not None:
        module = inspect.getmodule(type(text_decoder(model)))
        try:
            source = inspect.getsource(module) if module else ""
        except OSError:
            source = ""
        if not source or "sliding_window_causal_mask" in source:
            return "sliding_attention"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "chunked_attention"
    return "full_attention"


def vocabulary_size(model: Any) -> int:
    """Return how many token ids the model embeds.

    Args:
        model: a transformers model, bare or wrapped.

    Raises:
        ModelError: neither the model nor its config says.
    """
    config = text_config(model)
    size = getattr(_embeddings(model, "get_input_embeddings"), "num_embeddings", None)
    if size is None and getattr(config, "vocab_size", None) is None:
        raise ModelError(
            f"nobody knows how many tokens {type(unwrap(model)).__name__} embeds: its config has no vocab_size, and "
            "get_input_embeddings() returns no embedding"
        )
    return int(config.vocab_size if size is None else size)


def _embeddings(model: Any, getter: str) -> Any:
    """Return what a model says of its embeddings; None where it says nothing."""
    try:
        return getattr(unwrap(model), getter)()
    except (NotImplementedError, AttributeError):
        return None


def logits_size(model: Any) -> int:
    """Return how many tokens the model can predict: a few models embed more than those.

    Args:
        model: a transformers model, bare or wrapped.
    """
    head = _embeddings(model, "get_output_embeddings")
    size = getattr(head, "out_features", None)
    return vocabulary_size(model) if size is None else int(size)


def has_experts(model: Any) -> bool:
    """Return whether tokens are routed to experts, whose grouping makes rounding depend on other tokens.

    Args:
        model: a transformers model, bare or wrapped.
    """
    config = text_config(model)
    return any((getattr(config, name, None) or 0) > 1 for name in EXPERT_COUNTS)


def uses_registry(model: Any) -> bool:
    """Return whether the model computes attention through transformers' registry of attention functions.

    A model that doesn't takes any registered name and computes its own attention all the same.

    Args:
        model: a transformers model, bare or wrapped.
    """
    base = unwrap(model)
    answer = getattr(base, "_can_set_attn_implementation", None)
    return bool(answer()) if answer is not None else bool(getattr(base, "_supports_attention_backend", False))


def accepts(model: Any, name: str) -> bool:
    """Return whether the model's forward makes use of an argument of this name.

    `position_ids` must be named in its signature: models that find positions by themselves swallow it among
    their `**kwargs`.

    Args:
        model: a transformers model, bare or wrapped.
        name: of the argument.
    """
    parameters = inspect.signature(unwrap(model).forward).parameters
    if name in parameters or name == "position_ids":
        return name in parameters
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def check_family(model: Any) -> None:
    """Refuse models whose documents no argument keeps apart.

    Args:
        model: a transformers model, bare or wrapped.

    Raises:
        ModelError: encoder-decoders, models that attend in both directions, models that mix tokens outside
            attention (recurrence, convolution) or number positions in their own way, models that take masks of
            padding alone, and soft prompts in front of rows.
    """
    base, config, decoder = unwrap(model), text_config(model), text_decoder(model)
    reason = _two_sequences(base) or _both_directions(config) or _soft_prompt(model) or _flat_masks(model)
    if not reason and model_type(model) not in TOLD:
        reason = _foreign_layers(config) or _recurrence(base) or _unfit_module(decoder)
    if reason:
        raise ModelError(f"{type(base).__name__} {reason}; give it one document a row (padded)")


def _two_sequences(base: Any) -> str | None:
    if getattr(base.config, "is_encoder_decoder", False):
        return "is an encoder-decoder: it takes two sequences, inputs and targets, and a PackedBatch has one"
    return None


def _both_directions(config: Any) -> str | None:
    if getattr(config, "is_causal", True) is False:
        return "attends in both directions (config.is_causal is False), and varlen packs for causal models"
    return None


def _flat_masks(model: Any) -> str | None:
    if model_type(model) in FLAT_MASKS:
        return "takes masks of padding alone, in which documents of a row can't be told apart"
    return None


def _soft_prompt(model: Any) -> str | None:
    for wrapper in _wrappers(model):
        told: Any = getattr(wrapper, "active_peft_config", None)
        if getattr(told, "is_prompt_learning", False):
            return (
                f"has a soft prompt of {told.num_virtual_tokens:,} tokens (PEFT's prompt learning), which stands "
                "before a row and not before each of its documents"
            )
    return None


def _foreign_layers(config: Any) -> str | None:
    foreign = [kind for kind in named_kinds(config) if kind not in (*MASKED_LAYERS, *SINGLE_TOKENS)]
    if not foreign:
        return None
    count = sum(kind in foreign for kind in config.layer_types)
    return (
        f"has {count:,} of {len(config.layer_types):,} layers of kind {', '.join(foreign)}, in which a mask "
        "doesn't keep documents apart"
    )


def _recurrence(base: Any) -> str | None:
    if getattr(base, "_is_stateful", False):
        return "carries a recurrent state from token to token, from one document into the next"
    return None


def _unfit_module(decoder: Any) -> str | None:
    """Look through the decoder's modules, once a model: there are thousands, and a batch comes every step."""
    if decoder not in _LOOKED_THROUGH:
        _LOOKED_THROUGH[decoder] = next(filter(None, starmap(_unfit, decoder.named_modules())), None)
    return _LOOKED_THROUGH[decoder]


def _unfit(name: str, module: Any) -> str | None:
    if name.rpartition(".")[2] in CROSS_ATTENTION:
        return None
    if getattr(module, "is_causal", True) is False:
        return f"attends in both directions (in {name}), and varlen packs for causal models"
    if isinstance(module, torch.nn.Conv1d):
        return f"mixes neighbouring tokens in a convolution ({name}), from one document into the next"
    return None


def check_size(batch: PackedBatch, model: Any) -> None:
    """Refuse a batch with longer documents or larger token ids than the model was made for.

    Args:
        batch: in either layout.
        model: a transformers model, bare or wrapped.

    Raises:
        ModelError: too few positions or too small a vocabulary.
    """
    name, positions = (
        type(unwrap(model)).__name__,
        getattr(text_config(model), "max_position_embeddings", None),
    )
    if isinstance(positions, int) and positions > 0:
        positions = max(positions - first_position(model), 1)
    if isinstance(positions, int) and 0 < positions < batch.max_seqlen:
        raise ModelError(
            f"the longest document has {batch.max_seqlen:,} tokens, but {name} has {positions:,} positions "
            f"(max_position_embeddings); pack with capacity at most {positions:,} and "
            'overlong="split" or "truncate"'
        )
    vocabulary = vocabulary_size(model)
    if batch.max_token_id >= vocabulary:
        raise ModelError(
            f"the batch holds token id {batch.max_token_id:,}, but {name} embeds ids below {vocabulary:,}; "
            "use the model's own tokenizer, or model.resize_token_embeddings"
        )
    if (smallest := _smallest_id(batch.input_ids)) < min(0, batch.pad_id):
        raise ModelError(
            f"the batch holds token id {smallest:,}, but {name} embeds ids from 0; replace placeholders before "
            "packing"
        )
    if not 0 <= batch.pad_id < vocabulary:
        raise ModelError(
            f"padding is token id {batch.pad_id:,}, but {name} embeds ids 0 to {vocabulary - 1:,}; collate "
            "with pad_id=0, since no document sees padding"
        )


def _smallest_id(input_ids: Any) -> int:
    """Return the smallest token id; 0 where there is none, or where asking would wait for a GPU."""
    if torch.is_tensor(input_ids):
        return int(input_ids.min()) if input_ids.numel() and input_ids.device.type == "cpu" else 0
    return int(input_ids.min()) if input_ids.size else 0
