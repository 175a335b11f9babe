"""An attention function named "varlen" for transformers: every document attends to itself alone.

It goes through transformers' own registry, so that no model class is patched, and it refuses whatever would
make it leak: missing boundaries, a mask, a pattern that it isn't given.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from varlen.adapters.hf.model import family, implementation, text_config, unwrap
from varlen.attention.compiled import attend_opaquely
from varlen.attention.documents import attend_in_packs
from varlen.attention.rules import rules_of_call
from varlen.attention.trees import TreeSpans, attend_in_trees
from varlen.errors import ModelError

NAME = "varlen"


def register() -> str:
    """Make `attn_implementation="varlen"` known to transformers; calling it twice changes nothing.

    Returns:
        The name, for `model.set_attn_implementation(register())`.
    """
    AttentionInterface.register(NAME, varlen_attention)
    AttentionMaskInterface.register(NAME, no_mask)
    return NAME


def use_varlen_attention(model: Any) -> Any:
    """Set a model to attend per document; `model.set_attn_implementation("sdpa")` undoes it.

    On CPU this is the fastest exact way to train on packed documents. Every call then needs boundaries, as
    `model_inputs` gives them, so set another attention before generating text.

    Args:
        model: a transformers model, bare or wrapped; changed in place.

    Returns:
        The same model.

    Raises:
        ModelError: not a transformers model, its attention doesn't go through transformers' registry, or it carries
            a recurrent state across documents, which no attention changes.
    """
    text_config(model)
    register()
    base = unwrap(model)
    if getattr(base, "_is_stateful", False) and not family(model).boundaries:
        raise ModelError(
            f"{type(base).__name__} carries a recurrent state from one document into the next, which no attention "
            f'changes; it keeps "{implementation(model)}". Give it one document a row (padded)'
        )
    base.set_attn_implementation(NAME)
    if implementation(model) != NAME:
        raise ModelError(
            f"{type(base).__name__} computes attention by itself, not through transformers' registry, so it "
            f'keeps "{implementation(model)}"; use model_inputs with that'
        )
    return model


def no_mask(*_: Any, attention_mask: torch.Tensor | None = None, config: Any = None, **rest: Any) -> None:
    """Build no mask: boundaries reach the attention function as `cu_seq_lens_q`.

    `attention_mask`: `[rows, width]`, 0 at padding; all ones, or None, changes nothing.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ModelError(
            f'the "{NAME}" attention takes packed documents and no attention_mask, and was given one with '
            f"{int((attention_mask == 0).sum()):,} masked positions; pass model_inputs(batch, model), or "
            'for padded batches choose model.set_attn_implementation("sdpa")'
        )
    chunk = getattr(config, "attention_chunk_size", None)
    opens_all = (
        getattr(config, "use_bidirectional_attention", None) is True
    )  # Gemma 3, whose layers say so too
    if (rest.get("use_vmap") and not opens_all) or (chunk is not None and rest.get("local_size") == chunk):
        raise ModelError(
            f'the model asks for a pattern of its own (chunks, images), and the "{NAME}" attention has none; '
            'choose model.set_attn_implementation("sdpa")'
        )


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    tree_spans: TreeSpans | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within documents, causally or in both directions as the layer does; transformers' calling convention.

    Args:
        query: `[rows, query_heads, width, head_dim]`.
        key: `[rows, key_heads, width, head_dim]`; `query_heads` is a multiple of `key_heads`.
        s_aux: `[query_heads]`, a score per head that takes up weight and gives no value (GPT-OSS).
        cu_seq_lens_q: int32 `[segments + 1]`, over the flattened `rows * width` tokens.
        tree_spans: in place of them, where segments of trees lie in these tokens.

    Returns:
        `[rows, width, query_heads, value_dim]`, and None for the weights, which are never formed.
    """
    _check_call(query, key, attention_mask)
    rules = rules_of_call(
        module, query, NAME, dropout=dropout, scaling=scaling, takes_both_directions=True, **rest
    )
    rows, _, width, _ = query.shape
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    if tree_spans is not None:
        out = attend_in_trees(*flat, spans=tree_spans, rules=rules, sinks=s_aux)
    else:
        ends = _checked_boundaries(rows, width, cu_seq_lens_q)
        if torch.compiler.is_compiling():
            longest = rows * width if max_length_q is None else max_length_q
            out = attend_opaquely(*flat, ends=ends, longest=longest, rules=rules, sinks=s_aux)
        else:
            out = attend_in_packs(*flat, ends=ends, longest=max_length_q, rules=rules, sinks=s_aux)
    return out.view(rows, width, *out.shape[1:]), None


def _check_call(query: torch.Tensor, key: torch.Tensor, attention_mask: Any) -> None:
    """Refuse masks, and keys of a cache."""
    if attention_mask is not None:
        raise ModelError(
            f'the "{NAME}" attention reads boundaries (cu_seq_lens_q) and no mask, and was given a mask; '
            "pass model_inputs(batch, model), made after the attention was set"
        )
    width = query.shape[2]
    if key.shape[2] != width:
        raise ModelError(
            f'the "{NAME}" attention was called with {key.shape[2]:,} keys for {width:,} queries a row, so a '
            "cache is on; pass use_cache=False"
        )


def _checked_boundaries(rows: int, width: int, cu_seq_lens_q: torch.Tensor | None) -> torch.Tensor:
    if cu_seq_lens_q is None:
        raise ModelError(
            f'the "{NAME}" attention was called without boundaries (cu_seq_lens_q), so documents would '
            "attend to each other; pass model_inputs(batch, model); to generate text, for padded batches, and "
            "where the model doesn't pass its arguments to its layers, choose "
            'model.set_attn_implementation("sdpa")'
        )
    # On a GPU, reading the end would wait for the device in every layer; compiled, it would end the graph.
    is_read = cu_seq_lens_q.device.type == "cpu" and not torch.compiler.is_compiling()
    if is_read and int(cu_seq_lens_q[-1]) != rows * width:
        raise ModelError(
            f"the boundaries end at token {int(cu_seq_lens_q[-1]):,}, but the batch has {rows:,} x {width:,} "
            "tokens; padding needs segments of its own, as in PackedBatch.cu_seqlens"
        )
    return cu_seq_lens_q
