"""Token stores: what is written comes back, piece by piece; a damaged store is an error, said."""

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles import store as reference
from tests.support.stores import Batch, documents_of, write_store

from varlen.errors import SourceError
from varlen.files.losses import Losses
from varlen.store import kernels
from varlen.store import store as pieces_
from varlen.store.shard import Shard, ShardWriter, shard_counts
from varlen.store.store import open_store


@st.composite
def batches(draw: st.DrawFn) -> list[Batch]:
    most = draw(st.sampled_from([9, 65_535, 65_536, 2**31 - 1]))
    found = []
    for _ in range(draw(st.integers(0, 3))):
        documents = draw(st.lists(st.lists(st.integers(0, most), max_size=4), max_size=4))
        masked = draw(st.booleans())
        found.append([(ids, [draw(st.integers(0, 1)) for _ in ids] if masked else None) for ids in documents])
    return found


@given(st.lists(batches(), min_size=1, max_size=3), st.data())
def test_pieces_of_documents_come_back_in_the_order_asked_for(tmp_path_factory, shards, data):
    store = write_store(tmp_path_factory.mktemp("store"), shards)
    flat = [[document for batch in shard for document in batch] for shard in shards]
    places = [(s, d) for s, shard in enumerate(flat) for d in range(len(shard))]
    asked = data.draw(st.lists(st.sampled_from(places), max_size=6)) if places else []
    pieces = []
    for s, d in asked:
        start = data.draw(st.integers(0, len(flat[s][d][0])))
        pieces.append((s, d, start, data.draw(st.integers(start, len(flat[s][d][0])))))

    which = np.array(pieces, dtype=np.int64).reshape(-1, 4)
    tokens, mask = store.gather(which[:, 0], which[:, 1], which[:, 2], which[:, 3] - which[:, 2])

    assert store.documents.tolist() == [len(shard) for shard in flat]
    assert store.lengths(which[:, 0], which[:, 1]).tolist() == [len(flat[s][d][0]) for s, d in asked]
    assert tokens.tolist() == [token for s, d, a, b in pieces for token in flat[s][d][0][a:b]]
    marks = [m for s, d, a, b in pieces for m in (flat[s][d][1] or [1] * len(flat[s][d][0]))[a:b]]
    assert (mask.tolist() if mask is not None else [1] * len(marks)) == marks


@pytest.mark.parametrize(("late", "dtype"), [(65_535, "uint16"), (65_536, "int32")])
def test_ids_are_written_narrow_until_one_is_too_wide(tmp_path, late, dtype):
    writer = ShardWriter(tmp_path / "0")
    for ids in ([1, 65_535], [], [late], [7]):
        writer.append(documents_of([(ids, None)]))

    counts = writer.close()
    assert (counts.dtype, counts.num_tokens, counts.num_documents) == (dtype, 4, 4)
    assert (tmp_path / "0" / "tokens.bin").stat().st_size == 4 * np.dtype(dtype).itemsize
    with Shard(tmp_path / "0") as shard:
        shard.will_need(np.array([0, 1, 3]))
        assert shard.read_tokens(0, 4).tolist() == [1, 65_535, late, 7]
        assert shard.read_mask(0, 4) is None


def test_a_mask_that_begins_late_is_one_before_it_and_targets_leave_out_first_tokens(tmp_path):
    writer = ShardWriter(tmp_path / "0")
    writer.append(documents_of([([1, 2, 3], None), ([], None)]))
    writer.append(documents_of([([4, 5], [1, 0]), ([6, 7, 8], [1, 0, 1])], faults=2))
    writer.append(documents_of([([9], None)]))

    counts = writer.close()

    with Shard(tmp_path / "0") as shard:
        assert shard.read_mask(0, 9).tolist() == [1, 1, 1, 1, 0, 1, 0, 1, 1]
    assert np.load(tmp_path / "0" / "targets.npy").tolist() == [2, 0, 0, 1, 0]
    assert (counts.num_targets, counts.num_skipped, counts.has_mask) == (3, 2, True)
    assert (tmp_path / "0" / "skipped.log").read_text() == "a.jsonl line 0 is bad\na.jsonl line 1 is bad\n"
    assert shard_counts(tmp_path / "0") == counts


def test_a_shard_stands_under_its_name_only_when_it_is_whole(tmp_path):
    writer = ShardWriter(tmp_path / "0")
    writer.append(documents_of([([1], [1])]))
    assert not (tmp_path / "0").exists()
    writer.abandon()
    assert list(tmp_path.iterdir()) == []
    assert shard_counts(tmp_path / "0") is None

    ShardWriter(tmp_path / "0").close()

    assert Shard(tmp_path / "0").offsets.tolist() == [0]


def saved(array: Any) -> bytes:
    sink = io.BytesIO()
    np.save(sink, np.asarray(array))
    return sink.getvalue()


