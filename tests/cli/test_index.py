"""`varlen index`: a store that pack takes, the same bytes whoever makes it, resumed, grown, refused."""

import json

import numpy as np
import pytest
from tests.support.offline_packs import contents, write_chats, write_texts

from varlen.documents.source import open_source
from varlen.errors import SettingError, SourceError
from varlen.offline import index as grow_module
from varlen.offline import index as index_module
from varlen.offline.index import index_source
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


def test_a_bad_row_is_named_with_the_way_out(verb, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": 1}\n')

    for arguments in (["index", "a.jsonl", "-o", "store"], ["inspect", "a.jsonl"]):
        code, _, said = verb(*arguments)
        words = " ".join(said.split())
        assert (code, "a.jsonl line 2 holds" in words, "(--on-error skip)" in words) == (2, True, True)
        assert verb(*arguments, "--on-error", "skip")[0] == 0


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


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "PART_BYTES", 2000)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write_texts(tmp_path / "data" / "m.jsonl", seed=0)
    return tmp_path / "data"


def grown(data, store="store", **settings):
    return index_source(open_source(data), data.parent / store, **settings)


def everything(store):
    places = [(s, d) for s, count in enumerate(store.documents.tolist()) for d in range(count)]
    shards, documents = np.array(places).T
    lengths = store.lengths(shards, documents)
    return store.gather(shards, documents, np.zeros(len(shards), dtype=np.int64), lengths)[0].tolist()


def test_more_files_become_parts_behind_those_that_stay_byte_for_byte(data):
    first, _ = grown(data)
    before, tokens = contents(first.folder), everything(first)
    write_texts(data / "z.jsonl", seed=1)
    write_texts(data / "a.jsonl", seed=2)  # sorts before, and yet comes behind
    second, was_there = grown(data)

    after = contents(second.folder)
    assert not was_there
    assert {name: mark for name, mark in after.items() if name in before} == {
        **before,
        "manifest.json": after["manifest.json"],
    }
    assert second.shards[: len(first.shards)] == first.shards
    assert everything(second)[: len(tokens)] == tokens
    assert [file["name"] for file in second.manifest["source"]["files"]] == ["m.jsonl", "a.jsonl", "z.jsonl"]
    assert int(second.parts[len(first.shards)]) == first.num_parts
    assert second.fingerprint != first.fingerprint
    assert second.manifest["num_tokens"] == len(everything(second)) > 2 * len(tokens)
    assert not list(data.parent.glob("*.partial"))

    again, was_there = grown(data)
    assert was_there
    assert again.fingerprint == second.fingerprint
    assert contents(again.folder) == after


def test_each_stage_is_listed_and_its_fingerprint_known(data):
    stores = [grown(data)[0]]
    for seed in (1, 2):
        write_texts(data / f"n{seed}.jsonl", count=30, seed=seed)
        stores.append(grown(data)[0])

    last = stores[-1]
    assert [(s["files"], s["parts"], s["shards"]) for s in last.manifest["grown"]] == [
        (n + 1, store.num_parts, len(store.shards)) for n, store in enumerate(stores[:-1])
    ]
    for store in stores:
        assert last.fingerprint_at(store.num_parts) == store.fingerprint
    assert last.fingerprint_at(1) is None
    assert len({store.fingerprint for store in stores}) == 3
    fresh, _ = grown(data, "fresh")  # other parts, so another order of shuffled documents
    assert everything(fresh) == everything(last)
    assert fresh.fingerprint != last.fingerprint


def test_a_store_that_is_open_takes_in_what_was_added(data):
    store, _ = grown(data)
    tokens, shards = everything(store), list(store.shards)
    write_texts(data / "z.jsonl", seed=1)
    grown(data)

    assert store.shards == shards
    assert everything(store) == tokens
    store.reread()
    assert everything(store) == everything(open_store(store.folder))
    write_texts(data / "m.jsonl", seed=9)
    grown(data, overwrite=True)
    with pytest.raises(SourceError, match="was replaced by another store"):
        store.reread()


@pytest.mark.parametrize("how", ["changed", "removed", "setting"])
def test_what_is_no_growth_is_refused_and_leaves_the_store(data, how):
    store, _ = grown(data)
    before = contents(store.folder)
    write_texts(data / "z.jsonl", seed=1)
    if how == "changed":
        write_texts(data / "m.jsonl", seed=5)
    elif how == "removed":
        (data / "m.jsonl").unlink()
    source = open_source(data, append_eos=how != "setting")

    with pytest.raises(SettingError, match="holds a set made from other data or settings"):
        index_source(source, store.folder)
    assert contents(store.folder) == before


@pytest.mark.parametrize(
    "place", [(index_module, "write_json"), (grow_module, "write_json"), (grow_module, "sync")]
)
@pytest.mark.parametrize("call", [1, 2])
def test_growth_that_was_interrupted_anywhere_leaves_the_old_store_and_goes_on(
    data, monkeypatch, place, call
):
    store, _ = grown(data)
    before, tokens = store.fingerprint, everything(store)
    write_texts(data / "z.jsonl", seed=1)
    grown(data, "whole")  # of another fingerprint, but the same documents
    real, calls = getattr(*place), []

    def interrupt(*arguments):
        calls.append(arguments)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(*place, interrupt)
        with pytest.raises(KeyboardInterrupt):
            grown(data)
    now = open_store(store.folder)
    listed = len(now.shards) > len(store.shards)
    assert everything(now)[: len(tokens)] == tokens
    assert listed or now.fingerprint == before
    tokenized = []
    real_writer = index_module.ShardWriter
    monkeypatch.setattr(index_module, "ShardWriter", lambda *a: tokenized.append(a) or real_writer(*a))
    done, _ = grown(data)

    assert everything(done) == everything(open_store(data.parent / "whole"))
    assert sorted(p.name for p in done.folder.iterdir() if p.is_dir()) == sorted(done.shards)
    if place == (grow_module, "sync"):
        assert tokenized == []  # all was moved back, or listed already
    assert not [path for path in data.parent.glob("*.partial") if not listed]


def test_the_verb_says_what_was_added(verb, data):
    assert verb("index", "data", "-o", "store")[0] == 0
    write_texts(data / "z.jsonl", count=7, seed=1)

    code, out, _ = verb("index", "data", "-o", "store")
    assert code == 0
    assert out.startswith("67 documents")
    assert "  60 documents of them were there before" in out
    code, out, _ = verb("index", "data", "-o", "store", "--json")
    assert [stage["num_documents"] for stage in json.loads(out)["grown"]] == [60]
