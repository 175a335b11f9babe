"""Documents are given to groups: kernels equal references, within memory, as even as can be, or proven so."""

import importlib.util
import itertools
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from tests.oracles import plan_assign as reference
from tests.support.rarely import examples

from varlen import jit
from varlen.errors import LengthsError, MissingExtraError, PlanError, SettingError
from varlen.plan import kernels_assign as kernels
from varlen.plan.assign import ENOUGH, assign, improve_exactly, lightest_possible


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


def test_the_oracle_itself_is_right_on_what_can_be_listed():
    random = np.random.default_rng(5)
    for num_groups in (2, 3, 4):
        work = random.integers(1, 100, 7).astype(np.float64)
        ways = itertools.product(range(num_groups), repeat=7)
        assert least_possible(work, num_groups) == min(heaviest(work, way, num_groups) for way in ways)


@pytest.mark.soak
def test_on_a_thousand_small_steps_the_heaviest_group_is_within_a_hundredth_of_the_proven_optimum():
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
def test_few_documents_reach_the_optimum_beside_loads_and_within_limits(tokens, num_groups, random):
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
def test_every_document_has_a_group_and_again_the_same(work, num_groups, steps):
    group_of = assign(work, num_groups, steps=steps)

    assert group_of.shape == (len(work),)
    assert group_of.dtype == np.int32
    assert ((group_of >= 0) & (group_of < num_groups)).all()
    firsts = [group_of.tolist().index(group) for group in sorted(set(group_of.tolist()))]
    assert firsts == sorted(firsts)
    assert assign(work, num_groups, steps=steps).tolist() == group_of.tolist()


@given(st.lists(st.floats(0, 1e6), max_size=12), st.lists(st.floats(0, 1e6), min_size=1, max_size=5))
def test_the_bound_is_never_over_what_is_reached(work, loads):
    group_of = assign(work, len(loads), loads=loads)

    floor = lightest_possible(np.array(work), np.array(loads))
    assert floor <= heaviest(work, group_of, len(loads), loads) * (1 + 1e-12)
    assert floor >= max([*work, *loads])
    assert floor >= (sum(work) + sum(loads)) / len(loads) * (1 - 1e-12)


@pytest.mark.parametrize(("count", "num_groups"), [(512, 4), (8192, 64), (60, 20), (33, 16)])
def test_many_documents_are_even_to_a_thousandth_of_the_bound(count, num_groups):
    random = np.random.default_rng(count)
    work = heavy_tailed(random, count)

    reached = heaviest(work, assign(work, num_groups), num_groups)

    assert reached <= 1.001 * lightest_possible(work, np.zeros(num_groups))


def test_dividing_three_groups_anew_lightens_what_no_exchange_does():
    random = np.random.default_rng(3)
    over = []
    for _ in range(20):
        work = random.uniform(50, 100, 48)
        reached = heaviest(work, assign(work, 12), 12)
        over.append(reached / lightest_possible(work, np.zeros(12)) - 1)
        assert reached <= heaviest(work, assign(work, 12, steps=1), 12)

    assert np.mean(over) < 0.001  # exchanges alone leave 0.0016


@given(st.lists(st.integers(1, 1000), min_size=3, max_size=3))
def test_equal_shares_beside_unequal_loads_are_found(loads):
    work = np.array([1000, 2000, 3000]) - loads

    assert sorted((np.bincount(assign(work, 3, loads=loads), work, 3) + loads).tolist())[-1] <= 3000


def test_a_group_that_has_work_before_gets_less():
    group_of = assign([4.0, 4.0, 4.0, 4.0], 3, loads=[8.0, 0.0, 0.0])

    assert np.bincount(group_of, minlength=3).tolist() == [0, 2, 2]


def test_memory_moves_documents_where_work_alone_would_not():
    work, tokens = [9.0, 1.0, 1.0, 1.0], [10, 10, 10, 10]

    assert np.bincount(assign(work, 2)).tolist() == [1, 3]
    assert np.bincount(assign(work, 2, tokens=tokens, token_limit=20)).tolist() == [2, 2]
    assert np.bincount(assign(work, 2, tokens=tokens, token_limit=[10, 30])).tolist() == [1, 3]


