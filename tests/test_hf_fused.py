"""The fused kernels of the "varlen" attention: called for what they compute, with what they take."""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any

import pytest
import torch
from attention_oracle import by_definition, ends_of, tensors
from hf_models import LENGTHS

from varlen.adapters.hf import attention
from varlen.adapters.hf.attention import LayerRules

# The kernels themselves need a GPU. Here they are stood in for by their documented meaning.


def fake_aten_forward(
    query: Any, key: Any, value: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, return_debug_mask: bool, *, scale: Any = None, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Any:  # fmt: skip
    """What `torch.ops.aten._flash_attention_forward` computes: causal, or causal in a window."""
    assert is_causal == (window_size_left is None)
    assert window_size_right == (None if is_causal else 0)
    assert dropout_p == 0
    assert not return_debug_mask
    assert max_q == max_k == int(cum_seq_q.diff().max())
    assert torch.equal(cum_seq_q, cum_seq_k)
    rules = LayerRules(scale=scale, window=None if window_size_left is None else window_size_left + 1)
    return by_definition(query, key, value, cum_seq_q.tolist(), rules), None


def fake_flash_attn(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, *,
    dropout_p: float, softmax_scale: Any, causal: bool, window_size: tuple[int, int], softcap: float,
) -> Any:  # fmt: skip
    """What `flash_attn.flash_attn_varlen_func` is documented to compute, for causal windows."""
    assert causal
    assert dropout_p == 0
    assert window_size[1] == 0
    window = None if window_size[0] < 0 else window_size[0] + 1
    rules = LayerRules(scale=softmax_scale, window=window, softcap=softcap or None)
    return by_definition(q, k, v, cu_seqlens_q.tolist(), rules)


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("name", ["torch", "flash_attn"])
def test_fused_kernels_are_asked_for_what_the_per_document_loop_computes(
    name: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", fake_aten_forward)
    package = types.SimpleNamespace(flash_attn_varlen_func=fake_flash_attn)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    kernel = attention.by_torch if name == "torch" else attention.by_flash_attention
    rules = LayerRules(scale=0.7, window=window, softcap=None if name == "torch" else 2.0)
    q, k, v = (x.detach() for x in tensors(sum(LENGTHS), 4, 2, 4, seed=0))
    ends = torch.tensor(ends_of(list(LENGTHS)), dtype=torch.int32)

    ours = kernel(q, k, v, ends, max(LENGTHS), rules)
    theirs = attention.attend(q, k, v, ends=ends, longest=None, rules=rules)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "rules", "flash", "expected"),
    [
        (torch.bfloat16, LayerRules(), False, "by_torch"),
        (torch.float16, LayerRules(window=9, scale=0.1), False, "by_torch"),
        (torch.bfloat16, LayerRules(softcap=30.0), True, "by_flash_attention"),
        (torch.bfloat16, LayerRules(dropout=0.1), True, "by_flash_attention"),
        (torch.bfloat16, LayerRules(softcap=30.0), False, None),
        (torch.float32, LayerRules(), True, None),
        (torch.bfloat16, LayerRules(sinks=torch.zeros(2)), True, None),
    ],
)
def test_a_fused_kernel_is_chosen_only_for_what_it_computes(
    dtype: torch.dtype, rules: LayerRules, flash: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: object() if flash else None)
    query = torch.zeros(3, 2, 8, dtype=dtype)

    kernel = attention.fused_kernel(query, query, rules)
    assert (kernel.__name__ if kernel else None) == expected


def test_heads_that_no_fused_kernel_takes_are_left_to_the_loop() -> None:
    for width, value_width in ((12, 12), (264, 264), (16, 8)):
        query, value = (torch.zeros(3, 2, each, dtype=torch.bfloat16) for each in (width, value_width))
        assert attention.fused_kernel(query, value, LayerRules()) is None


def test_the_kernel_of_this_torch_takes_what_it_is_given() -> None:
    theirs = {each.name for each in torch.ops.aten._flash_attention_forward.default._schema.arguments}

    assert set(inspect.signature(fake_aten_forward).parameters) <= theirs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="fused kernels run on CUDA")
@pytest.mark.parametrize("rules", [LayerRules(), LayerRules(scale=0.3), LayerRules(window=5)])
def test_on_cuda_the_fused_kernel_agrees_with_the_loop_in_both_passes(rules: LayerRules) -> None:
    ends, longest = torch.tensor(ends_of(list(LENGTHS)), dtype=torch.int32).cuda(), max(LENGTHS)
    made = torch.Generator().manual_seed(0)
    query, key, value, gradient = (
        torch.randn(sum(LENGTHS), heads, 64, dtype=torch.float64, generator=made) for heads in (4, 2, 2, 4)
    )
    exact = [x.requires_grad_() for x in (query, key, value)]
    given = [x.detach().bfloat16().cuda().requires_grad_() for x in exact]

    ours = attention.by_torch(*given, ends, longest, rules)
    ours.backward(gradient.bfloat16().cuda())
    loop = attention.attend(*exact, ends=ends.cpu(), longest=None, rules=rules)
    loop.backward(gradient)

    assert attention.fused_kernel(given[0], given[2], rules) is attention.by_torch
    for one, other in zip([ours, *(x.grad for x in given)], [loop, *(x.grad for x in exact)]):
        assert (one.double().cpu() - other).abs().max() < 0.02 * other.abs().max()
