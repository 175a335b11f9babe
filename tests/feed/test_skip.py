"""Documents that can't be read at train time are masked in their slots: plans, counts and all other bytes stay."""

import json
import os
import re
import shutil
import signal
import time
from contextlib import ExitStack
from itertools import product

import pytest
from tests.feed.skipping import PAD, WORKERS, assert_masked, damaged, drain, numbered, skipping, taken
from tests.support.loaders import loader_of, random_store
from tests.support.rarely import mostly

import varlen as vl
from varlen.errors import SettingError, SourceError
from varlen.feed import checks


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return random_store(tmp_path_factory.mktemp("feed"), longest=60)


@pytest.fixture(scope="module")
def whole(store):
    return taken(loader_of(store, pad_id=PAD))[0]


CUTS = [None, "fails", 0, 1234]


@pytest.mark.parametrize(
    ("cut", "worker"),
    mostly([*((cut, "thread") for cut in CUTS), (1234, "process")], product(CUTS, WORKERS)),
)
def test_documents_of_a_shard_whose_tokens_are_gone_or_cut_are_masked(store, whole, tmp_path, cut, worker):
    places = numbered(store)

    def is_bad(document, _, stop):
        shard, begin = places[document]
        return shard == 2 and (cut in (None, "fails") or 2 * (begin + stop) > cut)

    bad = damaged(store, tmp_path / "store", cut=cut)
    assert_masked(*taken(skipping(bad, worker=worker)), whole, is_bad)


def test_steps_are_counted_and_found_and_lengths_checked_without_the_tokens(store, whole, tmp_path):
    bad = damaged(store, tmp_path / "store")
    with skipping(bad) as loader, loader_of(store, pad_id=PAD) as good:
        assert len(loader) == len(whole)
        loader.seek(9)
        good.seek(9)
        assert loader.state_dict() == good.state_dict()
        assert (loader.documents(9).document_ids == good.documents(9).document_ids).all()
    with skipping(bad, overlong="error", capacity=64) as loader:
        assert next(loader).num_tokens
    with skipping(
        vl.Mixture({"a": bad, "b": store}, {"a": 1, "b": 1}), overlong="error", capacity=64
    ) as loader:
        assert next(loader).num_tokens


@pytest.mark.parametrize("worker", WORKERS)
def test_nothing_is_masked_of_what_can_be_read_and_a_state_fits_either_way(store, whole, tmp_path, worker):
    found, skipped = taken(skipping(store, worker=worker))
    assert [state for _, state in found] == [state for _, state in whole]
    assert_masked(found, skipped, whole, lambda *_: False, some=False)

    bad = damaged(store, tmp_path / "store")
    with skipping(bad, worker=worker) as loader:
        for _ in range(5):
            next(loader)
        state = loader.state_dict()
    assert state == whole[4][1]
    with loader_of(store, pad_id=PAD, worker=worker) as loader:
        loader.load_state_dict(json.loads(json.dumps(state)))
        assert (next(loader).input_ids == whole[5][0].input_ids).all()


@pytest.mark.parametrize("worker", WORKERS)
def test_of_two_ranks_one_that_cannot_read_takes_as_many_steps_as_the_other(store, tmp_path, worker):
    bad = damaged(store, tmp_path / "store")
    places = numbered(store)
    with ExitStack() as stack:
        loaders, expected = (
            [
                stack.enter_context(
                    skipping(data, worker=worker, dp_rank=rank, dp_world_size=2, micro_batch_size=4)
                )
                for rank, data in enumerate(sets)
            ]
            for sets in ((store, bad), (store, store))
        )
        found, whole = ([[], []] for _ in range(2))
        for several, kept in ((loaders, found), (expected, whole)):
            for batches in zip(*several, strict=True):
                assert len({batch.step_num_targets for batch in batches}) == 1
                states = [loader.state_dict() for loader in several]
                assert states[0] == states[1]
                for rank, batch in enumerate(batches):
                    kept[rank].append((batch, states[rank]))
        skipped = [loader.stats().skipped for loader in loaders]
    assert_masked(found[0], skipped[0], whole[0], lambda *_: False, some=False)
    assert_masked(found[1], skipped[1], whole[1], lambda document, *_: places[document][0] == 2)


@pytest.mark.parametrize("worker", WORKERS)
def test_a_shard_cut_while_it_is_read_is_masked_from_there_on(store, whole, tmp_path, worker):
    bad = tmp_path / "store"
    shutil.copytree(store, bad)
    places = numbered(store)
    with skipping(bad, worker=worker, ring_slots=2) as loader:
        found = [(next(loader), loader.state_dict()) for _ in range(3)]
        os.truncate(bad / "2" / "tokens.bin", 0)
        for _ in range(4):  # some were made before
            found.append((next(loader), loader.state_dict()))
        before = loader.stats().skipped
        for batch in loader:
            found.append((batch, loader.state_dict()))
        skipped = loader.stats().skipped - before
    assert loader.stats().restarts == 0
    assert_masked(found[7:], skipped, whole[7:], lambda document, *_: places[document][0] == 2)


