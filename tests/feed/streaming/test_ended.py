"""What streaming tells: of its end, of files that change or fail, and what a state says of a lane."""

import base64
import errno
import gzip
import json
import os
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.streaming import feed_of, run

import varlen as vl
from varlen.documents.source import open_source
from varlen.errors import OverlongDocumentError, SourceError, StateError
from varlen.feed.protocol import Ended, new_arrays
from varlen.feed.state import FeedState
from varlen.feed.streaming import intake
from varlen.feed.streaming.lane import Arrival, Counts, from_record, shuffle_keys, to_record
from varlen.files.losses import Losses


def lines_of(rows):
    return "".join((row if isinstance(row, str) else json.dumps({"text": "x" * row})) + "\n" for row in rows)


def loader(path, **changes):
    given = {"capacity": 16, "global_batch_size": 2, "overlong": "drop", "on_error": "skip", "shuffle": False}
    return vl.PackedLoader(path, "bytes", **{**given, **changes})


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"\n\n", "0 documents read"), (b'{"text": ""}\n', "3 documents read in 3 epochs, 3 without a token")],
)
def test_epochs_without_any_document_end_in_an_error_and_endless_ones_too(tmp_path, content, said):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(SourceError, match=f"no batch is left of it: {said}"):
        run(feed_of(open_source(tmp_path / "a.jsonl"), epochs=3))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"\n"))
    with pytest.raises(SourceError, match="no batch is left of it: 0 documents read"):
        run(feed_of(open_source(tmp_path / "b.jsonl.gz"), epochs=None))


@pytest.mark.parametrize("worker", ["thread", "process"])
@pytest.mark.parametrize("mode", ["indexed", "streaming"])
def test_what_is_dropped_and_lost_behind_the_last_batch_is_told(tmp_path, mode, worker):
    rows = [9] * 40 + [40] * 9 + ["{", "{", "5"]
    (tmp_path / "a.jsonl").write_text(lines_of(rows))

    with loader(
        tmp_path / "a.jsonl", mode=mode, window=8, lanes=1, worker=worker, cache=tmp_path / "cache"
    ) as made:
        tokens = sum(batch.num_tokens for batch in made)
        stats = made.stats()

    assert tokens == 40 * 10 == stats.ledger.packed
    assert (stats.ledger.documents_in, stats.ledger.dropped_documents) == (49, 9)
    assert stats.ledger.check().dropped == 9 * 41
    assert stats.losses == Losses(records=3)


@pytest.mark.parametrize("worker", ["thread", "process"])
@pytest.mark.parametrize("mode", ["indexed", "streaming"])
def test_a_loader_of_which_no_batch_is_left_says_what_became_of_everything(tmp_path, mode, worker):
    (tmp_path / "a.jsonl").write_text(lines_of([40] * 9 + ["{"]))

    with (
        loader(tmp_path / "a.jsonl", mode=mode, worker=worker, cache=tmp_path / "cache") as made,
        pytest.raises(
            OverlongDocumentError,
            match=r"9 documents read, 9 longer than 16 tokens and dropped; 1 record skipped; the log says "
            r"what can't be read, and why; pass overlong=",
        ),
    ):
        list(iter(made))


def test_a_state_behind_the_last_batch_gives_no_error_and_what_was_left_to_tell(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines_of([9] * 40 + [40] * 9))
    source = open_source(tmp_path / "a.jsonl")
    feed = feed_of(source, lanes=1, size=1, capacity=16, overlong="drop", seed=None, window_packs=1)
    every = list(feed.batches(FeedState(), new_arrays))
    made = run(feed)

    for taken in range(0, len(made) + 1, 7):
        state = FeedState() if taken == 0 else made[taken - 1].state
        rest = list(feed.batches(state, new_arrays))
        ledgers = [one.ledger for one in [*every[:taken], *rest] if one.ledger is not None]
        assert sum(ledger.documents_in for ledger in ledgers) == 49
        assert sum(ledger.dropped_documents for ledger in ledgers) == 9
        assert isinstance(rest[-1], Ended) == isinstance(every[-1], Ended)


