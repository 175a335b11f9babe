"""The packs of all epochs end to end, from any position: what a step takes, and where the next one begins."""

from __future__ import annotations

from dataclasses import dataclass

from varlen.feed.packs import StorePacks, end_to_end
from varlen.feed.windows import Windows


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Position:
    """Where a pack stands: enough to go on from there after making one window."""

    epoch: int = 0
    window: int = 0
    pack: int = 0
    """Packs of the window that stand before it."""


class PackStream:
    """The packs of one epoch after the other."""

    def __init__(self, windows: Windows, epochs: int | None) -> None:
        """Take the windows of an epoch, and how many epochs there are; None for no end."""
        self._windows, self._epochs = windows, epochs

    def take(self, position: Position, count: int) -> tuple[StorePacks, Position]:
        """Return the next packs, fewer than asked for only where the last epoch ends, and where those after begin.

        Args:
            position: of the first; of a state, or as returned with the packs before.
            count: how many.

        Raises:
            OverlongDocumentError: a document is longer than a pack, and `overlong` is "error".

        Cost: that of the windows that hold them.
        """
        parts: list[StorePacks] = []
        while count and not self._is_over(position):
            packs = self._windows.window(position.epoch, position.window).packs
            stop = min(position.pack + count, packs.num_packs)
            parts.append(packs.slice(position.pack, stop))
            count -= stop - position.pack
            position = Position(epoch=position.epoch, window=position.window, pack=stop)
            if stop == packs.num_packs:
                position = self._next_window(position)
        return end_to_end(parts), position

    def _is_over(self, position: Position) -> bool:
        is_last = self._epochs is not None and position.epoch >= self._epochs
        return is_last or self._windows.num_windows == 0

    def _next_window(self, position: Position) -> Position:
        if position.window + 1 < self._windows.num_windows:
            return Position(epoch=position.epoch, window=position.window + 1)
        return Position(epoch=position.epoch + 1)
