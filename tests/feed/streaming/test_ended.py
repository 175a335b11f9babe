"""What is told behind the last batch, and where there is none: ledgers and losses travel to the end."""

import gzip
import json
import time

import pytest
from tests.support.streaming import feed_of, run

import varlen as vl
from varlen.documents.source import open_source
from varlen.errors import OverlongDocumentError, SourceError
from varlen.feed.protocol import Ended, new_arrays
from varlen.feed.state import FeedState
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