def test_a_killed_worker_is_replaced_and_masks_the_same(store, whole, tmp_path):
    bad = damaged(store, tmp_path / "store")
    places = numbered(store)
    with skipping(bad, worker="process", ring_slots=2) as loader:
        found = []
        for number, batch in enumerate(loader):
            found.append((batch, loader.state_dict()))
            if number == 3:
                os.kill(loader._worker.pid, signal.SIGKILL)
                time.sleep(0.1)
        assert loader.stats().restarts == 1
        skipped = loader.stats().skipped
    assert_masked(found, skipped, whole, lambda document, *_: places[document][0] == 2)


@pytest.mark.parametrize("worker", WORKERS)
def test_an_error_names_the_file_the_document_and_the_way_out(store, tmp_path, worker):
    bad = tmp_path / "store"
    shutil.copytree(store, bad)
    with loader_of(bad, worker=worker, ring_slots=2, window=999) as loader:  # of all shards
        next(loader)
        os.truncate(bad / "2" / "tokens.bin", 0)
        said = r"document \d+ of shard 2 of store can't be read: .*2/tokens\.bin is damaged: .* ends before"
        with pytest.raises(SourceError, match=said + '.*on_error="skip" masks it'):
            drain(loader)
    with (
        loader_of(bad, worker=worker) as loader,
        pytest.raises(SourceError, match="2 is damaged: it doesn't"),
    ):
        drain(loader)


def test_a_missing_mask_is_masked_where_documents_are_whole_and_no_plan_where_they_are_cut(store, tmp_path):
    bad = damaged(store, tmp_path / "store", "loss_mask.bin")
    places = numbered(store)
    settings = {"capacity": 64, "global_batch_size": 8}
    wide = taken(loader_of(store, pad_id=PAD, **settings))[0]
    found, skipped = taken(skipping(bad, **settings))
    assert_masked(found, skipped, wide, lambda document, *_: places[document][0] == 2)
    for rank in range(2):  # what a piece of a document trains stands in the mask alone
        with (
            skipping(bad, dp_rank=rank, dp_world_size=2) as loader,
            pytest.raises(SourceError, match=r"2/loss_mask\.bin can't be read: No such file"),
        ):
            drain(loader)


@pytest.mark.parametrize("name", ["targets.npy", "offsets.npy"])
@pytest.mark.parametrize("cut", [None, 0, 200])
def test_what_plans_are_made_of_is_an_error_on_all_ranks(store, tmp_path, name, cut):
    bad = damaged(store, tmp_path / "store", name, cut)
    for rank in range(2):
        with (
            skipping(bad, dp_rank=rank, dp_world_size=2) as loader,
            pytest.raises(SourceError, match=r"store/2.*index the data again"),
        ):
            drain(loader)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_offsets_cut_while_they_are_mapped_are_an_error_and_kill_no_worker(store, tmp_path, on_error):
    bad = tmp_path / "store"
    shutil.copytree(store, bad)
    with loader_of(bad, worker="process", ring_slots=2, on_error=on_error, window=999) as loader:
        next(loader)
        os.truncate(bad / "2" / "offsets.npy", 0)
        with pytest.raises(SourceError, match=r"offsets\.npy was cut short while it was in use"):
            drain(loader)
        assert loader.stats().restarts == 0


def test_each_document_is_named_once_and_the_number_of_names_is_bounded(store, tmp_path, caplog, monkeypatch):
    bad = damaged(store, tmp_path / "store")
    _, skipped = taken(skipping(bad))
    named = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert len(set(named)) == len(named)
    assert skipped >= 2 * len(named) > 100  # two epochs, and cut documents
    said = r"skipped: document \d+ of shard 2 of store is masked: .*2/tokens\.bin can't be read: No such file"
    assert all(re.match(said, one) for one in named)

    caplog.clear()
    monkeypatch.setattr(checks, "_MOST_NAMED", 3)
    assert taken(skipping(bad))[1] == skipped
    named = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert named[3:] == ["skipped: more than 3 documents; further ones are counted, and not named"]


def test_a_process_names_them_too(store, tmp_path, capfd):
    _, skipped = taken(skipping(damaged(store, tmp_path / "store"), worker="process"))
    assert skipped
    assert "is masked: " in capfd.readouterr().err


def test_other_words_are_refused(store):
    with pytest.raises(SettingError, match="on_error must be one of raise, skip; got 'ignore'"):
        skipping(store, on_error="ignore")
