"""A worker that is a thread of the trainer's process: it makes the same bytes, for debugging, tests and macOS."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import Empty, Full, Queue

from varlen.errors import StalledError
from varlen.feed.exchange import Exchange, OpenExchange, OpenNumbered
from varlen.feed.protocol import Ended, Feed, Made, counts_of, new_arrays
from varlen.feed.spec import Spec
from varlen.feed.state import FeedState
from varlen.store.tokens import TokenDocuments
from varlen.workers.child import await_end

_LOOK_S = 0.1
"""Interval at which a waiting thread checks whether it is to end."""

_PATIENCE_S = 5.0
"""How long to wait for a thread to end: a blocked read of its storage can't be interrupted."""

_Entry = tuple[Made | Ended | None, BaseException | None]


class _Runs:
    """The runs of one feed, of which the last is active; opens exchanges, and closes them when their run ends."""

    def __init__(self, open_exchange: OpenNumbered | None, number: int = 0) -> None:
        self._open_exchange, self.number = open_exchange, number
        self._stop = threading.Event()
        self._opened: list[Exchange] = []
        self._lock = threading.Lock()

    def begin(self) -> threading.Event:
        """Begin the next run; returns the event that ends it."""
        with self._lock:
            self.number, self._stop = self.number + 1, threading.Event()
            return self._stop

    def end(self) -> None:
        """End the run, even while it waits for another rank."""
        with self._lock:
            self._stop.set()
            for exchange in self._opened:
                exchange.close()
            self._opened.clear()

    def opening(self) -> OpenExchange | None:
        """Return the function that opens a run's exchange; None without exchanges."""
        return None if self._open_exchange is None else self._open

    def _open(self) -> Exchange:
        assert self._open_exchange is not None
        with self._lock:
            exchange = self._open_exchange(self.number)
            self._opened.append(exchange)
            if self._stop.is_set():  # the run was ended meanwhile
                exchange.close()
            return exchange


class ThreadWorker:
    """Builds up to `ahead` batches in advance."""

    restarts = copies = 0
    """A thread isn't replaced, and no batch shares memory with another."""

    def __init__(
        self,
        spec: Spec,
        ahead: int,
        open_exchange: OpenNumbered | None = None,
        held: Sequence[TokenDocuments] = (),
    ) -> None:
        self._held = held
        self._spec, self._ahead, self._open_exchange = spec, ahead, open_exchange
        self._feed: Feed | None = None
        self._queue: Queue[_Entry] = Queue(ahead)
        self._current = [_Runs(open_exchange)]
        """The runs of the feed, in a list that `closer` shares."""
        self._thread: threading.Thread | None = None

    @property
    def ready(self) -> int:
        """Batches that can be taken now."""
        with self._queue.mutex:  # errors and the end don't count
            return sum(isinstance(made, Made) for made, _ in self._queue.queue)

    def start(self, state: FeedState) -> None:
        """Begin after a state; batches made before are dropped."""
        self.close()
        runs = self._current[0]
        self._queue, stop = Queue(self._ahead), runs.begin()
        if self._feed is None:
            self._feed = self._spec.open(runs.opening(), self._held)
        self._thread = threading.Thread(
            target=_run, args=(self._feed, state, self._queue, stop), name="varlen feed", daemon=True
        )
        self._thread.start()

    def take(self, deadline_s: float) -> tuple[Made | Ended, int]:
        """Return the next batch, or the end, and the number of batches that were ready at the call."""
        ready, start_s = self.ready, time.monotonic()
        while self._thread is not None:
            try:
                made, error = self._queue.get(timeout=min(_LOOK_S * 10, deadline_s))
            except Empty:
                if time.monotonic() - start_s >= deadline_s:
                    raise StalledError(
                        f"the loader's thread has made no batch for {deadline_s:,.0f} s; it may wait for its storage "
                        "or for another rank. Pass deadline_s to wait longer"
                    ) from None
                continue
            if made is None:
                raise error or StalledError("the loader's thread has ended")
            return made, ready
        return Ended(), 0

    def closer(self) -> Callable[[], None]:
        """Return a function that ends the worker, without a reference to it."""
        current = self._current

        def end() -> None:
            current[0].end()

        return end

    def close(self) -> None:
        """End the thread; one that doesn't end within seconds, such as in a blocked read, is left behind.

        It ends when its read returns; the next run opens another feed.
        """
        runs = self._current[0]
        runs.end()
        if self._thread is not None and self._thread is not threading.current_thread():
            await_end(self._thread, _PATIENCE_S)
            if self._thread.is_alive():
                self._feed, self._held = None, ()  # which that thread may be reading
                self._current[0] = _Runs(self._open_exchange, runs.number)
        self._thread = None


def _run(feed: Feed, state: FeedState, queue: Queue[_Entry], stop: threading.Event) -> None:
    """Fill a queue with the batches that follow a state, until the run ends."""

    def put(made: Made | Ended | None, error: BaseException | None) -> bool:
        while not stop.is_set():
            try:
                queue.put((made, error), timeout=_LOOK_S)
            except Full:
                continue
            return True
        return False

    batches, end = feed.batches(state, new_arrays), Ended()
    try:
        for made in batches:
            if isinstance(made, Ended):
                end = made
            elif not put(replace(made, counts=counts_of(made.batch)), None):
                return
        put(end, None)
    except BaseException as error:  # the trainer raises it
        put(None, error)
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()
