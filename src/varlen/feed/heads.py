"""What comes next in one source of a mixture: so many windows ahead as the mixture may want at once.

::

    columns   d3 d4 | d0 d1 d2 | d2 d0 ...    documents that are left of a window, then those of the windows behind it
    place     of the last column that was taken; a bar is a column too: it is taken where the next window begins

A source of few documents comes thousands of times in one window of a mixture, so its epochs are made many at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from varlen.documents.order import hashed
from varlen.feed.stream import PackStream, Position, refuse
from varlen.types import IntArray

_LEAST = 1 << 10
"""Documents fetched at least, unless fewer are wanted; then as many as were taken, so that few fetches do."""
_KEPT = 2
"""Windows of a source: the one that it is in, and the next."""
_SHARD, _DOCUMENT, _LENGTH, _EPOCH, _GROUP, _WINDOW, _TAKEN = range(7)
"""Of a column. A window begins where the length is -1."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class SourcePlace:
    """Where a source stands."""

    position: Position
    """Of a window of its documents."""
    document: int = 0
    """Documents of that window that were taken."""
    taken: int = 0
    """Of this source since training began, in the unit of the shares."""


class Columns:
    """The windows of one source; the last ones are kept, as windows of a mixture end in the midst of them."""

    def __init__(self, stream: PackStream) -> None:
        """Take the source."""
        self.stream = stream
        self._rows = lru_cache(_KEPT)(self._make)

    def of(self, position: Position) -> IntArray:
        """Return int64 `[7, 1 + documents]`: the column where a window begins, and those of its documents.

        Args:
            position: in the window; there is one.

        Raises:
            SourceError: the store is damaged.
        """
        rows = self._rows(position)
        columns = np.empty((7, rows.shape[1] + 1), dtype=np.int64)
        columns[:_EPOCH, 0] = -1
        columns[:_EPOCH, 1:] = rows
        columns[_EPOCH:_TAKEN] = [[position.epoch], [position.group], [position.window]]
        columns[_TAKEN] = np.arange(columns.shape[1])
        return columns

    def _make(self, position: Position) -> IntArray:
        windows = self.stream.windows
        shards, documents = windows.documents(
            position.epoch, position.group, position.window, position.num_parts
        )
        return np.stack([shards, documents, windows.store.lengths(shards, documents)])


class Head:
    """What comes next in one source."""

    def __init__(
        self, windows: Columns, first_shard: int, place: SourcePlace, last_epoch: int | None
    ) -> None:
        """Go to a place.

        Args:
            windows: of the source.
            first_shard: of it among those of all sources.
            place: where it stands.
            last_epoch: epochs after which it is over though it goes on, which is to be seen as it happens; None: it
                is never over, or has no more.

        Raises:
            StateError: there is no such place.
            SourceError: the store is damaged.
        """
        self._windows, self._stream, self._first_shard = windows, windows.stream, first_shard
        self._last_epoch = last_epoch
        self.place = place
        self._taken = 0
        self._columns: IntArray = np.zeros((7, 0), dtype=np.int64)
        found = self._stream.at_window(place.position)
        if found is not None:
            table = windows.of(found)
            document = place.document if found == place.position else 0
            refuse("document", document, table.shape[1] - 1)
            self._columns = table[:, 1 + document :]
            self.place = replace(place, position=found, document=document)
        self._behind = self.place.position

    @property
    def lengths(self) -> IntArray:
        """int64: of the documents that come next; -1 where a window begins."""
        lengths: IntArray = self._columns[_LENGTH]
        return lengths

    @property
    def is_over(self) -> bool:
        """Whether the source has been read as often as it is to be."""
        return self._last_epoch is not None and self.place.position.epoch >= self._last_epoch

    def take(self, count: int) -> IntArray:
        """Return int64 `[4, documents]`: shards, numbers, lengths and epochs of the documents that were taken.

        Args:
            count: of columns, those where a window begins among them.
        """
        taken, self._columns = self._columns[:, :count], self._columns[:, count:]
        if count:
            self._stand_at(taken[:, -1])
        documents: IntArray = taken[:_GROUP, taken[_LENGTH] >= 0]
        documents[_SHARD] += self._first_shard
        self._taken += documents.shape[1]
        return documents

    def refill(self, wanted: int) -> bool:
        """Go on with the next window, once all before it are taken; returns whether there is one.

        Args:
            wanted: documents that are of use at most; windows behind the next one are fetched as long as they are.
        """
        wanted = min(wanted, max(self._taken, _LEAST))
        was_over, count = self.is_over, 0
        parts: list[IntArray] = []
        while count < wanted:
            found = self._stream.at_window(replace(self._behind, window=self._behind.window + 1))
            if found is None:
                break
            if parts and not was_over and self._last_epoch is not None and found.epoch >= self._last_epoch:
                break  # who mixes looks whether all are over by then
            parts.append(self._fetch(found, wanted - count))
            count += parts[-1].shape[1]
        if not parts:
            return False
        columns = np.concatenate(parts, axis=1)
        self._stand_at(columns[:, 0])
        self._columns = columns[:, 1:]
        return True

    def _stand_at(self, column: IntArray) -> None:
        """Take a column for the last one that was taken."""
        epoch, group, window, document = column[_EPOCH:].tolist()
        position = replace(self.place.position, epoch=epoch, group=group, window=window)
        self.place = replace(self.place, position=position, document=document)

    def _fetch(self, first: Position, wanted: int) -> IntArray:
        """Return the columns of a window, and of more epochs where one has no other window."""
        after = self._stream.at_window(replace(first, window=first.window + 1))
        if after != replace(first, epoch=first.epoch + 1):
            self._behind = first
            return self._windows.of(first)
        table = self._windows.of(first)
        epochs = -(-wanted // (table.shape[1] - 1))
        ends = [self._stream.epochs, None if self.is_over else self._last_epoch]
        epochs = max(min([epochs, *(end - first.epoch for end in ends if end is not None)]), 1)
        self._behind = replace(first, epoch=first.epoch + epochs - 1)
        if epochs == 1:
            return table
        rows = table[:, 1:]
        rows = rows[:, np.lexsort((rows[_DOCUMENT], rows[_SHARD]))]
        orders = epoch_orders(self._stream.windows.settings.seed, first, epochs, rows.shape[1])
        columns = np.repeat(table[:, None, :1], epochs, axis=1)
        columns = np.concatenate([columns, rows[:, orders]], axis=2)
        columns[_EPOCH] = first.epoch + np.arange(epochs)[:, None]
        columns[_TAKEN] = np.arange(columns.shape[2])
        return columns.reshape(7, -1)


def epoch_orders(seed: int | None, first: Position, epochs: int, documents: int) -> IntArray:
    """Return int64 `[epochs, documents]`: in which order each epoch has the documents of a group of one window.

    Args:
        seed: of the shuffle, as `Windows` has it; None for the order of the store.
        first: of the group, in the first of the epochs.
        epochs: how many.
        documents: of the group.
    """
    if seed is None:
        return np.tile(np.arange(documents), (epochs, 1))
    seeds = hashed(first.epoch + np.arange(epochs), seed)
    seeds = hashed(np.full(epochs, first.group), seeds) + np.uint64(1)
    order: IntArray = np.argsort(hashed(np.arange(documents)[None], seeds[:, None]), axis=1)
    return order
