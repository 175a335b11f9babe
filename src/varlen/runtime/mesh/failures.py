"""Find out which process of a job failed, so that all others name it and its error.

A process that fails leaves a note in the job's store; one that was killed can't. So a process that finds its group
broken waits a moment for the notes of the others, and names those without a note. A process that waits for another
for long repeatedly notes that too, by a thread; the one that is waited for and waits for none is stuck.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from varlen.errors import WorkerDiedError

_BROKEN = ("gloo", "nccl", "connection closed", "connection reset", "timed out")
"""How PyTorch words that the group is broken: gloo raises a bare RuntimeError."""
GRACE_S = 8.0  # seconds within which a live process leaves a note after the group broke
_WAITS, _LOST = "waits", "lost "
_ALL = -1  # instead of a rank: waits for all, in a collective
_SLOW = (
    "no process is known to have failed, and all wait: one was slower than the deadline (deadline_s; run.timeout_s "
    "of varlen train), or the network failed"
)
_MOST_CHARACTERS = 500  # longest note; an error's message may hold a whole traceback


class PeerLostError(WorkerDiedError):
    """Nothing comes any more from the process at the other end of a channel, or from some of a group."""

    def __init__(self, rank: int | None, reason: str) -> None:
        super().__init__(
            f"nothing comes from {'others' if rank is None else f'rank {rank}'} any more: {reason}"
        )
        self.rank = rank


def _numbered(rank: int) -> str:
    return f"rank {rank}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Notes:
    """Notes that the processes of a job leave for each other."""

    store: Any  # of torch.distributed; None for a single process
    rank: int
    world_size: int
    name_of: Callable[[int], str] = _numbered  # a rank's name in messages
    grace_s: float = GRACE_S  # seconds to wait for another's note

    def leave(self, note: str) -> None:
        """Publish how this process ended; does nothing if the store is gone too."""
        with suppress(Exception):
            self.store.set(f"ended {self.rank}", note[:_MOST_CHARACTERS])

    def of(self, rank: int) -> str | None:
        """Return how another process ended; None until it leaves a note."""
        return self._note(f"ended {rank}")

    def awaited_by(self, rank: int, heard: dict[int, str]) -> int | None:
        """Return the rank that another process waits for; None if it noted none, or only before it was killed."""
        note = self._note(f"awaits {rank}") or ""
        return int(note.split()[0]) if note and note != heard.setdefault(rank, note) else None

    def note_awaited(self, rank: int | None, beat: int = 0) -> None:
        """Note the rank that this process waits for; None for none."""
        with suppress(Exception):
            self.store.set(f"awaits {self.rank}", "" if rank is None else f"{rank} {beat}")

    def await_readers(self, gone: Collection[int]) -> None:
        """Acknowledge the other ranks' notes; the first rank, which holds the store, waits for all to do so."""
        with suppress(Exception):
            self.store.set(f"read {self.rank}", "")
            if self.rank == 0:
                readers = [f"read {rank}" for rank in range(1, self.world_size) if rank not in gone]
                end = time.monotonic() + self.grace_s
                while readers and not self.store.check(readers) and time.monotonic() < end:
                    time.sleep(0.02)

    def are_lost(self) -> bool:
        """Whether the store is gone: its process has ended, and the notes went with it."""
        try:
            self.store.check(["ended"])
        except Exception:
            return True
        return False

    def _note(self, key: str) -> str | None:
        with suppress(Exception):
            if self.store.check([key]):
                return str(self.store.get(key).decode())
        return None


