"""The loader straight from documents: in a thread, in a process, and in a job of several ranks."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tests.feed.streaming import counting
from tests.support.ranks import as_ranks
from tests.support.stores import content, drained
from tests.support.stores import streaming_of as loader_of

import varlen as vl
from varlen.errors import InputError, StateError

JOB = Path(__file__).with_name("feed_job.py")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Files of lines of text, of which some are empty."""
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(1)
    for number in range(3):
        lines = [{"text": "word " * int(n)} for n in rng.integers(0, 60, 120)]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_process_gives_the_same_batches_as_a_thread_from_any_state(texts):
    with (
        loader_of(texts, micro_batch_size=4) as thread,
        loader_of(texts, micro_batch_size=4, worker="process") as process,
    ):
        assert thread.mode == "streaming"
        whole, states = drained(thread)
        assert drained(process) == (whole, states)
        for taken in (0, 1, len(whole) // 2, len(whole) - 1, len(whole)):
            process.load_state_dict(json.loads(json.dumps(states[taken])))
            assert drained(process)[0] == whole[taken:]
        ledger, stats = thread.stats().ledger, thread.stats()
    assert len(whole) > 30
    assert ledger.check().packed == stats.tokens == ledger.tokens_in
    assert ledger.documents_in == 2 * 360


def test_ranks_without_a_process_group_take_the_same_steps_and_say_what_it_costs(texts, caplog):
    def rows(size):
        found, ends = {}, []
        for rank in range(size):
            with loader_of(texts, dp_rank=rank, dp_world_size=size, micro_batch_size=1) as loader:
                for batch in loader:
                    found.setdefault(int(batch.pack_ids[0]) // 12, []).append(content(batch))
                ends.append(loader.state_dict())
        assert all(end == ends[0] for end in ends)
        return {step: sorted(taken) for step, taken in found.items()}

    alone = rows(1)
    assert "no process group" not in caplog.text
    assert rows(3) == alone
    assert "no process group" in caplog.text


def test_ranks_of_a_job_read_their_own_lanes_and_agree(texts, tmp_path):
    """Two ranks over gloo, one of which has its worker killed, and a state saved by rank 0 alone."""
    with loader_of(texts, micro_batch_size=1, tokenizer=counting.encode, eos=0) as loader:
        alone = {}
        for batch in loader:
            alone.setdefault(int(batch.pack_ids[0]) // 12, []).append([int(n) for n in batch.document_ids])
    out = tmp_path / "out"
    out.mkdir()
    as_ranks(JOB, texts, out, libraries="torch,varlen.feed.loader")
    said = [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]

    assert said[0]["end"] == said[1]["end"]
    assert said[0]["steps"] == said[1]["steps"] == sorted(alone)
    joined = {}
    for one in said:
        for step, ids in one["rows"]:
            joined.setdefault(step, []).append(ids)
    assert {step: sorted(rows) for step, rows in joined.items()} == {
        s: sorted(rows) for s, rows in alone.items()
    }
    assert said[0]["targets"] == said[1]["targets"]  # of whole steps, without a collective
    # Two epochs of 360 texts, each encoded by one rank, and once more what the killed worker had done: 360 at most,
    # and what waited. If each rank encoded all of them, it would be twice as much.
    assert 720 <= said[0]["encoded"] + said[1]["encoded"] < 1200
    assert said[0]["encoded"] < 500
    assert all(one["again"] == one["rows"][one["saved"] :] for one in said)  # both from rank 0's state
    assert all(one["further"][: len(one["again"])] == one["again"] for one in said)  # and for an epoch more
    seen = [len(one["rows"][: one["saved"]] + one["further"]) for one in said]
    assert seen[0] == seen[1]
    seen = Counter(n for one in said for _, ids in one["rows"][: one["saved"]] + one["further"] for n in ids)
    assert min(seen.values()) == 3  # pieces of a document in every epoch; some are cut anew in each
    assert set(seen) == {n for rows in alone.values() for ids in rows for n in ids}
    assert said[1]["restarts"] >= 1
    # Ranks that start over in the middle of a run don't wait for answers to what they have asked before.
    assert all(seconds < 20 for one in said for seconds in one["jumps"].values()), said


BAD = [
    ({"lanes": 5}, "multiple of 5 lanes"),
    (
        {"lanes": 4, "dp_rank": 0, "dp_world_size": 3},
        "4 lanes can't be dealt to 3 ranks; run 1, 2, 4 ranks",
    ),
    ({"scope": "all", "mode": "streaming"}, "packs the whole data set at once"),
]


@pytest.mark.parametrize(("changes", "said"), BAD)
def test_lanes_that_do_not_divide_are_refused_when_the_loader_is_made(texts, changes, said):
    with pytest.raises(InputError, match=said):
        loader_of(texts, **changes)


def test_changed_data_a_changed_tokenizer_and_other_lanes_are_refused(texts, tmp_path):
    with loader_of(texts) as loader:
        next(loader)
        state = loader.state_dict()
    for path in texts.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with loader_of(tmp_path) as loader:  # elsewhere, and later, but the same
        loader.load_state_dict(state)
    (tmp_path / "1.jsonl").write_bytes((texts / "1.jsonl").read_bytes().replace(b"word", b"work", 1))
    for data, changes, said in (
        (tmp_path, {}, "data was"),
        (texts, {"tokenizer": lambda text: list(text.encode()), "eos": 0}, "data was"),
        (texts, {"lanes": 6}, "lanes was 12 and is 6"),
    ):
        with loader_of(data, **changes) as loader, pytest.raises(StateError, match=said):
            loader.load_state_dict(state)


def test_a_bad_record_is_named_or_skipped_and_counted(texts, tmp_path):
    lines = (texts / "0.jsonl").read_text().splitlines()
    lines[70] = '{"text": 7}'
    (tmp_path / "0.jsonl").write_text("\n".join(lines))
    for worker in ("thread", "process"):
        with (
            loader_of(tmp_path, worker=worker) as loader,
            pytest.raises(vl.VarlenError, match=r"0\.jsonl line 71 holds"),
        ):
            drained(loader)
        with loader_of(tmp_path, worker=worker, on_error="skip") as loader:
            drained(loader)
            assert loader.stats().skipped == 1  # once, in two epochs


def test_a_skipped_record_is_logged_once_however_often_it_is_read(texts, tmp_path, caplog):
    lines = (texts / "0.jsonl").read_text().splitlines()
    for number in (5, 70, 71):
        lines[number] = '{"text": 7}'
    (tmp_path / "0.jsonl").write_text("\n".join(lines))
    with loader_of(tmp_path, worker="thread", on_error="skip", epochs=4) as loader:
        whole, states = drained(loader)
        loader.load_state_dict(states[1])
        drained(loader)
        loader.load_state_dict(states[len(whole) // 2])
        next(loader)
        loader.documents(loader.step - 1)
    said = [line.getMessage() for line in caplog.records if "skipped: " in line.getMessage()]
    assert sorted(line.split(" line ")[1].split()[0] for line in said) == ["6", "71", "72"]
