"""Iterables are streamed: exactly, without an end, from any state, and never those of other rows."""

import gzip
import itertools
import json
import os
import signal
import threading
import time
from pathlib import Path

import datasets
import numpy as np
import pytest
from tests.support.memory_rows import ITERABLES, Again
from tests.support.rarely import mostly
from tests.support.stores import content, drained
from tests.support.streaming import feed_of, rows, run, side_by_side

import varlen as vl
from varlen.documents.memory import spooled
from varlen.documents.source import open_source
from varlen.errors import InputError, SettingError, SourceError, StateError
from varlen.feed.state import FeedState
from varlen.feed.streaming.lane import chunk_of, document_ids

ROWS = [{"text": np.random.default_rng(n).bytes(20 + 13 * (n % 11)).hex()} for n in range(240)]


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """Folders of the test's own, in which nothing is left."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    assert list(tmp_path.glob("varlen-*")) == []


def loader_of(data, **changes):
    usual = {"capacity": 256, "global_batch_size": 4, "window": 8, "seed": 3, "worker": "thread", "epochs": 2}
    return vl.PackedLoader(data, "bytes", **{**usual, **changes})


def texts(batches):
    """All tokens, document by document, in any order; documents are cut at random, so by their letters."""
    found = np.concatenate([np.frombuffer(batch[0], np.int32) for batch in batches])
    return np.bincount(found, minlength=300)[1:].tolist()


BEGUN_ANEW = [form for form in ITERABLES if form != "generator"]
OFTEN = [("function", "process"), ("re-iterable", "thread"), ("IterableDataset", "process")]


@pytest.mark.parametrize(
    ("form", "worker"), mostly(OFTEN, itertools.product(BEGUN_ANEW, ("thread", "process")))
)
def test_batches_are_the_same_in_every_form_and_worker_and_from_any_state(form, worker):
    with loader_of(lambda: iter(ROWS)) as usual, loader_of(ROWS) as finite:
        wanted = drained(usual)[0]
        assert texts(wanted) == texts(drained(finite)[0])

    with loader_of(ITERABLES[form](ROWS), worker=worker, micro_batch_size=2) as loader:
        found, states = drained(loader)
        for taken in (1, len(found) // 3, len(found) // 2 + 3, len(found) - 1, len(found)):
            loader.load_state_dict(json.loads(json.dumps(states[taken])))
            assert drained(loader)[0] == found[taken:]
    with loader_of(ITERABLES[form](ROWS), worker=worker) as loader:
        assert drained(loader)[0] == wanted
    assert len(wanted) > 40


def test_in_order_the_tokens_are_those_of_files_of_the_same_rows(tmp_path):
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS)

    settings = {"shuffle": False, "global_batch_size": 1, "method": "wrapped", "epochs": 2}
    found = []
    for data in (lambda: iter(ROWS), tmp_path / "rows.jsonl.gz", ROWS):
        with loader_of(data, **settings) as loader:
            found.append([batch[0] for batch in drained(loader)[0]])
    assert found[0] == found[1] == found[2]


def test_another_loader_goes_on_and_one_of_other_rows_is_refused():
    with loader_of(lambda: iter(ROWS)) as loader:
        found, states = drained(loader)
    for taken in range(1, len(found), 7):
        with loader_of(Again(ROWS)) as same:
            same.load_state_dict(states[taken])
            assert content(next(same)) == found[taken]
    changed = [*ROWS[:3], {"text": ROWS[3]["text"][::-1]}, *ROWS[4:]]
    for other in (ROWS[1:], changed, ROWS[:5] + ROWS[6:]):
        for taken in (len(found) // 2 - 2, len(found) // 2 + 1, len(found) - 1):
            with loader_of(lambda other=other: iter(other)) as loader:
                loader.load_state_dict(states[taken])
                with pytest.raises(StateError, match=r"gives other rows|isn't there|aren't what they were"):
                    next(loader)


def test_rows_that_change_from_pass_to_pass_are_refused_when_they_are_gone_on_with():
    turns = itertools.count()

    def shuffled():
        return iter(np.random.default_rng(next(turns)).permutation(np.array(ROWS, dtype=object)).tolist())

    with loader_of(shuffled) as loader:
        found, states = drained(loader)
        assert sum(batch is not None for batch in found) == len(found) > 40
        loader.load_state_dict(states[len(found) // 4])
        with pytest.raises(StateError, match=r"gives other rows|aren't what they were"):
            next(loader)


@pytest.mark.parametrize("worker", mostly(["process"], ["thread", "process"]))
def test_an_iterable_without_end_is_read_as_far_as_it_is_trained_on(worker):
    taken = itertools.count()

    def endless():
        return ({"text": f"row {number} " * 20, "n": next(taken)} for number in itertools.count())

    with loader_of(endless, worker=worker, read_ahead_s=0.5) as loader:
        tokens = sum(next(loader).num_tokens for _ in range(40))
        seen, until = [0, next(taken)], time.monotonic() + 60
        while seen[-1] - seen[-2] > 1 and time.monotonic() < until:
            time.sleep(1)
            seen.append(next(taken))
        assert tokens > 20_000
        assert seen[-1] - seen[-2] == 1 < seen[-1] < 20_000  # it waits for the trainer


def test_a_killed_worker_goes_on_where_it_was():
    with loader_of(lambda: iter(ROWS)) as loader:
        wanted = drained(loader)[0]
    with loader_of(lambda: iter(ROWS), worker="process") as loader:
        found = [content(next(loader)) for _ in range(10)]
        os.kill(loader._worker.pid, signal.SIGKILL)
        found += [content(batch) for batch in loader]
        assert loader.stats().restarts == 1
    assert found == wanted


def test_a_generator_is_read_once_and_more_is_refused_with_the_line_to_write():
    with (
        loader_of((row for row in ROWS), epochs=1) as loader,
        loader_of(lambda: iter(ROWS), epochs=1) as again,
    ):
        found, states = drained(loader)
        assert found == drained(again)[0]
        loader.load_state_dict(states[3])
        with pytest.raises(
            SourceError, match=r"can be iterated over only once.*PackedLoader\(lambda: rows\(\), ...\)"
        ):
            next(loader)
    with loader_of((row for row in ROWS), epochs=1) as fresh:
        fresh.load_state_dict(states[3])
        assert drained(fresh)[0] == found[3:]
    with pytest.raises(SettingError, match=r"once, and epochs is 2; pass a function"):
        loader_of(row for row in ROWS)


def test_a_function_that_gives_the_same_iterator_again_is_refused():
    used, inner = iter(ROWS), iter(ROWS)
    said = r"same exhausted iterator again|no row when it is"
    for function in (lambda: used, lambda: (row for row in inner)):
        with loader_of(function) as loader, pytest.raises(SourceError, match=said):
            list(loader)


class Torn(Exception):
    """Of the user's own."""


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_what_the_iterable_raises_is_told_with_its_row(worker):
    def torn():
        yield from ROWS[:100]
        raise Torn("no network")

    with (
        loader_of(torn, worker=worker) as loader,
        pytest.raises(InputError, match=r"memory \(torn\) failed after row 100: Torn: no network"),
    ):
        list(loader)
    with loader_of(torn, worker=worker, on_error="skip", epochs=1) as loader:
        tokens = sum(batch.num_tokens for batch in loader)
        assert tokens == sum(len(row["text"]) + 1 for row in ROWS[:100])
        assert loader.stats().skipped == 1

    def fails():
        raise Torn("at once")

    for wrong, said in (
        (fails, "Torn: at once"),
        (lambda: 5, "no iterator: TypeError"),
        (lambda: [], "no row"),
    ):
        with pytest.raises(SourceError, match=said):
            loader_of(wrong, worker=worker)


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_bad_rows_are_counted_as_those_of_a_list(worker):
    rows = [{"text": b"bytes"}, *ROWS[:50], None, {"text": 5}, {"other": 1}, *ROWS[50:]]

    with (
        loader_of(lambda: iter(rows), worker=worker, on_error="skip") as ours,
        loader_of(rows, on_error="skip") as theirs,
    ):
        tokens = [sum(batch.num_tokens for batch in loader) for loader in (ours, theirs)]
        assert tokens[0] == tokens[1]
        assert ours.stats().skipped == theirs.stats().skipped == 4
    with (
        loader_of(lambda: iter(rows), worker=worker) as loader,
        pytest.raises(InputError, match=r"memory \(<lambda>\) row 1 holds bytes in `text`"),
    ):
        list(loader)


