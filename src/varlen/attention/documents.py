"""Attention of whole packs, document by document over flattened tokens: exact, and the fastest way on CPU.

Every document is one call of PyTorch's kernel over its own tokens, so the work is the sum of squared document
lengths, and no mask is formed. Autograd differentiates it, dropout and windows included. Slices (`tiles`) have a
backward of their own instead, since their keys stand in a cache that several calls share.
"""

from __future__ import annotations

import torch
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention

from varlen.attention.choice import chosen_for_packs
from varlen.attention.kernels import Qkv, SliceEnds, heads_of, tokens_of
from varlen.attention.rules import LayerRules

BLOCK = 512  # queries computed at once if scores are formed, so that memory is linear in the document


def attend_in_packs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    ends: torch.Tensor,
    longest: int | None,
    rules: LayerRules,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend within each segment, by the fastest kernel that computes these rules.

    Args:
        query: `[tokens, query_heads, head_dim]`.
        key: `[tokens, key_heads, head_dim]`.
        value: `[tokens, key_heads, value_dim]`.
        ends: int32 `[segments + 1]`, from 0 to `tokens`, never falling.
        longest: tokens of the longest segment; None to look, which waits for a GPU.
        sinks: `[query_heads]`: a score per head that takes up weight and gives no value.

    Returns:
        `[tokens, query_heads, value_dim]`.
    """
    if (kernel := chosen_for_packs(query, value, rules, has_sinks=sinks is not None)) is not None:
        longest = int(ends.diff().max()) if longest is None else longest
        return kernel(Qkv(query, key, value), SliceEnds(ends, ends, longest, longest), rules)
    lengths = ends.diff().tolist()
    # One split, not a slice per document: a slice's backward writes a whole array of zeros, a split's one.
    parts = zip(*(torch.split(x, lengths) for x in (query, key, value)), strict=True)
    if rules.softcap is not None or sinks is not None:
        return torch.cat([_document_by_scores(q, k, v, rules, sinks) for q, k, v in parts if len(q)])
    return torch.cat([_document(q, k, v, rules) for q, k, v in parts if len(q)])


def _document(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: LayerRules) -> torch.Tensor:
    length, window = len(query), rules.window
    if window is None or length <= window:
        return _kernel(query, key, value, None, rules)
    if not rules.is_causal:
        return _windows_to_both_sides(query, key, value, rules, window)
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


def _windows_to_both_sides(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: LayerRules, window: int
) -> torch.Tensor:
    """Attend to fewer than `window` tokens before and behind, block by block: linear in the length."""
    length, block, out = len(query), min(max(window, 64), BLOCK), []
    for start in range(0, length, block):
        stop = min(start + block, length)
        first, last = max(0, start - window + 1), min(length, stop + window - 1)
        at, keys = (torch.arange(*span, device=query.device) for span in ((start, stop), (first, last)))
        mask = (at[:, None] - keys).abs() < window
        out.append(_kernel(query[start:stop], key[first:last], value[first:last], mask, rules))
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
    """Call PyTorch's attention on `[tokens, heads, dim]`; without a mask, by the direction of the rules."""
    q, k, v = (heads_of(x) for x in (query, key, value))
    out = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None and rules.is_causal,
        dropout_p=rules.dropout,
        scale=rules.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return tokens_of(out)


def _document_by_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rules: LayerRules,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend within one document by forming scores, for rules that PyTorch's kernel doesn't compute."""
    length = len(query)
    reach = length if rules.window is None else rules.window
    out = []
    for start in range(0, length, BLOCK):
        stop, first = min(start + BLOCK, length), max(0, start - reach + 1)
        last = stop if rules.is_causal else min(length, stop + reach - 1)
        block = query[start:stop], key[first:last], value[first:last]
        out.append(_block_by_scores(*block, start - first, rules, sinks))
    return torch.cat(out)


def _block_by_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offset: int,
    rules: LayerRules,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend from one block of queries; query i stands at key `offset + i`."""
    rows, heads, dim = query.shape
    groups = key.shape[1]
    q = query.view(rows, groups, heads // groups, dim).permute(1, 2, 0, 3)
    scores = (q * rules.scale) @ key.permute(1, 2, 0)[:, None]
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    at, keys = (torch.arange(*span, device=query.device) for span in ((offset, offset + rows), (len(key),)))
    distance = at[:, None] - keys
    seen = distance >= 0 if rules.is_causal else torch.ones_like(distance, dtype=torch.bool)
    if rules.window is not None:
        seen = seen & (distance.abs() < rules.window)
    scores = scores.masked_fill(~seen, float("-inf"))
    wide = torch.promote_types(scores.dtype, torch.float32)
    if sinks is not None:
        at_rows = sinks.view(groups, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, at_rows.to(scores.dtype)], dim=-1)
    weights = scores.softmax(-1, dtype=wide).to(value.dtype)[..., : len(key)]
    weights = drop(weights, rules.dropout, training=rules.dropout > 0)
    out = weights @ value.transpose(0, 1)[:, None]
    return out.permute(2, 0, 1, 3).reshape(rows, heads, -1)
