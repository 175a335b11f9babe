"""A worker in a process of its own: batches arrive in a ring of shared memory, and a worker that dies is replaced.

::

    trainer's process                                          worker
      take() ◄── batches ◄── reader ◄──── pipe ◄──── messages ◄─ main thread, fills slots
      state to begin after ──► writer ──► pipe ──►
      last array over a slot dies ──► its mark in the shared memory ──►

The reader starts the worker and, if it dies, starts another one after the last complete batch. The writer is the only
thread that writes to the worker. Where ranks exchange what they know, or steps have plans, a third thread,
`_exchange`, answers what the worker asks. All wait on pipes or queues, and take next to no time from the trainer.
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
from varlen.feed.exchange import Exchange, OpenNumbered
from varlen.feed.protocol import Ended, Made
from varlen.feed.spec import Spec
from varlen.feed.state import FeedState
from varlen.feed.worker.ring import Bytes, Kind, Ring, read_ended, read_made
from varlen.workers.child import CANNOT_BE_SENT, MOST_DEATHS, Child, await_end, start_thread, supervise

_log = logging.getLogger(__name__)
_PATIENCE_S = 5.0
_Entry = tuple[Made | Ended | BaseException, int, bytes]
"""A batch, its slot and its message; or an error or the end, with slot -1."""


@dataclass(kw_only=True, slots=True, eq=False)
class _ThreadState:
    """State shared by the threads; holds no reference to the `ProcessWorker`, so that it can be collected."""

    spec: bytes
    """The pickled `Spec`."""
    ring: Ring
    open_exchange: OpenNumbered | None
    """None where the feed needs no exchange."""
    exchange: Exchange | None = None
    """The exchange of the last run that used one."""
    batches: SimpleQueue[_Entry] = field(default_factory=SimpleQueue)
    """Batches of the current run, for `take`."""
    held: set[int] = field(default_factory=set)
    """Slots whose batches are alive, taken or not."""
    lent: set[int] = field(default_factory=set)
    """Those of them that the trainer took."""
    orders: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    """Events for the writer, in the order in which they happened."""
    requests: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    """Workers' requests to other ranks, for the thread that exchanges values."""
    run: int = 0
    """Number of calls of `start`; batches of earlier runs are dropped."""
    reached: FeedState = field(default_factory=FeedState)
    """State after the last complete batch of the run."""
    is_over: bool = False
    """Whether the last entry of `batches` is an error or the end."""
    has_reader: bool = True
    """Whether the reader thread is running."""
    closing: bool = False
    process: Child | None = None
    deaths: int = 0
    lock: Any = field(default_factory=threading.Lock)


