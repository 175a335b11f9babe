"""check_batch on batches that nobody thought of: right ones have no finding, broken ones are found, none crashes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.verify.batches.faults import good
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import varlen as vl
from varlen.verify.batches.finding import BatchReport
from varlen.verify.batches.reading import _host_tensors, _in_one_transfer

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=8).filter(lambda lengths: max(lengths) > 1)


def flattened(lengths: list[int]) -> dict[str, Any]:
    features = [{"input_ids": list(range(1, length + 1))} for length in lengths]
    batch: dict[str, Any] = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(features)
    return batch


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.sampled_from(["rows", "flat"]), st.sampled_from([1, 4]), st.booleans())
def test_packed_batches_have_no_finding_and_their_documents_are_counted(
    lengths: list[int], layout: Any, multiple: int, shifted: bool
) -> None:
    packing = vl.pack(lengths, capacity=12, document_multiple_of=multiple)
    documents = [np.arange(1, length + 1) for length in lengths]
    report = vl.check_batch(vl.collate(documents, packing, layout=layout, shift_labels=shifted))

    assert report.findings == ()
    assert report.documents == len(lengths)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.data())
def test_a_label_at_any_later_documents_start_is_found_there(lengths: list[int], data: st.DataObject) -> None:
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
def test_a_boundary_left_out_of_one_argument_is_found(lengths: list[int], data: st.DataObject) -> None:
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


NUMBERS = st.integers(-101, 120)
SHAPES = st.sampled_from(
    [(1, 9), (3, 3), (9,), (1, 8), (0, 9), (1, 1, 9), (4, 1, 9), (3, 1, 9), (1, 1, 9, 9), (4,), ()]
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_numbers_in_any_shape_give_a_report(data: st.DataObject) -> None:
    batch = good()
    for name in data.draw(st.sets(st.sampled_from(sorted({*batch, "attention_mask", "shift_labels"})))):
        if name.startswith("max_length"):
            batch[name] = data.draw(NUMBERS)
        elif name != "use_cache" and (name != "input_ids"):
            shape = data.draw(SHAPES)
            numbers = data.draw(st.lists(NUMBERS, min_size=1, max_size=12))
            batch[name] = torch.as_tensor(np.resize(numbers, shape))
    for name in data.draw(st.sets(st.sampled_from(sorted(set(batch) - {"input_ids"})))):
        del batch[name]

    report = vl.check_batch(batch)
    assert isinstance(report, BatchReport)
    assert len(str(report).splitlines()) == 1 + 3 * len(report)


def test_tensors_copied_in_one_transfer_are_those_copied_one_by_one() -> None:
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
