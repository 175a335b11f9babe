"""check_isolation: finds every leak put there, clears what is isolated, and says when it can't see."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.hf_models import FAMILIES, LAYOUTS, PAIRS, SMALL, VOCABULARY, make, packed, tiny
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    OPTConfig,
)

import varlen as vl
from varlen.adapters import hf
from varlen.errors import DocumentsError, ModelError, SettingError
from varlen.verify.models import backends
from varlen.verify.models.isolation import IsolationReport, Movements, check_isolation, judge

OPT = OPTConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    word_embed_proj_dim=32,
    ffn_dim=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)
MAMBA = MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1)


def positions_only(batch: Any, model: Any, **more: Any) -> dict[str, Any]:
    """The arguments of a collator that leaves boundaries to be inferred from positions."""
    tensors = batch.to_torch()
    return {"input_ids": tensors.input_ids, "position_ids": tensors.position_ids, "use_cache": False} | more


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "attention"), PAIRS)
def test_model_inputs_keep_documents_apart(family, attention, layout):
    report = check_isolation(tiny(family, attention), packed(layout))

    assert report.verdict == "isolated", str(report)
    moved = report.movements
    assert moved.largest_difference == moved.padding_difference == 0.0
    assert moved.changed_documents == report.documents == 7
    assert moved.control_difference is not None
    assert moved.control_difference > 1e-3
    assert moved.alone_difference < (1e-6 if attention == "eager" else 1e-12)
    assert moved.packed_loss == pytest.approx(moved.alone_loss, rel=1e-6)
    assert moved.attention_across == (0.0 if attention == "eager" else None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_boundaries_reach_flash_attention_in_both_layouts(family, layout):
    model, batch = tiny(family, "eager"), packed(layout)
    model.config._attn_implementation_internal = "flash_attention_2"
    with backends.flash_attention():
        report = check_isolation(model, batch)
        inferred = check_isolation(model, batch, inputs=positions_only)

    assert report.ok, str(report)
    assert report.attention == "flash_attention_2"
    # Positions alone are read in a single row only.
    assert inferred.verdict == ("leaks" if layout == "rows" else "isolated")


def classifier() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, **sizes)).eval()


def test_of_a_classifier_that_pools_the_hidden_states_are_looked_at():
    model, batch = classifier(), packed("rows")
    report = check_isolation(model, batch)

    assert report.verdict == "isolated", str(report)
    assert report.model == "BertModel below the head of BertForSequenceClassification"
    assert check_isolation(model.bert, batch).model == "BertModel"
    assert vl.check_batch(batch, model).ok
    mapping = positions_only(batch, model)
    (found,) = vl.check_batch(mapping, model).errors
    assert "document_outputs(model, batch)" in found.fix


def test_a_refusal_is_told_in_full():
    report = check_isolation(classifier(), packed("rows"), inputs=hf.model_inputs)

    assert report.verdict == "refuses"
    assert report.reason.endswith("otherwise give it one document a row (padded)")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_its_own_serves_where_none_is_given(family):
    report = check_isolation(tiny(family, "eager", torch.float32))

    assert report.ok, str(report)
    assert report.documents == 10  # one of the nine is split


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {"use_cache": True}),
        ("llama", {"attention_mask": torch.ones(3, 26)}),
        ("mistral", {"use_cache": True}),
        ("gpt_neox", {"attention_mask": torch.ones(3, 26)}),
    ],
    ids=["cache", "mask of ones", "cache and window", "learned mask of ones"],
)
def test_what_silently_turns_boundaries_off_is_found(family, attention, more):
    model = tiny(family, attention)
    leaking = check_isolation(model, packed(), inputs=lambda b, m: positions_only(b, m, **more))
    without = check_isolation(model, packed(), inputs=positions_only)

    assert leaking.verdict == "leaks"
    assert "changing one document moved another's logits" in leaking.reason
    assert without.ok, str(without)


def test_a_family_that_never_looks_at_positions_leaks_with_them_alone_and_not_with_model_inputs():
    model = make(OPT, "eager")
    leaking = check_isolation(model, packed(), inputs=positions_only)

    assert leaking.verdict == "leaks"
    assert leaking.movements.attention_across is not None
    assert leaking.movements.attention_across > 0.01
    assert check_isolation(model, packed()).ok


@pytest.mark.parametrize("document", range(7))
def test_a_leak_out_of_any_single_document_is_found(document):
    model, batch = tiny("llama", "sdpa"), packed()
    row, column = np.argwhere((batch.segment_ids >= 0) & (batch.position_ids == 0))[document]

    def one_open(given: Any, model: Any) -> dict[str, Any]:
        """Let every token of the row see the document's first."""
        arguments = hf.model_inputs(given, model)
        arguments["attention_mask"][row, 0, :, column] |= torch.as_tensor(batch.segment_ids[row] >= 0)
        return arguments

    moved = check_isolation(model, batch, inputs=one_open).movements
    alone_in_its_row = document == 6
    assert (moved.largest_difference > 0) is not alone_in_its_row


