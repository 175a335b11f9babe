"""Extreme variance: in each minibatch one document, on average, is 10, 100 or 1,000 times as long as all others."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from benchmarks.strategies_compare import Told
from benchmarks.strategies_feeds import Feed
from benchmarks.strategies_race import Entry, race
from benchmarks.strategies_sets import Shape, extremes

RACED = ("padding", "grouped", "online", "ours")
MINIBATCH = 16
BASE = 8
"""Tokens of a short document."""


def extreme(
    told: Told, known: Container[str], *, factors: dict[int, int], base: int = BASE
) -> Iterator[dict[str, Any]]:
    """Race strategies on such documents.

    Args:
        told: of progress.
        known: keys of records that there are already.
        factors: how much longer the long documents are, and for how many steps.
        base: tokens of a short document.

    Yields:
        A record of each race.
    """
    for factor, steps in factors.items():
        if f"{factor}x" in known:
            continue
        minibatch_tokens = base * (MINIBATCH - 1 + factor)
        shape = Shape(documents=MINIBATCH, capacity=minibatch_tokens, packs=1)
        documents = extremes(factor, steps, shape, base)
        entries = {
            strategy: Entry(
                family="llama", feed=Feed(strategy=strategy, documents=documents, shape=shape, seed=0)
            )
            for strategy in RACED
        }
        told(0, steps, f"{factor}x: starting")
        yield {
            "key": f"{factor}x",
            "factor": factor,
            "base": base,
            "minibatch": MINIBATCH,
            "capacity": minibatch_tokens,
            "contestants": race(entries, 2 * steps, told),
        }
