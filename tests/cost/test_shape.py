"""Model shapes, their FLOPs and bytes, stages and traffic: published counts, closed forms, clear refusals."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rarely import mostly
from tests.support.tiny_families import FAMILIES
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3MoeConfig,
)
from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

from varlen.cost.hardware import Hardware
from varlen.cost.memory import HEAD, NEAR, OWN, activation_bytes
from varlen.cost.model import CostModel
from varlen.cost.shape import (
    POSITIONS,
    SHAPES,
    ModelShape,
    check_mesh,
    check_positions,
    pairs_of,
    slice_flops,
    stages_of,
    step_flops,
)
from varlen.errors import ModelError, SettingError
from varlen.model_families import FAMILIES as FACTS
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
def test_a_named_shape_has_the_published_parameters(name):
    assert ModelShape.named(name).num_parameters == COUNTS[name]


@pytest.mark.parametrize("name", ABOUT)
def test_a_named_shape_has_about_the_published_parameters(name):
    shape = ModelShape.named(name)

    # Biases and norms of queries and keys are not counted.
    assert shape.num_parameters / 1e9 == pytest.approx(ABOUT[name][0], rel=1e-3)
    assert shape.num_active_parameters / 1e9 == pytest.approx(ABOUT[name][1], rel=2e-3)


@pytest.mark.parametrize("name", SHAPES)
def test_every_name_is_a_shape_of_any_number_of_positions(name):
    shape = ModelShape.named(name.upper().replace("-", "_"))

    assert shape.name == name
    assert shape.max_positions is None


def test_a_token_of_llama_3_8b_keeps_128_kib_of_keys_and_values():
    assert ModelShape.named("llama-3-8b").kv_bytes_per_token_layer * 32 == 128 * 1024
    assert ModelShape.named("llama-2-13b").kv_bytes_per_token_layer * 40 == 800 * 1024
    # DeepSeek-V3 keeps a latent of 512 and a rotated key of 64.
    assert ModelShape.named("deepseek-v3").kv_bytes_per_token_layer == 2 * 576


@pytest.mark.parametrize(
    ("name", "thousands"), [("llama-3-8b", 53), ("llama-2-13b", 62), ("llama-3-70b", 104), ("qwen2.5-7b", 65)]
)
def test_attention_costs_what_matrix_products_do_at_a_known_length(name, thousands):
    """4·Hq·d·L²/2 = 2·P·L at L = P / (Hq·d)."""
    shape = ModelShape.named(name)

    assert round(shape.linear_parameters_per_layer / (shape.heads * shape.head_dim) / 1000) == thousands


def test_a_gpt_layer_has_twelve_squares():
    shape = ModelShape.named("gpt-7b")

    assert shape.linear_parameters_per_layer == 12 * 4096**2


def test_an_unknown_name_is_answered_with_the_nearest():
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
def test_a_shape_that_contradicts_itself_is_refused(changes, words):
    sound = {"hidden": 64, "layers": 4, "heads": 4, "vocab": 100, "ffn": 128}

    with pytest.raises(SettingError, match=words):
        ModelShape(**(sound | changes))


def test_transformers_defaults_are_read():
    llama = ModelShape.from_config(LlamaConfig(num_key_value_heads=8, tie_word_embeddings=True))

    assert (llama.hidden, llama.ffn, llama.layers, llama.vocab) == (4096, 11008, 32, 32000)
    assert (llama.heads, llama.kv_heads, llama.head_dim, llama.max_positions) == (32, 8, 128, 2048)
    assert llama.tied
    assert llama.name == "llama"
    assert ModelShape.from_config(LlamaConfig(), name="mine").name == "mine"


def test_latent_attention_and_experts_are_read():
    read = ModelShape.from_config(DeepseekV3Config())

    assert read.num_parameters == ModelShape.named("deepseek-v3").num_parameters
    assert read.head_dim == 192
    assert read.value_head_dim == 128
    assert read.dense_layers == 3


def test_a_saved_configuration_is_read_as_the_object_is():
    config = Qwen3MoeConfig()

    assert ModelShape.from_config(config.to_dict()) == ModelShape.from_config(config)
    assert ModelShape.from_config(config).experts == 128


def test_windows_are_counted_layer_by_layer():
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


def test_a_family_without_a_gate_has_two_matrices():
    gpt2 = ModelShape.from_config(GPT2Config())

    assert not gpt2.gated
    assert gpt2.ffn == 4 * 768
    assert gpt2.num_parameters == pytest.approx(124_439_808 - 1024 * 768, rel=2e-3)


NEEDED = {
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma4_text": {
        **{"hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2},
        "moe_intermediate_size": 704,
    },
    "hunyuan_v1_dense": {"head_dim": 128},
    "ministral": {"head_dim": 128},
}
"""What the defaults of a family lack."""


@pytest.mark.parametrize(
    "name",
    mostly(
        ["apertus", "deepseek_v3", "gemma4_text", "llama4_text", "mistral4", "persimmon", "ernie4_5_moe"],
        [*FAMILIES, "ernie4_5_moe", "jais2", "nanochat"],
    ),
)
def test_a_shape_has_as_many_parameters_as_the_model(name):
    config = AutoConfig.for_model(name, **NEEDED.get(name, {}))
    with torch.device("meta"):
        model = (
            Mistral4ForCausalLM(config) if name == "mistral4" else AutoModelForCausalLM.from_config(config)
        )

    counted = sum(parameter.numel() for parameter in model.parameters())
    # Some layers of Gemma 4 have wider heads, which the shape doesn't know.
    assert ModelShape.from_config(config).num_parameters == pytest.approx(
        counted, rel=0.02 if name == "gemma4_text" else 0.005
    )


@pytest.mark.parametrize("name", [name for name, family in FACTS.items() if family.is_recurrent])
def test_a_family_that_passes_a_state_is_refused(name):
    config = LlamaConfig().to_dict() | {"model_type": name}

    with pytest.raises(SettingError, match=f"type '{name}' passes a state from token to token"):
        ModelShape.from_config(config)


def test_experts_of_which_tokens_have_sets_of_their_own_are_refused():
    config = LlamaConfig().to_dict() | {"moe_num_experts": [64, 32], "moe_intermediate_size": [1536, 512]}

    with pytest.raises(SettingError, match="has 64 and 32 experts for different tokens"):
        ModelShape.from_config(config)


def test_embeddings_of_layers_are_refused():
    config = AutoConfig.for_model("gemma4_text")

    with pytest.raises(SettingError, match=r"an embedding of its own \(hidden_size_per_layer_input=256\)"):
        ModelShape.from_config(config)


def test_the_text_part_of_several_modalities_is_read():
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
def test_a_configuration_without_a_decoder_is_refused(config, words):
    with pytest.raises(SettingError, match=words):
        ModelShape.from_config(config)


def test_a_mesh_that_divides_no_heads_is_answered_with_those_that_do():
    with pytest.raises(
        SettingError,
        match=r"tp=3 doesn't divide 32 query heads and 8 key heads; tp may be 1, 2, 4, 8, 16, 32",
    ):
        check_mesh(ModelShape.named("llama-3-8b"), Mesh(tp=3))
    with pytest.raises(SettingError, match="tp may be 1, 2, 4, 8, 40"):
        check_mesh(ModelShape.named("qwen2.5-14b"), Mesh(tp=5))
    check_mesh(ModelShape.named("llama-3-8b"), Mesh(tp=16, pp=32))


def test_more_chunks_than_layers_are_refused():
    with pytest.raises(
        SettingError, match=r"32 layers can't fill pp=16 x virtual_stages=4 = 64 chunks; .* at most 32"
    ):
        check_mesh(ModelShape.named("llama-3-8b"), Mesh(pp=16, virtual_stages=4))


def test_documents_over_the_positions_are_named():
    shape = ModelShape.from_config(LlamaConfig())
    lengths = np.array([5, 2048, 2049, 9000], np.int32)

    with pytest.raises(
        ModelError, match=r"document 2 has 2,049 tokens, over the 2,048 positions of llama \(2 of 4"
    ):
        check_positions(shape, lengths)
    check_positions(shape, lengths[:2])
    check_positions(ModelShape.named("llama-3-8b"), np.array([10**9], np.int32))


def test_a_known_shape_takes_any_length_and_says_what_its_checkpoint_has():
    published = {
        "llama-2-7b": 4096, "llama-3-8b": 8192, "llama-3.1-8b": 131_072, "mistral-7b": 32_768, "gpt-7b": None,
    }  # fmt: skip

    for name, positions in published.items():
        shape = ModelShape.named(name)
        assert (shape.max_positions, shape.published_positions) == (None, positions)
        check_positions(shape, np.array([10**9], np.int32))
    assert ModelShape.from_config(LlamaConfig()).published_positions is None


def test_every_known_shape_but_those_of_papers_has_positions():
    assert set(SHAPES) - set(POSITIONS) == {name for name in SHAPES if name.startswith("gpt-")}
    assert set(POSITIONS) <= set(SHAPES)


def test_llama_3_and_its_successor_are_one_shape():
    for size in ("8b", "70b", "405b"):
        assert SHAPES[f"llama-3-{size}"] == SHAPES[f"llama-3.1-{size}"]


TINY = ModelShape(
    hidden=8, layers=3, heads=4, kv_heads=2, head_dim=2, ffn=16, vocab=11, window=5, windowed_layers=1
)


def counted(shape: ModelShape, start: int, stop: int) -> tuple[float, float]:
    """Forward FLOPs of attention and of the rest, multiplication by multiplication."""
    attention = 0
    for layer in range(shape.layers):
        for query in range(start, stop):
            seen = min(query + 1, shape.window) if layer < shape.windowed_layers else query + 1
            attention += seen * shape.heads * 2 * (shape.head_dim + shape.value_head_dim)
    projections = shape.hidden * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    weights = shape.layers * (projections + 3 * shape.hidden * shape.ffn) + shape.hidden * shape.vocab
    return float(attention), float((stop - start) * 2 * weights)


@given(st.integers(0, 40), st.integers(1, 40))
def test_slices_have_the_flops_that_counting_gives(start, length):
    attention, rest = counted(TINY, start, start + length)

    forward, backward = slice_flops(TINY, [start], [start + length])[0]

    assert forward == attention + rest
    assert backward == 2.5 * attention + 2 * rest


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(0, 60))
def test_slices_of_a_document_have_its_pairs(lengths, window):
    ends = np.cumsum(lengths, dtype=np.float64)
    starts = np.append(0.0, ends[:-1])

    parts = pairs_of(starts, ends, window)

    assert parts.sum() == pairs_of(np.zeros(1), ends[-1:], window)[0]


def test_a_step_counts_the_model_apart_from_the_hardware():
    lengths = [7, 30]
    each = [counted(TINY, 0, length) for length in lengths]
    attention, rest = (sum(part) for part in zip(*each))
    head = 2 * TINY.head_parameters * sum(lengths)

    none, full = step_flops(TINY, lengths), step_flops(TINY, lengths, "full")

    assert none.model == full.model == 3 * (attention + rest)
    assert none.hardware == 3.5 * attention + 3 * rest
    assert none.attention == 3.5 * attention
    assert full.hardware == 4.5 * attention + 4 * rest - head


def test_experts_count_those_that_a_token_visits():
    dense = ModelShape(hidden=8, layers=2, heads=2, vocab=11, ffn=32)
    sparse = ModelShape(
        hidden=8, layers=2, heads=2, vocab=11, experts=16, experts_per_token=2, expert_ffn=12, shared_ffn=8
    )

    apart = slice_flops(sparse, [0], [10])[0] - slice_flops(dense, [0], [10])[0]

    # The router's 8 x 16 matrix is all that differs: twice a layer and row forward.
    assert apart.tolist() == [2 * 2 * 8 * 16 * 10, 4 * 2 * 8 * 16 * 10]
    assert sparse.num_parameters - dense.num_parameters == 2 * (14 * 3 * 8 * 12 + 8 * 16)


def test_latent_attention_counts_both_dimensions():
    shape = ModelShape.named("deepseek-v3")

    late, early = slice_flops(shape, [4096], [4097])[0, 0], slice_flops(shape, [0], [1])[0, 0]

    assert late - early == pytest.approx(61 * 4096 * 2 * 128 * (192 + 128))


def test_the_published_rule_of_six_flops_a_parameter_holds_for_short_documents():
    shape = ModelShape.named("llama-3-8b")

    per_token = step_flops(shape, [128]).model / 128

    assert per_token == pytest.approx(6 * shape.num_active_parameters, rel=0.01)


@pytest.mark.parametrize(
    ("column", "cuts"), [(0, [78_465, 119_589, 151_458]), (1, [80_874, 121_618, 153_088])]
)
def test_published_cuts_of_a_document_into_eight_have_equal_flops(column, cuts):
    """256K tokens through the layers of Llama-3-8B; the head is apart."""
    shape = ModelShape.named("llama-3-8b")
    head = 2 * shape.head_parameters * (1 + column)
    whole = slice_flops(shape, [0], [262_144])[0, column] - head * 262_144

    for number, cut in enumerate(cuts, start=1):
        first = slice_flops(shape, [0], [cut])[0, column] - head * cut
        assert first / whole == pytest.approx(number / 8, rel=3e-5)


def test_recomputation_costs_the_hardware_more_than_the_model():
    cost = CostModel(model=ModelShape.named("llama-3-8b"), hardware=Hardware.named("h100"), recompute="full")

    flops = cost.flops([8192] * 64)

    assert flops.hardware > 1.3 * flops.model


H100 = Hardware.named("h100")
LLAMA = ModelShape.named("llama-3-8b")
COST = CostModel(model=LLAMA, hardware=H100)


def test_a_token_of_llama_3_8b_leaves_139_kb_in_a_layer():
    assert activation_bytes(LLAMA) == 12 * 4096 + 4 * 8 * 128 + 6 * 14336 + 4 * 32 == 139_392
    assert round(activation_bytes(LLAMA) * 32 / 1e6, 2) == 4.46
    # Megatron's estimate for the same layer, h·(18 + 4f/h), counts no attention apart.
    assert activation_bytes(LLAMA) == pytest.approx(4096 * 18 + 4 * 14336, rel=0.07)


def test_everything_held_is_what_a_layer_leaves_times_layers():
    memory = COST.memory(Mesh(pp=4))

    layers = COST.stages(Mesh(pp=4)).layers
    assert memory.held_bytes[:3].tolist() == (139_392 * layers[:3]).tolist()
    # The last chunk holds the final norm's input and output too.
    assert memory.held_bytes[3] == 139_392 * layers[3] + 4 * 4096


def test_full_recomputation_holds_a_layers_input_and_its_keys_and_values():
    memory = COST.replace(recompute="full").memory(Mesh(pp=4))

    layers = COST.stages(Mesh(pp=4)).layers
    assert memory.held_bytes[0] == layers[0] * (2 * 4096 + 4 * 8 * 128)
    # One layer lives whole while it runs, and the gradients of its widest activations; no other has begun.
    begins = memory.backward_peaks[0, :, OWN].max()
    assert begins == 139_392 + 6 * 14336 + 4 * 4096


def test_selective_recomputation_drops_norm_outputs_and_the_product():
    none, some = COST.memory(Mesh(pp=4)), COST.replace(recompute="selective").memory(Mesh(pp=4))

    layers = COST.stages(Mesh(pp=4)).layers
    np.testing.assert_allclose(none.held_bytes - some.held_bytes, layers * (4 * 4096 + 2 * 14336), rtol=1e-12)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_offload_leaves_keys_and_values_of_two_layers_and_of_what_runs(recompute):
    cost = COST.replace(recompute=recompute)
    near, far = cost.memory(Mesh(pp=4)), cost.replace(offload="kv").memory(Mesh(pp=4))

    layers = COST.stages(Mesh(pp=4)).layers
    kv = 4 * 8 * 128
    np.testing.assert_allclose(near.held_bytes - far.held_bytes, kv * layers)
    assert near.gradient_bytes.tolist() == (2 * kv * layers).tolist()
    assert far.gradient_bytes.tolist() == near.near_bytes.tolist() == [0] * 4
    assert far.near_bytes.tolist() == [2 * kv] * 4
    assert far.backward_peaks[:, :, NEAR].max(axis=1).tolist() == [2 * kv] * 4
    # A stage of two layers has nothing to offload, and fetches nothing.
    thin, plain = cost.replace(offload="kv"), Mesh(pp=32)
    assert thin.memory(plain).held_bytes.tolist() == cost.memory(plain).held_bytes.tolist()
    assert thin.rates(plain).host_s_per_token == 0 < thin.rates(Mesh(pp=4)).host_s_per_token


def test_weight_gradients_apart_keep_what_goes_into_products_and_comes_back():
    kept = COST.memory(Mesh(pp=32)).kept_for_weight_bytes[0]

    # Both norms' outputs, attention's output, the product; gradients of both outputs, queries, keys and values,
    # the gate and the other branch.
    assert kept == 4 * 4096 + 2 * 4096 + 2 * 14336 + 4 * 4096 + 2 * 4096 + 4 * 8 * 128 + 4 * 14336


def test_tensor_parallel_gpus_divide_rows_but_copy_heads_that_are_too_few():
    whole = COST.memory(Mesh(pp=4))
    eighth, sixteenth = COST.memory(Mesh(pp=4, tp=8)), COST.memory(Mesh(pp=4, tp=16))

    layers = COST.stages(Mesh(pp=4)).layers
    assert eighth.held_bytes.tolist() == (whole.held_bytes / 8).tolist()
    copied = layers * 4 * 8 * 128 * (1 / 8 - 1 / 16)
    np.testing.assert_allclose(sixteenth.held_bytes, whole.held_bytes / 16 + copied)
    assert sixteenth.gradient_bytes.tolist() == eighth.gradient_bytes.tolist()


def test_latent_attention_holds_latents_for_later_slices():
    cost = CostModel(model=ModelShape.named("deepseek-v3"), hardware=H100, recompute="full")

    assert cost.memory(Mesh()).held_bytes[0] == 61 * (2 * 7168 + 2 * 576) + 4 * 7168


def test_the_limit_is_a_share_of_the_card():
    assert COST.memory(Mesh()).limit_bytes == 0.92 * 80e9
    assert COST.replace(memory_fraction=0.5).memory(Mesh()).limit_bytes == 40e9


def test_arrays_of_stages_and_memory_are_read_only():
    with pytest.raises(ValueError, match="read-only"):
        COST.memory(Mesh()).held_bytes[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        COST.stages(Mesh()).layers[0] = 1


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 4_000))
def test_no_other_cut_has_a_lighter_heaviest_stage(layers, pp, vocab):
    layers = max(layers, pp)
    shape = ModelShape(hidden=16, layers=layers, heads=2, ffn=32, vocab=vocab + 1)
    head = shape.head_parameters / shape.linear_parameters_per_layer

    def heaviest(counts: tuple[int, ...]) -> float:
        return max(*counts[:-1], counts[-1] + head) if pp > 1 else counts[0] + head

    ours = tuple(int(count) for count in stages_of(shape, Mesh(pp=pp)).layers)
    others = itertools.product(range(1, layers + 1), repeat=pp)

    assert sum(ours) == layers
    assert heaviest(ours) <= min(heaviest(cut) for cut in others if sum(cut) == layers) + 1e-9


def test_llama_3_8b_moves_two_layers_off_the_stage_with_the_head():
    assert stages_of(LLAMA, Mesh(pp=4)).layers.tolist() == [8, 9, 9, 6]
    assert stages_of(LLAMA, Mesh(pp=4)).has_head.tolist() == [False, False, False, True]
    assert stages_of(LLAMA, Mesh(pp=4)).has_embedding.tolist() == [True, False, False, False]


def test_chunks_of_interleaved_stages_share_their_stages_layers():
    stages = stages_of(LLAMA, Mesh(pp=4, virtual_stages=2))

    assert stages.layers.sum() == 32
    assert stages.layers.reshape(2, 4).sum(axis=0).tolist() == [8, 9, 9, 6]
    assert stages.layers.tolist() == [4, 5, 5, 3, 4, 4, 4, 3]


def test_a_boundary_sends_a_part_of_each_row_over_the_slowest_link():
    near, far = COST.send_s(Mesh(pp=2, tp=4)), COST.send_s(Mesh(dp=2, pp=2, tp=4))

    assert near == (10e-6, pytest.approx(2 * 4096 / 4 / 360e9))
    assert far == (20e-6, pytest.approx(2 * 4096 / 4 / 50e9))


def test_gradients_travel_as_their_sharding_says():
    whole, optimizer, parameters = (
        COST.gradient_sync_s(Mesh(dp=8, sharding=sharding))
        for sharding in ("none", "optimizer", "parameters")
    )
    gradients = LLAMA.num_parameters * 4 * 7 / 8 / 360e9

    assert whole[0] == pytest.approx(2 * (gradients + 3 * 10e-6))
    assert optimizer[0] == pytest.approx(1.5 * gradients + 2 * 3 * 10e-6)
    assert parameters.tolist() == [0]
    assert COST.gradient_sync_s(Mesh()).tolist() == [0]


@pytest.mark.parametrize("splits", [False, True])
def test_every_micropack_gathers_units_in_half_precision_and_reduces_them_in_float32(splits):
    mesh = Mesh(dp=4, pp=2, tp=2, sharding="parameters")
    cost = COST.replace(recompute="full", saved="stage")
    layer, end = LLAMA.parameters_per_layer, LLAMA.head_parameters

    def seconds(layers: int, ends: int, width: int) -> float:
        return (layers * layer + ends * end) / 2 * width * 3 / 4 / 360e9 + (layers + ends) * 2 * 10e-6

    first, last = cost.traffic_s(mesh, splits_backward=splits).T
    layers = cost.stages(mesh).layers.astype(int).tolist()
    reduced = [seconds(count, 0, 4) for count in layers]
    assert first[0] == pytest.approx(seconds(layers[0], 1, 2))
    assert last[0] == pytest.approx(seconds(layers[1], 0, 2))
    again = [
        seconds(2 * count - 1, 0, 2) for count in layers
    ]  # inputs of all layers but the first are made again
    assert first[1] == pytest.approx(again[0] + seconds(0, 1, 4) + reduced[0] * (not splits))
    assert last[1] == pytest.approx(again[1] + seconds(0, 1, 2 + 4) + 2 * 10e-6 + reduced[1] * (not splits))
    assert [first[2], last[2]] == pytest.approx([seconds_ * splits for seconds_ in reduced])


def test_parameters_that_are_gathered_once_a_step_are_synchronized_as_optimizer_states_are():
    mesh = Mesh(dp=4, pp=2, sharding="parameters")
    by_step = COST.replace(gathered="step")

    assert not COST.traffic_s(replace(mesh, sharding="optimizer")).any()
    assert not by_step.traffic_s(mesh).any()
    assert (
        by_step.gradient_sync_s(mesh).tolist()
        == COST.gradient_sync_s(replace(mesh, sharding="optimizer")).tolist()
    )
    own = COST.memory(replace(mesh, sharding="none")).state_bytes[0] / 18
    one, other = (cost.memory(mesh).state_bytes[0] for cost in (by_step, COST))
    assert one == pytest.approx(own * ((18 - 4) / 4 + 6))  # whole ones take the place of divided gradients
    assert other == pytest.approx(own * 18 / 4 + 2 * 2 * LLAMA.parameters_per_layer)


def test_gpus_of_several_nodes_synchronize_over_the_network():
    near, far = COST.gradient_sync_s(Mesh(dp=8)), COST.gradient_sync_s(Mesh(dp=8, tp=2))

    # Half the parameters each, at 50 GB/s.
    assert far[0] == pytest.approx(near[0] / 2 * 360 / 50, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"recompute_share": 0.5},
            "recompute_share=0.5 with recompute='none'; .* and 1 unless recompute='full'",
        ),
        ({"recompute": "full", "recompute_share": "half"}, "recompute_share='half' .* must be a number"),
        ({"recompute": "full", "recompute_share": True}, "recompute_share=True .* must be a number"),
        ({"recompute": "full", "recompute_share": 0}, "recompute_share=0 with .* must be a number above 0"),
        ({"recompute": "some"}, 'cost recompute=\'some\'; it must be "none", "selective"'),
        ({"offload": "all"}, 'cost offload=\'all\'; it must be "none" or "kv"'),
        ({"mode": "guess"}, 'cost mode=\'guess\'; it must be "calibrated" or "flops"'),
        ({"tp_overlap": 1.5}, "tp_overlap=1.5; it must be from 0 to 1"),
        ({"exchange_overlap": -0.5}, "exchange_overlap=-0.5; it must be from 0 to 1"),
        ({"memory_fraction": 0}, "memory_fraction=0; it must be above 0 and at most 1"),
        ({"adapter_share": -0.1}, "adapter_share=-0.1; it must be a number from 0 on"),
        ({"adapter_share": None}, "adapter_share=None; it must be a number from 0 on"),
        ({"adapter_width": np.inf}, "adapter_width=inf; it must be a number from 0 on"),
        ({"optimizer_bytes": "two"}, "optimizer_bytes='two'; it must be a number from 0 on"),
        ({"end_optimizer_bytes": True}, "end_optimizer_bytes=True; it must be a number from 0 on"),
        ({"precision": "fp16"}, 'cost precision=\'fp16\'; it must be "bf16" or "fp32"'),
    ],
)
def test_settings_out_of_range_are_refused(changes, words):
    with pytest.raises(SettingError, match=words):
        COST.replace(**changes)


@pytest.mark.parametrize("ask", ["rates", "stages", "memory", "send_s", "gradient_sync_s", "traffic_s"])
def test_a_mesh_that_does_not_divide_the_model_is_refused_whatever_is_asked(ask):
    with pytest.raises(SettingError, match="tp=3 doesn't divide 32 query heads"):
        getattr(COST, ask)(Mesh(tp=3))


def test_eager_layers_leave_their_norms_in_float32_and_the_gate_twice():
    eager = COST.replace(kernels="eager")
    fused, memory = COST.memory(Mesh()), eager.memory(Mesh())

    more = 8 * 4096 + 8 + 2 * 14336
    assert memory.held_bytes[0] - fused.held_bytes[0] == 32 * more + 4 * 128
    recomputed = eager.replace(recompute="full").memory(Mesh())
    assert recomputed.held_bytes[0] == 32 * (2 * 4096 + 4 * 8 * 128)
    # The layer made again without the keys and values in the cache, its ends and positions, and its gradients.
    begins = 139_392 + more - 4 * 8 * 128 + 4 * 4096 + 4 * 128 + 8 + 4 * 14336
    assert recomputed.backward_peaks[0, :, OWN].max() == begins
    assert memory.backward_peaks[0, :, OWN].max() == 4 * 14336 + 2 * 4096
    # Logits, which are there in backward tasks alone, and the norm beside them.
    assert memory.backward_peaks[0, :, HEAD].max() == 6 * LLAMA.vocab + 10 * 4096
    assert fused.state_bytes[0] - memory.state_bytes[0] == 1024 * 6 * LLAMA.vocab
    assert eager.fingerprint != COST.fingerprint


def test_unknown_kernels_are_refused():
    with pytest.raises(SettingError, match='cost kernels=\'slow\'; it must be "fused" or "eager"'):
        COST.replace(kernels="slow")
