"""The packs of a token store, window by window; each window is a function of the store, the settings and its number.

::

    shards   0  1  2 | 3  4  5 | 6          groups of shards: what may be shuffled together
    order    a permutation of each group's documents
    windows  0   1   2 | 3   4  | 5         so many documents of the order; none crosses groups
    packs    of one window each, carried over nowhere

So any window can be made at any time from the lengths of its documents alone, on every rank alike, and resuming is
making one window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from varlen.feed.packs import StorePacks
from varlen.pack.window import WindowPacker
from varlen.source.order import DocumentOrder, hashed
from varlen.source.store import TokenStore
from varlen.types import IntArray, Ledger, Method, Overlong, Packing

_KEPT = 4
"""Windows, and orders of groups, kept for who asks again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSettings:
    """What the packs depend on, beside the store."""

    capacity: int
    window: int = 1 << 16
    """Documents packed at a time."""
    method: Method = "best_fit"
    overlong: Overlong = "error"
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
    """All windows of a store in one epoch after the other."""

    def __init__(self, store: TokenStore, groups: Sequence[int], settings: WindowSettings) -> None:
        """Take the store, and the shard at which each group ends, ascending, the last at the end of the store."""
        self._store, self._settings = store, settings
        self._bounds = np.concatenate([[0], np.asarray(groups, dtype=np.int64)])
        counts = [int(store.documents[a:b].sum()) for a, b in zip(self._bounds, self._bounds[1:])]
        self._first = np.cumsum([0] + [-(-count // settings.window) for count in counts])
        # Of this object alone: several loaders don't push out each other's windows.
        self._order = lru_cache(_KEPT)(self._make_order)
        self.window = lru_cache(_KEPT)(self._make_window)

    @property
    def num_windows(self) -> int:
        """Windows of one epoch."""
        return int(self._first[-1])

    def _make_order(self, epoch: int, group: int) -> DocumentOrder:
        seed = self._settings.seed
        if seed is not None:
            for number in (epoch, group):
                seed = int(hashed(np.array([number]), seed)[0])
        shards = slice(self._bounds[group], self._bounds[group + 1])
        return DocumentOrder(self._store.documents[shards], seed, stretch=self._settings.window)

    def _make_window(self, epoch: int, number: int) -> Window:
        """Pack a window.

        Args:
            epoch: from 0.
            number: of the window within its epoch, from 0.

        Raises:
            OverlongDocumentError: a document is longer than a pack, and `overlong` is "error".

        Cost: reading the window's lengths, sorting hashes of its documents and packing them.
        """
        group = int(np.searchsorted(self._first, number, side="right")) - 1
        shards, documents = self._order(epoch, group).stretch(number - int(self._first[group]))
        shards = shards + self._bounds[group]
        packing = self._packed(self._store.lengths(shards, documents))
        packs = StorePacks(
            shards=shards[packing.document_ids],
            documents=documents[packing.document_ids],
            starts=packing.starts.astype(np.int64),
            stops=packing.stops.astype(np.int64),
            offsets=packing.offsets,
        )
        return Window(packs=packs, ledger=packing.ledger)

    def _packed(self, lengths: IntArray) -> Packing:
        """Pack a window, and nothing but it: what doesn't fill a pack goes into packs of its own."""
        settings = self._settings
        packer = WindowPacker(
            capacity=settings.capacity,
            window=settings.window,
            method=settings.method,
            overlong=settings.overlong,
            max_documents=settings.max_documents,
            document_multiple_of=settings.document_multiple_of,
        )
        packed, rest = packer.add(lengths), packer.flush()
        return _in_order(packed, rest, packer.ledger)


def _in_order(packed: Packing, rest: Packing, ledger: Ledger) -> Packing:
    """Join two packings of one window, packs in the order of their first document."""
    ids = np.concatenate([packed.document_ids, rest.document_ids])
    starts, stops = (
        np.concatenate([getattr(packed, name), getattr(rest, name)]) for name in ("starts", "stops")
    )
    offsets = np.concatenate([packed.offsets, rest.offsets[1:] + packed.num_pieces])
    sizes = np.diff(offsets)
    # A document that was cut comes first in several packs: in the order of its pieces then.
    order = np.lexsort((starts[offsets[:-1]], ids[offsets[:-1]]))
    moved = np.concatenate([[0], np.cumsum(sizes[order])])
    pieces = np.repeat(offsets[order] - moved[:-1], sizes[order]) + np.arange(len(ids))
    return Packing(
        document_ids=ids[pieces],
        starts=starts[pieces],
        stops=stops[pieces],
        offsets=moved,
        capacity=packed.capacity,
        ledger=ledger.check(),
        method=packed.method,
        overlong=packed.overlong,
        document_multiple_of=packed.document_multiple_of,
    )
