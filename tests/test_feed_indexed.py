"""One rank's batches from any state: the same bytes, after JSON, twice, and at another world size."""

import json

import numpy as np
import pytest
from test_source_store import write_store

from varlen.errors import StateError
from varlen.feed.batches import BatchSettings
from varlen.feed.indexed import IndexedFeed
from varlen.feed.state import IndexedState, from_json, to_json
from varlen.feed.stream import PackStream
from varlen.feed.windows import Windows, WindowSettings

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
    windows = Windows(store, [2, 4], WindowSettings(capacity=32, window=50, overlong="split", seed=3))
    settings = BatchSettings(
        capacity=32, global_batch_size=24, micro_batch_size=micro_batch_size, dp_world_size=ranks
    )
    return IndexedFeed(store, PackStream(windows, epochs), settings, rank)


def content(batch):
    return tuple(getattr(batch, name).tobytes() for name in NAMES)


def rest(feed, state):
    """All batches after a state, and the state after each."""
    made, states = [], [state]
    while (found := feed.make(state)) is not None:
        batch, state = found
        made.append(content(batch))
        states.append(state)
    return made, states


def test_every_state_gives_the_rest_twice_after_json(store):
    whole, states = rest(feed_of(store), IndexedState())

    assert len(whole) > 20
    assert len(states) == len(whole) + 1
    feed = feed_of(store)
    for taken in reversed(range(len(states))):
        saved = json.loads(json.dumps(to_json(states[taken], BELONGS)))
        for _ in range(2):
            state = from_json(saved, BELONGS, FREE)
            assert state == states[taken]
            assert rest(feed, state)[0] == whole[taken:]


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_a_changed_world_size_goes_on_with_the_same_sets(store, ranks):
    def sets(size, state):
        """Rows of each step, whoever takes them, and states where steps begin."""
        found = {}
        for rank in range(size):
            feed, now = feed_of(store, size, rank, micro_batch_size=1), state
            while (made := feed.make(now)) is not None:
                batch, after = made
                found.setdefault(now.step, []).append((batch.pack_ids.item(), content(batch)[:3]))
                now = after
            assert now == end_of(size, state)
        return {step: sorted(rows) for step, rows in found.items()}

    def end_of(size, state):
        return rest(feed_of(store, size, 0, micro_batch_size=1), state)[1][-1]

    alone = sets(1, IndexedState())
    begins = [s for s in rest(feed_of(store, micro_batch_size=1), IndexedState())[1] if s.micro_batch == 0]
    for state in begins[:: max(len(begins) // 4, 1)]:
        assert sets(ranks, state) == {step: rows for step, rows in alone.items() if step >= state.step}


def test_a_state_that_belongs_elsewhere_is_refused_and_named():
    begun, within = IndexedState(step=3), IndexedState(step=3, micro_batch=1)
    other = {**BELONGS, "dp_world_size": 2}

    assert from_json(to_json(begun, BELONGS), other, FREE) == begun
    with pytest.raises(StateError, match="dp_world_size was 1 and is 2"):
        from_json(to_json(within, BELONGS), other, FREE)
    with pytest.raises(StateError, match="store was 'abc' and is 'xyz'"):
        from_json(to_json(begun, BELONGS), {**BELONGS, "store": "xyz"}, FREE)
    with pytest.raises(StateError, match="version 9"):
        from_json({**to_json(begun, BELONGS), "version": 9}, BELONGS, FREE)
    for broken in ({"version": 1, "mode": "indexed"}, {**to_json(begun, BELONGS), "step": -1}, [1]):
        with pytest.raises(StateError):
            from_json(broken, BELONGS, FREE)
