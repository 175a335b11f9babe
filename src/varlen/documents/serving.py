"""Rows of iterables, possibly endless, served one by one over a socket while they are read.

::

    the trainer's process                                   the reader: the loader's thread or its worker process
      iterable ─► pass 0: rows ─► JSON lines ─► socket ─►     a file of unknown size that can't be cut
               ─► pass 1: ...                                 (each opening of the file is a pass, from the first row)

The iterable stays in its process and is consumed at the reader's speed: the socket buffers a few hundred KB, and no
disk is used. Each epoch is a pass, and so is resuming from a state, which reads again up to its position. Lines
are hashed while they are read (`formats.jsonl`), and a state holds the hash of the rows before it, so that resuming
with an iterable of other rows raises.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from varlen.counts import many
from varlen.documents.resource import Resource
from varlen.documents.row_text import first_rows, raised_by_rows, row_line, used_columns
from varlen.errors import SourceError, described
from varlen.files.paths import END, FAILED, Live
from varlen.workers.child import await_end

_SENT_BYTES, _SENT_S = 64 << 10, 0.05  # rows are sent in batches of so many bytes, or after so many seconds
_GRACE_S = 5.0


class Serving(Resource):
    """A local socket that serves the rows of an iterable until it is released."""

    def __init__(
        self, begin: Callable[[], Any], where: str, columns: Mapping[str, str], *, is_once: bool
    ) -> None:
        """Begin the first pass, and inspect its first rows."""
        self._passes = passes = _Passes(begin=begin, where=where, is_once=is_once)
        names = passes.peeked()
        passes.used = used_columns(names, columns, where)
        self.live = Live(names=names, is_once=is_once)
        self._folder = Path(tempfile.mkdtemp(prefix="varlen-"))
        self.path = self._folder / "rows"
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(self.path))
            listener.listen()
        except OSError:
            listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        passes.listener = listener
        thread = threading.Thread(target=_accept, args=(passes,), name="varlen rows", daemon=True)
        passes.threads.append(thread)
        super().__init__(_stop, passes, self._folder, os.getpid())
        thread.start()


@dataclass(kw_only=True, slots=True, eq=False)
class _Passes:
    """The passes over an iterable, and their readers."""

    begin: Callable[[], Any]
    where: str
    is_once: bool
    used: frozenset[str] = frozenset()
    listener: socket.socket | None = None
    # Resource while a row is requested: the iterable is never called concurrently.
    lock: threading.Lock = field(default_factory=threading.Lock)
    readers: set[socket.socket] = field(default_factory=set)
    threads: list[threading.Thread] = field(default_factory=list)
    begun: int = 0
    has_rows: bool = False
    last: Any = None  # the iterator of the previous pass
    waiting: Iterator[Any] | None = None  # the first pass, until it is read
    is_over: bool = False

    def peeked(self) -> tuple[tuple[str, ...], ...]:
        """Return the keys of the first rows that have any; the rows are kept for the first reader."""
        rows = self._next_pass()
        seen, names = first_rows(rows)
        if not seen:
            raise SourceError(f"{self.where} holds no row; pass some")
        if not names:
            raise SourceError(
                f"{self.where} gives no mapping with named fields among {many(len(seen), 'row')}"
            )
        self.waiting = _chained(seen, rows)
        return names

    def next_pass(self) -> Iterator[Any]:
        with self.lock:
            if self.waiting is not None:
                rows, self.waiting = self.waiting, None
                return rows
        return self._next_pass()

    def _next_pass(self) -> Iterator[Any]:
        if self.is_once and self.begun:
            raise SourceError(
                f"{self.where} can be iterated over only once, but must be read again (for another epoch, or to "
                "resume); pass a function that makes it: PackedLoader(lambda: rows(), ...)"
            )
        number, self.begun = self.begun, self.begun + 1
        try:
            iterator = iter(self.begin())
        except Exception as error:
            raise SourceError(f"{self.where} gives no iterator: {described(error, kind=True)}") from error
        if number and iterator is self.last:
            raise SourceError(
                f"{self.where} returns the same exhausted iterator again; make a new one in each call"
            )
        self.last = iterator
        return self._counted(iterator, number)

    def _counted(self, iterator: Iterator[Any], number: int) -> Iterator[Any]:
        """Yield the rows of a pass; raise if a later pass has none."""
        count = 0
        for row in raised_by_rows(iterator, self.where):
            count += 1
            self.has_rows = True
            yield row
        if number and not count and self.has_rows:
            raise SourceError(
                f"{self.where} gives no row when it is iterated over again; make rows anew each time"
            )


def _chained(first: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    """Yield rows taken earlier, then the rest; close its source."""
    try:
        yield from first
        yield from rest
    finally:
        close = getattr(rest, "close", None)
        if close is not None:
            close()


def _accept(passes: _Passes) -> None:
    """Begin a pass for each connection."""
    listener = cast(socket.socket, passes.listener)
    while not passes.is_over:
        try:
            reader, _ = listener.accept()
        except OSError:
            return
        thread = threading.Thread(target=_serve, args=(passes, reader), name="varlen rows pass", daemon=True)
        passes.readers.add(reader)
        passes.threads = [*(running for running in passes.threads if running.is_alive()), thread]
        thread.start()


def _serve(passes: _Passes, reader: socket.socket) -> None:
    """Send the rows of a pass until all are sent, or the reader disconnects."""
    try:
        with closing(reader), suppress(OSError):
            try:
                _send(passes, reader)
                last = END
            except SourceError as error:
                last = FAILED + json.dumps(str(error)).encode() + b"\n"
            reader.sendall(last)
    finally:
        passes.readers.discard(reader)


def _send(passes: _Passes, reader: socket.socket) -> None:
    """Send rows in batches that are neither small nor late."""
    lines: list[str] = []
    size, sent = 0, time.monotonic()
    with closing(cast(Any, passes.next_pass())) as rows:
        try:
            while not passes.is_over:
                with passes.lock:
                    row = next(rows, END)
                if row is END:
                    return
                lines.append(row_line(row, passes.used))
                size += len(lines[-1])
                if size >= _SENT_BYTES or time.monotonic() - sent >= _SENT_S:
                    reader.sendall("".join(lines).encode())
                    lines, size, sent = [], 0, time.monotonic()
        finally:
            reader.sendall("".join(lines).encode())


def _stop(passes: _Passes, folder: Path, process: int) -> None:
    """End all passes; one that is blocked in the iterable ends when that continues."""
    if os.getpid() != process:  # a fork has no serving thread
        return
    passes.is_over = True
    ends = [passes.listener, *passes.readers]
    for end in ends:
        with suppress(OSError, AttributeError):
            cast(socket.socket, end).shutdown(socket.SHUT_RDWR)
    cast(socket.socket, passes.listener).close()
    until = time.monotonic() + _GRACE_S
    for thread in passes.threads:
        if thread is not threading.current_thread():
            await_end(thread, max(until - time.monotonic(), 0))
    passes.waiting = passes.last = None
    shutil.rmtree(folder, ignore_errors=True)
