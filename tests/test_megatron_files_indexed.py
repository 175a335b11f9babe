"""Megatron's pairs, packed and plain: written, read, and turned into other kinds; and what no pair can be."""

from __future__ import annotations

import io
import pickle
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron_rows import Row, many_rows, packed_rows, plain, saved, write_parquet

from varlen.adapters.megatron import (
    PackedIndexed,
    PackedIndexedWriter,
    convert,
    create_packed,
    open_packed,
    write_megatron,
    write_packed_indexed_dataset,
)
from varlen.adapters.megatron.files.reader import between, from_dicts
from varlen.errors import DocumentsError, SettingError, SourceError
from varlen.store.open import open_tokens

ROW = {"input_ids": [10, 11, 12, 20, 21, 22], "loss_mask": [0, 1, 0, 1, 1, 0], "seq_start_id": [0, 3]}


def words_of(row: Row) -> np.ndarray:
    """One row as the format has it, made number by number."""
    head = [0x53465442, 1, len(row["seq_start_id"]), *row["seq_start_id"]]
    tokens = [id_ | (int(mark) << 31) for id_, mark in zip(row["input_ids"], row["loss_mask"])]
    return np.array([*head, *tokens], dtype=np.uint32).view(np.int32)


def write_pair(
    prefix: Path, sequences: list[np.ndarray], documents: list[int] | None = None, kind: int = 4
) -> Path:
    """Write sequences as Megatron's own builder does."""
    bounds = documents or list(range(len(sequences) + 1))
    sizes = [len(sequence) for sequence in sequences]
    begins = np.cumsum([0, *sizes])[:-1] * sequences[0].itemsize
    Path(f"{prefix}.bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, kind, len(sequences), len(bounds))
        + np.array(sizes, dtype=np.int32).tobytes()
        + begins.astype(np.int64).tobytes()
        + np.array(bounds, dtype=np.int64).tobytes()
    )
    return prefix


@given(packed_rows())
def test_a_pair_is_written_as_the_release_writes_it_and_read_as_it_was(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder / "theirs.sft", [words_of(row) for row in rows])
    with PackedIndexedWriter(folder / "ours.sft") as writer:
        writer.write(from_dicts(rows[:1]))
        writer.write(from_dicts(rows[1:]))
    assert write_packed_indexed_dataset(rows, folder / "dicts.sft.idx") == str(folder / "dicts.sft")

    for end in ("bin", "idx"):
        theirs = (folder / f"theirs.sft.{end}").read_bytes()
        assert (folder / f"ours.sft.{end}").read_bytes() == theirs
        assert (folder / f"dicts.sft.{end}").read_bytes() == theirs
    has_padding = any(row["seq_lengths"] != stored(row) for row in rows if "seq_lengths" in row)
    assert (folder / "ours.sft.seq_lengths").exists() is has_padding
    with PackedIndexed(folder / "ours.sft") as ours:
        wanted = [plain(row) if has_padding else plain({**row, "seq_lengths": []}) for row in rows]
        assert [{**plain(row), **({} if has_padding else {"seq_lengths": []})} for row in ours] == wanted
        assert sum(part.num_rows for part in ours.batches()) == len(rows)


def npy(array: np.ndarray) -> bytes:
    """What np.save makes of an array."""
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def stored(row: Row) -> list[int]:
    """Positions of each document, padding included."""
    bounds = [*row["seq_start_id"], len(row["input_ids"])]
    return [b - a - 1 for a, b in zip(bounds, bounds[1:])]


def test_rows_come_in_any_order_from_several_pairs_threads_and_pickles(tmp_path):
    rows = many_rows(20, 15)
    for name, some in (("a", rows[:7]), ("b", rows[7:])):
        with PackedIndexedWriter(tmp_path / f"{name}.sft.idx") as writer:
            writer.write(from_dicts(some))
    reader, wrong = PackedIndexed(tmp_path), []

    def work(seed: int) -> None:
        order = np.random.default_rng(seed).integers(-20, 20, 30)
        found = reader.rows(order)
        for place, index in enumerate(order.tolist()):
            if between(found, place, place + 1).input_ids.tolist() != rows[index]["input_ids"]:
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pickle.loads(pickle.dumps(reader))[-1]["input_ids"] == rows[-1]["input_ids"]
    assert reader.rows([]).num_rows == 0
    with pytest.raises(IndexError, match="there is no row 20"):
        reader.rows([20])


