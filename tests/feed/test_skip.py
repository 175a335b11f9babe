"""Tokens of every kind that can't be read at train time are masked in their slots; plans and all other bytes stay."""

import json
import os
import re
import shutil
import signal
import sys
import time
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.support.offline_packs import write_texts
from tests.support.rarely import mostly
from tests.support.stores import NAMES, index_until, loader_of, random_store, write_arrow, write_pair

import varlen as vl
from varlen.errors import SettingError, SourceError
from varlen.feed import batches as batches_file
from varlen.offline import index as index_module
from varlen.store.bin_idx import MegatronFile
from varlen.store.growing import PartialStore
from varlen.store.store import open_store

PAD = 7


WORKERS = ("thread", "process")


def skipping(data, **changes):
    return loader_of(data, **{"pad_id": PAD, "on_error": "skip", **changes})


def taken(loader):
    """All batches that are left, the state after each, and what was skipped."""
    with loader:
        found = [(batch, loader.state_dict()) for batch in loader]
        return found, loader.stats().skipped


def drain(loader):
    """Take what is left, and ask for nothing else, as `list` would for its length."""
    for _ in loader:
        pass


def masked(batch, is_bad):
    """What a batch is to be where some of its pieces are masked, and how many those are."""
    arrays = {name: getattr(batch, name).copy() for name in NAMES}
    pieces = 0
    for row, (first, stop) in enumerate(zip(batch.pack_offsets[:-1], batch.pack_offsets[1:])):
        for segment in range(first, stop):
            begin, length = int(batch.document_starts[segment]), int(batch.document_lengths[segment])
            if is_bad(int(batch.document_ids[segment]), begin, begin + length):
                here = batch.segment_ids[row] == segment - first
                assert here.sum() == length
                arrays["input_ids"][row][here], arrays["labels"][row][here] = PAD, -100
                pieces += 1
    return arrays, pieces


def assert_masked(found, skipped, whole, is_bad, some=True):
    """Require that batches are those of the whole data but for bad pieces, which are masked and counted."""
    assert len(found) == len(whole)
    pieces = 0
    for (batch, state), (expected, expected_state) in zip(found, whole):
        assert state["step"] == expected_state["step"]
        assert state["micro_batch"] == expected_state["micro_batch"]
        arrays, count = masked(expected, is_bad)
        for name in NAMES:
            assert (getattr(batch, name) == arrays[name]).all(), name
        assert batch.step_num_targets == expected.step_num_targets
        assert batch.num_targets == int((batch.labels != -100).sum())
        pieces += count
    assert skipped == pieces
    assert (pieces > 0) == some


def numbered(store):
    """Of each document its shard, and where its tokens begin there."""
    kept = open_store(store, check_tokens=False)
    starts = (kept.shard(shard).offsets[:-1].tolist() for shard in range(len(kept.shards)))
    return [(shard, begin) for shard, begins in enumerate(starts) for begin in begins]


def damaged(store, folder, name="tokens.bin", cut=None):
    """A copy of a store of whose third shard a file is gone, ends before, or fails whenever it is read."""
    shutil.copytree(store, folder)
    path = folder / "2" / name
    if cut is None:
        path.unlink()
    elif cut == "fails":
        path.unlink()
        path.mkdir()  # opens, and gives an error of the system
    else:
        os.truncate(path, cut)
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return random_store(tmp_path_factory.mktemp("feed"), longest=60)


@pytest.fixture(scope="module")
def whole(store):
    return taken(loader_of(store, pad_id=PAD))[0]


CUTS = [None, "fails", 0, 1234]


@pytest.mark.parametrize(
    ("cut", "worker"), mostly([*((cut, "thread") for cut in CUTS), (1234, "process")], product(CUTS, WORKERS))
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
        maps, mapped = Path(f"/proc/{loader._worker.pid}/maps"), f"{bad}/2/offsets.npy"
        assert any(mapped in maps.read_text() or time.sleep(0.01) for _ in range(3000))
        time.sleep(0.5)  # two threads may open a shard at once, and the slower one reads what is cut
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
    monkeypatch.setattr(batches_file, "_MOST_NAMED", 3)
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


def rows_of(count=150, longest=50, seed=2):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 99, n).tolist() for n in rng.integers(1, longest, count)]


