"""Megatron's pairs of files: read as their tools wrote them, and broken ones give an error or what is right."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rarely import examples

from varlen.errors import SourceError
from varlen.store import token_files
from varlen.store.bin_idx import MegatronFile
from varlen.store.open import open_tokens
from varlen.store.token_files import FileTokens

KINDS = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def joined(sequences: list[list[int]]) -> list[int]:
    return [token for sequence in sequences for token in sequence]


def write_pair(prefix: Path, documents: list[list[list[int]]], kind: int = 8, modes: bool = False) -> None:
    """Write documents, each of some sequences, as the format says."""
    dtype = np.dtype(KINDS[kind])
    sequences = [sequence for document in documents for sequence in document]
    sizes = [len(sequence) for sequence in sequences]
    begins = np.cumsum([0, *sizes])[:-1] * dtype.itemsize
    Path(f"{prefix}.bin").write_bytes(np.array(joined(sequences), dtype=dtype).tobytes())
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, kind, len(sequences), len(documents) + 1)
        + np.array(sizes, dtype=np.int32).tobytes()
        + begins.astype(np.int64).tobytes()
        + np.cumsum([0, *(len(document) for document in documents)]).astype(np.int64).tobytes()
        + (np.zeros(len(sequences), dtype=np.int8).tobytes() if modes else b"")
    )


def documents_in(store: FileTokens) -> list[list[int]]:
    """Read all documents, one piece each, last to first."""
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
        (whole[:9] + b"\x02" + whole[10:], "is of version 2; version 1 is read"),
        (whole[:-8] + struct.pack("<q", 2), r"must rise from sequence 0 to 3, but go from 0 to 2"),
        (whole[:20], r"data\.idx is cut off: it has 20 bytes"),
    ]:
        (tmp_path / "data.idx").write_bytes(content)
        with pytest.raises(SourceError, match=said):
            open_tokens(tmp_path / "data.bin")
    (tmp_path / "data.idx").write_bytes(whole)
    (tmp_path / "data.bin").write_bytes(b"\x01\x00\x02\x00")
    store = open_tokens(tmp_path / "data")
    with pytest.raises(SourceError, match=r"sequences end behind the 4 bytes of data\.bin"):
        store.lengths(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
    (tmp_path / "data.bin").unlink()
    with pytest.raises(SourceError, match=r"half of a pair: .*data\.bin isn't there"):
        open_tokens(tmp_path / "data.idx")


@pytest.mark.parametrize(
    ("begins", "said"),
    [
        ((0, 2), "a document's sequences don't stand end to end"),
        ((2, 2), "a document's sequences don't stand end to end"),
        ((0, 2**63 - 2), r"sequences end behind the 8 bytes of data\.bin"),
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
