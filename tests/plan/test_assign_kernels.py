"""The kernels that give documents to groups return what their references do, wherever they stop."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles import plan_assign as reference

from varlen import jit
from varlen.plan import kernels_assign as kernels
from varlen.plan.assign import assign


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
def test_dealing_equals_its_reference(step: Step) -> None:
    compiled, readable = np.empty(step.work.size, np.int32), np.empty(step.work.size, np.int32)

    left_over = kernels.deal(*step, compiled)

    assert left_over == reference.deal(*step, readable)
    assert compiled.tolist() == readable.tolist()
    assert left_over == (compiled < 0).sum()


@settings(max_examples=400)
@given(steps_of_work(), st.integers(0, 3000), st.integers(1, 4), st.sampled_from([0.0, 0.0, 0.3, 0.5]))
def test_lightening_equals_its_reference_wherever_it_stops(
    step: Step, steps: int, near: int, share: float
) -> None:
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
def test_searching_equals_its_reference_wherever_it_stops(
    step: Step, nodes: int, knows_a_way: bool, share: float
) -> None:
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
def test_regrouping_equals_its_reference_wherever_it_stops(
    step: Step, steps: int, most: int, nodes: int, share: float
) -> None:
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


def test_without_kernels_the_groups_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)
    tokens = random.integers(1, 100, 40)
    settings = {"tokens": tokens, "token_limit": int(tokens.sum()) // 8 + 40, "steps": 20_000}
    compiled = assign(tokens**2, 8, **settings).tolist()
    monkeypatch.setattr(jit, "_is_enabled", False)

    readable = assign(tokens**2, 8, **settings).tolist()

    assert readable == compiled
