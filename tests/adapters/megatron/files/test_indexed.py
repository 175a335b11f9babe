"""Megatron's pairs, what specs stand for, and metadata: found, written, read, turned into other kinds."""

import io
import json
import pickle
import re
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.megatron_rows import Row, many_rows, packed_rows, plain, saved, write_parquet

from varlen.adapters.megatron import (
    PackCounts,
    PackedIndexed,
    PackedIndexedWriter,
    combined_metadata,
    convert,
    create_packed,
    is_packed_parquet_file,
    is_packed_parquet_spec,
    metadata_entry,
    metadata_path,
    open_packed,
    read_metadata,
    resolve_packed_parquet_paths,
    write_megatron,
    write_metadata,
    write_packed_indexed_dataset,
)
from varlen.adapters.megatron.files.reader import between, from_dicts, resolve_packed
from varlen.errors import DocumentsError, LengthsError, SettingError, SourceError
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

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert wrong == []
    assert pickle.loads(pickle.dumps(reader))[-1]["input_ids"] == rows[-1]["input_ids"]


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
    with pytest.raises(SettingError, match=r"must end in \.parquet, \.pq or \.sft"):
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


@pytest.mark.parametrize(
    ("name", "is_file", "is_spec"),
    [
        ("data.idx.parquet", True, True),
        ("data.idx.pq", True, True),
        ("shard_*.idx.parquet", True, True),
        ("DATA.IDX.PARQUET", True, True),
        ("data.parquet", False, True),
        ("data.PQ", False, True),
        ("data.parquet*", False, True),
        ("shard_[0-4].pq.?", False, True),
        ("data*", False, False),
        ("data.npy", False, False),
        ("missing", False, False),
    ],
)
def test_names_are_told_apart_as_the_releases_do(name, is_file, is_spec):
    assert is_packed_parquet_file(name) is is_file
    assert is_packed_parquet_spec(Path(name)) is is_spec


def touch(folder: Path, *names: str) -> list[str]:
    for name in names:
        (folder / name).touch()
    return [str(folder / name) for name in names]


def test_a_file_a_glob_a_folder_and_several_of_them_are_found_in_order(tmp_path):
    a, b, c, _, _ = touch(tmp_path, "a1.idx.parquet", "a2.PQ", "b.parquet", "c.npy", ".a3.parquet.12.part")

    assert resolve_packed_parquet_paths(a) == [a]
    assert resolve_packed_parquet_paths(tmp_path / "a*") == [a, b]
    assert resolve_packed_parquet_paths(f"{tmp_path}/a[2-9].*") == [b]
    assert resolve_packed_parquet_paths(f"{tmp_path}/?.parquet") == [c]
    assert resolve_packed_parquet_paths(tmp_path) == [a, b, c]
    assert resolve_packed_parquet_paths([c, tmp_path / "a*"]) == [c, a, b]
    assert is_packed_parquet_spec(tmp_path) is True


def test_a_file_whose_name_holds_brackets_goes_before_the_glob(tmp_path):
    literal, other = touch(tmp_path, "run[1].parquet", "run1.parquet")

    assert resolve_packed_parquet_paths(literal) == [literal]
    Path(literal).unlink()
    assert resolve_packed_parquet_paths(literal) == [other]


def test_pairs_are_found_by_any_of_their_names(tmp_path):
    touch(tmp_path, "a.sft.bin", "a.sft.idx", "b.npy", "tokens.bin", "tokens.idx")
    pair = str(tmp_path / "a.sft")

    for name in ("a.sft", "a.sft.bin", "a.sft.idx", "a", "*.sft", "a.*", "*.sft.idx"):
        assert resolve_packed(tmp_path / name) == [pair], name
    assert resolve_packed(tmp_path) == [pair, str(tmp_path / "b.npy")]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.idx.parquet", r"missing\.idx\.parquet isn't there; .* pass wait_s=60"),
        ("*.parquet", r"no Parquet files match .*\*\.parquet; their names end in \.parquet or \.pq"),
        ("", r"is a folder without Parquet files"),
        ("c.npy", r"c\.npy isn't one of the Parquet files; their names end in"),
    ],
)
def test_what_is_not_there_is_refused_at_once(tmp_path, name, said):
    touch(tmp_path, "c.npy")
    begun = time.monotonic()

    with pytest.raises(SourceError, match=said) as caught:
        resolve_packed_parquet_paths(tmp_path / name)

    assert isinstance(caught.value, ValueError)
    assert time.monotonic() - begun < 1
    with pytest.raises(SourceError, match="no packed data was named"):
        resolve_packed_parquet_paths([])


