"""The positions of a mixture's windows, by which any pack is found from the nearest known window.

::

    window        0    1    2    3    4    5    6    7    8    9
    counted       *    *    *    *                                from the first window on; saved in a file
    passed                                 *    *                 windows of which this process has taken packs

Windows between them are counted one after the other, and only once.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from varlen.errors import SettingError
from varlen.feed.indexed.stream import Grown, Position
from varlen.feed.indexed.table import CachedTable
from varlen.feed.mixture.stream import MixedPosition, MixedStream, SourcePosition, refuse_barren
from varlen.pack.window import count_packs
from varlen.types import IntArray

_MOST_NOTED = 1 << 10
"""Passed windows that are remembered until the next search, at most."""
_SOURCE_WIDTH = 5
"""Numbers per source in a row."""


class _Rows:
    """A sorted row of integers per known window: the packs before it, its number, and the sources' positions.

    The rows are one flat array, as in the file: objects would take ten times the memory.
    """

    def __init__(self, width: int) -> None:
        self._width, self._flat = width, array("q")

    def __len__(self) -> int:
        return len(self._flat) // self._width

    def row(self, number: int) -> list[int]:
        return self._flat[number * self._width : (number + 1) * self._width].tolist()

    def add(self, row: Sequence[int]) -> None:
        """Insert a row in order, unless its window is known."""
        at = bisect_right(range(len(self)), row[1], key=lambda number: self._flat[number * self._width + 1])
        if not self.has(row[1]):
            self._flat[at * self._width : at * self._width] = array("q", row)

    def has(self, window: int) -> bool:
        """Return whether a window is known."""
        at = bisect_right(range(len(self)), window, key=lambda number: self._flat[number * self._width + 1])
        return at > 0 and self._flat[(at - 1) * self._width + 1] == window

    def nearest(self, packs: int | None) -> int:
        """Return the index of the last row with at most `packs` packs before it; None: of the last row. -1: none."""
        if packs is None:
            return len(self) - 1
        return bisect_right(range(len(self)), packs, key=lambda number: self._flat[number * self._width]) - 1

    def table(self) -> IntArray:
        """Return int64 `[rows, width]`."""
        return np.array(self._flat, dtype=np.int64).reshape(-1, self._width)


class MixedTable:
    """Finds packs of a mixture."""

    def __init__(self, stream: MixedStream) -> None:
        self._stream = stream
        self._width = 2 + _SOURCE_WIDTH * len(stream.sources)
        self._lock = threading.Lock()  # a second caller waits, and finds the first one's windows
        self._noted: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=_MOST_NOTED)
        self._last_window: Any = None
        self._current: tuple[int, MixedPosition] | None = None
        self._grown: tuple[Grown, ...] | None = None

    def note_passed(self, number: int, at: Mapping[str, Any]) -> None:
        """Remember the position of pack `number` if its window is another than in the last call."""
        if at.get("window") != self._last_window:
            self._last_window = at.get("window")
            self._noted.append((number, at))

    def set_current(self, number: int, position: MixedPosition) -> None:
        """Set the pack that training takes next, from which a search may begin."""
        self._current = number, position

    def num_packs(self, grown: tuple[Grown, ...]) -> int:
        """Return the number of packs of the whole mixture."""
        if self._stream.epochs is None:
            raise SettingError("a mixture without end has no number of packs; count steps yourself")
        with self._lock:
            self._begin(grown)
            if self._end is None:
                self._walk(None)
            assert self._end is not None
            return self._end[0]

    def find(self, number: int, grown: tuple[Grown, ...]) -> tuple[MixedPosition, bool]:
        """Return the position of pack `number`, and True; (the end, False) if there is no such pack."""
        with self._lock:
            self._begin(grown)
            if self._end is not None and number >= self._end[0]:
                return self._end[1], False
            return self._walk(number)

    def _begin(self, grown: tuple[Grown, ...]) -> None:
        """Load the saved rows for these parts of the sources, and drop those of other parts."""
        if grown == self._grown:
            return
        self._grown, stream = grown, self._stream
        self._counted, self._passed = _Rows(self._width), _Rows(self._width)
        self._end: tuple[int, MixedPosition] | None = None
        self._cached = CachedTable(
            [source.windows.store for source in stream.sources],
            [pairs[-1][1] for pairs in grown],
            [
                [[one.windows.parts_a_group, one.windows.settings.seed] for one in stream.sources],
                asdict(stream.settings),
                asdict(stream.mix),
            ],
        )
        saved = self._cached.read(self._is_right, self._width)
        rows = [self._row(0, stream.begin(grown))] if saved is None else saved.tolist()
        for packs, window, *rest in rows:
            if window >= 0:
                self._counted.add([packs, window, *rest])
            else:
                self._set_end(packs, self._counted)

    def _is_right(self, table: IntArray) -> bool:
        """Return whether a table is valid: all windows from the first on, and optionally a row for the end."""
        if len(table) == 0:
            return False
        windows, packs = table[:, 1], table[:, 0]
        last = len(table) - bool(windows[-1] < 0)
        return bool(
            last > 0
            and (windows[:last] == np.arange(last)).all()
            and packs[0] == 0
            and (np.diff(packs) >= 0).all()
            and (table[:last] >= 0).all()
        )

    def _set_end(self, packs: int, known: _Rows) -> None:
        """Set the end of the mixture: its number of packs, and its last window, which is the last one known."""
        before, position = self._at(known.row(len(known) - 1))
        self._end = packs, replace(position, pack=packs - before)

    def _walk(self, number: int | None) -> tuple[MixedPosition, bool]:
        """Count windows from the nearest known one to a pack, or to the end."""
        self._add_passed()
        candidates = [rows for rows in (self._counted, self._passed) if rows.nearest(number) >= 0]
        known = max(candidates, key=lambda rows: rows.row(rows.nearest(number))[0])
        packs, position = self._at(known.row(known.nearest(number)))
        is_last = self._end is not None and self._end[1].window == position.window
        if number is not None and (is_last or known.has(position.window + 1)):
            return replace(position, pack=number - packs), True
        barren = 0
        try:
            while True:
                lengths, after = self._stream.look(position)
                count = count_packs(lengths, **self._stream.settings.packing)
                if after is None:
                    self._set_end(packs + count, known)
                else:
                    known.add(self._row(packs + count, after))
                if number is not None and number < packs + count:
                    return replace(position, pack=number - packs), True
                if after is None:
                    return replace(position, pack=count), False
                barren = 0 if count else barren + 1
                refuse_barren(barren)
                packs, position = packs + count, after
        finally:
            if known is self._counted:
                # The end may have been found from a passed window, with uncounted windows before it.
                is_whole = self._end is not None and known.has(self._end[1].window)
                end = [self._end[0]] + [-1] * (self._width - 1) if self._end and is_whole else []
                self._cached.write(
                    np.concatenate([known.table(), np.array(end, dtype=np.int64).reshape(-1, self._width)])
                )

    def _add_passed(self) -> None:
        """Add the noted windows, and the current one, to the passed windows."""
        found = []
        while self._noted:
            number, at = self._noted.popleft()
            found.append((number, self._stream.position(at)))
        if self._current is not None and not any(
            rows.has(self._current[1].window) for rows in (self._counted, self._passed)
        ):
            found += [self._current] if self._stream.is_pack(self._current[1]) else []
        for number, position in found:
            if position.grown == self._grown:
                self._passed.add(self._row(number - position.pack, position))

    def _row(self, packs: int, position: MixedPosition) -> list[int]:
        row = [packs, position.window]
        for source in position.sources:
            at = source.position
            row += [at.epoch, at.group, at.window, source.document, source.taken]
        return row

    def _at(self, row: Sequence[int]) -> tuple[int, MixedPosition]:
        """Return the number of packs before a row's window, and the window's position."""
        assert self._grown is not None
        sources = []
        for number, grown in enumerate(self._grown):
            epoch, group, window, document, taken = row[2 + _SOURCE_WIDTH * number :][:_SOURCE_WIDTH]
            position = Position(epoch=epoch, group=group, window=window, grown=grown)
            sources.append(SourcePosition(position=position, document=document, taken=taken))
        return row[0], MixedPosition(sources=tuple(sources), window=row[1])
