"""Files of ready tokens, Arrow's and Megatron's, are read where they lie; what tells that they were changed."""

import os
import struct
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.offline_packs import write_texts
from tests.support.rarely import examples
from tests.support.stores import KINDS, joined, write_arrow, write_pair, write_store

import varlen as vl
from varlen.documents.source import open_source
from varlen.errors import SourceError, StateError
from varlen.files.seen import PIECE_BYTES
from varlen.offline.index import index_source
from varlen.store import token_files
from varlen.store.bin_idx import MegatronFile
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
        (
            {"input_ids": [[1, 2]], "loss_mask": [[1, 2]]},
            r"2 in `loss_mask` at token 1, and it must be 0 or 1",
        ),
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


def documents_in(store: FileTokens) -> list[list[int]]:
    places = [(s, d) for s, count in enumerate(store.documents.tolist()) for d in range(count)][::-1]
    shards, documents = np.array(places, dtype=np.int64).reshape(-1, 2).T
    lengths = store.lengths(shards, documents)
    tokens, mask = store.gather(shards, documents, np.zeros(len(shards), dtype=np.int64), lengths)
    assert mask is None
    bounds = np.cumsum([0, *lengths.tolist()]).tolist()
    return [tokens[a:b].tolist() for a, b in zip(bounds, bounds[1:])][::-1]


DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 127), max_size=5), max_size=3), min_size=1, max_size=12)


@given(DOCUMENTS, st.sampled_from(sorted(KINDS)), st.booleans(), st.integers(1, 5))
def test_documents_of_several_sequences_come_back_whole(tmp_path_factory, documents, kind, modes, shard):
    prefix = tmp_path_factory.mktemp("megatron") / "data"
    write_pair(prefix, documents, kind, modes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files, "_SHARD_DOCUMENTS", shard)
        store = FileTokens([MegatronFile(prefix, "data")])

    assert store.documents.sum() == len(documents)
    assert store.documents.max() <= shard
    assert documents_in(store) == [joined(document) for document in documents]


@given(st.lists(st.integers(0, 65_535), min_size=1, max_size=40), st.data())
def test_pieces_are_read_and_their_labels_counted(tmp_path_factory, ids, data):
    prefix = tmp_path_factory.mktemp("megatron") / "data"
    write_pair(prefix, [[ids]])
    start = data.draw(st.integers(0, len(ids)))
    stop = data.draw(st.integers(start, len(ids)))
    store = open_tokens(prefix)
    zero = np.zeros(1, dtype=np.int64)

    tokens, _ = store.gather(zero, zero, [start], np.array([stop - start]))
    store.will_need(zero, zero)

    assert tokens.tolist() == ids[start:stop]
    counted = store.count_targets(zero, zero, np.array([start]), np.array([stop]))
    assert counted.tolist() == [max(stop - start - 1, 0)]


@examples(150, 400)
@given(DOCUMENTS, st.sampled_from(sorted(KINDS)), st.data())
def test_a_broken_index_is_an_error_or_gives_what_the_bytes_say(tmp_path_factory, documents, kind, data):
    prefix = tmp_path_factory.mktemp("megatron") / "data"
    write_pair(prefix, documents, kind)
    path = Path(f"{prefix}.{data.draw(st.sampled_from(['idx', 'idx', 'idx', 'bin']))}")
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        if content:
            at = data.draw(st.integers(0, len(content) - 1) | st.integers(0, min(33, len(content) - 1)))
            content[at] = data.draw(st.sampled_from([0, 1, 2, 127, 128, 255]) | st.integers(0, 255))
    cut = data.draw(st.none() | st.integers(0, len(content)))
    path.write_bytes(content[:cut] + data.draw(st.binary(max_size=9)))

    try:
        found = documents_in(open_tokens(f"{prefix}.idx"))
    except SourceError:
        return
    assert found == oracle(prefix)


