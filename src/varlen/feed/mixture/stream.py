"""The packs of a mixture: documents of several sources, interleaved by their shares, and packed window by window.

::

    web    w0 w1 w2 w3 w4 w5 ...     each source in its own order, with epochs of its own
    code   c0 c1 c2 ...
    mixed  w0 w1 c0 w2 w3 w4 c1 ...  the next document comes from a source that isn't ahead of its share
    packs  each of one window of these documents

A position records where each source is when the window begins, so resuming takes the time of one window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from varlen.arguments import as_count
from varlen.documents.order import hashed
from varlen.documents.source import Unit, Until
from varlen.errors import SettingError, StateError, reading_state
from varlen.feed import kernels
from varlen.feed.batches import StorePacks, concatenated
from varlen.feed.indexed.stream import Grown, PackStream, Position, refuse
from varlen.feed.indexed.windows import Window, WindowSettings, packed_window
from varlen.feed.state import MOST
from varlen.store.open import JoinedTokens
from varlen.types import FloatArray, IntArray, Ledger

_CACHED = 4
_MOST_BARREN = 10_000
"""Consecutive windows without a pack after which the search for a pack fails."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class MixedPosition:
    """The position of a pack of a mixture."""

    sources: tuple[SourcePosition, ...]
    """Where each source is at the beginning of the window."""
    window: int = 0
    pack: int = 0
    """Index of the pack in its window."""

    @property
    def grown(self) -> tuple[Grown, ...]:
        """Parts of each source; they don't change after training began."""
        return tuple(source.position.grown for source in self.sources)

    @property
    def num_parts(self) -> tuple[int, ...]:
        """Number of parts of each source."""
        return tuple(source.position.num_parts for source in self.sources)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Mixed:
    """One window of a mixture."""

    window: Window
    after: tuple[SourcePosition, ...]
    is_last: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class MixSettings:
    """How sources are mixed."""

    shares: tuple[float, ...]
    unit: Unit
    until: Until
    epochs: int
    """Passes over the source that ends first, or over every source, by `until`."""


