"""`varlen index` on the command line: a store that pack takes, the same bytes whoever makes it, resumed, refused."""

import json
import subprocess
import sys

import pytest
from tests.support.offline_packs import contents, write_chats, write_texts

from varlen.offline import index as index_module
from varlen.store.store import open_store


def test_a_store_is_made_once_and_packed_any_number_of_times(verb, tmp_path):
    texts = write_texts(tmp_path / "a.jsonl")
    tokens = sum(len(text.encode()) + 1 for text in texts)

    code, out, _ = verb("index", "a.jsonl", "-o", "store", "--processes", 1)
    assert code == 0
    assert out.startswith(f"60 documents, {tokens:,} tokens in 1 shard, {tokens - 60:,} tokens to train on\n")
    assert "varlen pack store -o packed" in out
    before = contents(tmp_path / "store")
    code, out, _ = verb("index", "a.jsonl", "-o", "store", "--processes", 2)
    assert (code, out.splitlines()[0]) == (0, "store was finished already, from the same data and settings:")
    assert contents(tmp_path / "store") == before

    for capacity in (256, 1024):
        code, out, _ = verb("pack", "store", "-o", f"at{capacity}", "--capacity", capacity, "--json")
        assert (code, json.loads(out)["ledger"]["packed"]) == (0, tokens)


def test_any_number_of_processes_gives_the_same_bytes(verb, tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "PART_BYTES", 2000)
    write_chats(tmp_path / "a.jsonl", 60)
    for count in (1, 2, 3):
        assert verb("index", "a.jsonl", "-o", f"store{count}", "--processes", count)[0] == 0

    assert len(open_store(tmp_path / "store1").shards) > 1
    assert contents(tmp_path / "store1") == contents(tmp_path / "store2") == contents(tmp_path / "store3")


def test_the_manifest_is_printed_for_machines_and_skips_are_told(verb, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": 1}\n')

    code, out, _ = verb("index", "a.jsonl", "-o", "store", "--on-error", "skip", "--json")
    assert (code, json.loads(out)) == (0, json.loads((tmp_path / "store" / "manifest.json").read_text()))
    assert json.loads(out)["num_skipped"] == 1
    assert "  1 record skipped" in verb("index", "a.jsonl", "-o", "store", "--on-error", "skip")[1]


def test_a_store_within_the_data_is_left_out_of_it(verb, tmp_path):
    write_texts(tmp_path / "a.jsonl")

    assert verb("index", ".", "-o", "store")[0] == 0
    assert verb("index", ".", "-o", "store")[1].startswith("store was finished already")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.jsonl", "-o", "x"], "missing.jsonl does not exist"),
        (["store", "-o", "x"], "store is a token store already"),
        (["a.jsonl", "-o", "a.jsonl"], "a.jsonl"),
        (["a.jsonl", "-o", "store"], "store holds"),
        (["a.jsonl", "-o", ".."], "name a new folder"),
        (["a.jsonl", "-o", "x", "--processes", 0], "processes must be at least 1"),
        (["a.jsonl", "-o", "x", "--on-error", "maybe"], "on_error must be"),
    ],
)
def test_what_cannot_be_indexed_ends_in_one_sentence_and_exit_code_two(verb, tmp_path, arguments, said):
    write_texts(tmp_path / "b.jsonl", seed=1)
    write_texts(tmp_path / "a.jsonl")
    assert verb("index", "b.jsonl", "-o", "store")[0] == 0

    code, out, error = verb("index", *arguments)

    assert (code, out) == (2, "")
    assert error.startswith("varlen: ")
    assert said in error
    assert not (tmp_path / "x").exists()


def test_the_help_shows_an_example():
    done = subprocess.run(
        [sys.executable, "-m", "varlen", "index", "--help"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0
    assert "varlen index 'chats/*.jsonl' -o store" in done.stdout
