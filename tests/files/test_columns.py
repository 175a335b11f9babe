"""Columns that can't be read as they are: binary texts, two of one name, preference pairs."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from tests.files.contents import arrow, parquet, texts_of

import varlen as vl
from varlen.documents.source import open_source
from varlen.errors import SourceError
from varlen.files.columns import find_columns
from varlen.store.open import open_tokens


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()])
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_binary_columns_are_text_on_request(tmp_path, kind, name):
    table = pa.table({"text": pa.array(["one", "zwölf".encode(), b"\xff", None, "two"], kind)})
    (tmp_path / name).write_bytes(
        parquet(table) if name.endswith("parquet") else arrow(pa.ipc.new_file, table)
    )

    with pytest.raises(
        SourceError, match=r"holds bytes in `text`, .*--binary-as-text \(binary_as_text=True\)"
    ):
        texts_of(tmp_path / name)
    with pytest.raises(SourceError, match="row 3 holds text that is not valid UTF-8"):
        texts_of(tmp_path / name, binary_as_text=True)
    assert texts_of(tmp_path / name, binary_as_text=True, on_error="skip") == ["one", "zwölf", "two"]


def test_binary_texts_of_chats_are_text_on_request(tmp_path):
    kind = pa.list_(pa.struct([("role", pa.binary()), ("content", pa.large_binary())]))
    messages = [[{"role": b"user", "content": b"hi"}, {"role": b"assistant", "content": b"you"}]]
    (tmp_path / "a.parquet").write_bytes(parquet(pa.table({"messages": pa.array(messages, kind)})))
    (tmp_path / "b.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]})
    )

    [binary] = list(
        open_source(tmp_path / "a.parquet", binary_as_text=True).read(
            open_source(tmp_path / "a.parquet", binary_as_text=True).parts()[0]
        )
    )
    [plain] = list(open_source(tmp_path / "b.jsonl").read(open_source(tmp_path / "b.jsonl").parts()[0]))

    assert binary.tokens.tolist() == plain.tokens.tolist()


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "s.arrow"])
def test_two_columns_of_one_name_are_refused_where_they_are_read(tmp_path, name):
    table = pa.Table.from_arrays(
        [pa.array(["a"]), pa.array(["b"]), pa.array([1])], names=["text", "text", "id"]
    )
    other = pa.Table.from_arrays([pa.array(["a"]), pa.array([2]), pa.array([1])], names=["text", "id", "id"])
    make = {"a.parquet": parquet, "a.arrow": lambda t: arrow(pa.ipc.new_file, t)}
    write = make.get(name, lambda t: arrow(pa.ipc.new_stream, t))

    (tmp_path / name).write_bytes(write(table))
    with pytest.raises(SourceError, match=r"has 2 columns called `text`; rename all but one"):
        texts_of(tmp_path / name)
    (tmp_path / name).write_bytes(write(other))
    assert texts_of(tmp_path / name) == ["a"]


def test_two_columns_of_ready_tokens_are_refused_in_every_mode(tmp_path):
    ids = pa.array([[1, 2]], pa.list_(pa.int32()))
    table = pa.Table.from_arrays([ids, ids], names=["input_ids", "input_ids"])
    (tmp_path / "a.arrow").write_bytes(arrow(pa.ipc.new_file, table))

    assert open_tokens(tmp_path / "a.arrow") is None
    with pytest.raises(SourceError, match="has 2 columns called `input_ids`"):
        vl.PackedLoader(str(tmp_path / "a.arrow"), capacity=4, global_batch_size=1, mode="indexed", worker="thread",
                        cache=tmp_path / "cache")  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (["prompt", "chosen", "rejected"], r"preference pairs .`chosen` and `rejected`.* --column completion=chosen"),
        (["chosen", "rejected"], r"--column messages=chosen .*text=chosen.*PackedDPOTrainer"),
        (["prompt", "chosen_response", "rejected_response"], "--column completion=chosen_response"),
        (["chosen_input_ids", "rejected_input_ids"], "--column input_ids=chosen_input_ids"),
    ],
)  # fmt: skip
def test_preference_pairs_are_told_what_they_are(columns, said):
    with pytest.raises(SourceError, match=said):
        find_columns(columns, {}, "a.jsonl")


def test_the_better_answers_of_pairs_are_trained_on_where_they_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "2+2=", "chosen": "4", "rejected": "5"}))

    assert texts_of(tmp_path / "a.jsonl", columns={"completion": "chosen"}) == ["2+2=4"]
