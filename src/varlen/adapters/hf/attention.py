"""An attention function named "varlen" for transformers: every document attends to itself alone.

It goes through transformers' own registry, so that no model class is patched, and it refuses whatever would
make it leak: missing boundaries, a mask, a pattern that it isn't told about.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from varlen.adapters.hf.model import implementation, text_config, unwrap
from varlen.errors import ModelError

NAME = "varlen"
UNKNOWN_PATTERNS = ("position_bias", "sinks", "indices", "block_indices")
"""Arguments by which some families change who is attended to, and which this attention doesn't compute."""


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
        ModelError: not a transformers model, or its attention doesn't go through transformers' registry.
    """
    text_config(model)
    register()
    base = unwrap(model)
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
    if rest.get("use_vmap") or (chunk is not None and rest.get("local_size") == chunk):
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
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within documents; transformers' calling convention.

    Args:
        query: `[rows, query_heads, width, head_dim]`.
        key: `[rows, key_heads, width, head_dim]`; `query_heads` is a multiple of `key_heads`.
        s_aux: `[query_heads]`, a score per head that takes up weight and gives no value (GPT-OSS).
        cu_seq_lens_q: int32 `[segments + 1]`, over the flattened `rows * width` tokens.

    Returns:
        `[rows, width, query_heads, value_dim]`, and None for the weights, which are never formed.
    """
    ends = _checked_boundaries(query, key, attention_mask, cu_seq_lens_q)
    _check_pattern(module, sliding_window, is_causal, rest)
    rows, _, width, _ = query.shape
    rules = LayerRules(scale=scaling, window=sliding_window, softcap=softcap, sinks=s_aux, dropout=dropout)
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    out = attend(*flat, ends=ends, longest=max_length_q, rules=rules)
    return out.view(rows, width, *out.shape[1:]), None


def _checked_boundaries(
    query: torch.Tensor, key: torch.Tensor, attention_mask: Any, cu_seq_lens_q: torch.Tensor | None
) -> torch.Tensor:
    if attention_mask is not None:
        raise ModelError(
            f'the "{NAME}" attention reads boundaries (cu_seq_lens_q) and no mask, and was given a mask; '
            "pass model_inputs(batch, model), made after the attention was set"
        )
    if cu_seq_lens_q is None:
        raise ModelError(
            f'the "{NAME}" attention was called without boundaries (cu_seq_lens_q), so documents would '
            "attend to each other; pass model_inputs(batch, model); to generate text, for padded batches, and "
            "where the model doesn't hand its arguments on to its layers, choose "
            'model.set_attn_implementation("sdpa")'
        )
    rows, _, width, _ = query.shape
    if key.shape[2] != width:
        raise ModelError(
            f'the "{NAME}" attention was called with {key.shape[2]:,} keys for {width:,} queries a row, so a '
            "cache is on; pass use_cache=False"
        )
    # On a GPU, reading the end would wait for the device in every layer.
    if cu_seq_lens_q.device.type == "cpu" and int(cu_seq_lens_q[-1]) != rows * width:
        raise ModelError(
            f"the boundaries end at token {int(cu_seq_lens_q[-1]):,}, but the batch has {rows:,} x {width:,} "
            "tokens; padding needs segments of its own, as in PackedBatch.cu_seqlens"
        )
    return cu_seq_lens_q


def _check_pattern(
    module: torch.nn.Module, window: int | None, is_causal: bool | None, rest: dict[str, Any]
) -> None:
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        raise ModelError(
            f'the "{NAME}" attention is causal, and {type(module).__name__} attends in both directions'
        )
    given = [name for name in UNKNOWN_PATTERNS if rest.get(name) is not None]
    if given:
        raise ModelError(
            f'{type(module).__name__} passes {", ".join(given)}, which the "{NAME}" attention doesn\'t '
            'compute; choose model.set_attn_implementation("sdpa")'
        )
    kinds, layer = (
        getattr(getattr(module, "config", None), "layer_types", None),
        getattr(module, "layer_idx", None),
    )
    if window is None and kinds and layer is not None and kinds[layer] == "sliding_attention":
        raise ModelError(
            f"layer {layer} slides a window, but {type(module).__name__} doesn't tell the "
            f'"{NAME}" attention how wide; choose model.set_attn_implementation("sdpa")'
        )


