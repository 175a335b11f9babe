"""Documents to attend in, and kernels of whole slices that form all scores, with the arguments of the real ones."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from varlen.attention.choice import ByScores
from varlen.attention.kernels import Cudnn, FlashAttn, FlashAttn3, Flex, Lengths, TorchVarlen
from varlen.attention.rules import LayerRules

SCALE = 0.3
Tensors = list[torch.Tensor]


def document(length: int, heads: tuple[int, int], seed: int, dims: tuple[int, int] = (8, 8)) -> Tensors:
    made = torch.Generator().manual_seed(seed)
    query, key = heads
    sizes = [(query, dims[0]), (key, dims[0]), (key, dims[1])]
    return [torch.randn(1, n, length, dim, dtype=torch.float64, generator=made) for n, dim in sizes]


def whole(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of one uncut document, with all its scores."""
    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (distance < (length if window is None else window))
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * SCALE
    scores = (scores if cap is None else cap * torch.tanh(scores / cap)).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(1, -1, length, 1)], -1)
    return scores.softmax(-1)[..., :length] @ value


def one_slice(query: Any, key: Any, value: Any, scale: float, left: int, cap: float) -> tuple[Any, Any]:
    """Attention of `[rows, heads, dim]`, bottom right; `left` of -1 is no window, and of -2 no diagonal either."""
    rows, keys, groups = len(query), len(key), query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    behind = (torch.arange(rows)[:, None] + keys - rows) - torch.arange(keys)
    seen = ((behind >= 0) | (left == -2)) & ((behind <= left) if left >= 0 else True)
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value), scores.logsumexp(-1)


def slice_by_slice(
    tensors: list[torch.Tensor], starts: Any, key_starts: Any, longest: Any, *how: float
) -> tuple[Any, Any]:
    """All slices of a call; refuses what a kernel would read out of bounds."""
    query, key, value = tensors
    for at, rows, most in ((starts, query, longest[0]), (key_starts, key, longest[1])):
        assert at.dtype == torch.int32
        assert at[0] == 0
        assert at[-1] == len(rows)
        assert most == at.diff().max()
    outs, sums = [], []
    for i in range(len(starts) - 1):
        rows, keys = slice(starts[i], starts[i + 1]), slice(key_starts[i], key_starts[i + 1])
        out, lse = one_slice(query[rows], key[keys], value[keys], *how)
        outs.append(out)
        sums.append(lse)
    return torch.cat(outs), torch.cat(sums, 1)


