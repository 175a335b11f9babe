"""Ready tokens: what rows of ids and their boundaries become, against plain oracles; and every fault."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.megatron_rows import Row, packed_rows, plain, write_parquet

from varlen.adapters.megatron import write_packed_parquet
from varlen.documents.pretokenized import ready_documents
from varlen.documents.source import open_source
from varlen.errors import SourceError
from varlen.store.store import open_store

ReadyRow = dict[str, Any]


@st.composite
def rows_of_ids(draw: st.DrawFn) -> list[ReadyRow]:
    """Rows with the same columns, some of them faulty."""
    roles = draw(st.sets(st.sampled_from(["labels", "loss_mask", "attention_mask", "seq_lengths"])))
    rows = []
    for _ in range(draw(st.integers(0, 6))):
        ids = draw(
            st.lists(st.integers(0, 9) if draw(st.integers(0, 3)) else st.integers(-1, 12), max_size=6)
        )
        row: ReadyRow = {"input_ids": ids}
        if "labels" in roles:
            row["labels"] = [draw(st.sampled_from([i, -100])) for i in ids]
        for role in roles & {"loss_mask", "attention_mask"}:
            row[role] = draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
        if "seq_lengths" in roles:
            cut = draw(st.integers(0, len(ids)))
            row["seq_lengths"] = [cut, len(ids) - cut]
        if draw(st.integers(0, 4)) == 0:
            role = draw(st.sampled_from(sorted(row)))
            row[role] = draw(st.none() | st.lists(st.integers(-101, 12), max_size=4) | st.just([None]))
        rows.append(row)
    return rows


def oracle(row: ReadyRow, vocab_size: int) -> list[tuple[list[int], list[int]]] | None:
    """A row's documents as ids and marks, or None where it is faulty."""
    columns = list(row.values())
    if any(column is None or None in column for column in columns):
        return None
    ids = row["input_ids"]
    if any(len(column) != len(ids) for role, column in row.items() if role != "seq_lengths"):
        return None
    if any(not 0 <= i < vocab_size for i in ids):
        return None
    if any(label not in (i, -100) for label, i in zip(row.get("labels", []), ids)):
        return None
    if any(bit not in (0, 1) for role in ("loss_mask", "attention_mask") for bit in row.get(role, [])):
        return None
    lengths = row.get("seq_lengths", [len(ids)])
    if any(length < 0 for length in lengths) or sum(lengths) != len(ids):
        return None
    documents, at = [], 0
    for length in lengths:
        places = [p for p in range(at, at + length) if row.get("attention_mask", [1] * len(ids))[p]]
        marks = [
            int(row.get("labels", ids)[p] != -100 and row.get("loss_mask", [1] * len(ids))[p] == 1)
            for p in places
        ]
        documents.append(([ids[p] for p in places], marks))
        at += length
    return documents


def columns_of(rows: list[ReadyRow], kind: str) -> dict[str, Any]:
    columns = {role: [row[role] for row in rows] for role in (rows[0] if rows else {"input_ids": []})}
    if kind == "lists":
        return columns
    if kind == "json":
        return {role: [json.dumps(value) for value in column] for role, column in columns.items()}
    types = {"int32": pa.list_(pa.int32()), "int64": pa.list_(pa.int64()), "large": pa.large_list(pa.int64())}
    if kind == "sliced":
        return {
            r: pa.array([[1, 2], *c, [3]], pa.list_(pa.int64())).slice(1, len(rows))
            for r, c in columns.items()
        }
    return {role: pa.array(column, types[kind]) for role, column in columns.items()}


