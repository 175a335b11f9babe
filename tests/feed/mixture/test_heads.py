"""What a mixture takes from its sources is what it would take window by window, however far it looks ahead."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.feed.indexed.test_windows import Store
from tests.oracles import feed as reference

from varlen.feed.indexed.stream import PackStream, Position
from varlen.feed.indexed.windows import Enough, Groups, Windows, WindowSettings
from varlen.feed.mixture import stream as mixture_stream
from varlen.feed.mixture.stream import MixedStream, MixSettings
from varlen.store.open import JoinedTokens

SOURCE = st.lists(st.lists(st.integers(0, 40), max_size=12), min_size=1, max_size=3).filter(any)


def mixture_of(sources, weights, until="all", unit="tokens", epochs=1, window=20, seed=3, parts_a_group=1):
    settings = WindowSettings(capacity=30, window=window, overlong="split", seed=seed)
    stores, mix = [Store(shards) for shards in sources], np.array(weights) / sum(weights)
    streams = [
        PackStream(
            Windows(
                store,
                Groups(store, Enough(parts=parts_a_group)),
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
        mixture_stream.SourcePlace(position=head.position, document=head.document, taken=int(taken))
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
        store, Groups(store, Enough(parts=2)), WindowSettings(capacity=30, window=20, seed=seed)
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