class MixedStream:
    """The packs of a mixture."""

    def __init__(
        self, tokens: JoinedTokens, sources: Sequence[PackStream], settings: WindowSettings, mix: MixSettings
    ) -> None:
        self.sources, self.settings, self.mix = tuple(sources), settings, mix
        self.epochs = None if mix.until == "endless" else mix.epochs
        self._columns = [Columns(stream) for stream in self.sources]
        self._window = lru_cache(_CACHED)(self._make)
        self._joined = lru_cache(_CACHED)(tokens.with_parts)

    def begin(self, grown: Sequence[Grown]) -> MixedPosition:
        """Return the position of the first pack."""
        return MixedPosition(sources=tuple(SourcePosition(position=Position(grown=one)) for one in grown))

    def epochs_done(self, position: MixedPosition) -> int:
        """Return the number of epochs that every source has completed."""
        return min(source.position.epoch for source in position.sources)

    def tokens(self, position: MixedPosition) -> JoinedTokens:
        """Return the documents of all sources; numbers depend on the sources' sizes when training began."""
        return self._joined(position.num_parts)

    def take(self, position: MixedPosition, count: int) -> tuple[StorePacks, MixedPosition, Ledger]:
        """Return the next packs, the position after them, and a ledger of the windows begun."""
        parts: list[StorePacks] = []
        ledger = Ledger(tokens_in=0, packed=0)
        taken, barren = 0, 0
        while taken < count:
            mixed = self._window(position.sources)
            packs = mixed.window.packs
            refuse("pack", position.pack, packs.num_packs)
            barren = 0 if packs.num_packs else barren + 1
            refuse_barren(barren)
            if position.pack == 0:
                ledger = ledger.and_then(mixed.window.ledger)
            stop = min(position.pack + count - taken, packs.num_packs)
            parts.append(packs.slice(position.pack, stop))
            taken += stop - position.pack
            if stop < packs.num_packs or mixed.is_last:
                position = replace(position, pack=stop)
                break
            position = MixedPosition(sources=mixed.after, window=position.window + 1)
        return concatenated(parts), position, ledger

    def look(self, position: MixedPosition) -> tuple[IntArray, MixedPosition | None]:
        """Return the lengths of a window's documents, and the position of the next window; None after the last."""
        _, _, lengths, after, _, is_last = self._mixed(position.sources)
        return lengths, None if is_last else MixedPosition(sources=after, window=position.window + 1)

    def is_pack(self, position: MixedPosition) -> bool:
        """Return whether there is a pack at a position; False after the last pack."""
        return position.pack < self._window(position.sources).window.packs.num_packs

    def check(self, position: MixedPosition) -> None:
        """Refuse an invalid position.

        Cost: that of its window.
        """
        for stream, source in zip(self.sources, position.sources):
            stream.check(source.position)
        refuse("pack", position.pack, self._window(position.sources).window.packs.num_packs)

    def at(self, position: MixedPosition) -> dict[str, Any]:
        """Return a position as JSON values, with the stores' fingerprints."""
        sources = [
            {**stream.at(source.position), "document": source.document, "taken": source.taken}
            for stream, source in zip(self.sources, position.sources)
        ]
        # Only the mixture's last window has fewer documents, and its number depends on `epochs`; so it is recorded.
        count = self._window(position.sources).window.ledger.documents_in if position.pack else None
        documents = {} if count is None else {"documents": count}
        return {"window": position.window, "pack": position.pack, **documents, "sources": sources}

    def position(self, at: Mapping[str, Any]) -> MixedPosition:
        """Return the position from the values that `at` returned; from an empty mapping, the beginning."""
        if not at:
            return self.begin([stream.with_parts(Position()).grown for stream in self.sources])
        with reading_state("a loader"):
            window, pack = (as_count(at[name], name, 0, MOST) for name in ("window", "pack"))
            sources = tuple(
                SourcePosition(
                    position=stream.position(
                        {name: one[name] for name in one if name not in ("document", "taken")}
                    ),
                    document=as_count(one["document"], "document", 0, MOST),
                    taken=as_count(one["taken"], "taken", 0, MOST),
                )
                for stream, one in zip(self.sources, at["sources"], strict=True)
            )
        if any(len(source.position.grown) > 1 for source in sources):
            raise StateError("this is no state of a loader: a source of the mixture has grown, and none can")
        return MixedPosition(sources=sources, window=window, pack=pack)

    def _make(self, sources: tuple[SourcePosition, ...]) -> _Mixed:
        """Mix and pack the documents of a window."""
        shards, documents, lengths, after, repeated, is_last = self._mixed(sources)
        window = packed_window(shards, documents, lengths, self.settings)
        window = replace(window, ledger=replace(window.ledger, repeated=repeated))
        return _Mixed(window=window, after=after, is_last=is_last)

    def _mixed(
        self, sources: tuple[SourcePosition, ...]
    ) -> tuple[IntArray, IntArray, IntArray, tuple[SourcePosition, ...], int, bool]:
        """Return a window's shards, numbers and lengths, each source's end, repeated tokens, whether it is last."""
        counts = np.array([source.taken for source in sources], dtype=np.int64)
        shares: FloatArray = np.array(self.mix.shares)
        joined = self._joined(tuple(source.position.num_parts for source in sources))
        last_epoch = self.mix.epochs if self.mix.until == "all" else None
        cursors = [
            SourceCursor(windows, joined.first_shard(number), source, last_epoch)
            for number, (windows, source) in enumerate(zip(self._columns, sources))
        ]
        parts: list[IntArray] = [np.zeros((4, 0), dtype=np.int64)]
        wanted, is_last = self.settings.window, False
        while wanted and not is_last:
            ahead = np.concatenate([cursor.lengths for cursor in cursors])
            if self.mix.unit == "documents":
                ahead = np.where(ahead < 0, ahead, 1)
            bounds = np.cumsum([0, *(len(cursor.lengths) for cursor in cursors)])
            ends, choices = bounds[:-1].copy(), np.empty(wanted, dtype=np.int64)
            num_chosen = kernels.interleave(ahead, ends, bounds[1:], shares, counts, wanted, choices)
            chosen, part = choices[:num_chosen], np.empty((4, num_chosen), dtype=np.int64)
            for number, (cursor, count) in enumerate(zip(cursors, ends - bounds[:-1])):
                part[:, chosen == number] = cursor.take(int(count))
            parts.append(part)
            wanted -= num_chosen
            if wanted:
                is_last = not cursors[int(choices[num_chosen])].refill(wanted)
                is_last = is_last or (self.mix.until == "all" and all(cursor.is_over for cursor in cursors))
        table = np.concatenate(parts, axis=1)
        after = tuple(replace(cursor.at, taken=int(count)) for cursor, count in zip(cursors, counts))
        return table[0], table[1], table[2], after, int(table[2][table[3] > 0].sum()), is_last


def refuse_barren(windows: int) -> None:
    """Refuse a mixture with too many consecutive windows without a pack."""
    if windows > _MOST_BARREN:
        raise SettingError(
            f"{windows:,} windows of the mixture gave no pack: every document is empty or dropped as "
            'too long; raise the capacity, or pass overlong="split" or "truncate"'
        )


# The next documents of one source of a mixture, for as many windows ahead as one window of the mixture may need.
#
# ::
#
#     columns   d3 d4 | d0 d1 d2 | d2 d0 ...    the rest of a window's documents, then those of the next windows
#     at        position of the last column taken; a bar is a column too, and is taken when the next window begins
#
# A small source can be repeated thousands of times in one window of a mixture, so many epochs are built at a time.

