"""Encoders: model_inputs opens both sides of each document, and none of another; labels of tokens."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.support.encoders import (
    CELLS,
    CONFIGS,
    LENGTHS,
    alone,
    differ,
    documents,
    made,
    packed,
    padded,
)
from tests.support.hf_models import gradients
from torch.nn.functional import cross_entropy
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForTokenClassification

import varlen as vl
from varlen.adapters import hf
from varlen.adapters.hf.mixing import is_bidirectional
from varlen.errors import DocumentsError, ModelError
from varlen.verify.models.backends import attending

# PyTorch's own warning, when its compiler is imported for FlexAttention.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
FAMILIES = [family for family in CONFIGS if family not in ("modernbert, mean", "llama", "qwen3")]


def hidden_of(model: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = hf.document_outputs(model, batch).last_hidden_state
    return found


def rounding(family: str, kind: Any = AutoModel) -> float:
    """How far a family's float32 is from its float64, for a document alone: what its rounding makes."""
    worst = 0.0
    for document in documents():
        single, double = (
            alone(made(kind, family, dtype=dtype), document)[0].double()
            for dtype in (torch.float32, torch.float64)
        )
        worst = max(worst, float((single - double).abs().max()))
    return worst


@pytest.mark.parametrize(("attention", "layout"), CELLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_those_of_each_document_alone(family, attention, layout):
    model, batch = made(AutoModel, family, attention, torch.float32), packed(layout)
    with attending(model, attention):
        hidden = hidden_of(model, batch).flatten(0, 1)
        furthest = 0.0
        for document, begin, length in zip(batch.document_ids, batch.segment_begins, batch.document_lengths):
            theirs = alone(model, documents()[document]).last_hidden_state[0]
            furthest = max(furthest, float((hidden[begin : begin + length] - theirs).abs().max()))

    assert furthest <= 4 * rounding(family)
    assert is_bidirectional(model)


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "modernbert", "gemma3, both ways"])
def test_another_document_moves_nothing_and_a_later_token_does(family, attention):
    model = made(AutoModel, family, attention)
    before = hidden_of(model, packed()).flatten(0, 1)
    other = packed()
    other.input_ids[0, 0] = (other.input_ids[0, 0] + 5) % 90 + 4
    changed = hidden_of(model, other).flatten(0, 1)

    first = int(other.document_lengths[0])
    assert torch.equal(before[first:], changed[first:])
    last = packed()
    last.input_ids[0, first - 1] = (last.input_ids[0, first - 1] + 5) % 90 + 4
    assert not torch.equal(
        before[:1], hidden_of(model, last).flatten(0, 1)[:1]
    )  # the first token sees the last


def labels_of(classes: int) -> list[list[int]]:
    random = np.random.default_rng(1)
    labels = [random.integers(0, classes, length).tolist() for length in LENGTHS]
    labels[1] = [-100] * LENGTHS[1]  # a document without any
    return labels


@pytest.mark.parametrize("attention", ["eager", "sdpa", "varlen"])
@pytest.mark.parametrize(
    ("kind", "family"),
    [
        *((AutoModelForTokenClassification, family) for family in ("bert", "roberta", "modernbert", "llama")),
        *((AutoModelForMaskedLM, family) for family in ("bert", "xlm-roberta", "distilbert", "modernbert")),
    ],
)
def test_losses_of_tokens_are_those_of_padded_documents_with_their_gradients(kind, family, attention):
    model = made(kind, family, num_labels=5)
    classes = 5 if kind is AutoModelForTokenClassification else 97
    rows = padded()
    wanted = torch.full(rows["input_ids"].shape, -100)
    wanted[rows["attention_mask"].bool()] = torch.tensor(np.concatenate(labels_of(classes)))
    theirs = model(**rows, labels=wanted).loss
    exact = gradients(model, theirs)

    model.set_attn_implementation(attention)
    inputs = hf.model_inputs(packed(token_labels=labels_of(classes)), model)
    ours = model(**inputs).loss

    assert inputs["labels"].dtype == torch.int64
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert differ(gradients(model, ours), exact) < 1e-6


def test_the_first_token_counts_and_next_tokens_are_no_labels_here():
    model = made(AutoModelForTokenClassification, "bert", num_labels=5)
    batch = packed(token_labels=[[4] + [-100] * (length - 1) for length in LENGTHS])

    outputs = model(**hf.model_inputs(batch, model))
    first = outputs.logits.flatten(0, 1)[batch.segment_begins]
    assert outputs.loss.item() == pytest.approx(
        cross_entropy(first, torch.full((len(first),), 4)).item(), rel=1e-6
    )
    assert "labels" not in hf.model_inputs(packed(), model)
    assert "labels" not in hf.model_inputs(packed(), made(transformers.AutoModelForCausalLM, "bert"))


