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

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from varlen.documents.order import DocumentOrder, hashed
from varlen.feed.groups import Groups
from varlen.feed.packs import StorePacks
from varlen.pack.lengths import LARGEST
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
        """Take the documents, and what is shuffled together of them."""
        self._store, self._groups, self._settings = store, groups, settings
        # Of this object alone: several loaders don't push out each other's windows.
        self._order = lru_cache(_KEPT)(self._make_order)
        self.window = lru_cache(_KEPT)(self._make_window)

    @property
    def store(self) -> TokenDocuments:
        """The documents."""
        return self._store

    @property
    def settings(self) -> WindowSettings:
        """What the packs depend on, beside them."""
        return self._settings

    @property
    def parts_a_group(self) -> int:
        """Parts of the store whose documents are shuffled together."""
        return self._groups.parts_a_group

    def num_groups(self, num_parts: int) -> int:
        """Return the groups of an epoch of so many parts; some may have no windows."""
        return self._groups.num_groups(num_parts)

    def is_there(self, group: int, num_parts: int) -> bool:
        """Return whether a group of an epoch of so many parts is known to be sealed, without waiting for it."""
        return self._groups.is_there(group, num_parts)

    def num_windows(self, group: int, num_parts: int) -> int:
        """Return the windows of a group, in an epoch of so many parts; waits until the group is sealed.

        Raises:
            SourceError: the group isn't there, and isn't being written.
        """
        start, stop = self._groups.shards(group, num_parts)
        return -(-int(self._store.documents[start:stop].sum()) // self._settings.window)

    def _make_order(self, epoch: int, group: int, num_parts: int) -> DocumentOrder:
        start, stop = self._groups.shards(group, num_parts)
        seed = self._settings.seed
        if seed is not None:
            for number in (epoch, group):
                seed = int(hashed(np.array([number]), seed)[0])
        return DocumentOrder(self._store.documents[start:stop], seed, stretch=self._settings.window)

    def documents(self, epoch: int, group: int, number: int, num_parts: int) -> tuple[IntArray, IntArray]:
        """Return the shards, and the numbers within them, of a window's documents; arguments as `window` has them.

        Raises:
            SourceError: the group isn't there, and isn't being written.
        """
        shards, documents = self._order(epoch, group, num_parts).stretch(number)
        return shards + self._groups.shards(group, num_parts)[0], documents

    def _make_window(self, epoch: int, group: int, number: int, num_parts: int) -> Window:
        """Pack a window.

        Args:
            epoch: from 0.
            group: of the window, from 0.
            number: of the window within its group, from 0.
            num_parts: parts of the store that the epoch holds.

        Raises:
            OverlongDocumentError: a document is longer than a pack, and `overlong` is "error".
            SourceError: the group isn't there, and isn't being written.

        Cost: reading the window's lengths, sorting hashes of its documents and packing them.
        """
        shards, documents = self.documents(epoch, group, number, num_parts)
        return packs_of(shards, documents, self._store.lengths(shards, documents), self._settings)


def packs_of(shards: IntArray, documents: IntArray, lengths: IntArray, settings: WindowSettings) -> Window:
    """Pack documents, and nothing but them: what doesn't fill a pack goes into packs of its own.

    Args:
        shards: int64 `[documents]`.
        documents: int64 `[documents]`: numbers within the shards.
        lengths: int64 `[documents]`.
        settings: how.

    Raises:
        OverlongDocumentError: a document is longer than a pack, and `overlong` is "error".
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