def test_documents_that_see_padding_are_found():
    def open_to_padding(batch: Any, model: Any) -> dict[str, Any]:
        arguments = hf.model_inputs(batch, model)
        arguments["attention_mask"] |= torch.as_tensor(batch.segment_ids < 0)[:, None, None, :]
        return arguments

    report = check_isolation(tiny("llama", "sdpa"), packed(), inputs=open_to_padding)
    assert report.verdict == "leaks"
    assert report.movements.largest_difference == 0
    assert "changing padding moved" in report.reason


def test_positions_that_run_on_are_found_although_no_document_sees_another():
    def running(batch: Any, model: Any) -> dict[str, Any]:
        width = batch.input_ids.shape[1]
        return hf.model_inputs(batch, model) | {"position_ids": torch.arange(width)[None]}

    model = tiny("gpt2", "sdpa")
    report = check_isolation(model, packed(), inputs=running)

    assert report.verdict == "leaks"
    assert report.movements.largest_difference == 0
    assert "where it stands in its row" in report.reason
    assert check_isolation(model, packed()).ok


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_a_window_that_is_not_applied_is_found(family):
    def no_window(batch: Any, model: Any) -> dict[str, Any]:
        arguments = hf.model_inputs(batch, model)
        closed = ~batch.to_torch().dense_mask()[:, None]
        whole = torch.zeros(closed.shape, dtype=torch.float64).masked_fill(closed, -torch.inf)
        masks = arguments["attention_mask"]
        return arguments | {
            "attention_mask": dict.fromkeys(masks, whole) if isinstance(masks, dict) else whole
        }

    report = check_isolation(tiny(family, "eager"), packed(), inputs=no_window)
    assert report.verdict == "leaks"
    assert report.movements.alone_difference > 1e-3


def test_documents_with_padding_between_them_can_be_checked():
    """Slots rounded up leave padding between documents; the control must still find two in a row."""
    packing = vl.pack([5, 3, 9], capacity=32, document_multiple_of=8)
    batch = vl.collate([[7, 8, 9, 7, 8], [3, 4, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9]], packing)
    for attention in ("sdpa", "varlen"):
        assert check_isolation(tiny("llama", attention), batch).verdict == "isolated"


def test_a_batch_with_one_document_a_row_leaves_the_check_blind():
    report = check_isolation(tiny("llama", "sdpa"), packed(lengths=(20, 20)))

    assert report.verdict == "blind"
    assert "no row holds two documents" in report.reason


def test_a_model_that_ignores_earlier_tokens_leaves_the_check_blind():
    model = tiny("llama", "sdpa")
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    report = check_isolation(model, packed())

    assert report.verdict == "blind"
    assert report.movements.control_difference == 0
    assert "a leak can't be seen" in report.reason


def test_inputs_that_ignore_the_change_leave_the_check_blind():
    report = check_isolation(
        tiny("llama", "sdpa"), packed(), inputs=lambda b, m: hf.model_inputs(packed(), m)
    )

    assert report.verdict == "blind"
    assert report.movements.own_difference == 0
    assert "didn't move its own logits" in report.reason


def test_a_model_that_varlen_refuses_is_reported_with_the_reason():
    report = check_isolation(make(MAMBA, "eager"), packed())

    assert report.verdict == "refuses"
    assert "give it one document a row" in report.reason
    assert report.reason in str(report)


