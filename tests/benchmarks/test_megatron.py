"""The races against Megatron-Bridge compare what they say: the same chats, rows and batches, value for value."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from benchmarks.checks import WrongResultError, same_documents
from benchmarks.megatron import chats as chats_of
from benchmarks.megatron import offline, round_trips
from benchmarks.megatron.chats import EOS, Chats
from benchmarks.megatron.rows import as_rows, first_rows, lists, same_row
from benchmarks.peers import megatron_published as published

import varlen as vl
from varlen.adapters.megatron import PackedParquet, PackedParquetWriter

PACK = 64


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(chats_of, "_PART", 16)


def scanned(lengths, pack_size):
    """First fit as one would write it down."""
    packs = []
    for length in lengths:
        fitting = [pack for pack in packs if sum(pack) + length <= pack_size]
        if fitting:
            fitting[0].append(length)
        else:
            packs.append([length])
    return packs


@pytest.mark.parametrize("count", [1, 2, 3, 64, 300])
def test_the_peers_tree_and_our_kernel_are_first_fit(count):
    lengths = np.random.default_rng(count).integers(1, PACK + 1, count).tolist()

    assert published.first_fit(lengths, PACK) == scanned(lengths, PACK)
    assert offline.first_fit_by_kernel(lengths, PACK) == scanned(lengths, PACK)


def test_the_peers_tree_places_empty_documents_too():
    assert published.first_fit([0, 5, 0, PACK, 0], PACK) == scanned([0, 5, 0, PACK, 0], PACK)


def test_chats_are_the_same_in_every_run_and_by_parts(small_parts):
    chats, again = Chats.draw(50, PACK), Chats.draw(50, PACK)

    assert len(list(Chats.parts(50, PACK))) == 4
    np.testing.assert_array_equal(chats.marked, again.marked)
    assert chats.positions.max() <= PACK
    assert chats.positions.min() >= 1
    assert (chats.tokens[chats.offsets[1:] - 1] == EOS).all()
    assert np.count_nonzero(chats.tokens == EOS) == len(chats)


def test_a_mask_stands_at_the_input_of_its_target_and_never_at_a_last_token():
    chats = Chats.draw(5, PACK)

    for a, b in zip(chats.offsets, chats.offsets[1:]):
        assert chats.rolled_mask[a:b].tolist() == [*chats.mask[a + 1 : b], 0]
    for example, a, b in zip(chats.examples(), chats.offsets, chats.offsets[1:]):
        assert example["input_ids"].tolist() == chats.tokens[a:b].tolist()
        assert example["loss_mask"].tolist() == (chats.mask[a:b] == 1).tolist()


def packed_file(path, count=40):
    """Write packed chats as varlen does; returns the chats and their rows."""
    chats = Chats.draw(count, PACK)
    flat = chats.rows(PACK)
    with PackedParquetWriter(path) as writer:
        writer.write(as_rows(flat))
    return chats, flat


def test_packed_rows_hold_every_chat_with_its_mask(tmp_path):
    chats, flat = packed_file(tmp_path / "own.idx.parquet")
    tokens, sizes, widths = offline.written(tmp_path)

    same_documents(tokens, sizes, chats.marked, chats.offsets)
    assert widths.max() <= PACK
    assert widths.sum() == chats.positions.sum()
    assert len(widths) == vl.pack(chats.positions, capacity=PACK).num_packs
    with pytest.raises(WrongResultError):
        first_rows(flat, len(widths) + 1)
    assert as_rows(first_rows(flat, 3)).check().num_rows == 3


def test_one_mask_that_is_wrong_is_found(tmp_path):
    chats, _ = packed_file(tmp_path / "own.idx.parquet")
    tokens, sizes, _ = offline.written(tmp_path)
    tokens[7] ^= 1

    with pytest.raises(WrongResultError):
        same_documents(tokens, sizes, chats.marked, chats.offsets)


def test_what_the_peer_writes_as_npy_is_read_back_as_what_it_writes_as_parquet(tmp_path):
    packed_file(tmp_path / "own.idx.parquet")
    rows = lists(tmp_path / "own.idx.parquet")
    (tmp_path / "npy").mkdir()
    np.save(tmp_path / "npy" / "packed.npy", rows)

    for one, other in zip(offline.written(tmp_path), offline.written(tmp_path / "npy")):
        np.testing.assert_array_equal(one, other)


def test_both_ways_to_write_the_peers_file_give_the_same_file(tmp_path):
    _, flat = packed_file(tmp_path / "own.idx.parquet")
    published.write(lists(tmp_path / "own.idx.parquet"), tmp_path / "lists.parquet")
    published.write_arrays(*flat, tmp_path / "arrays.parquet")
    first, second = (pq.read_table(tmp_path / name) for name in ("lists.parquet", "arrays.parquet"))

    assert first.equals(second)
    assert first.schema.equals(second.schema)
    assert str(first.schema.field("loss_mask").type.value_type) == "int8"


def test_the_reader_of_one_row_group_gives_the_rows_of_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(published, "ROW_GROUP", 3)
    _, flat = packed_file(tmp_path / "own.idx.parquet")
    published.write_arrays(*flat, tmp_path / "other.parquet")
    reader, ours = (
        published.OneGroupReader(tmp_path / "other.parquet"),
        PackedParquet(tmp_path / "own.idx.parquet"),
    )

    assert len(reader) == ours.num_rows > 6
    for index in [5, 0, 4, 1, len(reader) - 1]:
        same_row(ours[index], reader[index], index)
    with pytest.raises(WrongResultError, match="row 2: input_ids"):
        same_row(ours[2], reader[3], 2)


def test_a_value_that_differs_fails_a_round_trip_and_is_named():
    found = round_trips.Comparison("a round trip")
    found.equal([1, 2, 3], np.array([1, 2, 3]), "tokens")
    assert found.rows()[0].met
    found.equal([1, 2, 4], [1, 2, 3], "labels")
    found.equal([1, 2], [1, 2, 3], "mask")

    with pytest.raises(WrongResultError, match="2 of 9 values differ, first labels"):
        found.rows()


@pytest.mark.parametrize(("ours", "theirs"), [("int32", "int64"), (["a"], ["a", "b"]), (None, 0), ([1], 1)])
def test_other_types_and_shapes_differ(ours, theirs):
    found = round_trips.Comparison("a round trip")
    found.equal(ours, theirs, "name")

    assert found.differing == 1


def test_a_round_trip_that_compares_nothing_fails():
    with pytest.raises(WrongResultError):
        round_trips.Comparison("nothing").rows()


def test_pickles_of_both_numpys_are_compared():
    (row,) = round_trips.pickles()

    assert (row.value, row.met) == (0, True)


def test_our_contestant_packs_every_chat_and_says_what_it_took(tmp_path):
    offline.write_chats(str(tmp_path / "chats.parquet"), 40, PACK)
    offline.index_chats(str(tmp_path / "chats.parquet"), str(tmp_path / "tokens"))
    taken = offline.ours(str(tmp_path / "tokens"), PACK, "parquet", "best_fit", str(tmp_path / "out"))
    chats = Chats.draw(40, PACK)
    tokens, sizes, widths = offline.written(tmp_path / "out")

    same_documents(tokens, sizes, chats.marked, chats.offsets)
    assert taken["fill"] == pytest.approx(chats.positions.sum() / (len(widths) * PACK))
    assert taken["wall_s"] > 0
    assert taken["peak_bytes"] > 10_000_000
