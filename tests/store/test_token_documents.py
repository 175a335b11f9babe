"""Arrow files and saved data sets of ready tokens, read where they lie as a store of the same rows would be."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.test_store import write_store
from tests.support.offline_packs import write_texts

from varlen.documents.source import open_source
from varlen.errors import SourceError
from varlen.offline.index import index_source
from varlen.store import token_files
from varlen.store.growing import PartialStore
from varlen.store.open import open_tokens
from varlen.store.store import TokenStore
from varlen.store.token_files import FileTokens
from varlen.store.tokens import ReadableTokens, TokenDocuments


def everything(store: TokenDocuments) -> list[tuple[list[int], list[int], int]]:
    """Ids, marks and labels of every document, in the order of the store."""
    places = [(s, d) for s, count in enumerate(store.documents.tolist()) for d in range(count)]
    shards, documents = np.array(places, dtype=np.int64).reshape(-1, 2).T
    lengths = store.lengths(shards, documents)
    backwards = np.arange(len(shards))[::-1]
    zeros = np.zeros(len(shards), dtype=np.int64)
    tokens, mask = store.gather(shards[backwards], documents[backwards], zeros, lengths[backwards])
    marks = np.ones(len(tokens), dtype=np.uint8) if mask is None else mask
    targets = store.count_targets(shards, documents, zeros, lengths).tolist()
    bounds = np.cumsum([0, *lengths[backwards].tolist()]).tolist()
    cut = [(tokens[a:b].tolist(), marks[a:b].tolist()) for a, b in zip(bounds, bounds[1:])][::-1]
    return [(ids, marked, count) for (ids, marked), count in zip(cut, targets)]


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """Rows of ids with any of the columns that are read, in any of the types that hold them."""
    number = draw(st.sampled_from([pa.int32(), pa.int64(), pa.uint16(), pa.int16()]))
    as_list = draw(st.sampled_from([pa.list_, pa.large_list]))
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=14))
    ids = [[draw(st.integers(0, 30_000)) for _ in range(n)] for n in lengths]
    columns = {"input_ids": pa.array(ids, as_list(number)), "text": pa.array(["x"] * len(ids))}
    if draw(st.booleans()):
        labels = [[t if draw(st.booleans()) else -100 for t in row] for row in ids]
        columns["labels"] = pa.array(labels, as_list(pa.int64()))
    if draw(st.booleans()):
        marks = [[draw(st.integers(0, 1)) for _ in row] for row in ids]
        name = draw(st.sampled_from(["loss_mask", "completion_mask"]))
        kind = draw(st.sampled_from([pa.bool_(), pa.int8()]))
        columns[name] = pa.array(marks, as_list(pa.int8())).cast(as_list(kind))
    if draw(st.booleans()):
        real = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in lengths]
        ones = [[int(a <= at < b) for at in range(n)] for n, (a, b) in zip(lengths, real)]
        columns["attention_mask"] = pa.array(ones, as_list(pa.int8()))
    return pa.table(columns)


def write_arrow(
    table: pa.Table, path: Path, rows: int, as_file: bool = False, compression: str | None = None
) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as sink:
        writer = (pa.ipc.new_file if as_file else pa.ipc.new_stream)(sink, table.schema, options=options)
        with writer:
            writer.write_table(table, max_chunksize=rows)


@given(tables(), st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_rows_read_where_they_lie_are_those_that_a_store_would_hold(
    tmp_path_factory, table, rows, shard, as_file
):
    folder = tmp_path_factory.mktemp("arrow")
    write_arrow(table, folder / "a.arrow", rows, as_file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files, "_SHARD_DOCUMENTS", shard)
        mapped = open_tokens(folder / "a.arrow")
    assert isinstance(mapped, FileTokens)
    found = everything(mapped)

    if not any(ids for ids, _, _ in found):
        return  # a store of nothing isn't made
    store, _ = index_source(open_source(folder / "a.arrow"), folder / "store")
    assert found == everything(store)


def test_a_fixed_size_list_and_a_slice_of_a_table_are_read(tmp_path):
    ids = pa.FixedSizeListArray.from_arrays(pa.array(range(12), pa.int32()), 3)
    table = pa.table({"input_ids": ids}).slice(1)
    write_arrow(table, tmp_path / "a.arrow", 2)

    assert [ids for ids, _, _ in everything(open_tokens(tmp_path / "a.arrow"))] == [
        [3, 4, 5],
        [6, 7, 8],
        [9, 10, 11],
    ]


def test_a_saved_data_set_is_read_in_its_own_order(tmp_path):
    rows = {"input_ids": [[n] * (n % 5 + 1) for n in range(40)]}
    rows["attention_mask"] = [[1] * len(row) for row in rows["input_ids"]]
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "saved", num_shards=3)

    store = open_tokens(tmp_path / "saved")
    assert store.documents.sum() == 40
    assert [ids for ids, _, _ in everything(store)] == rows["input_ids"]


def test_what_cannot_be_read_at_any_place_is_left_to_the_index(tmp_path):
    plain = pa.table({"input_ids": [[1, 2], [3]]})
    write_arrow(plain, tmp_path / "packed.arrow", 9, compression="zstd")
    pq.write_table(plain, tmp_path / "rows.parquet")
    write_arrow(plain.append_column("seq_lengths", [[[1, 1], [1]]]), tmp_path / "cut.arrow", 9)
    write_arrow(pa.table({"text": ["a"]}), tmp_path / "text.arrow", 9)
    write_texts(tmp_path / "a.jsonl")

    for name in ("packed.arrow", "rows.parquet", "cut.arrow", "text.arrow", "a.jsonl"):
        assert open_tokens(tmp_path / name) is None, name
    with pytest.raises(SourceError, match="does not exist"):
        open_tokens(tmp_path / "missing")


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"input_ids": [[1, 2], None]}, r"row 2 holds null in `input_ids`"),
        ({"input_ids": [[1, 2], [3, None]]}, r"row 2 holds a null among its `input_ids`"),
        ({"input_ids": [[1], [2, -3]]}, r"holds the id -3 at token 2"),
        ({"input_ids": [[1], [2]], "labels": [[1], [2, 2]]}, r"row 2 has 1 `input_ids` but 2 `labels`"),
        ({"input_ids": [[1], [2]], "labels": [[1], [3]]}, r"the label 3 for the id 2 at token 1"),
        ({"input_ids": [[1, 2]], "loss_mask": [[1, 2]]}, r"other than 0 and 1 in `loss_mask`"),
        ({"input_ids": [[1], [2]], "attention_mask": [[1], [2]]}, r"row 2 holds other than 0 and 1"),
        (
            {"input_ids": [[1], [2, 3, 4]], "attention_mask": [[1], [1, 0, 1]]},
            r"row 2 has padding between its",
        ),
    ],
)
def test_rows_that_are_no_documents_are_named(tmp_path, columns, said):
    write_arrow(pa.table(columns), tmp_path / "a.arrow", 9)

    with pytest.raises(SourceError, match=said):
        everything(open_tokens(tmp_path / "a.arrow"))


@settings(max_examples=200)
@given(st.data())
def test_a_broken_arrow_file_is_an_error_or_is_read(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("arrow") / "a.arrow"
    columns = {"input_ids": [[n] * n for n in range(9)], "labels": [[n] * n for n in range(9)]}
    write_arrow(pa.table(columns), path, 4, data.draw(st.booleans()))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.none() | st.integers(1, len(content)))])

    try:
        found = open_tokens(path)
        assert found is None or len(everything(found)) == found.documents.sum()
    except SourceError as error:
        assert "a.arrow" in str(error)  # noqa: PT017 - either is right


def test_all_kinds_are_what_the_feed_asks_for(tmp_path):
    def taken(store: TokenDocuments) -> int:  # mypy holds the kinds to it
        return store.num_parts

    write_arrow(pa.table({"input_ids": [[1]]}), tmp_path / "a.arrow", 9)
    store = write_store(tmp_path / "store", [[[([1], None)]]])
    assert isinstance(open_tokens(tmp_path / "store"), TokenStore)
    assert taken(store) == taken(open_tokens(tmp_path / "a.arrow")) == 1
    both = (*vars(ReadableTokens), *vars(TokenDocuments))
    names = [name for name in both if not name.startswith("_")]
    assert len(names) > 9
    for kind in (TokenStore, FileTokens, PartialStore):
        made = {*vars(kind), *["documents", "tokens", "parts", "num_parts", "fingerprint", "tables"]}
        assert set(names) <= made
