"""One rank's batches from any state: the same bytes, at another world size, and while the store still grows."""

import json
import os
import shutil
import threading
import time

import numpy as np
import pytest
from tests.support.offline_packs import write_texts
from tests.support.rarely import IS_SOAK, mostly
from tests.support.stores import drained, index_until, write_store

from varlen.documents.source import Mixture, open_source
from varlen.errors import SourceError, StalledError, StateError
from varlen.feed.batches import BatchSettings
from varlen.feed.indexed.stream import IndexedFeed, PackStream
from varlen.feed.indexed.windows import GroupMinimum, Groups, Windows, WindowSettings
from varlen.feed.loader import PackedLoader
from varlen.feed.protocol import new_arrays
from varlen.feed.state import FeedState, from_json, to_json
from varlen.offline import index as index_module
from varlen.offline.index import fingerprint_of_marks, index_source, source_marks
from varlen.offline.outputs import working_folder
from varlen.store.growing import PartialStore
from varlen.store.open import open_tokens
from varlen.store.store import open_store

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
        Groups(store, GroupMinimum(parts=2)),
        WindowSettings(capacity=32, window=50, overlong="split", seed=3),
    )
    settings = BatchSettings(
        capacity=32, global_batch_size=24, micro_batch_size=micro_batch_size, dp_world_size=ranks
    )
    return IndexedFeed(PackStream(windows, epochs), settings, rank)


def content(batch):
    return tuple(getattr(batch, name).tobytes() for name in NAMES)


def rest(feed, state):
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
    with pytest.raises(
        StateError, match=r"dp_world_size was 1 and is 2\. These may .* 1 batches into one: load"
    ):
        from_json(within, "indexed", other, FREE)
    with pytest.raises(StateError, match="store was 'abc' and is 'xyz'"):
        from_json(begun, "indexed", {**BELONGS, "store": "xyz"}, FREE)
    with pytest.raises(
        StateError, match=r"dp_world_size was 1 and is 2.*Make the loader with those, or start over"
    ):
        from_json(within, "indexed", {**other, "store": "xyz"}, FREE)
    with pytest.raises(StateError, match="version 9"):
        from_json({**begun, "version": 9}, "indexed", BELONGS, FREE)
    with pytest.raises(
        StateError, match=r"saved in mode 'indexed', and this loader .* with mode='indexed', or start"
    ):
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
        feed.with_position(state)
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
        assert feed.with_position(state) == state
        assert bool(list(feed.batches(state, new_arrays))) == (change.get("group", 0) == 0)
    for state in rest(feed, FeedState())[1]:
        assert feed.with_position(state).at == (state.at or feed.with_position(FeedState()).at)


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "PART_BYTES", 800)
    write_texts(tmp_path / "a.jsonl", count=120)
    return tmp_path / "a.jsonl"


def growing_feed(store, epochs=2):
    groups = Groups(store, GroupMinimum(parts=2))
    windows = Windows(store, groups, WindowSettings(capacity=256, window=20, seed=3))
    settings = BatchSettings(capacity=256, global_batch_size=4, micro_batch_size=2, dp_world_size=1)
    return IndexedFeed(PackStream(windows, epochs), settings, 0)


def rest_of(store, state=FeedState(), epochs=2):  # noqa: B008 - frozen
    return [
        (content(made.batch), made.state) for made in growing_feed(store, epochs).batches(state, new_arrays)
    ]


def test_a_store_in_the_making_gives_the_bytes_of_the_finished_one_however_it_is_interrupted(
    tmp_path, data, monkeypatch
):
    whole = rest_of(index_source(open_source(data), tmp_path / "whole")[0])
    folder = tmp_path / "store"
    index_until(data, folder, 3, monkeypatch)
    store = open_tokens(folder)
    assert isinstance(store, PartialStore)
    assert store.num_parts > 7
    assert len(store.documents) == 3
    made = growing_feed(store).batches(FeedState(), new_arrays)
    taken = [next(made) for _ in range(2)]  # the first group is sealed
    index_until(data, folder, 2, monkeypatch)  # paused again, in the third group
    saved = json.loads(json.dumps(dict(taken[-1].state.at)))
    early = growing_feed(open_tokens(folder))
    unknown = FeedState(step=9, at={**saved, "group": 3, "window": 99})
    assert early.with_position(unknown) == unknown  # it isn't waited for what can't be known yet
    with pytest.raises(StateError, match="it was changed"):
        early.with_position(FeedState(step=9, at={**saved, "group": 0, "window": 99}))
    going_on = threading.Thread(target=index_source, args=(open_source(data), folder))
    going_on.start()
    taken += made
    going_on.join()

    assert [(content(one.batch), one.state) for one in taken] == whole
    assert not (tmp_path / "store.partial").exists()
    assert store.fingerprint == open_store(folder).fingerprint
    state = FeedState(step=taken[1].state.step, micro_batch=taken[1].state.micro_batch, at=saved)
    for reader in (store, open_tokens(folder)):
        assert rest_of(reader, state) == whole[2:]


