"""`varlen inspect`: what it prints, what it writes, and one sentence for what is wrong."""

import json

import numpy as np
import pytest
from test_cli import one_sentence, varlen

LENGTHS = np.random.default_rng(0).integers(1, 900, 2_000)


@pytest.fixture
def stored(tmp_path):
    """A file of lengths."""
    path = tmp_path / "chats.npz"
    np.savez(path, lengths=LENGTHS, targets=LENGTHS // 2)
    return path


def without_progress(run):
    run.stderr = "\n".join(line for line in run.stderr.splitlines() if "%  " not in line)
    return run


def test_a_table_is_printed_and_nothing_written(stored):
    run = varlen("inspect", stored, cwd=stored.parent)

    assert run.returncode == 0, run.stderr
    assert "Lengths of chats" in run.stdout
    assert "2,000 documents" in run.stdout
    assert "vl.pack(lengths, capacity=" in run.stdout
    assert "-o report.html shows this in pictures" in run.stdout
    assert "100 %" in run.stderr
    assert [path.name for path in stored.parent.iterdir()] == ["chats.npz"]


def test_one_json_object_is_printed_and_a_report_written_where_it_is_named(stored):
    run = varlen(
        "inspect", stored, stored, "--json", "-o", "out.html", "--capacity", 1024, "--capacity", 4096,
        "--batch-documents", 16, "--seed", 3, cwd=stored.parent,
    )  # fmt: skip

    assert run.returncode == 0, run.stderr
    tree = json.loads(run.stdout)
    assert [at["capacity"] for at in tree["capacities"]] == [1024, 4096]
    assert tree["distribution"]["documents"] == 4_000
    assert tree["distribution"]["targets"] == 2 * int((LENGTHS // 2).sum())
    assert (tree["name"], tree["batch_documents"], tree["seed"]) == ("chats and 1 more", 16, 3)
    assert tree["skipped"] == []
    assert (stored.parent / "out.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_what_cannot_be_read_is_left_out_where_that_is_asked_for(stored):
    (stored.parent / "bad.npz").write_text("no archive")

    run = varlen("inspect", stored, "bad.npz", "--on-error", "skip", "--json", cwd=stored.parent)

    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["skipped"][0].startswith("bad.npz is no .npz file with lengths")
    assert "varlen: 1 could not be read and were left out: bad.npz" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nothing.npz",), "nothing.npz does not exist"),
        (("bad.npz",), "bad.npz is no .npz file with lengths"),
        (("chats.npz", "--capacity", "0"), "capacity must be a whole number"),
        (("chats.npz", "--batch-documents", "0"), "batch_documents must be"),
        (("chats.npz", "--seed", "-1"), "seed must be from 0"),
        (("chats.npz", "--on-error", "ignore"), "--on-error must be one of raise, skip; got 'ignore'"),
        (("chats.npz", "--column", "text"), "--column must be of the form ROLE=NAME"),
        (("chats.npz", "--column", "text=a", "--column", "text=b"), "--column names text twice"),
        (("chats.npz", "-o", "no/report.html"), "the folder no doesn't exist"),
        (("empty.npz",), "none of the 3 documents holds a token"),
    ],
)
def test_bad_input_ends_in_one_sentence_and_leaves_nothing(stored, arguments, said):
    (stored.parent / "bad.npz").write_text("no archive")
    np.savez(stored.parent / "empty.npz", lengths=np.zeros(3, np.int64))
    before = sorted(stored.parent.iterdir())

    run = varlen("inspect", *arguments, cwd=stored.parent)

    assert said in one_sentence(without_progress(run))
    assert sorted(stored.parent.iterdir()) == before
