"""The registered "varlen" attention and its fused kernels: exact per document, and refusing whatever would leak."""

import inspect
import math
import sys
import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.hf_models import GROUPED, LENGTHS, loss_one_by_one, make, packed, packed_loss, tiny
from transformers import AttentionInterface, FalconConfig, GptOssConfig, Llama4TextConfig, LlamaConfig

from varlen.adapters import hf
from varlen.adapters.hf import attention
from varlen.adapters.hf.attention import NAME, LayerRules, varlen_attention
from varlen.errors import ModelError


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=5).filter(sum),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    window=st.sampled_from([None, 1, 2, 5, 11, 12]),
    softcap=st.sampled_from([None, 1.5]),
    with_sinks=st.booleans(),
    scale=st.sampled_from([None, 0.3]),
    value_dim=st.sampled_from([4, 6]),
    block=st.sampled_from([1, 3, 512]),
)
def test_outputs_and_gradients_are_those_of_the_definition(
    lengths, heads, window, softcap, with_sinks, scale,
    value_dim, block
):  # fmt: skip
    q, k, v = tensors(sum(lengths), *heads, value_dim, seed=len(lengths))
    sinks = torch.linspace(-1, 1, heads[0], dtype=torch.float64, requires_grad=True) if with_sinks else None
    rules = LayerRules(scale=scale, window=window, softcap=softcap, sinks=sinks)
    inputs = [q, k, v, *([sinks] if sinks is not None else [])]
    ends = ends_of(lengths)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BLOCK", block)
        ours = attention.attend(q, k, v, ends=torch.tensor(ends), longest=None, rules=rules)
    theirs = by_definition(q, k, v, ends, rules)

    weights = torch.arange(theirs.numel(), dtype=torch.float64).view_as(theirs).cos()
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    for mine, other in zip(
        torch.autograd.grad((ours * weights).sum(), inputs),
        torch.autograd.grad((theirs * weights).sum(), inputs),
    ):
        assert torch.allclose(mine, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("window", [None, 70])
def test_documents_longer_than_a_block_are_exact(window):
    lengths = [300, 5, 129]
    q, k, v = (x.detach() for x in tensors(sum(lengths), 2, 1, 4, seed=0))
    ends, rules = ends_of(lengths), LayerRules(window=window)
    ours = attention.attend(q, k, v, ends=torch.tensor(ends), longest=None, rules=rules)

    assert torch.allclose(ours, by_definition(q, k, v, ends, rules), rtol=0, atol=1e-12)


def test_a_document_does_not_feel_even_infinities_in_another():
    q, k, v = (x.detach() for x in tensors(9, 2, 1, 4, seed=0))
    clean = attention.attend(q, k, v, ends=torch.tensor([0, 4, 9]), longest=None, rules=LayerRules())
    for x in (q, k, v):
        x[:4] = math.nan
    dirty = attention.attend(q, k, v, ends=torch.tensor([0, 4, 9]), longest=None, rules=LayerRules())

    assert torch.equal(clean[4:], dirty[4:])
    assert bool(dirty[:4].isnan().all())


def test_dropout_leaves_out_weights_in_training_and_none_in_evaluation():
    model = make(LlamaConfig(**GROUPED, attention_dropout=0.5), NAME)
    arguments = hf.model_inputs(packed(), model)
    torch.manual_seed(0)
    first, second = model.train()(**arguments).logits, model(**arguments).logits
    calm, again = model.eval()(**arguments).logits, model(**arguments).logits

    assert not torch.equal(first, second)
    assert torch.equal(calm, again)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_dropout_keeps_the_mean(softcap):
    q, k, _ = (x.detach() for x in tensors(8, 1, 1, 4, seed=0))
    rules, ones = LayerRules(dropout=0.4, softcap=softcap), torch.ones(8, 1, 4, dtype=torch.float64)
    torch.manual_seed(0)
    runs = torch.stack(
        [
            attention.attend(q, k, ones, ends=torch.tensor([0, 8]), longest=None, rules=rules)
            for _ in range(1500)
        ]
    )

    assert runs.mean(0).flatten().tolist() == pytest.approx([1.0] * 32, abs=0.1)
    assert float(runs.std()) > 0.3


def test_attention_sinks_are_those_of_the_model_that_has_them():
    config = GptOssConfig(
        **GROUPED, sliding_window=6, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    models = [make(config, name) for name in ("eager", NAME)]
    for model in models:
        model.set_experts_implementation("eager")
    losses = [packed_loss(model, packed()).item() for model in models]

    # transformers computes eager softmax in float32.
    assert losses[0] == pytest.approx(losses[1], rel=1e-7)
    for layer in models[1].model.layers:
        layer.self_attn.sinks.data -= 1
    assert packed_loss(models[1], packed()).item() != pytest.approx(losses[1], rel=1e-4)


def test_half_precision_is_taken():
    model = tiny("llama", NAME, torch.bfloat16)

    assert packed_loss(model, packed()).item() == pytest.approx(
        loss_one_by_one(tiny("llama", NAME)).item(), rel=0.02
    )


def test_logits_at_padding_are_finite():
    model, batch = tiny("llama", NAME), packed()

    assert (batch.segment_ids < 0).any()
    assert bool(model(**hf.model_inputs(batch, model)).logits.isfinite().all())


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
def test_gradient_checkpointing_computes_the_same():
    model = tiny("llama", NAME).train()
    plain = packed_loss(model, packed())
    plain_gradients = torch.autograd.grad(plain, list(model.parameters()))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again = torch.autograd.grad(packed_loss(model, packed()), list(model.parameters()))

    assert all(torch.equal(a, b) for a, b in zip(plain_gradients, again))


def test_registering_twice_changes_nothing():
    assert hf.register() == hf.register() == NAME
    assert AttentionInterface._global_mapping[NAME] is varlen_attention


def test_use_varlen_attention_sets_it_and_returns_the_model():
    model = tiny("llama", "sdpa")

    assert hf.use_varlen_attention(model) is model
    assert hf.implementation(model) == NAME


def test_use_varlen_attention_refuses_a_model_with_an_attention_of_its_own():
    model = make(
        FalconConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4), "eager"
    )

    with pytest.raises(ModelError, match=r'FalconForCausalLM computes attention by itself.*keeps "eager"'):
        hf.use_varlen_attention(model)


def tokens(rows: int = 2, width: int = 8) -> torch.Tensor:
    return torch.arange(rows * width).view(rows, width) + 1


def test_a_call_without_boundaries_is_refused():
    with pytest.raises(ModelError, match=r"without boundaries.*pass model_inputs\(batch, model\)"):
        tiny("llama", NAME)(input_ids=tokens(), use_cache=False)


def test_padded_input_with_a_mask_is_refused_and_all_ones_is_not():
    model, mask = tiny("llama", NAME), torch.ones(2, 8, dtype=torch.int64)
    arguments = hf.plain_inputs(tokens(), model)
    assert model(**arguments, attention_mask=mask).logits.shape == (2, 8, 97)

    mask[1, 5:] = 0
    with pytest.raises(ModelError, match="3 masked positions"):
        model(**arguments, attention_mask=mask)


def test_arguments_made_for_another_attention_are_refused():
    model = tiny("llama", "sdpa")
    arguments = hf.model_inputs(packed(), model)
    hf.use_varlen_attention(model)

    with pytest.raises(ModelError, match="no mask, and was given a mask"):
        model(**arguments)


def test_a_cache_with_earlier_tokens_is_refused():
    model = tiny("llama", NAME)
    arguments = hf.plain_inputs(tokens(1), model) | {"use_cache": True}
    cache = model(**arguments).past_key_values

    with pytest.raises(ModelError, match="16 keys for 8 queries a row, so a cache is on"):
        model(**arguments, past_key_values=cache)


def test_generating_text_is_refused_with_the_way_out():
    with pytest.raises(ModelError, match=r'to generate text.*set_attn_implementation\("sdpa"\)'):
        tiny("llama", NAME).generate(tokens(1), max_new_tokens=2, do_sample=False)


def test_boundaries_that_leave_tokens_out_are_refused():
    model = tiny("llama", NAME)
    arguments = hf.plain_inputs(tokens(), model)
    arguments["cu_seq_lens_q"] = arguments["cu_seq_lens_q"][:-1]

    with pytest.raises(ModelError, match="end at token 8, but the batch has 2 x 8 tokens"):
        model(**arguments)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"is_causal": False}, "attends in both directions"),
        ({"position_bias": torch.zeros(1)}, "passes position_bias"),
        ({"sliding": True}, "layer 0 slides a window, but Layer doesn't tell"),
    ],
    ids=["bidirectional", "bias", "window untold"],
)
def test_patterns_that_it_is_not_told_or_does_not_compute_are_refused(change, words):
    kind = "sliding_attention" if "sliding" in change else "full_attention"

    class Layer(torch.nn.Module):
        layer_idx = 0
        config = types.SimpleNamespace(layer_types=[kind])

    arguments = {name: value for name, value in change.items() if name != "sliding"}
    heads = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ModelError, match=words):
        varlen_attention(Layer(), heads, heads, heads, None, cu_seq_lens_q=torch.tensor([0, 4]), **arguments)