@pytest.mark.parametrize(("wrong", "seen"), [(5, 5), (-1, -1), (96, 96)])
def test_a_token_label_out_of_range_is_refused_in_a_sentence(wrong, seen):
    labels = [[0] * length for length in LENGTHS]
    labels[2][1] = wrong
    model = made(AutoModelForTokenClassification, "bert", num_labels=5)

    with pytest.raises(
        DocumentsError, match=rf"token_labels hold class {seen} \(1 of the batch.*classes 0 to 4.*num_labels"
    ):
        hf.model_inputs(packed(token_labels=labels), model)


def test_pairs_of_sentences_have_their_token_types():
    model = made(AutoModel, "bert", type_vocab_size=2)
    types = [[0] * (length // 2) + [1] * (length - length // 2) for length in LENGTHS]
    batch = packed(columns={"token_type_ids": types})

    hidden = hidden_of(model, batch).flatten(0, 1)
    for document, begin, length in zip(batch.document_ids, batch.segment_begins, batch.document_lengths):
        theirs = alone(model, documents()[document], token_type_ids=torch.tensor([types[document]]))
        assert torch.allclose(hidden[begin : begin + length], theirs.last_hidden_state[0], rtol=0, atol=1e-6)


REFUSED = {
    "deberta-v2": "attends in both directions",
    "mpnet": "attends in both directions",
    "longformer": "attends in both directions",
}


@pytest.mark.parametrize("family", REFUSED)
def test_encoders_with_masks_of_their_own_are_refused_with_the_way_out(family):
    from varlen.verify.models.loading import tiny_config

    config = tiny_config(family)
    config.is_decoder = False
    model = AutoModelForMaskedLM.from_config(config)

    with pytest.raises(ModelError, match=rf"{REFUSED[family]}.*(padded).*vl\.PaddedSampler"):
        hf.model_inputs(packed(), model)


@pytest.mark.parametrize("family", ["bert", "modernbert", "xlm-roberta", "distilbert"])
def test_verify_finds_encoders_isolated_and_plain_calls_leaking(family):
    report = vl.verify(made(AutoModelForMaskedLM, family, "eager", torch.float32), layouts=["rows"])

    assert report.verdict == "isolated", str(report)
    assert {cell.backend for cell in report.cells if cell.verdict == "isolated"} >= {
        "eager",
        "sdpa",
        "varlen",
    }
    plain = [
        cell
        for cell in report.calls
        if cell.call == "position_ids, use_cache=False" and cell.backend == "sdpa"
    ]
    assert [cell.verdict for cell in plain] == ["leaks"]


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        (transformers.AutoModelForSequenceClassification, "bert"),
        (transformers.AutoModelForSequenceClassification, "llama"),
        (AutoModelForTokenClassification, "roberta"),
        (AutoModel, "bert"),
        (AutoModel, "qwen3, both ways"),
    ],
)
def test_verify_looks_beneath_heads_and_poolers(kind, family):
    report = vl.verify(
        made(kind, family, "eager", torch.float32), backends=["sdpa", "varlen"], layouts=["rows"], calls=False
    )

    assert report.verdict == "isolated", str(report)
    pools = kind is transformers.AutoModelForSequenceClassification
    assert any("document_outputs" in note for note in report.notes) is pools


def test_verify_names_a_family_of_encoders():
    report = vl.verify("modernbert", backends=["sdpa"], layouts=["rows"], calls=False, gradients=False)

    assert (report.model, report.verdict) == ("ModernBertForMaskedLM", "isolated")


def test_check_batch_knows_that_encoders_read_no_positions():
    collate = hf.DataCollatorWithFlattening()
    batch = collate([{"input_ids": document} for document in documents()])
    encoder, decoder = made(AutoModelForMaskedLM, "bert"), made(transformers.AutoModelForCausalLM, "llama")

    assert any(found.kind == "model_family" for found in vl.check_batch(batch, encoder).errors)
    assert not any(found.kind == "model_family" for found in vl.check_batch(batch, decoder).errors)
    assert vl.check_batch(packed(), encoder).ok


def test_check_batch_takes_the_label_of_a_first_token_where_labels_are_of_tokens():
    model = made(AutoModelForTokenClassification, "bert", num_labels=5)
    batch = hf.model_inputs(packed(token_labels=[[1] * length for length in LENGTHS]), model)

    assert vl.check_batch(batch, model).ok
    assert not vl.check_batch({**batch, "labels": batch["labels"]}).ok  # as next tokens they cross boundaries
