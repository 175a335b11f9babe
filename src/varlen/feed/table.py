"""The window table: how many packs stand before each window of an epoch, so that any step is found at once.

::

    windows of the epoch    0     1     2   | 3     4          groups one after the other
    packs before            0    91   180     270   355   442  int64, 8 bytes a window

A table is made when it is first asked for, by counting the packs of every window, at several million documents a
second on each processor, and kept: beside the index, else in the user's cache folder, else in memory alone. It isn't
made before, in the background: who asks has to wait then too, and all the others would pay for it in their trainers'
processes. What it depends on is in the name of its file, so a table that is found is right, or is no table at all and
made anew. A shuffle has a table for each epoch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import numpy as np

from varlen.errors import SettingError, SourceError
from varlen.feed.groups import PACKS_A_GROUP, WINDOWS_A_GROUP
from varlen.feed.kept import KeptTable
from varlen.feed.stream import Grown, PackStream, Position
from varlen.feed.windows import WindowSettings
from varlen.offline.processors import processors
from varlen.pack.window import count_packs
from varlen.types import IntArray

_KEPT = 4
"""Tables in memory."""
_MOST_THREADS = 8
_MANY = 1 << 20
"""Documents that are counted side by side; fewer are counted sooner than threads have begun."""
_RUNS = 32
"""Runs of windows for each thread, so that all end together, and soon after Ctrl-C."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpochTable:
    """Where the packs of one epoch stand."""

    groups: IntArray
    """int64 `[groups + 1]`: windows before each group."""
    packs: IntArray
    """int64 `[windows + 1]`: packs before each window."""

    @property
    def num_packs(self) -> int:
        """Packs of the epoch."""
        return int(self.packs[-1])

    def number(self, position: Position) -> int:
        """Return how many packs of the epoch stand before a position."""
        if position.group >= len(self.groups) - 1:
            return self.num_packs
        window = int(self.groups[position.group]) + position.window
        if window >= int(self.groups[position.group + 1]):  # behind the group's last one
            return int(self.packs[self.groups[position.group + 1]])
        return int(self.packs[window]) + position.pack

    def find(self, number: int) -> tuple[int, int, int]:
        """Return the group, the window in it and the pack in that, of a pack of the epoch."""
        window = int(np.searchsorted(self.packs, number, side="right")) - 1
        group = int(np.searchsorted(self.groups, window, side="right")) - 1
        return group, window - int(self.groups[group]), number - int(self.packs[window])


