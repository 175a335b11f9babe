"""`python -m varlen.feed.worker.main`: makes batches into the slots of a ring, from any state that it is told."""

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
from varlen.feed.worker.ring import Ring, Slot, ended_message
from varlen.pack.api import pack
from varlen.workers.child import receive, send

_LOOK_S = 2.0
_SHORTEST_S, _LONGEST_S = 5e-4, 4e-3
"""Pauses between looks for a free slot."""
_SWITCH_S = 5e-4
"""Threads that read and tokenize need the interpreter for moments, between long calls without it. By the usual 5 ms
each of them would wait as long whenever another thread packs."""


class _SupersededError(Exception):
    """Another state is to be begun with."""


class _Desk:
    """What the trainer's process has said, for the thread that works."""

    def __init__(self) -> None:
        self.head: SimpleQueue[bytes] = SimpleQueue()
        self.runs: SimpleQueue[tuple[int, FeedState]] = SimpleQueue()
        self.answers: SimpleQueue[tuple[int, str, list[Any] | None, str] | None] = SimpleQueue()
        """What the other ranks said in a run; None where nobody is to wait for it any more."""
        self.run = 0


class _Mouth:
    """Where messages leave; several threads speak."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def say(self, content: bytes) -> None:
        with self._lock:
            send(self._pipe, content)


class _Relay:
    """Asks the other ranks by way of the trainer's process, which is in touch with them."""

    def __init__(self, desk: _Desk, mouth: _Mouth, run: int) -> None:
        self._desk, self._mouth, self._run = desk, mouth, run
        self._is_closed = False

    def all(self, key: str, mine: Mapping[int, Any]) -> dict[int, Any]:
        """Return the values of all ranks."""
        self._mouth.say(b"ask_" + json.dumps([self._run, key, list(mine.items())]).encode())
        while not self._is_closed and self._desk.runs.empty():
            answer = self._desk.answers.get()
            if answer is None or answer[:2] != (self._run, key):  # of a run before this one
                continue
            if answer[2] is None:
                raise StalledError(answer[3])
            return {int(lane): value for lane, value in answer[2]}
        raise StalledError("the run is over")

    def close(self) -> None:
        """Have whoever waits give up."""
        self._is_closed = True
        self._desk.answers.put(None)


def main() -> None:
    """Make batches until nobody wants any; what is printed goes to the standard error."""
    sys.setswitchinterval(_SWITCH_S)
    mouth = _Mouth(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)
    file, slots, size, are_several = map(int, sys.argv[1:5])
    ring, desk = Ring(slots, size, file), _Desk()
    orders = os.fdopen(os.dup(0), "rb")  # sys.stdin can't be closed at the end while it is listened to
    threading.Thread(target=_listen, args=(orders, desk), daemon=True).start()
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    threading.Thread(target=_load_kernels, daemon=True).start()
    feed: Feed | None = None
    head = desk.head.get()
    while True:
        run, state = desk.runs.get()
        while not desk.runs.empty():
            run, state = desk.runs.get()
        desk.run = run
        try:
            if feed is None:
                spec: Spec = pickle.loads(head)
                feed = spec.open((lambda _: _Relay(desk, mouth, desk.run)) if are_several else None)
                gc.freeze()
            end = _run(feed, run, state, ring, desk, mouth)
            mouth.say(b"last" + run.to_bytes(8, "little") + ended_message(end))
        except _SupersededError:
            continue
        except BrokenPipeError:
            return
        except BaseException as error:  # it belongs to the trainer
            mouth.say(b"fail" + _pickled(run, error))


def _load_kernels() -> None:
    """Load what packs, while the first blocks are read and tokenized, which takes as long."""
    jit.load()
    pack([1, 2, 3], 4, "best_fit", seed=0)


def _run(feed: Feed, run: int, state: FeedState, ring: Ring, desk: _Desk, mouth: _Mouth) -> Ended:
    """Make the batches that follow a state; returns what comes behind them."""
    taken: list[tuple[int, Slot]] = []

    def buffers() -> Out:
        number, pause_s = ring.mark(), _SHORTEST_S
        while number is None and desk.runs.empty():
            time.sleep(pause_s)  # the trainer has all slots, and is to do no more than take a mark away
            number, pause_s = ring.mark(), min(2 * pause_s, _LONGEST_S)
        if not desk.runs.empty():
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
                mouth.say(b"at__" + json.dumps(dict(after.at)).encode())
            numbers = b"".join(n.to_bytes(8, "little") for n in (run, number, after.step, after.micro_batch))
            mouth.say(b"made" + numbers + slot.message(made))
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()
        for number, _ in taken:
            ring.free(number)
    return end


def _pickled(run: int, error: BaseException) -> bytes:
    """Return an error so that it can cross; one that can't goes as text."""
    try:
        content = pickle.dumps((run, error))
        pickle.loads(content)
    except Exception:
        import traceback

        text = "".join(traceback.format_exception(error))
        return pickle.dumps((run, RuntimeError(f"{described(error, kind=True)}\n{text}")))
    return content


def _listen(orders: IO[bytes], desk: _Desk) -> None:
    """Pass on what is said; once whoever says it is gone, nobody waits for what is being done."""
    try:
        while True:
            message = receive(orders)
            kind, content = message[:4], message[4:]
            if kind == b"head":
                desk.head.put(content)
            elif kind == b"from":
                run, step, micro_batch, at = json.loads(content)
                desk.runs.put((run, FeedState(step=step, micro_batch=micro_batch, at=at)))
                desk.answers.put(None)  # the other ranks begin anew too, and don't answer the run before
            elif kind == b"answ":
                run, key, all_of_them, why = json.loads(content)
                desk.answers.put((run, key, all_of_them, why))
    except (EOFError, OSError):
        os._exit(1)


def _watch(parent: int) -> None:
    """End with the trainer, also where a process that it forked keeps its pipes open."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


if __name__ == "__main__":
    main()
