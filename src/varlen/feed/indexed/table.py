"""The window table: the number of packs before each window of an epoch, by which any step is found directly.

::

    windows of the epoch    0     1     2   | 3     4          groups one after the other
    packs before            0    91   180     270   355   442  int64, 8 bytes per window

A table is built on first use, by counting the packs of every window, at several million documents per second and
processor. It is saved beside the index, else in the user's cache folder, else kept only in memory. It isn't built in
advance in the background: the first use would wait all the same, and jobs that never use it would pay for it. The
file's name is a hash of everything that the table depends on, so a table that is found is valid; a damaged one is
built again. With a shuffle, each epoch has its own table.
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
from varlen.feed.indexed.windows import PACKS_A_GROUP, WINDOWS_A_GROUP
from varlen.files.ours import atomic_file, is_there
from varlen.pack.window import count_packs
from varlen.regular import open_regular
from varlen.store.tokens import TokenDocuments
from varlen.text.tokenizer import digest
from varlen.types import IntArray
from varlen.workers.processors import processors

_TABLES_IN_MEMORY = 4
_MOST_THREADS = 8
_MIN_PARALLEL = 1 << 20
"""Documents from which on several threads count; for fewer, starting threads takes longer than counting."""
_RUNS_PER_THREAD = 32
"""Tasks per thread: many, so that all threads end at about the same time, and soon after Ctrl-C."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpochTable:
    """The positions of one epoch's packs."""

    groups: IntArray
    """int64 `[groups + 1]`: windows before each group."""
    packs: IntArray
    """int64 `[windows + 1]`: packs before each window."""

    @property
    def num_packs(self) -> int:
        """Number of packs of the epoch."""
        return int(self.packs[-1])

    def number(self, position: Position) -> int:
        """Return the number of packs of the epoch before a position."""
        if position.group >= len(self.groups) - 1:
            return self.num_packs
        window = int(self.groups[position.group]) + position.window
        if window >= int(self.groups[position.group + 1]):  # after the group's last window
            return int(self.packs[self.groups[position.group + 1]])
        return int(self.packs[window]) + position.pack

    def find(self, number: int) -> tuple[int, int, int]:
        """Return the group, the window in the group, and the index in the window, of the epoch's pack `number`."""
        window = int(np.searchsorted(self.packs, number, side="right")) - 1
        group = int(np.searchsorted(self.groups, window, side="right")) - 1
        return group, window - int(self.groups[group]), number - int(self.packs[window])


class WindowTable:
    """The tables of all epochs of a stream, built on demand."""

    def __init__(self, stream: PackStream, threads: int | None = None) -> None:
        self._stream, self._threads = stream, threads or min(processors(), _MOST_THREADS)
        self._making = threading.Lock()  # a second caller waits, and then finds the table
        self._made = lru_cache(_TABLES_IN_MEMORY)(self._make)

    def num_packs(self, grown: Grown = ()) -> int:
        """Return the number of packs of all epochs."""
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
        """Return the position of pack `number`, counted over all epochs, and True; (the end, False) if there is none.

        Cost: building the tables of the epochs before it, unless they exist.
        """
        return self._walk(Position(grown=grown), number)

    def skip(self, position: Position, count: int) -> Position:
        """Return the position `count` packs after another one; the end if there are fewer packs.

        Cost: building the tables of the epochs that are passed, unless they exist.
        """
        return self._walk(position, count)[0]

    def _walk(self, position: Position, count: int) -> tuple[Position, bool]:
        """Return the position `count` packs after another one, and whether a pack begins there."""
        end = self._stream.with_parts(position)
        was_empty = False
        while (here := self._next(end)) is not None:
            table = self.epoch(here.epoch, here.num_parts)
            before = table.number(here)
            if count < table.num_packs - before:
                group, window, pack = table.find(before + count)
                return replace(here, group=group, window=window, pack=pack), True
            count -= table.num_packs - before
            end = replace(here, group=self._num_groups(here), window=0, pack=0)
            if table.num_packs == 0 and was_empty:
                break  # all further epochs are empty too
            was_empty = table.num_packs == 0
        return end, False

    def _next(self, position: Position | None) -> Position | None:
        return None if position is None else self._stream.at_window(position)

    def _num_groups(self, position: Position) -> int:
        return self._stream.windows.num_groups(position.num_parts)

    def epoch(self, epoch: int, num_parts: int) -> EpochTable:
        """Return the table of an epoch; builds and saves it if it doesn't exist."""
        # Without a shuffle, all epochs share one table.
        key = 0 if self._stream.windows.settings.seed is None else epoch
        with self._making:
            return self._made(key, num_parts)

    def _make(self, epoch: int, num_parts: int) -> EpochTable:
        windows = self._stream.windows
        counts = [windows.num_windows(group, num_parts) for group in range(windows.num_groups(num_parts))]
        groups = np.cumsum([0, *counts])
        settings = windows.settings
        cached = CachedTable(
            [windows.store],
            [num_parts],
            [windows.parts_a_group, WINDOWS_A_GROUP, PACKS_A_GROUP, epoch, asdict(settings)],
        )
        packs = cached.read(
            lambda packs: (
                packs.shape == (int(groups[-1]) + 1,) and packs[0] == 0 and bool((np.diff(packs) >= 0).all())
            )
        )
        if packs is not None:
            return EpochTable(groups=groups, packs=packs)
        windows_of_groups = np.stack(
            [
                np.repeat(np.arange(len(counts)), counts),
                np.arange(groups[-1]) - np.repeat(groups[:-1], counts),
            ]
        )
        packs = np.zeros(int(groups[-1]) + 1, dtype=np.int64)
        packs[1:] = self._count(epoch, num_parts, windows_of_groups)
        np.cumsum(packs, out=packs)
        cached.write(packs)
        return EpochTable(groups=groups, packs=packs)

    def _count(self, epoch: int, num_parts: int, windows: IntArray) -> IntArray:
        """Return the number of packs of each window; `windows` is `[2, windows]`: group, and number in the group."""
        documents = windows.shape[1] * self._stream.windows.settings.window
        threads = self._threads if documents >= _MIN_PARALLEL else 1

        def count(run: IntArray) -> IntArray:
            counts = [self._packs(epoch, group, window, num_parts) for group, window in run.T.tolist()]
            return np.array(counts, dtype=np.int64)

        if threads == 1:
            return count(windows)
        runs = np.array_split(windows, _RUNS_PER_THREAD * threads, axis=1)
        executor = ThreadPoolExecutor(threads, thread_name_prefix="varlen-table")
        try:
            # Kernels, sorting and copying release the interpreter lock.
            futures = [executor.submit(count, run) for run in runs]
            return np.concatenate([_result(future, count, run) for future, run in zip(futures, runs)])
        finally:
            executor.shutdown(cancel_futures=True)

    def _packs(self, epoch: int, group: int, window: int, num_parts: int) -> int:
        windows = self._stream.windows
        lengths = windows.store.lengths(*windows.documents(epoch, group, window, num_parts))
        return count_packs(lengths, **windows.settings.packing)