def test_what_another_node_writes_is_awaited_as_long_as_is_said(tmp_path):
    path = tmp_path / "new" / "a.idx.parquet"

    def write() -> None:
        path.parent.mkdir()
        path.touch()

    timer = threading.Timer(0.3, write)
    timer.start()
    assert resolve_packed_parquet_paths(path, wait_s=30) == [str(path)]
    timer.join()
    begun = time.monotonic()
    with pytest.raises(SourceError, match="no Parquet files match"):
        resolve_packed_parquet_paths(tmp_path / "nowhere" / "b*.parquet", wait_s=0.3)
    assert 0.3 <= time.monotonic() - begun < 5


PACKS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=6)
TRAIN = {
    "dataset_max_seqlen": 4000,
    "max_samples_per_bin": 12,
    "packing_factor": 5.25,
    "packing_efficiency": 99.01,
    "pack_size": 4096,
    "min_packed_seqlen": 3100,
}
VALID = TRAIN | {"dataset_max_seqlen": 3900, "max_samples_per_bin": 15, "min_packed_seqlen": 100}


def told_by_the_release(packs: list[list[int]], pack_size: int) -> dict[str, float]:
    """What a release of Megatron-Bridge says of packs, told in plain Python."""
    everything = [length for pack in packs for length in pack]
    sums = [sum(pack) for pack in packs]
    return {
        "dataset_max_seqlen": max(everything),
        "max_samples_per_bin": max(len(pack) for pack in packs),
        "packing_factor": round(len(everything) / len(packs), 2),
        "packing_efficiency": round(sum(sums) / len(sums) / pack_size * 100, 2),
        "pack_size": pack_size,
        "min_packed_seqlen": min(sums),
    }


@given(PACKS, st.integers(9, 99))
def test_an_entry_says_what_a_release_says_also_added_up_pack_by_pack(packs, pack_size):
    lengths = [length for pack in packs for length in pack]
    offsets = [sum(map(len, packs[:number])) for number in range(len(packs) + 1)]
    counts = PackCounts()
    for pack in packs:
        rows = from_dicts(
            [
                {
                    "input_ids": [0] * (sum(pack) + len(pack)),
                    "loss_mask": [0] * (sum(pack) + len(pack)),
                    "seq_start_id": [sum(pack[:number]) + number for number in range(len(pack))],
                }
            ]
        )
        counts.add_rows(rows)

    expected = told_by_the_release(packs, pack_size)
    assert list(metadata_entry(lengths, offsets, pack_size).items()) == list(expected.items())
    assert counts.entry(pack_size) == expected


def test_entries_of_several_runs_are_read_and_combined_as_the_releases_do(tmp_path):
    path = tmp_path / "4096_metadata.jsonl"
    for text in (
        json.dumps([TRAIN, VALID]),
        f"{json.dumps(TRAIN)}\n{json.dumps(VALID)}\n",
        f"{json.dumps([TRAIN])}\n\n{json.dumps([VALID])}",
    ):
        path.write_text(text)
        assert read_metadata(path, pack_size=4096) == [TRAIN, VALID]
    path.write_text(json.dumps(TRAIN, indent=2))
    assert read_metadata(path) == [TRAIN]
    assert combined_metadata([TRAIN, VALID]) == {
        "max_samples_per_bin": 15,
        "dataset_max_seqlen": 4000,
        "min_packed_seqlen": 100,
    }
    with pytest.raises(SettingError, match="no entries"):
        combined_metadata([])


