"""Weights of losses and of targets, worked out by hand and from their definitions."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.batch.batches import IGNORE, Case, cases, tokens_like

import varlen as vl
from varlen.errors import DocumentsError, SettingError

LENGTHS = [4, 3, 6, 2]
DOCUMENTS = tokens_like(LENGTHS)
PACKING = vl.pack(LENGTHS, 8, "next_fit", groups=[0, 0, 1, 1])
"""Two packs: [4, 3] with 3 + 2 targets and [6, 2] with 5 + 1."""


def losses_of(batch: vl.PackedBatch) -> np.ndarray:
    """A loss for every position; where there is no target it must not matter."""
    return np.where(batch.labels == IGNORE, np.nan, np.sqrt(batch.input_ids + 1.0))


def weighted(batch: vl.PackedBatch, weights: np.ndarray) -> float:
    return float((np.nan_to_num(losses_of(batch)) * weights).sum(dtype=np.float64))


def test_token_weights_are_one_at_targets_and_zero_elsewhere():
    batch = vl.collate(DOCUMENTS, PACKING, loss_mask=[[1, 0, 1, 1], [1, 1, 1], [1] * 6, [1, 0]])

    assert (
        batch.loss_weights().tolist()
        == batch.loss_weights("token").tolist()
        == [[0, 0, 1, 1, 0, 1, 1, 0], [0, 1, 1, 1, 1, 1, 0, 0]]
    )


def test_document_weights_share_one_among_the_targets_of_each_document():
    weights = vl.collate(DOCUMENTS, PACKING).loss_weights("document")
    third, half, fifth = (np.float32(1) / np.float32(n) for n in (3, 2, 5))

    assert weights.dtype == np.float32
    assert weights.tolist() == [
        [0, third, third, third, 0, half, half, 0],
        [0, fifth, fifth, fifth, fifth, fifth, 0, 1],
    ]


def test_pair_weights_share_one_among_the_targets_of_each_group():
    weights = vl.collate(DOCUMENTS, PACKING).loss_weights("pair")
    fifth, sixth = np.float32(1) / np.float32(5), np.float32(1) / np.float32(6)

    assert weights.tolist() == [
        [0, fifth, fifth, fifth, 0, fifth, fifth, 0],
        [0, sixth, sixth, sixth, sixth, sixth, 0, sixth],
    ]


def test_longalign_weights_are_those_of_its_fourth_equation():
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
def test_with_longalign_the_mean_over_packs_is_the_mean_over_documents(case):
    batch = case.collate()
    means = document_means(case, batch)
    assume(means)
    weights = batch.loss_weights("longalign")

    assert weighted(batch, weights) / len(batch.pack_ids) == pytest.approx(np.mean(means), rel=1e-5)
    assert weights.sum(dtype=np.float64) == pytest.approx(len(batch.pack_ids), rel=1e-5)


@given(cases())
def test_every_weighting_is_zero_where_there_is_no_target_and_one_shape_with_labels(case):
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
def test_every_document_or_group_weighs_one_in_all(case):
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
def test_weights_lie_where_rounded_slots_lie(layout):
    batch = vl.collate([[1, 2, 3], [4, 5]], vl.pack([3, 2], 8, document_multiple_of=4), layout=layout)

    assert batch.cu_seqlens_padded is not None
    assert batch.loss_weights("document").tolist() == [[0, 0.5, 0.5, 0, 0, 1, 0, 0]]


def test_a_weighting_that_can_not_be_is_refused():
    batch = vl.collate(DOCUMENTS, vl.pack(LENGTHS, 8))
    with pytest.raises(
        SettingError, match=r"weighting must be one of token, document, pair, longalign.*; got 'mean'"
    ):
        batch.loss_weights("mean")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match='weighting "pair" needs groups: pack with groups='):
        batch.loss_weights("pair")


WEIGHT = st.sampled_from([0.0, 0.0, 0.25, 0.5, 1.0, 2.0, 3.5])


@st.composite
def weighed(draw: Any) -> tuple[list[list[int]], list[list[float]]]:
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    weights = [draw(st.lists(WEIGHT, min_size=size, max_size=size)) for size in sizes]
    first = 1
    documents = []
    for size in sizes:
        documents.append(list(range(first, first + size)))
        first += size
    return documents, weights


def packed(documents: Any, weights: Any, **changes: Any) -> vl.PackedBatch:
    packing = vl.pack([len(one) for one in documents], capacity=12, **changes.pop("pack", {}))
    return vl.collate(documents, packing, target_weights=weights, report=False, **changes)


def by_token(documents: Any, weights: Any) -> dict[int, float]:
    """What each token weighs as a target: tokens are all different, and a document's first is none."""
    return {
        token: weight if number else 0.0
        for document, own in zip(documents, weights)
        for number, (token, weight) in enumerate(zip(document, own))
    }


@given(weighed(), st.sampled_from(["rows", "flat"]), st.sampled_from([1, 2, 4]))
def test_every_target_keeps_its_weight(case, layout, multiple):
    documents, weights = case

    batch = packed(documents, weights, layout=layout, pack={"document_multiple_of": multiple})

    known = by_token(documents, weights)
    found = dict(
        zip(
            batch.input_ids[batch.segment_ids >= 0].tolist(),
            batch.target_weights[batch.segment_ids >= 0].tolist(),
        )
    )
    assert found == known
    assert batch.target_weights.dtype == np.float32
    assert batch.target_weights[batch.segment_ids < 0].sum() == 0
    assert ((batch.labels != -100) == (batch.target_weights > 0)).all()
    assert batch.num_targets == sum(weight > 0 for weight in known.values()) == batch.document_targets.sum()
    assert (batch.loss_weights() == batch.target_weights).all()


