"""Packs of a step: consecutive from any position, through windows and epochs, and dealt evenly to the ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.feed.indexed.test_windows import SHARDS, Store, grouped, pieces_of

from varlen.feed.batches import deal
from varlen.feed.indexed.stream import PackStream, Position
from varlen.feed.indexed.windows import Groups, Windows, WindowSettings


def packs_of(taken):
    pieces = pieces_of(taken)
    bounds = taken.offsets.tolist()
    return [pieces[a:b] for a, b in zip(bounds, bounds[1:])]


def stream(shards, epochs, window=7):
    settings = WindowSettings(capacity=30, window=window, overlong="split")
    return PackStream(grouped(shards, [len(shards)], settings), epochs)


@given(SHARDS, st.integers(0, 3), st.integers(1, 9), st.integers(1, 9))
def test_steps_of_any_size_take_the_same_packs_in_the_same_order(shards, epochs, window, count):
    whole = stream(shards, epochs, window).take(Position(), 10**6)[0]
    position, found, positions, steps = Position(), [], [], stream(shards, epochs, window)
    while True:
        positions.append((position, len(found)))
        taken, position, _ = steps.take(position, count)
        found += packs_of(taken)
        if taken.num_packs < count:
            break

    assert found == packs_of(whole)
    # Whoever begins there, with whatever step.
    for position, before in positions[:: max(len(positions) // 4, 1)]:
        assert packs_of(stream(shards, epochs, window).take(position, 10**6)[0]) == found[before:]


def test_every_epoch_holds_every_document_and_an_endless_stream_goes_on():
    shards = [[3, 4, 5] * 10, [29] * 4]
    finite, endless = stream(shards, 3), stream(shards, None)

    documents = sorted(piece[:2] for pack in packs_of(finite.take(Position(), 10**6)[0]) for piece in pack)
    assert documents == sorted([(s, d) for s, lengths in enumerate(shards) for d in range(len(lengths))] * 3)
    assert endless.take(Position(), 500)[0].num_packs == 500
    assert endless.take(Position(epoch=10**6), 5)[0].num_packs == 5
    assert stream([[]], None).take(Position(), 5)[0].num_packs == 0


def test_an_epoch_holds_the_parts_that_it_began_with_and_the_next_one_those_that_came():
    store = Store([[3] * 9, [4] * 8])
    windows = Windows(store, Groups(store), WindowSettings(capacity=5, window=4))
    first = PackStream(windows, 2, num_parts=lambda epoch: 1 + (epoch > 0))
    packs, end, _ = first.take(Position(), 10**6)
    _, middle, _ = first.take(Position(), 5)

    shards = [{shard for shard, *_ in pack} for pack in packs_of(packs)]
    assert shards[:9] == [{0}] * 9
    assert set().union(*shards[9:]) == {0, 1}
    assert packs.num_packs == 9 + 17
    assert middle.grown == ((0, 1),)
    assert end.grown == ((0, 1), (1, 2))
    for parts_now in (2, 1):  # what the store has by now doesn't change an epoch that has begun
        later = PackStream(windows, 1, num_parts=lambda epoch, now=parts_now: now)
        assert packs_of(later.take(middle, 100)[0]) == packs_of(packs)[5:9]
    assert packs_of(PackStream(windows, 2).take(middle, 100)[0]) == packs_of(packs)[5:]


@pytest.mark.parametrize("epochs", [None, 3])
def test_documents_that_are_all_dropped_give_no_packs_and_no_endless_search(epochs):
    settings = WindowSettings(capacity=5, window=2, overlong="drop")

    assert PackStream(grouped([[9] * 7, [8]], [2], settings), epochs).take(Position(), 4)[0].num_packs == 0


WORK = st.lists(st.floats(0, 1e6), max_size=48)


@given(WORK, st.integers(1, 4), st.integers(1, 3))
def test_every_pack_is_dealt_once_and_all_ranks_get_as_many(work, ranks, micro_batch_size):
    count = len(work) // (ranks * micro_batch_size) * ranks * micro_batch_size
    hands = deal(np.array(work[:count], dtype=np.float64), ranks, micro_batch_size)

    assert hands.shape == (ranks, count // ranks)
    assert sorted(hands.ravel().tolist()) == list(range(count))


@given(st.lists(st.floats(0, 1e6), min_size=24, max_size=24), st.sampled_from([1, 2, 3, 4, 6, 8]))
def test_no_rank_has_more_work_than_the_rest_by_more_than_one_pack(work, ranks):
    work = np.array(work)
    totals = work[deal(work, ranks, 24 // ranks)].sum(axis=1)

    assert totals.max() - totals.min() <= work.max() + 1e-6


@given(st.lists(st.floats(0, 1e6), min_size=24, max_size=24), st.sampled_from([2, 3, 4, 6, 8, 12]))
def test_over_all_micro_batches_too_no_rank_has_more_work_by_more_than_one_pack(work, ranks):
    work = np.array(work)
    totals = work[deal(work, ranks, 1)].sum(axis=1)

    assert totals.max() - totals.min() <= work.max() + 1e-6


@given(st.lists(st.floats(1, 1e6), min_size=24, max_size=24))
def test_ranks_meet_in_every_micro_batch_with_packs_of_neighbouring_work(work):
    work = np.array(work)
    hands = deal(work, 4, 1)

    ranked = np.argsort(np.argsort(-work, kind="stable"))
    assert (ranked[hands] // 4 == np.arange(6)).all()
