"""`flatten`: whole documents as one flat row, as `collate` would make it, and what it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import varlen as vl
from varlen.batch.flatten import flatten
from varlen.errors import DocumentsError

DOCUMENTS = st.lists(st.lists(st.integers(0, 50_000), min_size=1, max_size=300), min_size=1, max_size=6)


@given(DOCUMENTS, st.integers(1, 400), st.booleans(), st.sampled_from([list, np.array]))
def test_a_row_is_the_flat_batch_that_collate_makes_of_one_pack(
    documents: list[list[int]], multiple: int, labelled: bool, form: Any
) -> None:
    given_labels = [[token if token % 3 else -100 for token in document] for document in documents]
    labels = [form(values) for values in given_labels] if labelled else None
    lengths = [len(document) for document in documents]
    packing = vl.pack(lengths, capacity=sum(lengths), method="next_fit")
    batch = vl.collate(
        documents, packing, labels=labels, pad_id=7, pad_to_multiple_of=multiple, layout="flat", report=False
    )

    row = flatten([form(document) for document in documents], labels, pad_id=7, pad_to_multiple_of=multiple)

    assert row.position_ids is not None
    assert row.owners is not None
    assert row.input_ids.dtype == row.labels.dtype == row.position_ids.dtype == np.int64
    assert row.input_ids.tolist() == batch.input_ids[0].tolist()
    assert row.labels.tolist() == batch.labels[0].tolist()
    assert row.position_ids.tolist() == batch.position_ids[0].tolist()
    assert row.cu_seqlens.dtype == row.owners.dtype == np.int32
    assert row.cu_seqlens.tolist() == batch.cu_seqlens.tolist()
    owners = batch.segment_ids[0].tolist()
    assert [number if number < len(documents) else -1 for number in row.owners.tolist()] == owners


@given(DOCUMENTS, st.data())
def test_rows_of_several_documents_are_cut_at_their_lengths(
    documents: list[list[int]], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(documents)))
    rows = [list(itertools.chain(*part)) for part in (documents[:cut], documents[cut:])]
    lengths = [[len(document) for document in part] for part in (documents[:cut], documents[cut:])]

    whole, rowed = flatten(documents), flatten(rows, lengths=lengths)

    assert rowed.input_ids.tolist() == whole.input_ids.tolist()
    assert rowed.labels.tolist() == whole.labels.tolist()
    assert rowed.cu_seqlens.tolist() == whole.cu_seqlens.tolist()


def test_documents_without_tokens_are_counted() -> None:
    assert flatten([[], [1], [], [2]], keep=[[], [1], [], [0]]).empty_documents == 3


def test_token_ids_that_int64_cannot_hold_are_refused() -> None:
    with pytest.raises(DocumentsError, match="input_ids"):
        flatten([[2**64]])
    with pytest.raises(DocumentsError, match="input_ids"):
        flatten([np.array([2**63], np.uint64)])
