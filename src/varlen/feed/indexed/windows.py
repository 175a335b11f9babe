"""The packs of a token store, window by window; each window is a function of the store, the settings and its number.

::

    shards   0  1  2 | 3  4  5 | 6          groups of shards: what may be shuffled together
    order    a permutation of each group's documents
    windows  0   1   2 | 3   4  | 5         so many documents of the order; none crosses groups
    packs    of one window each, carried over nowhere

So any window can be made at any time from the lengths of its documents alone, on every rank alike, and resuming is
making one window. How many windows a group has is asked for when it is reached, as a store may still be written.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from varlen.arguments import LARGEST
from varlen.documents.order import DocumentOrder, hashed
from varlen.pack.pieces import POLICIES
from varlen.pack.window import WindowPacker
from varlen.store.tokens import TokenDocuments
from varlen.types import IntArray, Ledger, Method, Overlong

_KEPT = 4
"""Windows, and orders of groups, kept for who asks again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSettings:
    """What the packs depend on, beside the store."""

    capacity: int
    window: int = 1 << 16
    """Documents packed at a time."""
    method: Method = "best_fit"
    overlong: Overlong = "split"
    max_documents: int | None = None
    document_multiple_of: int = 1
    seed: int | None = 0
    """Of the shuffle; None: documents in the order of the store."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Window:
    """One window, packed."""

    packs: StorePacks
    ledger: Ledger
    """What became of the tokens of its documents."""


class Windows:
    """All windows of a store, group by group, in one epoch after the other."""

    def __init__(self, store: TokenDocuments, groups: Groups, settings: WindowSettings) -> None:
        self.store, self._groups, self.settings = store, groups, settings
        self.parts_a_group = groups.parts_a_group
        # Of this object alone: several loaders don't push out each other's windows.
        self._order = lru_cache(_KEPT)(self._make_order)
        self.window = lru_cache(_KEPT)(self._make_window)

    def num_groups(self, num_parts: int) -> int:
        """Return the groups of an epoch of so many parts; some may have no windows."""
        return self._groups.num_groups(num_parts)

    def is_there(self, group: int, num_parts: int) -> bool:
        """Return whether a group of an epoch of so many parts is known to be sealed, without waiting for it."""
        return self._groups.is_there(group, num_parts)

    def num_windows(self, group: int, num_parts: int) -> int:
        """Return the windows of a group, in an epoch of so many parts; waits until the group is sealed."""
        start, stop = self._groups.shards(group, num_parts)
        return -(-int(self.store.documents[start:stop].sum()) // self.settings.window)

    def _make_order(self, epoch: int, group: int, num_parts: int) -> DocumentOrder:
        start, stop = self._groups.shards(group, num_parts)
        seed = self.settings.seed
        if seed is not None:
            for number in (epoch, group):
                seed = int(hashed(np.array([number]), seed)[0])
        return DocumentOrder(self.store.documents[start:stop], seed, stretch=self.settings.window)

    def documents(self, epoch: int, group: int, number: int, num_parts: int) -> tuple[IntArray, IntArray]:
        """Return the shards, and the numbers within them, of a window's documents; arguments as `window` has them."""
        shards, documents = self._order(epoch, group, num_parts).stretch(number)
        return shards + self._groups.shards(group, num_parts)[0], documents

    def _make_window(self, epoch: int, group: int, number: int, num_parts: int) -> Window:
        """Pack a window.

        Cost: reading the window's lengths, sorting hashes of its documents and packing them.
        """
        shards, documents = self.documents(epoch, group, number, num_parts)
        return packs_of(shards, documents, self.store.lengths(shards, documents), self.settings)


def packs_of(shards: IntArray, documents: IntArray, lengths: IntArray, settings: WindowSettings) -> Window:
    """Pack documents, and nothing but them: what doesn't fill a pack goes into packs of its own.

    Args:
        shards: int64 `[documents]`.
        documents: int64 `[documents]`: numbers within the shards.
        lengths: int64 `[documents]`.
    """
    packer = WindowPacker(
        capacity=settings.capacity,
        window=LARGEST,  # all wait until they are flushed, and are packed at once
        method=settings.method,
        overlong=settings.overlong,
        max_documents=settings.max_documents,
        document_multiple_of=settings.document_multiple_of,
    )
    packer.add(lengths)
    packing = packer.flush()
    packs = StorePacks(
        shards=shards[packing.document_ids],
        documents=documents[packing.document_ids],
        starts=packing.starts.astype(np.int64),
        stops=packing.stops.astype(np.int64),
        offsets=packing.offsets,
    )
    return Window(packs=packs, ledger=packer.ledger.check())


