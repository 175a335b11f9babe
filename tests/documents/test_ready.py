"""Ready tokens: what rows of ids become, against a plain oracle, whatever holds them; and every fault."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.documents.pretokenized import ready_documents
from varlen.documents.source import open_source
from varlen.errors import SourceError

Row = dict[str, Any]


@st.composite
def rows_of_ids(draw: st.DrawFn) -> list[Row]:
    """Rows with the same columns, some of them faulty."""
    roles = draw(st.sets(st.sampled_from(["labels", "loss_mask", "attention_mask", "seq_lengths"])))
    rows = []
    for _ in range(draw(st.integers(0, 6))):
        ids = draw(
            st.lists(st.integers(0, 9) if draw(st.integers(0, 3)) else st.integers(-1, 12), max_size=6)
        )
        row: Row = {"input_ids": ids}
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


def oracle(row: Row, vocab_size: int) -> list[tuple[list[int], list[int]]] | None:
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


def columns_of(rows: list[Row], kind: str) -> dict[str, Any]:
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
