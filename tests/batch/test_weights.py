"""Loss weights, worked out by hand and from their definitions."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import assume, given
from tests.batch.batches import IGNORE, Case, cases, tokens_like

import varlen as vl
from varlen.errors import SettingError

LENGTHS = [4, 3, 6, 2]
DOCUMENTS = tokens_like(LENGTHS)
PACKING = vl.pack(LENGTHS, 8, "next_fit", groups=[0, 0, 1, 1])
"""Two packs: [4, 3] with 3 + 2 targets and [6, 2] with 5 + 1."""


def losses_of(batch: vl.PackedBatch) -> np.ndarray:
    """A loss for every position; where there is no target it must not matter."""
    return np.where(batch.labels == IGNORE, np.nan, np.sqrt(batch.input_ids + 1.0))


def weighted(batch: vl.PackedBatch, weights: np.ndarray) -> float:
    return float((np.nan_to_num(losses_of(batch)) * weights).sum(dtype=np.float64))


def test_token_weights_are_one_at_targets_and_zero_elsewhere() -> None:
    batch = vl.collate(DOCUMENTS, PACKING, loss_mask=[[1, 0, 1, 1], [1, 1, 1], [1] * 6, [1, 0]])

    assert (
        batch.loss_weights().tolist()
        == batch.loss_weights("token").tolist()
        == [
            [0, 0, 1, 1, 0, 1, 1, 0],
            [0, 1, 1, 1, 1, 1, 0, 0],
        ]
    )


def test_document_weights_share_one_among_the_targets_of_each_document() -> None:
    weights = vl.collate(DOCUMENTS, PACKING).loss_weights("document")
    third, half, fifth = (np.float32(1) / np.float32(n) for n in (3, 2, 5))

    assert weights.dtype == np.float32
    assert weights.tolist() == [
        [0, third, third, third, 0, half, half, 0],
        [0, fifth, fifth, fifth, fifth, fifth, 0, 1],
    ]


def test_pair_weights_share_one_among_the_targets_of_each_group() -> None:
    weights = vl.collate(DOCUMENTS, PACKING).loss_weights("pair")
    fifth, sixth = np.float32(1) / np.float32(5), np.float32(1) / np.float32(6)

    assert weights.tolist() == [
        [0, fifth, fifth, fifth, 0, fifth, fifth, 0],
        [0, sixth, sixth, sixth, sixth, sixth, 0, sixth],
    ]


def test_longalign_weights_are_those_of_its_fourth_equation() -> None:
    # K = 2 packs, M = 4 documents, N = 3, 2, 5 and 1 targets: K / (N M), arXiv:2401.18058.
    weights = vl.collate(DOCUMENTS, PACKING).loss_weights("longalign")
    expected = [[0, 2 / 12, 2 / 12, 2 / 12, 0, 2 / 8, 2 / 8, 0], [0, *[2 / 20] * 5, 0, 2 / 4]]

    np.testing.assert_allclose(weights, expected, rtol=1e-6)


def document_means(case: Case, batch: vl.PackedBatch) -> list[float]:
    """The mean loss of every segment that has a target."""
    losses, means = losses_of(batch).reshape(-1), []
    bounds = batch.cu_seqlens if batch.cu_seqlens_padded is None else batch.cu_seqlens_padded
    owners = batch.segment_ids.reshape(-1)
    for begin, end in zip(bounds[:-1], bounds[1:]):
        here = losses[begin:end]
        if owners[begin] >= 0 and not np.isnan(here).all():
            means.append(float(np.nanmean(here)))
    return means


@given(cases())
def test_with_longalign_the_mean_over_packs_is_the_mean_over_documents(case: Case) -> None:
    batch = case.collate()
    means = document_means(case, batch)
    assume(means)
    weights = batch.loss_weights("longalign")

    assert weighted(batch, weights) / len(batch.pack_ids) == pytest.approx(np.mean(means), rel=1e-5)
    assert weights.sum(dtype=np.float64) == pytest.approx(len(batch.pack_ids), rel=1e-5)


@given(cases())
def test_every_weighting_is_zero_where_there_is_no_target_and_one_shape_with_labels(case: Case) -> None:
    batch = case.collate()
    for weighting in (
        "token",
        "document",
        "longalign",
        *(["pair"] if case.packing.groups is not None else []),
    ):
        weights = batch.loss_weights(weighting)
        assert weights.dtype == np.float32
        assert weights.shape == batch.labels.shape
        assert ((weights > 0) == (batch.labels != IGNORE)).all()


@given(cases())
def test_every_document_or_group_weighs_one_in_all(case: Case) -> None:
    batch = case.collate()
    owners = {"document": batch.document_ids, "pair": batch.document_groups}
    for weighting, ids in owners.items():
        if ids is None:
            continue
        weights, total = batch.loss_weights(weighting).reshape(-1), defaultdict(float)
        bounds = batch.cu_seqlens if batch.cu_seqlens_padded is None else batch.cu_seqlens_padded
        starts = [begin for begin in bounds[:-1] if batch.segment_ids.reshape(-1)[begin] >= 0]
        for owner, begin, length in zip(ids.tolist(), starts, batch.document_lengths.tolist()):
            total[owner] += float(weights[begin : begin + length].sum(dtype=np.float64))
        assert all(value == pytest.approx(1, rel=1e-5) or value == 0 for value in total.values())


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_weights_lie_where_rounded_slots_lie(layout: str) -> None:
    batch = vl.collate([[1, 2, 3], [4, 5]], vl.pack([3, 2], 8, document_multiple_of=4), layout=layout)

    assert batch.cu_seqlens_padded is not None
    assert batch.loss_weights("document").tolist() == [[0, 0.5, 0.5, 0, 0, 1, 0, 0]]


def test_a_weighting_that_can_not_be_is_refused() -> None:
    batch = vl.collate(DOCUMENTS, vl.pack(LENGTHS, 8))
    with pytest.raises(
        SettingError, match="weighting must be one of token, document, pair, longalign; got 'mean'"
    ):
        batch.loss_weights("mean")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match='weighting "pair" needs groups: pack with groups='):
        batch.loss_weights("pair")
