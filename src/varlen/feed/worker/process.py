"""A worker that is a process of its own: batches come through a ring of shared memory, and a killed one is replaced.

::

    trainer's process                                          worker
      take() ◄── batches ◄── reader ◄──── pipe ◄──── messages ◄─ main thread, fills slots
      state to begin after ──► keeper ──► pipe ──►
      last array over a slot dies ──► its mark in the shared memory ──►

The reader starts the worker, and starts it again after the last batch that came whole, if it dies. The keeper is the
only one who writes to it. Both are threads that wait for pipes, and do nothing a trainer would feel.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, cast

from varlen.errors import SettingError, StalledError, WorkerDiedError
from varlen.feed.agreement import Exchange, Exchanges
from varlen.feed.protocol import Ended, Made
from varlen.feed.spec import Spec
from varlen.feed.state import FeedState
from varlen.feed.worker.ring import Bytes, Ring, read_ended, read_made
from varlen.workers.child import CANNOT_BE_SENT, MOST_DEATHS, Child, await_end, start_thread, supervise

_log = logging.getLogger(__name__)
_PATIENCE_S = 5.0
_Entry = tuple[Made | Ended | BaseException, int, bytes]
"""A batch, its slot and its message; or an error, or the end."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Line:
    """What the threads share; none of it knows the worker's owner, so that the owner can die."""

    head: bytes
    ring: Ring
    exchanges: Exchanges | None
    """How ranks agree, where the feed needs that."""
    agreement: Exchange | None = None
    """Of the last run that asked for one."""
    batches: SimpleQueue[_Entry] = field(default_factory=SimpleQueue)
    """Of the run, for `take`."""
    held: set[int] = field(default_factory=set)
    """Slots under batches that came and are still there."""
    lent: set[int] = field(default_factory=set)
    """Those of them that the trainer took."""
    orders: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    """For the keeper, in the order in which things happened."""
    asked: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    """What workers ask the other ranks, for the thread that waits for them."""
    run: int = 0
    """Number of the last `start`; what earlier ones made is thrown away."""
    reached: FeedState = field(default_factory=FeedState)
    """After the last batch of the run that came whole."""
    is_over: bool = False
    """Whether the last entry of the run's batches is none."""
    is_read: bool = True
    """Whether a thread starts workers, and listens to them."""
    closing: bool = False
    process: Child | None = None
    deaths: int = 0
    """Of all workers so far."""
    lock: Any = field(default_factory=threading.Lock)


