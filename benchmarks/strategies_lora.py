"""Adapters alone: a Llama that knows the longer set is frozen, and LoRA learns the short one."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from benchmarks.strategies_base import base_of, started
from benchmarks.strategies_compare import Told
from benchmarks.strategies_feeds import Feed
from benchmarks.strategies_models import LORA_RANK
from benchmarks.strategies_race import Entry, race
from benchmarks.strategies_sets import TextSet
from benchmarks.strategies_train import one_thread, validate

RACED = ("padding", "grouped", "online", "ours")
RATE = 8e-3
"""Adapters learn at a higher rate than weights do."""


def lora(
    sets: dict[str, TextSet], told: Told, known: Container[str], *, steps: int
) -> Iterator[dict[str, Any]]:
    """Race adapters on a base of the longer set, over one epoch of the short set.

    Args:
        sets: of documents, by name.
        told: of progress.
        known: keys of records that there are already.
        steps: minibatches of the short set that adapters learn.

    Yields:
        The record of the race.
    """
    if "lora" in known:
        return
    one_thread()
    short = sets["short"]
    weights = base_of("llama", sets["long"])
    documents = short.draw(steps, 1)
    entries = {
        strategy: Entry(
            family="llama",
            feed=Feed(strategy=strategy, documents=documents, shape=short.shape, seed=1),
            validation=short.validation,
            weights=weights,
            learning_rate=RATE,
        )
        for strategy in RACED
    }
    yield {
        "key": "lora",
        "rank": LORA_RANK,
        "learning_rate": RATE,
        "base_loss": validate(started("llama", "varlen", weights), short.validation),
        "contestants": race(entries, 2 * steps, told),
    }
