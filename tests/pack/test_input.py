"""What `vl.pack` and its siblings refuse: a refusal names the first offender, how many there are and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import varlen as vl
from varlen.errors import InputError, LengthsError, OverlongDocumentError, SettingError

LENGTHS: list[tuple[Any, str]] = [
    ([3, -1, -2], r"length -1 of document 1 is negative \(2 of 3 lengths"),
    ([3.0, 2.5, 0.5], r"length 2.5 of document 1 is not a whole number \(2 of 3 lengths"),
    ([3, float("nan")], r"length nan of document 1 is not a finite number \(1 of 2 lengths"),
    ([float("inf")], r"length inf of document 0 is not a finite number \(1 of 1 lengths"),
    ([1, 2**31], r"length 2147483648 of document 1 is over the longest possible document of 2,147,483,647"),
    (np.array([2**31], np.float32), "of document 0 is over the longest possible document"),
    (np.array([2**64 - 1], np.uint64), "of document 0 is over the longest possible document"),
    ([1, 2**70], "length 1180591620717411303424 of document 1 is over the longest possible document"),
    ([1, -(2**70)], "of document 1 is negative"),
    ([3, None, "4", None], r"length None of document 1 is not a whole number \(3 of 4 lengths"),
    (["4"], "length '4' of document 0 is not a whole number"),
    ([True, False], r"length True of document 0 is not a whole number \(2 of 2 lengths"),
    (np.array([1 + 2j]), "of document 0 is not a whole number"),
    (np.array(["2020-01-01"], "datetime64[D]"), "of document 0 is not a whole number"),
    ([[1, 2], [3, 4]], r"documents were given: entry 0 is a list of 2 \(2 of 2 are no numbers\)"),
    (5, r"one whole number a document; a int was given, and it has the shape \(\)"),
    (np.zeros((0, 3)), r"one whole number a document; a ndarray was given, and it has the shape \(0, 3\)"),
    ((length for length in [1, 2]), r"one whole number a document; a generator was given"),
    ([[1], [2, 3]], "documents were given: entry 0 is a list of 1"),
    (
        torch.ones(2, requires_grad=True),
        "one whole number a document; a Tensor was given, and numpy can't read it",
    ),
    (pa.array([1, None]), "length nan of document 1 is not a finite number"),
]
TAKES_LENGTHS: dict[str, Callable[[Any], Any]] = {
    "pack": lambda lengths: vl.pack(lengths, capacity=8),
    "lower_bound": lambda lengths: vl.lower_bound(lengths, capacity=8),
    "WindowPacker": lambda lengths: vl.WindowPacker(capacity=8).add(lengths),
}


@pytest.mark.parametrize("function", TAKES_LENGTHS.values(), ids=TAKES_LENGTHS)
@pytest.mark.parametrize(("lengths", "words"), LENGTHS, ids=[str(number) for number in range(len(LENGTHS))])
def test_lengths_that_can_not_be_are_refused_by_name(
    function: Callable[[Any], Any], lengths: Any, words: str
) -> None:
    with pytest.raises(LengthsError, match=words) as caught:
        function(lengths)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "lengths",
    [
        [5, 2, 6, 3],
        (5, 2, 6, 3),
        np.array([5, 2, 6, 3], np.uint8),
        np.array([5, 2, 6, 3], ">i8"),
        np.array([5, 2, 6, 3], np.uint64),
        np.array([5, 2, 6, 3], np.float16),
        np.array([5, 2, 6, 3], object),
        pa.array([5, 2, 6, 3]),
        pa.chunked_array([[5, 2], [6, 3]]),
        torch.tensor([5, 2, 6, 3]),
        [np.int64(5), 2.0, np.int8(6), 3],
    ],
    ids=[
        "list",
        "tuple",
        "uint8",
        "swapped",
        "uint64",
        "float16",
        "object",
        "Arrow",
        "chunked",
        "torch",
        "mixed",
    ],
)
def test_lengths_come_in_many_forms(lengths: Any) -> None:
    assert vl.pack(lengths, capacity=8).to_lists() == [[0, 3], [1, 2]]
    assert vl.lower_bound(lengths, capacity=8) == 2


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"capacity": 0}, "capacity must be a whole number from 1 to 2,147,483,647, got 0"),
    ({"capacity": -8}, "capacity must be a whole number from 1 to 2,147,483,647, got -8"),
    ({"capacity": 8.0}, "capacity must be a whole number of at least 1, got 8.0"),
    ({"capacity": True}, "capacity must be a whole number .* got True"),
    ({"capacity": None}, "capacity must be a whole number of at least 1, got None"),
    ({"capacity": 2**31}, "capacity must be a whole number from 1 to 2,147,483,647, got 2147483648"),
    ({"max_documents": 0}, "max_documents must be a whole number from 1"),
    ({"max_documents": 1.5}, "max_documents must be a whole number"),
    ({"document_multiple_of": 0}, "document_multiple_of must be a whole number from 1"),
    (
        {"document_multiple_of": 3},
        "capacity 8 is not a multiple of document_multiple_of 3; the nearest: 6 or 9",
    ),
    (
        {"document_multiple_of": 16},
        "capacity 8 is not a multiple of document_multiple_of 16; the nearest: 16",
    ),
    ({"method": "best"}, "method must be one of next_fit, .*, balanced; got 'best'"),
    ({"method": None}, "method must be one of next_fit, .*, balanced; got None"),
    ({"method": ["next_fit"]}, "method must be one of"),
    ({"overlong": "cut"}, "overlong must be one of error, split, truncate, drop; got 'cut'"),
    ({"seed": -1}, r"seed must be from 0 to 2\^64 - 1, got -1"),
    ({"seed": 2**64}, r"seed must be from 0 to 2\^64 - 1"),
    ({"seed": True}, r"seed must be from 0 to 2\^64 - 1, got True"),
    ({"work": "12"}, "work must be two numbers .* got '12'"),
    ({"seed": "a"}, "seed must be a whole number or None, got 'a'"),
    ({"seed": 0.5}, "seed must be a whole number or None, got 0.5"),
    ({"method": "balanced", "work": (1,)}, "work must be two numbers"),
    ({"method": "balanced", "work": 5}, "work must be two numbers"),
    ({"method": "balanced", "work": (0, 0)}, "work must be two numbers of at least 0, one of them above 0"),
    ({"method": "balanced", "work": (-1, 2)}, "work must be two numbers of at least 0"),
    ({"method": "balanced", "work": (float("nan"), 1)}, "work must be two numbers of at least 0"),
    ({"method": "balanced", "work": (float("inf"), 1)}, "work must be two numbers of at least 0"),
    ({"method": "balanced", "work": (0, 1e308)}, r"work \(0.0, 1e\+308\) is too large"),
    ({"method": "wrapped", "groups": [0, 1]}, "keeps no groups; choose another"),
    ({"overlong": "split", "groups": [0, 1]}, 'with groups, use overlong="error" or "drop"'),
    ({"overlong": "truncate", "groups": [0, 1]}, 'with groups, use overlong="error" or "drop"'),
]


@pytest.mark.parametrize(("settings", "words"), SETTINGS, ids=[words[:60] for _, words in SETTINGS])
def test_settings_out_of_range_are_refused_with_the_way_out(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words) as caught:
        vl.pack([5, 6], **{"capacity": 8, **settings})
    assert isinstance(caught.value, InputError)
    assert isinstance(caught.value, ValueError)


def test_documents_that_do_not_fit_are_refused_with_the_way_out() -> None:
    words = (
        r"document 1 has 9 tokens but capacity is 8 \(2 of 4 documents are too long\); "
        r'pass overlong="split", "truncate" or "drop", or raise capacity'
    )
    with pytest.raises(OverlongDocumentError, match=words):
        vl.pack([3, 9, 8, 12], capacity=8)


def test_groups_that_do_not_fit_are_refused_with_the_limit_that_they_break() -> None:
    with pytest.raises(OverlongDocumentError) as caught:
        vl.pack([5, 2, 4, 1], capacity=8, groups=[7, 3, 7, 3])
    assert str(caught.value) == (
        "group 7 takes up 9 tokens in 2 documents, but a pack holds 8 tokens (1 of 2 groups are too large); "
        'pass overlong="drop" or raise the limit'
    )
    with pytest.raises(OverlongDocumentError, match="but a pack holds 8 tokens and 1 documents"):
        vl.pack([1, 1], capacity=8, groups=[0, 0], max_documents=1)


@pytest.mark.parametrize(
    "groups", [[0], [0, 1, 2], [0.5, 1.0], [[0], [1]], [[0], [1, 2]], 3, ["a", "b"], [True, False]]
)
def test_groups_that_are_not_one_whole_number_a_document_are_refused(groups: Any) -> None:
    with pytest.raises(LengthsError, match=r"groups must be one whole number a document, \[2\]"):
        vl.pack([5, 2], capacity=8, groups=groups)


def test_more_pieces_than_a_call_takes_are_refused_before_they_are_cut() -> None:
    for method in ("best_fit_decreasing", "wrapped"):
        with pytest.raises(
            LengthsError, match=r"pieces, and 2,147,483,647 pieces are the most of one call; raise"
        ):
            vl.pack([2**31 - 1, 2**31 - 1], capacity=1, method=method, overlong="split")


@pytest.mark.parametrize("method", ["best_fit_decreasing", "best_fit", "first_fit", "next_fit", "balanced"])
def test_a_capacity_far_above_the_documents_costs_no_memory(method: Any) -> None:
    packing = vl.pack([5, 2, 6], capacity=2**31 - 1, method=method)

    assert packing.to_lists() == [[0, 1, 2]]
    assert packing.capacity == 2**31 - 1
    assert vl.pack([5, 2, 6], 2**31 - 1, method, max_documents=2).num_packs == 2


def test_the_longest_document_that_an_int32_holds_can_be_packed() -> None:
    packing = vl.pack([2**31 - 1, 1], capacity=2**30, method="wrapped")

    assert packing.lengths.tolist() == [2**30, 2**30 - 1, 1]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"capacity": 0}, SettingError, "capacity must be a whole number"),
        ({"max_documents": 0}, SettingError, "max_documents must be a whole number"),
        ({"document_multiple_of": 5}, SettingError, "the nearest: 5 or 10"),
        (
            {"capacity": 4},
            OverlongDocumentError,
            r"document 0 has 5 tokens but capacity is 4 \(2 of 2 documents are too long\); cut or drop them",
        ),
    ],
)
def test_a_bound_refuses_what_packing_refuses(arguments: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        vl.lower_bound([5, 6], **{"capacity": 8, **arguments})


def test_a_bound_refuses_the_longest_document_also_where_slots_are_rounded_up() -> None:
    with pytest.raises(
        OverlongDocumentError, match="document 1 has 2,147,483,647 tokens but capacity is 2,048"
    ):
        vl.lower_bound([1, 2**31 - 1], capacity=2048, document_multiple_of=1024)
