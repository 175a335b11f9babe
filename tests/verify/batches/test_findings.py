"""check_batch's findings: each on a broken batch under any names, none on a right one, and no crash."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from tests.support.hf_models import LAYOUTS, PAIRS, VOCABULARY, packed, tiny
from tests.verify.batches.faults import FAULTS, FLASH_LESS, good, row
from transformers import BatchEncoding, BertConfig, BertForMaskedLM, DataCollatorWithFlattening, GPT2Config
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import varlen as vl
from varlen.adapters import hf
from varlen.errors import DocumentsError, ModelError, SettingError
from varlen.verify.batches.finding import BatchReport
from varlen.verify.batches.reading import _host_tensors, _in_one_transfer


@pytest.mark.parametrize(("changes", "head", "words", "place"), FAULTS)
def test_a_fault_is_found_with_its_place(changes, head, words, place):
    assert vl.check_batch(good()).findings == ()
    report = vl.check_batch(good(**changes))

    level, kind = head.split()
    found = [finding for finding in report if finding.kind == kind and words in finding.what]
    assert len(found) == 1, str(report)
    assert found[0].level == level
    assert (found[0].row, found[0].column) == place
    assert report.ok is not bool(report.errors)
    assert str(found[0]) in str(report)


@pytest.mark.parametrize(
    ("head", "errors"), [("error positions_missing", 1), ("warning positions_run_on", 0)]
)
def test_only_the_named_fault_is_found(head, errors):
    changes = {case[1]: case[0] for case in FAULTS}[head]

    assert len(vl.check_batch(good(**changes)).errors) == errors


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "attention"), PAIRS)
def test_nothing_is_found_in_what_model_inputs_returns(family, attention, layout):
    model, batch = tiny(family, attention), packed(layout)

    assert vl.check_batch(hf.model_inputs(batch, model), model).findings == ()
    assert vl.check_batch(batch, model).findings == ()
    assert vl.check_batch(batch.to_torch(), model).findings == ()
    assert vl.check_batch(batch).findings == ()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_found_in_slots_that_are_rounded_up_and_shifted_labels(layout):
    batch = packed(layout, lengths=(5, 3, 9, 8, 2), shift_labels=True)
    packing = vl.pack([5, 3, 9, 8, 2], capacity=32, document_multiple_of=8)
    documents = [np.arange(1, length + 1) for length in (5, 3, 9, 8, 2)]
    rounded = vl.collate(documents, packing, layout=layout, shift_labels=True)

    for one in (batch, rounded):
        for attention in ("sdpa", "varlen"):
            model = tiny("llama", attention)
            assert vl.check_batch(one, model).findings == ()
            assert vl.check_batch(hf.model_inputs(one, model), model).findings == ()


def test_nothing_is_found_in_what_flash_attention_is_given():
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
def test_nothing_is_found_in_what_transformers_collator_returns(form, more):
    batch = DataCollatorWithFlattening(return_tensors=form, **more)(features(5, 1, 7, 2))
    model = tiny("llama", "sdpa")
    model.config.use_cache = False

    assert vl.check_batch(batch).findings == ()
    assert vl.check_batch(batch, model).findings == ()


def test_the_defect_of_transformers_collator_with_empty_documents_is_found():
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    made = collator(features(2, 0, 3))
    cu = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    broken = made | {"labels": torch.tensor([[-100, 2, -100, -100, 2, 3]])}
    broken |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "seq_idx": torch.tensor([[0, 0, 2, 2, 2]])}
    report = vl.check_batch(broken)

    assert report.kinds == ("shapes", "empty_documents")
    assert "1 token more" in report.findings[0].what
    if Version(transformers.__version__) < Version("5.24"):
        assert list(made) == list(broken)
        assert all(np.array_equal(value, broken[name]) for name, value in made.items())
    else:
        assert vl.check_batch(made).findings == ()


@pytest.mark.parametrize("multiple", [None, 8])
def test_nothing_is_found_in_what_trls_collator_returns(multiple):
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=multiple)
    padded = DataCollatorForLanguageModeling(pad_token_id=0, pad_to_multiple_of=multiple)
    model = tiny("llama", "sdpa")
    model.config.use_cache = False

    for batch in (collator(features(5, 1, 7)), padded(features(5, 1, 7))):
        assert vl.check_batch(batch).findings == ()
        assert vl.check_batch(batch, model).findings == ()


def test_the_defects_of_trls_collator_are_found():
    empty = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(features(2, 0, 3))
    rows = [
        {"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [2, 3]},
        {"input_ids": [1, 2, 3, 4], "seq_lengths": [4]},
    ]
    forgotten = DataCollatorForLanguageModeling(pad_token_id=0, return_position_ids=True)(rows)

    assert "float_ids" in vl.check_batch(empty).kinds
    assert vl.check_batch(forgotten).kinds == ("attention_mask", "crossing_targets")


def test_nothing_is_found_in_one_document_a_row():
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


def test_the_models_limits_are_found():
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


def test_rows_longer_than_the_model_are_found_where_positions_count_from_the_rows_start():
    batch = {"input_ids": torch.ones(1, 65, dtype=torch.long)}

    assert vl.check_batch(batch, tiny("gpt2", "sdpa")).kinds == ("positions_range",)
    with pytest.raises(IndexError):
        tiny("gpt2", "sdpa")(**batch)


def test_a_packed_batch_that_model_inputs_would_refuse_has_an_error():
    model, batch = tiny("llama", "sdpa"), packed()
    model.config.max_position_embeddings = 16

    report = vl.check_batch(batch, model)
    assert report.kinds == ("positions_range",)
    assert not report.ok
    with pytest.raises(ModelError):
        hf.model_inputs(batch, model)


@pytest.mark.parametrize("attention", ["eager", "varlen"])
def test_a_shift_of_learned_positions_is_an_error_and_of_rotary_ones_a_warning(attention):
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


def test_a_broken_packed_batch_is_found_out():
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
def test_what_cannot_be_read_is_an_error_in_one_sentence(batch, words):
    with pytest.raises(DocumentsError) as caught:
        vl.check_batch(batch)

    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_attention_that_varlen_does_not_know_is_an_error_for_our_batches_and_a_doubt_for_others():
    model = tiny("llama", "sdpa")
    model.config._attn_implementation_internal = "paged|sdpa"

    report = vl.check_batch(packed(), model)
    assert [(finding.kind, finding.level) for finding in report] == [("model_family", "error")]
    with pytest.raises(ModelError, match="varlen knows"):
        hf.model_inputs(packed(), model)
    other = vl.check_batch(good(attention_mask=row(*[1] * 8, 0), **FLASH_LESS), model)
    assert {finding.level for finding in other if finding.kind == "attention_mask"} == {"warning"}


def test_the_line_that_turns_a_cache_off_is_for_who_turned_it_on():
    model = tiny("llama", "sdpa")
    model.config.use_cache = True

    assert "model.config.use_cache = False" in vl.check_batch(good(use_cache=None), model).findings[0].fix
    assert 'batch["use_cache"] = False' in vl.check_batch(good(use_cache=True), model).findings[0].fix


def test_what_is_no_model_is_an_error():
    with pytest.raises(ModelError, match="no transformers config"):
        vl.check_batch(good(), torch.nn.Linear(2, 2))


@pytest.mark.parametrize("shape", [(0, 0), (1, 0), (0, 5)])
def test_an_empty_batch_has_no_findings(shape):
    assert vl.check_batch({"input_ids": torch.zeros(shape, dtype=torch.long)}).findings == ()
    assert vl.check_batch(vl.collate([], vl.pack([], capacity=8))).findings == ()


def test_arrays_tensors_and_lists_give_the_same_report():
    broken = good(
        labels=row(5, 6, 7, 8, 9, 10, 11, -100, 13), **FLASH_LESS, attention_mask=torch.ones(1, 9).long()
    )
    arrays = {name: value.numpy() if torch.is_tensor(value) else value for name, value in broken.items()}
    lists = {name: value.tolist() if torch.is_tensor(value) else value for name, value in broken.items()}

    assert vl.check_batch(broken) == vl.check_batch(arrays) == vl.check_batch(lists)
    assert len(vl.check_batch(broken)) == 2


def test_the_report_reads_well_in_a_terminal():
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
    plain = vl.check_batch({"input_ids": torch.ones(2, 9).long()})
    assert plain.is_assumed
    assert str(plain) == (
        "nothing found in 2 rows of 9 tokens, 2 documents (each row taken for one; pass "
        "lengths= if rows hold several)"
    )


def test_the_batch_is_left_as_it_was():
    batch = good(labels=row(5, 6, 7, 8, 9, 10, 11, -100, 13), attention_mask=torch.ones(1, 9).long())
    before = {name: value.clone() if torch.is_tensor(value) else value for name, value in batch.items()}
    vl.check_batch(batch, tiny("llama", "sdpa"))

    assert batch.keys() == before.keys()
    assert all(
        torch.equal(value, before[name]) if torch.is_tensor(value) else value == before[name]
        for name, value in batch.items()
    )


def test_a_gpt2_of_few_positions_takes_wide_rows_of_short_documents():
    model = tiny("gpt2", "sdpa")
    assert isinstance(model.config, GPT2Config)
    batch = packed("flat", lengths=(20,) * 5)

    assert batch.input_ids.shape[1] > model.config.n_positions
    assert vl.check_batch(hf.model_inputs(batch, model), model).findings == ()


IDS = [[5, 6, 7, 8, 9, 10, 11, 12, 13]]
LABELS = [[-100, 6, 7, -100, 9, 10, 11, -100, 13]]
NUMBERS = [[0, 0, 0, 1, 1, 1, 1, 2, 2]]
UNREAD = [
    {"cu_seqlens": [0, 3, 7, 9]},
    {"cu_seqlens_q": np.array([0, 3, 7, 9], np.int32)},
    {"cu_seq_lens": torch.tensor([0, 3, 7, 9])},
    {"seq_lengths": [[3, 4, 2]]},
    {"seq_lens": [3, 4, 2]},
    {"segment_ids": NUMBERS},
    {"sequence_ids": NUMBERS},
    {"document_ids": torch.tensor(NUMBERS)},
    {"doc_ids": NUMBERS},
]


def model(attention: str = "sdpa") -> Any:
    found = tiny("llama", attention, torch.float32)
    found.config.use_cache = False
    return found


@pytest.mark.parametrize("unread", UNREAD, ids=lambda unread: next(iter(unread)))
def test_boundaries_under_a_name_that_no_model_reads_are_found(unread):
    for other in (None, model()):
        report = vl.check_batch({"input_ids": IDS, "labels": LABELS} | unread, other)
        first = report.errors[0]

        assert first.kind == "positions_missing"
        assert (
            f"(models don't look at {next(iter(unread))}), so 2 documents see tokens of others" in first.what
        )
        assert (first.row, first.column) == (0, 3)
        assert report.documents == 3


@pytest.mark.parametrize("unread", UNREAD, ids=lambda unread: next(iter(unread)))
def test_beside_arguments_that_are_read_they_do_no_harm(unread):
    assert not len(vl.check_batch(good() | unread, model()))
    told = vl.check_batch(
        {"input_ids": IDS, "labels": LABELS, "position_ids": [list(range(9))]} | unread, model()
    )
    assert told.kinds[0] == "positions_run_on"


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_our_own_batch_as_a_mapping_has_no_finding(layout):
    assert not len(vl.check_batch(dict(vars(packed(layout))), model()))


@pytest.mark.parametrize(
    "other",
    [
        {"cu_seqlens": [0, 3]},
        {"cu_seqlens": "abc"},
        {"seq_lens": [[3], [4, 2]]},
        {"segment_ids": [[0, 1]]},
        {"document_ids": [4, 5, 6]},
        {"seq_lens": [-1, 10]},
    ],
)
def test_what_can_not_be_boundaries_is_passed_over(other):
    assert not len(vl.check_batch({"input_ids": IDS, "labels": LABELS} | other, model()))


@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (3, 1, 9, 9), (1, 1, 9, 8)])
def test_a_finished_mask_of_another_shape_is_found(shape):
    batch = good(attention_mask=torch.ones(shape, dtype=torch.bool), cu_seq_lens_q=None)
    report = vl.check_batch(batch, model())

    assert "shapes" in [finding.kind for finding in report.errors]
    assert f"attention_mask has the shape {list(shape)}, and must be [1, 'heads or 1', 9, 9]" in str(report)


def test_a_mask_that_is_missing_for_a_kind_of_layers_is_found():
    gemma = tiny("gemma2", "eager", torch.float32)
    segments = torch.tensor(NUMBERS)
    mask = (segments[:, :, None] == segments[:, None, :])[:, None] & torch.ones(9, 9, dtype=torch.bool).tril()
    closed = torch.zeros(mask.shape).masked_fill(~mask, -1e9)
    batch = {"input_ids": IDS, "labels": LABELS, "position_ids": good()["position_ids"]}
    whole = batch | {"attention_mask": {"full_attention": closed, "sliding_attention": closed, "conv": None}}
    half = batch | {"attention_mask": {"full_attention": closed, "sliding_attention": None}}

    assert not len(vl.check_batch(whole, gemma))
    report = vl.check_batch(half, gemma)
    assert report.kinds == ("open_mask",)
    assert "holds no mask for layers of kind sliding_attention" in report.findings[0].what


def test_tensors_without_numbers_are_refused_in_a_sentence():
    with pytest.raises(DocumentsError, match="input_ids, labels: tensors on the meta device hold no numbers"):
        vl.check_batch(
            {name: torch.tensor(v).to("meta") for name, v in (("input_ids", IDS), ("labels", LABELS))}
        )


def test_padding_with_positions_of_its_own_is_no_document():
    """axolotl's collators let the positions of padding count from 0."""
    batch = {
        "input_ids": [[5, 6, 7, 8, 9, 0, 0, 0, 0]],
        "labels": [[-100, 6, 7, -100, 9, -100, -100, -100, -100]],
        "position_ids": [[0, 1, 2, 0, 1, 0, 1, 2, 3]],
    }
    report = vl.check_batch(batch, model())
    assert not len(report)
    assert report.documents == 2

    batch["input_ids"][0][-1] = 4
    assert vl.check_batch(batch, model()).kinds == ("documents_without_targets",)


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=8).filter(lambda lengths: max(lengths) > 1)


