"""Packs of a store's documents, as flat arrays: what windows give, steps take and batches are made of."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from varlen.types import IntArray


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
