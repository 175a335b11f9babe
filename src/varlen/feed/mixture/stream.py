"""The packs of a mixture: documents of several sources, in the order that their shares give, window by window.

::

    web    w0 w1 w2 w3 w4 w5 ...     each source in its own order, with epochs of its own
    code   c0 c1 c2 ...
    mixed  w0 w1 c0 w2 w3 w4 c1 ...  the next document: of a source that isn't ahead of its share
    packs  of so many of these at a time

Where each source stands when a window begins is in the position, so that going on is making one window.
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
from varlen.feed.indexed.stream import Grown, PackStream, Position, refuse
from varlen.feed.indexed.windows import StorePacks, Window, WindowSettings, end_to_end, packs_of
from varlen.feed.state import MOST
from varlen.store.open import JoinedTokens
from varlen.types import FloatArray, IntArray, Ledger

_KEPT = 4
_MOST_BARREN = 10_000
"""Windows without a pack one after the other, after which no more is expected."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class MixedPosition:
    """Where a pack of a mixture stands."""

    sources: tuple[SourcePlace, ...]
    """When the window begins."""
    window: int = 0
    pack: int = 0
    """Packs of the window that stand before it."""

    @property
    def grown(self) -> tuple[Grown, ...]:
        """Parts of each source, which holds what it held when training began."""
        return tuple(place.position.grown for place in self.sources)

    @property
    def num_parts(self) -> tuple[int, ...]:
        """Parts of each source."""
        return tuple(place.position.num_parts for place in self.sources)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Mixed:
    """One window of a mixture."""

    window: Window
    after: tuple[SourcePlace, ...]
    is_last: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class MixSettings:
    """How sources are mixed."""

    shares: tuple[float, ...]
    unit: Unit
    until: Until
    epochs: int
    """Passes over the first source that is over, or over all of them."""


class MixedStream:
    """The packs of a mixture."""

    def __init__(
        self,
        tokens: JoinedTokens,
        sources: Sequence[PackStream],
        settings: WindowSettings,
        mix: MixSettings,
    ) -> None:
        self.sources, self.settings, self.mix = tuple(sources), settings, mix
        self.epochs = None if mix.until == "endless" else mix.epochs
        self._columns = [Columns(stream) for stream in self.sources]
        self._made = lru_cache(_KEPT)(self._make)
        self._held = lru_cache(_KEPT)(tokens.with_parts)

    def begin(self, grown: Sequence[Grown]) -> MixedPosition:
        """Return where training began."""
        return MixedPosition(sources=tuple(SourcePlace(position=Position(grown=one)) for one in grown))

    def passes(self, position: MixedPosition) -> int:
        """Return the epochs of each source that are over."""
        return min(place.position.epoch for place in position.sources)

    def tokens(self, position: MixedPosition) -> JoinedTokens:
        """Return the documents of all sources, numbered by what each held when training began."""
        return self._held(position.num_parts)

    def take(self, position: MixedPosition, count: int) -> tuple[StorePacks, MixedPosition, Ledger]:
        """Return the next packs, where those after begin, and what became of the tokens of the windows begun."""
        parts: list[StorePacks] = []
        ledger = Ledger(tokens_in=0, packed=0)
        taken, barren = 0, 0
        while taken < count:
            mixed = self._made(position.sources)
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
        return end_to_end(parts), position, ledger

    def look(self, position: MixedPosition) -> tuple[IntArray, MixedPosition | None]:
        """Return the lengths of a window's documents, and where the next window begins; None behind the last."""
        _, _, lengths, after, _, is_last = self._mixed(position.sources)
        return lengths, None if is_last else MixedPosition(sources=after, window=position.window + 1)

    def is_pack(self, position: MixedPosition) -> bool:
        """Return whether a pack stands at a position: not behind the last one."""
        return position.pack < self._made(position.sources).window.packs.num_packs

    def check(self, position: MixedPosition) -> None:
        """Refuse a position that can't be.

        Cost: that of its window.
        """
        for stream, place in zip(self.sources, position.sources):
            stream.check(place.position)
        refuse("pack", position.pack, self._made(position.sources).window.packs.num_packs)

    def at(self, position: MixedPosition) -> dict[str, Any]:
        """Return a position as numbers, and the stores by their fingerprints."""
        places = [
            {**stream.at(place.position), "document": place.document, "taken": place.taken}
            for stream, place in zip(self.sources, position.sources)
        ]
        # A window has as many documents as any other but where the mixture ends, and so by how many epochs it has.
        begun = self._made(position.sources).window.ledger.documents_in if position.pack else None
        documents = {} if begun is None else {"documents": begun}
        return {"window": position.window, "pack": position.pack, **documents, "sources": places}

    def position(self, at: Mapping[str, Any]) -> MixedPosition:
        """Return the position that `at` gave; without one, where training begins."""
        if not at:
            return self.begin([stream.begun(Position()).grown for stream in self.sources])
        with reading_state("a loader"):
            window, pack = (as_count(at[name], name, 0, MOST) for name in ("window", "pack"))
            places = tuple(
                SourcePlace(
                    position=stream.position(
                        {name: one[name] for name in one if name not in ("document", "taken")}
                    ),
                    document=as_count(one["document"], "document", 0, MOST),
                    taken=as_count(one["taken"], "taken", 0, MOST),
                )
                for stream, one in zip(self.sources, at["sources"], strict=True)
            )
        if any(len(place.position.grown) > 1 for place in places):
            raise StateError(
                "this is no state of a loader: sources of a mixture hold what they held at first"
            )
        return MixedPosition(sources=places, window=window, pack=pack)

    def _make(self, places: tuple[SourcePlace, ...]) -> _Mixed:
        """Mix and pack the documents of a window."""
        shards, documents, lengths, after, repeated, is_last = self._mixed(places)
        window = packs_of(shards, documents, lengths, self.settings)
        window = replace(window, ledger=replace(window.ledger, repeated=repeated))
        return _Mixed(window=window, after=after, is_last=is_last)

    def _mixed(
        self, places: tuple[SourcePlace, ...]
    ) -> tuple[IntArray, IntArray, IntArray, tuple[SourcePlace, ...], int, bool]:
        """Return a window's documents in their order, where sources stand after them, repeats, and if that is all."""
        counts = np.array([place.taken for place in places], dtype=np.int64)
        shares: FloatArray = np.array(self.mix.shares)
        joined = self._held(tuple(place.position.num_parts for place in places))
        last_epoch = self.mix.epochs if self.mix.until == "all" else None
        heads = [
            SourceCursor(windows, joined.first_shard(number), place, last_epoch)
            for number, (windows, place) in enumerate(zip(self._columns, places))
        ]
        parts: list[IntArray] = [np.zeros((4, 0), dtype=np.int64)]
        wanted, is_last = self.settings.window, False
        while wanted and not is_last:
            ahead = np.concatenate([head.lengths for head in heads])
            if self.mix.unit == "documents":
                ahead = np.where(ahead < 0, ahead, 1)
            bounds = np.cumsum([0, *(len(head.lengths) for head in heads)])
            at, choices = bounds[:-1].copy(), np.empty(wanted, dtype=np.int64)
            found = kernels.interleave(ahead, at, bounds[1:], shares, counts, wanted, choices)
            chosen, some = choices[:found], np.empty((4, found), dtype=np.int64)
            for number, (head, count) in enumerate(zip(heads, at - bounds[:-1])):
                some[:, chosen == number] = head.take(int(count))
            parts.append(some)
            wanted -= found
            if wanted:
                is_last = not heads[int(choices[found])].refill(wanted)
                is_last = is_last or (self.mix.until == "all" and all(head.is_over for head in heads))
        table = np.concatenate(parts, axis=1)
        after = tuple(replace(head.place, taken=int(count)) for head, count in zip(heads, counts))
        return table[0], table[1], table[2], after, int(table[2][table[3] > 0].sum()), is_last


