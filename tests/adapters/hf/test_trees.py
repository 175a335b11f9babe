"""`model_inputs` of trees: log-probabilities and gradients are those of every row alone, in every attention."""

from contextlib import nullcontext

import pytest
import torch
import transformers
from tests.support import tiny_families
from tests.support.forests import VOCABULARY, agents, row_by_row
from tests.support.rarely import mostly
from tests.support.tiny_families import SETTINGS, Wide

import varlen as vl
from varlen.adapters.hf import model_inputs, use_varlen_attention
from varlen.errors import ModelError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),  # of what imports Inductor first
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
]
ATTENTIONS = ("eager", "sdpa", "flex_attention", "varlen")


def gradients(model, log_probs):
    model.zero_grad()
    weights = torch.linspace(-1, 1, len(log_probs), dtype=torch.float64)
    (log_probs * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def set_to(model, attention):
    use_varlen_attention(model) if attention == "varlen" else model.set_attn_implementation(attention)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", mostly(["llama", "mistral", "gpt_oss", "gemma3_text"], ["llama", *SETTINGS]))
def test_log_probabilities_and_gradients_are_those_of_rows_alone(name, attention):
    rows, masks = agents()
    forest = vl.fold(rows, loss_mask=masks)
    with Wide():
        model = tiny_families.family(name).eval()
        model.set_attn_implementation("eager")
        wanted = row_by_row(model, rows, masks)
        by_rows = gradients(model, wanted)
        try:
            set_to(model, attention)
        except ValueError as refused:  # by transformers, for this family
            pytest.skip(f"transformers doesn't run {name} with it: {str(refused)[:60]}")
        if attention == "flex_attention" and name == "gpt_oss":
            pytest.skip("sinks aren't computed by FlexAttention on CPU")
        has_gradients = attention != "flex_attention"  # which has no backward pass on CPU
        if not has_gradients:
            torch.compiler.set_stance("force_eager")
        try:
            for capacity, layout in ((200, "rows"), (max(map(len, rows)), "rows"), (30, "flat")):
                batch = vl.collate(forest, vl.pack_forest(forest, capacity), layout=layout)
                with nullcontext() if has_gradients else torch.no_grad():
                    found = vl.log_probs(model(**model_inputs(batch, model)).logits, batch)
                assert float((found - wanted).detach().abs().max()) < 1e-12, (capacity, layout)
                if has_gradients:
                    for key, gradient in gradients(model, found).items():
                        off = float((gradient - by_rows[key]).norm() / by_rows[key].norm().clamp_min(1e-9))
                        assert off < 1e-11, (key, capacity, layout)
        finally:
            torch.compiler.set_stance("default")


def llama(attention="eager", **changes):
    torch.manual_seed(0)
    settings = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**settings, **heads, **changes})).eval()
    set_to(model, attention)
    return model


def small_batch():
    forest = vl.fold([[1, 2, 3, 4], [1, 2, 5, 6]])
    return vl.collate(forest, vl.pack_forest(forest, 6))


@pytest.mark.parametrize("attention", ["eager", "sdpa", "varlen"])
def test_a_sibling_moves_nothing_outside_of_its_subtree(attention):
    """To the bit; and where siblings are visible, it does."""
    model, batch = llama(attention), small_batch().to_torch()
    changed = batch.input_ids.clone()
    changed[0, 2] = 9  # a token of the first branch
    with torch.no_grad():
        inputs = model_inputs(batch, model)
        one = model(**inputs).logits[0]
        other = model(**{**inputs, "input_ids": changed}).logits[0]
        assert (one[[0, 1, 4, 5]] == other[[0, 1, 4, 5]]).all()
        assert (one[2:4] != other[2:4]).any()
        model.set_attn_implementation("sdpa")  # and a mask in which siblings are visible
        plain = {"position_ids": batch.position_ids, "attention_mask": torch.ones(1, 1, 6, 6).tril().bool()}
        without = [model(**plain, input_ids=ids).logits[0] for ids in (batch.input_ids, changed)]
        assert (without[0][4:] != without[1][4:]).any()