class WindowTable:
    """The tables of all epochs of a stream, made when they are needed."""

    def __init__(self, stream: PackStream, threads: int | None = None) -> None:
        """Take the stream.

        Args:
            stream: of the packs.
            threads: that count windows side by side; None for one a processor, up to eight.
        """
        self._stream, self._threads = stream, threads or min(processors(), _MOST_THREADS)
        self._making = threading.Lock()  # who comes second finds the table
        self._made = lru_cache(_KEPT)(self._make)

    def num_packs(self, grown: Grown = ()) -> int:
        """Return the packs of all epochs.

        Args:
            grown: parts of the epochs that have begun, as a position has them.

        Raises:
            SettingError: there is no last epoch.
            SourceError: the store is damaged, or isn't there yet and isn't being written.
        """
        if self._stream.epochs is None:
            raise SettingError(
                "epochs without end have no number of packs; pass epochs, or count steps yourself"
            )
        position: Position | None = Position(grown=grown)
        total = 0
        while (position := self._next(position)) is not None:
            total += self.epoch(position.epoch, position.num_parts).num_packs
            position = replace(position, group=self._num_groups(position))
        return total

    def find(self, number: int, grown: Grown = ()) -> tuple[Position, bool]:
        """Return where a pack stands, counted over all epochs, and whether it is there; if not, where they end.

        Args:
            number: of the pack, from 0.
            grown: parts of the epochs that have begun, as a position has them; others hold what the store has.

        Raises:
            SourceError: the store is damaged, or isn't there yet and isn't being written.

        Cost: the tables of the epochs before, unless they were made before.
        """
        return self._walk(Position(grown=grown), number)

    def skip(self, position: Position, count: int) -> Position:
        """Return the position so many packs behind another one; behind the last pack, where they end.

        Args:
            position: of the stream.
            count: packs to leave out.

        Raises:
            SourceError: the store is damaged, or isn't there yet and isn't being written.

        Cost: the tables of the epochs from there, unless they were made before.
        """
        return self._walk(position, count)[0]

    def _walk(self, position: Position, count: int) -> tuple[Position, bool]:
        """Return the position so many packs behind another one, and whether a pack is there."""
        end = self._stream.begun(position)
        barren = False
        while (here := self._next(end)) is not None:
            table = self.epoch(here.epoch, here.num_parts)
            before = table.number(here)
            if count < table.num_packs - before:
                group, window, pack = table.find(before + count)
                return replace(here, group=group, window=window, pack=pack), True
            count -= table.num_packs - before
            end = replace(here, group=self._num_groups(here), window=0, pack=0)
            if table.num_packs == 0 and barren:
                break  # epochs without packs, without end
            barren = table.num_packs == 0
        return end, False

    def _next(self, position: Position | None) -> Position | None:
        return None if position is None else self._stream.at_window(position)

    def _num_groups(self, position: Position) -> int:
        return self._stream.windows.num_groups(position.num_parts)

    def epoch(self, epoch: int, num_parts: int) -> EpochTable:
        """Return the table of an epoch: found, or made and kept.

        Args:
            epoch: from 0.
            num_parts: parts of the store that it holds.

        Raises:
            SourceError: the store is damaged, or isn't there yet and isn't being written.
        """
        # In the order of the store all epochs are alike.
        one = 0 if self._stream.windows.settings.seed is None else epoch
        with self._making:
            return self._made(one, num_parts)

    def _make(self, epoch: int, num_parts: int) -> EpochTable:
        windows = self._stream.windows
        counts = [windows.num_windows(group, num_parts) for group in range(windows.num_groups(num_parts))]
        groups = np.cumsum([0, *counts])
        settings = windows.settings
        kept = KeptTable(
            [windows.store],
            [num_parts],
            [windows.parts_a_group, WINDOWS_A_GROUP, PACKS_A_GROUP, epoch, asdict(settings)],
        )
        found = kept.read(
            lambda packs: (
                packs.shape == (int(groups[-1]) + 1,) and packs[0] == 0 and bool((np.diff(packs) >= 0).all())
            )
        )
        if found is not None:
            return EpochTable(groups=groups, packs=found)
        places = np.stack(
            [
                np.repeat(np.arange(len(counts)), counts),
                np.arange(groups[-1]) - np.repeat(groups[:-1], counts),
            ]
        )
        packs = np.zeros(int(groups[-1]) + 1, dtype=np.int64)
        packs[1:] = self._count(epoch, num_parts, places)
        np.cumsum(packs, out=packs)
        kept.write(packs)
        return EpochTable(groups=groups, packs=packs)

    def _count(self, epoch: int, num_parts: int, places: IntArray) -> IntArray:
        """Return the packs of windows, each given by its group and its number there."""
        threads = self._threads if places.shape[1] * self._stream.windows.settings.window >= _MANY else 1
        runs = np.array_split(places, _RUNS * threads if threads > 1 else 1, axis=1)

        def count(run: IntArray) -> IntArray:
            found = [self._packs(epoch, group, window, num_parts) for group, window in run.T.tolist()]
            return np.array(found, dtype=np.int64)

        if threads == 1:
            return count(places)
        executor = ThreadPoolExecutor(threads, thread_name_prefix="varlen-table")
        try:
            # Kernels, sorting and copying let other threads run.
            futures = [executor.submit(count, run) for run in runs]
            return np.concatenate([_result(future, count, run) for future, run in zip(futures, runs)])
        finally:
            executor.shutdown(cancel_futures=True)

    def _packs(self, epoch: int, group: int, window: int, num_parts: int) -> int:
        windows = self._stream.windows
        lengths = windows.store.lengths(*windows.documents(epoch, group, window, num_parts))
        return count_window(lengths, windows.settings)


def _result(future: Future[IntArray], count: Callable[[IntArray], IntArray], run: IntArray) -> IntArray:
    """Return what a thread has counted, or count it here.

    Raises:
        SourceError: the store is damaged, and wasn't just renamed while several threads read it.
    """
    try:
        return future.result()
    except SourceError:
        return count(run)


def count_window(lengths: IntArray, settings: WindowSettings) -> int:
    """Return how many packs a window of documents gives.

    Args:
        lengths: int64 `[documents]`.
        settings: how they are packed.
    """
    return count_packs(
        lengths,
        capacity=settings.capacity,
        method=settings.method,
        overlong=settings.overlong,
        max_documents=settings.max_documents,
        document_multiple_of=settings.document_multiple_of,
    )