_LEAST = 1 << 10
"""Minimum number of documents per fetch; later fetches are as large as all before, so there are few of them."""
_CACHED_WINDOWS = 2
"""Windows of a source in the cache: the current one, and the next."""
_SHARD, _DOCUMENT, _LENGTH, _EPOCH, _GROUP, _WINDOW, _TAKEN = range(7)
"""Rows of a table of columns. A length of -1 marks the beginning of a window."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class SourcePosition:
    """How far a source has been read."""

    position: Position
    """The window of the source's documents."""
    document: int = 0
    """Number of documents taken of this window."""
    taken: int = 0
    """Documents or tokens (the unit of the shares) taken of this source since training began."""


class Columns:
    """The windows of one source; the last ones are cached, as a window of the mixture may end within them."""

    def __init__(self, stream: PackStream) -> None:
        self.stream = stream
        self._rows = lru_cache(_CACHED_WINDOWS)(self._make)

    def of(self, position: Position) -> IntArray:
        """Return int64 `[7, 1 + documents]`: the column of the window's beginning, and those of its documents."""
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


class SourceCursor:
    """Reads the documents of one source in order."""

    def __init__(
        self, windows: Columns, first_shard: int, at: SourcePosition, last_epoch: int | None
    ) -> None:
        self._windows, self._stream, self._first_shard = windows, windows.stream, first_shard
        self._last_epoch = last_epoch
        self.at = at
        self._taken = 0
        self._columns: IntArray = np.zeros((7, 0), dtype=np.int64)
        position = self._stream.at_window(at.position)
        if position is not None:
            table = windows.of(position)
            document = at.document if position == at.position else 0
            refuse("document", document, table.shape[1] - 1)
            self._columns = table[:, 1 + document :]
            self.at = replace(at, position=position, document=document)
        self._last_fetched = self.at.position

    @property
    def lengths(self) -> IntArray:
        """int64: lengths of the next documents; -1 marks the beginning of a window."""
        lengths: IntArray = self._columns[_LENGTH]
        return lengths

    @property
    def is_over(self) -> bool:
        """Whether the source has completed its epochs."""
        return self._last_epoch is not None and self.at.position.epoch >= self._last_epoch

    def take(self, count: int) -> IntArray:
        """Take `count` columns; returns int64 `[4, documents]`: shards, numbers, lengths and epochs of documents."""
        taken, self._columns = self._columns[:, :count], self._columns[:, count:]
        if count:
            self._move_to(taken[:, -1])
        documents: IntArray = taken[:_GROUP, taken[_LENGTH] >= 0]
        documents[_SHARD] += self._first_shard
        self._taken += documents.shape[1]
        return documents

    def refill(self, wanted: int) -> bool:
        """Fetch the next windows after all columns are taken; returns whether there are any."""
        wanted = min(wanted, max(self._taken, _LEAST))
        was_over, count = self.is_over, 0
        parts: list[IntArray] = []
        while count < wanted:
            last = self._last_fetched
            position = self._stream.at_window(replace(last, window=last.window + 1))
            if position is None:
                break
            if parts and not was_over and self._last_epoch is not None and position.epoch >= self._last_epoch:
                break  # the mixture may end here, if all other sources are over
            parts.append(self._fetch(position, wanted - count))
            count += parts[-1].shape[1]
        if not parts:
            return False
        columns = np.concatenate(parts, axis=1)
        self._move_to(columns[:, 0])
        self._columns = columns[:, 1:]
        return True

    def _move_to(self, column: IntArray) -> None:
        """Set the position to that of the last column taken."""
        epoch, group, window, document = column[_EPOCH:].tolist()
        position = replace(self.at.position, epoch=epoch, group=group, window=window)
        self.at = replace(self.at, position=position, document=document)

    def _fetch(self, first: Position, wanted: int) -> IntArray:
        """Return the columns of a window; of several epochs at once if an epoch has only this window."""
        after = self._stream.at_window(replace(first, window=first.window + 1))
        if after != replace(first, epoch=first.epoch + 1):
            self._last_fetched = first
            return self._windows.of(first)
        table = self._windows.of(first)
        epochs = -(-wanted // (table.shape[1] - 1))
        ends = [self._stream.epochs, None if self.is_over else self._last_epoch]
        epochs = max(min([epochs, *(end - first.epoch for end in ends if end is not None)]), 1)
        self._last_fetched = replace(first, epoch=first.epoch + epochs - 1)
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
    """Return int64 `[epochs, documents]`: each epoch's order of the documents of a group that is one window."""
    if seed is None:
        return np.tile(np.arange(documents), (epochs, 1))
    seeds = hashed(first.epoch + np.arange(epochs), seed)
    seeds = hashed(np.full(epochs, first.group), seeds) + np.uint64(1)
    order: IntArray = np.argsort(hashed(np.arange(documents)[None], seeds[:, None]), axis=1)
    return order
