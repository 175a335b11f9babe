"""Benchmark inputs are the same in every run, and what a contestant delivers is checked before it is timed."""

import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks import checks, inputs, stopwatch
from benchmarks.checks import WrongResultError
from benchmarks.feeding.delivery import Delivered, Delivery, _descendants, check
from benchmarks.inputs import Documents
from benchmarks.stopwatch import alternate


def test_the_same_seed_draws_the_same_lengths():
    first, again = inputs.lognormal_lengths(5000), inputs.lognormal_lengths(5000)

    assert first.dtype == np.int32
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, inputs.lognormal_lengths(5000, seed=1))


def test_lengths_have_the_mean_and_the_limits_they_claim():
    lengths = inputs.lognormal_lengths(100_000)

    assert 665 < lengths.mean() < 685
    assert lengths.min() >= 1
    assert lengths.max() == inputs.CAPACITY


def test_lengths_drawn_in_chunks_are_those_of_a_longer_draw(monkeypatch):
    monkeypatch.setattr(inputs, "_CHUNK", 100)

    np.testing.assert_array_equal(inputs.lognormal_lengths(250)[:100], inputs.lognormal_lengths(100))


def test_every_form_of_the_documents_holds_the_same_tokens():
    documents = inputs.Documents.draw([3, 0, 5], vocabulary=50)

    assert documents.num_tokens == 8
    assert [array.tolist() for array in documents.arrays] == documents.lists == documents.arrow.to_pylist()
    assert [len(document) for document in documents.lists] == documents.lengths.tolist() == [3, 0, 5]


def test_a_folder_without_sets_yields_nothing(tmp_path):
    assert list(inputs.real_lengths(tmp_path / "absent")) == []


def test_a_histogram_is_expanded_and_shuffled_the_same_way_each_time(tmp_path):
    np.savez(tmp_path / "b.npz", histogram=np.array([50, 0, 50]), lengths=np.repeat([1, 3], 50))
    np.savez(tmp_path / "a.npz", lengths=np.array([4, 9]))

    (first, lengths), (second, expanded) = inputs.real_lengths(tmp_path)

    assert (first, second) == ("a", "b")
    assert lengths.tolist() == [4, 9]
    assert np.bincount(expanded).tolist() == [0, 50, 0, 50]
    assert (np.diff(expanded) < 0).any()
    np.testing.assert_array_equal(expanded, dict(inputs.real_lengths(tmp_path))["b"])


@pytest.mark.parametrize(
    "packs",
    [[[0, 1], [1]], [[0, 1]], [[0, 1], [2], [1]], [[0, 2, 1]]],
    ids=["one twice instead of another", "one missing", "one doubled", "over capacity"],
)
def test_packs_that_lose_double_or_overfill_are_refused(packs):
    with pytest.raises(checks.WrongResultError):
        checks.fill_of_ids(packs, np.array([4, 4, 4]), capacity=8)


def test_the_fill_of_correct_packs_is_tokens_over_slots():
    assert checks.fill_of_ids([[0, 1], [2]], np.array([4, 4, 4]), capacity=8) == 0.75
    assert checks.fill_of_lengths([[4, 3], [4]], np.array([4, 4, 3]), capacity=8) == 11 / 16


def test_packs_of_lengths_that_were_not_given_are_refused():
    with pytest.raises(checks.WrongResultError):
        checks.fill_of_lengths([[3, 5], [4]], np.array([4, 4, 4]), capacity=8)


def test_rows_must_hold_the_documents_given_token_for_token():
    documents = inputs.Documents.draw([3, 5, 2])
    rows = [(np.concatenate([documents.arrays[2], documents.arrays[0]]), [2, 3]), (documents.arrays[1], [5])]
    harmed = [rows[0], (documents.arrays[1][::-1], [5])]

    assert checks.fill_of_rows(rows, documents.tokens, documents.offsets, capacity=8) == 10 / 16
    with pytest.raises(checks.WrongResultError):
        checks.fill_of_rows(harmed, documents.tokens, documents.offsets, capacity=8)


def test_batches_that_differ_in_one_value_are_refused():
    names = ("input_ids", "labels", "position_ids", "segment_ids", "cu_seqlens")
    ours = SimpleNamespace(**{name: np.arange(4) for name in names}, max_seqlen=4)
    theirs = {
        name: np.arange(4) for name in ("input_ids", "labels", "position_ids", "seq_idx", "cu_seq_lens_q")
    }

    checks.same_batch(ours, {**theirs, "max_length_q": 4})
    for name in theirs:
        with pytest.raises(checks.WrongResultError, match=name):
            checks.same_batch(ours, {**theirs, "max_length_q": 4, name: np.array([0, 1, 2, 9])})
    with pytest.raises(checks.WrongResultError, match="max_length_q"):
        checks.same_batch(ours, {**theirs, "max_length_q": 5})


