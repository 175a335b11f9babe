"""The order of documents before packing: a permutation whatever the shards, and the same one everywhere."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.documents import order as order_module
from varlen.documents.order import STRETCH, DocumentOrder, hashed

GOLDEN = [[2, 2], [2, 1], [2, 0], [2, 5], [0, 0], [0, 2], [0, 4], [0, 3], [2, 3], [2, 4], [2, 6], [0, 1]]
GOLDEN_DIGEST = "67bc0b1f28829a4a710a180379f26007a566ceb438ae551e76d55933a87cbf86"
GOLDEN_HASHES = [4376055813886386440, 4293584334300442099, 9602929869932826837]


def whole(documents, seed):
    """Shard and number of every document, in order."""
    order = DocumentOrder(np.array(documents, dtype=np.int64), seed)
    stretches = [order.stretch(n) for n in range(order.num_stretches)]
    return np.concatenate([np.zeros((2, 0), dtype=np.int64), *map(np.stack, stretches)], axis=1)


def as_they_lie(documents):
    return np.array([(s, d) for s, count in enumerate(documents) for d in range(count)]).reshape(-1, 2).T


def same_documents(order, documents):
    """Whether every document stands in the order exactly once."""
    return np.array_equal(order[:, np.lexsort(order[::-1])], as_they_lie(documents))


@given(st.lists(st.integers(0, 200), max_size=8), st.none() | st.integers(0, 2**70))
def test_every_document_has_one_place_whatever_the_shards(documents, seed):
    order = whole(documents, seed)

    assert same_documents(order, documents)
    if seed is None:
        assert np.array_equal(order, as_they_lie(documents))


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(0, 2**40))
def test_every_document_has_one_place_where_a_set_is_many_stretches(documents, seed):
    with pytest.MonkeyPatch.context() as patch:  # small ones, so that every corner is met
        patch.setattr(order_module, "_RUN", 4)
        order = DocumentOrder(np.array(documents, dtype=np.int64), seed, stretch=16)
        stretches = [np.stack(order.stretch(n)) for n in range(order.num_stretches)]

    assert all(stretch.shape[1] == 16 for stretch in stretches[:-1])
    assert same_documents(np.concatenate([np.zeros((2, 0), dtype=np.int64), *stretches], axis=1), documents)


@pytest.mark.parametrize(
    "documents", [[0, 70_000, 0, 1, 65, 63, 128_000, 0], [STRETCH], [STRETCH + 1], [1] * 300]
)
def test_large_sets_are_permuted_too_with_empty_shards_among_them(documents):
    order = whole(documents, 3)

    assert same_documents(order, documents)
    assert not np.array_equal(order, as_they_lie(documents))


def test_the_order_of_a_seed_is_the_same_on_every_machine_and_in_every_version():
    assert whole([5, 0, 7], 0).T.tolist() == GOLDEN
    digest = hashlib.sha256(whole([70_000, 130_000, 1], 1).astype("<i8").tobytes()).hexdigest()
    assert digest == GOLDEN_DIGEST
    assert hashed(np.array([0, 1, 2**40]), 5).tolist() == GOLDEN_HASHES


def test_another_seed_gives_another_order():
    orders = {whole([100], seed).tobytes() for seed in range(50)}

    assert len(orders) == 50


def test_neighbours_do_not_stay_together():
    documents = [90_000, 110_000]
    shards, numbers = whole(documents, 0)
    place = np.empty(sum(documents), dtype=np.int64)
    place[numbers + np.array([0, documents[0]])[shards]] = np.arange(sum(documents))

    apart = np.abs(np.diff(place))

    assert (apart < 10).mean() < 0.002  # at random: 20 of 65,536
    assert abs(np.corrcoef(place[:-1], np.arange(len(place) - 1))[0, 1]) < 0.05
    # Each sixteenth of the set is spread over all of the order, not gathered in one stretch of it.
    held = np.bincount(place[: len(place) // 16] // (len(place) // 16 + 1), minlength=16)
    assert held.min() > 0.5 * held.mean()
    assert held.max() < 1.5 * held.mean()
