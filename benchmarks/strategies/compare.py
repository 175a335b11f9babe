"""The runs for the loss: every strategy on every family and set, and how full packs are against what is learned.

A run trains one epoch of the same documents, so the last validation is at equal tokens. The strategy that takes the
fewest steps says after which one all are compared at equal steps. The sweep (`density`) goes over capacity, window,
and sorted against random composition. Its runs have the same number of tokens a step, and for one seed the same
documents. So a setting's loss is told as its difference from random minibatches of the same seed, which varies less
between seeds.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from typing import Any

from benchmarks.strategies.feeds import Feed
from benchmarks.strategies.figures import BASE, Told
from benchmarks.strategies.sets import Shape, TextSet
from benchmarks.strategies.train import LEARNING_RATE, POINTS, Curve, base_of, one_thread, started, train
from varlen.train.demo.corpus import Documents

TRAINED = ("online", "grouped", "offline_large", "offline", "wrapped", "sampled", "ours")
"""Padding trains what "online" trains and has its losses; one run a set shows it."""
SCALED = "offline_scaled"
"""The strategy with large steps at a learning rate raised by the root of their size, as is usual with Adam."""
PROCESSES = 2


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run; plain data, so that another process can take it."""

    label: str
    """Under which its figures are kept."""
    family: str
    set_name: str
    weights: str
    """File of the base that it begins with."""
    feed: Feed
    validation: Documents
    learning_rate: float = LEARNING_RATE
    points: int = POINTS

    @property
    def at_step(self) -> int:
        return fewest_steps(int(self.feed.documents.lengths.sum()), self.feed.shape)


def fewest_steps(tokens: int, shape: Shape) -> int:
    """Return how many whole steps of as many packs as a minibatch has documents the tokens make."""
    return max(1, tokens // (shape.documents * shape.capacity))


def trained(run: Run) -> Curve:
    one_thread()
    model = started(run.family, run.feed.attention, run.weights)
    more = {"points": run.points, "learning_rate": run.learning_rate}
    return train(model, run.feed, run.validation, at_step=run.at_step, **more)


def all_trained(runs: list[Run], told: Told, processes: int = PROCESSES) -> Iterator[tuple[Run, Curve]]:
    """Train runs, some at once, one thread each; give each as it is done.

    `processes=0` trains in this process.
    """
    if not processes:
        yield from ((run, trained(run)) for run in runs)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(trained, run): run for run in runs}
        for count, done in enumerate(as_completed(waiting), start=1):
            run = waiting[done]
            told(count, len(runs), key_of(run))
            yield run, done.result()


def runs(sets: dict[str, TextSet], *, seeds: dict[str, int], steps: dict[str, int]) -> list[Run]:
    """Return the runs of the comparison, seed by seed, so that it may be stopped and gone on with.

    `seeds` are by family of models, `steps` (minibatches) by set.
    """
    first = next(iter(seeds))
    weights = {(family, name): base_of(family, of_set) for name, of_set in sets.items() for family in seeds}
    padded, found, scaled = [], [], []
    for seed in range(max(seeds.values())):
        for name, of_set in sets.items():
            documents = of_set.draw(steps[name], seed)
            for family in (family for family in seeds if seed < seeds[family]):
                for strategy in TRAINED:
                    feed = Feed(strategy=strategy, documents=documents, shape=of_set.shape, seed=seed)
                    run = Run(
                        label=strategy,
                        family=family,
                        set_name=name,
                        weights=weights[family, name],
                        feed=feed,
                        validation=of_set.validation,
                    )
                    found.append(run)
                    if family != first:
                        continue
                    if strategy == "offline_large":
                        larger = of_set.shape.documents / of_set.shape.packs
                        rate = LEARNING_RATE * math.sqrt(larger)
                        scaled.append(replace(run, label=SCALED, learning_rate=rate))
                    if strategy == "online" and seed == 0:
                        padded.append(replace(run, label="padding", feed=replace(feed, strategy="padding")))
    return sorted(padded + scaled + found, key=lambda run: run.feed.seed)


