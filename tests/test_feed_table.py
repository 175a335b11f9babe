"""The window table: every pack is found where the stream has it, in any epoch; kept whole, found again, made anew."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_feed_stream import packs_of
from test_feed_windows import SHARDS, Store, grouped

from varlen.errors import SettingError
from varlen.feed import table as table_module
from varlen.feed.groups import Groups
from varlen.feed.stream import PackStream, Position
from varlen.feed.table import WindowTable
from varlen.feed.windows import Windows, WindowSettings


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "varlen" / "tables"


def stream_of(shards, epochs=2, seed=0, ends=None, **more):
    settings = WindowSettings(capacity=30, window=7, overlong="split", seed=seed, **more)
    return PackStream(grouped(shards, ends or [len(shards)], settings), epochs)


@given(SHARDS, st.integers(1, 3), st.none() | st.integers(0, 9), st.data())
def test_every_pack_is_found_where_the_stream_has_it(shards, epochs, seed, data):
    ends = sorted(data.draw(st.sets(st.integers(1, len(shards)), max_size=2)) | {len(shards)})
    stream = stream_of(shards, epochs, seed, ends)
    table = WindowTable(stream)
    every = packs_of(stream.take(Position(), 10**6)[0])
    first = data.draw(st.integers(0, len(every)))
    count = data.draw(st.integers(0, len(every) - first + 2))

    assert table.num_packs() == len(every)
    at = table.find(first)[0]
    assert packs_of(stream.take(at, 10**6)[0]) == every[first:]
    further = table.skip(stream.take(Position(), first)[1], count)
    assert packs_of(stream.take(further, 10**6)[0]) == every[first + count :]


def test_epochs_of_a_store_that_grew_are_counted_with_the_parts_that_they_had():
    store = Store([[3] * 50, [4] * 80])
    windows = Windows(store, Groups(store), WindowSettings(capacity=30, window=7))
    stream = PackStream(windows, 3, num_parts=lambda epoch: 1 + (epoch > 0))
    every = packs_of(stream.take(Position(), 10**6)[0])
    grown = stream.take(Position(), len(every))[1].grown
    later = WindowTable(PackStream(windows, 3))  # opened when all was there

    assert later.num_packs(grown) == len(every) < later.num_packs()
    for number in range(0, len(every), 7):
        found = later.find(number, grown)[0]
        assert found.grown == grown
        assert packs_of(later._stream.take(found, 10**6)[0]) == every[number:]


def test_without_an_end_a_position_is_found_and_a_number_is_not():
    table = WindowTable(stream_of([[3] * 50], epochs=None))
    once = table.epoch(0, 1).num_packs

    assert table.find(1000 * once)[0].epoch == 1000
    with pytest.raises(SettingError, match="epochs without end"):
        table.num_packs()
    settings = WindowSettings(capacity=5, window=7, overlong="drop")
    barren = PackStream(grouped([[9] * 20], [1], settings), None)
    assert barren.take(WindowTable(barren).find(3)[0], 1)[0].num_packs == 0


def test_a_table_is_kept_and_one_that_is_damaged_is_made_anew(home, monkeypatch):
    counted = []
    real = table_module.count_packs
    monkeypatch.setattr(table_module, "count_packs", lambda *a, **k: counted.append(1) or real(*a, **k))

    def packs(**more):
        counted.clear()
        stream = stream_of([[3] * 50, [8] * 9], **more)
        table = WindowTable(stream).epoch(0, stream.windows.store.num_parts)
        return table.packs.tolist(), len(counted)

    first, windows = packs()
    kept = list(home.iterdir())
    assert (len(kept), windows) == (1, len(first) - 1)
    assert packs() == (first, 0)
    for damage in (b"", b"\x93NUMPY", kept[0].read_bytes()[:-8]):
        kept[0].write_bytes(damage)
        assert packs() == (first, windows)
    np.save(kept[0], np.array(first)[::-1])
    assert packs() == (first, windows)
    np.save(kept[0], np.array([{}] * len(first), dtype=object), allow_pickle=True)
    assert packs() == (first, windows)
    for other in ({"seed": 1}, {"max_documents": 2}, {"ends": [1, 2]}):
        assert packs(**other)[1] >= windows
    assert len(list(home.iterdir())) == 4
    assert not list(home.glob("*.part"))


def test_where_nothing_can_be_kept_a_table_stays_in_memory(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    stream = stream_of([[3] * 50])
    stream.windows.store.tables = tmp_path / "file" / "tables"
    table = WindowTable(stream)

    assert table.epoch(0, 1) is table.epoch(0, 1)


def test_a_table_lies_beside_its_store_and_is_shared_by_epochs_in_order(tmp_path, home):
    stream = stream_of([[3] * 50], seed=None)
    stream.windows.store.tables = tmp_path / ".tables"
    table = WindowTable(stream)

    assert table.epoch(0, 1) is table.epoch(1, 1)
    assert len(list((tmp_path / ".tables").iterdir())) == 1
    assert not home.exists()


def test_a_table_is_made_in_the_background_and_given_up_when_closed():
    told, stream = [], stream_of([[3] * 500])
    table = WindowTable(stream, lambda done, total: told.append((done, total)))
    table.begin(0, 1)
    found = table.epoch(0, 1)  # waits for the thread, or makes it first

    assert found is table.epoch(0, 1)
    assert [done for done, _ in told] == list(range(1, told[-1][1] + 1))
    endless = WindowTable(stream_of([[3] * 500], seed=5), lambda *_: endless._stop.wait())
    endless.begin(0, 1)
    endless._stop.set()
    endless.close()
    assert endless._thread is None