def test_both_contestants_run_in_turns(monkeypatch):
    monkeypatch.setattr("benchmarks.stopwatch.BLOCK_S", 0.0)
    calls = []

    ours, theirs = alternate(lambda: calls.append("a"), lambda: calls.append("b"), rounds=3)

    assert "".join(calls[-6:]) == "ababab"
    assert len(ours.wall_s) == len(ours.cpu_s) == len(theirs.wall_s) == 3


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux says where a process may run")
def test_a_race_is_run_on_one_core_and_leaves_all_of_them_to_what_follows(monkeypatch):
    monkeypatch.setattr("benchmarks.stopwatch.BLOCK_S", 0.0)
    before, during = os.sched_getaffinity(0), set()

    alternate(lambda: during.update(os.sched_getaffinity(0)), lambda: None, rounds=1)

    assert during == {max(before)}
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(not stopwatch.TELLS_RESIDENT, reason="only Linux tells what a process holds now")
def test_the_peak_of_memory_is_what_was_held_at_most_since_it_was_forgotten():
    size = 64 * 2**20
    del_me = np.ones(2 * size, np.uint8)
    del del_me
    stopwatch.forget_peak()
    before = stopwatch.resident_bytes()

    held = np.ones(size, np.uint8)
    del held

    assert size * 0.9 < stopwatch.peak_bytes() - before < size * 1.5


LENGTHS = [3, 5, 2]


def pack(documents, numbers):
    """A pack as contestants deliver it: tokens, labels, positions and lengths."""
    ids = np.concatenate([documents.arrays[number] for number in numbers])
    positions = np.concatenate([np.arange(LENGTHS[number]) for number in numbers])
    return [ids, np.where(positions == 0, -100, ids), positions, [LENGTHS[number] for number in numbers]]


@pytest.fixture
def documents(tmp_path):
    made = Documents.draw(LENGTHS)
    np.save(tmp_path / "tokens.npy", made.tokens)
    np.save(tmp_path / "offsets.npy", made.offsets)
    return made


def delivery(batches, **more):
    return Delivery(batches=lambda _: iter(batches), tokens=len, packs=lambda batch: batch, **more)


def test_an_epoch_with_every_document_once_passes_and_its_fill_is_told(documents, tmp_path):
    found = check(delivery([[pack(documents, [2, 0])], [pack(documents, [1])]]), tmp_path)

    assert found == {"tokens": 10, "fill": 10 / (2 * 8192)}


@pytest.mark.parametrize("numbers", [[0, 1], [0, 1, 1], [0, 1, 2, 2]])
def test_an_epoch_that_loses_or_doubles_documents_is_refused(documents, tmp_path, numbers):
    with pytest.raises(WrongResultError):
        check(delivery([[pack(documents, numbers)]]), tmp_path)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_wrong_token_label_or_position_is_refused(documents, tmp_path, part):
    wrong = pack(documents, [0, 1, 2])
    wrong[part] = wrong[part].copy()
    wrong[part][4] += 1

    with pytest.raises(WrongResultError):
        check(delivery([[wrong]]), tmp_path)


def test_of_a_collator_that_keeps_leftovers_hardly_anything_may_be_missing(documents, tmp_path):
    with pytest.raises(WrongResultError, match=r"80\.0%"):
        check(delivery([[pack(documents, [0, 1])]], keeps_leftovers=True), tmp_path)


def test_a_rate_becomes_the_time_for_as_many_tokens():
    assert Delivered(tokens=30, seconds=2.0, prepared_s=9.0).seconds_for(60) == 4.0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found where Linux lists them")
def test_processes_of_processes_are_found():
    program = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    parent.stdout.readline()

    assert len(_descendants(parent.pid)) == 1

    parent.communicate(b"\n")


def test_the_stalling_server_gives_parts_of_files_and_says_how_often_it_held_back(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"0123456789")
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.feeding.stalling_server", str(tmp_path), "0", "60", "0.2"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    port = server.stdout.readline().strip()
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/a.txt", headers={"Range": "bytes=2-4"})
    with urllib.request.urlopen(asked) as answer:
        assert (answer.status, answer.read()) == (206, b"234")
    server.terminate()

    assert server.communicate()[0].strip() == "1"
