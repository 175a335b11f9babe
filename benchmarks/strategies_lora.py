"""Adapters alone: a Llama learns the longer set, its weights are frozen, and LoRA learns the short one."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from benchmarks.strategies_compare import Told
from benchmarks.strategies_feeds import Feed
from benchmarks.strategies_models import LORA_RANK, build
from benchmarks.strategies_race import Entry, race
from benchmarks.strategies_sets import TextSet
from benchmarks.strategies_train import one_thread, train, validate

RACED = ("padding", "grouped", "online", "ours")
RATE = 8e-3
"""Adapters learn at a higher rate than weights do."""


def lora(
    sets: dict[str, TextSet], told: Told, known: Container[str], *, base_steps: int, steps: int
) -> Iterator[dict[str, Any]]:
    """Train a base, then race adapters on it, over one epoch of the short set.

    Args:
        sets: of documents, by name.
        told: of progress.
        known: keys of records that there are already.
        base_steps: minibatches of the longer set that the base learns.
        steps: minibatches of the short set that adapters learn.

    Yields:
        The record of the race.
    """
    if "lora" in known:
        return
    one_thread()
    told(0, steps, "training the base")
    long, short = sets["long"], sets["short"]
    feed = Feed(strategy="ours", documents=long.draw(base_steps, 0), shape=long.shape, seed=0)
    base = build("llama", 0, feed.attention)
    curve = train(base, feed, long.validation, points=1)
    documents = short.draw(steps, 1)
    entries = {
        strategy: Entry(
            family="llama",
            feed=Feed(strategy=strategy, documents=documents, shape=short.shape, seed=1),
            validation=short.validation,
            weights=base.state_dict(),
            learning_rate=RATE,
        )
        for strategy in RACED
    }
    yield {
        "key": "lora",
        "rank": LORA_RANK,
        "learning_rate": RATE,
        "base_loss": validate(base, short.validation),
        "base_steps": len(curve.losses),
        "contestants": race(entries, 2 * steps, told),
    }
