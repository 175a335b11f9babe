"""`vl.lower_bound` never exceeds the fewest packs there can be, and sees what L1 and L2 see."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.packings import WHOLE, random_lengths, rounded

import varlen as vl


def fewest_packs(lengths: list[int], capacity: int, most: int) -> int:
    """The fewest packs by trying everything, long documents first; packs with equal space are tried once."""
    order = sorted((length for length in lengths if length), reverse=True)
    best = len(order)

    def place(index: int, rooms: list[int], places: list[int]) -> None:
        nonlocal best
        if len(rooms) >= best:
            return
        if index == len(order):
            best = len(rooms)
            return
        length, tried = order[index], set()
        for pack, (room, free) in enumerate(zip(rooms, places)):
            if room >= length and free and (room, free) not in tried:
                tried.add((room, free))
                rooms[pack], places[pack] = room - length, free - 1
                place(index + 1, rooms, places)
                rooms[pack], places[pack] = room, free
        place(index + 1, [*rooms, capacity - length], [*places, most - 1])

    place(0, [], [])
    return best


def l1(lengths: list[int], capacity: int) -> int:
    return -(-sum(lengths) // capacity)


def l2(lengths: list[int], capacity: int) -> int:
    """Martello and Toth's L2, straight from its definition, over every threshold up to half the capacity."""
    bounds = [0]
    for threshold in range(capacity // 2 + 1):
        alone = [s for s in lengths if s > capacity - threshold]
        halves = [s for s in lengths if Fraction(capacity, 2) < s <= capacity - threshold]
        small = [s for s in lengths if threshold <= s <= Fraction(capacity, 2)]
        space = len(halves) * capacity - sum(halves)
        bounds.append(len(alone) + len(halves) + max(0, -(-(sum(small) - space) // capacity)))
    return max(bounds)


SMALL = st.integers(1, 12).flatmap(
    lambda capacity: st.tuples(st.just(capacity), st.lists(st.integers(0, capacity), max_size=9))
)


@given(SMALL, st.sampled_from([None, 1, 2, 3]), st.sampled_from([1, 1, 2, 3]))
def test_the_bound_never_exceeds_the_fewest_packs_there_can_be(
    case: tuple[int, list[int]], max_documents: int | None, multiple: int
) -> None:
    capacity, lengths = case
    slots = [rounded(length, multiple) for length in lengths]
    fewest = fewest_packs(slots, capacity * multiple, max_documents or len(lengths) + 1)

    assert vl.lower_bound(lengths, capacity * multiple, max_documents, multiple) <= fewest
    assert vl.lower_bound(lengths, capacity * multiple, max_documents, multiple) >= l1(
        slots, capacity * multiple
    )


@given(SMALL)
def test_the_bound_is_the_larger_of_l1_and_l2(case: tuple[int, list[int]]) -> None:
    capacity, lengths = case
    assert vl.lower_bound(lengths, capacity) == max(l1(lengths, capacity), l2(lengths, capacity))


@pytest.mark.parametrize("capacity", [99, 100])
@pytest.mark.parametrize("shape", ["tail", "even", "few"])
def test_the_bound_is_the_larger_of_l1_and_l2_for_many_documents(capacity: int, shape: str) -> None:
    for seed in range(5):
        lengths = random_lengths(seed, 400, capacity, shape)
        assert vl.lower_bound(lengths, capacity) == max(l1(lengths, capacity), l2(lengths, capacity))


@given(SMALL, st.integers(0, 12))
def test_one_document_more_never_lowers_the_bound_and_adds_one_pack_at_most(
    case: tuple[int, list[int]], length: int
) -> None:
    capacity, lengths = case
    before = vl.lower_bound(lengths, capacity)

    assert before <= vl.lower_bound([*lengths, min(length, capacity)], capacity) <= before + 1


@given(SMALL)
def test_a_larger_capacity_never_raises_the_bound(case: tuple[int, list[int]]) -> None:
    capacity, lengths = case
    bounds = [vl.lower_bound(lengths, larger) for larger in range(capacity, capacity + 6)]

    assert bounds == sorted(bounds, reverse=True)


@pytest.mark.parametrize(
    ("lengths", "capacity", "bound"),
    [
        ([], 8, 0),
        ([0, 0], 8, 0),
        ([8], 8, 1),
        ([5, 5, 5], 8, 3),  # L1 says 2: no two of them share a pack
        ([4, 4, 4], 8, 2),
        ([6, 3, 3], 8, 2),
        ([7, 2, 2, 2, 2], 8, 2),
        ([6, 6, 6, 3, 3, 3], 8, 5),  # the threes can't join the sixes, and only two of them fit a pack
        ([70, 60, 50, 33, 33, 33, 11, 7, 3], 100, 4),  # at 33: 70 and 60 alone, 149 tokens less 40 of space
    ],
)
def test_bounds_worked_out_by_hand(lengths: list[int], capacity: int, bound: int) -> None:
    assert vl.lower_bound(lengths, capacity) == bound


def test_max_documents_and_rounded_slots_raise_the_bound() -> None:
    assert vl.lower_bound([1] * 10, 100, max_documents=3) == 4
    assert vl.lower_bound([1] * 10, 16, document_multiple_of=8) == 5
    assert vl.lower_bound([1] * 10, 16) == 1


def test_no_method_goes_below_the_bound() -> None:
    for shape, capacity in itertools.product(("tail", "even", "few"), (64, 1000)):
        lengths = random_lengths(2, 800, capacity, shape)
        bound = vl.lower_bound(lengths, capacity)
        assert all(vl.pack(lengths, capacity, method).num_packs >= bound for method in WHOLE)


def test_tokens_beyond_an_int32_are_counted() -> None:
    lengths = np.full(5000, 2**20, np.int32)

    assert vl.lower_bound(lengths, 2**20) == 5000
    assert vl.lower_bound(lengths, 2**30) == 5