# Attention document by document over a flattened batch, with backward: exact, and the fastest way on CPU.
#
# Every document is one call of PyTorch's causal kernel over its own tokens, so the work is the sum of squared
# document lengths, and no mask is ever formed.

BLOCK = 512
"""Queries computed at once where scores must be formed, so that memory is linear in the document."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    ends: torch.Tensor,
    longest: int | None,
    rules: LayerRules,
) -> torch.Tensor:
    """Attend causally within each segment, by the fastest kernel that computes these rules.

    Args:
        query: `[tokens, query_heads, head_dim]`.
        key: `[tokens, key_heads, head_dim]`.
        value: `[tokens, key_heads, value_dim]`.
        ends: int32 `[segments + 1]`, from 0 to `tokens`, never falling.

    Returns:
        `[tokens, query_heads, value_dim]`.
    """
    if query.is_cuda and (kernel := fused_kernel(query, value, rules)) is not None:
        return kernel(query, key, value, ends, int(ends.diff().max()) if longest is None else longest, rules)
    lengths = ends.diff().tolist()
    # One split, not a slice per document: a slice's backward writes a whole array of zeros, a split's one.
    parts = zip(*(torch.split(x, lengths) for x in (query, key, value)), strict=True)
    document = _document_by_scores if rules.softcap or rules.sinks is not None else _document
    return torch.cat([document(q, k, v, rules) for q, k, v in parts if len(q)])


def _document(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: LayerRules) -> torch.Tensor:
    """Attend within one document with PyTorch's kernel."""
    length, window = len(query), rules.window
    if window is None or length <= window:
        return _kernel(query, key, value, None, rules)
    # The first `window` tokens see all before them; later ones in blocks, each over the keys that its
    # window reaches: linear in the length. Whole blocks share one mask.
    block = min(max(window, 64), BLOCK)
    out = [_kernel(query[:window], key[:window], value[:window], None, rules)]
    band = _band(block, window, query.device)
    for start in range(window, length, block):
        stop = min(start + block, length)
        first, rows = start - window + 1, stop - start
        mask = band[:rows, : window - 1 + rows]
        out.append(_kernel(query[start:stop], key[first:stop], value[first:stop], mask, rules))
    return torch.cat(out)


def _band(rows: int, window: int, device: torch.device) -> torch.Tensor:
    """Return bool `[rows, window - 1 + rows]`: row r sees the columns r to r + window - 1."""
    distance = (
        torch.arange(window - 1 + rows, device=device)[None] - torch.arange(rows, device=device)[:, None]
    )
    return (distance >= 0) & (distance < window)


