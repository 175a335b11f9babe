"""Tokens of every kind that can't be read at train time are masked, and mapped files that are cut kill nobody."""

import os
import sys
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.feed.indexed.test_growing import index_until
from tests.feed.skipping import PAD, WORKERS, assert_masked, damaged, drain, numbered, skipping, taken
from tests.store.test_bin_idx import write_pair
from tests.store.test_token_documents import write_arrow
from tests.support.loaders import loader_of, random_store
from tests.support.offline_packs import write_texts
from tests.support.rarely import mostly

import varlen as vl
from varlen.errors import SourceError
from varlen.offline import index as index_module
from varlen.store.bin_idx import MegatronFile
from varlen.store.growing import PartialStore


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
            pytest.raises(SourceError, match="sequences end behind the 3,001 bytes"),
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
        with skipping(idx) as loader, pytest.raises(SourceError, match=r"sequences end behind"):
            next(loader)

    write_pair(tmp_path / "data", [[row] for row in rows_of()])
    file = MegatronFile(tmp_path / "data", "data")
    os.truncate(idx, 100)  # within a page, so that looking there would be no crash but wrong
    with pytest.raises(SourceError, match=r"data\.idx was cut short while it was in use"):
        file.places(0, 150)


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
