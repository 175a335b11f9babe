"""Blocks: however small, in any order, they hold each document once; what can't be cut comes in chunks."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.streaming import some_texts, tokens_of, write_texts

from varlen.documents import blocks as blocks_file
from varlen.documents.block_reader import BlockReader, Chunk, encode
from varlen.documents.blocks import cut_blocks, read_by_all
from varlen.documents.source import open_source
from varlen.errors import SourceError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("blocks")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks_file, "FEWEST_BLOCK_BYTES", 100)


def chunks_of(reader, blocks, order):
    for block in order.tolist():
        number = 0
        while reader.has(Chunk(block=block, number=number)):
            yield Chunk(block=block, number=number)
            number += 1
        reader.forget()


def read_all(source, seed=None, epoch=0):
    """The documents of an epoch in its order, and the sentences about what can't be read."""
    blocks = cut_blocks(source, 2)
    reader = BlockReader(source, blocks)
    found, faults, sizes = [], [], []
    for chunk in chunks_of(reader, blocks, blocks.order(seed, epoch)):
        documents = encode(reader.rows(chunk), source).documents
        bounds = documents.offsets.tolist()
        found += [documents.tokens[a:b].tobytes() for a, b in zip(bounds, bounds[1:])]
        faults += [str(fault) for fault in documents.faults]
        sizes.append(len(documents))
    reader.close()
    return found, faults, sizes


def in_order(texts):
    return [np.array([*text.encode(), 256], dtype=np.int32).tobytes() for text in texts]


FORMATS = ["a.jsonl", "a.parquet", "a.arrow", "a.stream.arrow", "a.jsonl.gz", "a.csv", "a.json", "a.txt"]


def write(path, texts, rows=3):
    table = pa.table({"text": texts})
    if path.name == "a.parquet":
        pq.write_table(table, path, row_group_size=rows)
    elif path.name == "a.arrow":
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=rows)
    elif path.name == "a.stream.arrow":
        with pa.ipc.new_stream(path, table.schema) as file:
            file.write_table(table, max_chunksize=rows)
    elif path.name == "a.jsonl":
        write_texts(path, texts)
    elif path.name == "a.jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in texts).encode()))
    elif path.name == "a.csv":
        path.write_text("text\n" + "\n".join(texts) + "\n")
    elif path.name == "a.json":
        path.write_text(json.dumps([{"text": text} for text in texts]))
    else:
        path.write_text("\n\n".join(texts))


@pytest.mark.parametrize("kept", [0, 1 << 20])
@pytest.mark.parametrize("rows", [3, 40, 1000])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_each_document_once_in_file_order_or_shuffled(
    tmp_path, monkeypatch, name, rows, kept
):
    monkeypatch.setattr(blocks_file, "CACHED_BYTES", kept)
    texts = some_texts(3, 150, longest=40)
    write(tmp_path / name, texts, rows)
    source = open_source(tmp_path / name)

    found, faults, sizes = read_all(source)

    assert faults == []
    assert found == in_order(texts)
    assert len(sizes) > 10
    for epoch in range(2):
        shuffled = read_all(source, 5, epoch)[0]
        assert sorted(shuffled) == tokens_of(texts)
    if name == "a.jsonl" or (name in ("a.parquet", "a.arrow") and (kept or rows < 1000)):
        assert shuffled not in (found, read_all(source, 5, 0)[0])


@given(
    st.lists(st.text(st.sampled_from("ab\n\rż🦆\u2028"), min_size=1, max_size=30), min_size=1, max_size=25)
)
def test_a_jsonl_file_in_small_blocks_gives_each_line_once_and_in_order(folder, texts):
    assert read_all(open_source(write_texts(folder / "a.jsonl", texts)))[0] == in_order(texts)


@pytest.mark.parametrize("name", FORMATS)
def test_some_documents_of_a_chunk_can_be_read_again_alone(tmp_path, name):
    write(tmp_path / name, some_texts(6, 90), rows=50)
    source = open_source(tmp_path / name)
    blocks = cut_blocks(source, 2)
    reader = BlockReader(source, blocks)
    rng = np.random.default_rng(0)
    whole = {}
    for chunk in chunks_of(reader, blocks, blocks.order(None, 0)):
        read = encode(reader.rows(chunk), source)
        bounds = read.documents.offsets
        for record, a, b in zip(read.records.tolist(), bounds, bounds[1:]):
            whole[chunk, record] = read.documents.tokens[a:b].tobytes()

    again = BlockReader(source, blocks)
    for index in rng.permutation(len(whole))[:30]:
        chunk, record = list(whole)[index]
        assert again.has(chunk)
        read = encode(again.rows(chunk), source, np.array([record]))
        again.forget()
        assert read.documents.tokens.tobytes() == whole[chunk, record]
        assert read.records.tolist() == [record]
    assert len(whole) == 90


