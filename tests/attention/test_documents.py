"""Attention of whole packs and its fused kernels: exact per document."""

import inspect
import math
import sys
import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.hf_models import LENGTHS

from varlen.attention import choice, documents
from varlen.attention.choice import chosen_for_packs
from varlen.attention.documents import attend_in_packs
from varlen.attention.kernels import FlashAttn, Qkv, SliceEnds, TorchVarlen
from varlen.attention.rules import LayerRules


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=5).filter(sum),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    window=st.sampled_from([None, 1, 2, 5, 11, 12]),
    softcap=st.sampled_from([None, 1.5]),
    with_sinks=st.booleans(),
    scale=st.sampled_from([0.5, 0.3]),
    value_dim=st.sampled_from([4, 6]),
    block=st.sampled_from([1, 3, 512]),
    causal=st.booleans(),
)
def test_outputs_and_gradients_are_those_of_the_definition(
    lengths, heads, window, softcap, with_sinks, scale,
    value_dim, block, causal
):  # fmt: skip
    q, k, v = tensors(sum(lengths), *heads, value_dim, seed=len(lengths))
    sinks = torch.linspace(-1, 1, heads[0], dtype=torch.float64, requires_grad=True) if with_sinks else None
    rules = LayerRules(scale, window, softcap, is_causal=causal)
    inputs = [q, k, v, *([sinks] if sinks is not None else [])]
    ends = ends_of(lengths)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "BLOCK", block)
        ours = attend_in_packs(q, k, v, ends=torch.tensor(ends), longest=None, rules=rules, sinks=sinks)
    theirs = by_definition(q, k, v, ends, rules, sinks)

    weights = torch.arange(theirs.numel(), dtype=torch.float64).view_as(theirs).cos()
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    for mine, other in zip(
        torch.autograd.grad((ours * weights).sum(), inputs),
        torch.autograd.grad((theirs * weights).sum(), inputs),
    ):
        assert torch.allclose(mine, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 70])
def test_documents_longer_than_a_block_are_exact(window, causal):
    lengths = [300, 5, 129]
    q, k, v = (x.detach() for x in tensors(sum(lengths), 2, 1, 4, seed=0))
    ends, rules = ends_of(lengths), LayerRules(0.5, window, is_causal=causal)
    ours = attend_in_packs(q, k, v, ends=torch.tensor(ends), longest=None, rules=rules)

    assert torch.allclose(ours, by_definition(q, k, v, ends, rules), rtol=0, atol=1e-12)


