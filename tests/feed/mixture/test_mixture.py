"""A mixture keeps to its shares all along, is exact from any state, and any of its packs is found again."""

import hashlib
import json
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.feed.windows import Store, packs_of
from tests.oracles import feed as reference
from tests.support.rarely import IS_SOAK
from tests.support.stores import content, drained, random_store

import varlen as vl
from varlen.errors import InputError, SettingError, StateError
from varlen.feed import kernels
from varlen.feed.indexed.stream import PackStream, Position
from varlen.feed.indexed.windows import GroupMinimum, Groups, Windows, WindowSettings
from varlen.feed.mixture import stream as mixture_stream
from varlen.feed.mixture import table as table_module
from varlen.feed.mixture.stream import MixedStream, MixSettings
from varlen.feed.mixture.table import MixedTable
from varlen.store.open import JoinedTokens
from varlen.store.store import open_store

WEIGHTS = {"web": 6.0, "code": 3.0, "books": 1.0}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    sizes = {"web": (4, 90), "code": (2, 60), "books": (1, 25)}
    return {
        name: random_store(folder / name, shards=shards, documents=documents, seed=number)
        for number, (name, (shards, documents)) in enumerate(sizes.items())
    }


def loader_of(stores, until="first", unit="tokens", weights=None, **changes):
    usual = {"capacity": 32, "global_batch_size": 12, "window": 40, "seed": 3, "worker": "thread"}
    mixture = vl.Mixture(stores, WEIGHTS if weights is None else weights, unit, until)
    return vl.PackedLoader(mixture, **{**usual, **changes})


def bounds_of(stores):
    """Number of the first document of each source within the mixture, and of all."""
    return np.cumsum([0, *(int(open_store(path).documents.sum()) for path in stores.values())])


def lengths_of(path):
    store = open_store(path)
    return np.concatenate([np.diff(store.shard(number).offsets) for number in range(len(store.shards))])


def taken_by(stores, batches):
    """Pieces of each source: (document within the source, first token, tokens)."""
    bounds = bounds_of(stores)
    found = [[] for _ in stores]
    for batch in batches:
        for document, start, length in zip(batch.document_ids, batch.document_starts, batch.document_lengths):
            source = int(np.searchsorted(bounds, document, side="right")) - 1
            found[source].append((int(document - bounds[source]), int(start), int(length)))
    return found


@pytest.mark.parametrize("unit", ["tokens", "documents"])
def test_every_source_keeps_to_its_share_from_window_to_window(stores, unit):
    with loader_of(stores, "endless", unit, epochs=None, global_batch_size=4) as loader:
        taken = np.zeros(3)
        for _, batch in zip(range(400), loader):
            for source, pieces in enumerate(taken_by(stores, [batch])):
                taken[source] += sum(n for _, _, n in pieces) if unit == "tokens" else len(pieces)
    # A document is off at most, and the window that is being taken; in documents, empty ones aren't seen.
    shares = np.array([0.6, 0.3, 0.1])
    assert np.abs(taken - shares * taken.sum()).max() < (40 * 30 if unit == "tokens" else 0.04 * taken.sum())


def test_the_first_source_that_is_over_ends_it_and_no_document_comes_twice(stores):
    with loader_of(stores, "first") as loader:
        pieces = taken_by(stores, loader)
        assert len(loader) * 12 >= loader.stats().masked_packs
        stats = loader.stats()
    lengths = [lengths_of(path) for path in stores.values()]
    assert any(len({d for d, _, _ in found}) == np.count_nonzero(n) for found, n in zip(pieces, lengths))
    assert all(len(set(found)) == len(found) for found in pieces)
    assert stats.ledger.repeated == 0
    assert stats.ledger.check().packed == stats.tokens