def _result(future: Future[IntArray], count: Callable[[IntArray], IntArray], run: IntArray) -> IntArray:
    """Return a thread's counts; if it couldn't read the store, count again in this thread."""
    try:
        return future.result()
    except SourceError:
        return count(run)


# Table files: beside the data, or else in the user's cache folder.
#
# A file's name is a hash of everything that the table depends on. Its content is a mark, the SHA-256 of the numbers,
# and the numbers, so a damaged table is recognized, and written again. A file without the mark isn't a table, and is
# never replaced.

_MARK = b"varlen t"
_HEAD_BYTES = len(_MARK) + 32


class CachedTable:
    """An int64 table in a file, where its data has a fingerprint and a folder can be written."""

    def __init__(self, stores: Sequence[TokenDocuments], num_parts: Sequence[int], depends_on: Any) -> None:
        marks = [store.fingerprint_at(parts) for store, parts in zip(stores, num_parts)]
        folders = [stores[0].tables, _cache_folder()]
        if None in marks:
            folders = []  # the data has no fingerprint
        key = digest(json.dumps([__version__, marks, *num_parts, depends_on], sort_keys=True))
        self._paths = [folder / f"{key}.table" for folder in folders if folder is not None]

    def read(self, is_right: Callable[[IntArray], bool], columns: int | None = None) -> IntArray | None:
        """Return the table; None if there is none, or it is damaged."""
        for path in self._paths:
            try:
                with open(path, "rb", opener=open_regular) as file:
                    content = file.read()
            except (OSError, MemoryError):
                continue
            head, body = content[:_HEAD_BYTES], content[_HEAD_BYTES:]
            if len(body) % (8 * (columns or 1)) or _MARK + hashlib.sha256(body).digest() != head:
                continue
            table: IntArray = np.frombuffer(body, dtype="<i8").astype(np.int64)
            if columns is not None:
                table = table.reshape(-1, columns)
            if is_right(table):
                return table
        return None

    def write(self, table: IntArray) -> None:
        """Write the table to the first path that accepts it; atomic, and without an error if none does."""
        any(_write(path, table) for path in self._paths)


def _cache_folder() -> Path | None:
    """Return the folder of tables that can't be written beside their index."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    except RuntimeError:  # a user without a home
        return None
    return Path(home) / "varlen" / "tables"


def _write(path: Path, table: IntArray) -> bool:
    """Write a table atomically; returns whether it was written."""
    if is_there(path) and not _is_ours(path):
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = table.astype("<i8").tobytes()
        with atomic_file(path, is_synced=False) as part:
            part.write_bytes(_MARK + hashlib.sha256(content).digest() + content)
    except OSError:
        return False
    return True


def _is_ours(path: Path) -> bool:
    """Return whether a path is a regular file, not a link, that begins with the mark or is empty."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            return not path.is_symlink() and file.read(len(_MARK)) in (_MARK, b"")
    except OSError:
        return False