def test_a_tight_fit_is_found_though_dealing_by_work_misses_it():
    tokens = [6, 6, 4, 4, 4]

    group_of = assign([1.0, 9.0, 1.0, 1.0, 1.0], 2, tokens=tokens, token_limit=12)

    assert sorted(np.bincount(group_of, tokens, 2).tolist()) == [12, 12]


@pytest.mark.parametrize(
    ("work", "groups", "settings", "error", "words"),
    [
        ([1.0, -2.0], 2, {}, LengthsError, r"weight -2.0 of item 1 is negative"),
        ([[1.0]], 2, {}, LengthsError, "one dimension"),
        ([1.0], 0, {}, SettingError, "number of groups must be a whole number of at least 1"),
        ([1.0], 2.0, {}, SettingError, "got 2.0"),
        ([1.0], 2, {"steps": 0}, SettingError, "steps must be .* got 0"),
        ([1.0], 2, {"loads": [1.0]}, LengthsError, "1 loads for 2 groups; pass one per group"),
        ([1.0], 1, {"loads": [-1.0]}, LengthsError, "loads of groups before: weight -1.0"),
        ([1.0], 2, {"token_limit": 5}, SettingError, "pass the length of each document"),
        ([1.0], 2, {"tokens": [1, 2], "token_limit": 5}, LengthsError, "must be 1 whole .* got 2"),
        ([1.0], 2, {"tokens": [1.5], "token_limit": 5}, LengthsError, "some of them fractions"),
        ([1.0], 2, {"tokens": [1], "token_limit": -5}, SettingError, "got -5"),
        ([1.0], 2, {"tokens": [1], "token_limit": [5]}, SettingError, "one for each of 2"),
        ([1.0], 2, {"tokens": [1], "token_limit": 5.0}, SettingError, "whole number"),
        (
            [1.0, 2.0, 3.0],
            2,
            {"tokens": [1, 70, 80], "token_limit": 60},
            PlanError,
            r"document 1 of 70 tokens fits no group, which holds 60 .* \(2 of 3 .* raise the limit to 80",
        ),
        ([1.0], 1, {"tokens": [70], "token_limit": 60}, PlanError, "document 0 of 70 tokens"),
        (
            [1.0, 2.0, 3.0],
            2,
            {"tokens": [50, 50, 50], "token_limit": 60},
            PlanError,
            "150 tokens, and 2 groups of 60 tokens hold 120; raise the limit to at least 75",
        ),
        (
            [1.0, 2.0, 3.0],
            2,
            {"tokens": [50, 50, 50], "token_limit": [60, 95]},
            PlanError,
            "no way was found to fit 3 documents of 150 .* 60 to 95 tokens each; with .* more tokens",
        ),
    ],
)
def test_what_can_t_be_assigned_is_refused_in_a_sentence(work, groups, settings, error, words):
    with pytest.raises(error, match=words):
        assign(work, groups, **settings)


def test_the_limit_that_the_message_offers_does():
    tokens = [50, 50, 50]
    with pytest.raises(PlanError, match="with 25 more tokens a group they fit"):
        assign([1.0, 1.0, 1.0], 2, tokens=tokens, token_limit=75)

    assign([1.0, 1.0, 1.0], 2, tokens=tokens, token_limit=100)


def test_without_documents_there_is_nothing_to_assign():
    assert assign([], 4).tolist() == []
    assert assign([3.0], 4, tokens=[7], token_limit=7).tolist() == [0]


class Step(NamedTuple):
    """Documents and groups as the kernels take them."""

    order: npt.NDArray[np.int32]
    work: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.int64]
    limits: npt.NDArray[np.int64]
    loads: npt.NDArray[np.float64]

    @property
    def total(self) -> float:
        return float(self.work.sum() + self.loads.sum())


@st.composite
def steps_of_work(draw: st.DrawFn, most: int = 20, most_groups: int = 6) -> Step:
    """Many of the same work, groups with little room, groups that have work before."""
    largest = draw(st.sampled_from([1, 5, 1000]))
    scale = draw(st.sampled_from([1.0, 0.1]))
    work = np.array(draw(st.lists(st.integers(0, largest), max_size=most)), np.float64) * scale
    tokens = np.array(draw(st.lists(st.integers(0, 9), min_size=work.size, max_size=work.size)), np.int64)
    num_groups = draw(st.integers(1, most_groups))
    in_turn = np.bincount(np.arange(work.size) % num_groups, tokens, num_groups).astype(np.int64)
    limits = draw(st.sampled_from([np.full(num_groups, 2**62, np.int64), in_turn, in_turn + 2, in_turn - 1]))
    loads = draw(st.lists(st.integers(0, largest), min_size=num_groups, max_size=num_groups))
    order = np.argsort(-work, kind="stable").astype(np.int32)
    return Step(order, work, tokens, limits, np.array(loads, np.float64) * scale)


