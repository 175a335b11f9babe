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
    "micropack": "micropack",
    "sliced": "sliced",
    "dynamic_cp": "dynamic CP",
    "balanced": "balanced",
    "packed": "packed, tuned",
    "as_run": "packed, as users run it",
}
OTHERS = tuple(name for name in TITLES if name != "micropack")
MORE_CHUNKS = (2, 3)
"""Chunks of layers a GPU, beside one, that every tuned method is planned with."""
LARGE_MESH = 64
"""dp x pp from which a mesh counts as large."""
TOLERANCE = 1.02
"""Times as long as another method's step that ours may take and still not be slower."""
PLANNING_S = {"512 on 4x4": 0.1, "8192 on 64x16": 1.0}
"""Seconds that planning may take, by documents and dp x pp."""
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


def step_times(record: Record) -> list[float]:
    """Return how long planning took for each step of a record of the part "times": the median of its runs."""
    return [median(step["seconds"]) for step in record["steps"]]


def tuned(result: dict[str, Any]) -> list[Record]:
    """Return the cells of the grid, each method but packs as users run them with the chunks of layers that suit it.

    That is the fastest of its plans with 1, 2 and 3 chunks a GPU, as far as those were run.
    """
    woven = {record["key"]: record["methods"] for record in records_of(result, "interleaved")}
    cells = []
    for record in records_of(result, "grid"):
        methods = dict(record["methods"])
        for name in methods:
            plans = [methods[name], *(plans[name] for plans in _woven(record, woven) if name in plans)]
            fitting = [plan for plan in plans if "step_s" in plan]
            methods[name] = min(fitting, key=lambda plan: plan["step_s"], default=methods[name])
        cells.append({**record, "methods": methods})
    return cells


def _woven(record: Record, woven: dict[str, Record]) -> list[Record]:
    """The methods of a cell with more chunks of layers a GPU, as far as those were run."""
    keys = [f"{record['key']}/virtual_stages={chunks}" for chunks in MORE_CHUNKS]
    return [woven[key] for key in keys if key in woven]


def verdicts(result: dict[str, Any]) -> list[Verdict]:
    """Return every target with its verdict, from all cells that were run."""
    cells, equal = tuned(result), records_of(result, "equal_rates")
    return [*_of_bounds(cells, equal), *_of_peers(cells), *_of_times(result)]


def _of_bounds(cells: list[Record], equal: list[Record]) -> list[Verdict]:
    """Step times over their bounds, and memory."""
    large = ratios(where(cells, lambda record: record["is_large"]))
    even = ratios(equal)
    ours = [record["methods"]["micropack"] for record in cells if "step_s" in record["methods"]["micropack"]]
    over = sum(not figure["fits"] for figure in ours)
    return [
        Verdict(
            what="step time over the own bound of a plan, calibrated rates, large enough cells, median",
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
            what="step time over the own bound of a plan, equal rates, 4x4, worst",
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
    return found


def _of_times(result: dict[str, Any]) -> list[Verdict]:
    """How long planning takes on one core, and how many tasks a second are simulated."""
    records, planning = records_of(result, "times"), []
    for size, limit in PLANNING_S.items():
        found = [seconds for record in records if record["size"] == size for seconds in step_times(record)]
        planning += [
            Verdict(
                what=f"planning {size} (documents, dp x pp), one core, {name} of all sets and models",
                value=value,
                target=limit,
                is_least=False,
                unit=" s",
                cells=len(found),
            )
            for name, value in (("worst", max(found, default=None)), ("median", middle(found)))
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
