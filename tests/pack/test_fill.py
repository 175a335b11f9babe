"""Filling packs to the brim: the kernel does what its reference says, and what that says is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.oracles import pack_fill as reference_fill
from tests.support.packings import UNLIMITED, random_lengths

from varlen.pack import kernels_arrange
from varlen.pack.assign import fill

Filling = tuple[np.ndarray, np.ndarray, int, int, int, bool]
"""Order, slots, capacity, least, max_documents, from_first."""


def int32(values: Any) -> np.ndarray:
    return np.array(values, np.int32)


@st.composite
def fillings(draw: st.DrawFn) -> Filling:
    """Items that packs are filled with: long and short, of slot 0, in words of sums and over their edges."""
    capacity = draw(st.sampled_from([1, 5, 30, 63, 64, 65, 128, 200, 1000, 70_000, 10**6, 2**31 - 1]))
    parts = draw(st.sampled_from([1, 2, 4, 12]))
    slots = draw(st.lists(st.integers(0, max(capacity // parts, 1)), max_size=60))
    order = draw(st.permutations(range(len(slots)))) if draw(st.booleans()) else list(range(len(slots)))
    least = int(capacity * draw(st.sampled_from([0.0, 0.5, 0.9, 0.995, 1.0])))
    most = draw(st.sampled_from([1, 2, 5, UNLIMITED, UNLIMITED]))
    return int32(order[: draw(st.integers(0, 60))]), int32(slots), capacity, least, most, draw(st.booleans())


def run(room: Any, filling: Filling) -> tuple[int, list[int]]:
    pack_of = np.full(filling[1].size, -7, np.int32)
    return int(room.fill(*filling, pack_of)), pack_of.tolist()


@given(fillings())
def test_fill_equals_its_reference(filling: Filling) -> None:
    assert run(kernels_arrange, filling) == run(reference_fill, filling)


@pytest.mark.parametrize("shape", ["tail", "even", "few"])
@pytest.mark.parametrize("capacity", [600, 5000, 300_000])
@pytest.mark.parametrize("from_first", [False, True])
def test_fill_equals_its_reference_for_many_items(shape: str, capacity: int, from_first: bool) -> None:
    slots = int32(random_lengths(4, 1500, min(capacity, 9000), shape))
    order = np.argsort(-slots if from_first else slots * 0, kind="stable").astype(np.int32)
    filling = (order, slots, capacity, int(0.995 * capacity), UNLIMITED, from_first)

    assert run(kernels_arrange, filling) == run(reference_fill, filling)


@given(fillings())
@example(
    (int32([0]), int32([31, 1]), 63, 31, 1, False)
)  # alone it fills a pack, and with another there are too many
def test_packs_hold_enough_and_not_too_much_and_what_is_left_fills_no_pack_alone(filling: Filling) -> None:
    order, slots, capacity, least, most, _ = filling
    num_packs, packs = run(reference_fill, filling)
    pack_of = int32(packs)

    for pack in range(num_packs):
        held = slots[pack_of == pack]
        assert max(least, 1) <= held.sum(dtype=np.int64) <= capacity
        assert 0 < held.size <= most
    assert not (pack_of[slots == 0] >= 0).any()
    assert set(packs) <= set(range(-1, num_packs))
    assert not any(packs[item] < 0 and 0 < least <= slots[item] for item in order.tolist())


def test_a_pack_is_filled_by_those_that_leave_no_space() -> None:
    # 60 around which, 25 + 15 that fit; 30 comes first and leaves 10.
    slots = int32([60, 30, 25, 15, 70])
    assert fill(int32([0]), slots, 100, 0.9, UNLIMITED)[0].tolist() == [0, -1, 0, 0, -1]
    # From the piece in turn on, and round; or from the first on.
    around = int32([40, 60, 40])
    assert fill(int32([1]), around, 100, 1.0, UNLIMITED)[0].tolist() == [-1, 0, 0]
    assert fill(int32([1]), around, 100, 1.0, UNLIMITED, from_first=True)[0].tolist() == [0, 0, -1]


def test_of_many_that_fit_only_the_last_are_chosen() -> None:
    # Ten of 9 and one of 5 fit, and leave 5: nine of 9 and one of 19 leave nothing, and the first three stay.
    packs = fill(int32([0]), int32([9] * 10 + [5, 19]), 100, 1.0, UNLIMITED)[0].tolist()

    assert packs.count(0) == 10
    assert (packs[:3], packs[10:]) == ([0, 0, 0], [-1, 0])


def test_where_nothing_fills_packs_it_is_soon_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    filling = reference_fill._filling
    monkeypatch.setattr(reference_fill, "_filling", lambda *a: tried.append(1) or filling(*a))
    slots = int32([5] * 3000)
    run(reference_fill, (np.arange(3000, dtype=np.int32), slots, 8, 8, UNLIMITED, False))

    assert 0 < len(tried) <= reference_fill.FAILED + 1
