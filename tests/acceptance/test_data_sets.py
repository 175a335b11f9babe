"""Data sets and splits as people have them pass every entry point, which says what it reads and what it doesn't."""

import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.command_line import asked
from tests.support.rarely import IS_SOAK, mostly

import varlen as vl
from varlen.documents.source import open_source
from varlen.errors import SettingError
from varlen.offline.index import index_source, quiet
from varlen.offline.pack import PackSettings, pack_source
from varlen.store.lengths import read_lengths
from varlen.store.open import open_tokens
from varlen.workers.processors import processors

SETTINGS = PackSettings(capacity=1024, overlong="split")
NUM_ROWS = 24


def words(draw: random.Random, most: int = 30) -> str:
    return " ".join(
        draw.choice(["río", "fox", "日本", "jumps", "over", "the", "lazy", "dog"])
        for _ in range(draw.randint(3, most))
    )


def rows_of(make: Callable[[random.Random, int], dict[str, Any]]) -> list[dict[str, Any]]:
    draw = random.Random(5)
    return [make(draw, number) for number in range(NUM_ROWS)]


def openai(draw: random.Random, number: int) -> dict[str, Any]:
    turns = [m for _ in range(number % 3 + 1) for m in (("user", words(draw)), ("assistant", words(draw)))]
    return {"messages": [{"role": role, "content": text} for role, text in [("system", "Be kind."), *turns]]}


def weighted(draw: random.Random, number: int) -> dict[str, Any]:
    row = openai(draw, 2)
    row["messages"][2]["weight"] = number % 2
    return row


def sharegpt(draw: random.Random, number: int) -> dict[str, Any]:
    return {
        "conversations": [{"from": "human", "value": words(draw)}, {"from": "gpt", "value": words(draw)}],
        "id": number,
    }


def alpaca(draw: random.Random, number: int) -> dict[str, Any]:
    return {"instruction": words(draw), "input": words(draw) if number % 2 else "", "output": words(draw)}


def dolly(draw: random.Random, number: int) -> dict[str, Any]:
    return {"instruction": words(draw), "context": "", "response": words(draw), "category": "qa"}


def parts(draw: random.Random, number: int) -> dict[str, Any]:
    content = [{"type": "text", "text": words(draw)}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": content}]}


def completion(draw: random.Random, number: int) -> dict[str, Any]:
    return {"prompt": words(draw), "completion": words(draw)}


def conversational(draw: random.Random, number: int) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": words(draw)}],
        "completion": [{"role": "assistant", "content": words(draw)}],
    }


def tokenized(draw: random.Random, number: int) -> dict[str, Any]:
    ids = [draw.randrange(1, 256) for _ in range(draw.randint(4, 40))]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100, *ids[1:]]}


def lines(
    make: Callable[[random.Random, int], dict[str, Any]], name: str = "data.jsonl"
) -> Callable[[Path], Any]:
    def write(folder: Path) -> Path:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows_of(make)), encoding="utf-8")
        return folder / name

    return write


def table(make: Callable[[random.Random, int], dict[str, Any]]) -> Callable[[Path], Any]:
    def write(folder: Path) -> Path:
        pq.write_table(pa.Table.from_pylist(rows_of(make)), folder / "data.parquet")
        return folder / "data.parquet"

    return write


def text(draw: random.Random, number: int) -> dict[str, Any]:
    return {"text": words(draw), "url": f"https://example.org/{number}", "score": 0.5}


def hub(folder: Path) -> Path:
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A data set\n")
    (folder / ".gitattributes").write_text("*.parquet filter=lfs\n")
    (folder / "dataset_infos.json").write_text('{"default": {"splits": {}}}')
    (folder / "data").mkdir()
    for split in ("train", "test"):
        pq.write_table(
            pa.Table.from_pylist(rows_of(text)), folder / "data" / f"{split}-00000-of-00001.parquet"
        )
    return folder


