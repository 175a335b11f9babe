"""The packs of a token store, window by window; each window is a function of the store, the settings and its number.

::

    shards   0  1  2 | 3  4  5 | 6          groups of shards; documents are shuffled within a group
    order    a permutation of each group's documents
    windows  0   1   2 | 3   4  | 5         a fixed number of documents in this order; none crosses groups
    packs    each within one window; nothing is carried over

So any rank can build any window at any time from the lengths of its documents, and resuming takes the time of one
window. The number of windows of a group is determined when the group is reached, as the store may still be written.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from varlen.arguments import LARGEST
from varlen.documents.order import DocumentOrder, hashed
from varlen.feed.batches import StorePacks
from varlen.pack.pieces import POLICIES
from varlen.pack.window import WindowPacker
from varlen.store.tokens import TokenDocuments
from varlen.types import IntArray, Ledger, Method, Overlong

_CACHED = 4
"""Number of windows, and of groups' document orders, in the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSettings:
    """Everything that the packs depend on, apart from the store."""

    capacity: int
    window: int = 1 << 16
    """Number of documents that are packed together."""
    method: Method = "best_fit"
    overlong: Overlong = "split"
    max_documents: int | None = None
    document_multiple_of: int = 1
    seed: int | None = 0
    """Seed of the shuffle; None: documents in the order of the store."""

    @property
    def packing(self) -> dict[str, Any]:
        """Arguments of the `WindowPacker` that packs and counts a window's documents."""
        names = ("capacity", "method", "overlong", "max_documents", "document_multiple_of")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Window:
    """One window, packed."""

    packs: StorePacks
    ledger: Ledger
    """Accounts for the tokens of the window's documents."""


class Windows:
    """All windows of a store, by epoch, group and number in the group."""

    def __init__(self, store: TokenDocuments, groups: Groups, settings: WindowSettings) -> None:
        self.store, self._groups, self.settings = store, groups, settings
        self.parts_a_group = groups.parts_a_group
        # Caches belong to this object, so that several loaders don't evict each other's windows.
        self._order = lru_cache(_CACHED)(self._make_order)
        self.window = lru_cache(_CACHED)(self._make_window)

    def num_groups(self, num_parts: int) -> int:
        """Return the number of groups of an epoch of `num_parts` parts; some may have no windows."""
        return self._groups.num_groups(num_parts)

    def is_known(self, group: int, num_parts: int) -> bool:
        """Return whether the end of a group is known without waiting, in an epoch of `num_parts` parts."""
        return self._groups.is_known(group, num_parts)

    def num_windows(self, group: int, num_parts: int) -> int:
        """Return a group's number of windows, in an epoch of `num_parts` parts; waits until the group is sealed."""
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
        """Return the shards of a window's documents, and their numbers within the shards."""
        shards, documents = self._order(epoch, group, num_parts).stretch(number)
        return shards + self._groups.shards(group, num_parts)[0], documents

    def _make_window(self, epoch: int, group: int, number: int, num_parts: int) -> Window:
        """Pack a window.

        Cost: reading the window's lengths, sorting hashes of its documents and packing them.
        """
        shards, documents = self.documents(epoch, group, number, num_parts)
        return packed_window(shards, documents, self.store.lengths(shards, documents), self.settings)


def packed_window(
    shards: IntArray, documents: IntArray, lengths: IntArray, settings: WindowSettings
) -> Window:
    """Pack the documents of one window; documents that don't fill a pack aren't carried over to another window.

    Args:
        shards: int64 `[documents]`.
        documents: int64 `[documents]`: numbers within the shards.
        lengths: int64 `[documents]`.
    """
    # Nothing is packed before `flush`, which then packs all documents together.
    packer = WindowPacker(window=LARGEST, **settings.packing)
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


# Groups of shards, within which documents are shuffled; each has a minimum of parts, and of documents or tokens.
#
# ::
#
#     parts     0 1 2 3 4 | 5 6 7 8 | 9        documents of one group are shuffled and packed together
#     size      minimum     minimum   the rest
#
# A window never crosses groups, and a group's last pack is seldom full, so a group takes in small parts until it
# reaches the minimum. Its end depends only on the settings, its own parts and those before it; the group is sealed
# when these are finished. A sealed group never changes, so its windows can be built while later parts are still
# being written. An epoch of a growing store consists of the parts that existed when the epoch began.