@given(weighed())
def test_weights_of_0_and_1_are_a_mask(case):
    documents, weights = case
    marks = [[float(weight > 0) for weight in own] for own in weights]
    batch = packed(documents, marks)
    masked = vl.collate(
        documents, vl.pack([len(d) for d in documents], capacity=12), loss_mask=marks, report=False
    )

    assert batch.labels.tolist() == masked.labels.tolist()
    for weighting in ("token", "document", "longalign"):
        assert batch.loss_weights(weighting).tolist() == masked.loss_weights(weighting).tolist()  # type: ignore[arg-type]


@given(weighed())
@settings(max_examples=50)
def test_documents_pairs_and_packs_count_the_same_whatever_their_tokens_weigh(case):
    documents, weights = case
    size = max(len(one) for one in documents)
    packing = vl.pack(
        [len(one) for one in documents], capacity=2 * size, groups=np.arange(len(documents)) // 2
    )
    batch = vl.collate(documents, packing, target_weights=weights, report=False)
    known = by_token(documents, weights)
    ids = batch.input_ids

    def found(weighting: Any, tokens: list[int]) -> list[float]:
        of = dict(
            zip(
                ids[batch.segment_ids >= 0].tolist(),
                batch.loss_weights(weighting)[batch.segment_ids >= 0].tolist(),
            )
        )
        return [of[token] for token in tokens]

    pairs = [
        documents[n] + (documents[n + 1] if n + 1 < len(documents) else [])
        for n in range(0, len(documents), 2)
    ]
    taught = [one for one in documents if any(known[token] for token in one)]
    for weighting, groups, each in (
        ("document", documents, 1.0),
        ("pair", pairs, 1.0),
        ("longalign", documents, packing.num_packs / max(len(taught), 1)),
    ):
        for tokens in groups:
            whole = sum(known[token] for token in tokens)
            wanted = [each * known[token] / whole if whole else 0.0 for token in tokens]
            assert found(weighting, tokens) == pytest.approx(wanted, rel=1e-6)


def test_weights_travel_with_rows_and_tensors_and_buffers():
    documents, weights = [[1, 2, 3], [4, 5], [6, 7, 8, 9]], [[1, 0.5, 2], [1, 3], [1, 1, 0, 0.25]]
    packing = vl.pack([3, 2, 4], capacity=5)
    batch = vl.collate(documents, packing, target_weights=weights)

    moved = batch.to_torch()
    assert moved.target_weights.dtype.is_floating_point
    assert moved.loss_weights().tolist() == batch.target_weights.tolist()
    for index in range(batch.num_rows):
        row = batch.row(index)
        assert row.target_weights.tolist() == batch.target_weights[index : index + 1].tolist()
        assert moved.row(index).loss_weights("document").tolist() == row.loss_weights("document").tolist()
    again = vl.collate(documents, packing, target_weights=weights, out=batch)
    assert again.target_weights is batch.target_weights
    plain = vl.collate(documents, packing)
    taken = vl.collate(documents, packing, target_weights=weights, out=plain)  # which has no room for them
    assert taken.input_ids is plain.input_ids
    assert taken.target_weights.tolist() == batch.target_weights.tolist()
    assert vl.collate(documents, packing, out=batch).target_weights is None


def test_flat_weights_share_the_offsets_of_their_documents():
    tokens, offsets = np.arange(1, 10, dtype=np.int32), np.array([0, 3, 5, 9])
    weights = np.array([1, 0.5, 2, 1, 3, 1, 1, 0, 0.25])
    packing = vl.pack([3, 2, 4], capacity=5)

    batches = [
        vl.collate((tokens, offsets), packing, target_weights=one)
        for one in (weights, weights.astype(np.float32), (weights, offsets))
    ]

    assert len({batch.target_weights.tobytes() for batch in batches}) == 1


def test_a_mean_over_the_number_of_targets_is_refused():
    batch = packed([[1, 2]], [[1, 0.5]])

    with pytest.raises(SettingError, match=r"batch.target_weights.*batch.loss_weights\(\)"):
        batch.loss_scale()


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), 1e39])
def test_weights_that_are_none_are_refused(weight):
    with pytest.raises(DocumentsError, match=r"finite numbers from 0.*\(1 of the batch's"):
        packed([[1, 2]], [[1, weight]])


def test_weights_of_the_wrong_form_are_refused():
    with pytest.raises(DocumentsError, match="so small that float32"):
        packed([[1, 2]], [[1, 1e-60]])
    with pytest.raises(DocumentsError, match=r"target_weights: document 0 has 1 values for 2 tokens"):
        packed([[1, 2]], [[1.0]])
    with pytest.raises(DocumentsError, match="must be numbers"):
        packed([[1, 2]], [np.array(["a", "b"])])
    with pytest.raises(SettingError, match="give the weights alone"):
        packed([[1, 2]], [[1, 0.5]], loss_mask=[[1, 1]])
    with pytest.raises(SettingError, match="can't be called 'target_weights'"):
        vl.collate([[1, 2]], vl.pack([2], capacity=2), columns={"target_weights": [[1, 0.5]]})
