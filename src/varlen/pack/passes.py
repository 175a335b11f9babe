"""Pieces that wait to packs that are full enough: in the order of arrival first, sorted by length only at last.

Shared by the packers of streams, which differ in what they do with the packs that aren't full.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from varlen import jit
from varlen.pack.api import DEFAULT_WORK, item_work, pack
from varlen.pack.arrange import arrange, audit, checksum
from varlen.pack.assign import assign, spread
from varlen.pack.lengths import LARGEST
from varlen.pack.pieces import Items, fit, slots_of
from varlen.pack.waiting import Packs, Waiting, no_packs
from varlen.pack.whole import whole
from varlen.types import Int32Array, Method, Overlong

_SPREAD_PIECE_S = 5e-6
"""What a reference takes to spread one piece, at most."""

_ARRANGE_PIECE_S = 1e-6
"""What references take to lay out one piece, at most."""

_METHODS: dict[Method, tuple[Method, ...]] = {
    "best_fit": ("best_fit", "balanced", "best_fit_decreasing"),
    "first_fit": ("first_fit", "balanced", "best_fit_decreasing"),
}
"""Methods that pack a window one after the other, each what the one before left in packs that aren't full."""

STREAMS: tuple[Method, ...] = ("next_fit", "wrapped")
"""Methods with one open pack. It alone waits for the next documents, which continue it."""


def arrived(
    lengths: Int32Array, first_record: int, capacity: int, method: Method, overlong: Overlong
) -> tuple[Waiting, dict[str, int]]:
    """Return new documents as pieces that fit, and what was cut or dropped.

    Args:
        lengths: int32 `[documents]`, checked.
        first_record: number of the first document.
        capacity: tokens a pack can hold.
        method: by which they will be packed.
        overlong: what becomes of those longer than `capacity`.

    Raises:
        OverlongDocumentError: a document doesn't fit and `overlong` is "error".
    """
    if method == "wrapped" and overlong in ("error", "split"):
        kept, documents, starts, losses = lengths, None, None, {}
    else:
        with jit.sized(lengths.size * _ARRANGE_PIECE_S):
            pieces = fit(lengths, capacity, overlong)
        kept, documents, starts, losses = pieces.lengths, pieces.documents, pieces.starts, pieces.losses
    numbers = np.arange(kept.size) if documents is None else documents
    first = np.zeros(kept.size, np.int32) if starts is None else starts
    real = kept > 0
    pieces_ = Waiting(
        records=(numbers + first_record)[real],
        starts=first[real],
        stops=(first + kept)[real],
        ages=np.zeros(int(real.sum()), np.int32),
    )
    return pieces_, losses


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """How pieces are packed."""

    capacity: int
    method: Method
    max_documents: int | None
    multiple: int
    min_fill: float
    """Packs at least this full are full, from 0 to 1."""

    @property
    def keeps_order(self) -> bool:
        """Whether documents stay in the order of their arrival, so that one pack is open at a time."""
        return self.method in STREAMS

    def run(self, pieces: Waiting) -> tuple[Packs, Packs]:
        """Pack pieces; returns the packs that are full, and those that the last pass left less full.

        Args:
            pieces: in the order of their arrival.
        """
        full, rest, last = no_packs(), pieces, no_packs()
        for method in _METHODS.get(self.method, (self.method,)):
            spreads = method == "balanced" != self.method
            packs = self._spread(rest) if spreads else self.packed(rest, method)
            is_full = self.is_full(packs)
            full, last = full.and_then(packs.where(is_full)), packs.where(~is_full)
            rest = last.pieces.by_arrival()
        return full, last

    def all_of(self, pieces: Waiting) -> Packs:
        """Pack pieces, all of them, in the order of their first pieces: where nothing is to wait.

        Args:
            pieces: in the order of arrival.
        """
        if self.method not in _METHODS:
            return self.packed(pieces, self.method)
        found = whole(
            pieces.lengths, self.capacity, self.method, self.max_documents or LARGEST, self.multiple
        )
        with jit.sized(len(pieces) * _ARRANGE_PIECE_S):
            return self.arranged(pieces, *found)

    def packed(self, pieces: Waiting, method: Method) -> Packs:
        """Pack pieces by one method.

        Args:
            pieces: in the order of their arrival.
            method: any of `vl.pack`'s.
        """
        packing = pack(
            pieces.lengths,
            self.capacity,
            method,
            max_documents=self.max_documents,
            document_multiple_of=self.multiple,
        )
        ordered = pieces.take(packing.document_ids)
        if method == "wrapped":
            starts = ordered.starts + packing.starts
            stops = starts + packing.lengths
            ordered = Waiting(records=ordered.records, starts=starts, stops=stops, ages=ordered.ages)
        return Packs(pieces=ordered, offsets=packing.offsets)

    def _spread(self, pieces: Waiting) -> Packs:
        """Pieces in packs of about equal work, also where best-fit-decreasing would need fewer packs.

        Packs that come out full are mixed at random, and what doesn't is packed again.
        """
        with jit.sized(len(pieces) * _SPREAD_PIECE_S):
            return self._spread_sized(pieces)

    def _spread_sized(self, pieces: Waiting) -> Packs:
        lengths, most = pieces.lengths, self.max_documents or LARGEST
        items = Items(slots=slots_of(lengths, self.multiple), sizes=None, item_of=None)
        fewest = assign("best_fit_decreasing", items, None, self.capacity, most)[1]
        work, ones = item_work(lengths, items, DEFAULT_WORK), np.ones(len(pieces), np.int32)
        pack_of, num_packs = spread(fewest, items.slots, ones, work, self.capacity, most)
        return self.arranged(pieces, pack_of, num_packs)

    def arranged(self, pieces: Waiting, pack_of: Int32Array, num_packs: int) -> Packs:
        """Lay out packs in the order of their first pieces, and audit them.

        Args:
            pieces: in the order of arrival.
            pack_of: int32 `[num_pieces]`: packs as opened, -1 for pieces that aren't packed; overwritten.
            num_packs: how many there are.

        Raises:
            LedgerError: other pieces were packed than given, or too many; a bug in varlen.
        """
        lengths, most = np.where(pack_of < 0, np.int32(0), pieces.lengths), self.max_documents or LARGEST
        expected = checksum(lengths)
        placed, placed_lengths, offsets = arrange(lengths, pack_of, num_packs, None)
        audit(placed, placed_lengths, offsets, self.capacity, most, self.multiple, expected)
        return Packs(pieces=pieces.take(placed), offsets=offsets)

    def is_full(self, packs: Packs) -> npt.NDArray[np.bool_]:
        """Which packs are full enough to hand out, by the space they take up or their number of pieces."""
        least = self.capacity if self.keeps_order else self.min_fill * self.capacity
        full = (packs.space(self.multiple) >= least) | (packs.sizes >= (self.max_documents or LARGEST))
        if self.keeps_order:
            full[:-1] = True
        return full