def test_ready_tokens_and_packed_rows_can_be_read_again_alone(tmp_path):
    rows = [{"input_ids": [n, n + 1, n + 2], "seq_lengths": [1, 2]} for n in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_source(tmp_path / "a.jsonl")
    blocks = cut_blocks(source, 2)
    reader = BlockReader(source, blocks)
    first = Chunk(block=1)

    whole = encode(reader.rows(first), source)
    some = encode(reader.rows(first), source, whole.records[1:3])

    assert len(whole.documents) > 3
    assert some.records.tolist() == [1, 2]
    assert some.documents.lengths.tolist() == whole.documents.lengths[1:3].tolist()
    start = whole.documents.offsets[1]
    assert some.documents.tokens.tolist() == whole.documents.tokens[start : start + 3].tolist()


def test_files_that_can_not_be_cut_are_named_and_small_ones_are_not_among_them(tmp_path):
    texts = some_texts(7, 60)
    for name in ("a.jsonl.gz", "a.csv", "a.jsonl", "a.parquet"):
        write(tmp_path / name, texts)
    (tmp_path / "small.csv").write_text("text\na\n")

    source = open_source(tmp_path)

    assert read_by_all(source, cut_blocks(source, 2)) == [
        str(tmp_path / name) for name in ("a.csv", "a.jsonl.gz")
    ]


def test_parts_of_a_large_row_group_stay_in_order_and_near_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks_file, "CACHED_BYTES", 0)
    write(tmp_path / "a.parquet", some_texts(8, 2000), rows=100)
    blocks = cut_blocks(open_source(tmp_path / "a.parquet"), 2)
    order = blocks.order(4, 0)
    parts = int(blocks.of_parts.max())

    assert parts > 3
    for start in np.unique(blocks.starts):
        places = np.flatnonzero(blocks.starts[order] == start)
        assert (np.diff(blocks.parts[order][places]) == 1).all()
        assert places[-1] - places[0] < 3 * blocks_file.SPREAD * parts
    firsts = blocks.starts[order][blocks.parts[order] == 0]
    assert firsts.tolist() != sorted(firsts.tolist())


def test_blocks_follow_the_size_of_the_data_up_to_a_megabyte(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks_file, "FEWEST_BLOCK_BYTES", 4096)
    write_texts(tmp_path / "a.jsonl", ["x" * 1000] * 2000)
    source = open_source(tmp_path / "a.jsonl")

    assert cut_blocks(source, 1).block_bytes == (tmp_path / "a.jsonl").stat().st_size // 100
    assert cut_blocks(source, 64).block_bytes == 4096


def test_a_damaged_table_is_an_error_or_a_skip_and_others_are_read(tmp_path):
    write(tmp_path / "a.parquet", some_texts(9, 30))
    (tmp_path / "b.parquet").write_bytes(b"no table at all")

    with pytest.raises(SourceError, match=r"b\.parquet is not a Parquet file"):
        cut_blocks(open_source(tmp_path), 2)
    found, faults, _ = read_all(open_source(tmp_path, on_error="skip"))
    assert len(found) == 30
    assert len(faults) == 1


def test_a_file_that_ends_too_early_gives_what_it_holds_and_one_fault(tmp_path):
    write(tmp_path / "a.jsonl.gz", some_texts(10, 3000))
    whole = (tmp_path / "a.jsonl.gz").read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])

    found, faults, _ = read_all(open_source(tmp_path / "a.jsonl.gz", on_error="skip"))

    assert 500 < len(found) < 2500
    assert len(faults) == 1
    assert "truncated" in faults[0]
    with pytest.raises(SourceError, match="truncated"):
        read_all(open_source(tmp_path / "a.jsonl.gz"))


def test_chunks_found_at_the_end_of_an_epoch_are_there_though_the_next_epoch_has_begun(tmp_path):
    write(tmp_path / "a.jsonl.gz", some_texts(12, 3000))
    source = open_source(tmp_path / "a.jsonl.gz")
    reader = BlockReader(source, cut_blocks(source, 2))
    count = next(number for number in range(1000) if not reader.has(Chunk(block=0, number=number)))
    assert count > 4
    expected = [rows_of(reader, number) for number in range(count)]
    reader.close()

    reader = BlockReader(source, cut_blocks(source, 2))
    for number in (0, 1):
        assert reader.has(Chunk(block=0, number=number))
        assert rows_of(reader, number) == expected[number]
        reader.forget()
    for _ in range(2):  # an epoch may end and begin several times before anything is read
        assert all(reader.has(Chunk(block=0, number=number)) for number in range(2, count))
        assert not reader.has(Chunk(block=0, number=count))
        assert all(reader.has(Chunk(block=0, number=number)) for number in range(2))
    found = {number: rows_of(reader, number) for number in [*range(2, count), 0, 1]}
    assert [found[number] for number in range(count)] == expected
    reader.forget()
    assert reader.has(Chunk(block=0, number=2))
    assert rows_of(reader, 2) == expected[2]
    reader.close()


def rows_of(reader, number):
    """The texts of a chunk of the only block."""
    raw = reader.rows(Chunk(block=0, number=number))
    return [text for rows in raw.rows for text in rows.columns["text"]]


def test_a_file_that_hides_its_compression_is_refused(tmp_path):
    write(tmp_path / "a.jsonl.gz", some_texts(11, 60))
    (tmp_path / "a.jsonl.gz").rename(tmp_path / "a.jsonl")

    with pytest.raises(SourceError, match="is compressed, though its name doesn't say so"):
        read_all(open_source(tmp_path / "a.jsonl"))
