"""model_inputs: documents packed into a transformers model train as if each were alone, or are refused."""

import subprocess
import sys
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.hf_models import (
    ATTENTIONS,
    CONFIGS,
    FAMILIES,
    GROUPED,
    LAYOUTS,
    LENGTHS,
    PAIRS,
    SMALL,
    VOCABULARY,
    WINDOW,
    furthest,
    gradients,
    loss_one_by_one,
    make,
    packed,
    packed_loss,
    tiny,
)
from tests.support.rarely import mostly
from torch.nn.attention import flex_attention
from torch.nn.functional import cross_entropy
from transformers import (
    BigBirdConfig,
    BloomConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    Ministral3Config,
    MixtralConfig,
    MoshiConfig,
    Phi3Config,
    Qwen3NextConfig,
    RobertaConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import varlen as vl
from varlen import model_families
from varlen.adapters import hf
from varlen.adapters.hf.mixing import segment_arguments
from varlen.batch.packed import PackedBatch
from varlen.errors import DocumentsError, ModelError
from varlen.verify.models.backends import recurrence
from varlen.verify.models.isolation import check_isolation
from varlen.verify.models.loading import tiny_model

# torch.compile brings in parts of torch that torch itself has deprecated.
COMPILES = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")


@pytest.fixture
def all_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lift the parts that transformers computes in float32 (eager softmax, Gemma's norm) to float64."""
    softmax = torch.nn.functional.softmax

    def wide_softmax(x: torch.Tensor, dim: int, dtype: Any = None, **_: Any) -> torch.Tensor:
        return softmax(x, dim, dtype=torch.promote_types(x.dtype, dtype or x.dtype))

    monkeypatch.setattr(torch.nn.functional, "softmax", wide_softmax)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "attention"), PAIRS)
def test_loss_and_every_gradient_are_those_of_documents_one_by_one(family, attention, layout, all_in_float64):
    model, plain = tiny(family, attention), tiny(family, "eager")
    ours, theirs = packed_loss(model, packed(layout)), loss_one_by_one(plain)

    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    assert furthest(gradients(model, ours), gradients(plain, theirs)) < 1e-10


@COMPILES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt2"])  # has none
def test_flex_attention_gives_the_loss_of_documents_one_by_one(family, layout, all_in_float64, monkeypatch):
    # Compiling takes seconds and a compiler, and on CPU there is no backward to compile for. The switch
    # silences a warning that eager FlexAttention is slow.
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        ours = packed_loss(tiny(family, "flex_attention"), packed(layout))
        theirs = loss_one_by_one(tiny(family, "eager"))

    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_models_own_loss_is_the_mean_over_the_batchs_targets(attention):
    model, batch = tiny("llama", attention), packed()

    loss = model(**hf.model_inputs(batch, model)).loss

    assert loss.item() == pytest.approx(loss_one_by_one(model).item() / batch.num_targets, rel=1e-6)


def test_ready_shifted_labels_give_the_same_loss():
    model = tiny("llama", "sdpa")
    arguments = hf.model_inputs(packed(shift_labels=True), model)

    assert arguments["shift_labels"].dtype == torch.int64
    assert model(**arguments).loss.item() == model(**hf.model_inputs(packed(), model)).loss.item()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_slots_rounded_up_keep_documents_apart_too(attention):
    import numpy as np
    from tests.support.hf_models import documents

    import varlen as vl

    model = tiny("mistral", attention)
    packing = vl.pack(LENGTHS, capacity=64, method="next_fit", document_multiple_of=8)
    batch = vl.collate(documents(), packing)
    assert batch.cu_seqlens_padded is not None
    assert not np.array_equal(batch.cu_seqlens, batch.cu_seqlens_padded)

    assert packed_loss(model, batch).item() == pytest.approx(loss_one_by_one(model).item(), rel=1e-8)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_numpy_arrays_and_tensors_give_the_same_arguments(attention):
    model, batch = tiny("llama", attention), packed()
    ours, theirs = hf.model_inputs(batch, model), hf.model_inputs(batch.to_torch(), model)

    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(theirs[name])), name