def dealt(step: Step) -> npt.NDArray[np.int32] | None:
    """A way within the limits to begin with, worse than most: documents in turn."""
    group_of = (np.arange(step.work.size) % step.loads.size).astype(np.int32)
    held = np.bincount(group_of, step.tokens, step.loads.size)
    return group_of if (held <= step.limits).all() else None


@given(steps_of_work())
def test_dealing_equals_its_reference(step):
    compiled, readable = np.empty(step.work.size, np.int32), np.empty(step.work.size, np.int32)

    left_over = kernels.deal(*step, compiled)

    assert left_over == reference.deal(*step, readable)
    assert compiled.tolist() == readable.tolist()
    assert left_over == (compiled < 0).sum()


@settings(max_examples=400)
@given(steps_of_work(), st.integers(0, 3000), st.integers(1, 4), st.sampled_from([0.0, 0.0, 0.3, 0.5]))
def test_lightening_equals_its_reference_wherever_it_stops(step, steps, near, share):
    compiled, readable = dealt(step), dealt(step)
    if compiled is None or readable is None:
        return
    enough = share * step.total

    left = kernels.lighten(*step, enough, near, steps, compiled)

    assert left == reference.lighten(*step, enough, near, steps, readable)
    assert compiled.tolist() == readable.tolist()
    assert 0 <= left <= steps
    keeps_to_limits_and_is_no_heavier(step, compiled)


@given(
    steps_of_work(most=9, most_groups=4),
    st.integers(0, 400),
    st.booleans(),
    st.sampled_from([0.0, 0.0, 0.3, 0.5]),
)
def test_searching_equals_its_reference_wherever_it_stops(step, nodes, knows_a_way, share):
    start = dealt(step) if knows_a_way else np.full(step.work.size, -1, np.int32)
    if start is None:
        return
    compiled, readable = start.copy(), start.copy()
    enough = share * step.total

    left = kernels.search(*step, enough, nodes, compiled)

    assert left == reference.search(*step, enough, nodes, readable)
    assert compiled.tolist() == readable.tolist()
    assert 0 <= left <= nodes
    if knows_a_way:
        keeps_to_limits_and_is_no_heavier(step, compiled)


@given(
    steps_of_work(),
    st.integers(0, 3000),
    st.integers(1, 8),
    st.integers(1, 60),
    st.sampled_from([0.0, 0.0, 0.3, 0.5]),
)
def test_regrouping_equals_its_reference_wherever_it_stops(step, steps, most, nodes, share):
    compiled, readable = dealt(step), dealt(step)
    if compiled is None or readable is None:
        return
    enough = share * step.total

    left = kernels.regroup(*step, enough, most, nodes, steps, compiled)

    assert left == reference.regroup(*step, enough, most, nodes, steps, readable)
    assert compiled.tolist() == readable.tolist()
    assert 0 <= left <= steps
    keeps_to_limits_and_is_no_heavier(step, compiled)


def keeps_to_limits_and_is_no_heavier(step: Step, group_of: npt.NDArray[np.int32]) -> None:
    def heaviest(way: npt.NDArray[np.int32]) -> float:
        return float((step.loads + np.bincount(way, step.work, step.loads.size)).max())

    before = dealt(step)
    assert before is not None
    assert (np.bincount(group_of, step.tokens, step.loads.size) <= step.limits).all()
    assert heaviest(group_of) <= heaviest(before) * (1 + 1e-12)