def back(tensors: Any, gradient: torch.Tensor, merged: Any, *rest: Any) -> Any:
    """Gradients as a kernel makes them from the merged output and log-sum-exp, a share of which is these keys'."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    with torch.enable_grad():
        out, lse = slice_by_slice(leaves, *rest)
        share = (lse - merged[1]).exp().detach()
        left = (1 - share).clamp_min(1e-300)
        # What isn't these keys' is other keys' or the sinks', whose scores stand still while these keys' move.
        others = (merged[0] - out.detach() * share.T[..., None]) / left.T[..., None]
        weight = (lse - torch.logaddexp(lse, torch.log(left) + merged[1])).exp().T[..., None]
        return torch.autograd.grad(out * weight + others * (1 - weight), leaves, gradient)


def aten_forward(
    query: Any, key: Any, value: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, return_debug_mask: bool, *, scale: float, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Any:  # fmt: skip
    """`aten::_flash_attention_forward`, by its schema."""
    assert dropout_p == 0
    assert not return_debug_mask
    left = _left(is_causal, window_size_left, window_size_right)
    made = slice_by_slice([query, key, value], cum_seq_q, cum_seq_k, (max_q, max_k), scale, left, 0.0)
    return *made, torch.zeros(2), torch.zeros(0), torch.zeros(0)


def aten_backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cum_seq_q: Any, cum_seq_k: Any,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Any, unused: Any, *, scale: float,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> Any:  # fmt: skip
    """`aten::_flash_attention_backward`, by its schema."""
    assert dropout_p == 0
    assert rng_state.dtype == torch.uint64
    assert logsumexp.is_contiguous()
    left = _left(is_causal, window_size_left, window_size_right)
    given = [query, key, value]
    return back(given, grad_out, (out, logsumexp), cum_seq_q, cum_seq_k, (max_q, max_k), scale, left, 0.0)


def _left(is_causal: bool, left: int | None, right: int | None) -> int:
    """The left side of a window as of `one_slice`."""
    if left is None or left < 0:
        assert is_causal or right in (None, -1)
        return -1 if is_causal else -2
    assert right == 0
    return left


def package_forward(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0,
) -> Any:  # fmt: skip
    """`flash_attn_interface._flash_attn_varlen_forward`, as the package has it since 2.7."""
    assert dropout_p == 0
    longest = (max_seqlen_q, max_seqlen_k)
    how = (softmax_scale, _left(causal, window_size_left, window_size_right), softcap)
    return *slice_by_slice([q, k, v], cu_seqlens_q, cu_seqlens_k, longest, *how), None, torch.zeros(2)


def package_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any, cu_seqlens_q: Any,
    cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Any, deterministic: bool,
    rng_state: Any = None,
) -> Any:  # fmt: skip
    """`flash_attn_interface._flash_attn_varlen_backward`: gradients go where they are told."""
    how = (softmax_scale, _left(causal, window_size_left, window_size_right), softcap)
    rest = (cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k), *how)
    for into, made in zip((dq, dk, dv), back([q, k, v], dout, (out, softmax_lse), *rest)):
        into.copy_(made)


def hopper_forward(
    q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
) -> Any:  # fmt: skip
    """`flash_attn_interface._flash_attn_forward` of FlashAttention 3, as far as it is used."""
    how = (softmax_scale, _left(causal, window_size_left, window_size_right), softcap)
    made = slice_by_slice([q, k, v], cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k), *how)
    return *made, torch.zeros(0), torch.zeros(0)


def hopper_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, *, dq: Any, dk: Any, dv: Any, cu_seqlens_q: Any,
    cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, is_causal: bool,
    window_size_left: int, window_size_right: int, softcap: float,
) -> None:  # fmt: skip
    """`flash_attn_interface._flash_attn_backward` of FlashAttention 3: gradients go into contiguous tensors."""
    how = (softmax_scale, _left(is_causal, window_size_left, window_size_right), softcap)
    rest = (cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k), *how)
    for into, made in zip((dq, dk, dv), back([q, k, v], dout, (out, softmax_lse), *rest)):
        assert into.is_contiguous()
        into.copy_(made)


def graphs_of_cudnn(tensors: dict[str, torch.Tensor], lengths: Lengths, rules: LayerRules) -> None:
    """`CudnnGraphs.run`: results go into contiguous tensors, sums of a row's heads side by side."""
    assert all(x.is_contiguous() for x in tensors.values())
    given = [tensors[name] for name in ("query", "key", "value")]
    left = -2 if lengths.sees_all else -1 if rules.window is None else rules.window - 1
    ends = (torch.tensor([0, *each], dtype=torch.int32).cumsum(0, dtype=torch.int32) for each in lengths[:2])
    rest = (*ends, (max(lengths.queries), max(lengths.keys)), rules.scale, left, 0.0)
    if "by_out" not in tensors:
        out, lse = slice_by_slice(given, *rest)
        tensors["out"].copy_(out)
        tensors["lse"].copy_(lse.T)
        return
    made = back(given, tensors["by_out"], (tensors["out"], tensors["lse"].T), *rest)
    for name, gradient in zip(("by_query", "by_key", "by_value"), made):
        tensors[name].copy_(gradient)


def flex(
    query: Any,
    key: Any,
    value: Any,
    *,
    score_mod: Any,
    block_mask: Any,
    scale: float,
    enable_gqa: bool,
    return_aux: Any,
    kernel_options: dict[str, Any],
) -> Any:
    """FlexAttention, by its documentation: the mask and the scores are what its functions say, pair by pair."""
    assert return_aux.lse
    assert kernel_options == {"FORCE_USE_FLEX_ATTENTION": True}
    assert enable_gqa == (query.shape[1] != key.shape[1])
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * scale
    rows, keys = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])
    zero = torch.zeros((), dtype=torch.int64)
    scores = scores if score_mod is None else score_mod(scores, zero, zero, rows, keys)
    seen = block_mask.mask_mod(zero, zero, rows, keys)
    sees_any = seen.any(-1, keepdim=True)  # FlexAttention gives 0 to rows that see nothing
    scores = scores.masked_fill(~seen & sees_any, -torch.inf)
    lse = scores.logsumexp(-1).masked_fill(~sees_any[:, 0], -torch.inf)
    return (scores.softmax(-1) * sees_any) @ value, SimpleNamespace(lse=lse)


KERNELS: dict[str, Callable[[], Any]] = {
    "varlen": lambda: TorchVarlen(aten_forward, aten_backward),
    "flash_attn_3": lambda: FlashAttn3(hopper_forward, hopper_backward),
    "cudnn": lambda: Cudnn(graphs_of_cudnn),
    "flash_attn": lambda: FlashAttn(package_forward, package_backward),
    "flex": lambda: Flex(flex),
    "by_scores": ByScores,
}