@pytest.mark.parametrize(
    ("attention", "more"),
    [
        ("eager", {"attention_mask"}),
        ("sdpa", {"attention_mask"}),
        ("varlen", {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}),
    ],
)
def test_arguments_are_exactly_those_that_the_attention_reads(attention, more):
    arguments = hf.model_inputs(packed(), tiny("llama", attention))

    assert arguments.keys() == {"input_ids", "position_ids", "labels", "use_cache"} | more
    assert arguments["use_cache"] is False
    assert arguments["input_ids"].dtype == arguments["labels"].dtype == torch.int64


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn3"])
def test_flash_attention_is_told_boundaries_over_the_flattened_rows(name):
    model, batch = tiny("llama", "sdpa"), packed()
    # The kernels need a GPU; the arguments don't.
    model.config._attn_implementation_internal = name

    arguments = hf.model_inputs(batch, model)

    assert "attention_mask" not in arguments
    assert arguments["cu_seq_lens_q"].tolist() == batch.cu_seqlens.tolist()
    assert arguments["cu_seq_lens_q"][-1] == arguments["input_ids"].numel()
    assert arguments["max_length_q"] == 20
    assert type(arguments["max_length_q"]) is int


def test_the_longest_segment_covers_padding_longer_than_any_document():
    batch = packed(lengths=(3, 2))

    arguments = hf.model_inputs(batch, tiny("llama", "varlen"))

    assert batch.max_seqlen == 3
    assert arguments["max_length_q"] == int(arguments["cu_seq_lens_q"].diff().max()) == 21


def test_layers_of_several_kinds_get_a_mask_each():
    batch = packed()
    masks = hf.model_inputs(batch, tiny("gemma2", "eager"))["attention_mask"]

    assert masks.keys() == {"full_attention", "sliding_attention"}
    for kind, window in (("full_attention", None), ("sliding_attention", WINDOW)):
        assert torch.equal(
            masks[kind] == 0, torch.as_tensor(batch.dense_mask(sliding_window=window))[:, None]
        )


def test_a_window_that_the_model_never_uses_is_not_applied():
    config = MoshiConfig(**SMALL, num_key_value_heads=2, sliding_window=WINDOW, audio_vocab_size=32)
    model = make(config, "sdpa")

    assert torch.equal(
        hf.model_inputs(packed(), model)["attention_mask"][:, 0], packed().to_torch().dense_mask()
    )


@COMPILES
def test_wrapped_models_are_looked_into():
    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    model = tiny("llama", "sdpa")
    wrapped = Wrapper(torch.compile(model))

    assert hf.unwrap(wrapped) is model
    assert "attention_mask" in hf.model_inputs(packed(), wrapped)


def test_a_document_longer_than_the_models_positions_is_refused():
    model = make(LlamaConfig(**SMALL | {"max_position_embeddings": 16}), "sdpa")

    with pytest.raises(
        ModelError, match=r"20 tokens, but LlamaForCausalLM has 16 positions.*capacity at most 16"
    ):
        hf.model_inputs(packed(), model)


def test_token_ids_beyond_the_vocabulary_are_refused():
    batch = packed()
    model = make(LlamaConfig(**SMALL | {"vocab_size": batch.max_token_id}), "sdpa")

    with pytest.raises(
        ModelError, match=rf"token id {batch.max_token_id}, but LlamaForCausalLM embeds ids below"
    ):
        hf.model_inputs(batch, model)


@pytest.mark.parametrize("as_tensors", [False, True])
def test_negative_token_ids_are_refused(as_tensors):
    batch = vl.collate([[3, 50, 4]], vl.pack([3], capacity=4))
    batch = replace(batch, input_ids=np.where(batch.input_ids == 50, -200, batch.input_ids))

    with pytest.raises(ModelError, match=r"token id -200, but LlamaForCausalLM embeds ids from 0"):
        hf.model_inputs(batch.to_torch() if as_tensors else batch, tiny("llama", "sdpa"))


def test_what_is_no_batch_is_refused():
    with pytest.raises(
        DocumentsError, match=r"takes a PackedBatch, as vl\.collate returns it, .* given dict"
    ):
        hf.model_inputs({"input_ids": torch.zeros(1, 4)}, tiny("llama", "sdpa"))  # type: ignore[arg-type]


def test_the_largest_id_and_the_longest_document_that_fit_are_taken():
    batch = packed()
    config = LlamaConfig(**SMALL | {"vocab_size": batch.max_token_id + 1, "max_position_embeddings": 20})

    assert hf.model_inputs(batch, make(config, "sdpa"))


