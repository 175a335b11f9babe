"""Documents are read without more work than they need: lists in one loop each, Arrow arrays once."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.batch import documents
from varlen.batch.documents import read_int_lists


@pytest.mark.parametrize("form", ["list", "chunked", "fixed size"])
def test_an_arrow_array_is_looked_through_once_and_let_go(form: str) -> None:
    array = pa.array([[1, 2], [3, 4]])
    if form == "chunked":
        array = pa.chunked_array([array])
    if form == "fixed size":
        array = pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2))
    before = len(documents._FLAT)

    first, again = documents.as_flat(array, "documents"), documents.as_flat(array, "documents")
    assert first is not None
    assert again is first
    assert len(documents._FLAT) == before + 1
    del array
    assert len(documents._FLAT) == before


def test_another_array_in_the_place_of_a_known_one_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    known, other = pa.array([[1, 2]]), pa.array([[7, 8, 9]])
    documents.as_flat(known, "documents")
    monkeypatch.setitem(documents._FLAT, id(other), documents._FLAT[id(known)])

    found = documents.as_flat(other, "documents")
    assert found is not None
    assert found.values.tolist() == [7, 8, 9]


VALUES = st.one_of(
    st.integers(-(2**31), 2**31 - 1),
    st.sampled_from(
        [0, -1, 2**31 - 1, -(2**31), np.int32(7), np.uint8(9), enum.IntEnum("Id", "SEVEN").SEVEN]
    ),
)
OTHERS = st.sampled_from([None, 1.5, "i", b"iiiii", 2**31, -(2**31) - 1, 2**70, (1,), [1], np.float32(2)])


@given(st.lists(st.lists(VALUES, max_size=6), min_size=1, max_size=5))
def test_lists_of_whole_numbers_are_read_as_they_are(lists: list[list[Any]]) -> None:
    offsets = np.zeros(len(lists) + 1, np.int64)
    read = read_int_lists(lists, offsets)

    assert read is not None
    assert read.dtype == np.int32
    assert read.tolist() == [int(value) for part in lists for value in part]
    assert offsets.tolist() == np.cumsum([0, *map(len, lists)]).tolist()


@given(st.lists(st.lists(VALUES, max_size=6), min_size=1, max_size=5), OTHERS, st.data())
def test_lists_with_anything_else_in_them_are_left_to_numpy(
    lists: list[list[Any]], other: Any, data: st.DataObject
) -> None:
    part = data.draw(st.sampled_from(lists))
    part.insert(data.draw(st.integers(0, len(part))), other)

    assert read_int_lists(lists, np.zeros(len(lists) + 1, np.int64)) is None


def test_lists_of_booleans_stay_booleans() -> None:
    assert read_int_lists([[1], [], [True, False]], np.zeros(4, np.int64)) is None


@pytest.mark.parametrize("lists", [[[2**31]], [[1], [2**32 - 1, 2]], [[-5, 7], [2**31]], [[2**31, -5]]])
def test_numbers_of_all_32_bits_do_not_turn_negative(lists: list[list[int]]) -> None:
    assert read_int_lists(lists, np.zeros(len(lists) + 1, np.int64)) is None


def test_a_list_with_negative_numbers_stands_between_others_as_it_is() -> None:
    offsets = np.zeros(4, np.int64)

    read = read_int_lists([[1, 2], [3, -100, -(2**31)], [2**31 - 1]], offsets)

    assert read is not None
    assert read.tolist() == [1, 2, 3, -100, -(2**31), 2**31 - 1]
    assert offsets.tolist() == [0, 2, 5, 6]
