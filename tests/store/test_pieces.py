"""Reading pieces of shards in one go: as the plain reference does, and no file stays open longer than needed."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles import store as reference
from tests.store.test_store import write_store

from varlen.errors import SourceError
from varlen.store import kernels
from varlen.store import store as pieces_


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
    """The tokens of all documents, last shard first."""
    shards = np.repeat(np.arange(len(store.shards)), store.documents)[::-1].copy()
    documents = np.concatenate([np.arange(count) for count in store.documents])[::-1].copy()
    lengths = store.lengths(shards, documents)
    return store.gather(shards, documents, np.zeros(len(shards), dtype=np.int64), lengths)


FILES = Path("/proc/self/fd")


def open_files():
    return sum(1 for file in FILES.iterdir() if file.exists())


@pytest.mark.skipif(not FILES.exists(), reason="only Linux lists the open files of a process")
def test_files_of_few_shards_stay_open_and_none_after_the_store_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces_, "OPEN_SHARDS", 3)
    before = open_files()
    store = write_store(tmp_path, [[[([shard, 9], [1, shard % 2])]] for shard in range(10)])

    tokens, mask = everything(store)

    assert tokens.tolist() == [token for shard in reversed(range(10)) for token in (shard, 9)]
    assert mask.tolist() == [mark for shard in reversed(range(10)) for mark in (1, shard % 2)]
    assert open_files() == before + 10 + 2 * 3  # the offsets of all shards are mapped
    del store
    assert open_files() == before


def test_a_shard_cut_short_after_it_was_opened_is_an_error_that_names_it(tmp_path):
    store = write_store(tmp_path, [[[([1, 2, 3], None), ([4, 5], None)]]])
    everything(store)

    os.truncate(tmp_path / "0" / "tokens.bin", 6)

    with pytest.raises(SourceError, match="it ends before"):
        everything(store)
