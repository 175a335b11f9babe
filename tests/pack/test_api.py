"""`vl.pack` and its siblings: complete, within limits, in order, deterministic; and what they refuse."""

import dataclasses
import random
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support.packings import (
    METHODS,
    POLICIES,
    WHOLE,
    arrays_of,
    cases,
    check_complete,
    check_limits,
    check_order,
    kept_lengths,
    packs_of,
    random_lengths,
    rounded,
    same_packing,
)

import varlen as vl
from varlen.errors import InputError, LengthsError, OverlongDocumentError, SettingError
from varlen.pack import kernels, pieces
from varlen.types import Ledger, Method, Overlong


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("overlong", POLICIES)
@settings(max_examples=settings.default.max_examples // 4)
@given(data=st.data())
def test_every_token_stands_in_one_pack_and_no_pack_is_over_its_limits(method, overlong, data):
    case = data.draw(cases((method,), (overlong,)))
    packing = vl.pack(case.lengths, **case.settings())
    packs = packs_of(packing)

    check_complete(packs, kept_lengths(case))
    check_limits(packs, case.capacity, case.multiple, case.max_documents)
    check_order(packs, permuted=case.seed is not None)
    if case.method != "wrapped" and case.overlong != "split":
        assert all(start == 0 for pack in packs for _, start, _ in pack)


@given(cases())
def test_the_ledger_equals_a_count_made_elsewhere(case):
    packing = vl.pack(case.lengths, **case.settings())
    pieces: dict[int, int] = defaultdict(int)
    packed = 0
    for pack in packs_of(packing):
        for document, start, stop in pack:
            pieces[document] += 1
            packed += stop - start
    kept = kept_lengths(case)
    lost = [length - part for length, part in zip(case.lengths, kept)]
    cut = [gone for gone, part in zip(lost, kept) if gone and part]
    left_out = [gone for gone, part in zip(lost, kept) if gone and not part]

    assert packing.ledger == Ledger(
        tokens_in=sum(case.lengths),
        packed=packed,
        truncated=sum(cut),
        dropped=sum(left_out),
        duplicated=0,
        documents_in=len(case.lengths),
        empty_documents=case.lengths.count(0),
        split_documents=sum(count > 1 for count in pieces.values()),
        truncated_documents=len(cut),
        dropped_documents=len(left_out),
    )
    assert packing.ledger.balance == 0


@given(cases())
def test_what_a_packing_says_of_itself_is_what_its_arrays_hold(case):
    packing = vl.pack(case.lengths, **case.settings())
    packs = packs_of(packing)
    sizes = [stop - start for pack in packs for _, start, stop in pack]

    assert [array.dtype for array in arrays_of(packing)] == [np.int64, np.int32, np.int32, np.int64]
    assert all(array.ndim == 1 and not array.flags.writeable for array in arrays_of(packing))
    assert packing.offsets[0] == 0
    assert packing.num_packs == len(packs)
    assert packing.num_pieces == len(sizes)
    assert packing.num_tokens == sum(sizes)
    assert packing.num_documents == len(case.lengths)
    assert packing.lengths.tolist() == sizes
    assert packing.slot_lengths.tolist() == [rounded(size, case.multiple) for size in sizes]
    assert packing.fill_ratio == (sum(sizes) / (len(packs) * case.capacity) if packs else 1.0)
    assert packing.to_lists() == [[document for document, _, _ in pack] for pack in packs]
    assert packing.pack_sums(packing.lengths).tolist() == [
        sum(stop - start for _, start, stop in pack) for pack in packs
    ]
    for name in ("capacity", "method", "overlong"):
        assert getattr(packing, name) == getattr(case, name)
    assert packing.document_multiple_of == case.multiple
    assert (None if packing.groups is None else packing.groups.tolist()) == case.groups


@given(cases())
def test_the_same_input_gives_the_same_bytes_whatever_form_it_has(case):
    first = vl.pack(case.lengths, **case.settings())
    given = np.array(case.lengths, np.int32)

    assert same_packing(first, vl.pack(given, **case.settings()))
    assert given.tolist() == case.lengths
    assert same_packing(first, vl.pack(np.array(case.lengths, np.float64), **case.settings()))
    spread = np.zeros(2 * len(case.lengths), np.uint16)
    spread[::2] = case.lengths
    assert same_packing(first, vl.pack(spread[::2], **case.settings()))


@given(cases(), st.integers(0, 2**64 - 1))
def test_a_seed_permutes_packs_and_changes_nothing_else(case, seed):
    given = case.settings()
    plain = packs_of(vl.pack(case.lengths, **{**given, "seed": None}))
    seeded = packs_of(vl.pack(case.lengths, **{**given, "seed": seed}))

    assert sorted(seeded) == plain


def test_seeds_give_different_orders_and_every_pack_a_chance_to_be_first():
    orders = {tuple(pack[0] for pack in vl.pack([5] * 6, 8, seed=seed).to_lists()) for seed in range(40)}

    assert len(orders) > 30
    assert {order[0] for order in orders} == set(range(6))


@given(cases(methods=WHOLE, policies=("error", "drop")))
def test_documents_of_a_group_share_a_pack(case):
    assume(case.groups is not None)
    packing = vl.pack(case.lengths, **case.settings())
    homes: dict[int, set[int]] = defaultdict(set)
    for number, pack in enumerate(packing.to_lists()):
        for document in pack:
            homes[case.groups[document]].add(number)

    assert all(len(packs) == 1 for packs in homes.values())


# "balanced" deals documents of one length out in turn, so they stand in order within each pack alone.
@given(
    st.sampled_from([method for method in METHODS if method != "balanced"]),
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(1, 30),
)
def test_documents_of_one_length_stay_in_input_order(method, capacity, length, count):
    packs = packs_of(vl.pack([min(length, capacity)] * count, capacity, method))
    flat = [piece for pack in packs for piece in pack]

    assert flat == sorted(flat)


@pytest.mark.parametrize("method", ["first_fit_decreasing", "best_fit_decreasing", "balanced"])
@given(order=st.permutations([6] * 9 + [4] * 9))
def test_of_equal_lengths_the_first_given_is_placed_first(method, order):
    sixes = [document for document, length in enumerate(order) if length == 6]
    fours = [document for document, length in enumerate(order) if length == 4]

    assert vl.pack(order, 10, method).to_lists() == sorted(sorted(pair) for pair in zip(sixes, fours))


@given(cases(methods=("next_fit",)))
def test_next_fit_keeps_all_documents_in_input_order(case):
    assume(case.groups is None)
    flat = [
        piece
        for pack in packs_of(vl.pack(case.lengths, **{**case.settings(), "seed": None}))
        for piece in pack
    ]

    assert flat == sorted(flat)


@given(cases(methods=("wrapped",)))
def test_wrapped_leaves_no_pack_but_the_last_with_space(case):
    packs = packs_of(vl.pack(case.lengths, **{**case.settings(), "seed": None}))
    for pack in packs[:-1]:
        used = sum(rounded(stop - start, case.multiple) for _, start, stop in pack)
        assert used == case.capacity or len(pack) == case.max_documents
    if case.multiple == 1 and case.max_documents is None:
        assert len(packs) == -(-sum(kept_lengths(case)) // case.capacity)


def pieces_of_full_packs(seed: int, packs: int, capacity: int) -> list[int]:
    """Lengths that fill this many packs exactly, mixed."""
    draw = random.Random(seed)
    lengths = []
    for _ in range(packs):
        cuts = sorted(draw.sample(range(1, capacity), draw.randint(0, 4)))
        lengths += [b - a for a, b in zip([0, *cuts], [*cuts, capacity])]
    draw.shuffle(lengths)
    return lengths


@pytest.mark.parametrize("seed", range(5))
def test_no_method_opens_more_packs_than_has_been_proved_of_it(seed):
    optimum = 300
    lengths = pieces_of_full_packs(seed, optimum, 100)
    packs = {method: vl.pack(lengths, 100, method).num_packs for method in METHODS}

    assert packs["wrapped"] == vl.lower_bound(lengths, 100) == optimum
    assert optimum <= packs["next_fit"] <= 2 * optimum - 1
    for method in ("first_fit", "best_fit"):  # Dosa and Sgall 2013, 2014
        assert optimum <= packs[method] <= 1.7 * optimum
    for method in ("first_fit_decreasing", "best_fit_decreasing"):  # Dosa 2007; Johnson 1973
        assert optimum <= packs[method] <= 11 / 9 * optimum + 4
    assert packs["best_fit_decreasing"] <= 1.01 * optimum  # on a set like this one


@pytest.mark.parametrize("shape", ["tail", "even", "few"])
@pytest.mark.parametrize("capacity", [64, 1000])
def test_methods_that_search_open_no_more_packs_than_next_fit(shape, capacity):
    lengths = random_lengths(1, 3000, capacity, shape)
    packs = {method: vl.pack(lengths, capacity, method).num_packs for method in WHOLE}

    for method in ("first_fit", "best_fit"):
        assert packs["best_fit_decreasing"] <= packs[method] <= packs["next_fit"]
    assert packs["first_fit_decreasing"] <= packs["next_fit"]


GOLDEN: list[tuple[Method, list[list[int]]]] = [
    # capacity 10; lengths 6 5 4 3 2 7, worked out by hand
    ("next_fit", [[0], [1, 2], [3, 4], [5]]),
    ("first_fit", [[0, 2], [1, 3, 4], [5]]),
    ("best_fit", [[0, 2], [1, 3, 4], [5]]),
    ("first_fit_decreasing", [[0, 2], [1, 4], [3, 5]]),
    ("best_fit_decreasing", [[0, 2], [1, 4], [3, 5]]),
    ("balanced", [[0, 3], [1, 2], [4, 5]]),
    ("wrapped", [[0, 1], [1, 2, 3, 4], [5]]),
]


@pytest.mark.parametrize(("method", "packs"), GOLDEN, ids=[method for method, _ in GOLDEN])
def test_packs_worked_out_by_hand(method, packs):
    assert {method for method, _ in GOLDEN} == {*METHODS}
    assert vl.pack([6, 5, 4, 3, 2, 7], capacity=10, method=method).to_lists() == packs


def test_best_fit_takes_the_fullest_pack_that_fits_where_first_fit_takes_the_first():
    lengths = [4, 7, 3]

    assert vl.pack(lengths, 10, "first_fit").to_lists() == [[0, 2], [1]]
    assert vl.pack(lengths, 10, "best_fit").to_lists() == [[0], [1, 2]]


def test_balanced_weighs_work_where_best_fit_decreasing_weighs_tokens():
    lengths = [8, 4, 4, 4, 4]

    assert vl.pack(lengths, 12, "best_fit_decreasing").to_lists() == [[0, 1], [2, 3, 4]]
    assert vl.pack(lengths, 16, "balanced", work=(0, 1)).to_lists() == [[0], [1, 2, 3, 4]]
    assert vl.pack(lengths, 16, "balanced", work=(1, 0)).to_lists() == [[0, 3], [1, 2, 4]]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("overlong", POLICIES)
def test_nothing_packs_into_no_packs(method, overlong):
    for lengths in ([], [0], [0, 0, 0]):
        packing = vl.pack(lengths, 4, method, overlong)
        assert packing.to_lists() == []
        assert packing.offsets.tolist() == [0]
        assert packing.ledger == Ledger(
            tokens_in=0, packed=0, documents_in=len(lengths), empty_documents=len(lengths)
        )
        assert packing.fill_ratio == 1.0


@pytest.mark.parametrize("method", METHODS)
def test_one_document_alone_and_packs_of_one_token(method):
    assert packs_of(vl.pack([3], 3, method)) == [[(0, 0, 3)]]
    assert packs_of(vl.pack([1, 1], 1, method)) == [[(0, 0, 1)], [(1, 0, 1)]]
    assert packs_of(vl.pack([2], 1, method, "split")) == [[(0, 0, 1)], [(0, 1, 2)]]


def test_overlong_documents_worked_out_by_hand():
    lengths = [3, 14, 5]

    assert packs_of(vl.pack(lengths, 6, overlong="split")) == [
        [(0, 0, 3), (1, 12, 14)],
        [(1, 0, 6)],
        [(1, 6, 12)],
        [(2, 0, 5)],
    ]
    assert packs_of(vl.pack(lengths, 6, overlong="truncate")) == [[(0, 0, 3)], [(1, 0, 6)], [(2, 0, 5)]]
    assert packs_of(vl.pack(lengths, 6, overlong="drop")) == [[(0, 0, 3)], [(2, 0, 5)]]
    assert packs_of(vl.pack(lengths, 6, "wrapped")) == [
        [(0, 0, 3), (1, 0, 3)],
        [(1, 3, 9)],
        [(1, 9, 14), (2, 0, 1)],
        [(2, 1, 5)],
    ]


def test_slots_are_rounded_up_and_packs_hold_fewer_documents_for_it():
    packing = vl.pack([5, 2, 6, 3], capacity=8, document_multiple_of=4)

    assert packing.to_lists() == [[0], [1, 3], [2]]
    assert packing.slot_lengths.tolist() == [8, 4, 4, 8]
    assert packing.lengths.tolist() == [5, 2, 3, 6]


def test_a_packing_can_not_be_written():
    packing = vl.pack([3, 2], 8, groups=[0, 0])

    for array in (*arrays_of(packing), packing.groups):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        packing.capacity = 9  # type: ignore[misc]


def test_groups_given_by_the_caller_stay_the_callers():
    groups = np.array([0, 0])
    packing = vl.pack([3, 2], 8, groups=groups)
    groups[0] = 5

    assert packing.groups is not None
    assert packing.groups.tolist() == [0, 0]


def test_a_group_counts_as_all_its_documents_against_max_documents():
    packing = vl.pack([1] * 6, 10, groups=[0, 0, 0, 1, 1, 1], max_documents=3)

    assert packing.to_lists() == [[0, 1, 2], [3, 4, 5]]


def test_a_packing_says_what_it_holds():
    assert repr(vl.pack([5, 9], 8, overlong="drop")) == (
        "Packing(2 documents in 1 packs of 8 tokens, 62.50% full, 3 tokens of padding, 9 tokens cut or dropped)"
    )


def test_balanced_has_room_for_all_packs_that_it_opens(replace_kernel):
    # Heavy documents are spread over all packs first; then no pack has space for a light but long group.
    many, capacity = 342, 1000
    lengths = [400] * (2 * many) + [61] * (10 * many)
    groups = [*range(2 * many), *(2 * many + place // 10 for place in range(10 * many))]
    balanced, opened = kernels.balanced, []

    def watched(*arguments: Any) -> int:
        used: int = balanced(*arguments)
        opened.append((used, arguments[7]))
        return used

    replace_kernel(kernels, "balanced", watched)
    packing = vl.pack(lengths, capacity, "balanced", groups=groups, work=(0, 1))

    assert opened[0][0] == 3 * many
    assert all(used <= most for used, most in opened)
    check_complete(packs_of(packing), lengths)
    check_limits(packs_of(packing), capacity, 1, None)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("grouped", [False, True])
def test_a_capacity_of_many_millions_takes_no_memory_of_that_size(method, grouped):
    capacity, most = 2**25, 3 if grouped else None
    lengths = [capacity // 2 + 1, capacity // 2 - 1, capacity // 3, 5] * 2
    groups = list(range(len(lengths))) if grouped and method != "wrapped" else None
    vl.pack([3, 4], 8, method, groups=groups and [0, 1])

    tracemalloc.start()
    packing = vl.pack(lengths, capacity, method, groups=groups, max_documents=most)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    check_complete(packs_of(packing), lengths)
    assert peak < 2**24


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
    (5, r"one whole number per document; a int was given, and it has the shape \(\)"),
    (np.zeros((0, 3)), r"one whole number per document; a ndarray was given, and it has the shape \(0, 3\)"),
    ((length for length in [1, 2]), r"one whole number per document; a generator was given"),
    ([[1], [2, 3]], "documents were given: entry 0 is a list of 1"),
    (
        torch.ones(2, requires_grad=True),
        "one whole number per document; a Tensor was given, and numpy can't read it",
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
def test_lengths_that_can_not_be_are_refused_by_name(function, lengths, words):
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
def test_lengths_come_in_many_forms(lengths):
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
    ({"method": "best"}, "method must be one of next_fit, .*, balanced.*; got 'best'"),
    ({"method": None}, "method must be one of next_fit, .*, balanced.*; got None"),
    ({"method": ["next_fit"]}, "method must be one of"),
    ({"overlong": "cut"}, f"overlong must be one of {', '.join(get_args(Overlong))}; got 'cut'"),
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
def test_settings_out_of_range_are_refused_with_the_way_out(settings, words):
    with pytest.raises(SettingError, match=words) as caught:
        vl.pack([5, 6], **{"capacity": 8, **settings})
    assert isinstance(caught.value, InputError)
    assert isinstance(caught.value, ValueError)


def test_documents_that_do_not_fit_are_refused_with_the_way_out():
    words = (
        r"document 1 has 9 tokens but capacity is 8 \(2 of 4 documents are too long\); "
        r'pass overlong="split", "truncate" or "drop", or raise capacity'
    )
    with pytest.raises(OverlongDocumentError, match=words):
        vl.pack([3, 9, 8, 12], capacity=8)


def test_every_policy_is_a_row_of_the_table():
    assert tuple(pieces.POLICIES) == get_args(Overlong)


def test_groups_that_do_not_fit_are_refused_with_the_limit_that_they_break():
    with pytest.raises(OverlongDocumentError) as caught:
        vl.pack([5, 2, 4, 1], capacity=8, groups=[7, 3, 7, 3])
    assert str(caught.value) == (
        "group 7 takes up 9 tokens in 2 documents but a pack holds 8 tokens (1 of 2 groups is too long); "
        'pass overlong="drop", or raise the limit'
    )
    with pytest.raises(OverlongDocumentError, match="but a pack holds 8 tokens and 1 documents"):
        vl.pack([1, 1], capacity=8, groups=[0, 0], max_documents=1)


@pytest.mark.parametrize(
    "groups", [[0], [0, 1, 2], [0.5, 1.0], [[0], [1]], [[0], [1, 2]], 3, ["a", "b"], [True, False]]
)
def test_groups_that_are_not_one_whole_number_a_document_are_refused(groups):
    with pytest.raises(LengthsError, match=r"groups must be one whole number per document, \[2\]"):
        vl.pack([5, 2], capacity=8, groups=groups)


def test_more_pieces_than_a_call_takes_are_refused_before_they_are_cut():
    for method in ("best_fit_decreasing", "wrapped"):
        with pytest.raises(
            LengthsError, match=r"pieces, and 2,147,483,647 pieces are the most of one call; raise"
        ):
            vl.pack([2**31 - 1, 2**31 - 1], capacity=1, method=method, overlong="split")


@pytest.mark.parametrize("method", ["best_fit_decreasing", "best_fit", "first_fit", "next_fit", "balanced"])
def test_a_capacity_far_above_the_documents_costs_no_memory(method):
    packing = vl.pack([5, 2, 6], capacity=2**31 - 1, method=method)

    assert packing.to_lists() == [[0, 1, 2]]
    assert packing.capacity == 2**31 - 1
    assert vl.pack([5, 2, 6], 2**31 - 1, method, max_documents=2).num_packs == 2


def test_the_longest_document_that_an_int32_holds_can_be_packed():
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
def test_a_bound_refuses_what_packing_refuses(arguments, error, words):
    with pytest.raises(error, match=words):
        vl.lower_bound([5, 6], **{"capacity": 8, **arguments})


def test_a_bound_refuses_the_longest_document_also_where_slots_are_rounded_up():
    with pytest.raises(
        OverlongDocumentError, match="document 1 has 2,147,483,647 tokens but capacity is 2,048"
    ):
        vl.lower_bound([1, 2**31 - 1], capacity=2048, document_multiple_of=1024)
