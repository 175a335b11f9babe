"""InstructLab's padding-free collator beside ours, on what it returned when it was run (release 0.16.2)."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varlen.adapters.hf import DataCollatorWithFlattening
from varlen.adapters.instructlab import PaddingFreeCollator
from varlen.errors import DocumentsError, SettingError


def sample(ids: list[int], labels: list[int]) -> dict[str, Any]:
    return {
        "input_ids": torch.tensor(ids),
        "labels": torch.tensor(labels),
        "len": len(ids),
        "num_loss_counted_tokens": sum(label != -100 for label in labels),
    }


def theirs(minibatch: list[dict[str, Any]], of_step: int) -> dict[str, Any]:
    """What `mb_collate_fn` is published to return, written out plainly."""
    rows: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
    for item in minibatch:
        rows["input_ids"] += item["input_ids"].tolist()
        rows["labels"] += item["labels"].tolist()
        rows["position_ids"] += range(len(item["input_ids"]))
    counts = [item["num_loss_counted_tokens"] for item in minibatch]
    return {
        **{name: torch.tensor([values]) for name, values in rows.items()},
        "num_loss_counted_tokens": sum(counts),
        "num_samples": sum(count > 0 for count in counts),
        "batch_num_loss_counted_tokens": of_step,
        "total_length": len(rows["input_ids"]),
    }


@st.composite
def minibatches(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Samples whose first label is no target, as chat templates make them."""
    made = []
    for ids in draw(
        st.lists(st.lists(st.integers(0, 50_000), min_size=1, max_size=9), min_size=1, max_size=5)
    ):
        made.append(sample(ids, [-100] + [-100 if draw(st.booleans()) else token for token in ids[1:]]))
    return made


@given(minibatches(), st.integers(0, 1_000))
def test_a_minibatch_whose_samples_begin_without_a_target_is_instructlabs_own(minibatch, of_step):
    ours, expected = PaddingFreeCollator()(minibatch, of_step), theirs(minibatch, of_step)

    assert list(ours) == list(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert ours[name].dtype == value.dtype == torch.int64
            assert torch.equal(ours[name], value), name
        else:
            assert type(ours[name]) is int
            assert ours[name] == value, name


def test_a_first_token_is_a_target_of_the_sample_before_there_and_none_here():
    minibatch = [sample([1, 2, 3], [1, 2, 3]), sample([4], [4])]

    expected, ours = theirs(minibatch, 4), PaddingFreeCollator()(minibatch)

    assert expected["labels"].tolist() == [[1, 2, 3, 4]]
    assert expected["num_loss_counted_tokens"] == 4
    assert ours["labels"].tolist() == [[-100, 2, 3, -100]]
    assert ours["num_loss_counted_tokens"] == ours["batch_num_loss_counted_tokens"] == 2
    assert ours["num_samples"] == 1


@given(minibatches())
def test_without_counts_it_is_the_flattening_collator_of_fms_acceleration(minibatch):
    ours = PaddingFreeCollator(return_counts=False, return_flash_attn_kwargs=True)(minibatch)
    flat = DataCollatorWithFlattening(return_flash_attn_kwargs=True, columns=())(minibatch)

    assert list(ours) == list(flat)
    assert all(torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(flat[name])) for name in flat)


def test_counts_need_not_come_with_the_samples_nor_labels():
    batch = PaddingFreeCollator(return_tensors="np")([{"input_ids": [1, 2, 3]}, {"input_ids": []}])

    assert batch["num_loss_counted_tokens"] == 2
    assert batch["num_samples"] == 1


def test_labels_that_do_not_match_and_empty_minibatches_are_refused():
    with pytest.raises(DocumentsError, match="labels: document 0 has 1 values for 2 tokens"):
        PaddingFreeCollator()([{"input_ids": [1, 2], "labels": [1]}])
    with pytest.raises(DocumentsError, match="a batch of no documents"):
        PaddingFreeCollator()([])
    with pytest.raises(SettingError, match="return_tensors"):
        PaddingFreeCollator(return_tensors="tf")