def flattened(lengths: list[int]) -> dict[str, Any]:
    features = [{"input_ids": list(range(1, length + 1))} for length in lengths]
    batch: dict[str, Any] = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(features)
    return batch


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.sampled_from(["rows", "flat"]), st.sampled_from([1, 4]), st.booleans())
def test_packed_batches_have_no_finding_and_their_documents_are_counted(lengths, layout, multiple, shifted):
    packing = vl.pack(lengths, capacity=12, document_multiple_of=multiple)
    documents = [np.arange(1, length + 1) for length in lengths]
    report = vl.check_batch(vl.collate(documents, packing, layout=layout, shift_labels=shifted))

    assert report.findings == ()
    assert report.documents == len(lengths)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.data())
def test_a_label_at_any_later_documents_start_is_found_there(lengths, data):
    batch = flattened(lengths)
    starts = np.cumsum([0, *lengths[:-1]])
    chosen = data.draw(st.sets(st.sampled_from(range(len(lengths)))))
    batch["labels"][0, starts[sorted(chosen)]] = 5

    crossing = [finding for finding in vl.check_batch(batch) if finding.kind == "crossing_targets"]
    wrong = sorted(int(starts[i]) for i in chosen if i > 0)
    assert [(finding.count, finding.column) for finding in crossing] == (
        [(len(wrong), wrong[0])] if wrong else []
    )


