"""Rounds prepared ahead: as many as ride out a stall of the storage, and never more than fits the memory."""

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.support.streaming import write_texts

import varlen as vl
from varlen.errors import SourceError
from varlen.feed import prefetch
from varlen.feed.prefetch import AheadSettings, Prefetcher
from varlen.feed.streaming import rounds


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


STEP_S, STALL_S, STEPS = 0.005, 1.0, 300


class Stalling:
    """Encodes texts; stands still once, at the text that says so."""

    def __init__(self) -> None:
        self.stalls = 0

    def __call__(self, text: str) -> list[int]:
        if text.startswith("stall") and not self.stalls:
            self.stalls += 1
            time.sleep(STALL_S)
        return [1] * len(text)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """One file of as many steps, with a text in the midst at which reading stands still."""
    sizes = np.random.default_rng(1).integers(20, 100, 2 * STEPS * 128 // 60)
    lines = ["x" * size for size in sizes]
    lines[len(lines) // 2] = "stall" + "x" * 50
    return write_texts(tmp_path_factory.mktemp("stalls") / "a.jsonl", lines)


def waited(texts, **settings):
    """Run at the pace of a trainer; returns the loader's statistics, and the seconds that weren't slept."""
    stalling = Stalling()
    loader = vl.PackedLoader(
        texts,
        stalling,
        eos=0,
        capacity=128,
        global_batch_size=2,
        window=4,
        shuffle=False,
        method="next_fit",
        worker="thread",
        **settings,
    )
    with loader:
        begun, awake = time.perf_counter(), 0.0
        for _ in loader:
            awake += time.perf_counter() - begun
            time.sleep(STEP_S)
            begun = time.perf_counter()
        assert stalling.stalls == 1
        return loader.stats(), awake


def test_a_stall_shorter_than_what_is_read_ahead_does_not_reach_the_trainer(texts):
    stats, _ = waited(texts, read_ahead_s=3 * STALL_S)

    assert stats.batches >= 0.95 * STEPS
    assert stats.waited_s < 0.4 * STALL_S
    assert stats.readiness > 0.9
    assert stats.queue_depth > 2


def test_a_longer_one_is_told_but_for_what_was_ready(texts, monkeypatch):
    # Otherwise all of these few bytes are read before they are claimed.
    monkeypatch.setattr(rounds, "_SOON_BYTES", 0)
    stats, awake = waited(texts, read_ahead_s=0.01)

    assert 0.5 * STALL_S < stats.waited_s <= awake
    assert stats.late >= 1
    assert stats.readiness < 1