COUNTS = {
    "num_documents": 2,
    "num_tokens": 3,
    "num_targets": 1,
    "num_skipped": 0,
    "dtype": "uint16",
    "has_mask": True,
    "losses": Losses().to_json(),
}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokens.bin", None),
        ("tokens.bin", b"\x01"),
        ("loss_mask.bin", None),
        ("loss_mask.bin", b""),
        ("offsets.npy", None),
        ("offsets.npy", b""),
        ("offsets.npy", b"\x93NUMPY"),
        ("offsets.npy", saved([0, 2])),
        ("offsets.npy", saved([0, 2, 5])),
        ("offsets.npy", saved([0, 4, 3])),
        ("offsets.npy", saved([0.0, 2.0, 3.0])),
        ("offsets.npy", saved([0, None, 3])),
        ("shard.json", None),
        ("shard.json", b"{"),
        ("shard.json", b"[]"),
        ("shard.json", b'{"num_documents": 2}'),
        ("shard.json", json.dumps(COUNTS | {"dtype": "object"}).encode()),
        ("shard.json", json.dumps(COUNTS | {"dtype": []}).encode()),
        ("shard.json", json.dumps(COUNTS | {"num_tokens": 4}).encode()),
        ("manifest.json", None),
        ("manifest.json", b"[]"),
        ("manifest.json", b'{"varlen": 1, "kind": "packs"}'),
        ("manifest.json", b'{"varlen": 1, "kind": "tokens", "format": 99}'),
        ("manifest.json", b'{"varlen": 1, "kind": "tokens", "format": 1}'),
        ("manifest.json", b'{"varlen": 1, "kind": "tokens", "format": 1, "shards": [5]}'),
        ("manifest.json", b'{"varlen": 1, "kind": "tokens", "format": 1, "shards": [{"name": "0"}]}'),
    ],
)
def test_a_damaged_store_is_an_error_that_names_its_folder(tmp_path, name, content):
    write_store(tmp_path, [[[([1, 2], [0, 1]), ([3], [1])]]])
    counts = json.loads((tmp_path / "0" / "shard.json").read_text())
    assert sorted(counts.pop("crc32")) == ["offsets", "targets"]
    assert counts == COUNTS

    path = tmp_path / name if name == "manifest.json" else tmp_path / "0" / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(SourceError) as caught:
        open_store(tmp_path).gather(np.zeros(2, np.int64), np.arange(2), [0, 0], np.array([2, 1]))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("failures", [1, 3, 1000])
def test_a_header_that_python_fails_to_parse_beside_another_thread_is_parsed_again(
    failures, tmp_path, monkeypatch
):
    write_store(tmp_path, [[[([1, 2], None), ([3], None)]]])
    load, left = np.load, [failures]

    def failing(*arguments: Any, **settings: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise SystemError("AST constructor recursion depth mismatch (before=60, after=57)")
        return load(*arguments, **settings)

    monkeypatch.setattr(np, "load", failing)
    if failures == 1000:
        with pytest.raises(SystemError, match="depth mismatch"):
            Shard(tmp_path / "0")
        return
    with Shard(tmp_path / "0") as shard:
        assert shard.offsets.tolist() == [0, 2, 3]
    left[0] = failures
    assert shard.targets().tolist() == [1, 0]


@given(st.data(), st.sampled_from([(np.uint16, np.int32), (np.int32, np.int32), (np.uint8, np.uint8)]))
def test_the_kernel_reads_as_the_reference_does_up_to_the_first_piece_that_ends_early(
    tmp_path_factory, data, kinds
):
    stored, wanted = map(np.dtype, kinds)
    content = np.random.default_rng(data.draw(st.integers(0, 9))).integers(0, 200, 50).astype(stored)
    path = tmp_path_factory.mktemp("pieces") / "tokens.bin"
    path.write_bytes(content.tobytes())
    pieces = data.draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), min_size=1, max_size=8))
    firsts, sizes = np.array(pieces, dtype=np.int64).T
    ends = np.cumsum(sizes)
    offsets = np.arange(70, dtype=np.int64)  # documents of one token
    nothing = np.zeros(len(sizes), dtype=np.int64)
    file = os.open(path, os.O_RDONLY)
    found = []
    for read in (kernels.read_pieces, reference.read_pieces):
        values = np.full(int(ends[-1]), 7, dtype=wanted)
        table = (np.array([number]) for number in (file, stored.itemsize, offsets.ctypes.data))
        places = (firsts // 2, firsts - firsts // 2, np.ascontiguousarray(sizes))
        failed = read(nothing, *places, *table, 0, values)
        whole = int(ends[-1]) if failed < 0 else int((ends - sizes)[failed])
        found.append((failed, values[:whole].tolist()))
    os.close(file)

    assert found[0] == found[1]
    bad = [number for number, (first, size) in enumerate(pieces) if size and first + size > len(content)]
    assert found[0][0] == (bad[0] if bad else -1)
    expected = [content[first : first + size].tolist() for first, size in pieces[: bad[0] if bad else None]]
    assert found[0][1] == [token for piece in expected for token in piece]


def everything(store):
    shards = np.repeat(np.arange(len(store.shards)), store.documents)[::-1].copy()
    documents = np.concatenate([np.arange(count) for count in store.documents])[::-1].copy()
    lengths = store.lengths(shards, documents)
    return store.gather(shards, documents, np.zeros(len(shards), dtype=np.int64), lengths)


FILES = Path("/proc/self/fd")


def open_files(folder):
    return sum(1 for file in FILES.iterdir() if file.exists() and file.resolve().is_relative_to(folder))


@pytest.mark.skipif(not FILES.exists(), reason="only Linux lists the open files of a process")
def test_files_of_few_shards_stay_open_and_none_after_the_store_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces_, "OPEN_SHARDS", 3)
    store = write_store(tmp_path, [[[([shard, 9], [1, shard % 2])]] for shard in range(10)])

    tokens, mask = everything(store)

    assert tokens.tolist() == [token for shard in reversed(range(10)) for token in (shard, 9)]
    assert mask.tolist() == [mark for shard in reversed(range(10)) for mark in (1, shard % 2)]
    assert open_files(tmp_path) == 10 + 2 * 3  # the offsets of all shards are mapped
    del store
    assert open_files(tmp_path) == 0


def test_a_shard_cut_short_after_it_was_opened_is_an_error_that_names_it(tmp_path):
    store = write_store(tmp_path, [[[([1, 2, 3], None), ([4, 5], None)]]])
    everything(store)

    os.truncate(tmp_path / "0" / "tokens.bin", 6)

    with pytest.raises(SourceError, match="it ends before"):
        everything(store)