def test_without_kernels_the_groups_are_the_same(monkeypatch):
    random = np.random.default_rng(3)
    tokens = random.integers(1, 100, 40)
    settings = {"tokens": tokens, "token_limit": int(tokens.sum()) // 8 + 40, "steps": 20_000}
    compiled = assign(tokens**2, 8, **settings).tolist()
    monkeypatch.setattr(jit, "_is_enabled", False)

    readable = assign(tokens**2, 8, **settings).tolist()

    assert readable == compiled


needs_solver = pytest.mark.skipif(
    importlib.util.find_spec("highspy") is None, reason="highspy is not installed"
)


@needs_solver
def test_a_bad_assignment_becomes_the_best_there_is_and_is_proven():
    work = [8.0, 7.0, 6.0, 5.0, 4.0]

    found = improve_exactly(work, np.array([0, 0, 0, 1, 1], np.int32), 2)

    assert heaviest(work, found.group_of, 2) == 15
    assert found.is_optimal
    assert found.bound == pytest.approx(15, rel=1e-5)
    assert found.group_of.dtype == np.int32


@needs_solver
@pytest.mark.parametrize("seed", range(6))
def test_it_never_does_worse_keeps_to_limits_and_its_bound_holds(seed):
    random = np.random.default_rng(seed)
    tokens = random.integers(10, 100, 14)
    work = tokens.astype(np.float64) ** 2
    loads = random.integers(0, 3, 3) * 1000.0 if seed % 2 else np.zeros(3)
    limit = int(tokens.sum()) // 3 + 40
    settings: dict[str, Any] = {"tokens": tokens, "token_limit": limit, "loads": loads}
    start = assign(work, 3, steps=1, **settings)

    found = improve_exactly(work, start, 3, nodes=30, **settings)
    again = improve_exactly(work, start, 3, nodes=30, **settings)

    best = heaviest(work, assign(work, 3, **settings), 3, loads)
    assert np.bincount(found.group_of, tokens, 3).max() <= limit
    assert heaviest(work, found.group_of, 3, loads) <= heaviest(work, start, 3, loads)
    assert found.bound <= best * (1 + 1e-6)
    assert found.group_of.tolist() == again.group_of.tolist()
    assert (found.bound, found.nodes, found.is_optimal) == (again.bound, again.nodes, again.is_optimal)
    assert found.nodes <= 30


@needs_solver
def test_of_many_documents_those_of_the_heaviest_and_the_lightest_groups_are_rearranged():
    random = np.random.default_rng(3)
    work = random.lognormal(0, 0.5, 1500)
    start = (np.arange(1500) % 6).astype(np.int32)

    found = improve_exactly(work, start, 6, nodes=2)

    second = np.sort(np.bincount(start, work, 6))[-2]
    assert heaviest(work, found.group_of, 6) == pytest.approx(second)
    assert (found.group_of != start).any()


@needs_solver
def test_what_is_best_already_takes_no_solving():
    found = improve_exactly([9.0, 1.0, 2.0], np.array([0, 1, 1], np.int32), 2)

    assert (found.nodes, found.is_optimal, found.bound) == (0, True, 9.0)
    assert improve_exactly([], np.zeros(0, np.int32), 3).is_optimal


@needs_solver
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"nodes": 0}, SettingError, "nodes must be a whole number of at least 1, got 0"),
        (
            {"group_of": np.array([0, 2])},
            PlanError,
            r"must be 2 groups from 0 to 1; got int64 of shape \(2,\)",
        ),
        ({"group_of": np.array([0])}, PlanError, r"must be 2 groups"),
        (
            {"tokens": [9, 9], "token_limit": 10, "group_of": np.array([0, 0])},
            PlanError,
            "over the token limit in 1 of 2",
        ),
    ],
)
def test_what_can_t_be_improved_is_refused_in_a_sentence(arguments, error, words):
    with pytest.raises(error, match=words):
        improve_exactly(**({"work": [1.0, 2.0], "group_of": np.array([0, 1]), "num_groups": 2} | arguments))


@needs_solver
def test_the_solver_prints_nothing():
    # In a process of its own: what it would print comes once a process.
    script = (
        "import numpy as np\n"
        "from varlen.plan.assign import improve_exactly\n"
        "found = improve_exactly([8.0, 7.0, 6.0, 5.0, 4.0], np.array([0, 0, 0, 1, 1], np.int32), 2)\n"
        "assert found.nodes\n"
    )

    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)

    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_without_the_solver_its_installation_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "highspy", None)

    with pytest.raises(MissingExtraError, match=r'pip install "varlen\[plan\]"'):
        improve_exactly([1.0], np.array([0]), 1)
