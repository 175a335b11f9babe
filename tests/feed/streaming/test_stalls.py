"""Storage that stands still: what is read ahead hides it from the trainer, and what isn't hidden is told."""

from __future__ import annotations

import time

import numpy as np
import pytest
from tests.support.streaming import write_texts

import varlen as vl
from varlen.feed.streaming import rounds

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
    monkeypatch.setattr(
        rounds, "_SOON_BYTES", 0
    )  # or all of these few bytes are read before they are claimed
    stats, awake = waited(texts, read_ahead_s=0.01)

    assert 0.5 * STALL_S < stats.waited_s <= awake
    assert stats.late >= 1
    assert stats.readiness < 1