@pytest.mark.parametrize("pad_id", [-1, VOCABULARY])
def test_padding_outside_the_vocabulary_is_refused(pad_id):
    with pytest.raises(ModelError, match=rf"padding is token id {pad_id}.*pad_id=0"):
        hf.model_inputs(packed(pad_id=pad_id), tiny("llama", "sdpa"))


T5 = T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
QWEN3_NEXT = Qwen3NextConfig(
    **CONFIGS["llama"]().to_diff_dict()
    | {"model_type": "qwen3_next", "num_experts": 4, "num_hidden_layers": 4}
)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: T5ForConditionalGeneration(T5), "encoder-decoder"),
        (lambda: make(BigBirdConfig(**SMALL, is_decoder=False), "eager"), "both directions"),
        (
            lambda: make(MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1), "eager"),
            "layers of kind linear_attention|recurrent state",
        ),
        (lambda: make(QWEN3_NEXT, "sdpa"), "take the segments of one row, and the batch has 3 rows"),
        (
            lambda: make(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4), "eager"),
            "takes no position_ids",
        ),
        (lambda: make(BigBirdConfig(**SMALL, is_decoder=True), "varlen"), "computes attention by itself"),
        (lambda: torch.nn.Linear(2, 2), "no transformers config"),
    ],
    ids=[
        "encoder-decoder",
        "both directions",
        "recurrent",
        "hybrid",
        "no positions",
        "own attention",
        "no model",
    ],
)
def test_a_model_whose_documents_no_argument_keeps_apart_is_refused(model, words):
    with pytest.raises(ModelError, match=words):
        hf.model_inputs(packed(), model())


def test_an_attention_that_varlen_does_not_know_is_refused_with_those_that_it_knows():
    model = tiny("llama", "sdpa")
    model.config._attn_implementation_internal = "paged|eager"

    with pytest.raises(ModelError, match=r'"paged\|eager", and varlen knows eager, sdpa, flex_attention'):
        hf.model_inputs(packed(), model)


def test_a_model_with_experts_takes_packed_documents():
    config = MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, sliding_window=WINDOW)
    model = make(config, "sdpa")
    model.set_experts_implementation("eager")  # the grouped product takes no float64

    ours, theirs = packed_loss(model, packed()), loss_one_by_one(model)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-10)


def test_without_boundaries_the_loss_is_another():
    model, batch = tiny("llama", "sdpa"), packed()
    arguments = hf.inputs_without_boundaries(batch, model)
    labels = arguments.pop("labels")
    logits = model(**arguments).logits
    leaking = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")

    assert abs(leaking.item() - loss_one_by_one(model).item()) > 0.01


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_library_is_named_with_the_command_that_installs_it(missing):
    program = f"import sys; sys.modules[{missing!r}] = None\nfrom varlen.adapters import hf"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("varlen.errors.MissingExtraError")
    assert f"{missing} is not installed, and varlen.adapters.hf" in last
    assert '`pip install "varlen[train]"` installs it' in last


ORIGINAL = 8
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": ORIGINAL,
    "factor": 8.0,
}


def longrope() -> Any:
    plain = {name: value for name, value in GROUPED.items() if name != "head_dim"}
    config = Phi3Config(**plain, rope_parameters=dict(LONGROPE), original_max_position_embeddings=ORIGINAL)
    return make(config, "sdpa")


def llama4(floor_scale: int = 8) -> Any:
    config = Llama4TextConfig(
        **GROUPED,
        num_local_experts=2,
        interleave_moe_layer_step=1,
        intermediate_size_mlp=64,
        no_rope_layers=[0, 0],
        attention_chunk_size=64,
        attn_temperature_tuning=True,
        floor_scale=floor_scale,
        attn_scale=5.0,
    )
    model = make(config, "sdpa")
    model.set_experts_implementation("eager")
    return model


def batch_of(*lengths: int, layout: Any = "flat") -> tuple[list[Any], Any]:
    rng = np.random.default_rng(0)
    documents = [rng.integers(3, VOCABULARY, length).astype(np.int32) for length in lengths]
    return documents, vl.collate(documents, vl.pack(lengths, 64, "next_fit"), layout=layout)


