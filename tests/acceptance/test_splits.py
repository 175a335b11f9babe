"""Splits at every door: the loader, stores, packed sets and the verbs say what they read and what they don't."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from tests.support.rarely import mostly

import varlen as vl
from varlen.documents.source import open_source
from varlen.errors import SettingError
from varlen.offline.index import index_source
from varlen.offline.pack import PackSettings, pack_source
from varlen.store.open import open_tokens
from varlen.workers.processors import processors


def write(root: Path, *names: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name in names:
        (root / name).write_text(json.dumps({"text": name}) + "\n")
    return root


def varlen(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "varlen", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        encoding=environment.get("PYTHONIOENCODING", "utf-8"),
        env={**os.environ, **environment},
    )


def test_what_isnt_read_stands_in_manifests_and_changes_no_fingerprint(tmp_path):
    folder = write(tmp_path / "set", "train.jsonl", "test.jsonl")
    store, _ = index_source(open_source(folder), tmp_path / "store")
    packed = pack_source(open_source(folder), tmp_path / "packed", PackSettings(capacity=64))

    size = (folder / "test.jsonl").stat().st_size
    said = [{"why": "split test", "num_files": 1, "num_bytes": size, "names": ["test.jsonl"]}]
    for source in (store.manifest["source"], packed.manifest["source"]):
        assert source["left_out"] == said
        assert source["taken"] == ["train"]
        assert [file["name"] for file in source["files"]] == ["train.jsonl"]
    (folder / "test.jsonl").write_text("")
    assert index_source(open_source(folder), tmp_path / "store")[1]
    assert pack_source(open_source(folder), tmp_path / "packed", PackSettings(capacity=64)).was_there


@pytest.mark.parametrize("mode", ["streaming", "indexed"])
def test_the_loader_reads_train_and_says_so(tmp_path, caplog, mode):
    folder = write(tmp_path / "set", "train.jsonl", "test.jsonl")
    usual = {"capacity": 64, "global_batch_size": 1, "worker": "thread", "cache": tmp_path / "cache"}

    def texts(**settings: object) -> list[str]:
        with vl.PackedLoader(str(folder), "bytes", mode=mode, shuffle=False, **usual, **settings) as loader:
            return [
                bytes(b.input_ids[b.input_ids < 256].astype("uint8")).rstrip(b"\0").decode() for b in loader
            ]

    with caplog.at_level(logging.WARNING, "varlen"):
        assert texts() == ["train.jsonl"]
    assert "split train is read; left out: split test (1 file, 23 bytes: test.jsonl)" in caplog.text
    assert texts(split="test") == ["test.jsonl"]
    assert "".join(texts(split="all")) == "test.jsonltrain.jsonl"
    with pytest.raises(SettingError, match=r'split must be the name of one, or "all"'):
        texts(split="")


def test_splits_of_ready_tokens_are_chosen_alike_in_the_worker(tmp_path):
    for name in ("train", "test"):
        rows = {"input_ids": [[len(name)] * 8]}
        table = pa.table(rows, schema=pa.schema([("input_ids", pa.list_(pa.int32()))]))
        (tmp_path / "set").mkdir(exist_ok=True)
        with pa.ipc.new_file(tmp_path / "set" / f"{name}.arrow", table.schema) as writer:
            writer.write_table(table)

    def ids(**settings: object) -> set[int]:
        with vl.PackedLoader(
            str(tmp_path / "set"), capacity=8, global_batch_size=1, worker="process", **settings
        ) as loader:
            assert loader.mode == "indexed"
            return {int(token) for batch in loader for token in batch.input_ids.ravel()}

    assert ids() == {5}
    assert ids(split="test") == {4}
    assert ids(split="all") == {4, 5}
    assert "left out: split test" in str(open_tokens(tmp_path / "set").unread)


SAID = "split train is read; left out: split test (1 file, 23 bytes: test.jsonl)"


def test_every_verb_says_what_it_reads_and_reads_another_split_where_one_is_named(tmp_path, verb):
    write(tmp_path / "set", "train.jsonl", "test.jsonl")
    for words in (["pack", "set", "-o", "packed", "--capacity", 64], ["index", "set", "-o", "store"]):
        code, out, said = verb(*words)
        assert code == 0, said
        assert f"  {SAID}; --split NAME (split=) reads another, all everything" in out
    assert SAID in verb("pack", "store", "-o", "again", "--capacity", 64)[1]
    for words in (["inspect", "set"], ["plan", "set", "--gpus", 8, "--json"]):
        code, _, said = verb(*words)
        assert code == 0, said
        assert f"varlen: {SAID}" in said
    _, every, _ = verb("pack", "set", "-o", "all", "--capacity", 64, "--split", "all")
    assert every.startswith("2 documents")
    assert "left out" not in every
    code, _, said = verb("inspect", "set", "--split", "dev", "--read-as", "jsonl")
    assert "set has no split dev; it has test (1 file), train (1 file)" in said
    assert code == 2
    advice = verb("inspect", "set", "--split", "test", "--read-as", "jsonl", "--binary-as-text")[1]
    assert "--split test --read-as jsonl --binary-as-text" in " ".join(advice.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pack", "set", "-o", "x", "--format", "jsonl"], "to say that DATA is jsonl, pass --read-as jsonl"),
        (
            ["pack", "set/test.jsonl", "-o", "x", "--split", "test"],
            "files and globs are read as they are named",
        ),
        (["index", "set", "-o", "x", "--read-as", "xml"], "format must be one of jsonl, json"),
        (["pack", "store", "-o", "x", "--split", "test"], "--split and --read-as can't change them"),
        (["pack", "set", "-o", "x", "--megatron-split", "validation"], "--megatron-split goes with"),
    ],
)
def test_what_a_split_or_format_cant_be_is_one_sentence(tmp_path, verb, arguments, said):
    write(tmp_path / "set", "train.jsonl", "test.jsonl")
    if "store" in arguments:
        index_source(open_source(tmp_path / "set"), tmp_path / "store")

    code, _, found = verb(*arguments)

    assert code == 2
    assert said in found
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("encoding", mostly(["ascii"], ["latin-1", "ascii"]))
def test_an_output_that_cant_take_a_character_ends_no_verb(tmp_path, monkeypatch, encoding):
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "söt→", "train.jsonl", "test.jsonl")
    (folder / "train.jsonl").write_text(json.dumps({"text": "→ Ω"}) + "\n" + '{"text": 5}\n')
    usual = {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "1"}

    for verb in (
        ["inspect", folder, "--on-error", "skip"],
        ["pack", folder, "-o", "p→", "--capacity", 64, "--on-error", "skip"],
        ["plan", folder, "--gpus", 1, "--on-error", "skip"],
        ["pack", folder, "-o", "q→"],
        ["pack", "--help"],
    ):
        done = varlen(*verb, **usual)
        assert done.returncode in (0, 2), done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("files", "own", "count"),
    [
        ({}, "0::/\n", None),
        ({"cpu.max": "100000 100000"}, "0::/\n", 1),
        ({"cpu.max": "max 100000"}, "0::/\n", None),
        ({"a/cpu.max": "max 100000", "cpu.max": "50000 100000"}, "0::/a/b\n", 1),
        ({"cpu.max": "50000 100000"}, "0::/docker/1234\n", 1),
        ({"cpu/a/cpu.cfs_quota_us": "90000", "cpu/a/cpu.cfs_period_us": "100000"}, "4:cpu,cpuacct:/a\n", 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu,cpuacct:/a\n", None),
        ({"cpu.max": "nonsense"}, "garbled", None),
    ],
)
def test_processors_are_those_that_the_cgroup_grants(tmp_path, files, own, count):
    for name, content in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(content)
    (tmp_path / "own").write_text(own)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()

    assert processors(tmp_path / "root", tmp_path / "own") == (count or allowed)
