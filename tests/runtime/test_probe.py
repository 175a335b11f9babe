"""What slices run is found by looking at a model, and proven by a small one of its class and config."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.support.distances import assert_same
from tests.support.sliced import SIZES, take_gradients, tiny, uncut
from tests.support.tiny_families import FAILING, Wide, with_vision
from torch import nn
from transformers import CONFIG_MAPPING, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

import varlen as vl
from varlen.errors import ModelError, PlanError
from varlen.runtime import probe
from varlen.runtime.probe import admit


class OtherConfig(LlamaConfig):
    model_type = "someone_elses"


class Other(LlamaForCausalLM):
    """A user's own class, of a type that nobody knows."""

    config_class = OtherConfig


class Reversed(Other):
    """Attends over tokens last to first."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = ReversedAttention(config, number) if number == 1 else layer.self_attn


class ReversedAttention(LlamaAttention):
    def forward(self, hidden_states: torch.Tensor, **given: Any) -> Any:
        out, weights = super().forward(hidden_states=hidden_states.flip(1), **given)
        return out.flip(1), weights


class Convolving(Other):
    """Mixes neighbouring tokens before its feed-forward part."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = nn.Sequential(Neighbours(config.hidden_size), layer.mlp)


class Neighbours(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv1d(width, width, 3, groups=width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mix(nn.functional.pad(hidden.mT, (2, 0))).mT
        return out


class Longest(Other):
    """Scales by how long a text is."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers = nn.ModuleList(LongestLayer(config, n) for n in range(config.num_hidden_layers))


class LongestLayer(LlamaDecoderLayer):
    def forward(self, hidden_states: torch.Tensor, *, position_ids: torch.Tensor, **given: Any) -> Any:
        out = super().forward(hidden_states, position_ids=position_ids, **given)
        return out * (1 + position_ids.max() / 10)


class Doubled(Other):
    """Multiplies embeddings in their module, by no name that is known."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.embed_tokens = DoubledEmbedding(config.vocab_size, config.hidden_size)


class DoubledEmbedding(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Halved(Other):
    """Divides its logits."""

    def forward(self, *args: Any, **given: Any) -> Any:
        out = super().forward(*args, **given)
        out.logits = out.logits / 2
        return out


class Summed(Other):
    """Adds something to what its layers give."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.norm = nn.Sequential(nn.Identity(), self.model.norm)
        self.model.more = nn.Linear(4, 4)


def made(kind: Any, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    torch.manual_seed(0)
    return kind._from_config(OtherConfig(**{**SIZES, **settings}), dtype=dtype).train()


def as_usual(name: str, **settings: Any) -> Any:
    """A model of the sizes that its config has by itself, with no weights."""
    config = CONFIG_MAPPING[name](**settings)
    kinds = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        kind = kinds[type(config) not in transformers.AutoModelForCausalLM._model_mapping]
        model: Any = kind.from_config(config)
    for path, parameter in model.named_parameters():
        parameter.requires_grad_("vision" not in path and "visual" not in path and "projector" not in path)
    return model.eval()


def test_a_class_of_unknown_type_with_plain_layers_has_the_gradients_of_its_uncut_model():
    lengths = [30, 7, 9]
    tokens = torch.randint(0, SIZES["vocab_size"], (46,), generator=torch.Generator().manual_seed(3))
    documents = [x.int().numpy() for x in tokens.split(lengths)]
    batch = vl.collate(documents, vl.pack(lengths, capacity=64))
    with Wide():
        model = made(Other)
        _, wanted = uncut(model, tokens, lengths)
        vl.SliceEngine(model, 8).step(batch)

    assert_same(take_gradients(model), wanted)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            Reversed,
            "losses of a small one in slices are off by .*, first in layer 1, a LlamaDecoderLayer, whose tok",
        ),
        (
            Convolving,
            "losses of a small one in slices are off by .*, first in layer 0, a LlamaDecoderLayer, whose t",
        ),
        (
            Longest,
            "the losses of a small one in slices are off by .*, first in layer 0, a LongestLayer, whose tokens",
        ),
        (
            Doubled,
            "the gradient of model.embed_tokens.weight of a small one in slices is off by 0.5 of its size",
        ),
        (
            Halved,
            "the losses of a small one in slices are off by .*, after the last layer: more is done with norm",
        ),
        (
            Summed,
            r"^more.weight of this someone_elses model \(2 such parameters\) belongs to neither its embedding",
        ),
    ],
)
def test_a_class_that_does_what_slices_would_break_is_refused_by_name(kind, words):
    model = made(kind)

    with pytest.raises(ModelError, match=words) as raised:
        vl.SliceEngine(model)
    assert "someone_elses model" in str(raised.value)
    assert "train it unsliced" in str(raised.value) or "train them unsliced" in str(raised.value)
    assert model.config._attn_implementation != "varlen_slices"


def test_a_probe_leaves_random_numbers_and_the_model_as_they_are(monkeypatch):
    monkeypatch.setattr(probe, "_PROVEN", {})
    model = tiny("llama", attention_bias=True)
    before = {name: p.clone() for name, p in model.named_parameters()}
    states = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    config = model.config.to_dict()

    with torch.inference_mode():
        admit(model, "auto")

    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), torch.get_num_threads()) == states[1:]
    assert model.config.to_dict() == config
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())


def test_a_class_and_a_config_are_proven_once_whatever_the_sizes(monkeypatch):
    seen = []
    monkeypatch.setattr(probe, "_PROVEN", {})
    monkeypatch.setattr(probe, "_fault", lambda kind, _: seen.append(kind))
    for settings in ({}, {"intermediate_size": 96, "num_hidden_layers": 5}, {"attention_bias": True}):
        admit(tiny("llama", **settings), "auto")
        admit(tiny("llama", **settings), "auto")
    admit(made(Other), "auto")

    assert seen == [LlamaForCausalLM, LlamaForCausalLM, Other]


def test_a_refusal_is_kept_too(monkeypatch):
    monkeypatch.setattr(probe, "_PROVEN", {})
    model = made(Longest)
    for _ in range(2):
        with pytest.raises(ModelError, match="first in layer 0, a LongestLayer"):
            admit(model, "auto")
        monkeypatch.setattr(probe, "_fault", lambda *_: None)


USUAL = ["llama", "gemma3", "llama4_text", "glm4_moe_lite"]
MORE = [
    *(
        "cohere2",
        "deepseek_v3",
        "gemma2",
        "glm4_moe",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "minimax_m2",
        "ministral3",
    ),
    *("mistral", "mistral3", "mixtral", "olmo3", "phi", "phi3", "qwen2", "qwen2_5_vl", "qwen3", "qwen3_moe"),
    *("qwen3_vl", "qwen3_vl_moe", "smollm3", "starcoder2"),
    *(
        "afmoe",
        "aria_text",
        "bitnet",
        "exaone_moe",
        "ernie4_5_moe",
        "jetmoe",
        "kimi_k25",
        "laguna",
        "solar_open",
    ),
]


@pytest.mark.parametrize("name", [*USUAL, *(pytest.param(name, marks=pytest.mark.soak) for name in MORE)])
def test_a_family_of_usual_size_is_proven_by_a_small_model(name):
    admit(as_usual(name), "auto")


def test_a_small_model_has_a_layer_of_each_kind_and_no_more():
    model = as_usual("llama4_text")
    small = probe._small_config(model, 0)

    assert small.num_hidden_layers == 4
    assert small.layer_types == ["chunked_attention"] * 3 + ["full_attention"]
    assert small.no_rope_layers == [1, 1, 1, 0]
    assert small.moe_layers == [0, 1, 2, 3]
    assert (small.attention_chunk_size, small.floor_scale, small.head_dim) == (6, 3, 128)
    assert model.config.num_hidden_layers == 48


def test_a_class_that_fails_in_its_own_forward_is_refused_and_its_language_model_is_not():
    model = with_vision("llama4").eval()
    if "llama4" in FAILING:
        words = (
            r"own forward, .*'image_outputs'\); give the Llama4ForCausalLM inside \(model.language_model\)$"
        )
        with pytest.raises(ModelError, match=words):
            admit(model, "auto")
    else:
        admit(model, "auto")
    admit(model.language_model, "auto")


class Failing(LlamaForCausalLM):
    def forward(self, *_: Any, **__: Any) -> Any:
        raise AttributeError("no such output")


def test_a_class_that_fails_in_its_own_forward_with_no_other_inside_is_trained_unsliced():
    with pytest.raises(
        ModelError, match=r"own forward, .*\(AttributeError: no such output\); train them unsliced$"
    ):
        admit(made(Failing), "auto")


def test_gemma_4_without_inputs_by_layer_is_proven_and_with_them_refused():
    settings: dict[str, Any] = {
        "num_hidden_layers": 6,
        "vocab_size": 1000,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
    }
    for family in ("gemma4_text", "gemma4_unified_text"):
        admit(as_usual(family, hidden_size_per_layer_input=0, **settings), "auto")

    with pytest.raises(
        ModelError, match=r"embed_tokens_per_layer.weight of this gemma4_text model \(3 such parameters"
    ):
        admit(as_usual("gemma4_text", **settings), "auto")
    shared = as_usual(
        "gemma4_text",
        hidden_size_per_layer_input=0,
        **{**settings, "num_hidden_layers": 12, "num_kv_shared_layers": 2},
    )
    with pytest.raises(
        ModelError, match="last 2 layers of this gemma4_text model attend to the keys and values of"
    ):
        admit(shared, "auto")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("minimax", r"of their layers carry a state from token to token \(\d+ of kind linear_attention\)"),
        ("qwen3_next", r"of their layers carry a state from token to token \(36 of kind linear_attention\)"),
        (
            "deepseek_v32",
            r"select or compress the tokens that they attend to \(61 of kind indexed_attention\)",
        ),
        (
            "nanochat",
            "off by .*, first before the first layer: more is done with the embedding than slices know",
        ),
        ("gpt2", "their GPT2Model has no rotary positions, and slices run a decoder of"),
    ],
)
def test_a_family_that_slices_would_break_is_refused_with_its_reason(name, words):
    with pytest.raises(ModelError, match=f"^slices don't run {name} models.*{words}.*unsliced"):
        vl.SliceEngine(as_usual(name))


def test_recurrent_layers_are_told_by_their_kind_whatever_the_family_is_called():
    model = as_usual("qwen3_next", num_hidden_layers=4)
    model.config.model_type = "someone_elses"

    with pytest.raises(
        ModelError, match=r"^slices don't run someone_elses models.*3 of kind linear_attention"
    ):
        admit(model, "auto")


def test_layers_that_attend_within_chunks_keep_their_keys_on_the_device():
    model = tiny("llama4_text", attention_chunk_size=8, num_local_experts=2, head_dim=8, num_hidden_layers=4)
    documents = [np.arange(20, dtype=np.int32)]
    batch = vl.collate(documents, vl.pack([20], capacity=32))

    with pytest.raises(PlanError, match=r"layers that attend within chunks .* choose offload=\"none\""):
        vl.SliceEngine(model, 8, offload="kv").step(batch)
