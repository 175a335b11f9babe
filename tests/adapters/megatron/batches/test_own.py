"""varlen's own batches in Megatron's keys: shifted labels, masks, weights and boundaries of each dialect."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import varlen as vl
from varlen.adapters.megatron import megatron_batch, split_microbatches
from varlen.adapters.megatron.batches.boundaries import entries, logical_boundaries, physical_boundaries
from varlen.errors import SettingError


def documents(lengths: list[int]) -> list[np.ndarray[Any, Any]]:
    """Documents of different tokens."""
    starts = np.cumsum([1, *lengths])
    return [np.arange(start, start + length, dtype=np.int32) for start, length in zip(starts, lengths)]


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.sampled_from(["rows", "flat"]),
    st.sampled_from([1, 4]),
    st.sampled_from(["0.4", "0.5", "0.6"]),
    st.booleans(),
)
def test_every_pair_of_neighbours_in_a_document_is_a_target_once(
    lengths: list[int], layout: Any, multiple: int, dialect: str, on_torch: bool
) -> None:
    given_documents = documents(lengths)
    packing = vl.pack(lengths, capacity=24, document_multiple_of=multiple)
    own = vl.collate(given_documents, packing, layout=layout, report=False)

    batch = megatron_batch(own.to_torch() if on_torch else own, dialect)

    trained = batch["loss_mask"] == 1
    pairs = set(zip(batch["tokens"][trained].tolist(), batch["labels"][trained].tolist()))
    assert pairs == {(t, t + 1) for one in given_documents for t in one[:-1].tolist()}
    assert int(trained.sum()) == own.num_targets
    assert (batch["labels"][~trained] == own.pad_id).all()
    assert sum(batch["token_count"]) == sum(lengths)
    for micro in split_microbatches(batch):
        places = entries(physical_boundaries(micro))  # type: ignore[arg-type]
        reals = entries(logical_boundaries(micro))  # type: ignore[arg-type]
        assert places[0] == reals[0] == 0
        assert places[-1] == micro["tokens"].shape[1]
        starts = set(places[:-1][np.diff(reals) > 0].tolist())
        tokens = micro["tokens"][0].tolist()
        firsts = {int(one[0]) for one in given_documents}
        assert {place for place, token in enumerate(tokens) if token in firsts} <= starts


def test_the_keys_and_dtypes_are_those_of_the_dialect() -> None:
    own = vl.collate(documents([3, 2, 4]), vl.pack([3, 2, 4], capacity=8))

    new, old = megatron_batch(own), megatron_batch(own, "0.4")

    assert new["cu_seqlens_q"].tolist() == [[0, 3, 7, 8], [0, 2, 8, 8]]
    assert old["cu_seqlens"].tolist() == [[0, 3, 7, 8, -1], [0, 2, 8, -1, -1]]
    assert old["cu_seqlens_argmin"].tolist() == [[4], [3]]
    assert new["max_seqlen_q"].tolist() == old["max_seqlen"].tolist() == [[4], [6]]
    assert {new[name].dtype for name in ("tokens", "labels", "loss_mask", "position_ids")} == {torch.int64}
    assert new["cu_seqlens_q"].dtype == torch.int32
    assert new["attention_mask"] is None


def test_rounded_slots_give_padded_boundaries_whose_padding_holds_no_token() -> None:
    own = vl.collate(documents([3, 2]), vl.pack([3, 2], capacity=16, document_multiple_of=4))

    batch = megatron_batch(own, padding_mask=True, total_tokens=True)

    assert batch["cu_seqlens_q"].tolist() == [[0, 3, 5, 5]]
    assert batch["cu_seqlens_q_padded"].tolist() == [[0, 4, 8, 16]]
    assert batch["pad_between_seqs"] is True
    assert batch["padding_mask"][0].tolist() == [False] * 3 + [True] + [False] * 2 + [True] * 10
    assert batch["total_tokens"] == 16
    assert "cu_seqlens_unpadded" in megatron_batch(own, "0.5")


def test_weights_come_from_a_column_or_an_array_and_move_with_the_labels() -> None:
    given_documents = documents([3, 2])
    weights = [np.array([9, 0.5, 0.25], np.float32), np.array([9, 2], np.float32)]
    own = vl.collate(given_documents, vl.pack([3, 2], capacity=6), columns={"weight": weights})

    by_name = megatron_batch(own, weights="weight")["loss_mask"]
    by_document = megatron_batch(own, weights=own.loss_weights("document"))["loss_mask"]

    assert by_name.dtype == torch.float32
    assert by_name.tolist() == [[0.5, 0.25, 0, 2, 0, 0]]
    assert by_document.tolist() == [[0.5, 0.5, 0, 1, 0, 0]]


def test_labels_that_are_masked_stay_out_of_the_loss() -> None:
    labels = [np.array([-100, -100, 3], np.int32)]
    own = vl.collate(documents([3]), vl.pack([3], capacity=4), labels=labels)

    batch = megatron_batch(own)

    assert batch["loss_mask"].tolist() == [[0, 1, 0, 0]]
    assert batch["labels"].tolist() == [[2, 3, 0, 0]]


def test_weights_that_are_not_there_are_refused() -> None:
    own = vl.collate(documents([3]), vl.pack([3], capacity=4))

    with pytest.raises(SettingError, match=r"no column 'weight' .* it has none"):
        megatron_batch(own, weights="weight")
    with pytest.raises(SettingError, match=r"shape of the labels, \(1, 4\); got \(3,\)"):
        megatron_batch(own, weights=np.ones(3))
    with pytest.raises(SettingError, match="weights must be numbers, got <U1"):
        megatron_batch(own, weights=np.full((1, 4), "a"))


@pytest.mark.parametrize("weight", [np.nan, np.inf, 1e300])
def test_weights_that_no_loss_can_take_are_refused_where_a_target_is(weight: float) -> None:
    own = vl.collate(documents([3]), vl.pack([3], capacity=4))

    batch = megatron_batch(own, weights=np.array([[weight, 1, 0.5, weight]]))

    assert batch["loss_mask"].tolist() == [[1, 0.5, 0, 0]]
    with pytest.raises(SettingError, match=r"weights hold .* \(1 of 2 targets aren't finite in float32\)"):
        megatron_batch(own, weights=np.array([[1, weight, 0.5, 1]]))


def test_micro_batches_are_the_rows_in_order() -> None:
    own = vl.collate(documents([3, 2, 4]), vl.pack([3, 2, 4], capacity=8))
    batch = megatron_batch(own, "0.4")

    micro = split_microbatches(batch)

    assert len(micro) == 2
    assert [one["token_count"] for one in micro] == [[7], [2]]
    assert torch.equal(torch.cat([one["tokens"] for one in micro]), batch["tokens"])
    assert micro[1]["cu_seqlens"].tolist() == [[0, 2, 8, -1, -1]]