# Groups of shards, within which documents are shuffled: so many parts each, whether they are there yet or not.
#
# ::
#
#     parts     0 1 2 3 4 | 5 6 7 8 | 9        documents of one group are shuffled and packed together
#     holds     enough      enough    the rest
#
# A window never crosses groups, and its last pack is seldom full: a group takes in small parts until it holds
# enough. Where it ends depends on the settings, and on it and the parts before it alone: it is sealed when
# these are finished. What a group holds then never changes, so windows of it may be made while later ones are
# still being written. An epoch of a store that grows holds the parts that were there when it began, and no
# others.

PARTS_A_GROUP = 16
WINDOWS_A_GROUP, PACKS_A_GROUP = 4, 1024
"""A group of more parts than that ends where it has so many windows, or so many packs where documents are long: some
packs that aren't full are few among them, and what is to be there before training begins isn't more than that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Enough:
    """What a group holds at least, but for the last one of an epoch."""

    parts: int = PARTS_A_GROUP
    documents: int = 1
    """Beside the parts: so many documents, or so many tokens."""
    tokens: int = 1
    longest: int | None = None
    """Tokens that become of a document at most; None: all that it has."""


def enough_for(window: int, capacity: int, overlong: Overlong, parts: int = PARTS_A_GROUP) -> Enough:
    """Return what a group holds at least so that hardly any of its packs aren't full."""
    return Enough(
        parts=parts,
        documents=WINDOWS_A_GROUP * window,
        tokens=PACKS_A_GROUP * capacity,
        longest=capacity if POLICIES[overlong].loses else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sums:
    """What the shards hold that are there."""

    of: tuple[IntArray, IntArray, IntArray]
    """What they were summed up of."""
    parts: IntArray
    documents: IntArray
    tokens: IntArray
    """int64 `[shards + 1]`: before each."""


class Groups:
    """Where groups of a store's shards begin and end."""

    def __init__(self, store: TokenDocuments, enough: Enough | None = None) -> None:
        """Take the store, and what a group holds at least; None: the usual number of parts."""
        self._store, self._enough = store, enough or Enough()
        self._ends = [0]
        """Parts that begin a group, as far as no later part can change that."""
        self._finding = threading.Lock()
        self._there = 0
        self._sums: _Sums | None = None

    @property
    def parts_a_group(self) -> int:
        """Parts of the store whose documents are shuffled together, at least."""
        return self._enough.parts

    def num_groups(self, num_parts: int) -> int:
        """Return how many groups the first parts make, each of which holds a document; waits for all these parts."""
        group = 0
        while True:
            first, stop = self.shards(group, num_parts)
            if not self._store.documents[first:stop].any():
                return group
            group += 1

    def is_there(self, group: int, num_parts: int) -> bool:
        """Return whether a group is known to be sealed, or not to be one, without waiting for it."""
        return self._parts(group, num_parts, is_waiting=False) is not None

    def shards(self, group: int, num_parts: int) -> tuple[int, int]:
        """Return the shard at which a group begins, and the one at which it ends; waits until it is sealed.

        Behind the last group there are no more shards with documents.
        """
        found = self._parts(group, num_parts, is_waiting=True)
        start, end = np.searchsorted(self._store.parts, found or (0, 0))
        return int(start), int(end)

    def _parts(self, group: int, num_parts: int, *, is_waiting: bool) -> tuple[int, int] | None:
        """Return the first part of a group, and that after its last; None where that isn't known yet."""
        while True:
            known, begins = len(self._ends), self._ends[-1]
            if group + 1 < known:
                first, stop = self._ends[group], self._ends[group + 1]
                return min(first, num_parts), min(stop, num_parts)
            if begins >= num_parts:
                return num_parts, num_parts
            end = self._end(begins, num_parts, is_waiting=is_waiting)
            if end is None:
                return None
            if end > num_parts:  # the rest of the epoch is its last group, and not yet one of a larger store
                return (begins, num_parts) if group + 1 == known else (num_parts, num_parts)
            with self._finding:
                if len(self._ends) == known:
                    self._ends.append(end)

    def _end(self, begins: int, num_parts: int, *, is_waiting: bool) -> int | None:
        """Return the part behind the group that begins at a part; more than `num_parts` if the group isn't whole."""
        wanted = min(begins + self._enough.parts, num_parts)
        while True:
            if is_waiting and wanted > self._there:
                self._store.wait_for(wanted)
                self._there = max(self._there, wanted)
            there = self._there  # before a look at what is there by now
            sums = self._summed()
            there = min(max(there, int(sums.parts[-1]) + 1 if len(sums.parts) else 0), num_parts)
            first = int(np.searchsorted(sums.parts, begins))
            shard = min(
                int(np.searchsorted(before, before[first] + least)) - 1
                for before, least in (
                    (sums.documents, self._enough.documents),
                    (sums.tokens, self._enough.tokens),
                )
            )
            if shard < len(sums.parts):
                end = max(begins + self._enough.parts, int(sums.parts[shard]) + 1)
                if end <= there:
                    return end
            if there >= num_parts:
                return num_parts + 1
            if not is_waiting:
                return None
            wanted = there + 1

    def _summed(self) -> _Sums:
        """Return sums of what the store has by now."""
        sums = self._sums
        of = (self._store.documents, self._store.tokens, self._store.parts)
        if sums is None or any(now is not then for now, then in zip(of, sums.of)):
            count = min(map(len, of))  # more may have come between two looks
            documents, tokens, parts = (one[:count] for one in of)
            if self._enough.longest is not None:
                tokens = np.minimum(tokens, self._enough.longest * documents)
            sums = _Sums(
                of=of,
                parts=parts,
                documents=np.concatenate([[0], np.cumsum(documents)]),
                tokens=np.concatenate([[0], np.cumsum(tokens)]),
            )
            self._sums = sums
        return sums


# Packs of a store's documents, as flat arrays: what windows give, steps take and batches are made of.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StorePacks:
    """Packs end to end: pack p holds the pieces `offsets[p]:offsets[p + 1]`."""

    shards: IntArray
    """int64 `[pieces]`: the shard of each piece's document."""
    documents: IntArray
    """int64 `[pieces]`: the document's number within its shard."""
    starts: IntArray
    stops: IntArray
    """int64 `[pieces]`: the piece is its document's tokens [start, stop)."""
    offsets: IntArray
    """int64 `[packs + 1]`."""

    @property
    def num_packs(self) -> int:
        """Number of packs."""
        return len(self.offsets) - 1

    @property
    def print(self) -> int:
        """A checksum of which pieces they hold."""
        found = 0
        for one in (self.shards, self.documents, self.starts, self.stops, self.offsets):
            found = zlib.crc32(one.astype("<i8").tobytes(), found)
        return found

    def slice(self, start: int, stop: int) -> StorePacks:
        """Return the packs [start, stop)."""
        pieces = slice(int(self.offsets[start]), int(self.offsets[stop]))
        return StorePacks(
            shards=self.shards[pieces],
            documents=self.documents[pieces],
            starts=self.starts[pieces],
            stops=self.stops[pieces],
            offsets=self.offsets[start : stop + 1] - self.offsets[start],
        )


def end_to_end(parts: Sequence[StorePacks]) -> StorePacks:
    """Put packs one after the other; without parts, no packs."""
    none = np.zeros(0, dtype=np.int64)
    pieces = np.cumsum([0] + [int(part.offsets[-1]) for part in parts])
    offsets = [part.offsets[1:] + before for part, before in zip(parts, pieces)]
    return StorePacks(
        shards=np.concatenate([none, *(part.shards for part in parts)]),
        documents=np.concatenate([none, *(part.documents for part in parts)]),
        starts=np.concatenate([none, *(part.starts for part in parts)]),
        stops=np.concatenate([none, *(part.stops for part in parts)]),
        offsets=np.concatenate([[0], *offsets]).astype(np.int64),
    )