@settings(max_examples=100, deadline=None)
@given(LENGTHS.filter(lambda lengths: len(lengths) > 1), st.data())
def test_a_boundary_left_out_of_one_argument_is_found(lengths, data):
    batch = flattened(lengths)
    later = [i for i in range(1, len(lengths)) if lengths[i] > 1]  # one token alone may be padding
    if not later:
        return
    left_out = data.draw(st.sampled_from(later))
    name = data.draw(st.sampled_from(["cu_seq_lens", "seq_idx"]))
    if name == "seq_idx":
        batch["seq_idx"][batch["seq_idx"] >= left_out] -= 1
    else:
        kept = [i for i in range(len(lengths) + 1) if i != left_out]
        ends = torch.as_tensor(np.cumsum([0, *lengths])[kept], dtype=torch.int32)
        batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        batch |= dict.fromkeys(("max_length_q", "max_length_k"), int(ends.diff().max()))

    found = [finding for finding in vl.check_batch(batch) if finding.kind == "boundaries_disagree"]
    assert [(finding.count, finding.column) for finding in found] == [(1, sum(lengths[:left_out]))]


ANY_NUMBER = st.integers(-101, 120)
SHAPES = st.sampled_from(
    [(1, 9), (3, 3), (9,), (1, 8), (0, 9), (1, 1, 9), (4, 1, 9), (3, 1, 9), (1, 1, 9, 9), (4,), ()]
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_numbers_in_any_shape_give_a_report(data):
    batch = good()
    for name in data.draw(st.sets(st.sampled_from(sorted({*batch, "attention_mask", "shift_labels"})))):
        if name.startswith("max_length"):
            batch[name] = data.draw(ANY_NUMBER)
        elif name != "use_cache" and (name != "input_ids"):
            shape = data.draw(SHAPES)
            numbers = data.draw(st.lists(ANY_NUMBER, min_size=1, max_size=12))
            batch[name] = torch.as_tensor(np.resize(numbers, shape))
    for name in data.draw(st.sets(st.sampled_from(sorted(set(batch) - {"input_ids"})))):
        del batch[name]

    report = vl.check_batch(batch)
    assert isinstance(report, BatchReport)
    assert len(str(report).splitlines()) == 1 + 3 * len(report)


def test_tensors_copied_in_one_transfer_are_those_copied_one_by_one():
    tensors = {
        "a": torch.tensor([[1, -2], [3, 4]], dtype=torch.int32),
        "b": torch.tensor(7),
        "c": torch.ones(2, 0),
        "d": torch.tensor([True, False]),
        "e": torch.tensor([1.0, 0.0], dtype=torch.bfloat16),
    }
    together, apart = _in_one_transfer(tensors), _host_tensors(tensors)

    assert list(together) == list(apart)
    assert all(np.array_equal(together[name], apart[name]) for name in tensors)
    assert all(together[name].shape == apart[name].shape for name in tensors)


# Lengths that the caller gives, and arguments that tell different documents.

OFF_BY_ONE = torch.tensor([0, 4, 8, 9], dtype=torch.int32)


def clashing() -> dict[str, Any]:
    """Return a batch whose positions are right and whose cu_seqlens are off by one within the row."""
    ends = {"cu_seq_lens_q": OFF_BY_ONE, "cu_seq_lens_k": OFF_BY_ONE}
    return good(seq_idx=None, **ends)


@pytest.mark.parametrize(
    ("attention", "read"), [(None, ""), ("sdpa", "position_ids"), ("varlen", "cu_seq_lens_q")]
)
def test_positions_and_boundaries_that_differ_are_one_error_with_both_places(attention, read):
    report = vl.check_batch(clashing(), None if attention is None else model(attention))

    assert [(found.kind, found.level, found.row, found.column) for found in report] == [
        ("boundaries_disagree", "error", 0, 3)
    ]
    assert "position_ids alone, first at row 0, column 3; 2 documents by cu_seq_lens_q alone" in str(report)
    assert "cu_seq_lens_q alone, first at row 0, column 4" in report.findings[0].what
    assert f"; attention {attention} reads {read}" in report.findings[0].what or attention is None
    assert report.documents == 3


def test_lengths_say_which_of_two_arguments_is_wrong():
    with_positions = vl.check_batch(clashing(), model(), lengths=[3, 4, 2])
    with_ends = vl.check_batch(clashing(), model("varlen"), lengths=[4, 4, 1])

    assert with_positions.errors[0].what.startswith("cu_seq_lens_q and lengths tell different documents")
    assert with_positions.kinds == ("boundaries_disagree",)
    assert with_ends.errors[0].what.startswith("position_ids and lengths tell different documents")


COUNTING: dict[str, Any] = {"position_ids": torch.arange(9)[None]}


@pytest.mark.parametrize(
    ("changes", "kind"), [(COUNTING, "positions_run_on"), ({"position_ids": None}, "positions_missing")]
)
def test_lengths_show_documents_that_nothing_in_the_batch_tells(changes, kind):
    batch = good(**FLASH_LESS | changes)
    assert vl.check_batch(batch, model()).ok
    report = vl.check_batch(batch, model(), lengths=[3, 4, 2])

    assert [(found.kind, found.level, found.row, found.column) for found in report] == [(kind, "error", 0, 3)]
    assert (report.documents, report.is_assumed) == (3, False)


def test_lengths_that_agree_give_no_finding():
    rows = {"position_ids": row(0, 1, 2, 0, 1).expand(2, 5), "input_ids": row(5, 6, 7, 8, 9).expand(2, 5)}
    labels = torch.tensor([[-100, 6, 7, -100, 9], [-100, 6, 7, -100, -100]])

    assert not len(vl.check_batch(good(), lengths=torch.tensor([3, 4, 2])))
    assert not len(vl.check_batch(good(), model("varlen"), lengths=[3, 4, 2]))
    report = vl.check_batch(rows | {"labels": labels}, model(), lengths=[[3, 2], [3]])
    assert (report.findings, report.documents) == ((), 3)


def test_lengths_find_documents_that_the_batch_cuts_in_two():
    report = vl.check_batch(good(**FLASH_LESS), model(), lengths=[3, 6])

    assert [(found.kind, found.level, found.column) for found in report] == [
        ("boundaries_disagree", "error", 7)
    ]
    assert "lengths begins no document at 1 place where position_ids do" in report.findings[0].what


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([3, 4, 3], "add up to 10"),
        ([-1, 4], "the smallest is -1"),
        ([[3], [4]], "are those of 2 rows, and the batch has 1"),
        ("349", "must be whole numbers of tokens"),
        ([1.5, 2], "must be whole numbers of tokens"),
        (9, "must be whole numbers of tokens"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(lengths, words):
    with pytest.raises(SettingError, match=words):
        vl.check_batch(good(), lengths=lengths)


def test_a_packed_batch_takes_no_lengths():
    with pytest.raises(SettingError, match="leave out lengths="):
        vl.check_batch(packed("flat"), lengths=[3])


@pytest.mark.parametrize("cut", ["prompt", "turns", "every end of turn"])
def test_one_conversation_a_row_has_no_finding_and_the_report_says_what_was_assumed(cut):
    masked = {"prompt": [0, 1, 2], "turns": [0, 1, 4, 5], "every end of turn": [0, 3, 6]}[cut]
    labels = torch.arange(5, 14)[None]
    labels[0, masked] = -100
    batch = {"input_ids": torch.arange(5, 14)[None], "labels": labels}

    report = vl.check_batch(batch | COUNTING, model())
    assert not len(report)
    assert "1 document (each row taken for one; pass lengths= if rows hold several)" in str(report)
    assert "pass lengths=" not in str(vl.check_batch(batch | COUNTING, lengths=[9]))


def test_the_fix_of_crossing_targets_mends_them_where_positions_do_not_restart():
    batch = good(labels=row(*range(5, 14)), **COUNTING)
    fix = next(found.fix for found in vl.check_batch(batch) if found.kind == "crossing_targets")
    exec(fix, {"batch": batch})

    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9, 10, 11, -100, 13]]


def test_an_encoder_that_keeps_no_cache_is_blamed_for_its_mask_alone():
    encoder = BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=32))  # fmt: skip
    encoder.config.use_cache = True
    batch = good(**FLASH_LESS | {"use_cache": None, "attention_mask": torch.ones(1, 9)})

    assert vl.check_batch(batch, encoder).kinds == ("model_family",)


class Scaled(torch.nn.Module):
    """A module of somebody's own around models."""

    def __init__(self, *models: Any) -> None:
        super().__init__()
        self.models = torch.nn.ModuleList(models)


def test_the_only_transformers_model_inside_a_module_of_ones_own_decides():
    batch = good(**FLASH_LESS | {"use_cache": True})
    wrapped = vl.check_batch(batch, Scaled(model(), torch.nn.Linear(2, 2)))

    assert replace(wrapped, within=None) == vl.check_batch(batch, model())
    assert "LlamaForCausalLM (without the code of Scaled, which check_isolation runs)" in str(wrapped)
    with pytest.raises(
        ModelError, match=r"pass its .models.0 \(LlamaForCausalLM\) or its .models.1 \(LlamaFor"
    ):
        vl.check_batch(batch, Scaled(model(), model()))
