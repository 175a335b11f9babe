"""How full packs are against what is learned: capacity, window, and sorted against random composition.

Every run has the same number of tokens a step, and for one seed the same documents. So a setting's loss
is told as its difference from random minibatches of the same seed, which varies less between seeds.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.strategies_base import base_of
from benchmarks.strategies_compare import PROCESSES, Run, Told, all_trained, key_of
from benchmarks.strategies_feeds import Feed
from benchmarks.strategies_sets import Shape, TextSet

BASE = "online"


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
    """Return the settings of the sweep, random minibatches first.

    Args:
        factors: capacities, in the set's.
        windows: documents packed at a time, beside the whole set.
    """
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
    """Train every setting on every seed, seed by seed.

    Args:
        of_set: the documents.
        told: of progress.
        known: keys of records that there are already.
        steps: of minibatches.
        seeds: of documents and their order.
        factors: see `settings`.
        windows: see `settings`.
        processes: see `all_trained`.

    Yields:
        A record of each run: how full its packs are, and its loss.
    """
    all_settings = {setting.label: setting for setting in settings(factors, windows)}
    weights = base_of("llama", of_set)
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
                    shape=_shape(of_set.shape, setting.capacity_factor),
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


def _shape(shape: Shape, factor: int) -> Shape:
    return Shape(
        documents=shape.documents, capacity=shape.capacity * factor, packs=max(1, shape.packs // factor)
    )
