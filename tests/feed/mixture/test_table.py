"""Any pack of a mixture is found where the stream has it, from the nearest window that is known."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.feed.indexed.test_stream import packs_of
from tests.feed.mixture.test_heads import SOURCE, mixture_of

from varlen.errors import SettingError
from varlen.feed.indexed import table as table_module
from varlen.feed.mixture.stream import MixedStream
from varlen.feed.mixture.table import MixedTable

WITH_TOKENS = SOURCE.filter(lambda shards: sum(map(sum, shards)) >= 40)  # or windows are too many
HEAD = 8 + 32  # the mark and the checksum
EVENS = [[20] * 300], [[7] * 50], [[9, 4]]


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "varlen" / "tables"


@pytest.fixture
def looked(monkeypatch):
    """Windows that were mixed to be counted."""
    found, real = [], MixedStream.look
    monkeypatch.setattr(
        MixedStream, "look", lambda one, position: found.append(position.window) or real(one, position)
    )
    return found


def steps_of(stream, size):
    """Where each step begins, the end too, and all packs."""
    grown = stream.position({}).grown
    position, starts, every = stream.begin(grown), [], []
    while True:
        starts.append(position)
        packs, position, _ = stream.take(position, size)
        every += packs_of(packs)
        if packs.num_packs < size:
            return [*starts, position], every


@given(
    st.lists(st.tuples(WITH_TOKENS, st.sampled_from([0.5, 1.0, 3.0])), min_size=1, max_size=3),
    st.sampled_from(["first", "all"]),
    st.integers(1, 2),
    st.sampled_from([4, 40]),
    st.integers(1, 9),
    st.data(),
)
def test_every_pack_of_a_mixture_is_found_where_the_stream_has_it(sources, until, epochs, window, size, data):
    stream = mixture_of(*zip(*sources), until, epochs=epochs, window=window)
    starts, every = steps_of(stream, size)
    grown = stream.position({}).grown
    asked = data.draw(st.lists(st.integers(0, len(every) + 3) | st.none(), min_size=1, max_size=5))
    passed = data.draw(st.lists(st.integers(0, len(starts) - 3), max_size=4)) if len(starts) > 2 else []
    here = data.draw(st.none() | st.integers(0, len(starts) - 1))
    tables = [MixedTable(stream), MixedTable(stream)]  # the second finds what the first has kept
    for table in tables:
        for step in passed:
            table.pass_by(step * size, stream.at(starts[step]))
        if here is not None:
            table.stand_at(here * size, starts[here])
        for number in asked:
            if number is None:
                assert table.num_packs(grown) == len(every)
                continue
            position, is_there = table.find(number, grown)
            assert is_there == (number < len(every))
            assert packs_of(stream.take(position, 10**6)[0]) == every[number:]


def test_what_was_counted_is_kept_and_only_what_is_missing_is_counted(home, looked):
    stream = mixture_of(EVENS, [5, 3, 2], "all")
    grown = stream.position({}).grown
    first = MixedTable(stream)
    first.find(0, grown)
    assert looked == [0]
    count = first.num_packs(grown)
    windows = len(looked)
    assert looked == list(range(windows))
    assert windows > 10
    for number in range(0, count + 9, 5):
        found = first.find(number, grown)
        assert MixedTable(stream).find(number, grown) == found
    assert MixedTable(stream).num_packs(grown) == count
    assert len(looked) == windows
    (kept,) = home.iterdir()
    head, body = kept.read_bytes()[:HEAD], np.frombuffer(kept.read_bytes()[HEAD:], "<i8")
    width = body.size // (windows + 1)
    rows = body.reshape(-1, width)
    for damaged in (rows[1:], rows[:, 1:], rows[::-1], rows[-1:], rows.astype(float)):
        whole = np.ascontiguousarray(damaged).tobytes()
        kept.write_bytes(head[:8] + hashlib.sha256(whole).digest() + whole)  # of another table, but not torn
        assert MixedTable(stream).num_packs(grown) == count
    assert len(looked) == 6 * windows
    assert MixedTable(mixture_of(EVENS, [5, 3, 2], "first")).num_packs(grown) != count
    assert MixedTable(mixture_of(EVENS, [5, 3, 1], "all")).num_packs(grown) > 0
    assert len(list(home.iterdir())) == 3


def test_a_pack_is_looked_for_from_the_nearest_window_that_training_has_been_in(looked, monkeypatch):
    stream = mixture_of(EVENS, [5, 3, 2], "endless", epochs=1)
    starts = [stream.position({})]
    for _ in range(60):
        starts.append(stream.take(starts[-1], 4)[1])
    grown, windows = starts[0].grown, [start.window for start in starts]
    assert windows[-1] > 20

    table = MixedTable(stream)
    table.stand_at(50 * 4, starts[50])  # a state that was loaded
    assert table.find(57 * 4 + 3, grown)[0].window >= windows[57]
    assert min(looked) == windows[50]
    looked.clear()
    for step in range(20, 40):
        table.pass_by(step * 4, stream.at(starts[step]))
    for step in (30, 21, 30, 52):
        assert table.find(step * 4, grown) == (starts[step], True)
    assert set(looked) <= set(windows[20:40])
    with pytest.raises(SettingError, match="without end"):
        table.num_packs(grown)


def test_an_end_that_was_found_from_where_training_stands_is_not_kept_as_that_of_what_was_counted():
    stream = mixture_of(EVENS, [5, 3, 2], "all")
    starts, every = steps_of(stream, 4)
    first, grown = MixedTable(stream), starts[0].grown
    first.stand_at(4 * (len(starts) - 5), starts[-5])
    assert first.num_packs(grown) == len(every)
    assert first.find(4, grown) == (starts[1], True)  # counted from the first window, and kept
    for number in reversed(range(0, len(every), 7)):
        for table in (MixedTable(stream), first):
            assert packs_of(stream.take(table.find(number, grown)[0], 1)[0]) == [every[number]]


def test_a_mixture_without_packs_is_no_place_to_look_for_one_for_ever(monkeypatch):
    stream = mixture_of([[[0, 0]]], [1], "endless")
    monkeypatch.setattr("varlen.feed.mixture.stream._MOST_BARREN", 20)
    with pytest.raises(SettingError, match="gave no pack"):
        MixedTable(stream).find(3, stream.position({}).grown)


def test_windows_of_a_mixture_are_counted_and_not_packed(monkeypatch):
    stream = mixture_of(EVENS, [5, 3, 2], "all")
    counted, real = [], table_module.count_packs
    monkeypatch.setattr(table_module, "count_packs", lambda *a, **k: counted.append(1) or real(*a, **k))
    monkeypatch.setattr(MixedStream, "_make", lambda *_: pytest.fail("a window was packed"))
    assert MixedTable(stream).num_packs(stream.position({}).grown) > len(counted) > 10
