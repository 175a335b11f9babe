"""One rank's batches from any state: the same bytes, after JSON, twice, and at another world size."""

import json

import numpy as np
import pytest
from tests.store.test_store import write_store
from tests.support.rarely import IS_SOAK, mostly

from varlen.errors import SourceError, StateError
from varlen.feed.batches import BatchSettings
from varlen.feed.indexed.stream import IndexedFeed, PackStream
from varlen.feed.indexed.windows import Enough, Groups, Windows, WindowSettings
from varlen.feed.protocol import new_arrays
from varlen.feed.state import FeedState, from_json, to_json

BELONGS = {"store": "abc", "capacity": 32, "seed": 3, "dp_world_size": 1, "micro_batch_size": 4}
FREE = frozenset({"dp_world_size", "micro_batch_size"})
NAMES = ("input_ids", "labels", "position_ids", "segment_ids", "cu_seqlens", "document_ids", "pack_ids")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(5)
    shards = [
        [[(rng.integers(0, 99, n).tolist(), None if shard % 2 else [1] * n) for n in rng.integers(0, 30, 60)]]
        for shard in range(4)
    ]
    return write_store(tmp_path_factory.mktemp("feed"), shards)


def feed_of(store, ranks=1, rank=0, micro_batch_size=4, epochs=2):
    windows = Windows(
        store,
        Groups(store, Enough(parts=2)),
        WindowSettings(capacity=32, window=50, overlong="split", seed=3),
    )
    settings = BatchSettings(
        capacity=32, global_batch_size=24, micro_batch_size=micro_batch_size, dp_world_size=ranks
    )
    return IndexedFeed(PackStream(windows, epochs), settings, rank)


def content(batch):
    return tuple(getattr(batch, name).tobytes() for name in NAMES)


def rest(feed, state):
    """All batches after a state, and the state after each."""
    made, states = [], [state]
    for one in feed.batches(state, new_arrays):
        made.append(content(one.batch))
        states.append(one.state)
    return made, states


def test_every_state_gives_the_rest_twice_after_json(store):
    whole, states = rest(feed_of(store), FeedState())

    assert len(whole) > 20
    assert len(states) == len(whole) + 1
    feed = feed_of(store)
    for taken in [*reversed(range(len(states)))][:: 1 if IS_SOAK else 3]:
        saved = json.loads(json.dumps(to_json(states[taken], "indexed", BELONGS)))
        for _ in range(2):
            state = from_json(saved, "indexed", BELONGS, FREE)
            assert state == states[taken]
            assert rest(feed, state)[0] == whole[taken:]


