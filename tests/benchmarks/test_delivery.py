"""The race of loaders: what a contestant delivers is checked before it is timed, and it runs only in its turn."""

import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from benchmarks.checks import WrongResultError
from benchmarks.feeding.delivery import Delivered, Delivery, _descendants, check
from benchmarks.inputs import Documents

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