class WaitReporter:
    """Reports to the job's store which rank this process waits for, if for more than a moment.

    On CUDA the device waits for messages, and the host goes on until CUDA's queue of launches is full, where nothing
    in Python ends its wait. So this thread looks at these messages, and gives up what has not come in time.
    """

    def __init__(
        self,
        notes: Notes,
        *,
        every_s: float = 0.25,
        timeout_s: float = math.inf,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the thread.

        Args:
            timeout_s: how long the device may wait for a message.
            give_up: ends the waits of the device, and so those of the host for it; called in the thread.
        """
        self._notes, self._every_s = notes, every_s
        self._timeout_s, self._give_up = timeout_s, give_up
        self._wait: tuple[int, object] | None = None
        self._watched: deque[tuple[int, Any, float]] = deque()
        self._lost: int | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._report, name="varlen wait reporter", daemon=True)
        if notes.world_size > 1:
            self._thread.start()

    def watch(self, rank: int, work: Any) -> None:
        """Give up unless the work of a message from a rank is completed in time."""
        self._watched.append((rank, work, time.monotonic() + self._timeout_s))

    def check(self) -> None:
        """Raise the error of a message that has not come in time."""
        if self._lost is not None:
            raise PeerLostError(self._lost, f"the device has waited for {self._timeout_s:,.1f} s")

    @contextmanager
    def waiting(self, rank: int | None = None) -> Iterator[None]:
        """Wait for another process."""
        before, self._wait = self._wait, (_ALL if rank is None else rank, object())
        try:
            yield
        finally:
            self._wait = before

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()

    def _report(self) -> None:
        seen: tuple[int, object] | None = None
        beat = noted = 0
        while not self._closed.wait(self._every_s):
            wait, beat = self._wait, beat + 1
            if wait is not None and wait is seen:
                self._notes.note_awaited(wait[0], beat)
                noted = beat
            elif noted:
                self._notes.note_awaited(None)
                noted = 0
            seen = wait
            self._look_at_messages()

    def _look_at_messages(self) -> None:
        while self._watched and self._watched[0][1].is_completed():
            self._watched.popleft()
        if self._lost is None and self._watched and time.monotonic() > self._watched[0][2]:
            self._lost = self._watched[0][0]
            self._give_up()


@contextmanager
def naming_the_missing(notes: Notes, way_out: str) -> Iterator[None]:
    """Raise an error that names the missing process, where its absence broke the group."""
    try:
        yield
    except BaseException as error:
        if notes.world_size == 1:
            raise
        peer = error.rank if isinstance(error, PeerLostError) else None
        is_broken = isinstance(error, PeerLostError) or _is_of_the_group(error)
        notes.leave((_WAITS if peer is None else f"{_LOST}{peer}") if is_broken else _error_note(error))
        if not is_broken:
            raise
        silent, failed = _others(notes) if peer is None else _cause(notes, peer)
        notes.await_readers({*silent, *(rank for rank, _ in failed)})
        if not silent and not failed:
            raise WorkerDiedError(
                f"the process group is broken ({_error_note(error)}): {_SLOW}; {way_out}"
            ) from error
        if len(silent) > 1 and notes.are_lost():
            raise WorkerDiedError(
                f"the process group is broken ({_error_note(error)}), and the process that keeps the job's store has "
                f"ended, so that the cause can't be read here; read the last message of {notes.name_of(0)}, or start "
                f"the processes by torchrun, which keeps the store itself; {way_out}"
            ) from error
        raise WorkerDiedError(_death_message(notes, silent, failed, way_out)) from error


def _error_note(error: BaseException) -> str:
    """Return an error as other ranks read it."""
    where = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}{where}"


def _is_of_the_group(error: BaseException) -> bool:
    """Return whether the connection failed, and not this process itself."""
    message = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in message for word in _BROKEN)
    )


def _cause(notes: Notes, peer: int) -> tuple[list[int], list[tuple[int, str]]]:
    """Return the first process that failed: the one without a note, or the one that it lost in turn.

    So a process that is busy and hasn't noticed yet is not taken for one that is gone.
    """
    followed, heard = {notes.rank}, dict[int, str]()
    end = time.monotonic() + notes.grace_s
    while time.monotonic() < end:
        note = notes.of(peer)
        following = notes.awaited_by(peer, heard) if note is None else _ALL
        if note is not None and note != _WAITS and not note.startswith(_LOST):
            return [], [(peer, note)]
        if note is not None and note.startswith(_LOST):
            following = int(note[len(_LOST) :])
        if following is None:
            time.sleep(0.02)
        elif following == _ALL or following in followed:
            return _others(notes)
        else:
            followed.add(peer)
            peer = following
    return [peer], []


def _others(notes: Notes) -> tuple[list[int], list[tuple[int, str]]]:
    """Return ranks that left no note and wait for none, and those that failed themselves."""
    end = time.monotonic() + notes.grace_s
    missing = [rank for rank in range(notes.world_size) if rank != notes.rank]
    failed: list[tuple[int, str]] = []
    waiting, heard = set[int](), dict[int, str]()
    while missing and not failed and time.monotonic() < end:
        for rank in list(missing):
            note = notes.of(rank)
            if note is not None:
                missing.remove(rank)
                if note != _WAITS and not note.startswith(_LOST):
                    failed.append((rank, note))
            elif notes.awaited_by(rank, heard) is not None:
                waiting.add(rank)
        time.sleep(0.02)
    return ([], failed) if failed else ([rank for rank in missing if rank not in waiting], [])


def wait_until(is_done: Callable[[], bool], notes: Notes, timeout_s: float) -> None:
    """Wait for the device, which itself waits for messages of others, and check whether one of them has ended."""
    end = time.monotonic() + timeout_s
    look = time.monotonic() + 1.0
    while not is_done():
        now = time.monotonic()
        if now > end:
            raise PeerLostError(None, f"the device has waited for {timeout_s:,.0f} s")
        if now > look:
            look = now + 1.0
            ended = [r for r in range(notes.world_size) if r != notes.rank and notes.of(r) is not None]
            if ended:
                raise PeerLostError(ended[0], "it has ended")
        time.sleep(0.0005)


def _death_message(
    notes: Notes, silent: Sequence[int], failed: Sequence[tuple[int, str]], way_out: str
) -> str:
    gone = [f"{notes.name_of(rank)} failed ({note})" for rank, note in failed]
    gone += [f"{notes.name_of(rank)} is gone (killed, stuck, or out of memory)" for rank in silent]
    count = "one" if len(gone) == 1 else f"{len(gone):,}"
    return f"{' and '.join(gone)}, {count} of {notes.world_size:,} processes, and the others can't go on; {way_out}"