@pytest.mark.parametrize("ranks", mostly([3, 4], [2, 3, 4, 6, 8]))
def test_a_changed_world_size_goes_on_with_the_same_sets(store, ranks):
    def sets(size, state):
        """Rows of each step, whoever takes them, and states where steps begin."""
        found = {}
        for rank in range(size):
            feed, now = feed_of(store, size, rank, micro_batch_size=1), state
            for made in feed.batches(now, new_arrays):
                batch = made.batch
                found.setdefault(now.step, []).append((batch.pack_ids.item(), content(batch)[:3]))
                now = made.state
            assert now == end_of(size, state)
        return {step: sorted(rows) for step, rows in found.items()}

    def end_of(size, state):
        return rest(feed_of(store, size, 0, micro_batch_size=1), state)[1][-1]

    alone = sets(1, FeedState())
    begins = [s for s in rest(feed_of(store, micro_batch_size=1), FeedState())[1] if s.micro_batch == 0]
    for state in begins[:: max(len(begins) // 4, 1)]:
        assert sets(ranks, state) == {step: rows for step, rows in alone.items() if step >= state.step}


def test_a_state_that_belongs_elsewhere_is_refused_and_named():
    begun, within = (to_json(FeedState(step=3, micro_batch=n), "indexed", BELONGS) for n in (0, 1))
    other = {**BELONGS, "dp_world_size": 2}

    assert from_json(begun, "indexed", other, FREE) == FeedState(step=3)
    with pytest.raises(StateError, match="dp_world_size was 1 and is 2"):
        from_json(within, "indexed", other, FREE)
    with pytest.raises(StateError, match="store was 'abc' and is 'xyz'"):
        from_json(begun, "indexed", {**BELONGS, "store": "xyz"}, FREE)
    with pytest.raises(StateError, match="version 9"):
        from_json({**begun, "version": 9}, "indexed", BELONGS, FREE)
    with pytest.raises(StateError, match="mode 'indexed'; this loader reads version 2 and mode 'streaming'"):
        from_json(begun, "streaming", BELONGS, FREE)
    for broken in ({"version": 2, "mode": "indexed"}, {**begun, "step": -1}, {**begun, "at": 3}, [1]):
        with pytest.raises(StateError):
            from_json(broken, "indexed", BELONGS, FREE)


def test_a_place_that_is_none_of_a_store_is_refused(store):
    good = {"epoch": 0, "group": 0, "window": 0, "pack": 0, "grown": [[0, 4, "f"]]}
    assert next(feed_of(store).batches(FeedState(at=good), new_arrays))
    for bad in (
        {"epoch": -1},
        {"window": -1},
        {"pack": None},
        {"grown": []},
        {"grown": 3},
        {"grown": [[0, 4]]},
        {"grown": [[1, 4, "f"]]},
        {"grown": [[0, 4, "f"], [0, 4, "f"]]},
    ):
        with pytest.raises(StateError, match="no state of a loader"):
            next(feed_of(store).batches(FeedState(at={**good, **bad}), new_arrays))
    for mark in ([0, 4, "other"], [0, 3, "f"]):
        with pytest.raises(StateError, match=r"was begun with a store of \d parts"):
            next(feed_of(store).batches(FeedState(at={**good, "grown": [mark]}), new_arrays))
    for at in ({"epoch": 0}, {"round": 3}):
        with pytest.raises(StateError, match="no state of a loader"):
            next(feed_of(store).batches(FeedState(at=at), new_arrays))


def test_a_step_without_targets_is_left_out_on_every_rank_and_counted(tmp_path):
    documents = [([1] * 9, None)] * 3 + [([2] * 9, [0] * 9)] * 4 + [([3] * 9, None)]
    silent = write_store(tmp_path, [[documents]])
    windows = Windows(silent, Groups(silent), WindowSettings(capacity=10, seed=None))
    for rank in range(2):
        settings = BatchSettings(capacity=10, global_batch_size=2, micro_batch_size=1, dp_world_size=2)
        made = list(IndexedFeed(PackStream(windows, 1), settings, rank).batches(FeedState(), new_arrays))
        assert [one.state.step for one in made] == [1, 2, 4]
        assert [one.batch.pack_ids.item() for one in made] == [rank, 2 + rank, 6 + rank]


@pytest.mark.parametrize("epochs", [None, 9])
def test_data_that_trains_nothing_is_refused_and_not_read_for_ever(tmp_path, epochs):
    silent = write_store(tmp_path, [[[([2] * 9, [0] * 9)] * 7]])
    windows = Windows(silent, Groups(silent), WindowSettings(capacity=10, seed=None))
    settings = BatchSettings(capacity=10, global_batch_size=2, micro_batch_size=1, dp_world_size=1)
    with pytest.raises(SourceError, match="holds nothing to train on"):
        list(IndexedFeed(PackStream(windows, epochs), settings, 0).batches(FeedState(), new_arrays))
    with pytest.raises(SourceError, match="63 tokens packed, none of which has a label"):
        list(IndexedFeed(PackStream(windows, 1), settings, 0).batches(FeedState(), new_arrays))


@pytest.mark.parametrize("first", [1, 2])
def test_the_ledger_of_a_window_is_told_once_also_where_training_goes_on_in_its_first_step(tmp_path, first):
    store = write_store(tmp_path, [[[([1] * 9, None)] * 8]])
    windows = Windows(store, Groups(store), WindowSettings(capacity=10, seed=None))
    settings = BatchSettings(capacity=10, global_batch_size=4, micro_batch_size=1, dp_world_size=1)
    feed = IndexedFeed(PackStream(windows, 1), settings, 0)
    made = list(feed.batches(FeedState(), new_arrays))
    rest = list(feed.batches(made[first - 1].state, new_arrays))
    told = [[one.ledger.tokens_in for one in some if one.ledger is not None] for some in (made, rest)]
    assert [sum(tokens) for tokens in told] == [72, 0]


@pytest.mark.parametrize(
    "changed",
    [
        {"at": {}},
        {"step": 0, "at": {}, "micro_batch": 1},
        {"micro_batch": 6},
        {"group": 3},
        {"group": 2, "window": 1},
        {"group": 2, "pack": 1},
        {"group": 0, "window": 4},
        {"group": 0, "window": 3, "pack": 1},
        {"pack": 10**9},
        {"pack": 10**9, "group": 0, "window": 2},
    ],
)
def test_a_place_that_was_changed_to_none_of_the_store_is_refused_before_training(store, changed):
    feed = feed_of(store)
    good = {"epoch": 0, "group": 1, "window": 0, "pack": 0, "grown": [[0, 4, "f"]]}
    numbers = {"step": 5, "micro_batch": 0}
    at = {**good, **{name: value for name, value in changed.items() if name in good}}
    numbers |= {name: value for name, value in changed.items() if name in numbers}
    state = FeedState(**numbers, at=changed.get("at", at))
    with pytest.raises(StateError, match="it was changed"):
        feed.begun(state)
    if "pack" in changed or "group" in changed:  # where the store wasn't there yet
        with pytest.raises(StateError, match="it was changed"):
            next(feed.batches(state, new_arrays))


def test_a_place_behind_a_window_a_group_or_the_last_epoch_is_one(store):
    feed = feed_of(store)
    good = {"epoch": 1, "group": 0, "window": 0, "pack": 1, "grown": [[0, 4, "f"]]}
    for change in (
        {},
        {"window": 3, "pack": 0},
        {"group": 1, "window": 3, "pack": 0},
        {"group": 2, "pack": 0},
    ):
        state = FeedState(step=5, at={**good, **change})
        assert feed.begun(state) == state
        assert bool(list(feed.batches(state, new_arrays))) == (change.get("group", 0) == 0)
    for state in rest(feed, FeedState())[1]:
        assert feed.begun(state).at == (state.at or feed.begun(FeedState()).at)
