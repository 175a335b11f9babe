"""Instructions and their answers, as Alpaca, Dolly and Megatron-LM's tests have them, become chats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from varlen.documents.source import open_source
from varlen.documents.texts import read_texts
from varlen.errors import SourceError
from varlen.files.columns import find_columns


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def documents(path: Path, **settings: Any) -> list[tuple[str, str]]:
    """Each document's text, and what of it is trained."""
    source = open_source(path, tokenizer="bytes", **settings)
    found = []
    for part in source.parts():
        for block in source.read(part):
            mask = np.ones(len(block.tokens)) if block.loss_mask is None else block.loss_mask
            for start, stop in zip(block.offsets, block.offsets[1:]):
                tokens, taken = block.tokens[start:stop], mask[start:stop] == 1
                found.append((said(tokens), said(tokens[taken])))
    return found


def said(tokens: Any) -> str:
    return bytes(token for token in tokens.tolist() if token < 256).decode()


def test_an_instruction_is_what_a_user_asks_and_its_output_alone_is_trained(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "Sum up.\n\nA long text."},
        {"role": "assistant", "content": "Short."},
    ]
    asked = {"instruction": "Sum up.", "input": "A long text.", "output": "Short."}
    (of_chat,) = documents(written(tmp_path, {"messages": chat}))

    assert documents(written(tmp_path, asked)) == [of_chat]
    assert "Sum up.\n\nA long text." in of_chat[0]
    assert "Short." in of_chat[1]
    assert "long" not in of_chat[1]


@pytest.mark.parametrize("nothing", [{}, {"input": ""}, {"input": None}])
def test_an_instruction_about_nothing_is_asked_alone(tmp_path: Path, nothing: dict[str, Any]) -> None:
    ((text, _),) = documents(written(tmp_path, {"instruction": "Hi.", "output": "Hello.", **nothing}))

    assert "Hi." in text
    assert "Hi.\n\n" not in text


@pytest.mark.parametrize(
    ("asks", "answers"),
    [
        ("prompt", "response"),
        ("query", "answer"),
        ("question", "completion"),
        ("instruction", "answer"),
        ("input", "output"),
    ],
)
def test_instructions_and_outputs_have_other_usual_names(tmp_path: Path, asks: str, answers: str) -> None:
    same = documents(written(tmp_path, {"instruction": "Q?", "output": "A."}))

    assert documents(written(tmp_path, {asks: "Q?", answers: "A.", "category": "else"})) == same


def test_what_dolly_calls_the_context_follows_the_instruction(tmp_path: Path) -> None:
    row = {"instruction": "Who?", "context": "It was written in 1948.", "response": "Orwell."}

    assert list(read_texts(written(tmp_path, row))) == [
        "user: Who?\n\nIt was written in 1948.\nassistant: Orwell.\n"
    ]


def test_what_the_system_says_goes_before_an_instruction(tmp_path: Path) -> None:
    row = {"system": "Be terse.", "question": "Q?", "response": "A."}
    ((text, trained),) = documents(written(tmp_path, row))

    assert text.index("Be terse.") < text.index("Q?")
    assert "terse" not in trained


def test_rows_may_have_an_input_where_the_first_has_none(tmp_path: Path) -> None:
    rows = [{"instruction": "a", "output": "x"}, {"instruction": "b", "input": "about", "output": "y"}]

    assert list(read_texts(written(tmp_path, *rows))) == [
        "user: a\nassistant: x\n",
        "user: b\n\nabout\nassistant: y\n",
    ]


def test_a_table_of_instructions_is_read_as_its_rows_are(tmp_path: Path) -> None:
    rows = [
        {"instruction": "a", "input": None, "output": "x"},
        {"instruction": "b", "input": "c", "output": "y"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")

    assert documents(tmp_path / "rows.parquet") == documents(written(tmp_path, *rows))


@pytest.mark.parametrize(
    ("present", "kind"),
    [
        (["instruction", "output", "file"], "instruction"),
        (["instruction", "context", "response", "category"], "instruction"),
        (["text", "instruction", "output"], "instruction"),
        (["messages", "instruction", "output"], "messages"),
        (["conversations", "id"], "messages"),
        (["text", "messages"], "messages"),
        (["prompt", "completion"], "prompt"),
        (["text", "url", "metadata", "id"], "text"),
        (["input_ids", "instruction", "output"], "tokens"),
    ],
)
def test_the_columns_that_say_most_are_taken(present: list[str], kind: str) -> None:
    assert find_columns(present, {}, "a.jsonl").kind == kind


@pytest.mark.parametrize("present", [["foo", "bar"], ["instruction", "category"], ["output"]])
def test_an_instruction_without_an_output_is_nothing_to_train_on(present: list[str]) -> None:
    with pytest.raises(SourceError, match="`instruction` and `output`, or `input_ids`, found"):
        find_columns(present, {}, "a.jsonl")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"instruction": ["a", "b"], "output": "x"}, "`instruction` must be a string, found array"),
        (
            {"instruction": "a", "input": {"b": 1}, "output": "x"},
            "`context` must be a string, found object",
        ),
        ({"instruction": "a", "output": 7}, "`output` must be a string, found number"),
        ({"instruction": "a", "output": ""}, "the output is empty, so there is nothing to train on"),
    ],
)
def test_a_row_that_is_no_text_is_named(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    path = written(tmp_path, {"instruction": "a", "output": "x"}, row)

    with pytest.raises(SourceError, match=f"rows.jsonl.*2.*{words}"):
        documents(path)
    with pytest.raises(SourceError, match=f"rows.jsonl.*2.*{words}"):
        list(read_texts(path))


def test_two_columns_that_may_be_the_context_are_to_be_named(tmp_path: Path) -> None:
    row = {"instruction": "a", "context": "b", "input": "c", "output": "x"}
    path = written(tmp_path, row)

    with pytest.raises(
        SourceError, match="both may be what an instruction is about; name one: --column context="
    ):
        documents(path)
    assert "a\n\nc" in documents(path, columns={"context": "input"})[0][0]
    assert "a\n\nb" in documents(path, columns={"context": "context"})[0][0]


def test_a_context_under_another_name_than_the_first_row_s_is_not_passed_over(tmp_path: Path) -> None:
    rows = [
        {"instruction": "a", "context": "b", "output": "x"},
        {"instruction": "a", "input": "c", "output": "x"},
    ]

    with pytest.raises(SourceError, match="`input`"):
        documents(written(tmp_path, *rows))
    with pytest.raises(SourceError, match="`context`"):
        documents(written(tmp_path, *reversed(rows)))


def test_an_instruction_under_a_name_that_goes_before_the_first_row_s_is_not_passed_over(
    tmp_path: Path,
) -> None:
    rows = [{"input": "a", "output": "x"}, {"instruction": "Sum up.", "input": "a", "output": "x"}]
    path = written(tmp_path, *rows)

    with pytest.raises(
        SourceError, match=r"rows\.jsonl.*2.*has `instruction`, which the file's first row has not"
    ):
        documents(path)
    assert len(documents(path, columns={"instruction": "input"})) == 2
