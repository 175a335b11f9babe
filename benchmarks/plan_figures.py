"""What the records of the planning benchmark say: medians, worst cells, and verdicts computed from all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.table import RESULTS, newest

FOLDER = RESULTS / "plan" / "methods"
TITLES = {
    "as_run": "packed, as users run it",
    "packed": "packed, tuned",
    "balanced": "balanced",
    "dynamic_cp": "dynamic CP",
    "sliced": "sliced",
    "micropack": "micropack",
}
OTHERS = tuple(name for name in TITLES if name != "micropack")
LARGE_MESH = 64
"""dp x pp from which a mesh counts as large."""
TOLERANCE = 1.02
"""Times as long as another method's step that ours may take and still not be slower."""
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One sentence that must hold, and the figure that says whether it does."""

    what: str
    value: float | None
    """None where no cell says anything."""
    target: float
    is_least: bool
    """Whether the value must be at least the target, else at most."""
    unit: str = "x"
    cells: int = 0
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether it holds; None where nothing was measured."""
        if self.value is None:
            return None
        return self.value >= self.target if self.is_least else self.value <= self.target


def load_newest(folder: Path = FOLDER) -> dict[str, Any]:
    """Return the newest result as plain data.

    Raises:
        FileNotFoundError: there is none.
    """
    result: dict[str, Any] = json.loads(newest(folder).read_text(encoding="utf-8"))
    return result


def records_of(result: dict[str, Any], part: str) -> list[Record]:
    """Return the records of a part, none where it was not run."""
    records: list[Record] = result["parts"].get(part, {}).get("records", [])
    return records


def ratios(records: Iterable[Record], method: str = "micropack") -> list[float]:
    """Return the step time over the bound of a method in every cell that it fits."""
    return [r["methods"][method]["ratio"] for r in records if "ratio" in r["methods"].get(method, {})]


def speedup(record: Record, over: str) -> float | None:
    """Return another method's step time over micropack's; None where either doesn't fit."""
    ours, theirs = record["methods"].get("micropack", {}), record["methods"].get(over, {})
    if "step_s" not in ours or "step_s" not in theirs:
        return None
    return float(theirs["step_s"] / ours["step_s"])


def speedups(records: Iterable[Record], over: str) -> list[float]:
    """Return the speed-ups of all cells that both methods fit."""
    return [found for record in records if (found := speedup(record, over)) is not None]


def where(records: Iterable[Record], holds: Callable[[Record], bool]) -> list[Record]:
    """Return the records that a condition holds for."""
    return [record for record in records if holds(record)]


def middle(values: list[float]) -> float | None:
    """Return the median, None of nothing."""
    return median(values) if values else None


def verdicts(result: dict[str, Any]) -> list[Verdict]:
    """Return every target with its verdict, from all cells that were run."""
    cells, equal = records_of(result, "grid"), records_of(result, "equal_rates")
    woven = {record["key"]: record["chunks"] for record in records_of(result, "interleaved")}
    return [*_of_bounds(cells, equal, woven), *_of_peers(cells), *_of_times(result)]


def _of_bounds(cells: list[Record], equal: list[Record], woven: dict[str, Record]) -> list[Verdict]:
    """Step times over their bounds, and memory."""
    large = ratios(where(cells, lambda record: record["is_large"]))
    even = ratios(equal)
    best = [
        min([*ratios([record]), *(one["ratio"] for one in woven[record["key"]].values() if "ratio" in one)])
        for record in cells
        if record["is_large"] and record["key"] in woven
    ]
    ours = [record["methods"]["micropack"] for record in cells if "step_s" in record["methods"]["micropack"]]
    over = sum(not figure["fits"] for figure in ours)
    return [
        Verdict(
            what="step time over the bound, calibrated rates, large enough cells, median",
            value=middle(large),
            target=1.08,
            is_least=False,
            cells=len(large),
        ),
        Verdict(
            what="the same, worst",
            value=max(large, default=None),
            target=1.30,
            is_least=False,
            cells=len(large),
        ),
        Verdict(
            what="the same of dp x pp of 64 and more, at the best of 1 to 3 chunks of layers a GPU, worst",
            value=max(best, default=None),
            target=1.30,
            is_least=False,
            cells=len(best),
        ),
        Verdict(
            what="step time over the bound, equal rates, 4x4, worst",
            value=max(even, default=None),
            target=1.10,
            is_least=False,
            cells=len(even),
        ),
        Verdict(
            what="plans whose peak memory is over the card's limit",
            value=float(over) if ours else None,
            target=0.0,
            is_least=False,
            unit="",
            cells=len(ours),
        ),
    ]


def _of_peers(cells: list[Record]) -> list[Verdict]:
    """Step times beside those of other methods."""
    found = []
    for name in OTHERS:
        slower = [1 / value for value in speedups(cells, name)]
        found.append(
            Verdict(
                what=f"step time over that of {TITLES[name]}, worst",
                value=max(slower, default=None),
                target=TOLERANCE,
                is_least=False,
                cells=len(slower),
            )
        )
    longest = where(cells, lambda record: record["cell"]["capacity"] == 262_144)
    for name in sorted({record["cell"]["lengths"] for record in longest}):
        of_set = speedups(where(longest, lambda r, name=name: r["cell"]["lengths"] == name), "as_run")
        found.append(
            Verdict(
                what=f"speed-up over packed as users run it, 256K, {name}, median",
                value=middle(of_set),
                target=2.8,
                is_least=True,
                cells=len(of_set),
            )
        )
    wide = where(longest, lambda record: record["cell"]["dp"] * record["cell"]["pp"] >= LARGE_MESH)
    tuned = speedups(wide, "packed")
    found.append(
        Verdict(
            what=f"speed-up over packed, tuned, 256K, dp x pp of at least {LARGE_MESH}, median",
            value=middle(tuned),
            target=2.8,
            is_least=True,
            cells=len(tuned),
        )
    )
    return found


def _of_times(result: dict[str, Any]) -> list[Verdict]:
    """How long planning takes on one core, and how many tasks a second are simulated."""
    limits = {"512 on 4x4": 0.1, "8192 on 64x16": 1.0}
    planning = [
        Verdict(
            what=f"planning {record['key']} (documents, dp x pp), one core, median of {len(record['seconds'])}",
            value=median(record["seconds"]),
            target=limits[record["key"]],
            is_least=False,
            unit=" s",
            cells=len(record["seconds"]),
        )
        for record in records_of(result, "times")
    ]
    timed = records_of(result, "engine")
    speeds = {
        "the event engine alone": [r["tasks"] / seconds for r in timed for seconds in r["engine_s"]],
        "all of vl.simulate": [r["tasks"] / seconds for r in timed for seconds in r["seconds"]],
    }
    return planning + [
        Verdict(
            what=f"tasks a second, {what}, one core, median",
            value=middle(found),
            target=1e6,
            is_least=True,
            unit="",
            cells=len(found),
        )
        for what, found in speeds.items()
    ]