def test_lengths_are_those_of_whole_documents_where_one_pair_of_several_has_none(tmp_path):
    for name, row in (("a", ROW | {"seq_lengths": [1, 2]}), ("b", ROW)):
        with PackedIndexedWriter(tmp_path / f"{name}.sft") as writer:
            writer.write(from_dicts([row]))

    with PackedIndexed(tmp_path) as reader:
        assert [part.seq_lengths.tolist() for part in reader.batches()] == [[1, 2], [2, 2]]
    assert convert(tmp_path / "*.sft", tmp_path / "c.idx.parquet").num_packs == 2


def test_a_pair_keeps_its_lengths_where_nothing_takes_its_place(tmp_path):
    with PackedIndexedWriter(tmp_path / "a.sft") as writer:
        writer.write(from_dicts([ROW | {"seq_lengths": [1, 2]}]))

    with pytest.raises(DocumentsError, match="no documents were written"):
        PackedIndexedWriter(tmp_path / "a.sft").close()

    assert PackedIndexed(tmp_path).rows([0]).seq_lengths.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([1, 2, 3, 4, 5], r"row 1 begins with 0x1 instead of 0x53465442; tokens that aren't packed"),
        ([0x53465442, 2, 1, 0, 5], "row 1 is of version 2; version 1 is read"),
        ([0x53465442, 1, 0, 0, 5], "row 1 says 0 documents, but has 2 words for all"),
        ([0x53465442, 1, 2, 0, 5], "row 1 says 2 documents, but has 2 words for all"),
        ([0x53465442, 1, 1, 0], "row 1 has 4 words; a packed row has 5 at least"),
    ],
)
def test_a_row_of_something_else_is_named_when_the_pair_is_opened(tmp_path, words, said):
    write_pair(tmp_path / "a.sft", [np.array(words, dtype=np.int32)])

    with pytest.raises(SourceError, match=rf"a\.sft\.bin {said}"):
        PackedIndexed(tmp_path / "a.sft")


@pytest.mark.parametrize(
    ("starts", "said"),
    [
        ([1, 3], "begins at 1 and not at 0"),
        ([0, 0], "must rise"),
        ([0, 6], "reaches past"),
        ([0, -1], "holds -1"),
    ],
)
def test_a_row_with_wrong_boundaries_is_named_when_it_is_read(tmp_path, starts, said):
    write_pair(tmp_path / "a.sft", [words_of(ROW), words_of(ROW | {"seq_start_id": [0, 0]})])
    content = bytearray((tmp_path / "a.sft.bin").read_bytes())
    content[-32:-24] = np.array(starts, dtype=np.int32).tobytes()
    (tmp_path / "a.sft.bin").write_bytes(content)
    reader = PackedIndexed(tmp_path)

    assert plain(reader[0]) == ROW
    with pytest.raises(DocumentsError, match=rf"a\.sft\.bin row 2: `seq_start_id` {said}"):
        reader.rows([0, 1])


def test_pairs_that_can_hold_no_packed_rows_are_refused(tmp_path):
    write_pair(tmp_path / "a.sft", [words_of(ROW).astype(np.int64)], kind=5)
    with pytest.raises(SourceError, match="says that its numbers are int64; packed rows are int32"):
        PackedIndexed(tmp_path / "a.sft")
    write_pair(tmp_path / "a.sft", [words_of(ROW), words_of(ROW)], documents=[0, 2])
    with pytest.raises(SourceError, match="names 1 documents and 2 sequences"):
        PackedIndexed(tmp_path / "a.sft")
    write_pair(tmp_path / "a.sft", [words_of(ROW)])
    (tmp_path / "a.sft.seq_lengths").write_bytes(npy(np.array([2], dtype=np.int32)))
    with pytest.raises(SourceError, match=r"has 1 lengths, but .* holds 2 documents"):
        PackedIndexed(tmp_path / "a.sft")
    (tmp_path / "a.sft.seq_lengths").write_bytes(npy(np.array([2.0, 1.0])))
    with pytest.raises(SourceError, match="must hold int32 lengths, got float64"):
        PackedIndexed(tmp_path / "a.sft")
    (tmp_path / "a.sft.seq_lengths").write_bytes(b"\x93NUMPY\x01\x00\x01\x00(")
    with pytest.raises(SourceError, match=r"a\.sft\.seq_lengths can't be read"):
        PackedIndexed(tmp_path / "a.sft")
    (tmp_path / "a.sft.bin").unlink()
    with pytest.raises(SourceError, match=r"a pair of \.bin and \.idx is needed"):
        PackedIndexed(tmp_path / "a.sft.idx")
    with pytest.raises(SettingError, match=r"must end in \.sft"):
        PackedIndexedWriter(tmp_path / "a.bin")