class ProcessWorker:
    """Builds batches in a fresh interpreter."""

    def __init__(
        self, spec: Spec, slots: int, slot_bytes: int, open_exchange: OpenNumbered | None = None
    ) -> None:
        try:
            pickled = pickle.dumps(spec)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise SettingError(CANNOT_BE_SENT.format(error=error)) from error
        self._shared = _ThreadState(spec=pickled, ring=Ring(slots, slot_bytes), open_exchange=open_exchange)
        self._copies, self._most_lent = 0, slots - 1
        self._writer, self._reader = _start(_write, self._shared), _start(_read, self._shared)
        self._exchanger = None if open_exchange is None else _start(_exchange, self._shared)

    @property
    def ready(self) -> int:
        """Batches of this run that can be taken now."""
        shared = self._shared
        return max(shared.batches.qsize() - shared.is_over, 0)

    @property
    def restarts(self) -> int:
        """Number of workers that died and were replaced."""
        return self._shared.deaths

    @property
    def copies(self) -> int:
        """Batches copied because the trainer held all slots."""
        return self._copies

    @property
    def memory(self) -> Bytes:
        """The memory of all slots."""
        return self._shared.ring.memory

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None while there is none."""
        process = self._shared.process
        return None if process is None else process.pid

    def start(self, state: FeedState) -> None:
        """Begin after a state; batches made before are dropped."""
        shared = self._shared
        with shared.lock:
            shared.run += 1
            shared.reached, shared.batches, shared.is_over = state, SimpleQueue(), False
            if shared.exchange is not None:  # other ranks start a new run too, and don't reply to the old one
                shared.exchange.close()
            shared.orders.put(("begin", None))
            had_reader, shared.has_reader = shared.has_reader, True
        if not had_reader:  # it ended since workers died repeatedly, and the trainer tries again
            self._reader = _start(_read, shared)

    def take(self, deadline_s: float) -> tuple[Made | Ended, int]:
        """Return the next batch, or the end, and the number of batches that were ready at the call."""
        shared = self._shared
        batches = shared.batches
        ready = batches.qsize() - shared.is_over
        # After a trainer's step the processor's caches are cold, and each call takes microseconds: make few calls.
        try:
            made, slot, message = batches.get_nowait()
        except Empty:
            try:
                made, slot, message = batches.get(timeout=deadline_s)
            except Empty:
                raise StalledError(_stalled(shared, deadline_s)) from None
        if not isinstance(made, Made):
            if not isinstance(made, Ended):
                raise made
            return made, ready
        lent = shared.lent
        if len(lent) < self._most_lent:
            lent.add(slot)
            return made, ready
        return self._copied(message, slot, made.state), ready

    def _copied(self, message: bytes, slot: int, state: FeedState) -> Made:
        """Return a copy of a batch outside the ring: if the trainer held every slot, the worker couldn't go on."""
        shared = self._shared
        if not self._copies:
            _log.warning(
                "the trainer holds %s batches, all but one of the ring's %s slots; while it does, batches "
                "are copied: pass a larger ring_slots (in varlen train: data.ring_slots)",
                f"{len(shared.lent):,}",
                f"{shared.ring.slots:,}",
            )
        self._copies += 1
        return read_made(message, shared.ring.slot(slot).copy(), state)

    def close(self) -> None:
        """End the process and the threads; batches that the trainer holds stay valid."""
        _close(self._shared)
        for thread in (self._writer, self._reader, self._exchanger):
            if thread is not None:
                await_end(thread, _PATIENCE_S)

    def closer(self) -> Callable[[], None]:
        """Return a function that ends the worker, without a reference to it."""
        shared = self._shared
        return lambda: _close(shared)


def _start(what: Callable[[_ThreadState], None], shared: _ThreadState) -> threading.Thread:
    return start_thread(partial(what, shared), f"varlen {what.__name__.strip('_')}")


def _freed(shared: _ThreadState, slot: int) -> Callable[[object], None]:
    """Return the callback that frees a slot; the garbage collector may call it at any point, so it takes no lock."""
    held, lent, ring, process = shared.held, shared.lent, shared.ring, os.getpid()

    def free(_: object) -> None:
        if os.getpid() != process:
            return  # an array died in a forked child; the parent's array still uses the slot
        lent.discard(slot)
        held.discard(slot)
        ring.free(slot)  # last, since the worker may fill the slot from here on

    return free


def _close(shared: _ThreadState) -> None:
    """End the worker and the threads that wait for it."""
    with shared.lock:
        shared.closing = True
        if shared.process is not None:
            shared.process.kill()
        if shared.exchange is not None:
            shared.exchange.close()
    shared.requests.put(None)
    shared.orders.put(("stop", None))


def _stalled(shared: _ThreadState, seconds: float) -> str:
    process = shared.process
    worker = f"the loader's worker (process {process.pid})" if process is not None else "the loader's worker"
    alive = " and is still alive" if process is not None and process.is_alive else ""
    return (
        f"{worker} has made no batch for {seconds:,.0f} s{alive}; it may wait for its storage, or for "
        "another rank. Pass deadline_s to wait longer"
    )


def _write(shared: _ThreadState) -> None:
    """Send runs and replies to the worker; only this thread writes to it."""
    sent_run = 0
    process: Child | None = None
    is_gone = True
    while True:
        kind, content = shared.orders.get()
        messages: list[bytes] = []
        if kind == "stop":
            with shared.lock:  # the reader starts no further worker
                shared.ring.close()
            return
        if kind == "begin":
            # A worker started in the meantime has this run already, and may have begun its batches.
            run, messages = _begin(shared)
            sent_run, messages = run, messages if run != sent_run else []
        elif kind == "reply" and content[0] is process:
            messages = [Kind.REPLY + content[1]]
        elif kind == "process":
            process, is_gone = content, False
            sent_run, messages = _begin(shared)
            messages = [Kind.SPEC + shared.spec, *messages]
        try:
            for message in messages:
                if process is not None and not is_gone:
                    process.send(message)
        except (OSError, ValueError):  # the reader notices this too, and starts another worker
            is_gone = True