@pytest.mark.parametrize(
    ("when", "worker"),
    mostly(
        [("before", "thread"), ("while", "process"), ("gone", "thread")],
        product(("before", "while", "gone"), WORKERS),
    ),
)
def test_megatron_tokens_that_were_cut_are_masked(tmp_path, when, worker):
    rows = rows_of()
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
        write_pair(tmp_path / name / "data", [[row] for row in rows])
    begins = np.cumsum([0, *map(len, rows)])
    cut = 3001  # in the midst of a token

    def is_bad(document, _, stop):
        # A file that changes while it is read is read no further.
        return when != "before" or 2 * (begins[document] + stop) > cut

    whole = taken(loader_of(tmp_path / "good" / "data", pad_id=PAD))[0]
    bad = tmp_path / "bad" / "data.bin"
    if when == "before":
        os.truncate(bad, cut)
        assert_masked(*taken(skipping(tmp_path / "bad" / "data", worker=worker)), whole, is_bad)
        with (
            loader_of(bad) as loader,
            pytest.raises(SourceError, match="sequences end beyond the 3,001 bytes"),
        ):
            drain(loader)
        return
    with skipping(bad, worker=worker, ring_slots=2) as loader:
        for _ in range(3):
            next(loader)
        os.truncate(bad, cut)
        if when == "gone":
            bad.unlink()
        for _ in range(4):
            next(loader)
        before = loader.stats().skipped
        found = [(batch, loader.state_dict()) for batch in loader]
        skipped = loader.stats().skipped - before
    assert_masked(found, skipped, whole[7:], is_bad)


def test_an_index_that_contradicts_itself_is_an_error_and_one_cut_while_mapped_too(tmp_path):
    idx = tmp_path / "data.idx"
    for number in (70, 149):  # the last one agrees with those before
        write_pair(tmp_path / "data", [[row] for row in rows_of()])
        content = bytearray(idx.read_bytes())
        content[34 + 4 * number + 3] = 0x7F  # a sequence of two billion tokens
        idx.write_bytes(content)
        with skipping(idx) as loader, pytest.raises(SourceError, match=r"sequences end beyond"):
            next(loader)

    write_pair(tmp_path / "data", [[row] for row in rows_of()])
    file = MegatronFile(tmp_path / "data", "data")
    os.truncate(idx, 100)  # within a page, so that looking there would be no crash but wrong
    with pytest.raises(SourceError, match=r"data\.idx was cut short while it was in use"):
        file.extents(0, 150)


@pytest.mark.parametrize(
    ("column", "worker"),
    mostly(
        [("input_ids", "process"), ("labels", "thread"), ("loss_mask", "thread")],
        product(("input_ids", "labels", "loss_mask"), WORKERS),
    ),
)
def test_rows_of_arrow_that_are_no_tokens_are_masked(tmp_path, column, worker):
    rows = rows_of()
    columns = {"input_ids": rows, column: rows}
    if column == "loss_mask":
        columns[column] = [[token % 2 for token in row] for row in rows]
    write_arrow(pa.table(columns), tmp_path / "good.arrow", 40)
    whole = taken(loader_of(tmp_path / "good.arrow", pad_id=PAD))[0]
    odd = {
        "input_ids": lambda token: -5,
        "labels": lambda token: token + 1,
        "loss_mask": lambda token: 2 if token else 0,
    }[column]
    places = {}
    for document in (3, 77, 149):
        places[document] = len(rows[document]) - 1
        row = list(columns[column][document])
        columns[column] = [*columns[column][:document], row, *columns[column][document + 1 :]]
        row[-1] = odd(row[-1])
    if column == "loss_mask":  # what is neither 0 nor 1 is no label, whoever counts
        columns["loss_mask"][149][-1] = 2
        good = [list(row) for row in columns["loss_mask"]]
        for document, at in places.items():
            good[document][at] = 0
        write_arrow(pa.table({**columns, "loss_mask": good}), tmp_path / "good.arrow", 40)
        whole = taken(loader_of(tmp_path / "good.arrow", pad_id=PAD))[0]
    write_arrow(pa.table(columns), tmp_path / "bad.arrow", 40)

    def is_bad(document, start, stop):
        bad = document in places and start <= places[document] < stop
        return bad and (column != "loss_mask" or columns[column][document][places[document]] == 2)

    assert_masked(*taken(skipping(tmp_path / "bad.arrow", worker=worker)), whole, is_bad)
    with (
        loader_of(tmp_path / "bad.arrow", worker=worker) as loader,
        pytest.raises(SourceError, match=r"bad\.arrow"),
    ):
        drain(loader)


