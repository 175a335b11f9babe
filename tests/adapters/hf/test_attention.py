"""The registered "varlen" attention: exact per document, and refusing whatever would leak."""

import types

import pytest
import torch
from tests.support.hf_models import GROUPED, loss_one_by_one, make, packed, packed_loss, tiny
from transformers import (
    AttentionInterface,
    FalconConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MambaForCausalLM,
)

from varlen.adapters import hf
from varlen.adapters.hf.attention import NAME, varlen_attention
from varlen.errors import ModelError
from varlen.model_families import cache_name


def test_dropout_leaves_out_weights_in_training_and_none_in_evaluation():
    model = make(LlamaConfig(**GROUPED, attention_dropout=0.5), NAME)
    arguments = hf.model_inputs(packed(), model)
    torch.manual_seed(0)
    first, second = model.train()(**arguments).logits, model(**arguments).logits
    calm, again = model.eval()(**arguments).logits, model(**arguments).logits

    assert not torch.equal(first, second)
    assert torch.equal(calm, again)


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


def test_use_varlen_attention_refuses_a_recurrent_model():
    model = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1))

    with pytest.raises(ModelError, match=r"recurrent state .* which no attention changes"):
        hf.use_varlen_attention(model)


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
    name = cache_name(model)
    cache = model(**arguments)[name]

    with pytest.raises(ModelError, match="16 keys for 8 queries a row, so a cache is on"):
        model(**arguments, **{name: cache})


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
        ({"position_bias": torch.zeros(1)}, "passes position_bias"),
        ({"sliding": True}, "layer 0 slides a window, but Layer doesn't pass its width"),
    ],
    ids=["bias", "window untold"],
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