def _begin(shared: _ThreadState) -> tuple[int, list[bytes]]:
    """Return the run's number, and the message that starts it in a worker; no message before the first run."""
    with shared.lock:
        run, state = shared.run, shared.reached
    content = json.dumps([run, state.step, state.micro_batch, dict(state.at)])
    return run, [Kind.BEGIN + content.encode()] if run else []


def _read(shared: _ThreadState) -> None:
    """Start workers, and receive their messages."""
    try:
        last = supervise(partial(_start_worker, shared), partial(_listen, shared), partial(_died, shared))
        error = None if last is None else WorkerDiedError(_death(last))
    except WorkerDiedError as failed:
        error = failed
    with shared.lock:
        if error is not None and not shared.closing:
            shared.batches.put((error, -1, b""))
            shared.is_over, shared.has_reader = True, False


def _end(shared: _ThreadState, run: int, end: Ended | BaseException) -> None:
    """Enqueue the end or the error of a run, if it is the current run."""
    with shared.lock:
        if run == shared.run:
            shared.batches.put((end, -1, b""))
            shared.is_over = True


def _start_worker(shared: _ThreadState) -> Child | None:
    ring = shared.ring
    numbers = (ring.file, ring.slots, ring.slot_bytes, shared.open_exchange is not None)
    arguments = [str(int(number)) for number in numbers]
    with shared.lock:  # so that no worker starts after `_close`
        if shared.closing:
            return None
        # Blocks are tokenized in parallel, each by one thread: the tokenizer's own threads would wait for each other
        # at the end of every block, and take a fifth more processor time.
        shared.process = Child("varlen.feed.worker.main", *arguments, threads=1, files=[ring.file])
    shared.orders.put(("process", shared.process))
    return shared.process


def _died(shared: _ThreadState, _: Child) -> None:
    if not shared.closing:
        shared.deaths += 1
        shared.ring.free_but(shared.held)


def _death(last: Child) -> str:
    return (
        f"the loader's worker {last.end}, {MOST_DEATHS} times in a row at the same batch (out of memory?); "
        'take fewer ring_slots or a smaller window, or worker="thread" to see more'
    )


def _exchange(shared: _ThreadState) -> None:
    """Exchange values with the other ranks on behalf of the worker."""
    open_exchange, last = cast(OpenNumbered, shared.open_exchange), -1
    while (request := shared.requests.get()) is not None:
        process, content = request
        run, key, mine = json.loads(content)
        values: list[Any] | None = None
        error_message = ""
        try:
            with shared.lock:
                if run != shared.run or shared.closing:  # it might never return, and block the next run
                    continue
                if run != last:
                    last, shared.exchange = run, open_exchange(run)
            exchange = cast(Exchange, shared.exchange)
            values = list(exchange.all(key, {int(lane): value for lane, value in mine}).items())
        except Exception as error:  # also an error of the store, whose server may have died
            error_message = str(error)
        shared.orders.put(("reply", (process, json.dumps([run, key, values, error_message]).encode())))


def _listen(shared: _ThreadState, process: Child) -> bool:
    """Handle a worker's messages until it ends; returns whether it sent a batch, an end or an error."""
    at: dict[str, Any] = {}
    has_result = False
    with suppress(EOFError, OSError, ValueError):
        while True:
            message = process.receive()
            kind, content = message[:4], message[4:]
            if kind == Kind.AT:
                at = json.loads(content)
                continue
            if kind == Kind.ASK:
                shared.requests.put((process, content))
                continue
            has_result = True
            if kind == Kind.FAILED:
                _end(shared, *pickle.loads(content))
            elif kind == Kind.LAST:
                _end(shared, int.from_bytes(content[:8], "little"), read_ended(content[8:]))
            elif kind == Kind.MADE:
                _received(shared, content, at)
    return has_result


def _received(shared: _ThreadState, content: bytes, at: dict[str, Any]) -> None:
    """Enqueue a batch."""
    run, slot, step, micro_batch = (int.from_bytes(content[8 * n : 8 * n + 8], "little") for n in range(4))
    state = FeedState(step=step, micro_batch=micro_batch, at=at)
    shared.held.add(slot)
    # Decoded here and not in `take`, so that the trainer doesn't wait for it.
    message = content[32:]
    made = read_made(message, shared.ring.lend(slot, _freed(shared, slot)), state)
    with shared.lock:
        if run == shared.run:
            shared.reached = state
            shared.batches.put((made, slot, message))
