"""Packed rows of Megatron's as documents: cut where they say, each mark at its own token, padding left out."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from tests.support.megatron_rows import Row, packed_rows, plain, write_parquet

from varlen.adapters.megatron import write_packed_parquet
from varlen.cli import app as app_module
from varlen.documents.pretokenized import ready_documents
from varlen.store.store import open_store


def oracle(row: Row) -> list[tuple[list[int], list[int]]]:
    """A row's documents as ids and marks of the ids themselves, one by one."""
    bounds = [*row["seq_start_id"], len(row["input_ids"])]
    documents = []
    for number, (start, stop) in enumerate(zip(bounds, bounds[1:])):
        inputs = row["seq_lengths"][number] if "seq_lengths" in row else stop - start - 1
        ids = row["input_ids"][start : start + inputs + 1]
        marks = [int(row["loss_mask"][start + place - 1]) for place in range(1, len(ids))]
        documents.append((ids, [int(row["loss_mask"][start]), *marks]))
    return documents


def columns_of(rows: list[Row], kind: str) -> dict[str, object]:
    columns = {name: [plain(row)[name] for row in rows] for name in plain(rows[0])}
    if kind == "lists":
        return columns
    if kind == "json":
        return {name: [json.dumps(value) for value in column] for name, column in columns.items()}
    return {name: pa.array(column, type=pa.list_(pa.int64())) for name, column in columns.items()}


@given(packed_rows())
def test_rows_become_the_documents_that_were_packed_whatever_holds_them(rows):
    documents = [document for row in rows for document in oracle(row)]
    for kind in ("lists", "json", "arrow"):
        tokens, offsets, mask, wrong = ready_documents(columns_of(rows, kind), len(rows), None)

        assert wrong == {}
        assert np.diff(offsets).tolist() == [len(ids) for ids, _ in documents]
        assert tokens.tolist() == [id_ for ids, _ in documents for id_ in ids]
        marks = [mark for _, marks in documents for mark in marks]
        assert (mask.tolist() if mask is not None else [1] * len(marks)) == marks


GOOD = {"input_ids": [1, 2, 3], "loss_mask": [1, 1, 0], "seq_start_id": [0, 2], "seq_lengths": [1, 0]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"seq_start_id": [1, 2]},
            "holds 1 at place 0 of `seq_start_id`, which must begin at 0, rise, and stay below its 3",
        ),
        ({"seq_start_id": [0, 0]}, "holds 0 at place 1 of `seq_start_id`"),
        ({"seq_start_id": [0, 3]}, "holds 3 at place 1 of `seq_start_id`"),
        ({"seq_start_id": [0, 2**61]}, "holds 2,305,843,009,213,693,952 at place 1 of `seq_start_id`"),
        ({"seq_start_id": [0, -1]}, "holds -1 at place 1 of `seq_start_id`"),
        ({"seq_start_id": []}, "has no `seq_start_id`, but 3 `input_ids`"),
        ({"seq_start_id": None}, "holds null in `seq_start_id`"),
        ({"seq_lengths": [1]}, "has 1 `seq_lengths` but 2 `seq_start_id`"),
        (
            {"seq_lengths": [2, 0]},
            "holds 2 at place 0 of `seq_lengths`, but stores 2 tokens of that document",
        ),
        ({"seq_lengths": [1, -1]}, "holds -1 at place 1 of `seq_lengths`"),
        ({"loss_mask": [1, 1]}, "has 3 `input_ids` but 2 `loss_mask`"),
        ({"loss_mask": [1, 2, 0]}, "holds 2 at token 1 of `loss_mask`"),
    ],
)
def test_a_row_with_wrong_boundaries_is_blamed_and_the_others_are_read(change, said):
    rows = [GOOD, GOOD | change, GOOD]
    columns = {name: [row[name] for row in rows] for name in GOOD}

    tokens, offsets, _, wrong = ready_documents(columns, 3, None)

    assert list(wrong) == [1]
    assert wrong[1].startswith(said)
    assert tokens.tolist() == [1, 2, 3, 1, 2, 3]
    assert offsets.tolist() == [0, 2, 3, 5, 6]


def test_a_row_without_tokens_is_no_document():
    columns = {"input_ids": [[], [1, 2]], "seq_start_id": [[], [0]]}

    assert ready_documents(columns, 2, None)[1].tolist() == [0, 2]


@pytest.fixture
def verb(tmp_path, monkeypatch, capfd):
    """Run a verb in this process, in a folder of its own; returns exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        try:
            app_module.app(list(map(str, arguments)))
        except SystemExit as ended:
            code = ended.code
        return (code, *capfd.readouterr())

    return call


def test_tokens_are_kept_once_and_packed_to_any_size(verb, tmp_path):
    row = {
        "input_ids": [1, 2, 3, 0, 4, 5],
        "loss_mask": [0, 1, 0, 0, 1, 0],
        "seq_start_id": [0, 4],
        "seq_lengths": [2, 1],
    }
    other = {"input_ids": [7, 8, 9], "loss_mask": [1, 1, 0], "seq_start_id": [0], "seq_lengths": [2]}
    write_packed_parquet([row, other], tmp_path / "training_6.idx.parquet")

    code, out, _ = verb("index", "training_6.idx.parquet", "-o", "store", "--processes", 1)

    assert code == 0
    assert out.startswith("3 documents, 8 tokens in 1 shard, 4 tokens to train on\n")
    store = open_store(tmp_path / "store")
    shards, documents = np.zeros(3, dtype=np.int64), np.arange(3)
    tokens, mask = store.gather(shards, documents, shards, store.lengths(shards, documents))
    assert tokens.tolist() == [1, 2, 3, 4, 5, 7, 8, 9]
    assert mask is not None
    assert mask.tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    for capacity in (3, 8):
        code, out, _ = verb("pack", "store", "-o", f"at{capacity}", "--capacity", capacity, "--json")
        assert (code, json.loads(out)["ledger"]["packed"]) == (0, 8)


def test_a_release_s_file_is_read_and_a_wrong_one_refused_by_file_and_row(verb, tmp_path):
    rows = [{name: GOOD[name] for name in ("input_ids", "loss_mask", "seq_start_id")}] * 2
    write_parquet(tmp_path / "a.idx.parquet", rows)
    code, out, _ = verb("index", "a.idx.parquet", "-o", "store", "--processes", 1)
    assert (code, out.split(",")[0]) == (0, "4 documents")

    table = pa.table(
        {name: [row[name] for row in [*rows, rows[0] | {"seq_start_id": [0, 5]}]] for name in rows[0]}
    )
    pq.write_table(table, tmp_path / "b.idx.parquet")
    code, _, said = verb("index", "b.idx.parquet", "-o", "other", "--processes", 1)
    assert code == 2
    assert "b.idx.parquet row 3 holds 5 at place 1 of `seq_start_id`" in " ".join(said.split())
