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

from varlen.documents.mixture import Unit, Until
from varlen.errors import SettingError, StateError
from varlen.feed import kernels
from varlen.feed.heads import Columns, Head, SourcePlace
from varlen.feed.packs import StorePacks, end_to_end
from varlen.feed.state import MOST
from varlen.feed.stream import Grown, PackStream, Position, refuse
from varlen.feed.windows import Window, WindowSettings, packs_of
from varlen.pack.lengths import as_count
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
        """Take the documents, and their order in each source.

        Args:
            tokens: of all sources.
            sources: of each, without an end unless the mixture ends with the first.
            settings: of the packs.
            mix: how sources are mixed.
        """
        self.sources, self.settings, self.mix = tuple(sources), settings, mix
        self.epochs = None if mix.until == "endless" else mix.epochs
        self._columns = [Columns(stream) for stream in self.sources]
        self._made = lru_cache(_KEPT)(self._make)
        self._held = lru_cache(_KEPT)(tokens.with_parts)

    def begin(self, grown: Sequence[Grown]) -> MixedPosition:
        """Return where training began.

        Args:
            grown: parts of each source, as a position has them.
        """
        return MixedPosition(sources=tuple(SourcePlace(position=Position(grown=one)) for one in grown))

    def passes(self, position: MixedPosition) -> int:
        """Return the epochs of each source that are over."""
        return min(place.position.epoch for place in position.sources)

    def tokens(self, position: MixedPosition) -> JoinedTokens:
        """Return the documents of all sources, numbered by what each held when training began."""
        return self._held(position.num_parts)

    def take(self, position: MixedPosition, count: int) -> tuple[StorePacks, MixedPosition, Ledger]:
        """Return the next packs, where those after begin, and what became of the tokens of the windows begun.

        Args:
            position: of the first.
            count: how many.

        Raises:
            OverlongDocumentError: a document is longer than a pack, and `overlong` is "error".
            SettingError: no document gives a pack.
            StateError: there is no such position.
            SourceError: a store is damaged.
        """
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

        Raises:
            StateError: there is no such pack.
            SourceError: a store is damaged.

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
        """Return the position that `at` gave; without one, where training begins.

        Raises:
            StateError: it is none, or of other sources.
        """
        if not at:
            return self.begin([stream.begun(Position()).grown for stream in self.sources])
        try:
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
        except StateError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"this is no state of a loader: {type(error).__name__} {error}") from None
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
            Head(windows, joined.first_shard(number), place, last_epoch)
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
    """Refuse to look further where no pack comes.

    Args:
        windows: one after the other that gave none.

    Raises:
        SettingError: they are too many.
    """
    if windows > _MOST_BARREN:
        raise SettingError(
            f"{windows:,} windows of the mixture gave no pack; every document is empty, or dropped as too long"
        )
