"""Prepares items ahead in a thread, enough to bridge a stall of the storage."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from varlen.workers.child import await_end


class Sized(Protocol):
    """An item of known memory and number of steps."""

    @property
    def num_bytes(self) -> int:
        """Memory of the item."""

    @property
    def num_steps(self) -> int:
        """Number of steps that the item serves."""


_Item = TypeVar("_Item", bound=Sized)


@dataclass(frozen=True, kw_only=True, slots=True)
class AheadSettings:
    """How far ahead items are prepared."""

    items: int = 2
    """Minimum number of ready items; before the first one is taken, also the maximum."""
    seconds: float = 10.0
    """More items are prepared until they last this long, at the rate at which they are taken."""
    most_bytes: int = 1 << 30
    """No item is begun while the ready ones take this much memory."""


class Prefetcher(Generic[_Item]):
    """Yields the items of an iterator that a thread runs ahead; its error is raised after the items before it."""

    def __init__(
        self, items: Callable[[], Iterator[_Item]], settings: AheadSettings, stop: Callable[[], None]
    ) -> None:
        self._settings, self._stop, self._make = settings, stop, items
        self._ready: deque[_Item] = deque()
        self._changed = threading.Condition()
        self._is_closed = self._is_done = False
        self._error: BaseException | None = None
        self._step_s = 0.0
        self._taken: tuple[float, int] | None = None
        """When the last item was taken, and its number of steps."""
        self._thread = threading.Thread(target=self._work, name="varlen-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[_Item]:
        """Yield the items."""
        return self

    def __next__(self) -> _Item:
        """Return the next item; waits for it."""
        with self._changed:
            if self._taken is not None:
                took = self._since_taken()
                self._step_s = took if self._step_s == 0 else 0.5 * self._step_s + 0.5 * took
                self._taken = None
                self._changed.notify_all()
            while not self._ready and not self._is_done:
                self._changed.wait()
            if self._ready:
                item = self._ready.popleft()
                self._taken = time.monotonic(), max(item.num_steps, 1)
                self._changed.notify_all()
                return item
        if self._error is not None:
            raise self._error
        raise StopIteration

    def close(self) -> None:
        """End the thread; returns when it has ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._stop()
        await_end(self._thread)
        self._ready.clear()

    def _work(self) -> None:
        items = None
        try:
            items = self._make()
            for item in items:
                with self._changed:
                    self._ready.append(item)
                    self._changed.notify_all()
                    while self._is_enough() and not self._is_closed:
                        self._changed.wait()
                    if self._is_closed:
                        break
                del item
        except BaseException as error:
            self._error = error
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()
            with self._changed:
                self._is_done = True
                self._changed.notify_all()

    def _is_enough(self) -> bool:
        """Return whether enough items are ready."""
        settings = self._settings
        if not self._ready:
            return False
        if sum(item.num_bytes for item in self._ready) >= settings.most_bytes:
            return True
        if self._step_s == 0 and self._taken is None:
            return len(self._ready) >= settings.items
        # Until the second item is requested, the time since the first was taken is a lower bound.
        step_s = self._step_s or self._since_taken()
        lasting_s = step_s * sum(item.num_steps for item in self._ready)
        return len(self._ready) >= settings.items and lasting_s >= settings.seconds

    def _since_taken(self) -> float:
        """Return the time since the last item was taken, divided by its number of steps."""
        assert self._taken is not None
        at, steps = self._taken
        return (time.monotonic() - at) / steps