def test_chunked_attention_is_refused_since_chunks_reach_only_masks():
    config = Llama4TextConfig(
        **GROUPED, attention_chunk_size=8, intermediate_size_mlp=64, num_local_experts=2,
        interleave_moe_layer_step=2,
        layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0],
    )  # fmt: skip
    model = make(config, NAME, torch.float32)
    with pytest.raises(ModelError, match="pattern of its own"):
        model(**hf.model_inputs(packed(), model))

    model.set_attn_implementation("sdpa")
    assert packed_loss(model, packed()).item() == pytest.approx(loss_one_by_one(model).item(), rel=1e-5)


def test_what_is_no_transformers_model_is_refused_in_a_sentence():
    with pytest.raises(ModelError, match="Linear has no transformers config"):
        hf.use_varlen_attention(torch.nn.Linear(2, 2))


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: list[int], rules: LayerRules
) -> Any:
    """Attention within segments, a query and a head at a time, as the formula says."""
    tokens, heads, dim = q.shape
    group = heads // k.shape[1]
    scale = dim**-0.5 if rules.scale is None else rules.scale
    rows = []
    for start, stop in zip(ends[:-1], ends[1:]):
        for i in range(start, stop):
            first = start if rules.window is None else max(start, i - rules.window + 1)
            for h in range(heads):
                scores = k[first : i + 1, h // group] @ q[i, h] * scale
                if rules.softcap:
                    scores = rules.softcap * torch.tanh(scores / rules.softcap)
                weights = torch.exp(scores)
                total = weights.sum()
                if rules.sinks is not None:
                    total = total + torch.exp(rules.sinks[h])
                rows.append((weights / total) @ v[first : i + 1, h // group])
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
def test_fused_kernels_are_asked_for_what_the_per_document_loop_computes(name, window, monkeypatch):
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
def test_a_fused_kernel_is_chosen_only_for_what_it_computes(dtype, rules, flash, expected, monkeypatch):
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: object() if flash else None)
    query = torch.zeros(3, 2, 8, dtype=dtype)

    kernel = attention.fused_kernel(query, query, rules)
    assert (kernel.__name__ if kernel else None) == expected


def test_heads_that_no_fused_kernel_takes_are_left_to_the_loop():
    for width, value_width in ((12, 12), (264, 264), (16, 8)):
        query, value = (torch.zeros(3, 2, each, dtype=torch.bfloat16) for each in (width, value_width))
        assert attention.fused_kernel(query, value, LayerRules()) is None


def test_the_kernel_of_this_torch_takes_what_it_is_given():
    theirs = {each.name for each in torch.ops.aten._flash_attention_forward.default._schema.arguments}

    assert set(inspect.signature(fake_aten_forward).parameters) <= theirs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="fused kernels run on CUDA")
@pytest.mark.parametrize("rules", [LayerRules(), LayerRules(scale=0.3), LayerRules(window=5)])
def test_on_cuda_the_fused_kernel_agrees_with_the_loop_in_both_passes(rules):
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
