"""What a result of the strategies says: means with their spread over seeds, differences, rates and ratios.

Needs nothing but Python, so that tables and pictures can be made from the result file alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, median, stdev
from typing import Any

from benchmarks import records
from benchmarks.records import RESULTS

FOLDER = RESULTS / "strategies"
Told = Callable[[int, int, str], None]
"""Called with the runs done, all runs, and the last one's name."""
BASE = "online"
"""What losses are compared with: the minibatches that padding trains."""
FAMILIES = {"llama": "Llama", "mixtral": "Mixtral", "gemma3": "Gemma 3"}
TITLES = {
    "padding_mask": "padding, with mask",
    "padding": "padding",
    "online": "online minibatch",
    "grouped": "padding, grouped by length",
    "offline": "offline",
    "offline_large": "offline, large steps",
    "offline_scaled": "offline, large steps, higher rate",
    "wrapped": "offline, wrapped",
    "sampled": "bin-packed sampling",
    "ours": "`vl.PackedLoader`",
}
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t: 97.5 % of it lie below, for 1, 2, ... degrees of freedom."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, and how far the true one may lie from it, at 95 %."""

    mean: float
    half_width: float | None
    """None for a single seed."""

    @property
    def is_clear(self) -> bool:
        return self.half_width is not None and abs(self.mean) > self.half_width


def newest() -> dict[str, Any]:
    return dict(json.loads(records.newest(FOLDER).read_text()))


def estimate(values: Iterable[float]) -> Estimate:
    found = list(values)
    if len(found) < 2:
        return Estimate(fmean(found), None)
    return Estimate(fmean(found), _T[len(found) - 2] * stdev(found) / sqrt(len(found)))


def figures(result: dict[str, Any], part: str) -> Any:
    return result["parts"].get(part, {}).get("figures", [])


def runs_of(result: dict[str, Any], set_name: str, family: str, label: str) -> dict[int, dict[str, Any]]:
    return {
        run["seed"]: run
        for run in figures(result, "comparison")
        if (run["set"], run["family"], run["label"]) == (set_name, family, label)
    }


def loss(run: dict[str, Any], *, at_equal: str) -> float:
    """Return a run's validation loss.

    `at_equal` is "tokens": after all documents; or "steps": after as many steps as the strategy with the fewest
    takes.
    """
    if at_equal == "tokens":
        return float(run["validation"][-1][2])
    (found,) = (value for step, _, value in run["validation"] if step == run["at_step"])
    return float(found)


def losses(result: dict[str, Any], set_name: str, family: str, label: str, at_equal: str) -> Estimate | None:
    found = runs_of(result, set_name, family, label)
    return estimate(loss(run, at_equal=at_equal) for run in found.values()) if found else None


def differences(
    result: dict[str, Any], set_name: str, family: str, label: str, at_equal: str
) -> Estimate | None:
    """Return how far a strategy's loss lies above the base's of the same seeds; None where it wasn't run."""
    found, base = (runs_of(result, set_name, family, name) for name in (label, BASE))
    if not found.keys() & base.keys():
        return None
    return estimate(
        loss(run, at_equal=at_equal) - loss(base[seed], at_equal=at_equal)
        for seed, run in found.items()
        if seed in base
    )


def by_setting(result: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of the sweep by setting, random minibatches first, the others by capacity and window."""
    found: dict[str, list[dict[str, Any]]] = {}
    for record in figures(result, "density"):
        found.setdefault(record["label"], []).append(record)

    def place(label: str) -> tuple[Any, ...]:
        record = found[label][0]
        is_last = label == "next_fit"
        return label != BASE, is_last, record["capacity"], record["window"] is None, record["is_sorted"]

    return {label: found[label] for label in sorted(found, key=place)}


def above_base(found: dict[str, list[dict[str, Any]]], label: str) -> Estimate:
    """Return how far a setting's loss lies above random minibatches of the same seed."""
    base = {record["seed"]: record["loss"] for record in found[BASE]}
    return estimate(
        record["loss"] - base[record["seed"]] for record in found[label] if record["seed"] in base
    )


@dataclass(frozen=True)
class Speed:
    """What a contestant of a race did."""

    tokens_per_s: float
    ratio: float
    """Times as fast as the peer, in wall or processor time, whichever is less."""
    ratios: tuple[float, float]
    """The same in each third of the steps: the least and the greatest."""
    slots_per_token: float
    memory_mb: float
    slowest: float
    """The slowest step's time over the median one's."""


def speed(contestants: list[dict[str, Any]], name: str, peer: str = "padding") -> Speed:
    by_name = {contestant["strategy"]: contestant for contestant in contestants}
    steps, others = by_name[name]["steps"], by_name[peer]["steps"]
    tokens = sum(step["tokens"] for step in steps)
    walls = [step["wall_s"] for step in steps]
    thirds = [_ratio(_third(steps, k), _third(others, k)) for k in range(3)]
    return Speed(
        tokens_per_s=tokens / sum(walls),
        ratio=_ratio(steps, others),
        ratios=(min(thirds), max(thirds)),
        slots_per_token=sum(step["slots"] for step in steps) / tokens,
        memory_mb=by_name[name]["memory_bytes"] / 1e6,
        slowest=max(walls) / median(walls),
    )


def _third(steps: list[dict[str, Any]], third: int) -> list[dict[str, Any]]:
    size = max(1, len(steps) // 3)
    return steps[third * size : (third + 1) * size] or steps[-1:]


def _ratio(steps: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """Return how many times the tokens a second of others these steps have, by the clock that says less."""
    return min(_rate(steps, clock) / _rate(others, clock) for clock in ("wall_s", "cpu_s"))


def _rate(steps: list[dict[str, Any]], clock: str) -> float:
    return float(sum(step["tokens"] for step in steps) / sum(step[clock] for step in steps))


def largest_difference_of_step_losses(result: dict[str, Any]) -> float:
    """Return how far the losses of padding's steps lie from the online minibatch's, at most, over all runs."""
    pairs = []
    for run in figures(result, "comparison"):
        if run["label"] == "padding":
            base = runs_of(result, run["set"], run["family"], BASE)[run["seed"]]
            pairs.append((run["losses"], base["losses"]))
    for race in figures(result, "throughput"):
        by_name = {contestant["strategy"]: contestant["steps"] for contestant in race["contestants"]}
        pairs.append(
            tuple([step["loss"] for step in by_name[name]] for name in ("padding", BASE))  # type: ignore[arg-type]
        )
    return max(abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
