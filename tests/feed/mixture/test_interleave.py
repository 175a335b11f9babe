"""Sources of a mixture: each keeps to its share within one document, and the kernel does what the reference does."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from tests.oracles import feed as reference

from varlen.feed import kernels

SOURCES = st.lists(
    st.tuples(st.floats(0.01, 100), st.lists(st.integers(0, 1000), max_size=80)), min_size=1, max_size=6
)


WITH_WINDOWS = st.lists(
    st.tuples(st.floats(0.01, 100), st.lists(st.integers(-1, 30), max_size=80)), min_size=1, max_size=6
)


def interleaved(room, sources, most, counts=None, places=None):
    weights = np.array([weight for weight, _ in sources])
    lengths = np.array([n for _, documents in sources for n in documents], dtype=np.int64)
    offsets = np.cumsum([0, *(len(documents) for _, documents in sources)]).astype(np.int64)
    counts = np.zeros(len(sources), dtype=np.int64) if counts is None else counts
    places = offsets[:-1].copy() if places is None else places
    choices = np.full(most, -1, dtype=np.int64)
    found = room.interleave(lengths, places, offsets[1:], weights / weights.sum(), counts, most, choices)
    return choices[:found].tolist(), counts.tolist()


@given(SOURCES | WITH_WINDOWS, st.integers(0, 300))
@example([(1, [3, -1, 1]), (1, [2, 0]), (1, [4])], 4)
def test_the_kernel_does_what_the_reference_does(sources, most):
    places = [np.cumsum([0, *(len(documents) for _, documents in sources)])[:-1] for _ in range(2)]
    found = interleaved(kernels, sources, most, places=places[0])
    assert found == interleaved(reference, sources, most, places=places[1])
    assert places[0].tolist() == places[1].tolist()


@given(WITH_WINDOWS)
def test_where_a_window_begins_is_passed_as_if_nothing_had_been_there(sources):
    without = [(weight, [n for n in documents if n >= 0]) for weight, documents in sources]
    found = interleaved(kernels, sources, 300)[0]
    assert found == interleaved(kernels, without, 300)[0][: len(found)]


@given(SOURCES)
def test_no_source_is_further_from_its_share_than_one_document(sources):
    choices, counts = interleaved(kernels, sources, 500)
    longest = max((n for _, documents in sources for n in documents), default=0)
    shares = np.array([weight for weight, _ in sources])
    shares = shares / shares.sum()
    places, taken = [0] * len(sources), np.zeros(len(sources))
    for choice in choices:
        taken[choice] += sources[choice][1][places[choice]]
        places[choice] += 1
        assert np.abs(taken - shares * taken.sum()).max() <= longest * (1 + 1e-9)
    assert taken.tolist() == counts
    if len(choices) < 500:  # it ends where the source whose turn it is has no more
        assert any(place == len(documents) for place, (_, documents) in zip(places, sources))


@given(SOURCES, st.integers(1, 40))
def test_documents_may_be_asked_for_bit_by_bit(sources, at_once):
    whole, _ = interleaved(kernels, sources, 200)
    counts, places, found = np.zeros(len(sources), dtype=np.int64), [0] * len(sources), []
    while len(found) < 200:
        left = [(weight, documents[place:]) for (weight, documents), place in zip(sources, places)]
        some, _ = interleaved(kernels, left, min(at_once, 200 - len(found)), counts)
        for choice in some:
            places[choice] += 1
        found += some
        if len(some) < at_once:
            break
    assert found == whole


def test_shares_are_those_of_the_weights_and_ties_go_by_order():
    choices, counts = interleaved(kernels, [(1, [1] * 99), (1, [1] * 99), (2, [1] * 99)], 8)
    assert counts == [2, 2, 4]
    assert interleaved(kernels, [(1, [5] * 9), (1, [5] * 9)], 4)[0] == [0, 1, 0, 1]
    assert len(choices) == 8
