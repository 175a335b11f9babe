"""`python -m varlen.feed.worker.main`: builds the batches after given states in the slots of a ring."""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Mapping
from queue import SimpleQueue
from typing import IO, Any

from varlen import jit
from varlen.batch.collate import Out
from varlen.errors import StalledError, described
from varlen.feed.protocol import Ended, Feed
from varlen.feed.spec import Spec
from varlen.feed.state import FeedState
from varlen.feed.worker.ring import Kind, Ring, Slot, ended_message
from varlen.pack.api import pack
from varlen.workers.child import receive, send

_PARENT_CHECK_S = 2.0
_SHORTEST_S, _LONGEST_S = 5e-4, 4e-3
"""Pauses between checks for a free slot."""
_SWITCH_S = 5e-4
"""Switch interval of threads. Reading and tokenizing threads need the interpreter lock briefly, between long calls
that release it; with the default of 5 ms, each would wait that long whenever another thread packs."""


class _SupersededError(Exception):
    """A newer run has been requested."""


class _Inbox:
    """Messages from the trainer's process, for the main thread."""

    def __init__(self) -> None:
        self.spec: SimpleQueue[bytes] = SimpleQueue()
        self.runs: SimpleQueue[tuple[int, FeedState]] = SimpleQueue()
        self.replies: SimpleQueue[tuple[int, str, list[Any] | None, str] | None] = SimpleQueue()
        """Replies of the other ranks: run, key, values, error message; None wakes a waiting thread to give up."""
        self.run = 0


class _Outbox:
    """Sends messages to the trainer's process; several threads use it."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def send(self, content: bytes) -> None:
        with self._lock:
            send(self._pipe, content)


class _Relay:
    """An exchange with the other ranks through the trainer's process, which is connected to them."""

    def __init__(self, inbox: _Inbox, outbox: _Outbox, run: int) -> None:
        self._inbox, self._outbox, self._run = inbox, outbox, run
        self._is_closed = False

    def all(self, key: str, mine: Mapping[int, Any]) -> dict[int, Any]:
        """Return the values of all ranks."""
        self._outbox.send(Kind.ASK + json.dumps([self._run, key, list(mine.items())]).encode())
        while not self._is_closed and self._inbox.runs.empty():
            reply = self._inbox.replies.get()
            if reply is None or reply[:2] != (self._run, key):  # a reply to an earlier run
                continue
            if reply[2] is None:
                raise StalledError(reply[3])
            return {int(lane): value for lane, value in reply[2]}
        raise StalledError("the run is over")

    def close(self) -> None:
        """Make a waiting `all` raise."""
        self._is_closed = True
        self._inbox.replies.put(None)


def main() -> None:
    """Build batches until the trainer's process ends; redirects standard output to standard error."""
    sys.setswitchinterval(_SWITCH_S)
    outbox = _Outbox(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)
    file, slots, size, has_exchange = map(int, sys.argv[1:5])
    ring, inbox = Ring(slots, size, file), _Inbox()
    pipe = os.fdopen(os.dup(0), "rb")  # a copy, as sys.stdin can't be closed at exit while a thread reads it
    threading.Thread(target=_listen, args=(pipe, inbox), daemon=True).start()
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    threading.Thread(target=_load_kernels, daemon=True).start()
    feed: Feed | None = None
    pickled = inbox.spec.get()
    while True:
        run, state = inbox.runs.get()
        while not inbox.runs.empty():
            run, state = inbox.runs.get()
        inbox.run = run
        try:
            if feed is None:
                spec: Spec = pickle.loads(pickled)
                feed = spec.open((lambda: _Relay(inbox, outbox, inbox.run)) if has_exchange else None)
                gc.freeze()
            end = _run(feed, run, state, ring, inbox, outbox)
            outbox.send(Kind.LAST + run.to_bytes(8, "little") + ended_message(end))
        except _SupersededError:
            continue
        except BrokenPipeError:
            return
        except BaseException as error:  # the trainer raises it
            outbox.send(Kind.FAILED + _pickled(run, error))


def _load_kernels() -> None:
    """Load the packing kernels while the first blocks are read and tokenized, which takes about as long."""
    jit.load()
    pack([1, 2, 3], 4, "best_fit", seed=0)


def _run(feed: Feed, run: int, state: FeedState, ring: Ring, inbox: _Inbox, outbox: _Outbox) -> Ended:
    """Build the batches that follow a state; returns the feed's `Ended`."""
    taken: list[tuple[int, Slot]] = []

    def buffers() -> Out:
        number, pause_s = ring.mark(), _SHORTEST_S
        while number is None and inbox.runs.empty():
            time.sleep(pause_s)  # polled, so that freeing a slot costs the trainer one byte written
            number, pause_s = ring.mark(), min(2 * pause_s, _LONGEST_S)
        if not inbox.runs.empty():
            if number is not None:
                ring.free(number)
            raise _SupersededError
        assert number is not None
        slot = Slot(ring.slot(number))
        taken.append((number, slot))
        return slot.arrays

    at: object = None
    batches, end = feed.batches(state, buffers), Ended()
    try:
        for made in batches:
            if isinstance(made, Ended):
                end = made
                continue
            number, slot = taken.pop()
            after = made.state
            if after.at is not at:
                at = after.at
                outbox.send(Kind.AT + json.dumps(dict(after.at)).encode())
            numbers = b"".join(n.to_bytes(8, "little") for n in (run, number, after.step, after.micro_batch))
            outbox.send(Kind.MADE + numbers + slot.message(made))
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()
        for number, _ in taken:
            ring.free(number)
    return end


def _pickled(run: int, error: BaseException) -> bytes:
    """Pickle a run and its error; an error that can't be pickled becomes a RuntimeError with its traceback."""
    try:
        content = pickle.dumps((run, error))
        pickle.loads(content)
    except Exception:
        import traceback

        text = "".join(traceback.format_exception(error))
        return pickle.dumps((run, RuntimeError(f"{described(error, kind=True)}\n{text}")))
    return content


def _listen(pipe: IO[bytes], inbox: _Inbox) -> None:
    """Receive messages; exits the process when the trainer closes the pipe."""
    try:
        while True:
            message = receive(pipe)
            kind, content = message[:4], message[4:]
            if kind == Kind.SPEC:
                inbox.spec.put(content)
            elif kind == Kind.BEGIN:
                run, step, micro_batch, at = json.loads(content)
                inbox.runs.put((run, FeedState(step=step, micro_batch=micro_batch, at=at)))
                inbox.replies.put(None)  # the other ranks start a new run too, and don't reply to the old one
            elif kind == Kind.REPLY:
                run, key, values, error_message = json.loads(content)
                inbox.replies.put((run, key, values, error_message))
    except (EOFError, OSError):
        os._exit(1)


def _watch(parent: int) -> None:
    """Exit when the trainer has died, even if a process that it forked keeps the pipe open."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)


if __name__ == "__main__":
    main()
