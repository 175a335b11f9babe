"""model_inputs: documents packed into a transformers model train as if each were alone."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.hf_models import (
    ATTENTIONS,
    CONFIGS,
    FAMILIES,
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
from torch.nn.attention import flex_attention
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BigBirdConfig,
    BloomConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    MoshiConfig,
    Qwen3NextConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import varlen as vl
from varlen.adapters import hf
from varlen.errors import DocumentsError, ModelError

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
def test_loss_and_every_gradient_are_those_of_documents_one_by_one(
    family: str, attention: str, layout: Any, all_in_float64: None
) -> None:
    model, plain = tiny(family, attention), tiny(family, "eager")
    ours, theirs = packed_loss(model, packed(layout)), loss_one_by_one(plain)

    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    assert furthest(gradients(model, ours), gradients(plain, theirs)) < 1e-10


@COMPILES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt2"])  # has none
def test_flex_attention_gives_the_loss_of_documents_one_by_one(
    family: str, layout: Any, all_in_float64: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Compiling takes seconds and a compiler, and on CPU there is no backward to compile for. The switch
    # silences a warning that eager FlexAttention is slow.
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        ours = packed_loss(tiny(family, "flex_attention"), packed(layout))
        theirs = loss_one_by_one(tiny(family, "eager"))

    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_models_own_loss_is_the_mean_over_the_batchs_targets(attention: str) -> None:
    model, batch = tiny("llama", attention), packed()

    loss = model(**hf.model_inputs(batch, model)).loss

    assert loss.item() == pytest.approx(loss_one_by_one(model).item() / batch.num_targets, rel=1e-6)


def test_ready_shifted_labels_give_the_same_loss() -> None:
    model = tiny("llama", "sdpa")
    arguments = hf.model_inputs(packed(shift_labels=True), model)

    assert arguments["shift_labels"].dtype == torch.int64
    assert model(**arguments).loss.item() == model(**hf.model_inputs(packed(), model)).loss.item()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_slots_rounded_up_keep_documents_apart_too(attention: str) -> None:
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
def test_numpy_arrays_and_tensors_give_the_same_arguments(attention: str) -> None:
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
def test_arguments_are_exactly_those_that_the_attention_reads(attention: str, more: set[str]) -> None:
    arguments = hf.model_inputs(packed(), tiny("llama", attention))

    assert arguments.keys() == {"input_ids", "position_ids", "labels", "use_cache"} | more
    assert arguments["use_cache"] is False
    assert arguments["input_ids"].dtype == arguments["labels"].dtype == torch.int64


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn3"])
def test_flash_attention_is_told_boundaries_over_the_flattened_rows(name: str) -> None:
    model, batch = tiny("llama", "sdpa"), packed()
    # The kernels need a GPU; the arguments don't.
    model.config._attn_implementation_internal = name

    arguments = hf.model_inputs(batch, model)

    assert "attention_mask" not in arguments
    assert arguments["cu_seq_lens_q"].tolist() == batch.cu_seqlens.tolist()
    assert arguments["cu_seq_lens_q"][-1] == arguments["input_ids"].numel()
    assert arguments["max_length_q"] == 20
    assert type(arguments["max_length_q"]) is int


def test_the_longest_segment_covers_padding_longer_than_any_document() -> None:
    batch = packed(lengths=(3, 2))

    arguments = hf.model_inputs(batch, tiny("llama", "varlen"))

    assert batch.max_seqlen == 3
    assert arguments["max_length_q"] == int(arguments["cu_seq_lens_q"].diff().max()) == 21


def test_layers_of_several_kinds_get_a_mask_each() -> None:
    batch = packed()
    masks = hf.model_inputs(batch, tiny("gemma2", "eager"))["attention_mask"]

    assert masks.keys() == {"full_attention", "sliding_attention"}
    for kind, window in (("full_attention", None), ("sliding_attention", WINDOW)):
        assert torch.equal(
            masks[kind] == 0, torch.as_tensor(batch.dense_mask(sliding_window=window))[:, None]
        )


def test_a_window_that_the_model_never_uses_is_not_applied() -> None:
    config = MoshiConfig(**SMALL, num_key_value_heads=2, sliding_window=WINDOW, audio_vocab_size=32)
    model = make(config, "sdpa")

    assert torch.equal(
        hf.model_inputs(packed(), model)["attention_mask"][:, 0], packed().to_torch().dense_mask()
    )


@COMPILES
def test_wrapped_models_are_looked_into() -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    model = tiny("llama", "sdpa")
    wrapped = Wrapper(torch.compile(model))

    assert hf.unwrap(wrapped) is model
    assert "attention_mask" in hf.model_inputs(packed(), wrapped)


def test_a_document_longer_than_the_models_positions_is_refused() -> None:
    model = make(LlamaConfig(**SMALL | {"max_position_embeddings": 16}), "sdpa")

    with pytest.raises(
        ModelError, match=r"20 tokens, but LlamaForCausalLM has 16 positions.*capacity at most 16"
    ):
        hf.model_inputs(packed(), model)


def test_token_ids_beyond_the_vocabulary_are_refused() -> None:
    batch = packed()
    model = make(LlamaConfig(**SMALL | {"vocab_size": batch.max_token_id}), "sdpa")

    with pytest.raises(
        ModelError, match=rf"token id {batch.max_token_id}, but LlamaForCausalLM embeds ids below"
    ):
        hf.model_inputs(batch, model)


@pytest.mark.parametrize("as_tensors", [False, True])
def test_negative_token_ids_are_refused(as_tensors: bool) -> None:
    batch = vl.collate([[3, 50, 4]], vl.pack([3], capacity=4))
    batch = replace(batch, input_ids=np.where(batch.input_ids == 50, -200, batch.input_ids))

    with pytest.raises(ModelError, match=r"token id -200, but LlamaForCausalLM embeds ids from 0"):
        hf.model_inputs(batch.to_torch() if as_tensors else batch, tiny("llama", "sdpa"))


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(
        DocumentsError, match=r"takes a PackedBatch, as vl\.collate returns it, .* given dict"
    ):
        hf.model_inputs({"input_ids": torch.zeros(1, 4)}, tiny("llama", "sdpa"))  # type: ignore[arg-type]


def test_the_largest_id_and_the_longest_document_that_fit_are_taken() -> None:
    batch = packed()
    config = LlamaConfig(**SMALL | {"vocab_size": batch.max_token_id + 1, "max_position_embeddings": 20})

    assert hf.model_inputs(batch, make(config, "sdpa"))


@pytest.mark.parametrize("pad_id", [-1, VOCABULARY])
def test_padding_outside_the_vocabulary_is_refused(pad_id: int) -> None:
    with pytest.raises(ModelError, match=rf"padding is token id {pad_id}.*pad_id=0"):
        hf.model_inputs(packed(pad_id=pad_id), tiny("llama", "sdpa"))


T5 = T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
QWEN3_NEXT = Qwen3NextConfig(
    **CONFIGS["llama"]().to_diff_dict()
    | {"model_type": "qwen3_next", "num_experts": 4, "num_hidden_layers": 4},
)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: T5ForConditionalGeneration(T5), "encoder-decoder"),
        (lambda: make(BertConfig(**SMALL), "sdpa"), "both directions"),
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
def test_a_model_whose_documents_no_argument_keeps_apart_is_refused(model: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        hf.model_inputs(packed(), model())


def test_an_attention_that_varlen_does_not_know_is_refused_with_those_that_it_knows() -> None:
    model = tiny("llama", "sdpa")
    model.config._attn_implementation_internal = "paged|eager"

    with pytest.raises(ModelError, match=r'"paged\|eager", and varlen knows eager, sdpa, flex_attention'):
        hf.model_inputs(packed(), model)


def test_a_model_with_experts_takes_packed_documents() -> None:
    config = MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, sliding_window=WINDOW)
    model = make(config, "sdpa")
    model.set_experts_implementation("eager")  # the grouped product takes no float64

    ours, theirs = packed_loss(model, packed()), loss_one_by_one(model)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-10)


def test_without_boundaries_the_loss_is_another() -> None:
    model, batch = tiny("llama", "sdpa"), packed()
    arguments = hf.inputs_without_boundaries(batch, model)
    labels = arguments.pop("labels")
    logits = model(**arguments).logits
    leaking = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")

    assert abs(leaking.item() - loss_one_by_one(model).item()) > 0.01


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_library_is_named_with_the_command_that_installs_it(missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None\nfrom varlen.adapters import hf"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("varlen.errors.MissingExtraError")
    assert f"{missing} is not installed, and varlen.adapters.hf" in last
    assert "`pip install 'varlen[train]'` installs it" in last