@pytest.mark.parametrize("overwritten", [False, True])
def test_an_open_store_is_read_on_when_its_folder_is_renamed(tmp_path, data, monkeypatch, overwritten):
    folder = tmp_path / "store"
    if overwritten:
        write_texts(tmp_path / "other.jsonl", seed=1)
        index_source(open_source(tmp_path / "other.jsonl"), folder)
        monkeypatch.setattr(index_module, "check_output", lambda *a, **k: None)
    index_until(data, folder, 4, monkeypatch)
    store = PartialStore(folder)
    places = [growing_feed(store, 1).batches(FeedState(), new_arrays) for _ in range(2)]
    before = [content(next(made).batch) for made in places]
    index_source(open_source(data), folder, overwrite=True)

    rest = [[content(one.batch) for one in made] for made in places]
    assert [[first, *more] for first, more in zip(before, rest)] == [
        [bytes_ for bytes_, _ in rest_of(open_store(folder), epochs=1)]
    ] * 2


def test_a_killed_run_is_an_error_that_says_what_is_missing_and_how_to_go_on(tmp_path, data, monkeypatch):
    index_until(data, tmp_path / "store", 3, monkeypatch)
    store = PartialStore(tmp_path / "store", stopped_s=0)

    with pytest.raises(
        SourceError, match=r"store: part 3 of \d+ parts aren't indexed .* indexing has stopped"
    ):
        rest_of(store)


def test_a_run_that_makes_no_progress_is_an_error_too(tmp_path, data, monkeypatch):
    index_until(data, tmp_path / "store", 3, monkeypatch)
    with (tmp_path / "store.partial" / ".work" / "lock").open("w") as lock:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX)
        store = PartialStore(tmp_path / "store", patience_s=0.1, stopped_s=0)
        with pytest.raises(SourceError, match="indexing runs, but no further part was finished"):
            store.wait_for(5)


def test_a_store_that_is_made_of_something_else_meanwhile_is_refused(tmp_path, data, monkeypatch):
    index_until(data, tmp_path / "store", 3, monkeypatch)
    store = PartialStore(tmp_path / "store")
    write_texts(data, count=120, seed=4)
    index_until(data, tmp_path / "store", 3, monkeypatch)
    with pytest.raises(SourceError, match="is gone, or written from other data by now"):
        store.wait_for(4)
    shutil.rmtree(tmp_path / "store.partial")
    with pytest.raises(SourceError, match="is no token store, and none is being written there"):
        PartialStore(tmp_path / "store")


def test_a_grown_store_joins_at_the_next_epoch_whatever_step_training_stops_at(tmp_path, data):
    folder = tmp_path / "store"
    store, _ = index_source(open_source(data), folder)
    before = rest_of(store, epochs=1)
    write_texts(tmp_path / "b.jsonl", count=60, seed=2)
    grown, _ = index_source(open_source([data, tmp_path / "b.jsonl"]), folder)
    assert grown.num_parts > store.num_parts

    one_epoch = growing_feed(store, 3)
    stops = [made.state for made in one_epoch.batches(FeedState(), new_arrays)][: len(before) - 2]
    ends = {
        tuple(content_ for content_, _ in rest_of(grown, stop, 2))[len(before) - 3 - n :]
        for n, stop in enumerate(stops)
    }
    assert len(ends) == 1  # the end of the epoch and the grown epoch after it, wherever it went on
    states = [state for _, state in rest_of(grown, stops[0], 2)]
    assert [pair[:2] for pair in states[-1].at["grown"]] == [[0, store.num_parts], [1, grown.num_parts]]
    with pytest.raises(StateError, match="didn't grow from it"):
        rest_of(store, states[-1])