def refuse_barren(windows: int) -> None:
    """Refuse to look further where no pack comes."""
    if windows > _MOST_BARREN:
        raise SettingError(
            f"{windows:,} windows of the mixture gave no pack; every document is empty, or dropped as too long"
        )


# What comes next in one source of a mixture: so many windows ahead as the mixture may want at once.
#
# ::
#
#     columns   d3 d4 | d0 d1 d2 | d2 d0 ...    documents left of a window, then those of the windows behind it
#     place     of the last column that was taken; a bar is a column too: it is taken where the next window begins
#
# A source of few documents comes thousands of times in one window of a mixture, so its epochs are made many at once.

_LEAST = 1 << 10
"""Documents fetched at least, unless fewer are wanted; then as many as were taken, so that few fetches do."""
_KEPT_WINDOWS = 2
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
        self.stream = stream
        self._rows = lru_cache(_KEPT_WINDOWS)(self._make)

    def of(self, position: Position) -> IntArray:
        """Return int64 `[7, 1 + documents]`: the column where a window begins, and those of its documents."""
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
    """What comes next in one source."""

    def __init__(
        self, windows: Columns, first_shard: int, place: SourcePlace, last_epoch: int | None
    ) -> None:
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
        """Return int64 `[4, documents]`: shards, numbers, lengths and epochs of the documents that were taken."""
        taken, self._columns = self._columns[:, :count], self._columns[:, count:]
        if count:
            self._stand_at(taken[:, -1])
        documents: IntArray = taken[:_GROUP, taken[_LENGTH] >= 0]
        documents[_SHARD] += self._first_shard
        self._taken += documents.shape[1]
        return documents

    def refill(self, wanted: int) -> bool:
        """Go on with the next window, once all before it are taken; returns whether there is one."""
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
    """Return int64 `[epochs, documents]`: in which order each epoch has the documents of a group of one window."""
    if seed is None:
        return np.tile(np.arange(documents), (epochs, 1))
    seeds = hashed(first.epoch + np.arange(epochs), seed)
    seeds = hashed(np.full(epochs, first.group), seeds) + np.uint64(1)
    order: IntArray = np.argsort(hashed(np.arange(documents)[None], seeds[:, None]), axis=1)
    return order
