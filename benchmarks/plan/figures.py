"""What the records of the planning benchmark say: medians, worst cells, verdicts, and on which day each part was run.

Needs nothing but Python.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.records import RESULTS, newest

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
TUNED_OTHERS = tuple(name for name in OTHERS if name != "as_run")
MORE_CHUNKS = (2, 3)
"""Chunks of layers a GPU, beside one, that every tuned method is planned with."""
ATTENTION_SHARES = (0.5, 0.75, 1.0)
"""Shares of the published rates of attention, at which cells are planned besides the measured ones."""
LARGE_MESH = 16
"""dp x pp from which a mesh counts as large."""
TOLERANCE = 1.001
"""Times as long as another method's step that ours may take and still not be slower."""
AIM = 1.10
"""The aimed median of step times of the best other method over ours, on large meshes."""
PLANNING_S = {"512 on 4x4": 0.15, "8192 on 64x16": 1.5, "100,000 on 64x16": 20.0}
"""Seconds that planning may take, by documents and dp x pp."""
HUGE = "100,000 on 64x16"
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

    @property
    def met(self) -> bool | None:
        """Whether it holds; None where nothing was measured."""
        if self.value is None:
            return None
        return self.value >= self.target if self.is_least else self.value <= self.target


def load_newest(folder: Path = FOLDER) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(newest(folder).read_text(encoding="utf-8"))
    return result


def records_of(result: dict[str, Any], part: str) -> list[Record]:
    records: list[Record] = result["parts"].get(part, {}).get("records", [])
    return records


def ratios(records: Iterable[Record], method: str = "micropack") -> list[float]:
    return [r["methods"][method]["ratio"] for r in records if "ratio" in r["methods"].get(method, {})]


def speedup(record: Record, over: str) -> float | None:
    """Return another method's step time over micropack's.

    None where either doesn't fit, or where packs as users run them leave ranks without work.
    """
    ours, theirs = record["methods"].get("micropack", {}), record["methods"].get(over, {})
    if "step_s" not in ours or "step_s" not in theirs or (over == "as_run" and theirs.get("idle_ranks")):
        return None
    return float(theirs["step_s"] / ours["step_s"])


def best_other(record: Record) -> tuple[str, float] | None:
    """Return the fastest other method that is tuned, and its step time over micropack's; None where none fits."""
    found = {name: value for name in TUNED_OTHERS if (value := speedup(record, name)) is not None}
    return min(found.items(), key=lambda each: each[1]) if found else None


def over_best_other(records: Iterable[Record]) -> list[float]:
    return [found[1] for record in records if (found := best_other(record)) is not None]


def speedups(records: Iterable[Record], over: str) -> list[float]:
    return [found for record in records if (found := speedup(record, over)) is not None]


DECILES = ("least", "10 %", "median", "90 %", "most")


def deciles(values: list[float]) -> list[float | None]:
    if not values:
        return [None] * len(DECILES)
    rising = sorted(values)
    return [rising[round(share * (len(rising) - 1))] for share in (0, 0.1, 0.5, 0.9, 1)]


def number(value: float | None, unit: str = "", digits: int = 3) -> str:
    """Return a number with some digits that count, "-" for none."""
    if value is None:
        return "-"
    return (
        f"{value:,.0f}{unit}"
        if abs(value) >= 100 or (value == 0 and not unit)
        else f"{value:.{digits}g}{unit}"
    )


def spread(values: list[float], unit: str = "") -> str:
    """Return the median, and the least and most value."""
    if not values:
        return "-"
    return f"{number(median(values), unit)} ({number(min(values))} to {number(max(values))})"


def middle(values: list[float]) -> float | None:
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
    cells, equal = tuned(result), records_of(result, "equal_rates")
    return [
        *_of_bounds(cells, equal),
        *_of_peers(cells, "exchanges as measured"),
        *_of_peers(records_of(result, "hidden"), "exchanges hidden"),
        *_of_times(result),
    ]


def _of_bounds(cells: list[Record], equal: list[Record]) -> list[Verdict]:
    large = ratios(record for record in cells if record["is_large"])
    even = ratios(equal)
    ours = [record["methods"]["micropack"] for record in cells if "step_s" in record["methods"]["micropack"]]
    over = sum(not figure["fits"] for figure in ours)
    bound = "step time over the own bound of a plan"
    return [
        _most(f"{bound}, calibrated rates, large enough cells, median", middle(large), 1.08, len(large)),
        _most("the same, worst", max(large, default=None), 1.30, len(large)),
        _most(f"{bound}, equal rates, 4x4, worst", max(even, default=None), 1.10, len(even)),
        _most(
            "plans whose peak memory is over the card's limit",
            float(over) if ours else None,
            0.0,
            len(ours),
            "",
        ),
    ]


def _most(what: str, value: float | None, target: float, cells: int, unit: str = "x") -> Verdict:
    return Verdict(what=what, value=value, target=target, is_least=False, unit=unit, cells=cells)


def _least(what: str, values: list[float], target: float, unit: str = "x") -> Verdict:
    """A median that must be at least the target."""
    value = middle(values)
    return Verdict(
        what=f"{what}, median", value=value, target=target, is_least=True, unit=unit, cells=len(values)
    )


