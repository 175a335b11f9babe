"""From the lengths in a store to the rows of a packed set, window by window and file by file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from varlen.counts import many
from varlen.documents.order import STRETCH, DocumentOrder
from varlen.errors import OverlongDocumentError
from varlen.offline.settings import PackSettings
from varlen.pack.window import WindowPacker
from varlen.store.tokens import ReadableTokens
from varlen.types import Int32Array, IntArray, Ledger, Packing


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartPlan:
    """The rows of one file: row r holds the pieces `offsets[r]:offsets[r + 1]`."""

    number: int
    shards: IntArray
    """int64 `[pieces]`: the shard of each piece's document."""
    documents: IntArray
    """int64 `[pieces]`: the document's number within its shard."""
    starts: IntArray
    stops: IntArray
    """int64 `[pieces]`: the piece is its document's tokens [start, stop)."""
    offsets: IntArray
    """int64 `[rows + 1]`."""


class Plan:
    """Iterates over the parts of a packed set; memory is bounded by a window and a part, not by the set."""

    def __init__(self, store: ReadableTokens, settings: PackSettings) -> None:
        self._store, self._settings = store, settings
        self.long_tokens = 0
        """Of documents longer than a row, in the parts that were taken."""
        self._order = DocumentOrder(store.documents, settings.seed if settings.shuffle else None)
        self._packer = WindowPacker(
            capacity=settings.capacity,
            window=settings.window,
            method=settings.method,
            overlong=settings.overlong,
            max_documents=settings.max_documents,
        )

    @property
    def ledger(self) -> Ledger:
        """What became of every token, once all parts have been taken."""
        return self._packer.ledger

    def __iter__(self) -> Iterator[PartPlan]:
        if self._settings.overlong == "error" and self._settings.method != "wrapped":
            check_lengths(self._store, self._settings.capacity)
        waiting: list[Packing] = []
        number = 0
        for packing in self.packings():
            waiting.append(packing)
            while sum(p.num_tokens for p in waiting) >= self._settings.part_tokens:
                part, waiting = self._cut(waiting, number)
                yield part
                number += 1
        if any(p.num_packs for p in waiting):
            for part in self._rest(waiting, number):
                yield part

    def packings(self) -> Iterator[Packing]:
        """Yield packs as windows fill, documents named by their places in the order."""
        for stretch in range(self._order.num_stretches):
            shards, documents = self._order.stretch(stretch)
            self._store.will_need(shards, documents)
            lengths = self._store.lengths(shards, documents)
            self.long_tokens += int(lengths[lengths > self._settings.capacity].sum())
            yield self._packer.add(lengths)
        yield self._packer.flush()

    def _rest(self, waiting: list[Packing], number: int) -> Iterator[PartPlan]:
        while any(p.num_packs for p in waiting):
            part, waiting = self._cut(waiting, number)
            yield part
            number += 1

    def _cut(self, waiting: list[Packing], number: int) -> tuple[PartPlan, list[Packing]]:
        """Take as many packs as a part holds; returns the part, and the packs left."""
        joined = _join(waiting)
        ends = np.cumsum(joined.pack_sums(joined.lengths)) if joined.num_packs else np.zeros(0)
        rows = min(int(np.searchsorted(ends, self._settings.part_tokens)) + 1, joined.num_packs)
        pieces = int(joined.offsets[rows])
        shards, documents = self.located(joined.document_ids[:pieces])
        part = PartPlan(
            number=number,
            shards=shards,
            documents=documents,
            starts=joined.starts[:pieces].astype(np.int64),
            stops=joined.stops[:pieces].astype(np.int64),
            offsets=joined.offsets[: rows + 1].copy(),
        )
        return part, [_tail(joined, rows)] if rows < joined.num_packs else []

    def located(self, places: IntArray) -> tuple[IntArray, IntArray]:
        """Return shards and numbers of the documents at places."""
        shards, documents = np.empty_like(places), np.empty_like(places)
        for stretch in np.unique(places // STRETCH).tolist():
            at = places // STRETCH == stretch
            found = self._order.stretch(stretch)
            shards[at] = found[0][places[at] - stretch * STRETCH]
            documents[at] = found[1][places[at] - stretch * STRETCH]
        return shards, documents


def check_lengths(store: ReadableTokens, capacity: int) -> None:
    """Refuse documents longer than a row.

    Raises:
        OverlongDocumentError: there are some; says which is the first and how many there are.
    """
    first, length, count, before = -1, 0, 0, 0
    for index, documents in enumerate(store.documents.tolist()):
        lengths = store.lengths(np.full(documents, index), np.arange(documents))
        over = np.flatnonzero(lengths > capacity)
        if len(over) and first < 0:
            first, length = before + int(over[0]), int(lengths[over[0]])
        count += len(over)
        before += len(lengths)
    if count:
        are = f"{many(before, 'document')} {'is' if count == 1 else 'are'}"
        raise OverlongDocumentError(
            f"document {first:,} (counted from 0 in the order of the data) has {length:,} tokens but a pack holds "
            f"{capacity:,} ({count:,} of {are} too long); pass --overlong split, truncate or "
            "drop, or a larger --capacity"
        )


def _join(packings: list[Packing]) -> Packing:
    """Put packings one after the other."""
    if len(packings) == 1:
        return packings[0]
    shifts = np.cumsum([0] + [p.num_pieces for p in packings[:-1]])
    offsets = np.concatenate([[0], *(p.offsets[1:] + shift for p, shift in zip(packings, shifts))])
    return _like(
        packings[0],
        np.concatenate([p.document_ids for p in packings]),
        np.concatenate([p.starts for p in packings]),
        np.concatenate([p.stops for p in packings]),
        offsets.astype(np.int64),
    )


def _tail(packing: Packing, rows: int) -> Packing:
    """Return a packing without its first rows."""
    pieces = int(packing.offsets[rows])
    return _like(
        packing,
        packing.document_ids[pieces:],
        packing.starts[pieces:],
        packing.stops[pieces:],
        packing.offsets[rows:] - pieces,
    )


def _like(
    packing: Packing, ids: IntArray, starts: Int32Array, stops: Int32Array, offsets: IntArray
) -> Packing:
    tokens = int((stops.astype(np.int64) - starts).sum())
    return Packing(
        document_ids=ids,
        starts=starts,
        stops=stops,
        offsets=offsets,
        capacity=packing.capacity,
        ledger=Ledger(tokens_in=tokens, packed=tokens),
        method=packing.method,
        overlong=packing.overlong,
    )