PARTS_A_GROUP = 16
WINDOWS_A_GROUP, PACKS_A_GROUP = 4, 1024
"""A group also needs the documents of so many windows or the tokens of so many packs, whichever comes first. Then
packs that aren't full are a small share, and training needn't wait for more data to begin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupMinimum:
    """The minimum size of a group; the last group of an epoch may be smaller."""

    parts: int = PARTS_A_GROUP
    documents: int = 1
    """Minimum number of documents or, whichever is reached first, of `tokens`; in addition to `parts`."""
    tokens: int = 1
    longest: int | None = None
    """Tokens of a document that count at most; None: all of its tokens."""


def minimum_for(window: int, capacity: int, overlong: Overlong, parts: int = PARTS_A_GROUP) -> GroupMinimum:
    """Return the minimum size of a group at which nearly all of its packs are full."""
    return GroupMinimum(
        parts=parts,
        documents=WINDOWS_A_GROUP * window,
        tokens=PACKS_A_GROUP * capacity,
        longest=capacity if POLICIES[overlong].loses else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sums:
    """Sums over the shards that exist so far."""

    sources: tuple[IntArray, IntArray, IntArray]
    """The store's arrays from which the sums were computed."""
    parts: IntArray
    documents: IntArray
    tokens: IntArray
    """int64 `[shards + 1]`: documents and tokens before each shard."""


class Groups:
    """The bounds of the groups of a store's shards."""

    def __init__(self, store: TokenDocuments, minimum: GroupMinimum | None = None) -> None:
        """Take the store and the minimum size of a group; None: `PARTS_A_GROUP` parts."""
        self._store, self._minimum = store, minimum or GroupMinimum()
        self._ends = [0]
        """The first part of each group whose beginning no later part can change."""
        self._finding = threading.Lock()
        self._there = 0
        self._sums: _Sums | None = None

    @property
    def parts_a_group(self) -> int:
        """Minimum number of the store's parts whose documents are shuffled together."""
        return self._minimum.parts

    def num_groups(self, num_parts: int) -> int:
        """Return the number of groups of the first `num_parts` parts that hold documents; waits for these parts."""
        group = 0
        while True:
            first, stop = self.shards(group, num_parts)
            if not self._store.documents[first:stop].any():
                return group
            group += 1

    def is_known(self, group: int, num_parts: int) -> bool:
        """Return whether it is known, without waiting, that a group is sealed or doesn't exist."""
        return self._parts(group, num_parts, is_waiting=False) is not None

    def shards(self, group: int, num_parts: int) -> tuple[int, int]:
        """Return the first shard of a group, and the one after its last; waits until the group is sealed.

        A range without documents means that there are no further groups.
        """
        parts = self._parts(group, num_parts, is_waiting=True)
        start, end = np.searchsorted(self._store.parts, parts or (0, 0))
        return int(start), int(end)

    def _parts(self, group: int, num_parts: int, *, is_waiting: bool) -> tuple[int, int] | None:
        """Return the first part of a group, and the one after its last; None if that isn't known yet."""
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
            if end > num_parts:  # the rest is this epoch's last group, which may be larger in a longer epoch
                return (begins, num_parts) if group + 1 == known else (num_parts, num_parts)
            with self._finding:
                if len(self._ends) == known:
                    self._ends.append(end)

    def _end(self, begins: int, num_parts: int, *, is_waiting: bool) -> int | None:
        """Return the end of the group that begins at a part; more than `num_parts` if the group isn't complete."""
        wanted = min(begins + self._minimum.parts, num_parts)
        while True:
            if is_waiting and wanted > self._there:
                self._store.wait_for(wanted)
                self._there = max(self._there, wanted)
            there = self._there  # read before the sums, which may include more
            sums = self._summed()
            there = min(max(there, int(sums.parts[-1]) + 1 if len(sums.parts) else 0), num_parts)
            first = int(np.searchsorted(sums.parts, begins))
            shard = min(
                int(np.searchsorted(before, before[first] + least)) - 1
                for before, least in (
                    (sums.documents, self._minimum.documents),
                    (sums.tokens, self._minimum.tokens),
                )
            )
            if shard < len(sums.parts):
                end = max(begins + self._minimum.parts, int(sums.parts[shard]) + 1)
                if end <= there:
                    return end
            if there >= num_parts:
                return num_parts + 1
            if not is_waiting:
                return None
            wanted = there + 1

    def _summed(self) -> _Sums:
        """Return sums over the store's current shards."""
        sums = self._sums
        sources = (self._store.documents, self._store.tokens, self._store.parts)
        if sums is None or any(now is not then for now, then in zip(sources, sums.sources)):
            count = min(map(len, sources))  # the store may have grown between reading one array and the next
            documents, tokens, parts = (array[:count] for array in sources)
            if self._minimum.longest is not None:
                tokens = np.minimum(tokens, self._minimum.longest * documents)
            sums = _Sums(
                sources=sources,
                parts=parts,
                documents=np.concatenate([[0], np.cumsum(documents)]),
                tokens=np.concatenate([[0], np.cumsum(tokens)]),
            )
            self._sums = sums
        return sums