def oracle(prefix: Path) -> list[list[int]]:
    """Read a pair in the plainest way."""
    idx, tokens = (Path(f"{prefix}{suffix}").read_bytes() for suffix in (".idx", ".bin"))
    kind, sequences, bounds = struct.unpack_from("<BQQ", idx, 17)
    sizes = struct.unpack_from(f"<{sequences}i", idx, 34)
    begins = struct.unpack_from(f"<{sequences}q", idx, 34 + 4 * sequences)
    documents = struct.unpack_from(f"<{bounds}q", idx, 34 + 12 * sequences)
    read = [
        np.frombuffer(tokens, dtype=KINDS[kind], count=size, offset=begin).tolist() if size else []
        for size, begin in zip(sizes, begins)
    ]
    return [joined(read[a:b]) for a, b in zip(documents, documents[1:])]


def test_a_count_that_no_file_could_hold_takes_no_memory(tmp_path):
    write_pair(tmp_path / "data", [[[1, 2]]])
    idx = tmp_path / "data.idx"
    idx.write_bytes(idx.read_bytes()[:18] + struct.pack("<QQ", 2**62, 2**63) + idx.read_bytes()[34:])

    with pytest.raises(SourceError, match=r"data\.idx is damaged or cut off: it has 62 bytes, but 4,611,686"):
        open_tokens(idx)