def test_a_model_that_takes_one_mask_is_given_one_whatever_its_config_names():
    """Llama's code knows no mapping of masks, so a name for its layers changes nothing, and two kinds are refused."""
    model, trees = llama("sdpa"), small_batch()
    documents = vl.collate([[1, 2, 3], [4, 5]], vl.pack([3, 2], 6))
    with torch.no_grad():
        wanted = [model(**model_inputs(batch, model)).logits for batch in (trees, documents)]
        model.config.layer_types = ["full_attention"] * 2
        found = [model(**model_inputs(batch, model)).logits for batch in (trees, documents)]
    assert all((one == other).all() for one, other in zip(wanted, found))
    model.config.layer_types, model.config.sliding_window = ["full_attention", "sliding_attention"], 2
    for batch in (trees, documents):
        with pytest.raises(ModelError, match=r"layers of 2 kinds .* and takes one mask for all"):
            model_inputs(batch, model)


def test_compiled_flex_attention_in_float32_agrees_with_sdpa():
    model, batch = llama(), small_batch()
    found = {}
    for attention in ("sdpa", "flex_attention"):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            found[attention] = vl.log_probs(model(**model_inputs(batch, model)).logits, batch)
    assert torch.allclose(found["sdpa"], found["flex_attention"], atol=1e-5)


OTHERWISE = {
    "bloom": ({"n_layer": 1, "n_head": 4}, "ALiBi"),
    "mpt": ({"d_model": 32, "n_layers": 1, "n_heads": 4}, "ALiBi"),
    "falcon": ({"num_hidden_layers": 1, "num_attention_heads": 4, "alibi": True}, "ALiBi"),
    "gpt_neo": (
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 3},
        "window is counted by the places",
    ),
    "mamba2": (
        {"num_heads": 8, "head_dim": 8, "num_hidden_layers": 1, "state_size": 8, "n_groups": 1},
        "linear_attention",
    ),
    "modernbert-decoder": (
        {"num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32, "is_causal": False}
        | dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id", "cls_token_id", "sep_token_id"), 1),
        "both directions",
    ),
}
"""Families that go by more than masks and positions: settings, and what the refusal says."""


@pytest.mark.parametrize("name", OTHERWISE)
def test_families_that_go_by_more_than_masks_and_positions_are_refused_by_name(name):
    settings, words = OTHERWISE[name]
    config = transformers.AutoConfig.for_model(
        name, **{"vocab_size": VOCABULARY, "hidden_size": 32} | settings
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ModelError, match=words) as refused:
        model_inputs(small_batch(), model)
    assert "\n" not in str(refused.value)


def test_batches_and_attentions_that_a_model_cant_take_are_refused():
    model = llama()
    long = vl.fold([list(range(60)) * 2])
    with pytest.raises(
        ModelError, match=r"the longest row has 120 tokens, but LlamaForCausalLM has 64 positions"
    ):
        model_inputs(vl.collate(long, vl.pack_forest(long, 120)), model)
    unknown = vl.fold([[1, 99]])
    with pytest.raises(ModelError, match="token id 99"):
        model_inputs(vl.collate(unknown, vl.pack_forest(unknown, 2)), model)
    with pytest.raises(ModelError, match="can't be folded into trees yet"):
        model_inputs(small_batch(), model, media={0: {"pixel_values": 1}})
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ModelError, match='"flash_attention_2", which computes no trees; choose one of eager'):
        model_inputs(small_batch(), model)


def test_frequencies_that_go_by_the_longest_row_are_refused_for_rows_on_both_sides():
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 5}
    scaled = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, **factors}
    model = llama(rope_parameters=scaled)
    for rows in ([[1, 2, 3], [1, 2, 4, 5, 6]], [[1, 2, 3, 4, 5, 6], [1, 2, 4, 5, 6, 7]], [[1], [2] * 6]):
        forest = vl.fold(rows)
        model_inputs(vl.collate(forest, vl.pack_forest(forest, 12)), model)
    forest = vl.fold([[1, 2, 3], [1, 2, 4, 5, 6, 7]])
    with pytest.raises(ModelError, match=r"1 rows of up to 5 tokens, .* and 1 longer ones. Fold them apart"):
        model_inputs(vl.collate(forest, vl.pack_forest(forest, 7)), model)