@given(rows_of_ids())
def test_rows_become_what_the_oracle_says_whatever_holds_them(rows):
    expected = [oracle(row, 10) for row in rows]
    documents = [document for found in expected if found is not None for document in found]

    for kind in ("lists", "json", "int32", "int64", "large", "sliced"):
        tokens, offsets, mask, wrong = ready_documents(columns_of(rows, kind), len(rows), 10)

        assert sorted(wrong) == [n for n, found in enumerate(expected) if found is None]
        assert tokens.dtype == np.int32
        assert np.diff(offsets).tolist() == [len(ids) for ids, _ in documents]
        assert tokens.tolist() == [i for ids, _ in documents for i in ids]
        marks = [mark for _, marks in documents for mark in marks]
        assert (mask.tolist() if mask is not None else [1] * len(marks)) == marks


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"input_ids": [1, 2], "labels": [1]}, "has 2 `input_ids` but 1 `labels`"),
        ({"input_ids": [1, 2], "loss_mask": [1, 1, 1]}, "has 2 `input_ids` but 3 `loss_mask`"),
        ({"input_ids": [1, 10]}, "holds the id 10 at token 1 (the vocabulary has 10 ids)"),
        ({"input_ids": [-1]}, "holds the id -1 at token 0 (the vocabulary has 10 ids)"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "has the label 2 for the id 1 at token 0"),
        ({"input_ids": [1], "loss_mask": [2]}, "holds 2 at token 0 of `loss_mask` (0 or 1)"),
        ({"input_ids": [1], "attention_mask": [2]}, "boundaries of packed documents go into `seq_lengths`"),
        ({"input_ids": [1, 2], "seq_lengths": [1]}, "has `seq_lengths` that add up to 1, but 2 `input_ids`"),
        ({"input_ids": [1, 2], "seq_lengths": [3, -1]}, "holds 3 in `seq_lengths`, but 2 `input_ids`"),
        ({"input_ids": [1, 2], "seq_lengths": [2, -1]}, "holds -1 in `seq_lengths`, but 2 `input_ids`"),
        ({"input_ids": None}, "holds null in `input_ids`, which must be a list of whole numbers"),
        ({"input_ids": "a b"}, "holds text in `input_ids`, which must be a list of whole numbers"),
        ({"input_ids": 5}, "holds number in `input_ids`, which must be a list of whole numbers"),
        ({"input_ids": [1, 2.0]}, "holds number at place 1 of `input_ids`, which must be whole numbers"),
        ({"input_ids": [True]}, "holds boolean at place 0 of `input_ids`, which must be whole numbers"),
        ({"input_ids": [[1]]}, "holds array at place 0 of `input_ids`, which must be whole numbers"),
        ({"input_ids": [2**70]}, "holds a number in `input_ids` of more than 62 bits"),
        ({"input_ids": [2**62 - 1]}, "holds the id 4611686018427387903 at token 0"),
    ],
)
def test_each_fault_of_a_row_is_said_in_a_sentence_and_the_others_are_kept(row, said):
    good = {"input_ids": [5], "labels": [5], "loss_mask": [1], "attention_mask": [1], "seq_lengths": [1]}
    columns = {role: [good[role], value, good[role]] for role, value in row.items()}

    tokens, _, _, wrong = ready_documents(columns, 3, 10)

    assert said in wrong[1]
    assert list(wrong) == [1]
    assert tokens.tolist() == [5, 5]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([[1, 2], None, [3, 4]], pa.list_(pa.uint8(), 2)),
        pa.array([[1, 2], None, [3, 4]], pa.large_list(pa.uint64())),
        pa.array([[1, 2], [None, 9], [3, 4]], pa.list_(pa.int16())),
        pa.array([[9, 9], [1, 2], None, [3, 4], [9, 9]], pa.list_(pa.int32(), 2)).slice(1, 3),
        pa.array(["[1, 2]", "null", "[3, 4]"]),
    ],
)
def test_arrow_lists_of_any_kind_with_a_null_give_their_other_rows(column):
    tokens, offsets, mask, wrong = ready_documents({"input_ids": column}, 3, None)

    assert tokens.tolist() == [1, 2, 3, 4]
    assert offsets.tolist() == [0, 2, 4]
    assert mask is None
    assert list(wrong) == [1]


def test_sums_of_boundaries_that_turn_over_are_refused():
    ids, lengths = pa.array([[1, 2, 3]]), pa.array([[2**63, 2**63, 3]], pa.list_(pa.uint64()))

    for lists in (lengths, [[2**61] * 8 + [3]]):
        tokens, _, _, wrong = ready_documents({"input_ids": ids, "seq_lengths": lists}, 1, None)
        assert len(tokens) == 0
        assert "but 3 `input_ids`" in wrong[0]


@pytest.mark.parametrize("kind", ["lists", "arrow"])
def test_booleans_are_taken_for_masks_and_not_for_ids(kind):
    mask: Any = [[True, False]] if kind == "lists" else pa.array([[True, False]])

    assert ready_documents({"input_ids": [[1, 2]], "loss_mask": mask}, 1, None)[2].tolist() == [1, 0]
    assert "boolean at place 0" in ready_documents({"input_ids": mask}, 1, None)[3][0]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_mask_that_only_later_rows_have_is_an_error_and_never_overlooked(tmp_path, name):
    rows = [{"input_ids": [1]}, {"input_ids": [2], "loss_mask": [0]}, {"input_ids": [3]}]
    text = json.dumps(rows) if name == "a.json" else "\n".join(map(json.dumps, rows))
    (tmp_path / name).write_text(text)

    source = open_source(tmp_path)
    with pytest.raises(
        SourceError, match=r"(line|value) 2 has `loss_mask`, which the file's first row has not"
    ):
        list(source.read(source.parts()[0]))


def documents(path: Path) -> list[list[int]]:
    source = open_source(path)
    read = [some for part in source.parts() for some in source.read(part)]
    bounds = [some.offsets.tolist() for some in read]
    return [some.tokens[a:b].tolist() for some, at in zip(read, bounds) for a, b in zip(at, at[1:])]


