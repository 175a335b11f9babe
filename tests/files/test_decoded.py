"""What Arrow's values take once they are decoded, of every type, wherever an array begins; dictionaries undone."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from tests.files.shared_values import chats, undone

from varlen.files.formats.decoded import list_counts, plain, row_sizes


def size_of(value):
    """Bytes of a value as a reader would count them."""
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(size_of, value))
    return len(value.encode() if isinstance(value, str) else value) if value is not None else 0


NESTED = pa.array([["a", "bcd", None], None, [], ["xy"] * 3])
ARRAYS = {
    "strings": pa.array(["a", "bb", None, "cccc"]),
    "large strings": pa.array(["a", "bb", None, "cccc"], pa.large_string()),
    "views": pa.array(["a" * 30, "bb", None, "cccc"], pa.string_view()),
    "dictionary": pa.array(["a", "bb", "a", "a"]).dictionary_encode(),
    "runs": pa.compute.run_end_encode(pa.array(["aa", "aa", "b", "b", "cccc"])),
    "lists": NESTED,
    "large lists": NESTED.cast(pa.large_list(pa.string())),
    "lists of a dictionary": NESTED.cast(pa.list_(pa.dictionary(pa.int32(), pa.string()))),
    "lists of one length": pa.array([["a", "bb"], ["", "cccc"], ["d", "e"]], pa.list_(pa.string(), 2)),
    "structs": pa.array([{"a": "x", "b": "yz"}, {"a": "", "b": "long"}, {"a": "q", "b": None}]),
    "maps": pa.array([[("k", "vv")], [], [("a", "b"), ("c", "d")]], pa.map_(pa.string(), pa.string())),
    "nothing": pa.array([], pa.list_(pa.string())),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_the_sizes_of_rows_are_those_of_their_values(name):
    array = ARRAYS[name]

    for some in (array, array.slice(1), array.slice(1, 2), array.slice(0, 0)):
        assert row_sizes(some).tolist() == [size_of(value) for value in some.to_pylist()]


def test_sizes_of_damaged_offsets_are_no_error():
    offsets = pa.py_buffer(np.array([0, 2_000_000_000, -5, 3], dtype=np.int32))
    array = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"abc")])

    assert (row_sizes(array) >= 0).all()


@pytest.mark.parametrize("start", [0, 1, 2])
def test_dictionaries_are_undone_and_lists_counted_wherever_they_begin(start):
    column = chats(4, 2, ["a", "bb", ""], [0, 1, 2, 1, None, 0, 0, 1]).slice(start)

    decoded = plain(column, undone(column.type))

    decoded.validate(full=True)
    assert decoded.type == undone(column.type)
    assert decoded.to_pylist() == column.to_pylist()
    assert list_counts(column).tolist() == [2] * (4 - start)
