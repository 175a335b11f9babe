"""The window table: every pack is found where the stream has it, in any epoch; kept whole, found again, made anew."""

import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.feed.windows import SHARDS, Store, packs_of, windows_of

from varlen.errors import SettingError, SourceError
from varlen.feed.indexed import table as table_module
from varlen.feed.indexed.stream import PackStream, Position
from varlen.feed.indexed.table import WindowTable
from varlen.feed.indexed.windows import Groups, Windows, WindowSettings


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "varlen" / "tables"


def stream_of(shards, epochs=2, seed=0, ends=None, **more):
    settings = WindowSettings(capacity=30, window=7, overlong="split", seed=seed, **more)
    return PackStream(windows_of(shards, ends or [len(shards)], settings), epochs)


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

    assert table.find(300 * once)[0].epoch == 300
    with pytest.raises(SettingError, match="epochs without end"):
        table.num_packs()
    settings = WindowSettings(capacity=5, window=7, overlong="drop")
    barren = PackStream(windows_of([[9] * 20], [1], settings), None)
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
    whole = kept[0].read_bytes()
    flipped = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
    for damage in (b"", b"\x93NUMPY", whole[:-8], whole + bytes(8), flipped):
        kept[0].write_bytes(damage)
        assert packs() == (first, windows)
    kept[0].unlink()
    os.mkfifo(kept[0])
    assert packs() == (first, windows)
    kept[0].unlink(missing_ok=True)
    packs()
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


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_side_by_side_make_the_table_that_one_makes_and_none_is_left(threads, monkeypatch):
    shards, running = [[n % 29 for n in range(300)], [9] * 5, [8] * 400], threading.enumerate()
    one = WindowTable(stream_of(shards, ends=[1, 2, 3]), threads=1).epoch(1, 3)
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)  # nothing is kept
    monkeypatch.setattr(table_module, "_MANY", 1)
    counting, real = set(), table_module.count_packs

    def count(*arguments, **settings):
        counting.add(threading.current_thread().name)
        return real(*arguments, **settings)

    monkeypatch.setattr(table_module, "count_packs", count)
    many = WindowTable(stream_of(shards, ends=[1, 2, 3]), threads=threads).epoch(1, 3)
    assert many.packs.tolist() == one.packs.tolist()
    assert all(name.startswith("varlen-table") for name in counting)
    assert threading.enumerate() == running


@pytest.mark.parametrize("error", [SourceError, KeyboardInterrupt])
def test_what_goes_wrong_while_threads_count_is_said_and_no_thread_is_left(error, monkeypatch):
    running, counted = threading.enumerate(), []
    monkeypatch.setattr(table_module, "_MANY", 1)

    def count(*_, **__):
        counted.append(1)
        time.sleep(0.02)
        raise error("damaged")

    monkeypatch.setattr(table_module, "count_packs", count)
    with pytest.raises(error, match="damaged"):
        WindowTable(stream_of([[3] * 5000]), threads=2).epoch(0, 1)
    assert len(counted) < 20
    assert threading.enumerate() == running


def test_a_store_that_is_renamed_while_threads_read_it_is_read_once_more(monkeypatch):
    expected = WindowTable(stream_of([[3] * 500]), threads=1).epoch(0, 1).packs.tolist()
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    monkeypatch.setattr(table_module, "_MANY", 1)
    real = table_module.count_packs

    def count(*arguments, **settings):
        if threading.current_thread() is not threading.main_thread():
            raise SourceError("it isn't there any more")
        return real(*arguments, **settings)

    monkeypatch.setattr(table_module, "count_packs", count)
    assert WindowTable(stream_of([[3] * 500]), threads=2).epoch(0, 1).packs.tolist() == expected
