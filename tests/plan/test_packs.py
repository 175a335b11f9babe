"""A number of packs that was asked for: all of them used, none over its limits, the heaviest light."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.errors import SettingError
from varlen.plan.partition import even_packs, even_ways, halved, packed

CAPACITY = 64
LENGTHS = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=30)


def test_the_heaviest_pack_is_cut_first_and_into_even_halves() -> None:
    work = np.array([5.0, 4.0, 5.0, 4.0, 3.0, 3.0])
    pack_of = np.array([0, 1, 0, 1, 2, 2], np.int32)

    assert halved(pack_of, 4, work).tolist() == [0, 1, 3, 1, 2, 2]
    assert halved(pack_of, 5, work).tolist() == [0, 1, 3, 4, 2, 2]
    assert halved(pack_of, 6, work).tolist() == [0, 1, 3, 4, 2, 5]
    assert halved(np.zeros(4, np.int32), 2, np.array([1.0, 6.0, 2.0, 3.0])).tolist() == [0, 1, 0, 0]


@given(LENGTHS, st.integers(1, 4), st.data())
def test_as_many_packs_as_asked_for_hold_every_document(
    lengths: list[int], most: int, data: st.DataObject
) -> None:
    sizes = np.array(lengths, np.int32)
    work = 10.0 * sizes + sizes.astype(np.float64) ** 2
    fullest, fewest = packed(sizes, CAPACITY, most)
    number = data.draw(st.integers(fewest, len(lengths)))

    ways = even_ways(sizes, work, fullest, number, CAPACITY, most)
    for pack_of in ways:
        assert np.bincount(pack_of, weights=sizes).max() <= CAPACITY
        assert 1 <= np.bincount(pack_of).min() <= np.bincount(pack_of).max() <= most
        assert len(np.bincount(pack_of)) == number
    heaviest = np.bincount(even_packs(sizes, work, number, CAPACITY, most), weights=work).max()
    assert heaviest == min(np.bincount(pack_of, weights=work).max() for pack_of in ways)
    assert heaviest <= np.bincount(fullest, weights=work).max() * (1 + 1e-12)


def test_packs_that_can_t_be_made_are_refused() -> None:
    lengths = np.array([5, 5, 5], np.int32)

    with pytest.raises(SettingError, match="3 documents can't fill 4 packs"):
        even_packs(lengths, lengths.astype(np.float64), 4, 8)
    with pytest.raises(SettingError, match="2 packs of 8 tokens don't hold 3 documents; 3 do"):
        even_packs(lengths, lengths.astype(np.float64), 2, 8)
