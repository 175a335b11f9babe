"""`vl.score` counts what it says, and `vl.lower_bound` never exceeds the fewest packs there can be."""

import dataclasses
import itertools
import math
import statistics
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support.packings import METHODS, WHOLE, cases, packs_of, random_lengths, rounded

import varlen as vl
from varlen.errors import SettingError
from varlen.pack.score import Score, length_correlation


def correlation_of(packs: list[list[int]]) -> float:
    """The intraclass correlation of log length by the textbook: one-way analysis of variance, uneven groups."""
    values = [[math.log(length) for length in pack] for pack in packs]
    flat = [value for pack in values for value in pack]
    groups, total = len(values), len(flat)
    if groups < 2 or total <= groups:
        return 0.0
    grand = statistics.fmean(flat)
    between = sum(len(pack) * (statistics.fmean(pack) - grand) ** 2 for pack in values) / (groups - 1)
    within = sum((value - statistics.fmean(pack)) ** 2 for pack in values for value in pack) / (
        total - groups
    )
    size = (total - sum(len(pack) ** 2 for pack in values) / total) / (groups - 1)
    below = between + (size - 1) * within
    return (between - within) / below if below > 1e-12 else 0.0


def correlation(packs: list[list[int]]) -> float:
    offsets = np.cumsum([0, *map(len, packs)])
    return length_correlation([length for pack in packs for length in pack], offsets)


@given(st.lists(st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=5), max_size=8))
def test_the_correlation_is_that_of_the_textbook(packs):
    expected = correlation_of(packs)
    # The denominator can pass through 0, where no two ways of counting agree to many digits.
    assume(abs(expected) < 1e3)

    assert correlation(packs) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_packs_of_one_length_each_are_fully_correlated():
    assert correlation([[3, 3, 3], [90, 90], [7, 7, 7, 7]]) == pytest.approx(1.0)


def test_packs_that_mix_long_and_short_on_purpose_are_below_zero():
    assert correlation([[3, 90], [90, 3], [3, 90]]) == pytest.approx(-1.0)


@pytest.mark.parametrize("packs", [[], [[5]], [[5, 5], [5, 5]], [[1], [2], [3]], [[1, 2, 3]]])
def test_an_undefined_correlation_is_zero(packs):
    assert correlation(packs) == 0.0


@pytest.mark.parametrize("shape", ["even", "tail"])
def test_random_packs_lie_within_a_few_spreads_of_random_and_sorted_packs_do_not(shape):
    lengths = random_lengths(4, 6000, 100, shape)
    random = vl.score(vl.pack(lengths, 1000, "next_fit"))
    ordered = vl.score(vl.pack(sorted(lengths), 1000, "next_fit"))

    assert abs(random.distance_from_random) < 5 * random.random_spread < 0.1
    assert ordered.length_correlation > 0.95
    assert ordered.distance_from_random > 0.9


def test_best_fit_in_input_order_stays_nearer_to_random_than_sorting_does():
    lengths = random_lengths(5, 6000, 100, "even")
    distance = {
        method: abs(vl.score(vl.pack(lengths, 1000, method)).distance_from_random)
        for method in ("best_fit", "best_fit_decreasing")
    }

    assert distance["best_fit"] < distance["best_fit_decreasing"] / 5


def test_figures_worked_out_by_hand():
    score = vl.score(vl.pack([6, 5, 3, 2, 20], 8, overlong="drop"), work=(1, 1))

    # [6, 2] and [5, 3]: work 6 + 36 + 2 + 4 = 48 and 5 + 25 + 3 + 9 = 42
    assert (score.num_packs, score.lower_bound, score.packs_over_bound) == (2, 2, 0)
    assert (score.num_tokens, score.fill_ratio) == (16, 1.0)
    assert (score.mean_documents, score.most_documents) == (2.0, 2)
    assert score.work_imbalance == 48 / 45
    assert (score.truncated_tokens, score.dropped_tokens) == (0, 20)
    assert score.length_correlation == pytest.approx(correlation_of([[6, 2], [5, 3]]))
    assert vl.score(vl.pack([9, 4], 8, overlong="truncate")).truncated_tokens == 1
    assert vl.score(vl.pack([5, 5, 5], 8)).packs_over_bound == 0
    assert vl.score(vl.pack([3, 6, 5, 2], 8, "next_fit")).packs_over_bound == 1


@given(cases())
def test_the_bound_of_a_score_is_never_above_its_packs(case):
    packing = vl.pack(case.lengths, **case.settings())
    score = vl.score(packing)

    assert score.packs_over_bound >= 0
    assert score.work_imbalance >= 1.0
    assert score.num_packs == packing.num_packs
    assert score.most_documents == max(map(len, packs_of(packing)), default=0)


