"""Every strategy on every family and set, for its loss: at equal tokens, and at equal steps.

A run trains one epoch of the same documents, so the last validation is at equal tokens. The strategy that takes the
fewest steps says after which one all are compared at equal steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from typing import Any

from benchmarks.strategies_feeds import Feed
from benchmarks.strategies_models import build
from benchmarks.strategies_sets import Shape, text_sets
from benchmarks.strategies_train import LEARNING_RATE, Curve, one_thread, train

TRAINED = ("online", "grouped", "offline_large", "offline", "wrapped", "sampled", "ours")
"""Padding trains what "online" trains, and has its losses; one run shows it."""
FASTER = "offline_large, rate scaled"
"""The strategy with large steps at a learning rate raised by the root of their size, as is usual for Adam."""
PROCESSES = 2


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run; plain data, so that another process can take it."""

    label: str
    """Under which its figures are kept."""
    family: str
    set_name: str
    strategy: str
    seed: int
    steps: int
    """Of random minibatches: how many documents there are."""
    quick: bool
    shape: Shape | None = None
    """Where it isn't the set's."""
    options: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = LEARNING_RATE
    points: int = 8


def trained(run: Run) -> Curve:
    """Train one run in this process."""
    one_thread()
    found = text_sets(run.quick)[run.set_name]
    documents = found.draw(run.steps, run.seed)
    feed = Feed(
        strategy=run.strategy,
        documents=documents,
        shape=run.shape or found.shape,
        seed=run.seed,
        options=run.options,
    )
    model = build(run.family, run.seed, feed.attention)
    return train(
        model,
        feed,
        found.validation,
        at_step=fewest_steps(int(documents.lengths.sum()), feed.shape),
        points=run.points,
        learning_rate=run.learning_rate,
    )


def fewest_steps(tokens: int, shape: Shape) -> int:
    """Return how many whole steps of as many packs as a minibatch has documents the tokens make."""
    return max(1, tokens // (shape.documents * shape.capacity))


def all_trained(runs: list[Run]) -> Iterator[tuple[Run, Curve]]:
    """Train runs, some at once, one thread each; give each as it is done."""
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(trained, run): run for run in runs}
        for done in as_completed(waiting):
            yield waiting[done], done.result()


def runs(*, families: tuple[str, ...], steps: dict[str, int], seeds: int, quick: bool) -> list[Run]:
    """Return the runs of the comparison, the longest first.

    Args:
        families: of models.
        steps: of minibatches, by set.
        seeds: of documents, weights and order.
        quick: see `text_sets`.
    """
    found = [
        Run(
            label=strategy,
            family=family,
            set_name=name,
            strategy=strategy,
            seed=seed,
            steps=count,
            quick=quick,
        )
        for name, count in steps.items()
        for family in families
        for seed in range(seeds)
        for strategy in TRAINED
    ]
    found += [
        Run(
            label=FASTER,
            family=run.family,
            set_name=run.set_name,
            strategy=run.strategy,
            seed=run.seed,
            steps=run.steps,
            quick=quick,
            learning_rate=LEARNING_RATE * math.sqrt(_times_larger(run)),
        )
        for run in found
        if run.strategy == "offline_large"
    ]
    padded = [
        Run(
            label="padding", family="llama", set_name=name, strategy="padding", seed=0, steps=count, quick=quick
        )
        for name, count in steps.items()
    ]
    return padded + sorted(found, key=lambda run: run.set_name)


def _times_larger(run: Run) -> float:
    """Return by how much steps of as many packs are larger than those of as many documents."""
    shape = text_sets(run.quick)[run.set_name].shape
    return shape.documents / shape.packs


def plain(run: Run, curve: Curve) -> dict[str, Any]:
    """Return a run and what it found as plain data for the result file."""
    return {
        "label": run.label,
        "family": run.family,
        "set": run.set_name,
        "seed": run.seed,
        "learning_rate": run.learning_rate,
        "steps": len(curve.losses),
        **{name: value for name, value in asdict(curve).items() if name not in ("tokens", "documents")},
        "tokens": sum(curve.tokens),
        "step_tokens": [min(curve.tokens), max(curve.tokens)],
        "documents": sum(curve.documents),
    }
