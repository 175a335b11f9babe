"""Sets packed ahead for Megatron-Bridge: the documents that went in, the release's rows, an index of them."""

import json
import pickle
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests.adapters.megatron.packing.reference import replayed
from tests.support.offline_packs import contents, small_parts, write_chats, write_texts

from varlen.adapters.megatron import (
    MegatronPackSettings,
    PackedSequenceSpecs,
    fill_packing_strategy,
    open_index,
    open_packed,
    pack_for_megatron,
    read_metadata,
)
from varlen.documents.source import open_source
from varlen.errors import DocumentsError, OverlongDocumentError, SettingError, SourceError
from varlen.offline import pack as pack_module
from varlen.offline.crew import Crew
from varlen.offline.index import index_source
from varlen.store.store import open_store

EOS = 256
FIELDS = ("input_ids", "loss_mask", "offsets", "seq_start_id", "document_offsets", "seq_lengths")


def pack(data, output, **given):
    names = ("tokens", "metadata_of", "crew", "overwrite")
    more = {name: given.pop(name) for name in names if name in given}
    return pack_for_megatron(data, output, MegatronPackSettings(**{"pack_size": 256, **given}), **more)


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A token store of several shards: chats, whose questions aren't trained, and texts."""
    small_parts(monkeypatch, 1500)
    (tmp_path / "data").mkdir()
    write_chats(tmp_path / "data" / "chats.jsonl", 40)
    chats = open_source([str(tmp_path / "data" / "chats.jsonl")], "bytes")
    index_source(chats, tmp_path / "tokens")
    return tmp_path / "tokens"


def documents_in(folder):
    store = open_store(folder)
    assert len(store.shards) > 1
    found = []
    for shard, count in enumerate(store.documents.tolist()):
        for number in range(count):
            length = np.diff(store.shard(shard).offsets)[number : number + 1]
            tokens, mask = store.gather(np.array([shard]), np.array([number]), [0], length)
            found.append((tokens.tolist(), [1] * len(tokens) if mask is None else mask.tolist()))
    return found


def pieces_of(rows):
    ends = (rows.begins + rows.stored_lengths).tolist()
    lengths = rows.seq_lengths.tolist()
    return [
        (rows.input_ids[a:b].tolist(), rows.loss_mask[a:b].tolist(), length)
        for a, b, length in zip(rows.begins.tolist(), ends, lengths)
    ]


def all_rows(reader):
    with reader:
        return reader.rows(range(reader.num_rows))


