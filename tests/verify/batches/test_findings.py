"""check_batch's findings one by one: each is made by a broken batch, says where, and goes with its own fix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.hf_models import LAYOUTS, PAIRS, VOCABULARY, packed, tiny
from tests.verify.batches.faults import FAULTS, FLASH_LESS, good, row
from transformers import BatchEncoding, DataCollatorWithFlattening, GPT2Config
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import varlen as vl
from varlen.adapters import hf
from varlen.errors import DocumentsError, ModelError


@pytest.mark.parametrize(
    ("name", "changes", "head", "words", "place"), FAULTS, ids=[case[0] for case in FAULTS]
)
def test_a_fault_is_found_with_its_place(
    name: str, changes: dict[str, Any], head: str, words: str, place: tuple[int | None, int | None]
) -> None:
    assert vl.check_batch(good()).findings == ()
    report = vl.check_batch(good(**changes))

    level, kind = head.split()
    found = [finding for finding in report if finding.kind == kind and words in finding.what]
    assert len(found) == 1, str(report)
    assert found[0].level == level
    assert (found[0].row, found[0].column) == place
    assert report.ok is not bool(report.errors)
    assert str(found[0]) in str(report)


@pytest.mark.parametrize("name", ["no positions", "positions that run on"])
def test_only_the_named_fault_is_found(name: str) -> None:
    changes = {case[0]: case[1] for case in FAULTS}[name]

    assert len(vl.check_batch(good(**changes)).errors) == (1 if name == "no positions" else 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "attention"), PAIRS)
def test_nothing_is_found_in_what_model_inputs_returns(family: str, attention: str, layout: Any) -> None:
    model, batch = tiny(family, attention), packed(layout)

    assert vl.check_batch(hf.model_inputs(batch, model), model).findings == ()
    assert vl.check_batch(batch, model).findings == ()
    assert vl.check_batch(batch.to_torch(), model).findings == ()
    assert vl.check_batch(batch).findings == ()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_found_in_slots_that_are_rounded_up_and_shifted_labels(layout: Any) -> None:
    batch = packed(layout, lengths=(5, 3, 9, 8, 2), shift_labels=True)
    packing = vl.pack([5, 3, 9, 8, 2], capacity=32, document_multiple_of=8)
    documents = [np.arange(1, length + 1) for length in (5, 3, 9, 8, 2)]
    rounded = vl.collate(documents, packing, layout=layout, shift_labels=True)

    for one in (batch, rounded):
        for attention in ("sdpa", "varlen"):
            model = tiny("llama", attention)
            assert vl.check_batch(one, model).findings == ()
            assert vl.check_batch(hf.model_inputs(one, model), model).findings == ()


def test_nothing_is_found_in_what_flash_attention_is_given() -> None:
    model = tiny("llama", "eager")
    model.config._attn_implementation_internal = "flash_attention_2"

    for layout in LAYOUTS:
        assert vl.check_batch(hf.model_inputs(packed(layout), model), model).findings == ()


def features(*lengths: int) -> list[dict[str, list[int]]]:
    return [
        {"input_ids": list(range(1, length + 1)), "labels": list(range(1, length + 1))} for length in lengths
    ]


@pytest.mark.parametrize("form", ["pt", "np"])
@pytest.mark.parametrize("more", [{}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}])
def test_nothing_is_found_in_what_transformers_collator_returns(form: str, more: dict[str, bool]) -> None:
    batch = DataCollatorWithFlattening(return_tensors=form, **more)(features(5, 1, 7, 2))
    model = tiny("llama", "sdpa")
    model.config.use_cache = False

    assert vl.check_batch(batch).findings == ()
    assert vl.check_batch(batch, model).findings == ()


def test_the_defect_of_transformers_collator_with_empty_documents_is_found() -> None:
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    report = vl.check_batch(collator(features(2, 0, 3)))

    assert report.kinds == ("shapes", "empty_documents")
    assert "1 token more" in report.findings[0].what


@pytest.mark.parametrize("multiple", [None, 8])
def test_nothing_is_found_in_what_trls_collator_returns(multiple: int | None) -> None:
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=multiple)
    padded = DataCollatorForLanguageModeling(pad_token_id=0, pad_to_multiple_of=multiple)
    model = tiny("llama", "sdpa")
    model.config.use_cache = False

    for batch in (collator(features(5, 1, 7)), padded(features(5, 1, 7))):
        assert vl.check_batch(batch).findings == ()
        assert vl.check_batch(batch, model).findings == ()


def test_the_defects_of_trls_collator_are_found() -> None:
    empty = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(features(2, 0, 3))
    rows = [
        {"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [2, 3]},
        {"input_ids": [1, 2, 3, 4], "seq_lengths": [4]},
    ]
    forgotten = DataCollatorForLanguageModeling(pad_token_id=0, return_position_ids=True)(rows)

    assert "float_ids" in vl.check_batch(empty).kinds
    assert vl.check_batch(forgotten).kinds == ("attention_mask", "crossing_targets")


def test_nothing_is_found_in_one_document_a_row() -> None:
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    labels = ids.masked_fill(mask == 0, -100)
    running = torch.arange(4).expand(2, 4)
    counted = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    zeros = {
        "input_ids": ids,
        "labels": labels,
        "position_ids": running * mask,
        "attention_mask": mask * 0 + 1,
    }
    left = {"input_ids": ids.flip(1), "attention_mask": mask.flip(1), "labels": labels.flip(1)}
    left_positions = (left["attention_mask"].cumsum(-1) - 1).masked_fill(left["attention_mask"] == 0, 1)
    plain = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    batches = [plain, plain | {"position_ids": running}, plain | {"position_ids": counted}, left]
    batches += [
        zeros,
        left | {"position_ids": left_positions},
        plain | {"use_cache": True},
        {"input_ids": ids},
    ]
    batches += [{"input_ids": ids.tolist()}, BatchEncoding(plain), {"input_ids": ids.numpy(), "labels": None}]

    for attention in ("eager", "sdpa"):
        for batch in batches:
            assert vl.check_batch(batch, tiny("llama", attention)).findings == ()
            assert vl.check_batch(batch).findings == ()


def test_the_models_limits_are_found() -> None:
    model = tiny("llama", "sdpa")
    far = good(position_ids=row(*range(60, 69)), input_ids=row(*range(90, 99)), **FLASH_LESS)

    report = vl.check_batch(far, model)
    assert set(report.kinds) == {"token_ids", "positions_range"}
    assert "2 token ids" in report.findings[0].what
    assert f"embeds ids 0 to {VOCABULARY - 1}" in report.findings[0].what
    assert (report.findings[1].level, report.findings[1].count) == ("warning", 5)
    learned = vl.check_batch(far, tiny("gpt2", "sdpa"))
    assert {finding.kind: finding.level for finding in learned}["positions_range"] == "error"
    labelled = vl.check_batch(
        good(labels=row(-100, 6, 97, -100, 9, 10, 11, -100, 13)), tiny("llama", "varlen")
    )
    assert labelled.kinds == ("label_ids",)


def test_rows_longer_than_the_model_are_found_where_positions_count_from_the_rows_start() -> None:
    batch = {"input_ids": torch.ones(1, 65, dtype=torch.long)}

    assert vl.check_batch(batch, tiny("gpt2", "sdpa")).kinds == ("positions_range",)
    with pytest.raises(IndexError):
        tiny("gpt2", "sdpa")(**batch)


def test_a_packed_batch_that_model_inputs_would_refuse_has_an_error() -> None:
    model, batch = tiny("llama", "sdpa"), packed()
    model.config.max_position_embeddings = 16

    report = vl.check_batch(batch, model)
    assert report.kinds == ("positions_range",)
    assert not report.ok
    with pytest.raises(ModelError):
        hf.model_inputs(batch, model)


@pytest.mark.parametrize("attention", ["eager", "varlen"])
def test_a_shift_of_learned_positions_is_an_error_and_of_rotary_ones_a_warning(attention: str) -> None:
    def shifted(family: str) -> tuple[bool, str]:
        model = tiny(family, attention)
        arguments = hf.model_inputs(packed("flat", lengths=(4, 5)), model)
        apart = model(**arguments).logits
        del arguments["position_ids"]
        together = model(**arguments).logits
        report = vl.check_batch(arguments, model)
        assert report.kinds in ((), ("positions_missing",))
        return torch.allclose(apart, together, atol=1e-5), "".join(f.level for f in report)

    # A finished mask tells nobody where documents begin, so nothing can be said there.
    expected = {"varlen": ("warning", "error"), "eager": ("", "")}[attention]
    assert shifted("llama") == (True, expected[0])
    assert shifted("gpt2") == (False, expected[1])


def test_a_broken_packed_batch_is_found_out() -> None:
    batch = packed()
    labels, positions = batch.labels.copy(), batch.position_ids.copy()
    labels[0, 17], positions[1, 3] = 5, 7
    ends = batch.cu_seqlens.copy()
    ends[1] += 1

    assert vl.check_batch(batch.replace(labels=labels)).kinds == ("crossing_targets",)
    assert "boundaries_disagree" in vl.check_batch(batch.replace(cu_seqlens=ends)).kinds
    assert not vl.check_batch(batch.replace(position_ids=positions)).ok


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({}, 'has no "input_ids" (it has nothing)'),
        ({"labels": [1]}, "(it has labels)"),
        ({"input_ids": [[1, 2], [3]]}, "input_ids is no rectangle of numbers"),
        ({"input_ids": [["a"]]}, "input_ids is no rectangle of numbers"),
        ({"input_ids": [1, 2]}, "must be [rows, width], and has the shape [2]"),
        ({"input_ids": [[[1]]]}, "must be [rows, width]"),
        ({"input_ids": [[1]], "max_length_q": [1, 2]}, "max_length_q must be one number"),
        ([1, 2], "takes a PackedBatch or a mapping"),
    ],
)
def test_what_cannot_be_read_is_an_error_in_one_sentence(batch: Any, words: str) -> None:
    with pytest.raises(DocumentsError) as caught:
        vl.check_batch(batch)

    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_attention_that_varlen_does_not_know_is_an_error_for_our_batches_and_a_doubt_for_others() -> None:
    model = tiny("llama", "sdpa")
    model.config._attn_implementation_internal = "paged|sdpa"

    report = vl.check_batch(packed(), model)
    assert [(finding.kind, finding.level) for finding in report] == [("model_family", "error")]
    with pytest.raises(ModelError, match="varlen knows"):
        hf.model_inputs(packed(), model)
    other = vl.check_batch(good(attention_mask=row(*[1] * 8, 0), **FLASH_LESS), model)
    assert {finding.level for finding in other if finding.kind == "attention_mask"} == {"warning"}


def test_the_line_that_turns_a_cache_off_is_for_who_turned_it_on() -> None:
    model = tiny("llama", "sdpa")
    model.config.use_cache = True

    assert "model.config.use_cache = False" in vl.check_batch(good(use_cache=None), model).findings[0].fix
    assert 'batch["use_cache"] = False' in vl.check_batch(good(use_cache=True), model).findings[0].fix


def test_what_is_no_model_is_an_error() -> None:
    with pytest.raises(ModelError, match="no transformers config"):
        vl.check_batch(good(), torch.nn.Linear(2, 2))


@pytest.mark.parametrize("shape", [(0, 0), (1, 0), (0, 5)])
def test_an_empty_batch_has_no_findings(shape: tuple[int, int]) -> None:
    assert vl.check_batch({"input_ids": torch.zeros(shape, dtype=torch.long)}).findings == ()
    assert vl.check_batch(vl.collate([], vl.pack([], capacity=8))).findings == ()


def test_arrays_tensors_and_lists_give_the_same_report() -> None:
    broken = good(
        labels=row(5, 6, 7, 8, 9, 10, 11, -100, 13), **FLASH_LESS, attention_mask=torch.ones(1, 9).long()
    )
    arrays = {name: value.numpy() if torch.is_tensor(value) else value for name, value in broken.items()}
    lists = {name: value.tolist() if torch.is_tensor(value) else value for name, value in broken.items()}

    assert vl.check_batch(broken) == vl.check_batch(arrays) == vl.check_batch(lists)
    assert len(vl.check_batch(broken)) == 2


def test_the_report_reads_well_in_a_terminal() -> None:
    model = tiny("llama", "sdpa")
    text = str(vl.check_batch(good(attention_mask=torch.ones(1, 9).long()), model))

    assert text.splitlines() == [
        "1 error, 0 warnings found in 1 row of 9 tokens, 3 documents; LlamaForCausalLM, attention sdpa",
        "error attention_mask: attention_mask is all ones; under such a mask no boundaries are looked for "
        "(sdpa), so 2 documents see tokens of others",
        "  where: the document that begins at row 0, column 3, and 1 more",
        '  fix:   del batch["attention_mask"]',
    ]
    assert str(vl.check_batch(good())) == "nothing found in 1 row of 9 tokens, 3 documents"


def test_the_batch_is_left_as_it_was() -> None:
    batch = good(labels=row(5, 6, 7, 8, 9, 10, 11, -100, 13), attention_mask=torch.ones(1, 9).long())
    before = {name: value.clone() if torch.is_tensor(value) else value for name, value in batch.items()}
    vl.check_batch(batch, tiny("llama", "sdpa"))

    assert batch.keys() == before.keys()
    assert all(
        torch.equal(value, before[name]) if torch.is_tensor(value) else value == before[name]
        for name, value in batch.items()
    )


def test_a_gpt2_of_few_positions_takes_wide_rows_of_short_documents() -> None:
    model = tiny("gpt2", "sdpa")
    assert isinstance(model.config, GPT2Config)
    batch = packed("flat", lengths=(20,) * 5)

    assert batch.input_ids.shape[1] > model.config.n_positions
    assert vl.check_batch(hf.model_inputs(batch, model), model).findings == ()