def test_a_run_that_is_repeated_adds_nothing_unless_it_is_asked_for(tmp_path):
    path = metadata_path(tmp_path / "packed" / "training_4096.idx.parquet", 4096)
    assert path == tmp_path / "packed" / "4096_metadata.jsonl"

    for entry in (TRAIN, VALID, TRAIN):
        write_metadata(path, entry)
    assert path.read_text() == json.dumps([TRAIN, VALID])  # the bytes that the releases write
    write_metadata(path, TRAIN, repeat=True)
    assert read_metadata(path) == [TRAIN, VALID, TRAIN]
    write_metadata(path, VALID, append=False)
    assert read_metadata(path) == [VALID]
    assert [file.name for file in path.parent.iterdir()] == ["4096_metadata.jsonl"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"pack_size": 8192},
            "entry 2: `pack_size` is 8,192, but entry 1 has 4,096; a pack size has its own file",
        ),
        ({"pack_size": "4096"}, "entry 2: `pack_size` must be a whole number from 1 on, got '4096'"),
        (
            {"max_samples_per_bin": 1.5},
            "entry 2: `max_samples_per_bin` must be a whole number from 1 on, got 1.5",
        ),
        (
            {"dataset_max_seqlen": True},
            "entry 2: `dataset_max_seqlen` must be a whole number from 0 on, got True",
        ),
        ({"min_packed_seqlen": -1}, "entry 2: `min_packed_seqlen` must be a whole number from 0 on, got -1"),
        ({"packing_factor": "x"}, "entry 2: `packing_factor` must be a number from 0 on, got 'x'"),
        ({"dataset_max_seqlen": 4097}, "`dataset_max_seqlen` is 4,097, more than `pack_size`, 4,096"),
        ({"min_packed_seqlen": 5000}, "`min_packed_seqlen` is 5,000, more than `pack_size`, 4,096"),
        ({"packing_factor": 99.0}, "`packing_factor` is 99.0, more than `max_samples_per_bin`"),
        ({"packing_efficiency": 120}, "`packing_efficiency` is 120, more than a full pack in percent, 100"),
        (
            {"dataset_max_seqlen": 10, "max_samples_per_bin": 6},
            "`min_packed_seqlen` is 3,100, more than `max_samples_per_bin` documents of `dataset_max_seqlen`, 60",
        ),
        (
            {"dataset_max_seqlen": None, "min_packed_seqlen": None},
            "has no `dataset_max_seqlen` (2 keys of 4 missing)",
        ),
    ],
)
def test_entries_that_can_not_be_are_refused_by_file_entry_and_key(tmp_path, change, said):
    path = tmp_path / "4096_metadata.jsonl"
    entry = {key: value for key, value in (TRAIN | change).items() if value is not None}
    path.write_text(json.dumps([TRAIN, entry]))

    with pytest.raises(SourceError, match=re.escape(said)) as caught:
        read_metadata(path)
    assert str(path) in str(caught.value)


def test_files_that_hold_no_entries_are_refused(tmp_path):
    path = tmp_path / "m.jsonl"
    with pytest.raises(SourceError, match=r"m\.jsonl isn't there: constant shapes \(pad_cu_seqlens\)"):
        read_metadata(path)
    for text, said in (
        ("[]", "holds no entry"),
        ("", "holds no entry"),
        (json.dumps([TRAIN])[:-5], "isn't JSON, or was cut off"),
        (f"{json.dumps(TRAIN)}\n{{", "isn't JSON, or was cut off: line 2"),
        ("[1]", "entry 1 must be an object, got int"),
        ("[" * 5000, "isn't JSON"),
    ):
        path.write_text(text)
        with pytest.raises(SourceError, match=said):
            read_metadata(path)
    path.write_bytes(b"\xff")
    with pytest.raises(SourceError, match="can't be read"):
        read_metadata(path)


def test_an_entry_that_contradicts_what_is_there_or_itself_is_not_written(tmp_path):
    path = tmp_path / "m.jsonl"
    write_metadata(path, TRAIN)
    with pytest.raises(SourceError, match="`pack_size` is 4,096, but packed_sequence_size is 8,192"):
        write_metadata(path, TRAIN | {"pack_size": 8192})
    with pytest.raises(SourceError, match="the entry contradicts itself"):
        write_metadata(path, TRAIN | {"dataset_max_seqlen": 5000}, append=False)
    assert read_metadata(path) == [TRAIN]


def test_packs_that_no_entry_can_be_made_of_are_refused():
    with pytest.raises(LengthsError, match="there are no packs"):
        metadata_entry([], [0], 8)
    with pytest.raises(LengthsError, match="a document has 9 positions, but the pack size is 8"):
        metadata_entry([9], [0, 1], 8)
    with pytest.raises(LengthsError, match="there are no packs"):
        PackCounts().add_rows(from_dicts([])).entry(8)
    assert PackCounts().add_rows(from_dicts(many_rows(3, 9))).num_packs == 3
