"""Groups of parts: they hold enough for full packs however small parts are, and are the same whenever asked for."""

from __future__ import annotations

import os
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.feed.indexed.test_windows import Store
from tests.store.test_bin_idx import write_pair
from tests.store.test_store import write_store
from tests.support.offline_packs import write_texts
from tests.support.rarely import mostly

import varlen as vl
from varlen.documents.source import open_source
from varlen.feed.indexed.windows import Enough, Groups, WindowSettings, enough_for
from varlen.feed.spec import grouped
from varlen.offline import index as index_module
from varlen.offline.index import index_source
from varlen.store.growing import PartialStore
from varlen.store.open import open_tokens

FILES, EACH, CAPACITY = 300, 50, 512
KINDS = ("arrow", "saved", "megatron", "store")


def write_files(folder: Path, kind: str) -> int:
    """Write 300 files of 50 documents as tokens; returns how many tokens there are."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4.2, 0.9, (FILES, EACH)), 1, CAPACITY).astype(np.int64)
    files = [[np.full(n, 7, dtype=np.int32) for n in row] for row in lengths.tolist()]
    folder.mkdir()
    if kind == "arrow":
        for number, rows in enumerate(files):
            table = pa.table({"input_ids": pa.array(rows, pa.list_(pa.int32()))})
            with pa.ipc.new_file(str(folder / f"{number:03d}.arrow"), table.schema) as out:
                out.write_table(table)
    elif kind == "saved":
        rows = {"input_ids": [row for rows in files for row in rows]}
        kinds = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
        datasets.Dataset.from_dict(rows, features=kinds).save_to_disk(folder, num_shards=FILES)
    elif kind == "megatron":
        for number, rows in enumerate(files):
            write_pair(folder / f"{number:03d}", [[row] for row in rows])
    else:
        write_store(folder, [[[(row.tolist(), None) for row in rows]] for rows in files])
    return int(lengths.sum())


@pytest.mark.parametrize("kind", mostly(["arrow", "megatron"], KINDS))
def test_many_small_files_give_packs_as_full_as_one_large_one(tmp_path, kind):
    tokens = write_files(tmp_path / "data", kind)
    settings = {"capacity": CAPACITY, "global_batch_size": 1, "worker": "thread"}
    with vl.PackedLoader(tmp_path / "data", **settings) as loader:
        assert tokens / (len(loader) * CAPACITY) >= 0.995
        held = [next(loader).document_ids for _ in range(40)]
    # They are shuffled over all files of a group, which were 16.
    assert len(np.unique(np.concatenate(held) // EACH)) > 50


PARTS = st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=12)
ENOUGH = st.builds(
    Enough,
    parts=st.integers(1, 4),
    documents=st.integers(1, 12),
    tokens=st.integers(1, 60),
    longest=st.none() | st.integers(1, 5),
)


def ends_of(lengths: list[list[int]], num_parts: int, enough: Enough) -> list[tuple[int, int]]:
    """The groups of the first parts, by the sentence that says where they end."""
    found, first = [], 0
    for part in range(num_parts):
        held = lengths[first : part + 1]
        documents = sum(map(len, held))
        each = [
            sum(one) if enough.longest is None else min(sum(one), enough.longest * len(one)) for one in held
        ]
        is_enough = documents >= enough.documents or sum(each) >= enough.tokens
        if len(held) >= enough.parts and is_enough:
            found.append((first, part + 1))
            first = part + 1
    return [*found, (first, num_parts)] if any(lengths[first:num_parts]) else found


class Coming(Store):
    """A store of which one part after the other is finished, when it is waited for."""

    def __init__(self, lengths: list[list[int]]) -> None:
        super().__init__(lengths)
        self.whole = lengths
        self.finish(0)

    def finish(self, count: int) -> None:
        super().__init__(self.whole[:count])
        self.num_parts = len(self.whole)

    def wait_for(self, num_parts: int) -> None:
        self.finish(max(len(self.documents), num_parts))


@given(PARTS, ENOUGH, st.data())
def test_groups_are_those_of_the_parts_however_these_come(lengths, enough, data):
    whole = Groups(Store(lengths), enough)
    for num_parts in data.draw(st.permutations(range(1, len(lengths) + 1))):
        wanted = ends_of(lengths, num_parts, enough)
        assert whole.num_groups(num_parts) == len(wanted)
        assert [whole.shards(group, num_parts) for group in range(len(wanted))] == wanted
        assert whole.is_there(len(wanted) + 3, num_parts)
        for more in (0, 3):
            first, stop = whole.shards(len(wanted) + more, num_parts)
            assert not any(lengths[first:stop])

        coming = Coming(lengths)
        groups = Groups(coming, enough)
        for group, (first, stop) in enumerate(wanted):
            coming.finish(data.draw(st.integers(len(coming.documents), len(lengths))))
            finished = len(coming.documents)
            is_sealed = groups.is_there(group, num_parts)
            assert len(coming.documents) == finished  # nobody waited
            assert groups.shards(group, num_parts) == (first, stop)
            assert len(coming.documents) <= max(stop, min(first + enough.parts, num_parts), finished)
            assert is_sealed == (finished >= stop)
            assert groups.is_there(group, num_parts)


def test_a_group_waits_for_no_more_than_enough_packs_where_documents_are_long():
    store = Store([[10_000] * 2] * 2000)
    ends = {}
    for overlong in ("split", "truncate"):
        groups = Groups(store, enough_for(1 << 16, 1000, overlong))
        ends[overlong] = groups.shards(0, 2000)
    assert ends == {"split": (0, 52), "truncate": (0, 512)}


def test_groups_are_the_same_where_the_tokens_of_a_pair_were_cut(tmp_path):
    write_pair(tmp_path / "a", [[[1, 2], [3]], [[4] * 9], [[]], [[5] * 4]])
    whole = open_tokens(tmp_path / "a")
    os.truncate(tmp_path / "a.bin", 6)
    cut = open_tokens(tmp_path / "a", check_tokens=False)
    assert whole.tokens.tolist() == cut.tokens.tolist() == [16]
    write_pair(tmp_path / "b", [[]] * 3)
    assert open_tokens([tmp_path / "b", tmp_path / "a"], check_tokens=False).tokens.tolist() == [0, 16]


def test_a_store_of_small_parts_gives_the_same_windows_while_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "PART_BYTES", 400)
    write_texts(tmp_path / "a.jsonl", count=300)
    folder, real, notes = tmp_path / "store", index_module.write_json, []

    def dying(*arguments):
        notes.append(arguments)
        if len(notes) > 25:
            raise KeyboardInterrupt
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(index_module, "write_json", dying)
        with pytest.raises(KeyboardInterrupt):
            index_source(open_source(tmp_path / "a.jsonl"), folder)
    settings = WindowSettings(capacity=128, window=30, seed=3)
    early = open_tokens(folder)
    assert isinstance(early, PartialStore)
    windows = grouped(early, settings)
    some = early.num_parts
    assert windows.is_there(0, some)
    assert not windows.is_there(1, some)
    first = [windows.documents(0, 0, n, some) for n in range(windows.num_windows(0, some))]

    store, _ = index_source(open_source(tmp_path / "a.jsonl"), folder)
    whole = grouped(store, settings)
    for number, (shards, documents) in enumerate(first):
        wanted = whole.documents(0, 0, number, store.num_parts)
        assert np.array_equal(wanted, (shards, documents))
    assert windows.num_groups(some) == whole.num_groups(store.num_parts) > 1
