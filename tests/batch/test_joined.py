"""`join`: values of documents in every form that frameworks hand over, read in one call or one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varlen.batch.flatten import as_whole, flatten, holds_ones_only, join
from varlen.errors import DocumentsError

DOCUMENTS = st.lists(st.lists(st.integers(-100, 50_000), max_size=5), min_size=1, max_size=6)
FORMS: dict[str, Any] = {
    "lists": lambda documents: documents,
    "arrays": lambda documents: [np.array(document, np.int64) for document in documents],
    "arrays of 32 bits": lambda documents: [np.array(document, np.int32) for document in documents],
    "arrays from big-endian files": lambda documents: [np.array(document, ">i4") for document in documents],
    "strided arrays": lambda documents: [
        np.repeat(np.array(document, np.int64), 2)[::2] for document in documents
    ],
    "tensors": lambda documents: [torch.tensor(document, dtype=torch.int64) for document in documents],
    "tensors of 16 bits and 64": lambda documents: [
        torch.tensor(document, dtype=torch.int64 if number % 2 else torch.int32)
        for number, document in enumerate(documents)
    ],
    "empty tensors of floats": lambda documents: [torch.tensor(document) for document in documents],
    "a mixture": lambda documents: [
        document if number % 2 else torch.tensor(document, dtype=torch.int64)
        for number, document in enumerate(documents)
    ],
    "Arrow": lambda documents: pa.array(documents, pa.list_(pa.int32())),
    "Arrow of 64 bits, sliced": lambda documents: pa.array([[7], *documents, [8]], pa.large_list(pa.int64()))[
        1:-1
    ],
    "Arrow in chunks": lambda documents: pa.chunked_array(
        [pa.array([document], pa.list_(pa.int32())) for document in documents]
    ),
    "values and offsets": lambda documents: (
        np.array([5, *[token for document in documents for token in document], 6]),
        np.cumsum([1, *map(len, documents)]),
    ),
}


@pytest.mark.parametrize("form", FORMS)
@given(documents=DOCUMENTS)
def test_every_form_gives_the_same_values_and_sizes(form: str, documents: list[list[int]]) -> None:
    joined = join(FORMS[form](documents), "input_ids")

    values, sizes, is_fresh = as_whole(joined, "input_ids")
    assert joined.values.dtype.isnative
    assert values.tolist() == [token for document in documents for token in document]
    assert (sizes.dtype, sizes.tolist()) == (np.int64, [len(document) for document in documents])
    assert values.dtype in (np.int32, np.int64)
    assert values.flags.writeable or not is_fresh


@pytest.mark.parametrize("form", FORMS)
def test_what_is_given_stays_as_it_is(form: str) -> None:
    documents = [[11, 12, 13], [21], [31, 32]]
    given_documents, given_labels = FORMS[form](documents), FORMS[form](documents)

    row = flatten(given_documents, given_labels)
    row.input_ids[:] = row.labels[:] = -1

    for kept in (given_documents, given_labels):
        assert join(kept, "input_ids").values.tolist() == [11, 12, 13, 21, 31, 32]


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([np.ones((1, 4), np.int64)] * 2, "entry 0 must have one dimension, got shape"),
        ([torch.ones((1, 4), dtype=torch.int64)] * 2, "entry 0 must have one dimension, got shape"),
        ([np.ones(2, np.int64), np.ones((2, 2), np.int64)], "entry 1 must have one dimension"),
        ([np.int64(3), np.int64(4)], "entry 0 must have one dimension"),
        ([np.array(["a", "b"])], "must hold numbers or booleans"),
        (["ab", "cd"], "entry 0 must have one dimension"),
        ((np.arange(4), np.array([0, 3, 2])), "must rise, and lie within 4 values"),
        ((np.arange(4), np.array([0, 5])), "must rise, and lie within 4 values"),
        (pa.array([[1], None]), "1 nulls in place of documents"),
        (pa.array([1, 2]), "must be of a list type"),
    ],
)
def test_what_holds_no_documents_is_refused(documents: Any, message: str) -> None:
    with pytest.raises(DocumentsError, match=message):
        join(documents, "input_ids")


@pytest.mark.parametrize(
    "documents",
    [
        [np.array([1, 2]), np.array([1.0])],
        [np.array([1, 2]), np.array([True])],
        [torch.tensor([1, 2]), torch.tensor([True])],
        [torch.tensor([1, 2]), torch.tensor([1.5])],
        [np.array([1, 2], np.uint64), np.array([-1])],
        [np.array([2**63], np.uint64)],
    ],
)
def test_token_ids_are_whole_numbers_in_every_document(documents: list[Any]) -> None:
    with pytest.raises(DocumentsError, match=r"whole numbers|outside of int64"):
        as_whole(join(documents, "input_ids"), "input_ids")


def test_only_lists_of_ones_hold_ones_only() -> None:
    assert holds_ones_only([[1, 1], [1]])
    assert not holds_ones_only([[1, 1], [0]])
    assert not holds_ones_only([[1, 1], np.ones(2)])