def test_iterables_stand_beside_lists_and_other_iterables():
    with loader_of([lambda: iter(ROWS[:80]), ROWS[80:160], Again(ROWS[160:])], shuffle=False) as loader:
        found, states = drained(loader)
        loader.load_state_dict(states[9])
        assert drained(loader)[0] == found[9:]


@pytest.mark.parametrize("meets", mostly([True], [True, False]))
def test_each_rank_iterates_over_all_rows_and_takes_its_lanes(meets):
    source = open_source(spooled(lambda: iter(ROWS), is_streamed=True), "bytes")
    alone = sorted(itertools.chain(*map(rows, run(feed_of(source, epochs=2)))))

    both = side_by_side(source, 2, FeedState(), meets, epochs=2)
    assert sorted(itertools.chain(*map(rows, itertools.chain(*both)))) == alone
    middle = both[0][len(both[0]) // 2].state
    rest = side_by_side(source, 2, middle, meets, epochs=2)
    assert [rows(one) for one in rest[0]] == [rows(one) for one in both[0][-len(rest[0]) :]]
    source.files[0].hold.release()


def test_ranks_that_are_given_other_rows_are_told_apart():
    turns = itertools.count()

    def unseeded():
        order = np.random.default_rng(next(turns)).permutation(len(ROWS))
        return iter([ROWS[n] for n in order])

    source = open_source(spooled(unseeded, is_streamed=True), "bytes")
    with pytest.raises(SourceError, match=r"memory \(unseeded\) gives one rank other rows than another"):
        side_by_side(source, 2, FeedState(), True, epochs=1)
    source.files[0].hold.release()


def test_a_set_that_is_streamed_keeps_its_transforms():
    upper = (
        datasets.Dataset.from_list(ROWS).to_iterable_dataset().map(lambda row: {"text": row["text"].upper()})
    )
    with loader_of(upper, epochs=1) as ours:
        text = b"".join(batch.input_ids.astype(np.uint8).tobytes() for batch in ours)
    assert b"A" in text
    assert b"a" not in text


@pytest.mark.parametrize("changes", [{"mode": "indexed"}, {"scope": "all"}])
def test_where_all_lengths_are_needed_an_iterable_is_read_to_its_end_first(changes):
    changes = {**changes, "window": None}
    with loader_of(lambda: iter(ROWS), **changes) as ours, loader_of(ROWS, **changes) as theirs:
        assert drained(ours)[0] == drained(theirs)[0]


def test_nobody_gives_rows_once_a_loader_is_closed():
    running = set(threading.enumerate())
    loader = loader_of(lambda: iter(ROWS))
    next(loader)
    place = Path(loader._opened.spec.source.files[0].local_path)
    assert place.exists()
    loader.close()

    assert not place.parent.exists()
    assert set(threading.enumerate()) <= running


def test_chunks_of_one_iterable_take_the_numbers_of_blocks_too():
    chunk = (1 << 20) + 5
    number = int(document_ids(0, chunk, np.array([7]), is_single=True)[0])

    assert chunk_of(number, is_single=True).number == chunk
    with pytest.raises(SourceError, match="beyond what streaming can tell apart"):
        document_ids(0, chunk, np.array([7]))