def test_a_recurrent_model_given_positions_leaks():
    report = check_isolation(
        make(MAMBA, "eager"),
        packed(),
        inputs=lambda b, m: {"input_ids": b.to_torch().input_ids, "use_cache": False},
    )

    assert report.verdict == "leaks"


def test_experts_may_round_and_still_may_not_leak():
    config = MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, sliding_window=None)
    model = make(config, "sdpa", torch.float32)
    clean = check_isolation(model, packed())
    leaking = check_isolation(model, packed(), inputs=lambda b, m: positions_only(b, m, use_cache=True))

    assert clean.ok, str(clean)
    assert 0 < clean.rounding < 0.01
    assert leaking.verdict == "leaks"


CLEAN = Movements(changed_documents=2, own_difference=1.0, control_difference=0.5)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "isolated"),
        ({"largest_difference": 1e-17}, "leaks"),
        ({"padding_difference": 1e-17}, "leaks"),
        ({"attention_across": 1e-30}, "leaks"),
        ({"attention_across": 0.0}, "isolated"),
        ({"alone_difference": 1e-5}, "isolated"),
        ({"alone_difference": 2e-5}, "leaks"),
        ({"control_difference": 0.0}, "blind"),
        ({"control_difference": None}, "blind"),
        ({"own_difference": 0.0}, "blind"),
        ({"largest_difference": 1.0, "control_difference": 0.0}, "leaks"),
    ],
)
def test_the_verdict_follows_from_what_moved(change, verdict):
    assert judge(dataclasses.replace(CLEAN, **change), tolerance=1e-5)[0] == verdict


