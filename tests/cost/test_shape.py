"""Model shapes: published parameter counts, what a token costs, configurations of transformers, clear refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import (
    DeepseekV3Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3MoeConfig,
)

from varlen.cost.shape import POSITIONS, SHAPES, ModelShape, check_mesh, check_positions
from varlen.errors import ModelError, SettingError
from varlen.step_plan import Mesh

COUNTS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-30b": 32_528_943_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "mistral-7b": 7_248_023_552,
    "mistral-7b-v0.1": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
}
"""Of the published weights, to the last one."""
ABOUT = {
    "qwen2.5-7b": (7.62, 7.07),
    "qwen2.5-14b": (14.77, 13.99),
    "qwen2.5-32b": (32.76, 31.98),
    "qwen2.5-72b": (72.71, 71.46),
    "qwen3-8b": (8.19, 7.57),
    "qwen3-14b": (14.77, 13.99),
    "qwen3-32b": (32.76, 31.98),
    "qwen3-30b-a3b": (30.53, 3.04),
    "qwen3-235b-a22b": (235.1, 21.6),
    "mixtral-8x22b": (140.6, 39.0),
    "deepseek-v3": (671.0, 36.6),
}
"""Billions in all, and multiplied with a token (embeddings, which are looked up, are not)."""


@pytest.mark.parametrize("name", COUNTS)
def test_a_named_shape_has_the_published_parameters(name: str) -> None:
    assert ModelShape.named(name).num_parameters == COUNTS[name]


@pytest.mark.parametrize("name", ABOUT)
def test_a_named_shape_has_about_the_published_parameters(name: str) -> None:
    shape = ModelShape.named(name)

    # Biases and norms of queries and keys are not counted.
    assert shape.num_parameters / 1e9 == pytest.approx(ABOUT[name][0], rel=1e-3)
    assert shape.num_active_parameters / 1e9 == pytest.approx(ABOUT[name][1], rel=2e-3)


@pytest.mark.parametrize("name", SHAPES)
def test_every_name_is_a_shape_of_any_number_of_positions(name: str) -> None:
    shape = ModelShape.named(name.upper().replace("-", "_"))

    assert shape.name == name
    assert shape.max_positions is None


def test_a_token_of_llama_3_8b_keeps_128_kib_of_keys_and_values() -> None:
    assert ModelShape.named("llama-3-8b").kv_bytes_per_token_layer * 32 == 128 * 1024
    assert ModelShape.named("llama-2-13b").kv_bytes_per_token_layer * 40 == 800 * 1024
    # DeepSeek-V3 keeps a latent of 512 and a rotated key of 64.
    assert ModelShape.named("deepseek-v3").kv_bytes_per_token_layer == 2 * 576


@pytest.mark.parametrize(
    ("name", "thousands"), [("llama-3-8b", 53), ("llama-2-13b", 62), ("llama-3-70b", 104), ("qwen2.5-7b", 65)]
)
def test_attention_costs_what_matrix_products_do_at_a_known_length(name: str, thousands: int) -> None:
    """4·Hq·d·L²/2 = 2·P·L at L = P / (Hq·d)."""
    shape = ModelShape.named(name)

    assert round(shape.linear_parameters_per_layer / (shape.heads * shape.head_dim) / 1000) == thousands


def test_a_gpt_layer_has_twelve_squares() -> None:
    shape = ModelShape.named("gpt-7b")

    assert shape.linear_parameters_per_layer == 12 * 4096**2


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(SettingError, match=r"no model is called 'lama-3-8b'; nearest: llama-3-8b"):
        ModelShape.named("lama-3-8b")
    with pytest.raises(
        SettingError, match=r"no model is called 'llama3'; nearest: llama-3-8b, llama-3-70b, llama-3-405b"
    ):
        ModelShape.named("llama3")
    with pytest.raises(SettingError, match="nearest: deepseek-v3, gpt-13b"):
        ModelShape.named("???")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": 0}, "model hidden=0; it must be a whole number of at least 1"),
        ({"layers": 1.5}, "model layers=1.5"),
        ({"max_positions": -4}, "max_positions=-4"),
        ({"heads": 32, "kv_heads": 5}, "32 query heads can't share 5 key heads"),
        ({"windowed_layers": 3}, "windowed_layers=3 but window is 0"),
        ({"windowed_layers": 40, "window": 5}, "the model has 4 layers"),
        ({"experts": 8}, r"experts=8 need expert_ffn \(got 0\) and experts_per_token from 1 to 8 \(got 0\)"),
        ({"ffn": 0}, "ffn is 0, but 4 layers are dense"),
    ],
)
def test_a_shape_that_contradicts_itself_is_refused(changes: dict[str, Any], words: str) -> None:
    sound = {"hidden": 64, "layers": 4, "heads": 4, "vocab": 100, "ffn": 128}

    with pytest.raises(SettingError, match=words):
        ModelShape(**(sound | changes))


def test_transformers_defaults_are_read() -> None:
    llama = ModelShape.from_config(LlamaConfig(num_key_value_heads=8, tie_word_embeddings=True))

    assert (llama.hidden, llama.ffn, llama.layers, llama.vocab) == (4096, 11008, 32, 32000)
    assert (llama.heads, llama.kv_heads, llama.head_dim, llama.max_positions) == (32, 8, 128, 2048)
    assert llama.tied
    assert llama.name == "llama"
    assert ModelShape.from_config(LlamaConfig(), name="mine").name == "mine"


def test_latent_attention_and_experts_are_read() -> None:
    read = ModelShape.from_config(DeepseekV3Config())

    assert read.num_parameters == ModelShape.named("deepseek-v3").num_parameters
    assert read.head_dim == 192
    assert read.value_head_dim == 128
    assert read.dense_layers == 3


def test_a_saved_configuration_is_read_as_the_object_is() -> None:
    config = Qwen3MoeConfig()

    assert ModelShape.from_config(config.to_dict()) == ModelShape.from_config(config)
    assert ModelShape.from_config(config).experts == 128


def test_windows_are_counted_layer_by_layer() -> None:
    oss = ModelShape.from_config(GptOssConfig())
    mistral = ModelShape.from_config(MistralConfig())
    raw = {"hidden_size": 64, "num_hidden_layers": 26, "num_attention_heads": 4, "vocab_size": 9}
    gemma = ModelShape.from_config(
        raw | {"intermediate_size": 8, "sliding_window": 512, "sliding_window_pattern": 6}
    )
    qwen = raw | {"intermediate_size": 8, "sliding_window": 512, "max_window_layers": 20}

    assert (oss.window, oss.windowed_layers, oss.layers) == (128, 18, 36)
    assert (mistral.window, mistral.windowed_layers) == (4096, 32)
    assert gemma.windowed_layers == 22
    assert ModelShape.from_config(qwen | {"use_sliding_window": False}).windowed_layers == 0
    assert ModelShape.from_config(qwen | {"use_sliding_window": True}).windowed_layers == 6


def test_a_family_without_a_gate_has_two_matrices() -> None:
    gpt2 = ModelShape.from_config(GPT2Config())

    assert not gpt2.gated
    assert gpt2.ffn == 4 * 768
    assert gpt2.num_parameters == pytest.approx(124_439_808 - 1024 * 768, rel=2e-3)


def test_the_text_part_of_several_modalities_is_read() -> None:
    text = LlamaConfig(num_hidden_layers=7)
    plain = {"model_type": "chimera", "text_config": text.to_dict()}

    assert ModelShape.from_config(plain).layers == 7
    assert ModelShape.from_config(SimpleNamespace(text_config=text)).layers == 7


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"model_type": "mamba", "hidden_size": 5, "vocab_size": 5, "num_hidden_layers": 2},
            "type 'mamba' lacks num_attention_heads or n_head or n_heads; intermediate_size",
        ),
        ({}, "type 'unnamed' lacks hidden_size"),
        (7, "must be a mapping or a transformers configuration; got int"),
        (
            LlamaConfig(num_hidden_layers=3).to_dict() | {"layer_types": ["linear_attention"] * 2},
            "2 layers of a model of type 'llama' are linear_attention",
        ),
    ],
)
def test_a_configuration_without_a_decoder_is_refused(config: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        ModelShape.from_config(config)


def test_a_mesh_that_divides_no_heads_is_answered_with_those_that_do() -> None:
    with pytest.raises(
        SettingError,
        match=r"tp=3 doesn't divide 32 query heads and 8 key heads; tp may be 1, 2, 4, 8, 16, 32",
    ):
        check_mesh(ModelShape.named("llama-3-8b"), Mesh(tp=3))
    with pytest.raises(SettingError, match="tp may be 1, 2, 4, 8, 40"):
        check_mesh(ModelShape.named("qwen2.5-14b"), Mesh(tp=5))
    check_mesh(ModelShape.named("llama-3-8b"), Mesh(tp=16, pp=32))


def test_more_chunks_than_layers_are_refused() -> None:
    with pytest.raises(
        SettingError, match=r"32 layers can't fill pp=16 x virtual_stages=4 = 64 chunks; .* at most 32"
    ):
        check_mesh(ModelShape.named("llama-3-8b"), Mesh(pp=16, virtual_stages=4))


def test_documents_over_the_positions_are_named() -> None:
    shape = ModelShape.from_config(LlamaConfig())
    lengths = np.array([5, 2048, 2049, 9000], np.int32)

    with pytest.raises(
        ModelError, match=r"document 2 has 2,049 tokens, over the 2,048 positions of llama \(2 of 4"
    ):
        check_positions(shape, lengths)
    check_positions(shape, lengths[:2])
    check_positions(ModelShape.named("llama-3-8b"), np.array([10**9], np.int32))


def test_a_known_shape_takes_any_length_and_says_what_its_checkpoint_has() -> None:
    published = {
        "llama-2-7b": 4096, "llama-3-8b": 8192, "llama-3.1-8b": 131_072, "mistral-7b": 32_768, "gpt-7b": None,
    }  # fmt: skip

    for name, positions in published.items():
        shape = ModelShape.named(name)
        assert (shape.max_positions, shape.published_positions) == (None, positions)
        check_positions(shape, np.array([10**9], np.int32))
    assert ModelShape.from_config(LlamaConfig()).published_positions is None


def test_every_known_shape_but_those_of_papers_has_positions() -> None:
    assert set(SHAPES) - set(POSITIONS) == {name for name in SHAPES if name.startswith("gpt-")}
    assert set(POSITIONS) <= set(SHAPES)


def test_llama_3_and_its_successor_are_one_shape() -> None:
    for size in ("8b", "70b", "405b"):
        assert SHAPES[f"llama-3-{size}"] == SHAPES[f"llama-3.1-{size}"]
