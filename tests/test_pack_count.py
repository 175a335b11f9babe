"""Counting packs without making them: as many as WindowPacker makes, whatever the lengths and settings."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.errors import OverlongDocumentError
from varlen.pack.count import count_packs
from varlen.pack.window import WindowPacker


def made(lengths, **settings):
    packer = WindowPacker(**settings)
    return packer.add(lengths).num_packs + packer.flush().num_packs


@given(
    st.lists(st.integers(0, 60), max_size=60),
    st.sampled_from([1, 7, 30, 50, 64]),
    st.sampled_from([None, 1, 2, 5]),
    st.sampled_from(["split", "truncate", "drop"]),
    st.sampled_from(["best_fit", "next_fit", "wrapped", "balanced"]),
    st.sampled_from([1, 1, 4]),
    st.booleans(),
)
def test_as_many_packs_are_counted_as_are_made(lengths, capacity, most, overlong, method, multiple, is_whole):
    window = max(len([n for n in lengths if n]), 1) if is_whole else 20
    settings = {
        "capacity": capacity * multiple,
        "window": window,
        "method": method,
        "overlong": overlong,
        "max_documents": most,
        "document_multiple_of": multiple,
    }

    assert count_packs(lengths, **settings) == made(lengths, **settings)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("spread", [0.3, 1.2, 2.0])
def test_full_windows_of_real_sizes_are_counted_exactly(seed, spread):
    lengths = np.clip(np.random.default_rng(seed).lognormal(6, spread, 2048), 1, 8192).astype(int)
    for limit in (None, 9):
        settings = {"capacity": 8192, "window": 2048, "overlong": "error", "max_documents": limit}
        assert count_packs(lengths, **settings) == made(lengths, **settings)


def test_an_overlong_document_is_refused_as_by_the_packer():
    with pytest.raises(OverlongDocumentError, match="50"):
        count_packs([50], capacity=10, window=4, overlong="error")