def _kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, rules: LayerRules
) -> torch.Tensor:
    """Call PyTorch's attention on `[tokens, heads, dim]`; without a mask, causally."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        dropout_p=rules.dropout,
        scale=rules.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out[0].transpose(0, 1)


def _document_by_scores(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: LayerRules
) -> torch.Tensor:
    """Attend within one document with scores formed, for rules that PyTorch's kernel doesn't compute."""
    length = len(query)
    reach = length if rules.window is None else rules.window
    out = []
    for start in range(0, length, BLOCK):
        stop, first = min(start + BLOCK, length), max(0, start - reach + 1)
        out.append(
            _block_by_scores(query[start:stop], key[first:stop], value[first:stop], start - first, rules)
        )
    return torch.cat(out)


def _block_by_scores(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offset: int, rules: LayerRules
) -> torch.Tensor:
    """Attend from one block of queries; query i stands at key `offset + i`."""
    rows, heads, dim = query.shape
    groups = key.shape[1]
    scale = dim**-0.5 if rules.scale is None else rules.scale
    q = query.view(rows, groups, heads // groups, dim).permute(1, 2, 0, 3)
    scores = (q * scale) @ key.permute(1, 2, 0)[:, None]
    if rules.softcap:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    distance = torch.arange(offset, offset + rows, device=query.device)[:, None] - torch.arange(
        len(key), device=query.device
    )
    seen = distance >= 0 if rules.window is None else (distance >= 0) & (distance < rules.window)
    scores = scores.masked_fill(~seen, float("-inf"))
    wide = torch.promote_types(scores.dtype, torch.float32)
    if rules.sinks is not None:
        sinks = rules.sinks.view(groups, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    weights = scores.softmax(-1, dtype=wide).to(value.dtype)[..., : len(key)]
    weights = drop(weights, rules.dropout, training=rules.dropout > 0)
    out = weights @ value.transpose(0, 1)[:, None]
    return out.permute(2, 0, 1, 3).reshape(rows, heads, -1)


# LayerRules: how one attention layer weighs what it attends to, as every kernel needs to know it.


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRules:
    """How one layer weighs what it attends to."""

    scale: float | None = None
    """Factor on scores; None for `head_dim ** -0.5`."""
    window: int | None = None
    """Attend to the last this many tokens, the token itself included; None for all."""
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)`; None for no cap."""
    sinks: torch.Tensor | None = None
    """`[query_heads]`: a score per head that takes up weight and gives no value."""
    dropout: float = 0.0
    """Share of attention weights set to 0."""


# Variable-length attention kernels for CUDA: PyTorch's own, and FlashAttention's where it is installed.
#
# Both take all documents in one call and half precision only. `attend` computes what neither does.


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, LayerRules], torch.Tensor]
"""Takes queries, keys and values as `attend` does, in half precision, where segments end, and the longest one."""

MAX_HEAD_DIM = 256


def fused_kernel(query: torch.Tensor, value: torch.Tensor, rules: LayerRules) -> Kernel | None:
    """Return a kernel that computes these rules on CUDA in one call, or None where none does."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    width = query.shape[-1]
    if not half or rules.sinks is not None or width != value.shape[-1] or width % 8 or width > MAX_HEAD_DIM:
        return None
    if rules.softcap is None and rules.dropout == 0:
        return by_torch
    return by_flash_attention if importlib.util.find_spec("flash_attn") is not None else None


def by_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    rules: LayerRules,
) -> torch.Tensor:
    """Attend within segments with the kernel that `torch.nn.attention.varlen` calls.

    `varlen_attn` itself takes no scale, window or grouped heads in PyTorch 2.11.
    """
    # A window is one of both sides, and takes the place of the causal diagonal.
    sides = (None, None) if rules.window is None else (rules.window - 1, 0)
    out: Any = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        ends,
        ends,
        longest,
        longest,
        0.0,
        rules.window is None,
        False,
        scale=rules.scale,
        window_size_left=sides[0],
        window_size_right=sides[1],
    )
    return out[0]  # type: ignore[no-any-return]


def by_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    rules: LayerRules,
) -> torch.Tensor:
    """Attend within segments with the flash-attn package."""
    flash_attn: Any = importlib.import_module("flash_attn")
    out: Any = flash_attn.flash_attn_varlen_func(
        query,
        key,
        value,
        ends,
        ends,
        longest,
        longest,
        dropout_p=rules.dropout,
        softmax_scale=rules.scale,
        causal=True,
        window_size=(_to_the_left(rules), 0),
        softcap=rules.softcap or 0.0,
    )
    return out  # type: ignore[no-any-return]


def _to_the_left(rules: LayerRules) -> int:
    """Return how many earlier tokens the kernels may look back to: they don't count the token itself."""
    return -1 if rules.window is None else rules.window - 1
