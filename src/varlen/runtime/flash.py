"""One rectangle of attention at a time: queries over some keys, with the log-sum-exp that lets rectangles be merged.

A row's attention over all its keys is the mean of its attention over parts of them, weighted by `exp` of each part's
log-sum-exp. Given the merged output and the merged log-sum-exp, a part's backward is that of the whole (Dao 2023,
"FlashAttention-2", arXiv 2307.08691; Liu, Zaharia & Abbeel 2023, "Ring Attention", arXiv 2310.01889), so that nothing
is differentiated twice. PyTorch's own kernels compute it: on CPU in every floating dtype, on CUDA in half precision.
What they don't compute, bands of a sliding window among it, has its scores formed here.
"""

from __future__ import annotations

import torch

_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_CUDA = torch.ops.aten._scaled_dot_product_flash_attention
_CUDA_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward

HALF = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
"""The widest head that the CUDA kernel takes."""

Partial = tuple[torch.Tensor, torch.Tensor]
"""Output `[1, query_heads, rows, dim]` and log-sum-exp `[1, query_heads, rows]`, float32 or wider."""


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    seen: torch.Tensor | None = None,
) -> Partial:
    """Attend from all rows to these keys.

    Args:
        query: `[1, query_heads, rows, dim]`, any strides.
        key: `[1, key_heads, keys, dim]`; `query_heads` is a multiple of `key_heads`, and no key is copied.
        value: as `key`.
        scale: of scores.
        causal: row i sees the keys 0 to i; there are as many keys as rows.
        seen: bool `[rows, keys]`, which keys each row sees; None for all, or as `causal` says.

    Returns:
        The output, 0 in rows that see no key, and their log-sum-exp, `-inf` in such rows.
    """
    if seen is not None or not _has_kernel(query):
        return _forward_by_scores(query, key, value, scale, _seen(query, causal, seen))
    if query.is_cuda:
        out, lse, *_ = _CUDA(query, key, value, 0.0, causal, False, scale=scale)
        return out, lse
    out, lse = _CPU(query, key, value, 0.0, causal, scale=scale)
    return out, lse


def backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    merged: Partial,
    *,
    scale: float,
    causal: bool = False,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what these keys contribute to the gradients of queries, and the gradients of these keys and values.

    Args:
        gradient: of the merged output, in its shape.
        query: as in `forward`.
        key: as in `forward`.
        value: as in `forward`.
        merged: output and log-sum-exp over all keys of these rows, not over those given alone.
        scale: as in `forward`.
        causal: as in `forward`.
        seen: as in `forward`.
    """
    out, lse = merged
    if seen is not None or not _has_kernel(query):
        return _backward_by_scores(gradient, query, key, value, merged, scale, _seen(query, causal, seen))
    if query.is_cuda:
        rows, keys, none = query.shape[2], key.shape[2], torch.empty(0, dtype=torch.int64)
        given = (gradient, query, key, value, out, lse)
        by_query, by_key, by_value = _CUDA_BACKWARD(
            *given, None, None, rows, keys, 0.0, causal, none, none, scale=scale
        )
        return by_query, by_key, by_value
    by_query, by_key, by_value = _CPU_BACKWARD(
        gradient, query, key, value, out, lse, 0.0, causal, scale=scale
    )
    return by_query, by_key, by_value


def merge(one: Partial, other: Partial) -> Partial:
    """Merge attention of the same rows over two sets of keys; the first output's memory is used again."""
    out, lse = one[0], torch.logaddexp(one[1], other[1])
    weights = [(part[1] - lse).exp_().unsqueeze(-1).to(out.dtype) for part in (one, other)]
    return out.mul_(weights[0]).addcmul_(other[0], weights[1]), lse


def _has_kernel(query: torch.Tensor) -> bool:
    if query.device.type == "cpu":
        return True
    width = query.shape[-1]
    return query.is_cuda and query.dtype in HALF and width % 8 == 0 and width <= MAX_HEAD_DIM


def _seen(query: torch.Tensor, causal: bool, seen: torch.Tensor | None) -> torch.Tensor | None:
    if seen is not None or not causal:
        return seen
    rows = query.shape[2]
    return torch.ones(rows, rows, dtype=torch.bool, device=query.device).tril()


def _grouped(x: torch.Tensor, key_heads: int) -> torch.Tensor:
    """View `[1, query_heads, rows, dim]` as `[1, key_heads, queries a key, rows, dim]`."""
    return x.reshape(1, key_heads, -1, *x.shape[2:])


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float, seen: torch.Tensor | None) -> torch.Tensor:
    """Return scores `[1, key_heads, queries a key, rows, keys]`, float32 or wider, `-inf` where not seen."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = _grouped(query, key.shape[1]).to(wide) @ key.to(wide).transpose(-1, -2)[:, :, None] * scale
    return scores if seen is None else scores.masked_fill_(~seen, -torch.inf)


def _forward_by_scores(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, seen: torch.Tensor | None
) -> Partial:
    scores = _scores(query, key, scale, seen)
    lse = scores.logsumexp(-1)
    # A row that sees nothing would compute `inf - inf`.
    weights = scores.sub_(lse.clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1)).exp_()
    out = weights @ value.to(weights.dtype)[:, :, None]
    return out.flatten(1, 2).to(query.dtype), lse.flatten(1, 2)


def _backward_by_scores(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    merged: Partial,
    scale: float,
    seen: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads = key.shape[1]
    scores = _scores(query, key, scale, seen)
    weights = scores.sub_(_grouped(merged[1], heads).unsqueeze(-1)).exp_()
    g, out = (_grouped(x, heads).to(weights.dtype) for x in (gradient, merged[0]))
    by_value = (weights.transpose(-1, -2) @ g).sum(2)
    by_weight = g @ value.to(weights.dtype).transpose(-1, -2)[:, :, None]
    by_score = weights.mul_(by_weight.sub_((g * out).sum(-1, keepdim=True))).mul_(scale)
    by_query = (by_score @ key.to(weights.dtype)[:, :, None]).flatten(1, 2)
    by_key = (by_score.transpose(-1, -2) @ _grouped(query, heads).to(weights.dtype)).sum(2)
    return by_query.to(query.dtype), by_key.to(key.dtype), by_value.to(value.dtype)
