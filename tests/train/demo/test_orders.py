"""Orders: every document once in every order, as many targets, and packs that stay random samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.errors import LedgerError, SourceError
from varlen.train.demo.orders import batches_as_packing, make_order, most_crowded_pack, step_slots
from varlen.train.demo.settings import ORDERS

STEPS, BATCH, MAX_LENGTH = 3, 4, 64

all_lengths = st.lists(st.integers(2, 300), min_size=STEPS * BATCH, max_size=STEPS * BATCH).map(
    lambda values: np.array(values, dtype=np.int64)
)


@given(lengths=all_lengths, name=st.sampled_from(ORDERS), seed=st.integers(0, 5))
def test_every_order_trains_every_document_once_cut_at_the_same_length(lengths, name, seed):
    order = make_order(name, lengths, steps=STEPS, max_length=MAX_LENGTH, seed=seed)

    packing = order.packing
    assert sorted(packing.document_ids.tolist()) == list(range(len(lengths)))
    kept = np.empty(len(lengths), dtype=np.int64)
    kept[packing.document_ids] = packing.lengths
    assert kept.tolist() == np.minimum(lengths, MAX_LENGTH).tolist()
    assert packing.starts.tolist() == [0] * len(lengths)
    assert packing.ledger.packed == np.minimum(lengths, MAX_LENGTH).sum()
    assert packing.ledger.truncated == np.maximum(lengths - MAX_LENGTH, 0).sum()
    dealt = [order.pack_ids(step).tolist() for step in range(STEPS)]
    assert [pack for packs in dealt for pack in packs] == list(range(packing.num_packs))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert min(map(len, dealt)) >= 1


def test_random_batches_are_neighbours_and_buckets_are_neighbours_in_length():
    lengths = np.array([9, 2, 8, 3, 7, 4, 6, 5, 30, 20, 10, 40])

    random = make_order("random", lengths, steps=STEPS, max_length=MAX_LENGTH, seed=0).packing
    buckets = make_order("bucketed", lengths, steps=STEPS, max_length=MAX_LENGTH, seed=0).packing

    assert random.to_lists() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert sorted(sorted(lengths[ids].tolist()) for ids in buckets.to_lists()) == [
        [2, 3, 4, 5],
        [6, 7, 8, 9],
        [10, 20, 30, 40],
    ]


def test_buckets_are_shuffled_by_the_seed():
    lengths = np.arange(2, 2 + 40)
    orders = {
        tuple(
            make_order("bucketed", lengths, steps=10, max_length=64, seed=seed).packing.document_ids.tolist()
        )
        for seed in range(5)
    }

    assert len(orders) == 5


def test_few_short_documents_still_give_every_step_a_pack():
    order = make_order("packed", np.full(12, 5), steps=3, max_length=2048, seed=0)

    assert order.packing.num_packs >= 3


def test_documents_too_uneven_to_pack_for_so_many_steps_are_refused():
    with pytest.raises(SourceError, match="2 packs, too few for 6 steps"):
        make_order("packed", np.array([2000] + [2] * 11), steps=6, max_length=2048, seed=0)


@pytest.mark.parametrize(
    ("name", "layout", "slots"),
    [
        ("random", "flat", 29),
        ("random", "padded", 2 * 4 + 2 * 20),
        ("random", "padded_with_mask", 2 * 4 + 2 * 20),
        ("bucketed", "padded", 2 * 3 + 2 * 20),
        ("packed", "rows", 2 * 20),
    ],
)
def test_positions_are_counted_by_layout(name, layout, slots):
    order = make_order(name, np.array([2, 4, 20, 3]), steps=2, max_length=20, seed=0)

    assert step_slots(order, layout) == slots


def test_a_batch_that_holds_a_document_twice_does_not_balance():
    with pytest.raises(LedgerError):
        batches_as_packing(np.array([5, 5, 5]), np.array([[0, 1], [1, 2]]), 10)


def test_a_batch_that_leaves_a_document_out_does_not_balance():
    with pytest.raises(LedgerError):
        batches_as_packing(np.array([5, 5, 5]), np.array([[0, 1]]), 10)


def test_the_most_crowded_pack_is_the_first_with_most_documents():
    packing = batches_as_packing(np.array([5, 5, 5, 5]), np.array([[0, 1], [2, 3]]), 10)

    assert most_crowded_pack(packing) == 0
