"""`vl.score` counts what it says, and its correlation tells sorted packs from random ones."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support.packings import METHODS, cases, packs_of, random_lengths

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
def test_the_correlation_is_that_of_the_textbook(packs: list[list[int]]) -> None:
    expected = correlation_of(packs)
    # The denominator can pass through 0, where no two ways of counting agree to many digits.
    assume(abs(expected) < 1e3)

    assert correlation(packs) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_packs_of_one_length_each_are_fully_correlated() -> None:
    assert correlation([[3, 3, 3], [90, 90], [7, 7, 7, 7]]) == pytest.approx(1.0)


def test_packs_that_mix_long_and_short_on_purpose_are_below_zero() -> None:
    assert correlation([[3, 90], [90, 3], [3, 90]]) == pytest.approx(-1.0)


@pytest.mark.parametrize("packs", [[], [[5]], [[5, 5], [5, 5]], [[1], [2], [3]], [[1, 2, 3]]])
def test_an_undefined_correlation_is_zero(packs: list[list[int]]) -> None:
    assert correlation(packs) == 0.0


@pytest.mark.parametrize("shape", ["even", "tail"])
def test_random_packs_lie_within_a_few_spreads_of_random_and_sorted_packs_do_not(shape: str) -> None:
    lengths = random_lengths(4, 6000, 100, shape)
    random = vl.score(vl.pack(lengths, 1000, "next_fit"))
    ordered = vl.score(vl.pack(sorted(lengths), 1000, "next_fit"))

    assert abs(random.distance_from_random) < 5 * random.random_spread < 0.1
    assert ordered.length_correlation > 0.95
    assert ordered.distance_from_random > 0.9


def test_best_fit_in_input_order_stays_nearer_to_random_than_sorting_does() -> None:
    lengths = random_lengths(5, 6000, 100, "even")
    distance = {
        method: abs(vl.score(vl.pack(lengths, 1000, method)).distance_from_random)
        for method in ("best_fit", "best_fit_decreasing")
    }

    assert distance["best_fit"] < distance["best_fit_decreasing"] / 5


def test_figures_worked_out_by_hand() -> None:
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
def test_the_bound_of_a_score_is_never_above_its_packs(case: object) -> None:
    packing = vl.pack(case.lengths, **case.settings())
    score = vl.score(packing)

    assert score.packs_over_bound >= 0
    assert score.work_imbalance >= 1.0
    assert score.num_packs == packing.num_packs
    assert score.most_documents == max(map(len, packs_of(packing)), default=0)


@pytest.mark.parametrize("method", METHODS)
def test_a_score_of_nothing_and_of_one_pack_is_defined(method: object) -> None:
    for lengths in ([], [0], [5]):
        score = vl.score(vl.pack(lengths, 8, method))
        assert isinstance(score, Score)
        assert score.work_imbalance == 1.0
        assert score.length_correlation == score.random_correlation == score.random_spread == 0.0
        assert "work, max / mean" in str(score)


def test_slots_that_are_rounded_up_do_not_change_what_random_means() -> None:
    # With slots of 64, lengths of 1 to 64 take the same space: any order of them is as random as any other.
    lengths = random_lengths(6, 4000, 64, "even")
    score = vl.score(vl.pack(lengths, 640, "next_fit", document_multiple_of=64))

    assert score.random_spread > 0
    assert abs(score.distance_from_random) < 5 * score.random_spread


def test_a_score_is_the_same_every_time() -> None:
    packing = vl.pack(random_lengths(7, 500, 100), 500)

    assert vl.score(packing) == vl.score(packing)


@pytest.mark.parametrize("work", [(0, 0), (-1, 1), (1,), "ab", None])
def test_work_that_can_not_be_is_refused_by_a_score(work: object) -> None:
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
def test_a_packing_made_by_hand_that_can_not_be_is_refused(changes: dict[str, Any], words: str) -> None:
    packing = vl.pack([6, 2, 5, 3], 8)
    arrays = {name: value if name == "capacity" else np.array(value) for name, value in changes.items()}

    with pytest.raises(SettingError, match=words):
        vl.score(dataclasses.replace(packing, **arrays))