def furthest_logit(model: Any, documents: list[Any], arguments: dict[str, Any]) -> float:
    """How far the logits of documents laid end to end are from those of each alone."""
    model.eval()
    with torch.no_grad():
        packed = model(**{name: v for name, v in arguments.items() if name != "labels"}).logits[0]
        start, worst = 0, 0.0
        for document in documents:
            alone = model(**hf.plain_inputs(torch.as_tensor(document).long()[None], model)).logits[0]
            worst = max(worst, float((packed[start : start + len(document)] - alone).abs().max()))
            start += len(document)
    return worst


def arguments_unchecked(batch: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments as they were before batches were checked for it."""
    with monkeypatch.context() as patched:
        patched.setattr("varlen.adapters.hf.inputs.check_scaled", lambda *_: None)
        return hf.model_inputs(batch, model)


def test_longrope_takes_the_frequencies_of_the_longest_document_and_is_refused_where_they_differ(monkeypatch):
    model = longrope()
    documents, batch = batch_of(5, 20)

    assert furthest_logit(model, documents, arguments_unchecked(batch, model, monkeypatch)) > 1e-3
    with pytest.raises(ModelError, match=r"longrope.* 1 documents of up to 8 tokens.* and 1 longer ones"):
        hf.model_inputs(batch, model)


@pytest.mark.parametrize("lengths", [(5, 8), (9, 20)])
def test_longrope_takes_documents_of_one_side(lengths):
    model = longrope()
    documents, batch = batch_of(*lengths)

    assert furthest_logit(model, documents, hf.model_inputs(batch, model)) < 1e-6


def test_the_way_out_of_longrope_gives_all_documents_what_they_have_alone():
    model = longrope()
    documents, batch = batch_of(5, 20, 1)

    model.config.rope_parameters["original_max_position_embeddings"] = 1

    assert furthest_logit(model, documents, hf.model_inputs(batch, model)) < 1e-6


def test_llama_4_scales_by_the_place_in_the_row_and_is_refused_where_that_differs(monkeypatch):
    model = llama4()
    documents, batch = batch_of(5, 6)

    assert furthest_logit(model, documents, arguments_unchecked(batch, model, monkeypatch)) > 1e-3
    with pytest.raises(
        ModelError, match=r"place in its row \(attn_temperature_tuning, by steps of 8\), and 4 tokens"
    ):
        hf.model_inputs(batch, model)
    assert hf.model_inputs(batch_of(20)[1], model)  # alone in its row
    documents, batch = batch_of(3, 4)
    assert furthest_logit(model, documents, hf.model_inputs(batch, model)) < 1e-5
    documents, batch = batch_of(5, 6)
    wide = llama4(floor_scale=8192)
    assert furthest_logit(wide, documents, hf.model_inputs(batch, wide)) < 1e-5


def test_scales_that_go_by_positions_stay_right():
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "llama_4_scaling_beta": 0.5,
        "original_max_position_embeddings": 4,
    }
    config = Ministral3Config(**GROUPED, rope_parameters=rope)
    model = make(config, "sdpa")
    documents, batch = batch_of(5, 20, 3)

    assert furthest_logit(model, documents, hf.model_inputs(batch, model)) < 1e-6


SIX_LENGTHS = (9, 21, 1, 13, 30, 6, 17, 2)
BY_NUMBERS = {name for name, known in model_families.FAMILIES.items() if known.boundaries == "numbers"}
BY_ENDS_TOO = {name for name, known in model_families.FAMILIES.items() if known.boundaries == "ends"}
IN_ROWS, IN_ONE_ROW = sorted(BY_NUMBERS), sorted(BY_NUMBERS | BY_ENDS_TOO)


def documents() -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, length).astype(np.int32) for length in SIX_LENGTHS]


def packed_as(layout: Any) -> PackedBatch:
    capacity = 52 if layout == "rows" else sum(SIX_LENGTHS)
    return vl.collate(documents(), vl.pack(SIX_LENGTHS, capacity=capacity, method="next_fit"), layout=layout)


BOTH_LAYOUTS = [(f, "flat") for f in IN_ONE_ROW] + [(f, "rows") for f in IN_ROWS]
CELLS = [(*one, attention) for one in BOTH_LAYOUTS for attention in ("sdpa", "varlen")]
BY_VARLEN = ("qwen4_exp_text", "bamba", "qwen3_next")


@pytest.mark.parametrize(
    ("family", "layout", "attention"),
    mostly([one for one in CELLS if one[2] == "sdpa" or one[0] in BY_VARLEN], CELLS),
)
def test_told_boundaries_keep_documents_apart(family, layout, attention):
    model = tiny_model(family)
    hf.register()
    model.set_attn_implementation(attention)
    with recurrence(model) as names:
        report = check_isolation(model, packed_as(layout))

    assert names
    if (family, attention) == ("qwen4_exp_text", "varlen"):
        assert report.verdict == "refuses"
        assert "selects by a mask which tokens are attended to" in report.reason
    else:
        assert report.verdict == "isolated", str(report)


@pytest.mark.parametrize("family", IN_ONE_ROW)
def test_loss_and_gradients_are_those_of_documents_one_by_one(family):
    model, batch = tiny_model(family, attention="sdpa"), packed_as("flat")
    with recurrence(model):
        arguments = hf.model_inputs(batch, model)
        labels = arguments.pop("labels")
        logits = model(**arguments).logits
        ours = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        ours_by_weight = gradients(model, ours)
    alone = torch.zeros(())
    for document in documents():
        tokens = torch.as_tensor(document).long()
        logits = model(**hf.plain_inputs(tokens[None], model)).logits[0]
        alone = alone + cross_entropy(logits[:-1], tokens[1:], reduction="sum")
    theirs = gradients(model, alone)

    assert ours.item() == pytest.approx(alone.item(), rel=1e-5)
    ours_by_weight = {name: ours_by_weight[name] for name in theirs}
    assert furthest(ours_by_weight, theirs) < 2e-3


@pytest.mark.parametrize(
    ("family", "missing"),
    [*((family, "seq_idx") for family in IN_ONE_ROW), *((f, "cu_seq_lens_q") for f in sorted(BY_ENDS_TOO))],
)
def test_each_argument_is_needed(family, missing):
    def without(batch: PackedBatch, model: Any) -> dict[str, Any]:
        return {name: value for name, value in hf.model_inputs(batch, model).items() if name != missing}

    model = tiny_model(family)
    with recurrence(model):
        report = check_isolation(model, packed_as("flat"), inputs=without)

    assert report.verdict == "leaks", str(report)


def test_without_the_kernels_transformers_refuses_in_a_sentence():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = check_isolation(tiny_model("bamba"), packed_as("flat"))

    if report.verdict != "isolated":  # where the kernels are installed, they run
        assert report.verdict == "refuses"
        assert "can't keep packed sequences apart without `causal_conv1d`" in report.reason


@pytest.mark.parametrize("family", ["jamba", "kimi_linear", "mamba", "mamba2", "zamba", "minimax", "rwkv"])
def test_recurrent_families_that_take_no_boundaries_are_refused(family):
    with pytest.raises(ModelError, match=r"layers of kind|recurrent state"):
        hf.model_inputs(packed_as("flat"), tiny_model(family))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["axk2", "deepseek_v32", "glm_moe_dsa"])
def test_tokens_are_selected_within_their_document(family, attention):
    report = check_isolation(tiny_model(family, attention=attention), packed_as("rows"))

    assert report.verdict == "isolated", str(report)


def test_segments_are_numbered_in_each_row_padding_included():
    ends = torch.tensor([0, 2, 3, 5, 9, 10], dtype=torch.int32)

    found = segment_arguments("bamba", ends, 2, 5)["seq_idx"]

    assert found.dtype == torch.int32
    assert found.tolist() == [[0, 0, 1, 2, 2], [0, 0, 0, 0, 1]]
    assert segment_arguments("llama", ends, 2, 5) == {}


@pytest.mark.parametrize("attention", ["eager", "sdpa", "varlen"])
@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_positions_begin_behind_that_of_padding_where_it_has_one(attention, layout):
    config = RobertaConfig(**SMALL | {"pad_token_id": 1}, is_decoder=True)
    model, batch = make(config, attention, torch.float32), packed_as(layout)

    report = check_isolation(model, batch)

    assert report.verdict == "isolated", str(report)
    assert int(hf.model_inputs(batch, model)["position_ids"].min()) == 2


def test_positions_that_padding_takes_up_are_not_there_for_documents():
    config = RobertaConfig(**SMALL | {"pad_token_id": 1, "max_position_embeddings": 31}, is_decoder=True)

    with pytest.raises(ModelError, match=r"longest document has 30 tokens, but .* has 29 positions"):
        hf.model_inputs(packed_as("flat"), make(config, "sdpa"))