def assert_equal(one, other):
    for name in FIELDS:
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize(
    "algorithm", ["best_fit", "best_fit_decreasing", "balanced", "next_fit", "first_fit_shuffle"]
)
def test_rows_hold_every_document_with_its_mask_at_the_input(tmp_path, store, algorithm, multiple):
    done = pack(store, tmp_path / "out", algorithm=algorithm, multiple=multiple)

    rows = all_rows(open_packed(tmp_path / "out" / "training_256.idx.parquet"))
    expected = []
    for tokens, mask in documents_in(store):
        slot = -(-(len(tokens) - 1) // multiple) * multiple
        padding = slot + 1 - len(tokens)
        expected.append((tokens + [EOS] * padding, mask[1:] + [0] * (padding + 1), len(tokens) - 1))
    found = pieces_of(rows)
    assert sorted(found) == sorted(expected)
    widths = np.diff(rows.offsets) - np.diff(rows.document_offsets)
    assert widths.max() <= 256
    assert (widths % multiple == 0).all()
    manifest = done.manifest
    assert manifest["num_packs"] == rows.num_rows
    assert manifest["num_targets"] == sum(sum(mask) for _, mask, _ in found)
    assert manifest["num_tokens"] == manifest["ledger"]["packed"] == sum(length for _, _, length in found)
    assert manifest["fill_ratio"] == manifest["num_tokens"] / (256 * rows.num_rows)
    assert manifest["packs_without_target"] == 0
    assert manifest == json.loads((tmp_path / "out" / ".manifest.json").read_bytes())


@pytest.mark.parametrize("algorithm", ["first_fit_shuffle", "first_fit_decreasing"])
@pytest.mark.parametrize("multiple", [1, 8])
def test_rows_are_those_that_the_release_would_have_written(tmp_path, store, algorithm, multiple):
    pack(store, tmp_path / "out", algorithm=algorithm, multiple=multiple, seed=7)

    documents = documents_in(store)
    padded = [-(-(len(tokens) - 1) // multiple) * multiple for tokens, _ in documents]
    table = pq.read_table(tmp_path / "out" / "training_256.idx.parquet").to_pylist()
    packs = replayed(padded, 256, 7, algorithm)
    assert len(table) == len(packs)
    for row, numbers in zip(table, packs):
        sequences = {}
        for place, number in enumerate(numbers):  # a length of its own each, so that nothing is drawn
            tokens, mask = documents[number]
            gap = padded[number] + 1 - len(tokens)
            sequences[place] = [{"input_ids": tokens + [EOS] * gap, "loss_mask": mask + [0] * gap}]
        (expected,) = fill_packing_strategy([list(sequences)], sequences, len(numbers), EOS)
        assert {name: row[name] for name in expected} == expected
        assert row["seq_lengths"] == [len(documents[number][0]) - 1 for number in numbers]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"algorithm": "first_fit_shuffle", "seed": 3, "multiple": 4},
        {"pack_size": 32, "overlong": "split"},
        {"pack_size": 32, "overlong": "truncate", "multiple": 8, "max_documents": 2},
        {"pack_size": 48, "overlong": "drop", "shuffle": False},
        {"longest": 40, "overlong": "split", "pad_id": 5, "multiple": 16},
    ],
)
def test_an_index_gives_the_rows_that_parquet_holds(tmp_path, store, given):
    size = given.get("pack_size", 256)
    written = pack(store, tmp_path / "rows", part_tokens=700, **given).manifest
    indexed = pack(store, tmp_path / "index", format="index", part_tokens=700, **given).manifest

    index = open_index(tmp_path / "index")
    parquet = open_packed(tmp_path / "rows" / f"training_{size}_*.idx.parquet")
    assert len(written["parts"]) > 1
    assert index.num_rows == parquet.num_rows == indexed["num_packs"]
    every = all_rows(parquet)
    assert_equal(index.rows(range(index.num_rows)), every)
    some = [3, 0, -1, 3]
    assert_equal(index.rows(some), parquet.rows(some))
    assert_equal(pickle.loads(pickle.dumps(index)).rows(some), parquet.rows(some))
    assert sum(rows.num_rows for rows in index.batches()) == index.num_rows
    assert index[2] == parquet[2]
    for name in ("ledger", "num_targets", "num_tokens", "fill_ratio", "packs_without_target"):
        assert indexed[name] == written[name], name
    assert (tmp_path / "index" / indexed["metadata"]).read_text() == (
        tmp_path / "rows" / written["metadata"]
    ).read_text()
    cut = {"split": "split_documents", "truncate": "truncated_documents", "drop": "dropped_documents"}
    assert "overlong" not in given or written["ledger"][cut[given["overlong"]]] > 0
    assert not list((tmp_path / "index").glob("*.parquet"))


def test_a_split_document_loses_no_target(tmp_path, store):
    pack(store, tmp_path / "whole")
    pack(store, tmp_path / "cut", pack_size=16, overlong="split")

    whole, cut = (all_rows(open_packed(tmp_path / name)) for name in ("whole", "cut"))
    assert cut.num_documents > whole.num_documents
    assert cut.loss_mask.sum() == whole.loss_mask.sum()
    assert cut.seq_lengths.sum() == whole.seq_lengths.sum()


