"""The packs of all epochs end to end, from any position: what a step takes, and where the next one begins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from varlen.feed.windows import WindowPacks, Windows
from varlen.types import IntArray


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Position:
    """Where a pack stands: enough to go on from there after making one window."""

    epoch: int = 0
    window: int = 0
    pack: int = 0
    """Packs of the window that stand before it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Taken:
    """Consecutive packs, of one window or of several."""

    shards: IntArray
    documents: IntArray
    starts: IntArray
    stops: IntArray
    """int64 `[pieces]`, as in `WindowPacks`."""
    offsets: IntArray
    """int64 `[packs + 1]`."""
    after: Position
    """Of the pack that follows them."""

    @property
    def num_packs(self) -> int:
        """Number of packs."""
        return len(self.offsets) - 1


class PackStream:
    """The packs of one epoch after the other."""

    def __init__(self, windows: Windows, epochs: int | None) -> None:
        """Take the windows of an epoch, and how many epochs there are; None for no end."""
        self._windows, self._epochs = windows, epochs

    def take(self, position: Position, count: int) -> Taken:
        """Return the next packs, fewer than asked for only where the last epoch ends.

        Args:
            position: of the first; of a state or of `Taken.after`.
            count: how many.

        Raises:
            OverlongDocumentError: a document is longer than a pack, and `overlong` is "error".

        Cost: that of the windows that hold them.
        """
        parts: list[WindowPacks] = []
        while count and not self._is_over(position):
            window = self._windows.window(position.epoch, position.window)
            stop = min(position.pack + count, window.num_packs)
            parts.append(window.slice(position.pack, stop))
            count -= stop - position.pack
            position = Position(epoch=position.epoch, window=position.window, pack=stop)
            if stop == window.num_packs:
                position = self._next_window(position)
        return _joined(parts, position)

    def _is_over(self, position: Position) -> bool:
        is_last = self._epochs is not None and position.epoch >= self._epochs
        return is_last or self._windows.num_windows == 0

    def _next_window(self, position: Position) -> Position:
        if position.window + 1 < self._windows.num_windows:
            return Position(epoch=position.epoch, window=position.window + 1)
        return Position(epoch=position.epoch + 1)


def _joined(parts: list[WindowPacks], after: Position) -> Taken:
    """Put packs of several windows end to end."""
    none = np.zeros(0, dtype=np.int64)
    pieces = np.cumsum([0] + [int(part.offsets[-1]) for part in parts])
    offsets = [part.offsets[1:] + before for part, before in zip(parts, pieces)]
    return Taken(
        shards=np.concatenate([none, *(part.shards for part in parts)]),
        documents=np.concatenate([none, *(part.documents for part in parts)]),
        starts=np.concatenate([none, *(part.starts for part in parts)]),
        stops=np.concatenate([none, *(part.stops for part in parts)]),
        offsets=np.concatenate([[0], *offsets]).astype(np.int64),
        after=after,
    )
