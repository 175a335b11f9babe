"""Data sets as people have them go through every door without an option, or end in a sentence that names it."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.rarely import mostly

import varlen as vl
from varlen.documents.source import open_source
from varlen.offline.index import index_source, quiet
from varlen.offline.pack import PackSettings, pack_source
from varlen.store.lengths import read_lengths

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
def test_a_data_set_goes_through_every_door_without_an_option(name, tmp_path):
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
def test_what_no_door_can_take_as_it_is_ends_in_one_sentence_that_names_the_way_out(name, tmp_path):
    make, named = SENTENCES[name]
    data = lines(make)(tmp_path)

    for verb in (
        ["pack", str(data), "-o", str(tmp_path / "p")],
        ["index", str(data), "-o", str(tmp_path / "s")],
    ):
        done = subprocess.run([sys.executable, "-m", "varlen", *verb], capture_output=True, text=True)

        assert done.returncode == 2
        assert named in " ".join(done.stderr.split())
        assert "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"data.jsonl"}