def key_of(run: Run) -> str:
    return f"{run.family}, {run.set_name}, {run.label}, seed {run.feed.seed}"


def plain(run: Run, curve: Curve) -> dict[str, Any]:
    held = asdict(curve)
    tokens, documents = held.pop("tokens"), held.pop("documents")
    return {
        "key": key_of(run),
        "label": run.label,
        "family": run.family,
        "set": run.set_name,
        "seed": run.feed.seed,
        "learning_rate": run.learning_rate,
        "steps": len(curve.losses),
        "at_step": run.at_step,
        "tokens": sum(tokens),
        "step_tokens": [min(tokens), max(tokens)],
        "full_step_tokens": sum(tokens[:-1]) / max(1, len(tokens) - 1),
        "documents": sum(documents),
        **held,
    }


def compare(
    sets: dict[str, TextSet], told: Told, known: Container[str], **sizes: dict[str, int]
) -> Iterator[dict[str, Any]]:
    """Train everything that isn't known; sizes as `runs` has them, and whom to tell."""
    wanted = [run for run in runs(sets, **sizes) if key_of(run) not in known]
    for run, curve in all_trained(wanted, told):
        yield plain(run, curve)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way of composing packs."""

    label: str
    strategy: str = "ours"
    capacity_factor: int = 1
    """Packs are as many times the set's capacity, and a step has as many fewer."""
    window: int | None = None
    """Documents packed at a time; None for the whole set."""
    is_sorted: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def settings(factors: tuple[int, ...], windows: tuple[int, ...]) -> list[Setting]:
    found = [Setting(label=BASE, strategy="online")]
    for factor in factors:
        for window in (*windows, None):
            for method in ("best_fit", "best_fit_decreasing"):
                scope = {"scope": "all"} if window is None else {"window": window}
                found.append(
                    Setting(
                        label=f"{method}, window {window}, {factor}",
                        capacity_factor=factor,
                        window=window,
                        is_sorted=method == "best_fit_decreasing",
                        options={"method": method, **scope},
                    )
                )
    found.append(Setting(label="next_fit", options={"method": "next_fit", "scope": "all"}))
    return found


def density(
    of_set: TextSet,
    told: Told,
    known: Container[str],
    *,
    steps: int,
    seeds: int,
    factors: tuple[int, ...] = (1, 2, 4),
    windows: tuple[int, ...] = (64,),
    processes: int = PROCESSES,
) -> Iterator[dict[str, Any]]:
    """Train every setting on every seed, seed by seed."""
    all_settings = {setting.label: setting for setting in settings(factors, windows)}
    weights, shape = base_of("llama", of_set), of_set.shape
    wanted: list[Run] = []
    for seed in range(seeds):
        documents = of_set.draw(steps, seed)
        wanted += [
            Run(
                label=setting.label,
                family="llama",
                set_name=of_set.name,
                weights=weights,
                feed=Feed(
                    strategy=setting.strategy,
                    documents=documents,
                    shape=replace(
                        shape,
                        capacity=shape.capacity * setting.capacity_factor,
                        packs=max(1, shape.packs // setting.capacity_factor),
                    ),
                    seed=seed,
                    options=setting.options,
                ),
                validation=of_set.validation,
                points=1,
            )
            for setting in all_settings.values()
        ]
    for run, curve in all_trained([run for run in wanted if key_of(run) not in known], told, processes):
        setting, shape = all_settings[run.label], run.feed.shape
        full_steps = curve.tokens[:-1]  # the last step takes what is left
        yield {
            "key": key_of(run),
            "label": run.label,
            "seed": run.feed.seed,
            "capacity": shape.capacity,
            "window": setting.window,
            "is_sorted": setting.is_sorted,
            "fill": sum(full_steps) / (len(full_steps) * shape.capacity * shape.packs),
            "steps": len(curve.losses),
            "loss": curve.last_loss,
        }
