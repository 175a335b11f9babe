"""Boundaries that other tools write: positions that begin again, and a system message in a column of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.documents.pretokenized import ready_documents
from varlen.documents.source import open_source
from varlen.errors import SourceError

Row = dict[str, Any]


def documents(path: Path) -> list[list[int]]:
    source = open_source(path)
    read = [some for part in source.parts() for some in source.read(part)]
    bounds = [some.offsets.tolist() for some in read]
    return [some.tokens[a:b].tolist() for some, at in zip(read, bounds) for a, b in zip(at, at[1:])]


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@given(st.lists(st.lists(st.integers(1, 5), max_size=4), max_size=5), st.integers(0, 3), st.integers(0, 3))
def test_documents_begin_where_positions_do_and_padding_is_none_of_them(
    rows: list[list[int]], left: int, right: int
) -> None:
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
def test_positions_that_tell_no_beginning_are_refused(
    tmp_path: Path, positions: list[int], said: str
) -> None:
    path = write(tmp_path / "a.jsonl", [{"input_ids": [1, 2], "position_ids": positions}])

    with pytest.raises(SourceError, match=rf"line 1 has the position {said} .*give `seq_lengths` instead"):
        documents(path)


def test_lengths_go_before_positions(tmp_path: Path) -> None:
    row = {"input_ids": [1, 2, 3], "seq_lengths": [1, 2], "position_ids": [5, 5, 5]}

    assert documents(write(tmp_path / "a.jsonl", [row])) == [[1], [2, 3]]


CHAT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_system_column_is_the_first_message_of_the_rows_that_have_one(tmp_path: Path, name: str) -> None:
    rows: list[Row] = [{"conversations": CHAT}, {"conversations": CHAT, "system": "Be brief."}]
    path = tmp_path / name
    if name.endswith("jsonl"):
        write(path, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows[::-1]).take([1, 0]), path)

    texts = [bytes(token for token in ids if token < 256).decode() for ids in documents(path)]

    assert texts == ["user\nhi\nassistant\nho\n", "system\nBe brief.\nuser\nhi\nassistant\nho\n"]


def test_a_system_column_may_repeat_the_first_message_but_not_contradict_it(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "x"}, *({"role": r, "content": "y"} for r in ("user", "assistant"))]
    same = documents(write(tmp_path / "a.jsonl", [{"messages": chat, "system": "x"}]))

    assert same == documents(write(tmp_path / "b.jsonl", [{"messages": chat}]))
    with pytest.raises(SourceError, match="`system` says one thing and the first message"):
        documents(write(tmp_path / "c.jsonl", [{"messages": chat, "system": "z"}]))
    with pytest.raises(SourceError, match="`system` must be a string, found number"):
        documents(write(tmp_path / "d.jsonl", [{"messages": chat[1:], "system": 5}]))


def test_a_vocabulary_that_leaves_other_records_out_is_another_source(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}, {"input_ids": [7]}])

    marks = {open_source(path, vocab_size=size, on_error="skip").fingerprint for size in (None, 5, 8)}

    assert len(marks) == 3
