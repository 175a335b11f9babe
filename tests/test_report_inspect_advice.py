"""What an inspection advises: a capacity, a method and a policy that follow from the figures."""

from dataclasses import replace

import numpy as np
import pytest

import varlen as vl
from varlen.report.advice import advise, choose_capacity, choose_method
from varlen.report.inspection import inspect_lengths

RNG = np.random.default_rng(0)
SHORT = RNG.integers(50, 200, 3_000)
LONG_TAIL = np.r_[RNG.integers(50, 200, 3_000), [30_000] * 3]


def test_the_advice_changes_with_the_data():
    short = inspect_lengths(SHORT).advice
    tail = inspect_lengths(LONG_TAIL, capacities=[2_048, 4_096]).advice
    documents = inspect_lengths(RNG.lognormal(8, 1, 2_000).astype(int) + 1).advice

    assert short.overlong == "error"
    assert "no document is cut" in short.why
    assert tail.overlong == "split"
    assert "Splitting what is longer loses nothing" in tail.why
    assert documents.capacity > short.capacity


def test_a_capacity_that_cuts_many_documents_is_not_chosen():
    lengths = np.r_[np.full(900, 500), np.full(100, 3_000)]

    found = inspect_lengths(lengths, capacities=[1_024, 2_048, 4_096, 8_192])

    assert found.advice.capacity == 4_096
    assert choose_capacity(found.capacities[:2]).capacity == 2_048


def rows(at, **changes):
    """The same figures with some packings changed."""
    return replace(at, packings=tuple(replace(row, **changes.get(row.name, {})) for row in at.packings))


LEVEL = {"packs": 100, "fill": 0.99, "work_imbalance": 1.2, "length_correlation": 0.0}
EQUAL = dict.fromkeys(("best_fit", "best_fit_decreasing", "balanced"), LEVEL)


def test_a_capacity_that_cuts_many_documents_by_little_is_not_chosen():
    lengths = np.r_[np.full(900, 500), np.full(100, 1_100)]

    found = inspect_lengths(lengths, capacities=[1_024, 2_048])

    assert found.at(1_024).truncation_share < 0.05
    assert found.advice.capacity == 2_048
    assert "at 1,024 it would be 10.0 % of the documents" in found.advice.why


def test_a_capacity_whose_packs_stay_empty_is_not_chosen_for_its_smallness():
    found = inspect_lengths([600] * 900, capacities=[1_000, 1_250])

    assert found.advice.capacity == 1_250
    assert "packs are 96.00 % full; at 1,000 at most 60.00 %" in found.advice.why


@pytest.mark.parametrize(
    ("changed", "chosen"),
    [
        ({}, "best_fit"),
        ({"balanced": {"work_imbalance": 1.01}}, "balanced"),
        ({"balanced": {"work_imbalance": 1.18}}, "best_fit"),
        ({"best_fit": {"packs": 102, "fill": 0.97}}, "best_fit_decreasing"),
        ({"best_fit": {"length_correlation": 0.6}, "balanced": {"packs": 101}}, "best_fit_decreasing"),
    ],
)
def test_the_method_follows_fill_evenness_and_likeness(changed, chosen):
    at = inspect_lengths(SHORT, capacities=[8_192]).at(8_192)

    changes = {name: level | changed.get(name, {}) for name, level in EQUAL.items()}

    assert choose_method(rows(at, **changes)) == chosen


def test_documents_whose_neighbours_are_alike_are_to_be_shuffled():
    found = inspect_lengths(SHORT, capacities=[8_192])
    order = {name: LEVEL | {"length_correlation": 0.9} for name in EQUAL}
    order["best_fit"] = LEVEL | {"length_correlation": 0.6}

    mixed, sorted_ = (
        advise((rows(found.at(8_192), **changes),), found.padding, found.distribution, 8)
        for changes in (EQUAL, order)
    )

    assert mixed.method == sorted_.method == "best_fit"
    assert "so they stay a random sample" in mixed.why
    assert "so shuffle the documents first: in this order neighbours are alike" in sorted_.why


def test_packs_of_equal_lengths_are_not_advised_where_others_are_as_full():
    lengths = np.sort(RNG.lognormal(6, 0.5, 5_000).astype(int) + 1)

    found = inspect_lengths(lengths, capacities=[32_768])

    assert found.advice.method == "balanced"
    assert found.advised.length_correlation < 0.1
    assert "balanced mixes lengths" in found.advice.why
    assert found.at(32_768).packing("best_fit_decreasing").length_correlation > 0.9


def test_every_word_of_the_advice_is_in_the_figures():
    found = inspect_lengths(LONG_TAIL, capacities=[2_048])

    assert found.advice.capacity == 2_048
    assert f"{100 * found.advised.fill:.1f}"[:4] in found.advice.headline
    exec(found.advice.call, {"vl": vl, "lengths": LONG_TAIL})