@pytest.mark.parametrize("algorithm", ["best_fit", "first_fit_shuffle"])
@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
def test_long_documents_are_cut_at_the_last_multiple_that_fits(tmp_path, store, overlong, algorithm):
    given = {"longest": 54, "multiple": 8, "overlong": overlong, "algorithm": algorithm}
    ledger = pack(store, tmp_path / "out", **given).manifest["ledger"]

    expected, lost = [], 0
    for tokens, mask in documents_in(store):
        positions = len(tokens) - 1
        stops = [*range(48, positions, 48), positions]
        if positions > 48 and overlong != "split":
            stops = [48] if overlong == "truncate" else []
        lost += positions - max(stops, default=0)
        for start, stop in zip([0, *stops], stops):
            padding = -(stop - start) % 8
            ids, trained = tokens[start : stop + 1], mask[start + 1 : stop + 1]
            expected.append((ids + [EOS] * padding, trained + [0] * (padding + 1), stop - start))
    assert sorted(pieces_of(all_rows(open_packed(tmp_path / "out")))) == sorted(expected)
    assert ledger["truncated"] + ledger["dropped"] == lost
    assert (lost == 0) == (overlong == "split")


def test_metadata_is_that_of_the_release_and_takes_in_the_other_split(tmp_path, store):
    pack(store, tmp_path / "v", split="validation", algorithm="next_fit", multiple=8)
    pack(store, tmp_path / "t", metadata_of=[tmp_path / "v"], multiple=8)

    rows = all_rows(open_packed(tmp_path / "t" / "training_256.idx.parquet"))
    slots = rows.stored_lengths - 1
    packed = np.add.reduceat(slots, rows.document_offsets[:-1])
    theirs, ours = read_metadata(tmp_path / "t" / "256_metadata.jsonl")
    assert [theirs] == read_metadata(tmp_path / "v" / "256_metadata.jsonl")
    assert ours == {
        "dataset_max_seqlen": slots.max(),
        "max_samples_per_bin": np.diff(rows.document_offsets).max(),
        "packing_factor": round(rows.num_documents / rows.num_rows, 2),
        "packing_efficiency": round(packed.sum() / rows.num_rows / 256 * 100, 2),
        "pack_size": 256,
        "min_packed_seqlen": packed.min(),
    }
    specs = PackedSequenceSpecs.from_packed(tmp_path / "t", pad_cu_seqlens=True)
    assert specs.check(pad_to_max_length=True).pad_seq_to_mult == 8
    assert open_packed(specs.packed_train_data_path).num_rows == rows.num_rows
    valid = PackedSequenceSpecs.from_packed(tmp_path / "v")
    assert "validation" in str(valid.packed_val_data_path)
    assert valid.packed_train_data_path is None
    assert PackedSequenceSpecs.from_packed(tmp_path / "v", split="training").packed_val_data_path is None


def test_documents_may_stay_in_their_order(tmp_path, store):
    pack(store, tmp_path / "out", algorithm="next_fit", shuffle=False)
    pack(store, tmp_path / "other", algorithm="next_fit", seed=1)

    found, shuffled = (pieces_of(all_rows(open_packed(tmp_path / name))) for name in ("out", "other"))
    assert [tokens for tokens, _, _ in found] == [tokens for tokens, _ in documents_in(store)]
    assert found != shuffled
    assert sorted(found) == sorted(shuffled)


def test_rows_hold_no_more_documents_than_asked_for(tmp_path, store):
    pack(store, tmp_path / "out", max_documents=2)

    assert np.diff(all_rows(open_packed(tmp_path / "out")).document_offsets).max() == 2


