"""A worker that is a thread of the trainer's own process: the same bytes, for debugging, tests and macOS."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from queue import Empty, Full, Queue

from varlen.errors import StalledError
from varlen.feed.exchange import Exchanges
from varlen.feed.feed import Feed, Made, counts_of, new_arrays
from varlen.feed.spec import Spec
from varlen.feed.state import FeedState

_LOOK_S = 0.1
"""A thread that waits looks so often whether it is still wanted."""

_End = tuple[Made | None, BaseException | None]


class ThreadWorker:
    """Makes batches ahead, as many as asked for."""

    def __init__(self, spec: Spec, ahead: int, exchanges: Exchanges | None = None) -> None:
        """Take what makes the feed, the batches made ahead, and how ranks agree where they have to."""
        self._spec, self._ahead, self._exchanges = spec, ahead, exchanges
        self._feed: Feed | None = None
        self._queue: Queue[_End] = Queue(ahead)
        self._current: list[threading.Event] = []
        """What stops the thread that runs."""
        self._thread: threading.Thread | None = None

    @property
    def ready(self) -> int:
        """Batches that are waiting to be taken."""
        with self._queue.mutex:  # an error, or the end, is none
            return sum(made is not None for made, _ in self._queue.queue)

    @property
    def restarts(self) -> int:
        """A thread isn't replaced."""
        return 0

    @property
    def copies(self) -> int:
        """Its batches have memory of their own."""
        return 0

    def start(self, state: FeedState) -> None:
        """Begin after a state, whatever was made before."""
        self.close()
        self._queue, stop = Queue(self._ahead), threading.Event()
        self._current.append(stop)
        if self._feed is None:
            self._feed = self._spec.open(self._exchanges)
        self._thread = threading.Thread(
            target=_run, args=(self._feed, state, self._queue, stop), name="varlen feed", daemon=True
        )
        self._thread.start()

    def take(self, deadline_s: float) -> Made | None:
        """Return the next batch, or None at the end.

        Raises:
            StalledError: none came in time.
        """
        begun = time.monotonic()
        while self._thread is not None:
            try:
                made, error = self._queue.get(timeout=min(_LOOK_S * 10, deadline_s))
            except Empty:
                if time.monotonic() - begun >= deadline_s:
                    raise StalledError(
                        f"the loader's thread has made no batch for {deadline_s:,.0f} s"
                    ) from None
                continue
            if error is not None:
                raise error
            return made
        return None

    def closer(self) -> Callable[[], None]:
        """Return what ends it, and doesn't keep it alive."""
        current = self._current

        def end() -> None:
            for stop in current:
                stop.set()

        return end

    def close(self) -> None:
        """Leave no thread behind."""
        for stop in self._current:
            stop.set()
        self._current.clear()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None


def _run(feed: Feed, state: FeedState, queue: Queue[_End], stop: threading.Event) -> None:
    """Fill a queue until it is over."""

    def put(made: Made | None, error: BaseException | None) -> bool:
        while not stop.is_set():
            try:
                queue.put((made, error), timeout=_LOOK_S)
            except Full:
                continue
            return True
        return False

    batches = feed.batches(state, new_arrays)
    try:
        for made in batches:
            if not put(replace(made, counts=counts_of(made.batch)), None):
                return
        put(None, None)
    except BaseException as error:  # it belongs to the trainer
        put(None, error)
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()
