"""Labels of tokens and of documents, and groups as rows of segments."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.batch.batches import tokens_like

import varlen as vl
from varlen.errors import DocumentsError, SettingError
from varlen.types import Packing

LENGTHS = [3, 2, 6, 1]
DOCUMENTS = tokens_like(LENGTHS)


def packing(**options: object) -> Packing:
    return vl.pack(LENGTHS, 8, **options)


lengths_and_layout = st.tuples(
    st.lists(st.integers(0, 9), min_size=1, max_size=12), st.sampled_from(["rows", "flat"])
)


@given(lengths_and_layout, st.integers(1, 4))
def test_labels_stand_where_their_documents_and_tokens_stand(given_, multiple):
    lengths, layout = given_
    documents = tokens_like(lengths)
    classes = [[7 * token for token in part] for part in documents]
    packed = vl.pack(lengths, 12, document_multiple_of=multiple)
    batch = vl.collate(
        documents, packed, layout=layout, token_labels=classes, document_labels=np.arange(len(lengths)) * 3
    )

    real = batch.segment_ids >= 0
    assert batch.document_labels.tolist() == (batch.document_ids * 3).tolist()
    assert batch.token_labels[real].tolist() == (batch.input_ids[real] * 7).tolist()
    assert set(batch.token_labels[~real].tolist()) <= {-100}
    assert batch.token_labels.dtype == np.int32
    begins = batch.segment_begins
    assert batch.input_ids.reshape(-1)[begins].tolist() == [documents[one][0] for one in batch.document_ids]


@pytest.mark.parametrize(
    ("labels", "dtype", "shape"),
    [
        ([1, 0, -100, 2], np.int64, (4,)),
        (np.array([True, False, True, True]), np.int64, (4,)),
        ([0.5, 1, 2, 3], np.float32, (4,)),
        ([[0, 1]] * 4, np.float32, (4, 2)),
        (torch.tensor([1, 0, 1, 2], dtype=torch.int32), np.int64, (4,)),
    ],
    ids=["classes", "yes or no", "numbers", "several", "a tensor"],
)
def test_whole_numbers_are_classes_and_others_are_targets(labels, dtype, shape):
    batch = vl.collate(DOCUMENTS, packing(), document_labels=labels)

    assert (batch.document_labels.dtype, batch.document_labels.shape) == (dtype, shape)
    assert (
        batch.row(0).document_labels.tolist() == batch.document_labels[: batch.row(0).num_segments].tolist()
    )
    assert batch.to_torch().document_labels.tolist() == batch.document_labels.tolist()


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([1, 2, 3], "3 labels for 4 documents; give one for each, in the order of the documents"),
        ([1, 2, 3, 4, 5], "5 labels for 4 documents"),
        ([1, None, 2, None], r"document 1 has no label \(2 of 4 have none\).*-100"),
        ([1.0, float("nan"), 2.0, 3.0], r"document 1 has no label \(1 of 4"),
        ([[1, 2], [1], [1, 2], [1, 2]], "must be numbers, as many for each document"),
        (["good", "bad", "good", "good"], "must be numbers"),
        (np.zeros((4, 1, 1)), r"of shape \[4, 1, 1\]"),
    ],
)
def test_labels_that_are_missing_or_too_many_are_refused_in_a_sentence(labels, words):
    with pytest.raises(DocumentsError, match=words):
        vl.collate(DOCUMENTS, packing(), document_labels=labels)


def test_a_label_missing_elsewhere_is_refused_too_as_it_makes_numbers_of_classes():
    with pytest.raises(DocumentsError, match="document 3 has no label"):
        vl.collate(DOCUMENTS, packing(), pack_ids=[0], document_labels=[0, 1, 1, None])


def test_a_document_in_pieces_has_no_label_of_its_own():
    split = vl.pack([3, 20], 8, overlong="split")
    with pytest.raises(DocumentsError, match=r"document 1 is cut into pieces \(2 later pieces.*truncate"):
        vl.collate(tokens_like([3, 20]), split, document_labels=[0, 1])
    cut = vl.pack([3, 20], 8, overlong="truncate")
    assert vl.collate(tokens_like([3, 20]), cut, document_labels=[0, 1]).document_labels.tolist() == [0, 1]


@pytest.mark.parametrize("as_tensors", [False, True])
def test_labels_of_a_made_batch_are_those_that_collate_would_give(as_tensors):
    labels = [1, 0, -100, 2]
    batch, collated = (vl.collate(DOCUMENTS, packing(), document_labels=each) for each in (None, labels))
    batch = batch.to_torch() if as_tensors else batch
    given_ = [labels[one] for one in batch.document_ids]

    for values in (given_, np.array(given_), torch.tensor(given_, dtype=torch.int32)):
        found = batch.replace(document_labels=values).document_labels
        assert found.tolist() == collated.document_labels.tolist()
        assert type(found) is type(batch.document_ids)
        assert str(found.dtype).endswith("int64")
    assert batch.replace(document_labels=None).document_labels is None


def test_a_made_batch_takes_no_labels_of_other_documents_or_of_pieces():
    batch = vl.collate(DOCUMENTS, packing())
    with pytest.raises(
        DocumentsError, match=r"600 labels for 4 segments of this batch.*labels\[batch.document_ids"
    ):
        batch.replace(document_labels=np.zeros(600))
    with pytest.raises(DocumentsError, match="must be numbers"):
        batch.replace(document_labels=["good"] * 4)
    split = vl.collate(tokens_like([3, 20]), vl.pack([3, 20], 8, overlong="split"))
    with pytest.raises(DocumentsError, match=r"document 1 is cut into pieces \(2 later pieces.*truncate"):
        split.replace(document_labels=np.zeros(4, int))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"labels": np.zeros((1, 3), np.int32)},
            r"labels must be .* of shape \[2, 8\].*got of shape \[1, 3\]",
        ),
        ({"labels": [[1] * 8] * 2}, "labels must be an array or tensor .* got list"),
        ({"columns": {"token_labels": np.zeros((2, 7))}}, r"token_labels must be .*\[2, 7\]"),
        ({"document_ids": np.arange(3)}, "document_starts must be .* 3 segments.* got 4 values"),
        ({"document_groups": [0, 0, 1, 1]}, "document_groups must be .* got list"),
    ],
)
def test_values_that_do_not_fit_a_batch_are_refused_in_a_sentence(changes, words):
    with pytest.raises(DocumentsError, match=words):
        vl.collate(DOCUMENTS, packing()).replace(**changes)


@pytest.mark.parametrize("as_tensors", [False, True])
def test_targets_and_tokens_are_counted_again_where_they_change(as_tensors):
    masks = [[0, 1, 1], [0, 0], [0, 1, 0, 1, 0, 1], [0]]
    batch, masked = (vl.collate(DOCUMENTS, packing(), loss_mask=each) for each in (None, masks))
    if as_tensors:
        batch, masked = batch.to_torch(), masked.to_torch()

    made = batch.replace(labels=masked.labels, input_ids=masked.input_ids + 1000)

    assert made.document_targets.tolist() == masked.document_targets.tolist()
    assert type(made.document_targets) is type(masked.document_targets)
    assert (made.num_targets, made.step_num_targets) == (5, 5)
    assert made.max_token_id == batch.max_token_id + 1000


def test_targets_of_a_part_of_a_step_do_not_change_unless_those_of_the_step_are_given():
    batch = vl.collate(DOCUMENTS, packing(), step_num_targets=100)
    labels = np.full_like(batch.labels, -100)

    assert batch.replace(labels=batch.labels.copy()).step_num_targets == 100
    with pytest.raises(
        SettingError, match=r"hold 0 targets, and there were 8 of the step's 100.*step_num_targets="
    ):
        batch.replace(labels=labels)
    assert batch.replace(labels=labels, step_num_targets=92).loss_scale() == 1 / 92


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([[1, 2, 3], [1], [1] * 6, [1]], "token_labels: document 1 has 1 values for 2 tokens"),
        ([[0.5] * length for length in LENGTHS], "token_labels must be whole numbers"),
    ],
)
def test_token_labels_are_one_whole_number_a_token(labels, words):
    with pytest.raises(DocumentsError, match=words):
        vl.collate(DOCUMENTS, packing(), token_labels=labels)


def test_a_column_can_not_take_the_name_of_labels():
    with pytest.raises(SettingError, match="a column can't be called 'token_labels'"):
        vl.collate(DOCUMENTS, packing(), columns={"token_labels": DOCUMENTS})


@given(
    st.integers(1, 4).flatmap(
        lambda size: st.lists(
            st.lists(st.integers(1, 6), min_size=size, max_size=size), min_size=1, max_size=9
        )
    ),
    st.sampled_from(["rows", "flat"]),
)
def test_groups_are_rows_of_segments_in_the_order_of_documents(rows, layout):
    size, lengths = len(rows[0]), [length for row in rows for length in row]
    packed = vl.pack(lengths, 30, groups=np.repeat(np.arange(len(rows)), size), seed=1)
    batch = vl.collate(tokens_like(lengths), packed, layout=layout)

    found = batch.document_ids[batch.group_segments()]
    assert found.tolist() == np.arange(len(lengths)).reshape(-1, size).tolist()


def test_groups_that_are_no_rows_are_refused_in_a_sentence():
    with pytest.raises(SettingError, match="no groups: pack with groups="):
        vl.collate(DOCUMENTS, packing()).group_segments()
    uneven = vl.collate(DOCUMENTS, vl.pack(LENGTHS, 12, groups=[0, 0, 1, 2]))
    with pytest.raises(
        DocumentsError, match=r"1 of 3 groups don't have 1 documents as most do, group 0 first"
    ):
        uneven.group_segments()
    batch = vl.collate(DOCUMENTS, vl.pack(LENGTHS, 12, groups=[0, 0, 1, 1]))
    pieces = batch.replace(document_ids=batch.document_ids * 0)
    with pytest.raises(DocumentsError, match="3 segments are further pieces of documents"):
        pieces.group_segments()
