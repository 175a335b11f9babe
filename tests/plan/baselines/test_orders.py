"""Orders put packs where their names say, on each rank alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.plan.baselines.packed import ORDERS, Order, ordered

PACKS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), max_size=40)


@given(PACKS, st.sampled_from(ORDERS))
def test_every_pack_stands_once_within_its_group(packs: list[tuple[int, int]], order: Order) -> None:
    work = np.array([pack[0] for pack in packs], np.float64)
    group_of = np.array([pack[1] for pack in packs], np.int32)

    found = ordered(work, group_of, order)

    assert sorted(found.tolist()) == list(range(len(packs)))
    assert group_of[found].tolist() == sorted(group_of.tolist())


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("given", [4, 1, 5, 2, 3]),
        ("long_first", [5, 4, 3, 2, 1]),
        ("long_last", [1, 2, 3, 4, 5]),
        ("long_middle", [1, 3, 5, 4, 2]),
        ("long_ends", [5, 3, 1, 2, 4]),
    ],
)
def test_heavy_packs_stand_where_the_order_says(order: Order, expected: list[float]) -> None:
    work = np.array([4.0, 1, 5, 2, 3, 9, 8])
    group_of = np.array([0, 0, 0, 0, 0, 1, 1], np.int32)

    found = work[ordered(work, group_of, order)]

    assert found[:5].tolist() == expected
    assert sorted(found[5:].tolist()) == [8, 9]


def test_random_is_the_same_every_time_and_no_other_order() -> None:
    work, group_of = np.arange(50.0), np.zeros(50, np.int32)

    found = ordered(work, group_of, "random")

    assert found.tolist() == ordered(work, group_of, "random").tolist()
    assert found.tolist() not in [ordered(work, group_of, order).tolist() for order in ORDERS[:-1]]
