"""Who is missing: what ends one process of a job is told to the others, and whoever was killed is named by them.

Every process that fails leaves a note in the job's store; one that was killed can't. So whoever finds a group broken
waits a moment for the notes of others, and names those without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from varlen.errors import WorkerDiedError

_BROKEN = ("gloo", "nccl", "connection closed", "connection reset", "timed out")
"""How PyTorch words that the group is broken: gloo raises a bare RuntimeError."""
_ANSWER_S = 5.0
"""A process that is alive says so within this time after the group broke."""
_WAITS, _LOST = "waits", "lost "
_MOST_CHARACTERS = 500
"""Of a note: an error's own message may hold a whole traceback."""


class PeerLostError(WorkerDiedError):
    """Nothing comes any more from the one process at the other end of a channel."""

    def __init__(self, rank: int, said: str) -> None:
        """Name it.

        Args:
            rank: of the process that is silent.
            said: what the connection said.
        """
        super().__init__(f"nothing comes from rank {rank} any more: {said}")
        self.rank = rank


def _numbered(rank: int) -> str:
    return f"rank {rank}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Notes:
    """Notes that the processes of a job leave for each other."""

    store: Any
    """Of torch.distributed; None where there is one process."""
    rank: int
    world_size: int
    name_of: Callable[[int], str] = _numbered
    """What people call a rank."""

    def leave(self, note: str) -> None:
        """Say how this process ended; where the store is gone too, nobody hears it."""
        with suppress(Exception):
            self.store.set(f"ended {self.rank}", note[:_MOST_CHARACTERS])

    def of(self, rank: int) -> str | None:
        """Return how another process ended; None while it has said nothing.

        Args:
            rank: of the other.
        """
        with suppress(Exception):
            if self.store.check([f"ended {rank}"]):
                return str(self.store.get(f"ended {rank}").decode())
        return None


@contextmanager
def naming_the_missing(notes: Notes, way_out: str) -> Iterator[None]:
    """Say which process is gone, where its absence broke the group.

    Args:
        notes: of the job.
        way_out: what to do about it.

    Raises:
        WorkerDiedError: another process is gone, or failed.
    """
    try:
        yield
    except BaseException as error:
        if notes.world_size == 1:
            raise
        peer = error.rank if isinstance(error, PeerLostError) else None
        is_broken = peer is not None or _is_of_the_group(error)
        notes.leave((_WAITS if peer is None else f"{_LOST}{peer}") if is_broken else _told(error))
        if not is_broken:
            raise
        silent, failed = _others(notes) if peer is None else _cause(notes, peer)
        if not silent and not failed:
            raise
        raise WorkerDiedError(_epitaph(notes, silent, failed, way_out)) from error


def _told(error: BaseException) -> str:
    """An error as others hear of it."""
    where = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}{where}"


def _is_of_the_group(error: BaseException) -> bool:
    """Return whether it was the connection that failed, and nothing of this process's own."""
    said = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in said for word in _BROKEN)
    )


def _cause(notes: Notes, peer: int) -> tuple[list[int], list[tuple[int, str]]]:
    """Return the process that began it: the silent one, or whom that one lost in turn, or who failed by itself.

    So a process that is busy and hasn't noticed yet is not taken for one that is gone.
    """
    followed = {notes.rank}
    end = time.monotonic() + _ANSWER_S
    while time.monotonic() < end:
        note = notes.of(peer)
        if note is None:
            time.sleep(0.02)
        elif note.startswith(_LOST) and int(note[len(_LOST) :]) not in followed:
            followed.add(peer)
            peer, end = int(note[len(_LOST) :]), time.monotonic() + _ANSWER_S
        elif note == _WAITS or note.startswith(_LOST):
            return _others(notes)
        else:
            return [], [(peer, note)]
    return [peer], []


def _others(notes: Notes) -> tuple[list[int], list[tuple[int, str]]]:
    """Return the processes that left no note, and those that failed by themselves."""
    end = time.monotonic() + _ANSWER_S
    missing = [rank for rank in range(notes.world_size) if rank != notes.rank]
    failed: list[tuple[int, str]] = []
    while missing and not failed and time.monotonic() < end:
        for rank in list(missing):
            note = notes.of(rank)
            if note is not None:
                missing.remove(rank)
                if note != _WAITS and not note.startswith(_LOST):
                    failed.append((rank, note))
        time.sleep(0.02)
    return ([], failed) if failed else (missing, [])


def _epitaph(notes: Notes, silent: Sequence[int], failed: Sequence[tuple[int, str]], way_out: str) -> str:
    gone = [f"{notes.name_of(rank)} failed ({note})" for rank, note in failed]
    gone += [f"{notes.name_of(rank)} is gone (killed, stuck, or out of memory)" for rank in silent]
    return (
        f"{' and '.join(gone)}, one of {notes.world_size:,} processes, and the others can't go on; {way_out}"
    )