def test_a_mixture_without_a_label_says_so_at_once(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(
            '{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}\n' * 50
            + '{"input_ids": [], "labels": []}\n'
        )
    files = {name: tmp_path / f"{name}.jsonl" for name in ("a", "b")}
    mixture = vl.Mixture(files, {"a": 1, "b": 1}, until="endless")

    begun = time.monotonic()
    with pytest.raises(SourceError, match="none of its 2 sources has a document with a label"):
        vl.PackedLoader(mixture, capacity=16, global_batch_size=2, cache=tmp_path / "cache", epochs=None)
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("mode", ["indexed", "streaming"])
def test_what_is_lost_is_counted_once_however_many_epochs_read_it(tmp_path, mode):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text(lines_of([9] * 40 + ["{"] * 3))
    (folder / "b.csv").write_text("body\n1\n")
    lost = Losses(records=3, num_bytes=7)

    for epochs in (1, 2, 3):
        made = loader(folder, mode=mode, epochs=epochs, worker="thread", cache=tmp_path / "cache")
        with made:
            states = [made.state_dict() for _ in made]
            stats = made.stats()
        assert (stats.losses, stats.ledger.documents_in) == (lost, 40 * epochs)
    made = loader(folder, mode=mode, epochs=3, worker="thread", cache=tmp_path / "cache")
    with made:
        made.load_state_dict(states[len(states) // 2])
        assert len(list(made)) == len(states) - len(states) // 2 - 1
        assert made.stats().losses in (lost, Losses())  # of a stream, what came since


SAID = "was replaced or rewritten since the files were listed"


def write(path: Path, letter: str, bad: int = 0) -> None:
    lines = [json.dumps({"text": letter * 900}) for _ in range(80)]
    lines[5 : 5 + bad] = [letter * 910] * bad
    beside = path.with_name(".beside")
    beside.write_text("\n".join(lines) + "\n")
    beside.replace(path)


def loader_of(path: Path, **others: object) -> vl.PackedLoader:
    given = {"capacity": 1024, "global_batch_size": 2, "worker": "thread", "overlong": "split", "epochs": 3}
    return vl.PackedLoader(path, "bytes", mode="streaming", read_ahead_s=0.01, **{**given, **others})


@pytest.mark.parametrize("change", ["same size", "longer", "shorter"])
def test_a_file_that_changes_is_told_where_what_cannot_be_read_is_skipped(tmp_path, change):
    path = tmp_path / "data.jsonl"
    write(path, "a", bad=1)
    with loader_of(path, on_error="skip", epochs=20) as loader:
        next(loader)
        write(path, "b", bad=1)
        if change != "same size":
            os.truncate(path, path.stat().st_size + (10 if change == "longer" else -10))
        with pytest.raises(
            SourceError, match=SAID if change == "same size" else "had [0-9,]+ bytes then, now"
        ):
            list(loader)


def test_a_file_that_is_put_back_is_read_on(tmp_path):
    path = tmp_path / "data.jsonl"
    write(path, "a")
    with loader_of(path, epochs=3) as loader:
        expected = [batch.input_ids.tobytes() for batch in loader]
    with loader_of(path, epochs=3) as loader:
        found = []
        path.rename(tmp_path / "kept")
        write(path, "b")
        with pytest.raises(SourceError, match=SAID):
            found += [batch.input_ids.tobytes() for batch in loader]
        (tmp_path / "kept").replace(path)
        found += [batch.input_ids.tobytes() for batch in loader]
    assert found == expected


def failing_from(monkeypatch: pytest.MonkeyPatch, epoch: int, error: Exception) -> None:
    """Let every block of the data fail from an epoch on, as a disk does."""
    bring = intake.Intake.read

    def read(self, claims, soon=()):
        if any(claim.epoch >= epoch for claim in claims):
            monkeypatch.setattr("varlen.files.opening._Stored.readinto", fail)
            monkeypatch.setattr("varlen.files.opening._Stored.readall", fail)
        return bring(self, claims, ())

    def fail(self, *_: object):
        raise error

    monkeypatch.setattr(intake.Intake, "read", read)


def test_what_a_disk_does_not_give_in_a_later_epoch_is_counted_there(tmp_path, monkeypatch):
    path = tmp_path / "data.jsonl"
    write(path, "a", bad=2)
    with loader_of(path, on_error="skip", epochs=2) as loader:
        list(loader)
        usual = loader.stats().losses
    assert usual.records == 2
    assert usual.num_bytes == 0

    failing_from(monkeypatch, 1, OSError(errno.EIO, "Input/output error"))
    with loader_of(path, on_error="skip", epochs=2) as loader:
        list(loader)
        losses = loader.stats().losses
    assert losses.records == 2
    assert losses.num_bytes == path.stat().st_size, "all of the second epoch, once"


def test_records_that_are_bad_count_once_in_any_number_of_epochs(tmp_path):
    path = tmp_path / "data.jsonl"
    write(path, "a", bad=3)
    for epochs in (1, 2, 5):
        with loader_of(path, on_error="skip", epochs=epochs) as loader:
            list(loader)
            assert loader.stats().losses.records == 3


def form(value: object, depth: int = 3) -> object:
    """The names and kinds of a state, lists as those of their first entry."""
    if isinstance(value, dict) and depth:
        return {name: form(one, depth - 1) for name, one in sorted(value.items())}
    return type(value).__name__


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("epochs", [1, 3, None])
def test_a_stream_has_one_form_of_state_before_its_first_batch_too(tmp_path, shuffle, epochs):
    write(tmp_path / "data.jsonl", "a")
    given = {"shuffle": shuffle, "epochs": epochs, "global_batch_size": 4, "micro_batch_size": 2}
    with loader_of(tmp_path / "data.jsonl", **given) as loader:
        states = [loader.state_dict()]
        for _ in range(3):
            next(loader)
            states.append(loader.state_dict())
        loader.seek(0)
        states.append(loader.state_dict())
        loader.load_state_dict(states[0])
        states.append(loader.state_dict())
    assert states[0]["at"], "it says where it stands"
    assert {json.dumps(form(state)) for state in states} == {json.dumps(form(states[0]))}
    assert states[0] == states[-1] == states[-2]
    assert {len(state["at"]["lanes"]) for state in states} == {4}


def test_states_of_old_without_a_place_before_the_first_batch_are_read(tmp_path):
    write(tmp_path / "data.jsonl", "a")
    with loader_of(tmp_path / "data.jsonl") as loader:
        state = loader.state_dict()
        expected = [batch.input_ids.tobytes() for batch in loader]
    for at in ({}, {"ends": []}):
        with loader_of(tmp_path / "data.jsonl") as loader:
            loader.load_state_dict({**state, "at": at})
            assert loader.state_dict() == state
            assert [batch.input_ids.tobytes() for batch in loader] == expected


def arrival(rows, mask=None):
    """Documents that wait: each a number, its first token here, tokens and rounds."""
    ids, firsts, lengths, ages = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    return Arrival(
        ids=ids,
        firsts=firsts,
        ages=ages.astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        tokens=np.zeros(int(lengths.sum()), dtype=np.int32),
        mask=mask,
    )


def rows_of(record):
    return list(zip(*(one.tolist() for one in (record.ids, record.starts, record.lengths, record.ages))))


ROW = st.tuples(st.integers(0, 2**62), st.integers(0, 2**31 - 1), st.integers(0, 99), st.integers(0, 20))
ROWS = st.lists(ROW | st.tuples(*[st.integers(0, 2)] * 4), max_size=30)
SEED = st.none() | st.integers(0, 2**62)


@given(ROWS, SEED, st.lists(st.integers(0, 5), max_size=3))
def test_documents_come_back_in_their_order_whatever_it_is(rows, seed, epochs):
    counts = Counts(documents=7, claims=2)
    record = json.loads(json.dumps(to_record(arrival(rows), counts, seed, epochs)))
    found = from_record(record, seed)
    assert rows_of(found) == rows
    assert (found.counts, found.is_masked) == (counts, False)
    assert (record["documents"], record["tokens"]) == (len(rows), sum(row[2] for row in rows))


@given(ROWS, SEED, st.integers(0, 5))
def test_the_order_of_documents_that_wait_as_they_came_is_not_stored(rows, seed, epoch):
    ids = np.array([row[0] for row in rows], dtype=np.int64)
    keys = ids if seed is None else shuffle_keys(ids, seed, epoch)
    came = [
        rows[n] for n in np.lexsort(([r[2] for r in rows], [r[1] for r in rows], keys, [-r[3] for r in rows]))
    ]
    record = to_record(arrival(came), Counts(), seed, [9, epoch])
    assert record["epoch"] in (9, epoch)
    assert rows_of(from_record(record, seed)) == came


def test_marks_are_told():
    for marks, is_masked in (([1, 1], False), ([1, 0], True)):
        record = to_record(arrival([(3, 0, 2, 0)], np.array(marks, dtype=np.uint8)), Counts(), 0, [0])
        assert from_record(record, 0).is_masked is is_masked


def changed(record, name, value):
    return {key: one for key, one in {**record, name: value}.items() if value is not KeyError or key != name}


@settings(deadline=None)
@given(ROWS.filter(len), st.data())
def test_a_record_that_was_changed_is_refused_and_nothing_else_is_raised(rows, data):
    record = to_record(arrival(rows), Counts(), 3, [0])
    name = data.draw(st.sampled_from(sorted(record)))
    odd = st.sampled_from([KeyError, None, -1, 1.5, "", "ÿ", [], {}, True, 2**63, 2**62, 10**30])
    near = st.integers(0, 40) | st.text("AQgw=/+", max_size=9)
    text = record["waiting"]
    at = data.draw(st.integers(0, len(text) - 1))
    bent = st.sampled_from([text[:at] + "A" + text[at + 1 :], text[:at], text[at:], text + "AAAA"])
    value = data.draw(bent if name == "waiting" else odd | near)
    try:
        found = from_record(changed(record, name, value), 3)
    except StateError:
        return
    if name in ("documents", "tokens", "waiting"):
        assert rows_of(found) == rows
    elif name == "epoch":
        assert sorted(rows_of(found)) == sorted(rows)
    else:
        assert name == "masked"


def test_numbers_that_turn_over_are_refused():
    for row in ((-5, 0, 1, 0), (1, -1, 1, 0), (1, 0, 1, -1), (1, 2**40, 1, 0)):
        with pytest.raises(StateError, match="1 waiting documents of 1 tokens aren't what they were"):
            from_record(to_record(arrival([row]), Counts(), 0, [0]), 0)


def test_a_record_that_was_cut_or_put_together_otherwise_is_refused():
    rows = [(9, 0, 4, 0), (5, 0, 6, 1), (7, 0, 2, 0)]
    record = to_record(arrival(rows), Counts(), 0, [])
    assert record["epoch"] is None
    packed = base64.b64decode(record["waiting"])
    planes = bytearray(zlib.decompress(packed))
    # In the place of an order of 0, 1 and 2.
    twice = bytes(planes[:-24]) + bytes([0, 0, 2]) + bytes(planes[-21:])
    for waiting in (packed[:-2], packed + packed, zlib.compress(twice), zlib.compress(bytes(10**6)), b""):
        with pytest.raises(StateError):
            from_record({**record, "waiting": base64.b64encode(waiting).decode()}, 0)
    for name in ("documents", "tokens"):
        for value in (0, 2**40, 2**62, 2**63 - 1):
            with pytest.raises(StateError):
                from_record({**record, name: value}, 0)
    with pytest.raises(StateError):
        from_record({**record, "waiting": " " + record["waiting"]}, 0)
    assert rows_of(from_record(record, 0)) == rows


def short_texts(path, count):
    """Documents of about 15 tokens with the end of each."""
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(2.5, 0.5, count), 1, 60).astype(int).tolist()
    path.write_text("".join(json.dumps({"text": "x" * size}) + "\n" for size in sizes))
    return path


def test_a_state_is_small_also_where_documents_are(tmp_path):
    path = short_texts(tmp_path / "a.jsonl", 120_000)
    with vl.PackedLoader(path, capacity=1024, global_batch_size=8, worker="thread", epochs=2) as loader:
        sizes = []
        for number, _ in enumerate(loader):
            if number % 10 == 9:
                state = loader.state_dict()
                lanes = state["at"]["lanes"]
                sizes.append((len(json.dumps(state)), sum(lane["documents"] for lane in lanes)))
    most, documents = max(sizes)
    assert documents > 10_000
    assert most <= 2.2 * documents + 10_000


def test_a_changed_lane_is_refused_when_the_state_is_loaded(tmp_path):
    path = short_texts(tmp_path / "a.jsonl", 4_000)
    with vl.PackedLoader(path, capacity=256, global_batch_size=4, worker="thread") as loader:
        for _ in range(20):
            next(loader)
        state = loader.state_dict()
        wanted = next(loader).input_ids.tobytes()
        lanes = state["at"]["lanes"]
        assert lanes[1]["documents"] > 0
        for name, value in (
            ("waiting", lanes[0]["waiting"]),
            ("tokens", 5),
            ("documents", 10**12),
            ("counts", 3),
        ):
            lane = {**lanes[1], name: value}
            with pytest.raises(StateError):
                loader.load_state_dict(
                    {**state, "at": {**state["at"], "lanes": [lanes[0], lane, *lanes[2:]]}}
                )
        loader.load_state_dict(json.loads(json.dumps(state)))
        assert next(loader).input_ids.tobytes() == wanted
