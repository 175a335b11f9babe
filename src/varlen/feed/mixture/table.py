"""Where the windows of a mixture begin, so that any pack of it is found from the nearest window that is known.

::

    window        0    1    2    3    4    5    6    7    8    9
    counted       *    *    *    *                                from the first on; kept for the next time
    passed                                 *    *                 that training went through in this process

What lies between is counted, window after window; what has been counted once isn't again.
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
from varlen.feed.indexed.table import CachedTable, count_window
from varlen.feed.mixture.stream import MixedPosition, MixedStream, SourcePlace, refuse_barren
from varlen.types import IntArray

_MOST_NOTED = 1 << 10
"""Windows passed in this process that are remembered; those that were looked at stay longer."""
_PLACE = 5
"""Numbers that say where a source stands."""


class _Marks:
    """Rows of numbers, one for each window that is known: packs before it, its own number, and the sources' places.

    They are as flat as the file that keeps them: a row of objects would take ten times as much.
    """

    def __init__(self, width: int) -> None:
        self._width, self._flat = width, array("q")

    def __len__(self) -> int:
        return len(self._flat) // self._width

    def row(self, number: int) -> list[int]:
        return self._flat[number * self._width : (number + 1) * self._width].tolist()

    def add(self, row: Sequence[int]) -> None:
        """Take in a row, in its place."""
        at = bisect_right(range(len(self)), row[1], key=lambda number: self._flat[number * self._width + 1])
        if not self.has(row[1]):
            self._flat[at * self._width : at * self._width] = array("q", row)

    def has(self, window: int) -> bool:
        """Return whether a window is known: they stand in their order."""
        at = bisect_right(range(len(self)), window, key=lambda number: self._flat[number * self._width + 1])
        return at > 0 and self._flat[(at - 1) * self._width + 1] == window

    def nearest(self, packs: int | None) -> int:
        """Return the last row before which there are no more packs, or the last of all; -1: none."""
        if packs is None:
            return len(self) - 1
        return bisect_right(range(len(self)), packs, key=lambda number: self._flat[number * self._width]) - 1

    def table(self) -> IntArray:
        """Return all rows."""
        return np.array(self._flat, dtype=np.int64).reshape(-1, self._width)


class MixedTable:
    """Finds packs of a mixture."""

    def __init__(self, stream: MixedStream) -> None:
        self._stream = stream
        self._width = 2 + _PLACE * len(stream.sources)
        self._going = threading.Lock()  # who comes second finds what the first has counted
        self._noted: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=_MOST_NOTED)
        self._last_window: Any = None
        self._here: tuple[int, MixedPosition] | None = None
        self._grown: tuple[Grown, ...] | None = None

    def pass_by(self, number: int, at: Mapping[str, Any]) -> None:
        """Remember a place, if it is in another window than the last one was."""
        if at.get("window") != self._last_window:
            self._last_window = at.get("window")
            self._noted.append((number, at))

    def stand_at(self, number: int, position: MixedPosition) -> None:
        """Say where training stands, from where to look further."""
        self._here = number, position

    def num_packs(self, grown: tuple[Grown, ...]) -> int:
        """Return the packs of the whole mixture."""
        if self._stream.epochs is None:
            raise SettingError("a mixture without end has no number of packs; count steps yourself")
        with self._going:
            self._begin(grown)
            if self._end is None:
                self._walk(None)
            assert self._end is not None
            return self._end[0]

    def find(self, number: int, grown: tuple[Grown, ...]) -> tuple[MixedPosition, bool]:
        """Return where a pack stands, and whether it is there; if not, where the mixture ends."""
        with self._going:
            self._begin(grown)
            if self._end is not None and number >= self._end[0]:
                return self._end[1], False
            return self._walk(number)

    def _begin(self, grown: tuple[Grown, ...]) -> None:
        """Forget what was found of other parts of the sources, and take what was kept of these."""
        if grown == self._grown:
            return
        self._grown, stream = grown, self._stream
        self._counted, self._passed = _Marks(self._width), _Marks(self._width)
        self._end: tuple[int, MixedPosition] | None = None
        self._kept = CachedTable(
            [source.windows.store for source in stream.sources],
            [pairs[-1][1] for pairs in grown],
            [
                [[one.windows.parts_a_group, one.windows.settings.seed] for one in stream.sources],
                asdict(stream.settings),
                asdict(stream.mix),
            ],
        )
        kept = self._kept.read(self._is_right, self._width)
        rows = [self._row(0, stream.begin(grown))] if kept is None else kept.tolist()
        for packs, window, *places in rows:
            if window >= 0:
                self._counted.add([packs, window, *places])
            else:
                self._ends(packs, self._counted)

    def _is_right(self, table: IntArray) -> bool:
        """Return whether a table can be one of this mixture: windows from the first on, and maybe the end."""
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

    def _ends(self, packs: int, marks: _Marks) -> None:
        """Know the end: so many packs, the last of which are in the last window of these."""
        before, position = self._at(marks.row(len(marks) - 1))
        self._end = packs, replace(position, pack=packs - before)

    def _walk(self, number: int | None) -> tuple[MixedPosition, bool]:
        """Go on counting from the nearest window that is known, to a pack or to the end."""
        self._take_in()
        known = [marks for marks in (self._counted, self._passed) if marks.nearest(number) >= 0]
        marks = max(known, key=lambda one: one.row(one.nearest(number))[0])
        nearest = marks.nearest(number)
        packs, position = self._at(marks.row(nearest))
        is_last = self._end is not None and self._end[1].window == position.window
        if number is not None and (is_last or marks.has(position.window + 1)):
            return replace(position, pack=number - packs), True
        barren = 0
        try:
            while True:
                lengths, after = self._stream.look(position)
                count = count_window(lengths, self._stream.settings)
                if after is None:
                    self._ends(packs + count, marks)
                else:
                    marks.add(self._row(packs + count, after))
                if number is not None and number < packs + count:
                    return replace(position, pack=number - packs), True
                if after is None:
                    return replace(position, pack=count), False
                barren = 0 if count else barren + 1
                refuse_barren(barren)
                packs, position = packs + count, after
        finally:
            if marks is self._counted:
                # The end may have been found from a window that training went through, far behind these.
                is_whole = self._end is not None and marks.has(self._end[1].window)
                end = [self._end[0]] + [-1] * (self._width - 1) if self._end and is_whole else []
                self._kept.write(
                    np.concatenate([marks.table(), np.array(end, dtype=np.int64).reshape(-1, self._width)])
                )

    def _take_in(self) -> None:
        """Know the windows that training went through, and the one in which it stands."""
        places = []
        while self._noted:
            number, at = self._noted.popleft()
            places.append((number, self._stream.position(at)))
        if self._here is not None and not any(
            marks.has(self._here[1].window) for marks in (self._counted, self._passed)
        ):
            places += [self._here] if self._stream.is_pack(self._here[1]) else []
        for number, position in places:
            if position.grown == self._grown:
                self._passed.add(self._row(number - position.pack, position))

    def _row(self, packs: int, position: MixedPosition) -> list[int]:
        row = [packs, position.window]
        for place in position.sources:
            at = place.position
            row += [at.epoch, at.group, at.window, place.document, place.taken]
        return row

    def _at(self, row: Sequence[int]) -> tuple[int, MixedPosition]:
        """Return the packs before a window, and where it begins."""
        assert self._grown is not None
        places = []
        for number, grown in enumerate(self._grown):
            epoch, group, window, document, taken = row[2 + _PLACE * number :][:_PLACE]
            position = Position(epoch=epoch, group=group, window=window, grown=grown)
            places.append(SourcePlace(position=position, document=document, taken=taken))
        return row[0], MixedPosition(sources=tuple(places), window=row[1])
