"""Places in files that are read from their beginning: parts of row groups, chunks of files that can't be cut."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

import numpy as np

from varlen.errors import SourceError
from varlen.source.rows import PRINT, Column, Rows
from varlen.types import IntArray


class TableCursor:
    """Row groups or record batches whose rows are asked for part by part; in order they are read once."""

    def __init__(self, open_: Callable[[], Iterator[Rows]], count: Callable[[], int], is_kept: bool) -> None:
        """Take what begins to read, what counts the rows, and whether rows stay once they were read."""
        self._open, self._count, self._is_kept = open_, count, is_kept
        self._total: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._reading = self._open()
        self._held: list[Rows] = []
        self._first = self._read = 0  # rows before those held, and before those not yet read
        self._is_over = False

    def part(self, number: int, of: int) -> list[Rows]:
        """Return one of so many parts of the rows, about equal in their number.

        Faults of rows that can't be read are in the part in which these begin; those of bytes are in the one in which
        they are found, the first where rows can't be counted.
        """
        if self._total is None:
            try:
                self._total = self._count()
            except SourceError:
                return list(self._reading) if number == 0 else []
        start, stop = (self._total * n // of for n in (number, number + 1))
        if start < self._first:
            self.close()
            self._begin()
        is_last = number + 1 == of
        while self._read < stop or (is_last and not self._is_over):
            self._step(self._total)
            if not self._is_kept:
                while self._held and self._first + max(self._held[0].covers, 1) <= start:
                    self._first += self._held.pop(0).covers
        return self._between(start, stop, stop + is_last)

    def _step(self, total: int) -> None:
        some = next(self._reading, None)
        if some is None:
            self._read, self._is_over = total, True  # a fault has told of the rest
            return
        self._held.append(some)
        self._read += some.covers

    def _between(self, start: int, stop: int, stop_of_bytes: int) -> list[Rows]:
        found, at = [], self._first
        for some in self._held:
            a, b = max(start - at, 0), min(stop - at, some.covers)
            if a < b or (some.covers == 0 and start <= at < stop_of_bytes):
                found.append(_share(some, a, b) if some.covers else some)
            at += some.covers
        return found

    def close(self) -> None:
        """Close the file."""
        close = getattr(self._reading, "close", None)
        if close is not None:
            close()


def _share(rows: Rows, start: int, stop: int) -> Rows:
    """Return a part of rows by their places among those that can be read and those that can't: these come first."""
    at, faults = 0, []
    for fault in rows.faults:
        if start <= at < stop:
            faults.append(fault)
        at += fault.covers
    return rows.between(max(start - at, 0), max(stop - at, 0), tuple(faults))


class StreamCursor:
    """A file that is read from its beginning, chunk by chunk of about as many bytes."""

    def __init__(
        self, rows: Iterator[Rows], chunk_bytes: Callable[[int], int], before: StreamCursor | None = None
    ) -> None:
        """Begin to read.

        Args:
            rows: of the file.
            chunk_bytes: of the chunks that come, about, where so many were read.
            before: a cursor of the same file that has come further: chunks that it has found, in the epoch before,
                may still be wanted.
        """
        self._rows, self._chunk_bytes = rows, chunk_bytes
        self._num_bytes = 0
        self._prints = array("Q")
        """Of each chunk the hash of all rows to its end; 0 where rows have none."""
        self._chunks: dict[int, Rows] = {}
        """Those that were read and not let go of, by number."""
        self._before: dict[int, Rows] = {} if before is None else {**before._before, **before._chunks}
        self._found = self._asked = 0
        self._is_read = False
        self.error: SourceError | None = None
        """Why the file can't be read to its end."""
        self.is_over = False
        """Whether a chunk beyond the last has been asked for."""

    def has(self, number: int) -> bool:
        """Whether there is such a chunk; reads on to it."""
        self._read_to(number, number)
        self._asked = max(self._asked, number + 1)
        self.is_over = number >= self._found
        return not self.is_over

    def _read_to(self, number: int, wanted: int) -> None:
        """Read on to a chunk; those before the wanted one aren't kept."""
        while self._found <= number and not self._is_read:
            some = next(self._rows, None)
            if some is None:
                self._is_read = True
                break
            bounds, num_bytes = _chunk_bounds(some, self._chunk_bytes(self._num_bytes))
            self._num_bytes += num_bytes
            for start, stop in zip(bounds, bounds[1:]):
                self._add(some.between(start, stop, some.faults if start == 0 else ()), wanted)

    def chunk(self, number: int) -> list[Rows]:
        """Return a chunk that was found, by this cursor or the one before."""
        return [self._chunks[number] if number in self._chunks else self._before[number]]

    def lacks(self, number: int) -> bool:
        """Whether a chunk was read and isn't held any more."""
        return number < self._found and number not in self._chunks

    def print_of(self, number: int) -> str:
        """Return the hash of all rows to the end of a chunk, after reading on to it; "" where there is none."""
        self._read_to(number, number + 1)
        return f"{self._prints[number]:016x}" if number < self._found and self._prints[number] else ""

    def _add(self, chunk: Rows, wanted: int) -> None:
        """Take a chunk that was read."""
        if self._found >= wanted:
            self._chunks[self._found] = chunk
        if not len(chunk) and any(fault.number == 0 for fault in chunk.faults):
            self.error = chunk.faults[-1].raised()
        prints = chunk.columns.get(PRINT)
        before = self._prints[-1] if self._found else 0
        self._prints.append(int(prints[-1], 16) if prints else before)
        self._found += 1

    def forget(self) -> None:
        """Let go of the chunks that were asked for."""
        for number in [n for n in self._chunks if n < self._asked]:
            del self._chunks[number]
        self._before.clear()

    def close(self) -> None:
        """Close the file."""
        close = getattr(self._rows, "close", None)
        if close is not None:
            close()


def _chunk_bounds(rows: Rows, chunk_bytes: int) -> tuple[list[int], int]:
    """Return where to cut rows into chunks of about as many bytes, and the bytes of all."""
    sizes = np.zeros(len(rows), dtype=np.int64)
    for name, column in rows.columns.items():
        if name != PRINT:
            sizes += _row_sizes(column)
    chunk = (np.cumsum(sizes) - sizes) // chunk_bytes
    inner = np.flatnonzero(np.diff(chunk)) + 1
    return [0, *inner.tolist(), len(rows)], int(sizes.sum())


def _row_sizes(column: Column) -> IntArray:
    """Estimate the bytes of each of a column's values."""
    if isinstance(column, list):
        return np.fromiter(map(_value_size, column), dtype=np.int64, count=len(column))
    return np.full(len(column), column.nbytes // max(len(column), 1), dtype=np.int64)


def _value_size(value: object) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_value_size, value.values())) + 8 * len(value)
    if isinstance(value, list):
        return sum(map(_value_size, value)) + 8 * len(value)
    return 8
