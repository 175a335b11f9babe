"""Attention of one rectangle: queries over some keys, with the log-sum-exp by which rectangles are merged.

A row's attention over all its keys is the mean of its attention over parts of them, weighted by `exp` of each part's
log-sum-exp. A part's backward needs only the merged output and log-sum-exp (Dao 2023, "FlashAttention-2", arXiv
2307.08691; Liu, Zaharia & Abbeel 2023, "Ring Attention", arXiv 2310.01889), so merging isn't differentiated.
PyTorch's kernels compute rectangles on CPU in every floating dtype, on CUDA in half precision. Scores are formed here
for what they don't compute, such as soft caps and the edges of sliding windows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from varlen.attention.rules import LayerRules

_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_CUDA = torch.ops.aten._scaled_dot_product_flash_attention
_CUDA_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward

HALF = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256  # the widest head that the CUDA kernels take

Pair = tuple[torch.Tensor, torch.Tensor]
"""Of keys and of values: `[1, key_heads, tokens, dim]`, neighbouring tokens side by side in memory."""
Partial = tuple[torch.Tensor, torch.Tensor]
"""Output `[1, query_heads, rows, dim]` in any dtype; log-sum-exp `[1, query_heads, rows]`, float32 or wider."""


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rules: LayerRules,
    *,
    causal: bool = False,
    seen: torch.Tensor | None = None,
) -> Partial:
    """Attend from all rows to these keys.

    Args:
        query: `[1, query_heads, rows, dim]`, any strides.
        key: `[1, key_heads, keys, dim]`; `query_heads` is a multiple of `key_heads`, and no key is copied.
        value: `[1, key_heads, keys, value_dim]`.
        seen: bool `[rows, keys]`, which keys each row sees; None for all, or as `causal` requires.

    Returns:
        The output, `[1, query_heads, rows, value_dim]`, 0 in rows that see no key, and their log-sum-exp, `-inf`
        in such rows.
    """
    if seen is not None or rules.softcap is not None or not _has_kernel(query, value):
        return _forward_by_scores(query, key, value, rules, _seen(query, causal, seen))
    width, value_width = max(query.shape[-1], value.shape[-1]), value.shape[-1]
    query, key, value = _padded(width, query, key, value)
    kernel = _CUDA if query.is_cuda else _CPU
    out, lse, *_ = kernel(query, key, value, 0.0, causal, scale=rules.scale)
    return (out if value_width == width else out[..., :value_width]), lse


def backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    merged: Partial,
    rules: LayerRules,
    *,
    causal: bool = False,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return these keys' part of the gradients of queries, and the gradients of these keys and values.

    Returns:
        Gradients in the shapes of `query`, `key` and `value`; float32 or wider where scores are formed.
    """
    if seen is not None or rules.softcap is not None or not _has_kernel(query, value):
        return _backward_by_scores(gradient, query, key, value, merged, rules, _seen(query, causal, seen))
    widths = [x.shape[-1] for x in (query, key, value)]
    gradient, query, key, value, out = _padded(max(widths), gradient, query, key, value, merged[0])
    given = (gradient, query, key, value, out, merged[1].contiguous())
    if query.is_cuda:
        rows, keys, none = query.shape[2], key.shape[2], torch.empty(0, dtype=torch.int64)
        made = _CUDA_BACKWARD(*given, None, None, rows, keys, 0.0, causal, none, none, scale=rules.scale)
    else:
        made = _CPU_BACKWARD(*given, 0.0, causal, scale=rules.scale)
    by_query, by_key, by_value = (x[..., :width] for x, width in zip(made, widths))
    return by_query, by_key, by_value