def test_all_sources_are_read_once_and_repeats_are_counted(stores):
    with loader_of(stores, "all") as loader:
        pieces = taken_by(stores, loader)
        ledger = loader.stats().ledger
    for found, path in zip(pieces, stores.values()):
        assert {d for d, _, _ in found} == set(np.flatnonzero(lengths_of(path)).tolist())
    again = sum(sum(n for _, _, n in found) - sum(n for _, _, n in set(found)) for found in pieces)
    assert ledger.repeated == again > 0


def test_every_state_gives_the_rest_after_json_and_any_step_is_found(stores):
    with loader_of(stores, "all", micro_batch_size=4) as loader:
        whole, states = drained(loader)
        assert len(loader) == len(whole)
        for step in (0, 3, len(whole) // 3):
            loader.seek(step)
            assert drained(loader)[0] == whole[3 * step :]
            assert len(loader.documents(min(step, len(whole) // 3 - 1)).pack_ids)
        assert "shard" in loader.where(0)
    with loader_of(stores, "all", micro_batch_size=4) as loader:
        for taken in range(0, len(states), 3 if IS_SOAK else 7):
            loader.load_state_dict(json.loads(json.dumps(states[taken])))
            assert drained(loader)[0] == whole[taken:]
    with loader_of(stores, "all", micro_batch_size=4, worker="process") as loader:
        assert drained(loader) == (whole, states)


def test_every_world_size_trains_the_same_sets(stores):
    def rows(size):
        found = {}
        for rank in range(size):
            with loader_of(stores, dp_rank=rank, dp_world_size=size, micro_batch_size=1) as loader:
                for batch in loader:
                    found.setdefault(int(batch.pack_ids[0]) // 12, []).append(content(batch))
        return {step: sorted(taken) for step, taken in found.items()}

    assert rows(3) == rows(1)


def test_texts_become_a_store_and_other_shares_or_sources_are_refused(stores, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "abc " * n}) + "\n" for n in range(20)))
    mixed = {"web": stores["web"], "mine": tmp_path / "a.jsonl"}
    with loader_of(mixed, weights={"web": 1, "mine": 1}, cache=tmp_path / "cache", window=8) as loader:
        next(loader)
        state = loader.state_dict()
    with loader_of(mixed, weights={"web": 2, "mine": 2}, cache=tmp_path / "cache", window=8) as loader:
        loader.load_state_dict(state)
    other = loader_of(mixed, weights={"web": 2, "mine": 1}, cache=tmp_path / "cache", window=8)
    with other, pytest.raises(StateError, match="shares was"):
        other.load_state_dict(state)
    for changes, said in (
        ({"mode": "streaming"}, "known lengths"),
        ({"scope": "all", "window": None}, "known lengths"),
        ({"epochs": None}, "endless"),
    ):
        with pytest.raises(InputError, match=said):
            loader_of(stores, **changes)


BAD = [
    (({}, {}), "by name"),
    (({"a": "x"}, {"b": 1}), "a weight for each source"),
    (({"a": "x"}, {"a": 0}), "positive number"),
    (({"a": "x"}, {"a": float("nan")}), "positive number"),
    (({"a": "x"}, {"a": 1}, "lines"), "unit must be one of"),
    (({"a": "x"}, {"a": 1}, "tokens", "last"), "until must be one of"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD)
def test_what_is_no_mixture_is_refused(arguments, said):
    with pytest.raises(InputError, match=said):
        vl.Mixture(*arguments)


def test_a_place_that_was_changed_to_none_of_the_mixture_is_refused(stores):
    with loader_of(stores, "all") as loader:
        next(loader)
        state = loader.state_dict()
        loader.load_state_dict(state)
        web, *others = state["at"]["sources"]
        for change in (
            {"pack": 10**9},
            {"sources": [{**web, "group": 9}, *others]},
            {"sources": [{**web, "window": 99}, *others]},
            {"sources": [{**web, "document": 41}, *others]},
        ):
            with pytest.raises(StateError, match="it was changed"):
                loader.load_state_dict({**state, "at": {**state["at"], **change}})
        assert loader.state_dict() == state


def test_a_step_near_the_one_that_training_is_in_is_found_without_going_back_to_the_first(
    stores, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    looked, real = [], MixedStream.look
    monkeypatch.setattr(
        MixedStream, "look", lambda one, position: looked.append(position.window) or real(one, position)
    )
    settings = {"until": "endless", "epochs": None, "global_batch_size": 4}
    with loader_of(stores, **settings) as loader:
        states = [loader.state_dict()]
        for _, batch in zip(range(80), loader):
            states.append(loader.state_dict())
            if loader.step == 70:
                expected = content(batch)
        windows = [state["at"]["window"] if state["at"] else 0 for state in states]
        assert windows[60] > 5
        for step in (76, 50, 62):
            loader.seek(step)
            assert loader.state_dict()["at"] == states[step]["at"]
        assert looked == [] or min(looked) >= windows[50]
    looked.clear()
    with loader_of(stores, **settings) as loader:
        loader.load_state_dict(states[60])
        loader.seek(69)
        assert content(next(loader)) == expected
        assert windows[60] <= min(looked) <= max(looked) <= windows[70]


SOURCES = st.lists(
    st.tuples(st.floats(0.01, 100), st.lists(st.integers(0, 1000), max_size=80)), min_size=1, max_size=6
)


WITH_WINDOWS = st.lists(
    st.tuples(st.floats(0.01, 100), st.lists(st.integers(-1, 30), max_size=80)), min_size=1, max_size=6
)


def interleaved(room, sources, most, counts=None, places=None):
    weights = np.array([weight for weight, _ in sources])
    lengths = np.array([n for _, documents in sources for n in documents], dtype=np.int64)
    offsets = np.cumsum([0, *(len(documents) for _, documents in sources)]).astype(np.int64)
    counts = np.zeros(len(sources), dtype=np.int64) if counts is None else counts
    places = offsets[:-1].copy() if places is None else places
    choices = np.full(most, -1, dtype=np.int64)
    found = room.interleave(lengths, places, offsets[1:], weights / weights.sum(), counts, most, choices)
    return choices[:found].tolist(), counts.tolist()


@given(SOURCES | WITH_WINDOWS, st.integers(0, 300))
@example([(1, [3, -1, 1]), (1, [2, 0]), (1, [4])], 4)
def test_the_kernel_does_what_the_reference_does(sources, most):
    places = [np.cumsum([0, *(len(documents) for _, documents in sources)])[:-1] for _ in range(2)]
    found = interleaved(kernels, sources, most, places=places[0])
    assert found == interleaved(reference, sources, most, places=places[1])
    assert places[0].tolist() == places[1].tolist()


@given(WITH_WINDOWS)
def test_where_a_window_begins_is_passed_as_if_nothing_had_been_there(sources):
    without = [(weight, [n for n in documents if n >= 0]) for weight, documents in sources]
    found = interleaved(kernels, sources, 300)[0]
    assert found == interleaved(kernels, without, 300)[0][: len(found)]


@given(SOURCES)
def test_no_source_is_further_from_its_share_than_one_document(sources):
    choices, counts = interleaved(kernels, sources, 500)
    longest = max((n for _, documents in sources for n in documents), default=0)
    shares = np.array([weight for weight, _ in sources])
    shares = shares / shares.sum()
    places, taken = [0] * len(sources), np.zeros(len(sources))
    for choice in choices:
        taken[choice] += sources[choice][1][places[choice]]
        places[choice] += 1
        assert np.abs(taken - shares * taken.sum()).max() <= longest * (1 + 1e-9)
    assert taken.tolist() == counts
    if len(choices) < 500:  # it ends where the source whose turn it is has no more
        assert any(place == len(documents) for place, (_, documents) in zip(places, sources))


@given(SOURCES, st.integers(1, 40))
def test_documents_may_be_asked_for_bit_by_bit(sources, at_once):
    whole, _ = interleaved(kernels, sources, 200)
    counts, places, found = np.zeros(len(sources), dtype=np.int64), [0] * len(sources), []
    while len(found) < 200:
        left = [(weight, documents[place:]) for (weight, documents), place in zip(sources, places)]
        some, _ = interleaved(kernels, left, min(at_once, 200 - len(found)), counts)
        for choice in some:
            places[choice] += 1
        found += some
        if len(some) < at_once:
            break
    assert found == whole


def test_shares_are_those_of_the_weights_and_ties_go_by_order():
    choices, counts = interleaved(kernels, [(1, [1] * 99), (1, [1] * 99), (2, [1] * 99)], 8)
    assert counts == [2, 2, 4]
    assert interleaved(kernels, [(1, [5] * 9), (1, [5] * 9)], 4)[0] == [0, 1, 0, 1]
    assert len(choices) == 8


SOURCE = st.lists(st.lists(st.integers(0, 40), max_size=12), min_size=1, max_size=3).filter(any)


def mixture_of(sources, weights, until="all", unit="tokens", epochs=1, window=20, seed=3, parts_a_group=1):
    settings = WindowSettings(capacity=30, window=window, overlong="split", seed=seed)
    stores, mix = [Store(shards) for shards in sources], np.array(weights) / sum(weights)
    streams = [
        PackStream(
            Windows(
                store,
                Groups(store, GroupMinimum(parts=parts_a_group)),
                replace(settings, seed=None if seed is None else seed + number),
            ),
            epochs if until == "first" else None,
            grows=False,
        )
        for number, store in enumerate(stores)
    ]
    settled = MixSettings(shares=tuple(mix.tolist()), unit=unit, until=until, epochs=epochs)
    return MixedStream(JoinedTokens(stores), streams, settings, settled)


class PlainHead:
    """One source, of which one window at a time is looked at."""

    def __init__(self, stream, first_shard, place):
        self.stream, self.first_shard, self.taken = stream, first_shard, place.taken
        self.go_to(place.position, place.document)

    def go_to(self, position, document=0):
        found = self.stream.at_window(position)
        if found is None:
            return False
        if found != position:
            document = 0
        windows = self.stream.windows
        shards, documents = windows.documents(found.epoch, found.group, found.window, found.num_parts)
        lengths = windows.store.lengths(shards, documents)
        self.position, self.document = found, document
        self.left = list(zip((shards + self.first_shard).tolist(), documents.tolist(), lengths.tolist()))
        self.left = self.left[document:]
        return True


def plainly_mixed(stream, places):
    """One window of a mixture, taken one document after the other."""
    mix, sources, window = stream.mix, stream.sources, stream.settings.window
    firsts = np.cumsum([0, *(len(source.windows.store.documents) for source in sources)])
    plain = [PlainHead(*each) for each in zip(sources, firsts.tolist(), places)]
    counts, rows, is_last = np.array([head.taken for head in plain]), [], False
    while len(rows) < window and not is_last:
        following = [[n if mix.unit == "tokens" else 1 for *_, n in head.left[:1]] for head in plain]
        bounds, choice = np.cumsum([0, *map(len, following)]), np.zeros(1, dtype=np.int64)
        lengths = np.array(list(chain.from_iterable(following)), dtype=np.int64)
        shares = np.array(mix.shares)
        found = reference.interleave(lengths, bounds[:-1].copy(), bounds[1:], shares, counts, 1, choice)
        head = plain[choice[0]]
        if found:
            rows.append((*head.left.pop(0), head.position.epoch))
            head.document += 1
        else:
            is_last = not head.go_to(replace(head.position, window=head.position.window + 1))
            if mix.until == "all" and all(one.position.epoch >= mix.epochs for one in plain):
                is_last = True
    after = tuple(
        mixture_stream.SourcePosition(position=head.position, document=head.document, taken=int(taken))
        for head, taken in zip(plain, counts)
    )
    return rows, after, sum(length for _, _, length, epoch in rows if epoch), is_last


@given(
    st.lists(st.tuples(SOURCE, st.sampled_from([0.1, 1.0, 1.5, 20.0])), min_size=1, max_size=3),
    st.sampled_from(["first", "all", "endless"]),
    st.sampled_from(["tokens", "documents"]),
    st.integers(1, 3),
    st.sampled_from([1, 7, 40]),
    st.none() | st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from([1, 3, 1 << 10]),
)
@example([([[5]], 1)], "first", "tokens", 3, 40, 1, 1, 1 << 10)
@example([([[5, 9]], 1), ([[3, 8]], 2)], "all", "tokens", 3, 40, 1, 1, 1 << 10)
def test_a_mixture_takes_what_it_would_take_window_by_window(
    sources, until, unit, epochs, window, seed, parts_a_group, least
):
    stream = mixture_of(*zip(*sources), until, unit, epochs, window, seed, parts_a_group)
    places = stream.position({}).sources
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture_stream, "_LEAST", least)
        for _ in range(12):
            rows, expected, repeated, is_last = plainly_mixed(stream, places)
            shards, documents, lengths, after, found_repeated, found_last = stream._mixed(places)
            assert list(zip(shards.tolist(), documents.tolist(), lengths.tolist())) == [r[:3] for r in rows]
            assert (after, found_repeated, found_last) == (expected, repeated, is_last)
            if is_last:
                break
            places = after


@given(st.none() | st.integers(0, 2**62), st.integers(0, 10**6), st.integers(0, 3), st.integers(1, 9))
def test_many_epochs_at_once_are_in_the_order_that_each_has(seed, epoch, group, epochs):
    store = Store([[1] * 6, [2] * 3] * 4)
    windows = Windows(
        store, Groups(store, GroupMinimum(parts=2)), WindowSettings(capacity=30, window=20, seed=seed)
    )
    orders = mixture_stream.epoch_orders(seed, Position(epoch=epoch, group=group), epochs, 9)
    for number, order in enumerate(orders.tolist()):
        shards, documents = windows.documents(epoch + number, group, 0, store.num_parts)
        assert (6 * (shards - 2 * group) + documents).tolist() == order


def test_a_source_of_few_documents_is_fetched_few_times_though_it_comes_thousands_of_times(monkeypatch):
    asked, real = [], Windows.documents
    monkeypatch.setattr(Windows, "documents", lambda one, *which: asked.append(which) or real(one, *which))
    stream = mixture_of([[[20] * 30_000], [[10, 12]]], [1, 1], "endless", window=30_000)
    _, _, _, after, repeated, _ = stream._mixed(stream.position({}).sources)
    assert after[1].position.epoch > 5_000
    assert repeated > 10_000 * 10
    assert len(asked) < 10


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
            table.note_passed(step * size, stream.at(starts[step]))
        if here is not None:
            table.set_current(here * size, starts[here])
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
    table.set_current(50 * 4, starts[50])  # a state that was loaded
    assert table.find(57 * 4 + 3, grown)[0].window >= windows[57]
    assert min(looked) == windows[50]
    looked.clear()
    for step in range(20, 40):
        table.note_passed(step * 4, stream.at(starts[step]))
    for step in (30, 21, 30, 52):
        assert table.find(step * 4, grown) == (starts[step], True)
    assert set(looked) <= set(windows[20:40])
    with pytest.raises(SettingError, match="without end"):
        table.num_packs(grown)


def test_an_end_that_was_found_from_where_training_stands_is_not_kept_as_that_of_what_was_counted():
    stream = mixture_of(EVENS, [5, 3, 2], "all")
    starts, every = steps_of(stream, 4)
    first, grown = MixedTable(stream), starts[0].grown
    first.set_current(4 * (len(starts) - 5), starts[-5])
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