def test_the_model_is_left_as_it_was():
    model = make(GPTNeoXConfig(**SMALL, hidden_dropout=0.3), "sdpa").train()
    model.gpt_neox.layers[0].eval()
    model(**hf.model_inputs(packed(), model)).loss.backward()
    torch.manual_seed(5)
    before = (
        [module.training for module in model.modules()],
        {name: p.grad.clone() for name, p in model.named_parameters()},
        {name: value.clone() for name, value in model.state_dict().items()},
        torch.get_rng_state(),
        model.config.to_dict(),
    )

    def drawing(batch: Any, model: Any) -> dict[str, Any]:
        torch.rand(3)
        return hf.model_inputs(batch, model)

    check_isolation(model, packed(), inputs=drawing)

    assert [module.training for module in model.modules()] == before[0]
    assert all(torch.equal(p.grad, before[1][name]) for name, p in model.named_parameters())
    assert all(torch.equal(value, before[2][name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before[3])
    assert model.config.to_dict() == before[4]


def test_the_models_mode_comes_back_after_an_error_too():
    model = tiny("llama", "sdpa").train()
    model.lm_head.weight.data.fill_(float("nan"))
    report = check_isolation(model, packed())

    assert report.verdict == "refuses"
    assert "aren't finite" in report.reason
    assert model.training


def test_rows_wider_than_the_models_positions_can_be_checked():
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=20)

    assert packed().input_ids.shape[1] > config.n_positions == packed().max_seqlen
    assert check_isolation(make(config, "sdpa"), packed()).ok


def test_only_so_many_documents_are_changed_as_asked_for():
    report = check_isolation(tiny("llama", "sdpa"), packed(), max_changed=2)

    assert report.movements.changed_documents == 2
    assert report.documents == 7


def test_tensors_and_arrays_give_the_same_report():
    model = tiny("llama", "sdpa")

    assert check_isolation(model, packed()) == check_isolation(model, packed().to_torch())


def test_the_report_says_what_a_reader_needs():
    text = str(check_isolation(tiny("llama", "eager"), packed()))

    assert text.startswith("isolated: LlamaForCausalLM, attention eager, float64, rows [3, 26]")
    for words in (
        "7 documents, 57 tokens",
        "without boundaries",
        "attention weight across   0",
        "attention_mask=",
    ):
        assert words in text


def test_asking_for_no_change_is_an_error():
    with pytest.raises(SettingError, match="max_changed must be at least 1, got 0"):
        check_isolation(tiny("llama", "sdpa"), packed(), max_changed=0)


def test_a_batch_without_documents_is_an_error():
    empty = vl.collate([], vl.pack([], capacity=8))
    with pytest.raises(SettingError, match="holds no document"):
        check_isolation(tiny("llama", "sdpa"), empty)


def test_what_is_no_model_is_an_error():
    with pytest.raises(ModelError, match="no transformers config"):
        check_isolation(torch.nn.Linear(2, 2), packed())


class Own(torch.nn.Module):
    """A module of somebody's own around a model, which takes few arguments and may add a mask or a recurrence."""

    def __init__(self, inner: Any, adds: str) -> None:
        super().__init__()
        self.inner, self.adds = inner, adds
        self.recurrence = torch.nn.GRU(VOCABULARY, VOCABULARY, batch_first=True, dtype=inner.dtype)

    def forward(self, input_ids: Any, position_ids: Any = None, attention_mask: Any = None) -> dict[str, Any]:
        mask = torch.ones_like(input_ids) if self.adds == "mask" else attention_mask
        logits = self.inner(
            input_ids=input_ids, position_ids=position_ids, attention_mask=mask, use_cache=False
        ).logits
        return {"logits": self.recurrence(logits)[0] if self.adds == "recurrence" else logits}


@pytest.mark.parametrize(
    ("adds", "verdict"), [("nothing", "isolated"), ("mask", "leaks"), ("recurrence", "leaks")]
)
def test_a_module_of_ones_own_around_a_model_is_called_itself(adds, verdict):
    model = Own(tiny("llama", "sdpa"), adds).train()
    report = check_isolation(model, packed("rows"))

    assert report.verdict == verdict, str(report)
    assert report.model == "LlamaForCausalLM inside Own"
    assert all(module.training for module in model.modules() if module is not model.inner)


def test_inputs_of_another_width_are_refused_with_the_way_out():
    batch = packed("rows")

    def narrow(batch: Any, model: Any) -> dict[str, Any]:
        return {name: value[:, :-1] for name, value in positions_only(batch, model, use_cache=None).items()
                if value is not None}  # fmt: skip

    report = check_isolation(tiny("llama", "sdpa"), batch, inputs=narrow)
    assert report.verdict == "refuses"
    assert "inputs= must pass input_ids of the batch's shape" in report.reason


def test_a_model_without_its_head_is_judged_by_its_hidden_states():
    model = tiny("llama", "sdpa").model
    report = check_isolation(model, packed())
    leaky = check_isolation(model, packed(), inputs=hf.inputs_without_boundaries)

    assert report.verdict == "isolated"
    assert leaky.verdict == "leaks"


def test_what_is_no_batch_is_an_error():
    with pytest.raises(
        DocumentsError, match=r"takes a PackedBatch, as vl\.collate returns it, .* given dict"
    ):
        check_isolation(tiny("llama", "sdpa"), {"input_ids": torch.zeros(1, 4)})  # type: ignore[arg-type]


def test_a_report_of_a_refusal_needs_no_movements():
    report = IsolationReport(
        verdict="refuses",
        reason="why",
        model="M",
        attention="a",
        dtype="d",
        layout="l",
        documents=1,
        tokens=1,
    )
    assert not report.ok
    assert str(report) == "refuses: M, attention a, d, l\n  why"


def test_a_model_that_fails_in_its_own_forward_is_reported_with_its_error():
    model = tiny("llama", "eager")

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("expected two\n  tensors")

    model.model.layers[0].mlp.forward = failing
    report = check_isolation(model, packed())

    assert report.verdict == "refuses"
    assert report.reason == "LlamaForCausalLM fails in its own forward: RuntimeError: expected two tensors"


def test_a_model_that_embeds_more_tokens_than_it_predicts_is_checked_with_those():
    model = make(LlamaConfig(**SMALL), "eager", torch.float32)
    model.model.embed_tokens = torch.nn.Embedding(VOCABULARY + 30, 32)

    assert hf.logits_size(model) == VOCABULARY < hf.vocabulary_size(model)
    assert check_isolation(model).ok