@given(packed_rows())
def test_every_kind_turns_into_every_other_and_back(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("kinds")
    rows = list(map(plain, rows))
    (folder / "a.npy").write_bytes(saved(rows))
    for source, output in (("a.npy", "b.idx.parquet"), ("b.idx.parquet", "c.sft"), ("c.sft.bin", "d.pq")):
        counts = convert(folder / source, folder / output)
        assert (counts.num_packs, counts.num_documents) == (
            len(rows),
            sum(len(row["seq_start_id"]) for row in rows),
        )

    for name in ("a.npy", "b.idx.parquet", "c.sft", "d.pq"):
        with open_packed(folder / name) as reader:
            for row, found in zip(rows, map(plain, reader), strict=True):
                assert {**found, "seq_lengths": row.get("seq_lengths", stored(row))} == {
                    **row,
                    "seq_lengths": found.get("seq_lengths", stored(row)),
                }


def test_files_that_are_slow_in_random_order_are_copied_once_by_their_content(tmp_path):
    rows = many_rows(40, 3000)
    write_parquet(tmp_path / "slow.idx.parquet", rows)
    write_parquet(tmp_path / "fast.idx.parquet", rows, group=20)
    (tmp_path / "a.npy").write_bytes(saved(rows))
    cache = tmp_path / "cache"

    for name, copies in (
        ("fast.idx.parquet", 0),
        ("slow.idx.parquet", 1),
        ("slow.idx.parquet", 1),
        ("a.npy", 2),
    ):
        with open_packed(tmp_path / name, cache=cache) as reader:
            assert [plain(row) for row in reader] == rows
        assert len(list(cache.glob("*"))) == copies
    before = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    (tmp_path / "slow.idx.parquet").rename(tmp_path / "slow.pq")
    with open_packed(tmp_path / "slow.pq", cache=cache) as reader:
        assert reader.num_rows == 40
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == before
    write_parquet(tmp_path / "slow.pq", rows[::-1])
    with open_packed(tmp_path / "slow.pq", cache=cache) as reader:
        assert plain(reader[0]) == rows[-1]


def test_kinds_are_not_mixed_and_nothing_is_written_over_itself(tmp_path):
    write_parquet(tmp_path / "a.idx.parquet", [ROW])
    (tmp_path / "b.npy").write_bytes(saved([ROW]))

    with pytest.raises(
        SourceError, match=r"a\.idx\.parquet is Parquet, and .*b\.npy is an array \(\.npy\); read them"
    ):
        open_packed(tmp_path)
    with pytest.raises(SettingError, match="is among what is read"):
        convert(tmp_path / "a.idx.parquet", tmp_path / "a.idx.parquet")
    with pytest.raises(SettingError, match=r"must end in \.idx\.parquet or \.sft"):
        create_packed(tmp_path / "c.npy")
    with open_packed(tmp_path / "a.idx.parquet") as reader:
        assert plain(reader[0]) == ROW


@given(
    st.lists(st.lists(st.integers(0, 65_535), max_size=6), min_size=1, max_size=9),
    st.sampled_from(["int32", "uint16"]),
)
def test_plain_pairs_are_written_and_read_where_they_lie(tmp_path_factory, documents, dtype):
    folder = tmp_path_factory.mktemp("plain")
    offsets = np.cumsum([0, *map(len, documents)])
    flat = np.array([id_ for document in documents for id_ in document], dtype=np.int64)

    assert write_megatron(folder / "a.bin", documents, dtype=dtype) == folder / "a"
    write_megatron(folder / "b", [(flat, offsets)], dtype=dtype)

    assert (folder / "a.bin").read_bytes() == (folder / "b.bin").read_bytes()
    assert (folder / "a.idx").read_bytes() == (folder / "b.idx").read_bytes()
    store = open_tokens(folder / "a")
    shards, ids = np.zeros(len(documents), dtype=np.int64), np.arange(len(documents))
    tokens, _ = store.gather(shards, ids, shards, store.lengths(shards, ids))
    assert tokens.tolist() == flat.tolist()
    assert store.lengths(shards, ids).tolist() == [len(document) for document in documents]


def test_documents_that_do_not_fit_a_plain_pair_leave_nothing(tmp_path):
    for documents, dtype, error, said in (
        (
            [[1], [2, 65_536]],
            "uint16",
            DocumentsError,
            r"document 1 holds 65,536, which uint16 .*; write int32",
        ),
        ([[2**31]], "int32", DocumentsError, "document 0 holds 2,147,483,648, which int32 can't hold"),
        ([["a"]], "int32", DocumentsError, "document 0 must be a list of whole numbers"),
        ([], "int32", DocumentsError, "no documents were written"),
        ([[1]], "int8", SettingError, "dtype must be 'int32' or 'uint16', got 'int8'"),
    ):
        with pytest.raises(error, match=said):
            write_megatron(tmp_path / "a", documents, dtype=dtype)
        assert list(tmp_path.iterdir()) == []