def wait_at_rest(pid):
    """Wait until a process has done nothing for a while: what it reads in that moment, no look at the size saves."""
    if sys.platform != "linux":  # nothing tells there what it has done
        time.sleep(2)
        return
    spent = [-2, -1]
    end = time.monotonic() + 30
    while len(set(spent[-3:])) > 1:
        assert time.monotonic() < end, "it never rests"
        time.sleep(0.1)
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        spent.append(int(fields[11]) + int(fields[12]))


@pytest.mark.parametrize(
    ("as_file", "on_error"),
    mostly([(True, "skip"), (False, "raise")], product((True, False), ("raise", "skip"))),
)
def test_an_arrow_file_cut_while_it_is_mapped_kills_no_worker(tmp_path, as_file, on_error):
    rows = rows_of(6000)
    path = tmp_path / "a.arrow"
    write_arrow(pa.table({"input_ids": rows}), path, 400, as_file)
    settings = {"worker": "process", "ring_slots": 2, "window": 6000, "pad_id": PAD}
    whole = taken(loader_of(path, **settings))[0]
    with loader_of(path, **settings, on_error=on_error) as loader:
        for _ in range(3):
            next(loader)
        wait_at_rest(loader._worker.pid)
        os.truncate(path, 5000)
        for _ in range(3 if on_error == "skip" else 0):  # some were made before
            next(loader)
        before = loader.stats().skipped
        if on_error == "raise":
            # The shorter file is seen before it is read, or its missing pages while it is.
            noticed = r"document [\d,]+ of a\.arrow.* (has changed since|was cut short while)"
            with pytest.raises(SourceError, match=noticed):
                drain(loader)
        else:
            found = [(batch, loader.state_dict()) for batch in loader]
            assert_masked(found, loader.stats().skipped - before, whole[6:], lambda *_: True)
        assert loader.stats().restarts == 0


@pytest.mark.parametrize("worker", WORKERS)
def test_sources_of_a_mixture_are_masked_each_as_it_is(tmp_path, worker):
    store = random_store(tmp_path / "whole", longest=60)
    rows = rows_of()
    write_pair(tmp_path / "pair", [[row] for row in rows])
    sets = {"store": store, "pair": tmp_path / "pair"}
    whole = taken(loader_of(vl.Mixture(sets, {"store": 2, "pair": 1}), pad_id=PAD))[0]
    sets["store"] = damaged(store, tmp_path / "store")
    os.truncate(tmp_path / "pair.bin", 2000)
    places, begins = numbered(store), np.cumsum([0, *map(len, rows)])

    def is_bad(document, _, stop):
        if document < len(places):
            return places[document][0] == 2
        return 2 * (begins[document - len(places)] + stop) > 2000

    found = taken(skipping(vl.Mixture(sets, {"store": 2, "pair": 1}), worker=worker))
    assert_masked(*found, whole, is_bad)


def test_a_store_in_the_making_is_masked_too(tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "PART_BYTES", 800)
    write_texts(tmp_path / "a.jsonl", count=600)
    index_until(tmp_path / "a.jsonl", tmp_path / "store", 20, monkeypatch)  # one group is sealed
    settings = {"capacity": 256, "global_batch_size": 2, "window": 20, "deadline_s": 2.0}

    def batches(**changes):
        found = []
        with (
            loader_of(tmp_path / "store", pad_id=PAD, **settings, **changes) as loader,
            suppress(SourceError),
        ):
            for batch in loader:
                found.append((batch, loader.state_dict()))
        return found, loader.stats().skipped

    whole, _ = batches()
    sorted(Path(f"{tmp_path}/store.partial").glob("*/tokens.bin"))[3].unlink()
    begins = np.cumsum([0, *PartialStore(tmp_path / "store").documents])

    assert_masked(*batches(on_error="skip"), whole, lambda document, *_: begins[3] <= document < begins[4])