def test_a_document_does_not_feel_even_infinities_in_another():
    q, k, v = (x.detach() for x in tensors(9, 2, 1, 4, seed=0))
    clean = attend_in_packs(q, k, v, ends=torch.tensor([0, 4, 9]), longest=None, rules=LayerRules(0.5))
    for x in (q, k, v):
        x[:4] = math.nan
    dirty = attend_in_packs(q, k, v, ends=torch.tensor([0, 4, 9]), longest=None, rules=LayerRules(0.5))

    assert torch.equal(clean[4:], dirty[4:])
    assert bool(dirty[:4].isnan().all())


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_dropout_keeps_the_mean(softcap):
    q, k, _ = (x.detach() for x in tensors(8, 1, 1, 4, seed=0))
    rules, ones = LayerRules(0.5, softcap=softcap, dropout=0.4), torch.ones(8, 1, 4, dtype=torch.float64)
    torch.manual_seed(0)
    runs = torch.stack(
        [
            attend_in_packs(q, k, ones, ends=torch.tensor([0, 8]), longest=None, rules=rules)
            for _ in range(1500)
        ]
    )

    assert runs.mean(0).flatten().tolist() == pytest.approx([1.0] * 32, abs=0.1)
    assert float(runs.std()) > 0.3


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def by_definition(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ends: list[int],
    rules: LayerRules,
    sinks: torch.Tensor | None = None,
) -> Any:
    """Attention within segments, a query and a head at a time, as the formula says."""
    tokens, heads, _ = q.shape
    group = heads // k.shape[1]
    rows = []
    for start, stop in zip(ends[:-1], ends[1:]):
        for i in range(start, stop):
            first = start if rules.window is None else max(start, i - rules.window + 1)
            last = stop if rules.window is None else min(stop, i + rules.window)
            last = i + 1 if rules.is_causal else last
            for h in range(heads):
                scores = k[first:last, h // group] @ q[i, h] * rules.scale
                if rules.softcap:
                    scores = rules.softcap * torch.tanh(scores / rules.softcap)
                weights = torch.exp(scores)
                total = weights.sum()
                if sinks is not None:
                    total = total + torch.exp(sinks[h])
                rows.append((weights / total) @ v[first:last, h // group])
    return torch.stack(rows).view(tokens, heads, -1)


def tensors(tokens: int, heads: int, groups: int, value_dim: int, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, heads, 4), (tokens, groups, 4), (tokens, groups, value_dim))
    return tuple(  # type: ignore[return-value]
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes
    )


def ends_of(lengths: list[int]) -> list[int]:
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


# The kernels themselves need a GPU. Here they are stood in for by their documented meaning.


def fake_aten_forward(
    query: Any, key: Any, value: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, return_debug_mask: bool, *, scale: Any = None, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Any:  # fmt: skip
    """What `torch.ops.aten._flash_attention_forward` computes: causal, or within windows of two sides."""
    open_to_both = not is_causal and window_size_left == window_size_right
    assert open_to_both or is_causal == (window_size_left is None)
    assert open_to_both or window_size_right == (None if is_causal else 0)
    assert dropout_p == 0
    assert not return_debug_mask
    assert max_q == max_k == int(cum_seq_q.diff().max())
    assert torch.equal(cum_seq_q, cum_seq_k)
    window = None if window_size_left is None else window_size_left + 1
    rules = LayerRules(scale, window, is_causal=not open_to_both)
    return by_definition(query, key, value, cum_seq_q.tolist(), rules), None


def fake_flash_attn(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, *,
    dropout_p: float, softmax_scale: Any, causal: bool, window_size: tuple[int, int], softcap: float,
) -> Any:  # fmt: skip
    """What `flash_attn.flash_attn_varlen_func` is documented to compute."""
    assert dropout_p == 0
    assert window_size[1] == (0 if causal else window_size[0])
    window = None if window_size[0] < 0 else window_size[0] + 1
    rules = LayerRules(softmax_scale, window, softcap or None, is_causal=causal)
    return by_definition(q, k, v, cu_seqlens_q.tolist(), rules)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 2, 5])
@pytest.mark.parametrize("name", ["torch", "flash_attn"])
def test_fused_kernels_are_asked_for_what_the_per_document_loop_computes(name, window, causal, monkeypatch):
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", fake_aten_forward)
    package = types.SimpleNamespace(flash_attn_varlen_func=fake_flash_attn)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    kernel = TorchVarlen().whole if name == "torch" else FlashAttn.whole
    rules = LayerRules(0.7, window, None if name == "torch" else 2.0, is_causal=causal)
    q, k, v = (x.detach() for x in tensors(sum(LENGTHS), 4, 2, 4, seed=0))
    ends = torch.tensor(ends_of(list(LENGTHS)), dtype=torch.int32)

    ours = kernel(Qkv(q, k, v), SliceEnds(ends, ends, max(LENGTHS), max(LENGTHS)), rules)
    theirs = attend_in_packs(q, k, v, ends=ends, longest=None, rules=rules)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


def on_cuda(width: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """What the choice looks at, of tensors `[3, 2, width]` on a GPU that needn't be there."""
    return types.SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(3, 2, width))


@pytest.mark.parametrize(
    ("dtype", "rules", "sinks", "flash", "expected"),
    [
        (torch.bfloat16, LayerRules(0.5), False, False, "TorchVarlen.whole"),
        (torch.float16, LayerRules(0.1, window=9), False, False, "TorchVarlen.whole"),
        (torch.bfloat16, LayerRules(0.5, softcap=30.0), False, True, "FlashAttn.whole"),
        (torch.bfloat16, LayerRules(0.5, dropout=0.1), False, True, "FlashAttn.whole"),
        (torch.bfloat16, LayerRules(0.5, softcap=30.0), False, False, None),
        (torch.float32, LayerRules(0.5), False, True, None),
        (torch.bfloat16, LayerRules(0.5), True, True, None),
    ],
)
def test_a_kernel_of_packs_is_chosen_only_for_what_it_computes(
    dtype, rules, sinks, flash, expected, monkeypatch
):
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: object() if flash else None)

    kernel = chosen_for_packs(on_cuda(8, dtype), on_cuda(8, dtype), rules, has_sinks=sinks)
    assert (kernel.__qualname__ if kernel else None) == expected  # type: ignore[attr-defined]


def test_heads_that_no_kernel_of_packs_takes_are_left_to_the_loop():
    for width, value_width in ((12, 12), (264, 264), (16, 8)):
        heads = on_cuda(width), on_cuda(value_width)
        assert chosen_for_packs(*heads, LayerRules(0.5), has_sinks=False) is None


def test_the_kernel_of_this_torch_takes_what_it_is_given():
    theirs = {each.name for each in torch.ops.aten._flash_attention_forward.default._schema.arguments}

    assert set(inspect.signature(fake_aten_forward).parameters) <= theirs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="fused kernels run on CUDA")
@pytest.mark.parametrize("rules", [LayerRules(0.125), LayerRules(0.3), LayerRules(0.125, window=5)])
def test_on_cuda_the_fused_kernel_agrees_with_the_loop_in_both_passes(rules):
    ends, longest = torch.tensor(ends_of(list(LENGTHS)), dtype=torch.int32).cuda(), max(LENGTHS)
    made = torch.Generator().manual_seed(0)
    query, key, value, gradient = (
        torch.randn(sum(LENGTHS), heads, 64, dtype=torch.float64, generator=made) for heads in (4, 2, 2, 4)
    )
    exact = [x.requires_grad_() for x in (query, key, value)]
    given = [x.detach().bfloat16().cuda().requires_grad_() for x in exact]

    ours = TorchVarlen().whole(Qkv(*given), SliceEnds(ends, ends, longest, longest), rules)
    ours.backward(gradient.bfloat16().cuda())
    loop = attend_in_packs(*exact, ends=ends.cpu(), longest=None, rules=rules)
    loop.backward(gradient)

    kernel = chosen_for_packs(given[0], given[2], rules, has_sinks=False)
    assert kernel is not None
    assert kernel.__qualname__ == "TorchVarlen.whole"
    for one, other in zip([ours, *(x.grad for x in given)], [loop, *(x.grad for x in exact)]):
        assert (one.double().cpu() - other).abs().max() < 0.02 * other.abs().max()