def merge(one: Partial, other: Partial) -> Partial:
    """Merge attention of the same rows over two sets of keys, in the memory of the first output.

    Each row must see a key of the first set or of the second. One weight moves the first output towards the other,
    so that half precision rounds once.
    """
    weight = torch.sigmoid(other[1] - one[1]).unsqueeze(-1)
    out = one[0].lerp_(other[0].to(one[0].dtype), weight.to(one[0].dtype).expand_as(one[0]))
    return out, torch.logaddexp(one[1], other[1])


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join `[1, heads, rows, dim]` by rows, so that heads of a row lie side by side and projections need no copy."""
    return parts[0] if len(parts) == 1 else torch.cat([x.transpose(1, 2) for x in parts], 1).transpose(1, 2)


def with_sinks(merged: Partial, sinks: torch.Tensor) -> Partial:
    """Merge a score per head that takes up weight in every row and has no value (gpt-oss).

    Args:
        sinks: `[query_heads]`: a score each.
    """
    out, lse = merged
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
    return out.mul_((lse - total).exp_().unsqueeze(-1).to(out.dtype)), total


def sinks_backward(gradient: torch.Tensor, merged: Partial, sinks: torch.Tensor) -> torch.Tensor:
    """Return the gradient of sinks, `[query_heads]`; `merged` is what `with_sinks` returned."""
    out, lse = merged
    of_row = (gradient.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    weights = (sinks.to(lse.dtype)[None, :, None] - lse).exp_()
    return weights.mul_(of_row).sum((0, 2)).neg_().to(sinks.dtype)


def _has_kernel(query: torch.Tensor, value: torch.Tensor) -> bool:
    if query.device.type == "cpu":
        return True
    width = max(query.shape[-1], value.shape[-1])
    return query.is_cuda and query.dtype in HALF and width % 8 == 0 and width <= MAX_HEAD_DIM


def _padded(width: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Pad heads to one width, as kernels require; zeros change neither scores nor outputs."""
    return [x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in tensors]


def _seen(query: torch.Tensor, causal: bool, seen: torch.Tensor | None) -> torch.Tensor | None:
    if seen is not None or not causal:
        return seen
    rows = query.shape[2]
    return torch.ones(rows, rows, dtype=torch.bool, device=query.device).tril()


def _grouped(x: torch.Tensor, key_heads: int) -> torch.Tensor:
    """View `[1, query_heads, rows, dim]` as `[1, key_heads, queries a key, rows, dim]`."""
    return x.reshape(1, key_heads, -1, *x.shape[2:])


def _scores(
    query: torch.Tensor, key: torch.Tensor, rules: LayerRules, seen: torch.Tensor | None
) -> torch.Tensor:
    """Return scores `[1, key_heads, queries a key, rows, keys]`, float32 or wider, `-inf` where not seen."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = _grouped(query, key.shape[1]).to(wide) @ key.to(wide).transpose(-1, -2)[:, :, None]
    scores *= rules.scale
    if rules.softcap is not None:
        scores = scores.div_(rules.softcap).tanh_().mul_(rules.softcap)
    return scores if seen is None else scores.masked_fill_(~seen, -torch.inf)


def _forward_by_scores(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: LayerRules, seen: torch.Tensor | None
) -> Partial:
    """As `forward`; the output is float32 or wider, so that many parts can be merged before it is rounded."""
    scores = _scores(query, key, rules, seen)
    lse = scores.logsumexp(-1)
    # A row that sees nothing would compute `inf - inf`.
    weights = scores.sub_(lse.clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1)).exp_()
    out = weights @ value.to(weights.dtype)[:, :, None]
    return out.flatten(1, 2), lse.flatten(1, 2)


def _backward_by_scores(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    merged: Partial,
    rules: LayerRules,
    seen: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads = key.shape[1]
    scores = _scores(query, key, rules, seen)
    bent = None
    if rules.softcap is not None:
        bent = 1 - (scores / rules.softcap).square_()
        if seen is not None:
            bent.masked_fill_(~seen, 0.0)
    weights = scores.sub_(_grouped(merged[1], heads).unsqueeze(-1)).exp_()
    g, out = (_grouped(x, heads).to(weights.dtype) for x in (gradient, merged[0]))
    by_value = (weights.transpose(-1, -2) @ g).sum(2)
    by_weight = g @ value.to(weights.dtype).transpose(-1, -2)[:, :, None]
    by_score = weights.mul_(by_weight.sub_((g * out).sum(-1, keepdim=True))).mul_(rules.scale)
    if bent is not None:
        by_score *= bent
    by_query = (by_score @ key.to(weights.dtype)[:, :, None]).flatten(1, 2)
    by_key = (by_score.transpose(-1, -2) @ _grouped(query, heads).to(weights.dtype)).sum(2)
    return by_query, by_key, by_value
