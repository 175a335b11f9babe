"""On which day and commit each part of the planning results was run; and what exact solvers brought."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.table import RESULTS

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
    """Note in a part that records of it come from this run; a part that was stopped and resumed has several.

    Args:
        part: of a result file.
        result: the file's head, of this run: date, machine and versions.
        methods: those that were planned anew, where others were not.
    """
    run = {
        "date": result["date"],
        "commit": result["versions"]["commit"],
        "cpu": result["machine"]["cpu"],
        **({"methods": list(methods)} if methods else {}),
    }
    if run not in part.setdefault("runs", []):
        part["runs"].append(run)


def runs(result: dict[str, Any]) -> Rows:
    """Return a row a run of every part: what `RUNS_HEAD` says.

    Args:
        result: of the benchmark.
    """
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
    """Return what `python -m benchmarks.plan_exact` wrote, None where there is none.

    Args:
        path: of the file.
    """
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found or None


def exact_words(found: dict[str, Any]) -> str:
    """Say when and on what exact solvers were measured, and how to measure them anew.

    Args:
        found: of `load_exact`.
    """
    made, limits, held = found["versions"], found["limits"], found["machine"]
    seconds = sum(step[name]["seconds"] for step in found["steps"] for name in _SOLVERS if name in step)
    solvers = f"HiGHS {made['highs']} (at most {limits['highs_nodes']:,} nodes)"
    if made["ortools"] != "absent":
        work = f"{limits['cp_sat_deterministic_s']:g} s of counted work"
        solvers += f", CP-SAT of ortools {made['ortools']} (at most {work})"
    return (
        f"{found['date']}, commit {made['commit']}, {held['cpu']}: {solvers}, on one thread, from what `assign` "
        "makes of the same documents. `python -m benchmarks.plan_exact` measures them anew "
        f"({seconds:.0f} s here, and CP-SAT only where ortools is installed) and writes "
        "`benchmarks/results/plan/exact.json`. Medians; *gains* are of the heaviest group, the most of any step."
    )


def exact(found: dict[str, Any]) -> Rows:
    """Return a row a kind of steps: what `EXACT_HEAD` says.

    Args:
        found: of `load_exact`.
    """
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
    """What one solver did on some steps."""
    answers = [step[solver] for step in steps if solver in step]
    if not answers:
        return "-", "-", "-"
    return (
        f"{100 * max(answer['gained'] for answer in answers):.4f}",
        f"{sum(answer['proven'] for answer in answers)}",
        f"{median(answer['seconds'] for answer in answers):.2f}",
    )
