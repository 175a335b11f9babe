"""Windows of a store: every token in one pack of one window, the same whoever makes it, in packs nearly full."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.errors import OverlongDocumentError
from varlen.feed.indexed.windows import Enough, Groups, Windows, WindowSettings


class Store:
    """Stands in for a token store of known lengths, shard by shard; each is a part, unless told."""

    tables = None

    def __init__(self, shards, parts=None):
        self.shards = shards
        self.documents = np.array([len(lengths) for lengths in shards], dtype=np.int64)
        self.tokens = np.array([sum(lengths) for lengths in shards], dtype=np.int64)
        self.parts = np.arange(len(shards)) if parts is None else np.array(parts, dtype=np.int64)
        self.num_parts = int(self.parts[-1]) + 1 if len(self.parts) else 0
        self.fingerprint = self.fingerprint_at(self.num_parts)

    def wait_for(self, num_parts):
        assert num_parts <= self.num_parts

    def fingerprint_at(self, num_parts):
        ends = int(np.searchsorted(self.parts, num_parts))
        return repr((self.shards[:ends], self.parts[:ends].tolist()))  # as stores tell parts apart

    def lengths(self, shards, documents):
        return np.array(
            [self.shards[s][d] for s, d in zip(shards.tolist(), documents.tolist())], dtype=np.int64
        )


def grouped(shards, ends, settings):
    """Windows of shards, in groups that end where they are told to."""
    parts = np.searchsorted(ends, np.arange(len(shards)), side="right")
    return Windows(Store(shards, parts), Groups(Store(shards, parts), Enough(parts=1)), settings)


def places_of(windows):
    """Group and number of every window."""
    num_parts = windows.store.num_parts
    groups = range(windows.num_groups(num_parts))
    return [(group, n) for group in groups for n in range(windows.num_windows(group, num_parts))]


def window_of(windows, epoch, place):
    return windows.window(epoch, *place, windows.store.num_parts)


def pieces_of(packs):
    fields = (packs.shards, packs.documents, packs.starts, packs.stops)
    return list(zip(*(field.tolist() for field in fields)))


SHARDS = st.lists(st.lists(st.integers(0, 40), max_size=30), min_size=1, max_size=5)


@st.composite
def groupings(draw):
    """Shards, and where groups of them end."""
    shards = draw(SHARDS)
    ends = draw(st.sets(st.integers(1, len(shards)), max_size=3)) | {len(shards)}
    return shards, sorted(ends)


@given(
    groupings(),
    st.integers(1, 50),
    st.integers(1, 40),
    st.none() | st.integers(0, 2**40),
    st.sampled_from(["split", "truncate", "drop"]),
    st.sampled_from(["best_fit", "next_fit", "best_fit_decreasing", "wrapped"]),
    st.integers(0, 3),
)
def test_every_token_stands_in_one_pack_of_one_window(
    grouping, capacity, size, seed, overlong, method, epoch
):
    shards, groups = grouping
    settings = WindowSettings(capacity=capacity, window=size, seed=seed, overlong=overlong, method=method)
    windows = grouped(shards, groups, settings)
    made = [window_of(windows, epoch, place) for place in places_of(windows)]

    kept = {}
    for window in made:
        window.ledger.check()
        packs = window.packs
        sums = np.add.reduceat(packs.stops - packs.starts, packs.offsets[:-1]) if packs.num_packs else []
        assert all(0 < total <= capacity for total in sums)
        for shard, document, start, stop in pieces_of(packs):
            kept.setdefault((shard, document), []).append((start, stop))
    wanted = {}
    for shard, lengths in enumerate(shards):
        for document, length in enumerate(lengths):
            if length > capacity and overlong == "drop":
                continue
            length = min(length, capacity) if overlong == "truncate" else length
            if length:
                wanted[shard, document] = length
    assert {name: sorted(pieces)[-1][1] for name, pieces in kept.items()} == wanted
    for pieces in kept.values():  # end to end, none twice
        assert [0, *(stop for _, stop in sorted(pieces))][:-1] == [start for start, _ in sorted(pieces)]


@given(groupings(), st.integers(1, 40), st.integers(0, 9))
def test_a_window_does_not_depend_on_what_was_made_before_nor_on_later_shards(grouping, window, seed):
    shards, groups = grouping
    settings = WindowSettings(capacity=50, window=window, seed=seed)
    grown = grouped([*shards, [5, 6, 7]], [*groups, len(shards) + 1], settings)
    whole = grouped(shards, groups, settings)
    alone = {
        place: window_of(grouped(shards, groups, settings), 1, place).packs for place in places_of(whole)
    }

    for place in reversed(places_of(whole)):
        assert (
            pieces_of(window_of(whole, 1, place).packs)
            == pieces_of(alone[place])
            == pieces_of(window_of(grown, 1, place).packs)
        )
        assert window_of(whole, 1, place).packs.offsets.tolist() == alone[place].offsets.tolist()


def test_groups_stay_apart_and_epochs_and_seeds_differ():
    shards, groups = [[1] * 40, [1] * 40, [1] * 40], [1, 3]

    def documents(seed, epoch):
        windows = grouped(shards, groups, WindowSettings(capacity=10, window=20, seed=seed))
        made = [window_of(windows, epoch, place).packs for place in places_of(windows)]
        assert [set(packs.shards.tolist()) <= {0} for packs in made] == [True] * 2 + [False] * 4
        return tuple((shard, number) for packs in made for shard, number, _, _ in pieces_of(packs))

    orders = {documents(seed, epoch) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert documents(None, 0) == documents(None, 1) == tuple((s, d) for s in range(3) for d in range(40))


def test_packs_stand_in_the_order_of_their_first_document():
    lengths = np.random.default_rng(0).integers(1, 90, 500).tolist()
    windows = grouped([lengths], [1], WindowSettings(capacity=100, window=500, seed=None))
    packs = window_of(windows, 0, (0, 0)).packs

    firsts = packs.documents[packs.offsets[:-1]]
    assert (np.diff(firsts) > 0).all()
    part = packs.slice(3, 7)
    assert part.num_packs == 4
    assert pieces_of(part) == pieces_of(packs)[packs.offsets[3] : packs.offsets[7]]


def test_overlong_documents_are_refused_where_they_are_errors():
    windows = grouped([[5, 50]], [1], WindowSettings(capacity=10, overlong="error"))
    with pytest.raises(OverlongDocumentError, match="50"):
        window_of(windows, 0, (0, 0))


def intraclass_correlation(packs):
    """How much alike the logarithms of lengths in one pack are: 0 at random, 1 if packs hold equal lengths."""
    sizes = np.log(packs.stops - packs.starts)
    count = np.diff(packs.offsets)
    owner = np.repeat(np.arange(packs.num_packs), count)
    mean = np.bincount(owner, sizes) / count
    between = (count * (mean - sizes.mean()) ** 2).sum() / (packs.num_packs - 1)
    within = ((sizes - mean[owner]) ** 2).sum() / (len(sizes) - packs.num_packs)
    typical = (len(sizes) - (count**2).sum() / len(sizes)) / (packs.num_packs - 1)
    return (between - within) / (between + (typical - 1) * within)


@pytest.mark.parametrize(("mean", "spread"), [(6, 1.0), (6, 1.2), (7, 1.6)])
def test_windows_are_full_and_lengths_in_a_pack_are_no_more_alike_than_at_random(mean, spread):
    lengths = np.clip(np.random.default_rng(1).lognormal(mean, spread, 30_000), 1, 8192).astype(int)

    def packed(method):
        settings = WindowSettings(capacity=8192, window=len(lengths), method=method)
        return window_of(grouped([lengths], [1], settings), 0, (0, 0)).packs

    packs, at_random, by_length = map(packed, ("best_fit", "next_fit", "best_fit_decreasing"))

    assert lengths.sum() / (packs.num_packs * 8192) >= 0.995
    assert intraclass_correlation(packs) < intraclass_correlation(at_random) + 0.02
    assert intraclass_correlation(by_length) > 0.5  # what it would see if lengths were sorted