def test_what_is_no_pair_of_whole_numbers_is_refused_by_name(tmp_path):
    write_pair(tmp_path / "data", [[[1, 2]], [[3], [4]]])
    whole = (tmp_path / "data.idx").read_bytes()
    for content, said in [
        (b"TNTIDX\x00\x00" + whole[8:], r"data\.idx is not an index of Megatron's: .*TNTIDX"),
        (whole[:17] + b"\x07" + whole[18:], r"data\.idx says that its numbers are float32"),
        (whole[:17] + b"\x09" + whole[18:], "of the unknown kind 9"),
        (whole[:9] + b"\x02" + whole[10:], "has version 2, and only 1 is read; make it"),
        (whole[:-8] + struct.pack("<q", 2), r"must rise from sequence 0 to 3, but go from 0 to 2"),
        (whole[:20], r"data\.idx is cut off: it has 20 bytes"),
    ]:
        (tmp_path / "data.idx").write_bytes(content)
        with pytest.raises(SourceError, match=said):
            open_tokens(tmp_path / "data.bin")
    (tmp_path / "data.idx").write_bytes(whole)
    (tmp_path / "data.bin").write_bytes(b"\x01\x00\x02\x00")
    store = open_tokens(tmp_path / "data")
    with pytest.raises(SourceError, match=r"sequences end beyond the 4 bytes of data\.bin"):
        store.lengths(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
    (tmp_path / "data.bin").unlink()
    with pytest.raises(SourceError, match=r"half of a pair: .*data\.bin isn't there"):
        open_tokens(tmp_path / "data.idx")


@pytest.mark.parametrize(
    ("begins", "said"),
    [
        ((0, 2), "a document's sequences don't stand end to end"),
        ((2, 2), "a document's sequences don't stand end to end"),
        ((0, 2**63 - 2), r"sequences end beyond the 8 bytes of data\.bin"),
        ((0, 3), "lengths or places of sequences are out of range"),
        ((-2, 0), "lengths or places of sequences are out of range"),
    ],
)
def test_sequences_that_lie_where_they_cannot_are_refused(tmp_path, begins, said):
    write_pair(tmp_path / "data", [[[1, 2], [3, 4]]])
    idx = tmp_path / "data.idx"
    idx.write_bytes(idx.read_bytes()[:42] + struct.pack("<2q", *begins) + idx.read_bytes()[58:])

    with pytest.raises(SourceError, match=said):
        documents_in(open_tokens(idx))


def test_an_id_below_zero_is_refused_where_it_is_read(tmp_path):
    write_pair(tmp_path / "data", [[[1, 2, -3]]], kind=4)
    store = open_tokens(tmp_path / "data")

    with pytest.raises(SourceError, match=r"data\.bin holds the id -3 at token 2"):
        documents_in(store)


def test_a_pair_is_found_by_either_name_a_glob_or_its_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    write_pair(tmp_path / "a", [[[1]], [[2, 3]]])
    write_pair(tmp_path / "sub" / "b", [[[4]]])
    both = [[1], [2, 3], [4]]

    for named in ("a", "a.bin", "a.idx", "a.*"):
        assert documents_in(open_tokens(tmp_path / named)) == both[:2]
    assert documents_in(open_tokens(tmp_path)) == both
    assert documents_in(open_tokens([tmp_path / "sub" / "b.bin", tmp_path / "a"])) == [[4], *both[:2]]
    (tmp_path / "text.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(SourceError, match=r"text\.jsonl doesn't; read them apart"):
        open_tokens([tmp_path / "a", tmp_path / "text.jsonl"])


def test_the_fingerprint_follows_content_and_names_and_never_place_or_time(tmp_path):
    marks = []
    for number, (name, last) in enumerate([("a", 9), ("a", 9), ("a", 8), ("b", 9)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_pair(folder / name, [[[1, 2, 3]] * 3, [[4, last]]])
        marks.append(open_tokens(folder).fingerprint)

    assert marks[0] == marks[1]
    assert len(set(marks)) == 3


NUM = 500_000
"""Documents, of which an index takes 10 MB: more than samples cover."""
SAID = "was replaced or rewritten since the files were listed"


@pytest.fixture
def pair(tmp_path) -> Path:
    """A large index, two of whose lengths and places between all samples can be swapped."""
    lengths = np.full(NUM, 4, dtype=np.int32)
    begins = (np.cumsum(np.concatenate([[0], lengths]))[:-1] * 2).astype(np.int64)
    prefix = tmp_path / "data"
    Path(f"{prefix}.bin").write_bytes((np.arange(NUM * 4) % 60_000).astype(np.uint16).tobytes())
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, NUM, NUM + 1))
        file.write(lengths.tobytes() + begins.tobytes() + np.arange(NUM + 1, dtype=np.int64).tobytes())
    return prefix


def between_samples(size: int) -> int:
    """Return a document whose length and whose next one's place no sample holds."""
    starts = (size - PIECE_BYTES) * np.arange(64) // 63
    numbers = np.arange(NUM - 2)
    held = np.zeros(len(numbers), dtype=bool)
    for places in (34 + 4 * numbers, 34 + 4 * NUM + 8 * (numbers + 1)):
        for more in (0, 7):
            at = places + more
            sample = np.searchsorted(starts, at, side="right") - 1
            held |= at < starts[sample] + PIECE_BYTES
    return int(np.flatnonzero(~held)[0])


def rewrite(path: Path, *, keep_times: bool = False) -> None:
    """Make one document shorter and the next one longer, at the same size and between all samples."""
    said, at = path.stat(), between_samples(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(34 + 4 * at)
        file.write(np.array([3, 5], dtype=np.int32).tobytes())
        file.seek(34 + 4 * NUM + 8 * (at + 1))
        file.write(np.array([8 * (at + 1) - 2], dtype=np.int64).tobytes())
    if keep_times:
        os.utime(path, ns=(said.st_atime_ns, said.st_mtime_ns))


def loader_of(prefix: Path, **others: object) -> vl.PackedLoader:
    given = {"capacity": 4096, "global_batch_size": 4, "worker": "thread", "window": 4096, **others}
    return vl.PackedLoader(f"{prefix}.idx", mode="indexed", **given)


def test_an_index_is_told_by_all_of_it_and_its_window_table_with_it(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with loader_of(pair) as loader:
        next(loader)
        state, before = loader.state_dict(), len(loader)
    tables = set((tmp_path / "cache/varlen/tables").iterdir())
    sampled = token_files.sampled_mark(f"{pair}.idx")

    rewrite(Path(f"{pair}.idx"))

    assert token_files.sampled_mark(f"{pair}.idx") == sampled, "the change lies between the samples"
    with loader_of(pair) as loader:
        with pytest.raises(StateError, match="didn't grow from it"):
            loader.load_state_dict(state)
        assert len(loader) <= before + 1
        assert set((tmp_path / "cache/varlen/tables").iterdir()) - tables, "a table of its own"


def test_a_state_of_an_earlier_version_goes_on_with_a_sentence(pair, monkeypatch, caplog):
    with monkeypatch.context() as patched:
        patched.setattr("varlen.store.bin_idx.whole_mark", token_files.sampled_mark)
        with loader_of(pair) as loader:
            next(loader)
            state, expected = loader.state_dict(), next(loader).input_ids.tobytes()
    with loader_of(pair) as loader:
        loader.load_state_dict(state)
        assert next(loader).input_ids.tobytes() == expected
        assert loader.state_dict()["at"]["grown"] != state["at"]["grown"]
    assert "the state is of an earlier version" in caplog.text


def test_marks_are_what_they_were(tmp_path):
    write_pair(tmp_path / "small", [[[1, 2]], [[3]]])
    (tmp_path / "large").write_bytes(np.arange(3 << 20, dtype="<i4").tobytes())
    assert token_files.whole_mark(tmp_path / "small.idx") == token_files.sampled_mark(tmp_path / "small.idx")
    sampled = "sampled:d040e4a7fa49791b02b52ee7ebd0a778e60aff6ad19cb5e718c8ebc81d610a93"
    assert token_files.sampled_mark(tmp_path / "large") == sampled


@pytest.mark.parametrize("keep_times", [False, True])
def test_an_index_that_is_rewritten_while_it_is_read_is_told(pair, keep_times):
    store = open_tokens(f"{pair}.idx")
    assert store is not None
    assert store.fingerprint
    store.lengths(np.array([0]), np.array([0]))
    rewrite(Path(f"{pair}.idx"), keep_times=keep_times)
    with pytest.raises(SourceError, match=f"data.idx {SAID}: its content is another"):
        store.lengths(np.array([1]), np.array([0]))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_tokens_that_are_replaced_while_they_are_read_are_told(tmp_path, suffix):
    write_pair(tmp_path / "data", [[[n % 100] * 9] for n in range(5000)])
    path = tmp_path / f"data{suffix}"
    with loader_of(tmp_path / "data", capacity=64, window=64, epochs=3) as loader:
        next(loader)
        content = path.read_bytes()
        (tmp_path / "other").write_bytes(content[:-8] + bytes(8))
        (tmp_path / "other").replace(path)
        with pytest.raises(SourceError, match=f"data{suffix} {SAID}"):
            list(loader)


def test_tokens_that_are_touched_are_read_on(tmp_path):
    write_pair(tmp_path / "data", [[[n % 100] * 9] for n in range(5000)])
    with loader_of(tmp_path / "data", capacity=64, window=64) as loader:
        expected = [batch.input_ids.tobytes() for batch in loader]
    with loader_of(tmp_path / "data", capacity=64, window=64) as loader:
        found = [next(loader).input_ids.tobytes()]
        for suffix in (".bin", ".idx"):
            os.utime(tmp_path / f"data{suffix}")
        found += [batch.input_ids.tobytes() for batch in loader]
    assert found == expected


def write_record_batches(path: Path, add: int) -> None:
    table = pa.table({"input_ids": [[(n + add) % 100] * 50 for n in range(5000)]})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=500)


def test_a_mapped_arrow_file_that_is_replaced_or_rewritten_is_told(tmp_path):
    path, other = tmp_path / "data.arrow", tmp_path / "other.arrow"
    write_record_batches(other, 1)
    for in_place in (False, True):
        write_record_batches(path, 0)
        with vl.PackedLoader(
            path, capacity=512, global_batch_size=2, worker="thread", window=64, mode="indexed", epochs=3
        ) as loader:
            next(loader)
            if in_place:
                with path.open("r+b") as file:
                    file.write(other.read_bytes())
            else:
                (tmp_path / "copy").write_bytes(other.read_bytes())
                (tmp_path / "copy").replace(path)
            with pytest.raises(SourceError, match=SAID):
                list(loader)


def test_a_fifo_in_place_of_a_pair_is_told(tmp_path):
    write_pair(tmp_path / "data", [[[1, 2]]])
    store = open_tokens(tmp_path / "data.bin")
    assert store is not None
    (tmp_path / "data.bin").unlink()
    os.mkfifo(tmp_path / "data.bin")
    with pytest.raises(SourceError):
        store.gather(np.array([0]), np.array([0]), np.array([0]), np.array([2]))
