"""Counting packs without making them: as many as windows hold, whatever the lengths and settings."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.errors import OverlongDocumentError
from varlen.feed.indexed.windows import WindowSettings, packs_of
from varlen.pack.window import count_packs

METHODS = ["best_fit", "best_fit", "first_fit", "next_fit", "wrapped", "balanced", "best_fit_decreasing"]


def made(lengths, **settings):
    lengths = np.asarray(lengths, np.int64)
    window = packs_of(np.zeros_like(lengths), np.arange(len(lengths)), lengths, WindowSettings(**settings))
    assert window.ledger.tokens_in == lengths.sum()
    return window.packs.num_packs


@given(
    st.lists(st.integers(0, 60), max_size=60),
    st.sampled_from([1, 7, 30, 50, 64, 400]),
    st.sampled_from([None, 1, 2, 5, 30]),
    st.sampled_from(["split", "truncate", "drop"]),
    st.sampled_from(METHODS),
    st.sampled_from([1, 1, 4]),
)
def test_as_many_packs_are_counted_as_are_made(lengths, capacity, most, overlong, method, multiple):
    settings = {
        "capacity": capacity * multiple,
        "method": method,
        "overlong": overlong,
        "max_documents": most,
        "document_multiple_of": multiple,
    }

    assert count_packs(lengths, **settings) == made(lengths, **settings)


@given(
    st.integers(0, 2**32),
    st.integers(1, 3000),
    st.sampled_from([0.1, 0.3, 0.8, 1.2, 2.0]),
    st.sampled_from([1.2, 2, 3, 6, 13, 15, 40, 1000]),
    st.sampled_from([64, 512, 8192, 2**17]),
    st.sampled_from([None, None, 2, 9, 20]),
    st.sampled_from(["split", "truncate", "drop"]),
    st.sampled_from(METHODS),
    st.sampled_from([1, 1, 16]),
)
def test_windows_of_real_sizes_are_counted_exactly(
    seed, count, spread, pieces_a_pack, capacity, most, overlong, method, multiple
):
    mean = np.log(capacity / pieces_a_pack) - spread**2 / 2
    lengths = np.random.default_rng(seed).lognormal(mean, spread, count).clip(0, 3 * capacity).astype(int)
    settings = {
        "capacity": capacity,
        "method": method,
        "overlong": overlong,
        "max_documents": most,
        "document_multiple_of": multiple,
    }

    assert count_packs(lengths, **settings) == made(lengths, **settings)


def test_an_overlong_document_is_refused_as_by_the_packer():
    with pytest.raises(OverlongDocumentError, match="50"):
        count_packs([50], capacity=10, overlong="error")