def write(path: Path, rows: list[ReadyRow]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@given(st.lists(st.lists(st.integers(1, 5), max_size=4), max_size=5), st.integers(0, 3), st.integers(0, 3))
def test_documents_begin_where_positions_do_and_padding_is_none_of_them(rows, left, right):
    ids, positions, mask = [], [], []
    for lengths in rows:
        inside = [place for length in lengths for place in range(length)]
        positions.append([1] * left + inside + [1] * right)
        ids.append([9] * left + list(range(len(inside))) + [9] * right)
        mask.append([0] * left + [1] * len(inside) + [0] * right)
    columns = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}

    tokens, offsets, _, wrong = ready_documents(columns, len(rows), None)

    assert wrong == {}
    assert tokens.tolist() == [token for lengths in rows for token in range(sum(lengths))]
    found = [int(b - a) for a, b in zip(offsets, offsets[1:]) if b > a]
    assert found == [length for lengths in rows for length in lengths]


@pytest.mark.parametrize(("positions", "said"), [([7, 8], "7 at token 0"), ([0, 2], "2 at token 1")])
def test_positions_that_tell_no_beginning_are_refused(tmp_path, positions, said):
    path = write(tmp_path / "a.jsonl", [{"input_ids": [1, 2], "position_ids": positions}])

    with pytest.raises(SourceError, match=rf"line 1 has the position {said} .*give `seq_lengths` instead"):
        documents(path)


def test_lengths_go_before_positions(tmp_path):
    row = {"input_ids": [1, 2, 3], "seq_lengths": [1, 2], "position_ids": [5, 5, 5]}

    assert documents(write(tmp_path / "a.jsonl", [row])) == [[1], [2, 3]]


CHAT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_system_column_is_the_first_message_of_the_rows_that_have_one(tmp_path, name):
    rows: list[ReadyRow] = [{"conversations": CHAT}, {"conversations": CHAT, "system": "Be brief."}]
    path = tmp_path / name
    if name.endswith("jsonl"):
        write(path, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows[::-1]).take([1, 0]), path)

    texts = [bytes(token for token in ids if token < 256).decode() for ids in documents(path)]

    assert texts == ["user\nhi\nassistant\nho\n", "system\nBe brief.\nuser\nhi\nassistant\nho\n"]


def test_a_system_column_may_repeat_the_first_message_but_not_contradict_it(tmp_path):
    chat = [{"role": "system", "content": "x"}, *({"role": r, "content": "y"} for r in ("user", "assistant"))]
    same = documents(write(tmp_path / "a.jsonl", [{"messages": chat, "system": "x"}]))

    assert same == documents(write(tmp_path / "b.jsonl", [{"messages": chat}]))
    with pytest.raises(SourceError, match="`system` and the chat's own system message differ"):
        documents(write(tmp_path / "c.jsonl", [{"messages": chat, "system": "z"}]))
    with pytest.raises(SourceError, match="`system` must be a string, found number"):
        documents(write(tmp_path / "d.jsonl", [{"messages": chat[1:], "system": 5}]))


def test_a_vocabulary_that_leaves_other_records_out_is_another_source(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}, {"input_ids": [7]}])

    marks = {open_source(path, vocab_size=size, on_error="skip").fingerprint for size in (None, 5, 8)}

    assert len(marks) == 3


def cut_at_starts(row: Row) -> list[tuple[list[int], list[int]]]:
    """A row's documents as ids and marks of the ids themselves, one by one."""
    bounds = [*row["seq_start_id"], len(row["input_ids"])]
    documents = []
    for number, (start, stop) in enumerate(zip(bounds, bounds[1:])):
        inputs = row["seq_lengths"][number] if "seq_lengths" in row else stop - start - 1
        ids = row["input_ids"][start : start + inputs + 1]
        marks = [int(row["loss_mask"][start + place - 1]) for place in range(1, len(ids))]
        documents.append((ids, [int(row["loss_mask"][start]), *marks]))
    return documents


def packed_columns(rows: list[Row], kind: str) -> dict[str, object]:
    columns = {name: [plain(row)[name] for row in rows] for name in plain(rows[0])}
    if kind == "lists":
        return columns
    if kind == "json":
        return {name: [json.dumps(value) for value in column] for name, column in columns.items()}
    return {name: pa.array(column, type=pa.list_(pa.int64())) for name, column in columns.items()}


@given(packed_rows())
def test_rows_become_the_documents_that_were_packed_whatever_holds_them(rows):
    documents = [document for row in rows for document in cut_at_starts(row)]
    for kind in ("lists", "json", "arrow"):
        tokens, offsets, mask, wrong = ready_documents(packed_columns(rows, kind), len(rows), None)

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