def test_a_loader_takes_in_what_was_added_when_its_next_epoch_begins(tmp_path):
    write_texts(tmp_path / "a.jsonl", count=30)
    store, _ = index_source(open_source(tmp_path / "a.jsonl"), tmp_path / "store")
    write_texts(tmp_path / "b.jsonl", count=20)
    before = int(store.documents.sum())
    settings = {"capacity": 256, "global_batch_size": 2, "epochs": 3, "ring_slots": 2}
    for worker in ("thread", "process"):
        with PackedLoader(tmp_path / "store", **settings, worker=worker) as loader:
            held = next(loader).document_ids.tolist()
            if worker == "thread":
                index_source(open_source([tmp_path / "a.jsonl", tmp_path / "b.jsonl"]), tmp_path / "store")
            states = []
            for batch in loader:
                held += batch.document_ids.tolist()
                states.append(loader.state_dict())
        after = int(open_store(tmp_path / "store").documents.sum())
        counts = np.bincount(held, minlength=after)
        assert (counts[:before] >= 3).all()
        if worker == "thread":
            assert after == before + 20
            assert (counts[before:] >= 2).all()  # but not in the first epoch
            last, expected = states[-3], held
            with PackedLoader(tmp_path / "store", **settings, worker="process") as again:
                again.load_state_dict(last)
                rest = [d for batch in again for d in batch.document_ids.tolist()]
            assert expected[-len(rest) :] == rest


def test_a_mixture_goes_on_with_the_bytes_of_before_when_one_of_its_sources_has_grown(tmp_path):
    folders = {}
    for name, count in (("web", 40), ("code", 25)):
        write_texts(tmp_path / f"{name}.jsonl", count=count)
        folders[name] = tmp_path / name
        index_source(open_source(tmp_path / f"{name}.jsonl"), folders[name])
    settings = {"capacity": 256, "global_batch_size": 2, "window": 16, "epochs": 2, "worker": "thread"}

    def new():
        return PackedLoader(Mixture(folders, {"web": 1, "code": 1}, "tokens", "all"), **settings)

    with new() as loader:
        whole, states = drained(loader)
        steps, last = len(loader), loader.documents(len(whole) - 1).document_ids.tolist()
        places = [loader.where(document) for document in range(65)]
    write_texts(tmp_path / "more.jsonl", count=30, seed=2)
    index_source(open_source([tmp_path / "web.jsonl", tmp_path / "more.jsonl"]), folders["web"])
    with new() as loader:
        assert len(loader) != steps
        for taken in (1, len(whole) // 2, len(whole) - 1):
            loader.load_state_dict(json.loads(json.dumps(states[taken])))
            assert drained(loader) == (whole[taken:], states[taken:])
            assert len(loader) == steps
            assert loader.documents(len(whole) - 1).document_ids.tolist() == last
            assert [loader.where(document) for document in range(65)] == places
            loader.seek(3)
            assert drained(loader) == (whole[3:], states[3:])


def test_a_loader_waits_for_a_part_no_longer_than_for_a_batch_and_names_it(tmp_path, data, monkeypatch):
    index_until(data, tmp_path / "store", 3, monkeypatch)
    settings = {"capacity": 256, "global_batch_size": 2, "deadline_s": 1.0}
    missing = r"part.* of \d+ parts aren't indexed after 1 s of waiting"
    with pytest.raises(SourceError, match=missing):
        PackedLoader(tmp_path / "store", **settings, scope="all")
    for worker in ("thread", "process"):
        with PackedLoader(tmp_path / "store", **settings, worker=worker) as loader:
            with pytest.raises(SourceError, match=missing):
                len(loader)
            if worker == "thread":  # a process takes longer to come
                with pytest.raises(SourceError, match=missing):
                    list(loader)


def test_a_thread_that_waits_for_a_part_does_not_keep_a_loader_from_closing(tmp_path, data, monkeypatch):
    index_until(data, tmp_path / "store", 1, monkeypatch)
    monkeypatch.setattr("varlen.feed.worker.thread._PATIENCE_S", 0.2)
    loader = PackedLoader(
        tmp_path / "store", capacity=256, global_batch_size=2, worker="thread", deadline_s=40
    )
    loader.start_prefetch()
    time.sleep(0.2)
    begun = time.monotonic()
    loader.load_state_dict(loader.state_dict())
    loader.close()
    assert time.monotonic() - begun < 10


def test_a_stopped_run_over_the_cache_is_named_and_not_waited_for_without_end(tmp_path, data):
    cache = tmp_path / "cache"
    source = open_source(data)
    folder = cache / "stores" / fingerprint_of_marks(source_marks(source))[:32]
    with working_folder(folder, "other", None):
        settings = {"capacity": 256, "global_batch_size": 2, "mode": "indexed", "cache": cache}
        with pytest.raises(
            StalledError, match=rf"process {os.getpid()} holds .*lock, .* nothing into .*{folder.name}"
        ):
            PackedLoader(data, **settings, deadline_s=1.0)
