"""Training on a store that is still written: the same bytes as from the finished one, waits, and errors said."""

import json
import os
import shutil
import threading
import time

import numpy as np
import pytest
from loaders import drained
from offline_packs import write_texts
from test_feed_indexed import content, new_arrays

from varlen.documents.source import Mixture, open_source
from varlen.errors import SourceError, StalledError, StateError
from varlen.feed.batches import BatchSettings
from varlen.feed.indexed.stream import IndexedFeed, PackStream
from varlen.feed.indexed.windows import Enough, Groups, Windows, WindowSettings
from varlen.feed.loader import PackedLoader
from varlen.feed.state import FeedState
from varlen.offline import index as index_module
from varlen.offline.index import fingerprint_of_marks, index_source, source_marks
from varlen.offline.outputs import working_folder
from varlen.store.growing import PartialStore
from varlen.store.open import open_tokens
from varlen.store.store import open_store


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "PART_BYTES", 800)
    write_texts(tmp_path / "a.jsonl", count=120)
    return tmp_path / "a.jsonl"


def feed_of(store, epochs=2):
    windows = Windows(store, Groups(store, Enough(parts=2)), WindowSettings(capacity=256, window=20, seed=3))
    settings = BatchSettings(capacity=256, global_batch_size=4, micro_batch_size=2, dp_world_size=1)
    return IndexedFeed(PackStream(windows, epochs), settings, 0)


def rest_of(store, state=FeedState(), epochs=2):  # noqa: B008 - frozen
    return [(content(made.batch), made.state) for made in feed_of(store, epochs).batches(state, new_arrays)]


def index_until(data, folder, notes, monkeypatch):
    """Index, killed when so many parts are finished."""
    real, calls = index_module.write_json, []

    def dying(*arguments):
        calls.append(arguments)
        if len(calls) > notes:
            raise KeyboardInterrupt
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(index_module, "write_json", dying)
        with pytest.raises(KeyboardInterrupt):
            index_source(open_source(data), folder)


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
    made = feed_of(store).batches(FeedState(), new_arrays)
    taken = [next(made) for _ in range(2)]  # the first group is sealed
    index_until(data, folder, 2, monkeypatch)  # paused again, in the third group
    saved = json.loads(json.dumps(dict(taken[-1].state.at)))
    early = feed_of(open_tokens(folder))
    unknown = FeedState(step=9, at={**saved, "group": 3, "window": 99})
    assert early.begun(unknown) == unknown  # it isn't waited for what can't be known yet
    with pytest.raises(StateError, match="it was changed"):
        early.begun(FeedState(step=9, at={**saved, "group": 0, "window": 99}))
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
    places = [feed_of(store, 1).batches(FeedState(), new_arrays) for _ in range(2)]
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

    one_epoch = feed_of(store, 3)
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
    with working_folder(folder, "other"):
        settings = {"capacity": 256, "global_batch_size": 2, "mode": "indexed", "cache": cache}
        with pytest.raises(
            StalledError, match=rf"process {os.getpid()} holds .*lock, .* nothing into .*{folder.name}"
        ):
            PackedLoader(data, **settings, deadline_s=1.0)
