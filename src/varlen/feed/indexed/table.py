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

import hashlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from varlen import __version__
from varlen.errors import SettingError, SourceError
from varlen.feed.indexed.stream import Grown, PackStream, Position
from varlen.feed.indexed.windows import PACKS_A_GROUP, WINDOWS_A_GROUP, WindowSettings
from varlen.files.ours import is_there, unfinished
from varlen.pack.window import count_packs
from varlen.regular import open_regular
from varlen.store.tokens import TokenDocuments
from varlen.text.tokenizer import digest
from varlen.types import IntArray
from varlen.workers.processors import processors

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
        self._stream, self._threads = stream, threads or min(processors(), _MOST_THREADS)
        self._making = threading.Lock()  # who comes second finds the table
        self._made = lru_cache(_KEPT)(self._make)

    def num_packs(self, grown: Grown = ()) -> int:
        """Return the packs of all epochs."""
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

        Cost: the tables of the epochs before, unless they were made before.
        """
        return self._walk(Position(grown=grown), number)

    def skip(self, position: Position, count: int) -> Position:
        """Return the position so many packs behind another one; behind the last pack, where they end.

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
        """Return the table of an epoch: found, or made and kept."""
        # In the order of the store all epochs are alike.
        one = 0 if self._stream.windows.settings.seed is None else epoch
        with self._making:
            return self._made(one, num_parts)

    def _make(self, epoch: int, num_parts: int) -> EpochTable:
        windows = self._stream.windows
        counts = [windows.num_windows(group, num_parts) for group in range(windows.num_groups(num_parts))]
        groups = np.cumsum([0, *counts])
        settings = windows.settings
        kept = CachedTable(
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
    """Return what a thread has counted, or count it here."""
    try:
        return future.result()
    except SourceError:
        return count(run)


def count_window(lengths: IntArray, settings: WindowSettings) -> int:
    """Return how many packs a window of documents gives.

    Args:
        lengths: int64 `[documents]`.
    """
    return count_packs(
        lengths,
        capacity=settings.capacity,
        method=settings.method,
        overlong=settings.overlong,
        max_documents=settings.max_documents,
        document_multiple_of=settings.document_multiple_of,
    )


# Tables that are kept for the next time: beside the data, else in the user's cache folder, else in memory alone.
#
# What a table depends on is in the name of its file, which has our mark and the SHA-256 of the numbers before
# them: so one that is found is right, or is no table at all. One of ours that is damaged is written anew;
# what somebody has laid there stays.

_MARK = b"varlen t"
_HEAD_BYTES = len(_MARK) + 32


class CachedTable:
    """Where a table of int64 is kept, if anywhere."""

    def __init__(self, stores: Sequence[TokenDocuments], num_parts: Sequence[int], depends_on: Any) -> None:
        marks = [store.fingerprint_at(parts) for store, parts in zip(stores, num_parts)]
        folders = [stores[0].tables, _cache_folder()]
        if None in marks:
            folders = []  # the data has no name
        told = json.dumps([__version__, marks, *num_parts, depends_on], sort_keys=True)
        self._paths = [folder / f"{digest(told)}.table" for folder in folders if folder is not None]

    def read(self, is_right: Callable[[IntArray], bool], columns: int | None = None) -> IntArray | None:
        """Return the table; None where there is none, or a damaged one."""
        for path in self._paths:
            try:
                with open(path, "rb", opener=open_regular) as file:
                    content = file.read()
            except (OSError, MemoryError):
                continue
            said, body = content[:_HEAD_BYTES], content[_HEAD_BYTES:]
            if len(body) % (8 * (columns or 1)) or _MARK + hashlib.sha256(body).digest() != said:
                continue
            table: IntArray = np.frombuffer(body, dtype="<i8").astype(np.int64)
            if columns is not None:
                table = table.reshape(-1, columns)
            if is_right(table):
                return table
        return None

    def write(self, table: IntArray) -> None:
        """Keep it whole, or not at all, where that can be done."""
        any(_write(path, table) for path in self._paths)


def _cache_folder() -> Path | None:
    """Return where tables go that can't lie beside their index."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    except RuntimeError:  # a user without a home
        return None
    return Path(home) / "varlen" / "tables"


def _write(path: Path, table: IntArray) -> bool:
    """Write a table whole or not at all; returns whether it was."""
    if is_there(path) and not _is_ours(path):
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = unfinished(path)
        try:
            content = table.astype("<i8").tobytes()
            part.write_bytes(_MARK + hashlib.sha256(content).digest() + content)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _is_ours(path: Path) -> bool:
    """Return whether a file carries our mark, or nothing; a link doesn't."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            return not path.is_symlink() and file.read(len(_MARK)) in (_MARK, b"")
    except OSError:
        return False
