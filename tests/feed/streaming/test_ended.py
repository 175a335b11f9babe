"""What streaming tells: of the end of its data, and of files that change or fail in the midst of it."""

import errno
import gzip
import json
import os
import time
from pathlib import Path

import pytest
from tests.support.streaming import feed_of, run

import varlen as vl
from varlen.documents.source import open_source
from varlen.errors import OverlongDocumentError, SourceError
from varlen.feed.protocol import Ended, new_arrays
from varlen.feed.state import FeedState
from varlen.feed.streaming import intake
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