@pytest.mark.parametrize("method", METHODS)
def test_a_score_of_nothing_and_of_one_pack_is_defined(method):
    for lengths in ([], [0], [5]):
        score = vl.score(vl.pack(lengths, 8, method))
        assert isinstance(score, Score)
        assert score.work_imbalance == 1.0
        assert score.length_correlation == score.random_correlation == score.random_spread == 0.0
        assert "work, max / mean" in str(score)


def test_slots_that_are_rounded_up_do_not_change_what_random_means():
    # With slots of 64, lengths of 1 to 64 take the same space: any order of them is as random as any other.
    lengths = random_lengths(6, 4000, 64, "even")
    score = vl.score(vl.pack(lengths, 640, "next_fit", document_multiple_of=64))

    assert score.random_spread > 0
    assert abs(score.distance_from_random) < 5 * score.random_spread


def test_a_score_is_the_same_every_time():
    packing = vl.pack(random_lengths(7, 500, 100), 500)

    assert vl.score(packing) == vl.score(packing)


@pytest.mark.parametrize("work", [(0, 0), (-1, 1), (1,), "ab", None])
def test_work_that_can_not_be_is_refused_by_a_score(work):
    with pytest.raises(SettingError, match="work must be two numbers"):
        vl.score(vl.pack([3, 4], 8), work=work)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"offsets": [0, 2, 4, 4]}, r"pack 2 is empty \(1 of 3 are\)"),
        ({"offsets": [0, 2, 2, 4]}, r"pack 1 is empty \(1 of 3 are\)"),
        ({"starts": [0, 2, 0, 0]}, r"piece 1 has no token \(1 of 4 are\)"),
        ({"capacity": 7}, r"pack 0 is over capacity \(2 of 2 are\)"),
    ],
)
def test_a_packing_made_by_hand_that_can_not_be_is_refused(changes, words):
    packing = vl.pack([6, 2, 5, 3], 8)
    arrays = {name: value if name == "capacity" else np.array(value) for name, value in changes.items()}

    with pytest.raises(SettingError, match=words):
        vl.score(dataclasses.replace(packing, **arrays))


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
def test_the_bound_never_exceeds_the_fewest_packs_there_can_be(case, max_documents, multiple):
    capacity, lengths = case
    slots = [rounded(length, multiple) for length in lengths]
    fewest = fewest_packs(slots, capacity * multiple, max_documents or len(lengths) + 1)

    assert vl.lower_bound(lengths, capacity * multiple, max_documents, multiple) <= fewest
    assert vl.lower_bound(lengths, capacity * multiple, max_documents, multiple) >= l1(
        slots, capacity * multiple
    )


@given(SMALL)
def test_the_bound_is_the_larger_of_l1_and_l2(case):
    capacity, lengths = case
    assert vl.lower_bound(lengths, capacity) == max(l1(lengths, capacity), l2(lengths, capacity))


@pytest.mark.parametrize("capacity", [99, 100])
@pytest.mark.parametrize("shape", ["tail", "even", "few"])
def test_the_bound_is_the_larger_of_l1_and_l2_for_many_documents(capacity, shape):
    for seed in range(5):
        lengths = random_lengths(seed, 400, capacity, shape)
        assert vl.lower_bound(lengths, capacity) == max(l1(lengths, capacity), l2(lengths, capacity))


@given(SMALL, st.integers(0, 12))
def test_one_document_more_never_lowers_the_bound_and_adds_one_pack_at_most(case, length):
    capacity, lengths = case
    before = vl.lower_bound(lengths, capacity)

    assert before <= vl.lower_bound([*lengths, min(length, capacity)], capacity) <= before + 1


@given(SMALL)
def test_a_larger_capacity_never_raises_the_bound(case):
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
def test_bounds_worked_out_by_hand(lengths, capacity, bound):
    assert vl.lower_bound(lengths, capacity) == bound


def test_max_documents_and_rounded_slots_raise_the_bound():
    assert vl.lower_bound([1] * 10, 100, max_documents=3) == 4
    assert vl.lower_bound([1] * 10, 16, document_multiple_of=8) == 5
    assert vl.lower_bound([1] * 10, 16) == 1


def test_no_method_goes_below_the_bound():
    for shape, capacity in itertools.product(("tail", "even", "few"), (64, 1000)):
        lengths = random_lengths(2, 800, capacity, shape)
        bound = vl.lower_bound(lengths, capacity)
        assert all(vl.pack(lengths, capacity, method).num_packs >= bound for method in WHOLE)


def test_tokens_beyond_an_int32_are_counted():
    lengths = np.full(5000, 2**20, np.int32)

    assert vl.lower_bound(lengths, 2**20) == 5000
    assert vl.lower_bound(lengths, 2**30) == 5