def test_bytes_are_the_same_with_two_processes_and_after_an_interruption(tmp_path, store, monkeypatch):
    write_texts(tmp_path / "data" / "more.jsonl")
    source = open_source([str(tmp_path / "data")], "bytes")
    pack(source, tmp_path / "one", part_tokens=700)
    pack(source, tmp_path / "two", part_tokens=700, crew=Crew(processes=2))

    finish = pack_module.finish
    monkeypatch.setattr(pack_module, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        pack(source, tmp_path / "three", part_tokens=700)
    assert not (tmp_path / "three").exists()
    monkeypatch.setattr(pack_module, "finish", finish)
    assert not pack(source, tmp_path / "three", part_tokens=700).was_there
    assert pack(source, tmp_path / "three", part_tokens=700).was_there

    first = contents(tmp_path / "one")
    assert len(first) > 4
    assert first == contents(tmp_path / "two") == contents(tmp_path / "three")


def test_tokens_are_kept_for_another_pack_size(tmp_path, store):
    source = open_source([str(tmp_path / "data")], "bytes")
    pack(source, tmp_path / "a", tokens=tmp_path / "kept")
    before = contents(tmp_path / "kept")
    pack(source, tmp_path / "b", tokens=tmp_path / "kept", pack_size=512, format="index")

    assert contents(tmp_path / "kept") == before
    assert open_index(tmp_path / "b").num_rows < open_packed(tmp_path / "a").num_rows


def test_an_index_follows_its_tokens_and_knows_them(tmp_path, store):
    pack(store, tmp_path / "index", format="index")
    expected = open_index(tmp_path / "index")[0]
    store.rename(tmp_path / "elsewhere")

    with pytest.raises(
        SourceError, match=r"is an index of tokens in .*tokens, which isn't there; pass tokens="
    ):
        open_index(tmp_path / "index")
    assert open_index(tmp_path / "index", tmp_path / "elsewhere")[0] == expected
    write_texts(tmp_path / "data" / "more.jsonl")
    index_source(open_source([str(tmp_path / "data" / "more.jsonl")], "bytes"), store)
    with pytest.raises(SourceError, match="was made for other tokens than"):
        open_index(tmp_path / "index")
    for damaged in (b"", b"cut", b"\x93NUMPY\x01\x00\x01\x00("):
        (tmp_path / "index" / "positions.npy").write_bytes(damaged)
        with pytest.raises(SourceError, match=r"positions\.npy is missing or damaged"):
            open_index(tmp_path / "index", tmp_path / "elsewhere")
    with pytest.raises(SourceError, match="is not a finished index of packs"):
        open_index(tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "elsewhere")


def test_documents_too_long_are_an_error_and_the_tokens_are_kept(tmp_path, store):
    source = open_source([str(tmp_path / "data")], "bytes")

    with pytest.raises(
        OverlongDocumentError, match=r"document \d+ has .* but 32 are the most .* the tokens are kept in"
    ):
        pack(source, tmp_path / "out", pack_size=32, multiple=8)
    done = pack(source, tmp_path / "out", pack_size=32, multiple=8, overlong="truncate")
    assert done.manifest["ledger"]["truncated_documents"] > 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"multiple": 24},
            "pack_size is 256, which is no multiple of pad_seq_to_mult, 24; the nearest: 240 or 264",
        ),
        ({"longest": 300}, "longest is 300, but a row holds 256"),
        ({"longest": 4, "multiple": 8}, "longest is 4, but documents are padded to multiples of 8"),
        ({"algorithm": "first_fit_shuffle", "max_documents": 3}, "which know no max_documents"),
        ({"algorithm": "first_fit_decreasing", "shuffle": False}, "which know no documents in order"),
        ({"algorithm": "wrapped"}, "algorithm must be one of best_fit"),
        ({"format": "npy"}, "format must be one of parquet, index"),
        ({"overlong": "skip"}, "overlong must be one of"),
        ({"split": "a/b"}, "split begins the names of files"),
        ({"seed": -1}, "seed"),
        ({"part_tokens": 0}, "part_tokens"),
        ({"pad_id": -1}, "pad_id"),
    ],
)
def test_settings_that_cant_be_are_refused_by_name(given, words):
    with pytest.raises(SettingError) as raised:
        MegatronPackSettings(**{"pack_size": 256, **given})

    assert words in str(raised.value)


def test_an_index_of_tokens_that_nobody_keeps_is_refused(tmp_path, store):
    source = open_source([str(tmp_path / "data")], "bytes")

    with pytest.raises(SettingError, match="name a folder for them with --tokens"):
        pack(source, tmp_path / "out", format="index")
    with pytest.raises(SourceError, match=r"256_metadata\.jsonl isn't there"):
        pack(store, tmp_path / "out", metadata_of=[tmp_path])
    with pytest.raises(DocumentsError, match="no document is left to pack: all were dropped"):
        pack(store, tmp_path / "out", pack_size=8, overlong="drop")
    assert not (tmp_path / "out").exists()