class ProcessWorker:
    """Has batches made in a fresh interpreter."""

    def __init__(self, spec: Spec, slots: int, slot_bytes: int, exchanges: Exchanges | None = None) -> None:
        try:
            head = pickle.dumps(spec)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise SettingError(CANNOT_BE_SENT.format(error=error)) from error
        self._line = _Line(head=head, ring=Ring(slots, slot_bytes), exchanges=exchanges)
        self._copies, self._most_lent = 0, slots - 1
        self._keeper, self._reader = _at_work(_keep, self._line), _at_work(_read, self._line)
        self._asker = None if exchanges is None else _at_work(_ask, self._line)

    @property
    def ready(self) -> int:
        """Batches of this run that are waiting to be taken."""
        line = self._line
        return max(line.batches.qsize() - line.is_over, 0)

    @property
    def restarts(self) -> int:
        """Workers that died and were replaced."""
        return self._line.deaths

    @property
    def copies(self) -> int:
        """Batches copied since the trainer held all slots."""
        return self._copies

    @property
    def memory(self) -> Bytes:
        """All slots."""
        return self._line.ring.memory

    @property
    def pid(self) -> int | None:
        """Of the worker, while there is one."""
        process = self._line.process
        return None if process is None else process.pid

    def start(self, state: FeedState) -> None:
        """Begin after a state, whatever was made before."""
        line = self._line
        with line.lock:
            line.run += 1
            line.reached, line.batches, line.is_over = state, SimpleQueue(), False
            if line.agreement is not None:  # the other ranks begin anew too, and don't answer the old run
                line.agreement.close()
            line.orders.put(("begin", None))
            was_read, line.is_read = line.is_read, True
        if not was_read:  # workers died again and again, and the trainer tries once more
            self._reader = _at_work(_read, line)

    def take(self, deadline_s: float) -> tuple[Made | Ended, int]:
        """Return the next batch, or the end, and how many were ready when it was asked for."""
        line = self._line
        batches = line.batches
        ready = batches.qsize() - line.is_over
        # A trainer's step has emptied the processor's caches, and every call takes microseconds then: there are few.
        try:
            made, slot, message = batches.get_nowait()
        except Empty:
            try:
                made, slot, message = batches.get(timeout=deadline_s)
            except Empty:
                raise StalledError(_stalled(line, deadline_s)) from None
        if not isinstance(made, Made):
            if not isinstance(made, Ended):
                raise made
            return made, ready
        lent = line.lent
        if len(lent) < self._most_lent:
            lent.add(slot)
            return made, ready
        return self._copied(message, slot, made.state), ready

    def _copied(self, message: bytes, slot: int, state: FeedState) -> Made:
        """Return a batch with memory of its own: with the last slot here too, the worker could never go on."""
        line = self._line
        if not self._copies:
            _log.warning(
                "the trainer holds %s batches, all but one that the ring of %s slots has; while it does, batches are "
                "copied: pass a larger ring_slots",
                f"{len(line.lent):,}",
                f"{line.ring.slots:,}",
            )
        self._copies += 1
        return read_made(message, line.ring.slot(slot).copy(), state)

    def close(self) -> None:
        """Leave neither a process nor a thread behind; batches that are left keep their bytes."""
        close_line(self._line)
        for thread in (self._keeper, self._reader, self._asker):
            if thread is not None:
                await_end(thread, _PATIENCE_S)

    def closer(self) -> Callable[[], None]:
        """Return what ends it, and doesn't keep it alive."""
        line = self._line
        return lambda: close_line(line)


def _at_work(what: Callable[[_Line], None], line: _Line) -> threading.Thread:
    return start_thread(partial(what, line), f"varlen {what.__name__.strip('_')}")


def _freed(line: _Line, slot: int) -> Callable[[object], None]:
    """Return what frees a slot; all of it may be done in the middle of anything."""
    held, lent, ring, process = line.held, line.lent, line.ring, os.getpid()

    def free(_: object) -> None:
        if os.getpid() != process:
            return  # a fork lets go of its own array; the slot is still under the array of the other process
        lent.discard(slot)
        held.discard(slot)
        ring.free(slot)  # last, since the worker may fill it from now on

    return free


def close_line(line: _Line) -> None:
    """End the worker and whoever waits for it."""
    with line.lock:
        line.closing = True
        if line.process is not None:
            line.process.kill()
        if line.agreement is not None:
            line.agreement.close()
    line.asked.put(None)
    line.orders.put(("stop", None))


def _stalled(line: _Line, seconds: float) -> str:
    process = line.process
    who = f"the loader's worker (process {process.pid})" if process is not None else "the loader's worker"
    lives = " and is still alive" if process is not None and process.is_alive else ""
    return (
        f"{who} has made no batch for {seconds:,.0f} s{lives}; it may wait for its storage, or for "
        "another rank. Pass deadline_s to wait longer"
    )


def _keep(line: _Line) -> None:
    """Pass on what the worker is to know; the only thread that writes to it."""
    told = 0
    process: Child | None = None
    is_gone = True
    while True:
        kind, content = line.orders.get()
        message: list[bytes] = []
        if kind == "stop":
            with line.lock:  # the reader hires nobody any more
                line.ring.close()
            return
        if kind == "begin":
            # A worker hired since knows the run already, and may have begun to make its batches.
            run, message = _begin(line)
            told, message = run, message if run != told else []
        elif kind == "answer" and content[0] is process:
            message = [b"answ" + content[1]]
        elif kind == "process":
            process, is_gone = content, False
            told, message = _begin(line)
            message = [b"head" + line.head, *message]
        try:
            for one in message:
                if process is not None and not is_gone:
                    process.send(one)
        except (OSError, ValueError):  # the reader sees that too, and starts another
            is_gone = True


