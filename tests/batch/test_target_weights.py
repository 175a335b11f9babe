"""Weights of targets in a batch: collated, moved, and taken in by every weighting, against readable sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import varlen as vl
from varlen.errors import DocumentsError, SettingError

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
def test_every_target_keeps_its_weight(case: Any, layout: Any, multiple: int) -> None:
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
def test_weights_of_0_and_1_are_a_mask(case: Any) -> None:
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
def test_documents_pairs_and_packs_count_the_same_whatever_their_tokens_weigh(case: Any) -> None:
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


def test_weights_travel_with_rows_and_tensors_and_buffers() -> None:
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


def test_flat_weights_share_the_offsets_of_their_documents() -> None:
    tokens, offsets = np.arange(1, 10, dtype=np.int32), np.array([0, 3, 5, 9])
    weights = np.array([1, 0.5, 2, 1, 3, 1, 1, 0, 0.25])
    packing = vl.pack([3, 2, 4], capacity=5)

    batches = [
        vl.collate((tokens, offsets), packing, target_weights=one)
        for one in (weights, weights.astype(np.float32), (weights, offsets))
    ]

    assert len({batch.target_weights.tobytes() for batch in batches}) == 1


def test_a_mean_over_the_number_of_targets_is_refused() -> None:
    batch = packed([[1, 2]], [[1, 0.5]])

    with pytest.raises(SettingError, match=r"batch.target_weights.*batch.loss_weights\(\)"):
        batch.loss_scale()


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), 1e39])
def test_weights_that_are_none_are_refused(weight: float) -> None:
    with pytest.raises(DocumentsError, match=r"finite numbers from 0.*\(1 of the batch's"):
        packed([[1, 2]], [[1, weight]])


def test_weights_of_the_wrong_form_are_refused() -> None:
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
