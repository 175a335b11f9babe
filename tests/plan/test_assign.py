"""Documents are given to groups: within memory, as even as can be, and nearly as well as any way there is."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from tests.support.rarely import examples

from varlen.errors import InputError, LengthsError, PlanError, SettingError
from varlen.plan.assign import ENOUGH, assign, lightest_possible

LIMITLESS = 2**62


@njit
def best_two(sums: npt.NDArray[np.float64], best: npt.NDArray[np.float64]) -> None:
    """The heavier of two groups in the best way to divide every set of documents, all of them looked at."""
    for members in range(sums.size):
        half = members
        while True:
            heavier = max(sums[half], sums[members ^ half])
            best[members] = min(best[members], heavier)
            if half == 0:
                break
            half = (half - 1) & members


def least_possible(work: npt.NDArray[np.float64], num_groups: int) -> float:
    """The work of the heaviest group in the best of all ways, by looking at every set of documents for each group."""
    sums = np.zeros(1 << work.size)
    for item, value in enumerate(work.tolist()):
        sums[1 << item : 2 << item] = sums[: 1 << item] + value
    if num_groups == 2:
        return float(np.maximum(sums, sums[-1] - sums).min())
    two = np.full(sums.size, np.inf)
    best_two(sums, two)
    whole = np.arange(sums.size)
    return float(np.maximum(sums if num_groups == 3 else two, two[whole[::-1]]).min())


def heaviest(
    work: npt.ArrayLike, group_of: npt.ArrayLike, num_groups: int, loads: npt.ArrayLike = 0.0
) -> float:
    return float((np.asarray(loads) + np.bincount(np.asarray(group_of), np.asarray(work), num_groups)).max())


def heavy_tailed(random: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    """Work of documents of which a few are long: attention by the square of their length, the rest by length."""
    spread = random.uniform(0.5, 2.0)
    lengths = np.ceil(random.lognormal(7.0, spread, count)).clip(16, 131_072)
    return lengths * random.choice([4096.0, 16_384.0, 65_536.0]) + lengths**2


def test_the_oracle_itself_is_right_on_what_can_be_listed() -> None:
    random = np.random.default_rng(5)
    for num_groups in (2, 3, 4):
        work = random.integers(1, 100, 7).astype(np.float64)
        ways = itertools.product(range(num_groups), repeat=7)
        assert least_possible(work, num_groups) == min(heaviest(work, way, num_groups) for way in ways)


def test_on_a_thousand_small_steps_the_heaviest_group_is_within_a_hundredth_of_the_proven_optimum() -> None:
    random = np.random.default_rng(7)
    ratios = []
    for _ in range(1000):
        count, num_groups = int(random.integers(10, 17)), int(random.integers(2, 5))
        work = heavy_tailed(random, count)
        ours = heaviest(work, assign(work, num_groups), num_groups)
        floor = max(work.max(), work.sum() / num_groups)
        least = ours if ours == floor else least_possible(work, num_groups)
        ratios.append(ours / least)

    assert min(ratios) >= 1 - 1e-12
    assert np.mean(ratios) <= 1.01
    assert max(ratios) <= 1.03
    assert max(ratios) <= 1 + 2 * ENOUGH  # what is promised is that much worse than what is done


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(2, 4), st.randoms())
@examples(25)
def test_few_documents_reach_the_optimum_beside_loads_and_within_limits(
    tokens: list[int], num_groups: int, random: object
) -> None:
    work = [length * length + 40 * length for length in tokens]
    loads = [random.choice([0, 0, 500, 3000]) for _ in range(num_groups)]  # type: ignore[attr-defined]
    limit = max(sum(tokens) // num_groups + 12, max(tokens))
    best = np.inf
    for way in itertools.product(range(num_groups), repeat=len(tokens)):
        if np.bincount(way, tokens, num_groups).max() <= limit:
            best = min(best, heaviest(work, way, num_groups, loads))
    if best == np.inf:
        with pytest.raises(PlanError, match="no way was found"):
            assign(work, num_groups, tokens=tokens, token_limit=limit, loads=loads)
        return

    group_of = assign(work, num_groups, tokens=tokens, token_limit=limit, loads=loads)

    assert np.bincount(group_of, tokens, num_groups).max() <= limit
    assert best <= heaviest(work, group_of, num_groups, loads) <= best * (1 + ENOUGH)


@given(st.lists(st.floats(0, 1e15), max_size=30), st.integers(1, 9), st.integers(1, 10_000))
def test_every_document_has_a_group_and_again_the_same(
    work: list[float], num_groups: int, steps: int
) -> None:
    group_of = assign(work, num_groups, steps=steps)

    assert group_of.shape == (len(work),)
    assert group_of.dtype == np.int32
    assert ((group_of >= 0) & (group_of < num_groups)).all()
    firsts = [group_of.tolist().index(group) for group in sorted(set(group_of.tolist()))]
    assert firsts == sorted(firsts)
    assert assign(work, num_groups, steps=steps).tolist() == group_of.tolist()


@given(st.lists(st.floats(0, 1e6), max_size=12), st.lists(st.floats(0, 1e6), min_size=1, max_size=5))
def test_the_bound_is_never_over_what_is_reached(work: list[float], loads: list[float]) -> None:
    group_of = assign(work, len(loads), loads=loads)

    floor = lightest_possible(np.array(work), np.array(loads))
    assert floor <= heaviest(work, group_of, len(loads), loads) * (1 + 1e-12)
    assert floor >= max([*work, *loads])
    assert floor >= (sum(work) + sum(loads)) / len(loads) * (1 - 1e-12)


@pytest.mark.parametrize(("count", "num_groups"), [(512, 4), (8192, 64), (60, 20), (33, 16)])
def test_many_documents_are_even_to_a_thousandth_of_the_bound(count: int, num_groups: int) -> None:
    random = np.random.default_rng(count)
    work = heavy_tailed(random, count)

    reached = heaviest(work, assign(work, num_groups), num_groups)

    assert reached <= 1.001 * lightest_possible(work, np.zeros(num_groups))


def test_dividing_three_groups_anew_lightens_what_no_exchange_does() -> None:
    random = np.random.default_rng(3)
    over = []
    for _ in range(20):
        work = random.uniform(50, 100, 48)
        reached = heaviest(work, assign(work, 12), 12)
        over.append(reached / lightest_possible(work, np.zeros(12)) - 1)
        assert reached <= heaviest(work, assign(work, 12, steps=1), 12)

    assert np.mean(over) < 0.001  # exchanges alone leave 0.0016


@given(st.lists(st.integers(1, 1000), min_size=3, max_size=3))
def test_equal_shares_beside_unequal_loads_are_found(loads: list[int]) -> None:
    work = np.array([1000, 2000, 3000]) - loads

    assert sorted((np.bincount(assign(work, 3, loads=loads), work, 3) + loads).tolist())[-1] <= 3000


def test_a_group_that_has_work_before_gets_less() -> None:
    group_of = assign([4.0, 4.0, 4.0, 4.0], 3, loads=[8.0, 0.0, 0.0])

    assert np.bincount(group_of, minlength=3).tolist() == [0, 2, 2]


def test_memory_moves_documents_where_work_alone_would_not() -> None:
    work, tokens = [9.0, 1.0, 1.0, 1.0], [10, 10, 10, 10]

    assert np.bincount(assign(work, 2)).tolist() == [1, 3]
    assert np.bincount(assign(work, 2, tokens=tokens, token_limit=20)).tolist() == [2, 2]
    assert np.bincount(assign(work, 2, tokens=tokens, token_limit=[10, 30])).tolist() == [1, 3]


def test_a_tight_fit_is_found_though_dealing_by_work_misses_it() -> None:
    tokens = [6, 6, 4, 4, 4]

    group_of = assign([1.0, 9.0, 1.0, 1.0, 1.0], 2, tokens=tokens, token_limit=12)

    assert sorted(np.bincount(group_of, tokens, 2).tolist()) == [12, 12]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"work": [1.0, -2.0], "num_groups": 2}, LengthsError, r"weight -2.0 of item 1 is negative"),
        ({"work": [[1.0]], "num_groups": 2}, LengthsError, "one dimension"),
        (
            {"work": [1.0], "num_groups": 0},
            SettingError,
            "number of groups must be a whole number of at least 1",
        ),
        ({"work": [1.0], "num_groups": 2.0}, SettingError, "got 2.0"),
        ({"work": [1.0], "num_groups": 2, "steps": 0}, SettingError, "steps must be .* got 0"),
        (
            {"work": [1.0], "num_groups": 2, "loads": [1.0]},
            LengthsError,
            "1 loads for 2 groups; pass one a group",
        ),
        (
            {"work": [1.0], "num_groups": 1, "loads": [-1.0]},
            LengthsError,
            "loads of groups before: weight -1.0",
        ),
        (
            {"work": [1.0], "num_groups": 2, "token_limit": 5},
            SettingError,
            "pass the length of each document",
        ),
        (
            {"work": [1.0], "num_groups": 2, "tokens": [1, 2], "token_limit": 5},
            LengthsError,
            "must be 1 whole .* got 2",
        ),
        (
            {"work": [1.0], "num_groups": 2, "tokens": [1.5], "token_limit": 5},
            LengthsError,
            "some of them fractions",
        ),
        ({"work": [1.0], "num_groups": 2, "tokens": [1], "token_limit": -5}, SettingError, "got -5"),
        (
            {"work": [1.0], "num_groups": 2, "tokens": [1], "token_limit": [5]},
            SettingError,
            "one for each of 2",
        ),
        ({"work": [1.0], "num_groups": 2, "tokens": [1], "token_limit": 5.0}, SettingError, "whole number"),
        (
            {"work": [1.0, 2.0, 3.0], "num_groups": 2, "tokens": [1, 70, 80], "token_limit": 60},
            PlanError,
            r"document 1 of 70 tokens fits no group, which holds 60 .* \(2 of 3 .* raise the limit to 80",
        ),
        (
            {"work": [1.0], "num_groups": 1, "tokens": [70], "token_limit": 60},
            PlanError,
            "document 0 of 70 tokens",
        ),
        (
            {"work": [1.0, 2.0, 3.0], "num_groups": 2, "tokens": [50, 50, 50], "token_limit": 60},
            PlanError,
            "150 tokens, and 2 groups of 60 tokens hold 120; raise the limit to at least 75",
        ),
        (
            {"work": [1.0, 2.0, 3.0], "num_groups": 2, "tokens": [50, 50, 50], "token_limit": [60, 95]},
            PlanError,
            "no way was found to fit 3 documents of 150 .* 60 to 95 tokens each; with .* more tokens",
        ),
    ],
)
def test_what_can_t_be_assigned_is_refused_in_a_sentence(
    arguments: dict[str, object], error: type[InputError], words: str
) -> None:
    with pytest.raises(error, match=words):
        assign(**arguments)  # type: ignore[arg-type]


def test_the_limit_that_the_message_offers_does() -> None:
    tokens = [50, 50, 50]
    with pytest.raises(PlanError, match="with 25 more tokens a group they fit"):
        assign([1.0, 1.0, 1.0], 2, tokens=tokens, token_limit=75)

    assign([1.0, 1.0, 1.0], 2, tokens=tokens, token_limit=100)


def test_without_documents_there_is_nothing_to_assign() -> None:
    assert assign([], 4).tolist() == []
    assert assign([3.0], 4, tokens=[7], token_limit=7).tolist() == [0]