def _begin(line: _Line) -> tuple[int, list[bytes]]:
    """Return the number of the run, and what a worker is to begin with, if anything."""
    with line.lock:
        run, state = line.run, line.reached
    said = json.dumps([run, state.step, state.micro_batch, dict(state.at)])
    return run, [b"from" + said.encode()] if run else []


def _read(line: _Line) -> None:
    """Start workers, and pass on what they say."""
    try:
        last = supervise(partial(_hired, line), partial(_listen, line), partial(_died, line))
        error = None if last is None else WorkerDiedError(_death(last))
    except WorkerDiedError as failed:
        error = failed
    with line.lock:
        if error is not None and not line.closing:
            line.batches.put((error, -1, b""))
            line.is_over, line.is_read = True, False


def _end(line: _Line, run: int, end: Ended | BaseException) -> None:
    """Say that no batch of a run follows, and why, if it isn't the run before."""
    with line.lock:
        if run == line.run:
            line.batches.put((end, -1, b""))
            line.is_over = True


def _hired(line: _Line) -> Child | None:
    ring = line.ring
    told = (ring.file, ring.slots, ring.slot_bytes, line.exchanges is not None)
    arguments = [str(int(number)) for number in told]
    with line.lock:  # so that none starts once the line is closed
        if line.closing:
            return None
        # Blocks are tokenized side by side, each by one thread: threads of the tokenizer's own would wait for each
        # other at the end of every block, and take a fifth more of the processors' time.
        line.process = Child("varlen.feed.worker.main", *arguments, threads=1, files=[ring.file])
    line.orders.put(("process", line.process))
    return line.process


def _died(line: _Line, _: Child) -> None:
    if not line.closing:
        line.deaths += 1
        line.ring.free_but(line.held)


def _death(last: Child) -> str:
    return (
        f"the loader's worker {last.end}, {MOST_DEATHS} times in a row at the same batch (out of memory?); "
        'take fewer ring_slots or a smaller window, or worker="thread" to see more'
    )


def _ask(line: _Line) -> None:
    """Ask the other ranks what a worker wants to know."""
    exchanges, last = cast(Exchanges, line.exchanges), -1
    while (asked := line.asked.get()) is not None:
        process, content = asked
        run, key, mine = json.loads(content)
        all_of_them: list[Any] | None = None
        why = ""
        try:
            with line.lock:
                if run != line.run or line.closing:  # it could wait in vain, and keep the next run waiting
                    continue
                if run != last:
                    last, line.agreement = run, exchanges(run)
            agreement = cast(Exchange, line.agreement)
            all_of_them = list(agreement.all(key, {int(lane): value for lane, value in mine}).items())
        except Exception as error:  # of the store too: its server may be gone
            why = str(error)
        line.orders.put(("answer", (process, json.dumps([run, key, all_of_them, why]).encode())))


def _listen(line: _Line, process: Child) -> bool:
    """Pass on what a worker says until it is gone; returns whether it made anything."""
    at: dict[str, Any] = {}
    heard = False
    with suppress(EOFError, OSError, ValueError):
        while True:
            message = process.receive()
            kind, content = message[:4], message[4:]
            if kind == b"at__":
                at = json.loads(content)
                continue
            if kind == b"ask_":
                line.asked.put((process, content))
                continue
            heard = True
            if kind == b"fail":
                _end(line, *pickle.loads(content))
            elif kind == b"last":
                _end(line, int.from_bytes(content[:8], "little"), read_ended(content[8:]))
            elif kind == b"made":
                _received(line, content, at)
    return heard


def _received(line: _Line, content: bytes, at: dict[str, Any]) -> None:
    """Take a batch in."""
    run, slot, step, micro_batch = (int.from_bytes(content[8 * n : 8 * n + 8], "little") for n in range(4))
    state = FeedState(step=step, micro_batch=micro_batch, at=at)
    line.held.add(slot)
    # Here and not when it is taken: the trainer needn't wait for it.
    message = content[32:]
    made = read_made(message, line.ring.lend(slot, _freed(line, slot)), state)
    with line.lock:
        if run == line.run:
            line.reached = state
            line.batches.put((made, slot, message))