def repository(folder: Path) -> str:
    for name in ("src/app.py", "tests/test_app.py", "train.py", "test.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("def main():\n    return 1\n" * 5)
    return f"{folder}/**/*.py"


def prose(folder: Path) -> Path:
    for number in range(NUM_ROWS):
        (folder / f"{number}.txt").write_text(words(random.Random(number)))
    return folder


def csv(folder: Path) -> Path:
    (folder / "a.csv").write_text(
        "id,text\n" + "".join(f'{n},"{words(random.Random(n))}, and\nmore"\n' for n in range(NUM_ROWS))
    )
    return folder / "a.csv"


def array(folder: Path) -> Path:
    (folder / "a.json").write_text(json.dumps(rows_of(openai), indent=1))
    return folder / "a.json"


def shards(folder: Path) -> Path:
    for part in range(3):
        (folder / f"part-{part:05d}").write_text("".join(json.dumps(row) + "\n" for row in rows_of(text)))
    return folder


def saved(folder: Path) -> Path:
    import datasets

    datasets.Dataset.from_list(rows_of(openai)).save_to_disk(folder / "saved")
    return folder / "saved"


def in_memory(folder: Path) -> Any:
    return rows_of(sharegpt)


def frame(folder: Path) -> Any:
    return pa.Table.from_pylist(rows_of(text))


SETS: dict[str, Callable[[Path], Any]] = {
    "openai": lines(openai),
    "openai with weights": lines(weighted),
    "openai, table": table(openai),
    "sharegpt": lines(sharegpt),
    "sharegpt, table": table(sharegpt),
    "alpaca": lines(alpaca, "alpaca.json"),
    "dolly": lines(dolly),
    "parts": lines(parts),
    "prompt and completion": lines(completion),
    "conversational prompts": table(conversational),
    "tokenized": table(tokenized),
    "text": lines(text),
    "text, gathered": table(text),
    "hub": hub,
    "repository": repository,
    "prose": prose,
    "csv": csv,
    "json array": array,
    "parts of split": shards,
    "saved": saved,
    "in memory": in_memory,
    "table in memory": frame,
}


@pytest.mark.parametrize("name", SETS)
def test_a_data_set_passes_every_entry_point_without_an_option(name, tmp_path):
    (tmp_path / "data").mkdir()
    data = SETS[name](tmp_path / "data")

    source = open_source(data)
    documents = [d for part in source.parts() for d in source.read(part)]
    count, tokens = (sum(of) for of in zip(*((len(d), len(d.tokens)) for d in documents)))
    packed = pack_source(source, tmp_path / "packed", SETTINGS).manifest
    store, _ = index_source(source, tmp_path / "store")
    given = {"capacity": 1024, "global_batch_size": 2, "worker": "thread"}
    fed = {}
    for mode in ("indexed", "streaming"):
        with vl.PackedLoader(data, "bytes", mode=mode, cache=tmp_path / "cache", **given) as loader:
            fed[mode] = sum(batch.num_tokens for batch in loader)

    assert count >= (4 if name == "repository" else NUM_ROWS)
    assert (packed["ledger"]["documents_in"], packed["ledger"]["packed"]) == (count, tokens)
    assert (store.manifest["num_documents"], store.manifest["num_tokens"]) == (count, tokens)
    assert fed == {"indexed": tokens, "streaming": tokens}
    inspected = read_lengths(source, quiet, 3)
    assert (len(inspected.lengths), int(inspected.lengths.sum())) == (count, tokens)


SENTENCES: dict[str, tuple[Callable[[random.Random, int], dict[str, Any]], str]] = {
    "preferences": (lambda draw, n: {"prompt": words(draw), "chosen": "a", "rejected": "b"}, "chosen"),
    "other names": (lambda draw, n: {"body": words(draw), "id": n}, "--column text=NAME"),
    "calls without a form": (
        lambda draw, n: {
            "messages": [
                {"role": "user", "content": "W?"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"function": {"name": "w", "arguments": "{}"}}],
                },
            ]
        },
        "tool calls",
    ),
    "thoughts without a form": (
        lambda draw, n: {
            "messages": [
                {"role": "user", "content": "2?"},
                {"role": "assistant", "content": "2", "reasoning_content": words(draw)},
            ]
        },
        "--allow-unwritten",
    ),
}


@pytest.mark.parametrize("name", mostly(["preferences", "thoughts without a form"], SENTENCES))
def test_what_no_entry_point_can_take_as_it_is_ends_in_one_sentence_that_names_the_way_out(name, tmp_path):
    make, named = SENTENCES[name]
    data = lines(make)(tmp_path)

    for verb in (
        ["pack", str(data), "-o", str(tmp_path / "p")],
        ["index", str(data), "-o", str(tmp_path / "s")],
    ):
        done = asked(*verb)

        assert done.returncode == 2
        assert named in " ".join(done.stderr.split())
        assert "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"data.jsonl"}


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
        assert f"  {SAID}; --split NAME (split=) reads another split, --split all reads all of them" in out
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

    verbs = [
        ["plan", folder, "--gpus", 1, "--on-error", "skip"],
        ["pack", folder, "-o", "q→"],
        ["inspect", folder, "--on-error", "skip"],
        ["pack", folder, "-o", "p→", "--capacity", 64, "--on-error", "skip"],
        ["pack", "--help"],
    ]
    for verb in verbs if IS_SOAK else verbs[:2]:
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
