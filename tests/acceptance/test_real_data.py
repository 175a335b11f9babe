"""`varlen inspect` and `varlen pack` on every real file and on mixtures of them: nothing is lost, and both agree."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests.support.listed_files import REAL_TEXTS
from tests.support.rarely import mostly

from varlen.cli import app as app_module

TOKENS = ("tokens_docs_qwen.npz", "tokens_sft_qwen.npz")
EVERY = [f"text/{name}" for name in REAL_TEXTS] + [f"tokens/{name}" for name in TOKENS]
CAPACITY = 8192
FRAME = len(["<|im_start|>", "\n", "<|im_end|>", "\n"])
"""Tokens that ChatML puts around a message beside its role."""

Verb = Callable[..., Any]


@pytest.fixture
def verb(capsys: pytest.CaptureFixture[str]) -> Verb:
    """Run a verb in this process; returns what it prints as JSON."""

    def run(*arguments: object) -> Any:
        with pytest.raises(SystemExit) as ended:
            app_module.app([*map(str, arguments), "--json"])
        printed = capsys.readouterr()
        assert ended.value.code == 0, printed.err
        return json.loads(printed.out)

    return run


def oracle(path: Path) -> tuple[int, int]:
    """Return documents and tokens of a file, counted without varlen: bytes and an end for each text."""
    if path.suffix == ".npz":
        offsets = np.load(path)["offsets"]
        return len(offsets) - 1, int(offsets[-1])
    is_lines = path.suffix == ".jsonl"
    rows = map(json.loads, path.read_bytes().splitlines()) if is_lines else pq.read_table(path).to_pylist()
    documents = tokens = 0
    for row in rows:
        documents += 1
        if "text" in row:
            tokens += len(row["text"].encode()) + bool(row["text"])
        else:
            tokens += sum(FRAME + len((m["role"] + m["content"]).encode()) for m in row["messages"])
    return documents, tokens


def check(verb: Verb, paths: list[Path], folder: Path) -> None:
    """Inspect and pack files, and count what came out against the oracle and against each other."""
    documents, tokens = map(sum, zip(*map(oracle, paths)))
    looked_at = verb("inspect", *paths, "--capacity", CAPACITY)["distribution"]
    manifest = verb(
        "pack", *paths, "-o", folder / "out", "--capacity", CAPACITY, "--overlong", "split", "--processes", 1
    )
    rows = pq.ParquetDataset(sorted((folder / "out").glob("*.parquet"))).read()
    ids, labels, lengths = (rows[name].combine_chunks() for name in ("input_ids", "labels", "seq_lengths"))

    ledger = manifest["ledger"]
    assert (looked_at["documents"], looked_at["tokens"]) == (documents, tokens)
    assert (ledger["documents_in"], ledger["tokens_in"], ledger["packed"]) == (documents, tokens, tokens)
    assert len(ids.values) == len(labels.values) == int(lengths.values.to_numpy().sum()) == tokens
    assert max(map(len, ids.to_pylist())) <= CAPACITY
    assert manifest["num_targets"] == int((labels.values.to_numpy() != -100).sum()) > 0
    if ledger["split_documents"] == 0:
        assert looked_at.get("targets") in (None, manifest["num_targets"])


@pytest.mark.parametrize("name", mostly(EVERY[::2], EVERY))
def test_every_real_file_is_inspected_and_packed_to_the_last_token(name, data, tmp_path, verb):
    check(verb, [data / name], tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(EVERY[:3], marks=pytest.mark.soak),
        pytest.param(EVERY[2:8], marks=pytest.mark.soak),
        [EVERY[0], EVERY[9]],
        pytest.param(EVERY[8:], marks=pytest.mark.soak),
    ],
    ids=["texts and chats", "chats", "tokens too", "tokens"],
)
def test_mixtures_of_real_files_are_inspected_and_packed_to_the_last_token(names, data, tmp_path, verb):
    check(verb, [data / name for name in names], tmp_path)


def test_no_real_file_is_left_out(data):
    found = [
        f"{folder}/{path.name}" for folder in ("text", "tokens") for path in sorted((data / folder).iterdir())
    ]
    assert found == EVERY
