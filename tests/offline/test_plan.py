"""From the lengths in a store to rows: every token in one place, parts of about one size, a ledger that says so."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.documents import order as order_module
from varlen.errors import OverlongDocumentError, SettingError
from varlen.offline import pack as plan_module
from varlen.offline.pack import PackSettings, Plan


class Lengths:
    """Stands in for a shard."""

    def __init__(self, lengths):
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


class Store:
    """Stands in for a token store of known lengths, shard by shard."""

    def __init__(self, shards):
        self.shards = shards
        self.documents = np.array([len(lengths) for lengths in shards], dtype=np.int64)

    def shard(self, index):
        return Lengths(self.shards[index])

    def will_need(self, shards, documents):
        pass  # nothing is read

    def lengths(self, shards, documents):
        return np.array([self.shards[s][d] for s, d in zip(shards, documents)], dtype=np.int64)


def planned(shards, **settings):
    plan = Plan(Store(shards), PackSettings(**settings))
    parts = list(plan)
    return parts, plan.ledger.check()


def pieces_of(parts):
    return [
        piece
        for part in parts
        for piece in zip(*(a.tolist() for a in (part.shards, part.documents, part.starts, part.stops)))
    ]


def row_sizes(part):
    return np.add.reduceat(part.stops - part.starts, part.offsets[:-1])


def tokens_kept(shards, capacity, overlong):
    """The oracle: how many tokens of each document are to stand in rows."""
    kept = {}
    for shard, lengths in enumerate(shards):
        for document, length in enumerate(lengths):
            if length > capacity and overlong == "drop":
                continue
            kept[shard, document] = min(length, capacity) if overlong == "truncate" else length
    return {name: length for name, length in kept.items() if length}


SHARDS = st.lists(st.lists(st.integers(0, 40), max_size=60), max_size=6)


@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
@given(
    shards=SHARDS,
    capacity=st.integers(1, 50),
    window=st.integers(1, 40),
    part_tokens=st.integers(1, 300),
    shuffle=st.booleans(),
    method=st.sampled_from(["best_fit", "next_fit", "best_fit_decreasing", "first_fit"]),
    most=st.none() | st.integers(1, 4),
)
def test_every_token_stands_in_one_row_of_one_part(
    overlong, shards, capacity, window, part_tokens, shuffle, method, most
):
    with pytest.MonkeyPatch.context() as patch:
        for module in (order_module, plan_module):
            patch.setattr(module, "STRETCH", 32)
        patch.setattr(order_module, "_RUN", 4)
        parts, ledger = planned(
            shards,
            capacity=capacity,
            window=window,
            part_tokens=part_tokens,
            shuffle=shuffle,
            method=method,
            overlong=overlong,
            max_documents=most,
        )

    held = sorted((s, d, t) for s, d, a, b in pieces_of(parts) for t in range(a, b))
    kept = tokens_kept(shards, capacity, overlong)
    assert held == sorted((s, d, t) for (s, d), length in kept.items() for t in range(length))
    for part in parts:
        assert part.offsets[0] == 0
        assert part.offsets[-1] == len(part.documents)
        assert (np.diff(part.offsets) > 0).all()
        assert (np.diff(part.offsets) <= (most or len(part.documents))).all()
        assert (row_sizes(part) <= capacity).all()
    given_ = sum(map(sum, shards))
    assert ledger.documents_in == sum(map(len, shards))
    assert ledger.tokens_in == given_
    assert ledger.packed == len(held)
    assert ledger.truncated + ledger.dropped == given_ - len(held)
    assert ledger.empty_documents == sum(lengths.count(0) for lengths in shards)


@given(shards=SHARDS, part_tokens=st.integers(1, 300))
def test_parts_are_numbered_and_end_with_the_row_that_fills_them(shards, part_tokens):
    parts, _ = planned(shards, capacity=40, part_tokens=part_tokens)

    assert [part.number for part in parts] == list(range(len(parts)))
    for part in parts[:-1]:
        assert row_sizes(part).sum() >= part_tokens
        assert row_sizes(part)[:-1].sum() < part_tokens
    assert all(row_sizes(part)[:-1].sum() < part_tokens for part in parts[-1:])


@given(shards=SHARDS, capacity=st.integers(1, 50))
def test_wrapped_documents_follow_each_other_and_fill_every_row_but_the_last(shards, capacity):
    parts, ledger = planned(shards, capacity=capacity, method="wrapped", shuffle=False, part_tokens=100)

    tokens = [(s, d, t) for s, d, a, b in pieces_of(parts) for t in range(a, b)]
    assert tokens == [(s, d, t) for s, ls in enumerate(shards) for d, n in enumerate(ls) for t in range(n)]
    sizes = [size for part in parts for size in row_sizes(part).tolist()]
    assert all(size == capacity for size in sizes[:-1])
    assert ledger.packed == len(tokens)


def test_documents_in_order_stay_in_order_where_one_pack_is_open_at_a_time():
    parts, _ = planned([[5, 3, 7], [], [2, 8]], capacity=10, method="next_fit", shuffle=False, part_tokens=10)

    assert pieces_of(parts) == [(0, 0, 0, 5), (0, 1, 0, 3), (0, 2, 0, 7), (2, 0, 0, 2), (2, 1, 0, 8)]
    assert [row_sizes(part).tolist() for part in parts] == [[8, 9], [8]]


def test_the_same_documents_in_other_shards_give_the_same_rows():
    lengths = np.random.default_rng(0).integers(1, 40, 500).tolist()

    one, many = (
        planned(shards, capacity=64, part_tokens=900)[0]
        for shards in ([lengths], [lengths[:99], [], lengths[99:]])
    )

    def numbers(parts, first):
        return [[first[s] + d for s, d in zip(p.shards.tolist(), p.documents.tolist())] for p in parts]

    assert numbers(one, [0]) == numbers(many, [0, 99, 99])
    assert all(np.array_equal(a.offsets, b.offsets) for a, b in zip(one, many))


def test_documents_longer_than_a_row_are_refused_with_the_first_of_them_and_their_number():
    said = (
        "document 3 (counted from 0 in the order of the data) has 12 tokens but a pack holds 10 (2 of 6 documents "
        "are too long); pass --overlong split, truncate or drop, or a larger --capacity"
    )

    with pytest.raises(OverlongDocumentError, match=f"^{re.escape(said)}$"):
        planned([[1, 10], [], [3, 12, 4, 11]], capacity=10, overlong="error")
    with pytest.raises(OverlongDocumentError, match="document 0 "):
        planned([[11]], capacity=10, overlong="error")


def test_what_was_cut_and_dropped_is_counted():
    shards = [[25, 4], [11]]

    split = planned(shards, capacity=10, overlong="split")[1]
    truncated = planned(shards, capacity=10, overlong="truncate")[1]
    dropped = planned(shards, capacity=10, overlong="drop")[1]

    assert (split.split_documents, split.packed) == (2, 40)
    assert (truncated.truncated_documents, truncated.truncated, truncated.packed) == (2, 16, 24)
    assert (dropped.dropped_documents, dropped.dropped, dropped.packed) == (2, 36, 4)


@pytest.mark.parametrize("shards", [[], [[]], [[0, 0], []]])
def test_without_a_token_there_is_no_part(shards):
    parts, ledger = planned(shards, capacity=8)

    assert parts == []
    assert ledger.documents_in == ledger.empty_documents == sum(map(len, shards))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"capacity": 0}, "capacity must be a whole number from 1"),
        ({"capacity": 2.5}, "capacity must be a whole number"),
        ({"capacity": 2**31 - 5}, "capacity and part_tokens must be below 2^31 together"),
        ({"max_documents": 0}, "max_documents must be a whole number from 1"),
        ({"seed": -1}, "seed must be a whole number from 0"),
        ({"window": 0}, "window must be"),
        ({"method": "worst_fit"}, "method must be one of next_fit"),
        ({"overlong": "keep"}, "overlong must be one of error, split, truncate, drop; got 'keep'"),
        ({"format": "csv"}, "format must be one of parquet, arrow; got 'csv'"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(SettingError, match=re.escape(said)):
        PackSettings(**{"capacity": 8, **settings})


def test_settings_are_plain_numbers_whatever_they_were_given_as():
    settings = PackSettings(capacity=np.int64(8), max_documents=np.int32(2))

    assert [type(n) for n in (settings.capacity, settings.max_documents)] == [int, int]
