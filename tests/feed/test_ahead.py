"""Rounds prepared ahead: as many as ride out a stall, from the first one on, and never more than fits the memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from varlen.errors import SourceError
from varlen.feed import prefetch
from varlen.feed.prefetch import AheadSettings, Prefetcher


@dataclass(frozen=True)
class Item:
    number: int
    num_bytes: int = 10
    num_steps: int = 2


class Making:
    """Endless items; says how many were begun, and whether their iterator was closed."""

    def __init__(self, clock: Any = None, fails_at: int | None = None) -> None:
        self._clock = clock
        self.begun, self.is_closed, self._fails_at = 0, False, fails_at
        self._changed = threading.Condition()

    def __call__(self) -> Iterator[Item]:
        try:
            for number in itertools.count():
                with self._changed:
                    self.begun += 1
                    self._changed.notify_all()
                if number == self._fails_at:
                    raise SourceError("cut off")
                if self._clock is not None:
                    self._clock.now += 4
                yield Item(number)
        finally:
            self.is_closed = True

    def begins(self, count: int) -> bool:
        """Whether so many are begun, and no more: the next isn't, as far as a moment tells."""
        with self._changed:
            enough = self._changed.wait_for(lambda: self.begun >= count, timeout=20)
            return enough and not self._changed.wait_for(lambda: self.begun > count, timeout=0.05)


@pytest.fixture
def clock(monkeypatch):
    """The time as the module sees it, which stands still until a test moves it."""

    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    monkeypatch.setattr(prefetch, "time", Clock())
    return prefetch.time


@pytest.fixture
def begun():
    """Begins, and closes in the end."""
    opened: list[Prefetcher[Item]] = []

    def begin(making: Making, **settings: float) -> Prefetcher[Item]:
        opened.append(Prefetcher(making, AheadSettings(**settings), lambda: None))
        return opened[-1]

    yield begin
    for one in opened:
        one.close()


def test_until_one_is_taken_as_few_are_ready_as_asked_for(begun):
    making = Making()
    begun(making, items=3, seconds=1000)

    assert making.begins(3)


def test_items_last_as_long_as_asked_for_at_the_pace_of_their_steps(begun, clock):
    making = Making()
    one = begun(making, items=1, seconds=10, most_bytes=1000)
    next(one)
    for _ in range(200):  # the first hundred were made before the pace was known
        clock.now += 4
        next(one)

    assert making.begins(201 + 3)  # two steps of 2 s each: three items of 4 s last long enough


def test_reading_ahead_begins_with_the_first_item_and_not_when_the_pace_is_known(begun, clock):
    making = Making()
    one = begun(making, items=2, seconds=10, most_bytes=70)

    next(one)

    assert making.begins(1 + 7)  # nothing is known but that no time has passed: as many as fit


def test_an_item_that_is_not_done_yet_says_how_long_those_that_are_ready_last(begun, clock):
    making = Making(clock)
    one = begun(making, items=1, seconds=10, most_bytes=10**9)

    next(one)

    assert making.begins(1 + 2)  # after 8 s a step takes 4 s at least, and four of them are ready


def test_no_more_is_begun_where_the_memory_is_full(begun, clock):
    making = Making()
    one = begun(making, items=50, seconds=1000, most_bytes=45)

    assert making.begins(5)
    next(one)
    assert making.begins(6)


def test_an_error_comes_in_the_place_of_its_item_and_again(begun):
    one = begun(Making(fails_at=3), items=10, seconds=10)

    assert [next(one).number for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(SourceError, match="cut off"):
            next(one)


def test_closing_ends_the_thread_where_it_waits_and_closes_the_items_there():
    making, stopped = Making(), []
    one = Prefetcher(making, AheadSettings(items=2, seconds=0), lambda: stopped.append(True))
    assert making.begins(2)

    one.close()

    assert making.is_closed
    assert stopped
    assert not one._thread.is_alive()


def test_closing_wakes_items_that_wait_for_something():
    asked, woken = threading.Event(), threading.Event()

    def waiting() -> Iterator[Item]:
        asked.set()
        assert woken.wait(timeout=20)
        yield Item(0)

    one = Prefetcher(waiting, AheadSettings(), woken.set)
    assert asked.wait(timeout=20)

    one.close()

    assert not one._thread.is_alive()