def _of_peers(cells: list[Record], exchanges: str) -> list[Verdict]:
    found = []
    for name in TUNED_OTHERS:
        slower = [1 / value for value in speedups(cells, name)]
        what = f"step time over that of {TITLES[name]}, {exchanges}, worst"
        found.append(_most(what, max(slower, default=None), TOLERANCE, len(slower)))
    wide = [r for r in cells if r["cell"]["dp"] * r["cell"]["pp"] >= LARGE_MESH]
    what = f"speed-up over the best other method, {exchanges}, dp x pp of at least {LARGE_MESH}"
    return [*found, _least(what, over_best_other(wide), AIM)]


def _of_times(result: dict[str, Any]) -> list[Verdict]:
    """How long planning takes on one core, and how many tasks a second are simulated."""
    records, planning = records_of(result, "times"), []
    for size, limit in PLANNING_S.items():
        found = [seconds for record in records if record["size"] == size for seconds in step_times(record)]
        for name, value in (("worst", max(found, default=None)), ("median", middle(found))):
            what = f"planning {size} (documents, dp x pp), one core, {name} of all sets and models"
            planning.append(_most(what, value, limit, len(found), " s"))
        if size == HUGE:
            most = max((r["most_bytes"] / 1e9 for r in records if r["size"] == size), default=None)
            planning.append(
                _most(f"the most memory of a process that plans {size}", most, 2.0, len(found), " GB")
            )
    timed = records_of(result, "engine")
    speeds = {
        "the event engine alone": [r["tasks"] / seconds for r in timed for seconds in r["engine_s"]],
        "all of vl.simulate": [r["tasks"] / seconds for r in timed for seconds in r["seconds"]],
    }
    return planning + [
        _least(f"tasks a second, {what}, one core", values, 1e6, "") for what, values in speeds.items()
    ]


EXACT = RESULTS / "plan" / "exact.json"
UNKNOWN = "not kept"
"""What stands where a part was run before runs were noted."""
Rows = list[tuple[str, ...]]
RUNS_HEAD = ("part", "date", "varlen's commit", "processor", "minutes", "load", "records")
EXACT_HEAD = (
    "steps",
    "number",
    "assign over bound, %",
    "HiGHS gains, %",
    "proven",
    "seconds",
    "CP-SAT gains, %",
    "proven",
    "seconds",
)
_SOLVERS = ("highs", "cp_sat")


def note_run(part: dict[str, Any], result: dict[str, Any], methods: tuple[str, ...] = ()) -> None:
    """Note in a part that records of it come from this run; a part that was stopped and resumed has several."""
    run = {
        "date": result["date"],
        "commit": result["versions"]["commit"],
        "cpu": result["machine"]["cpu"],
        **({"methods": list(methods)} if methods else {}),
    }
    if run not in part.setdefault("runs", []):
        part["runs"].append(run)


def runs(result: dict[str, Any]) -> Rows:
    rows: Rows = []
    for name, part in result["parts"].items():
        low, high = part["load"] or (UNKNOWN, UNKNOWN)
        told = (f"{part['seconds'] / 60:.1f}", f"{low} to {high}", f"{len(part['records']):,}")
        for place, run in enumerate(part.get("runs") or [part]):
            title = name + (f", {', '.join(run['methods'])} anew" if "methods" in run else "")
            where = tuple(run.get(key, UNKNOWN) for key in ("date", "commit", "cpu"))
            rows.append((title, *where, *(told if place == 0 else ("", "", ""))))
    return rows


def load_exact(path: Path = EXACT) -> dict[str, Any] | None:
    """Return what `python -m benchmarks.plan.exact` wrote, None where there is none."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found or None


def exact_words(found: dict[str, Any]) -> str:
    """Say when and on what exact solvers were measured, and how to measure them anew."""
    made, limits, held = found["versions"], found["limits"], found["machine"]
    seconds = sum(step[name]["seconds"] for step in found["steps"] for name in _SOLVERS if name in step)
    solvers = f"HiGHS {made['highs']} (at most {limits['highs_nodes']:,} nodes)"
    if made["ortools"] != "absent":
        work = f"{limits['cp_sat_deterministic_s']:g} s of counted work"
        solvers += f", CP-SAT of ortools {made['ortools']} (at most {work})"
    return (
        f"{found['date']}, commit {made['commit']}, {held['cpu']}: {solvers}, on one thread, from what `assign` "
        "makes of the same documents. `python -m benchmarks.plan.exact` measures them anew "
        f"({seconds:.0f} s here, and CP-SAT only where ortools is installed) and writes "
        "`benchmarks/results/plan/exact.json`. Medians; *gains* are of the heaviest group, the most of any step."
    )


def exact(found: dict[str, Any]) -> Rows:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for step in found["steps"]:
        kinds.setdefault(step["step"], []).append(step)
    return [
        (
            name,
            f"{len(steps)}",
            f"{100 * median(step['assign']['over_bound'] for step in steps):.4f}",
            *(cell for solver in _SOLVERS for cell in _solved(steps, solver)),
        )
        for name, steps in kinds.items()
    ]


def _solved(steps: list[dict[str, Any]], solver: str) -> tuple[str, str, str]:
    answers = [step[solver] for step in steps if solver in step]
    if not answers:
        return "-", "-", "-"
    return (
        f"{100 * max(answer['gained'] for answer in answers):.4f}",
        f"{sum(answer['proven'] for answer in answers)}",
        f"{median(answer['seconds'] for answer in answers):.2f}",
    )
