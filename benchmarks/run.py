"""Run the benchmarks: a progress bar, a table of every figure, and a result file for the docs."""

from __future__ import annotations

import argparse
import importlib
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.checks import WrongResultError
from benchmarks.records import RESULTS, load, save, stamp
from benchmarks.rows import Limit, Race, Row, Step, to_json
from benchmarks.table import quantity, ratio_text, worst_of_groups

_VERDICTS = {None: "", True: "[green]yes[/green]", False: "[bold red]no[/bold red]"}
SECTIONS = {
    "startup": "startup",
    "scale": "packing",
    "feed_scale": "feeding.scale",
    "demo": "startup",
    "packing": "packing",
    "padded": "padded",
    "collating": "collating",
    "adapters": "adapters",
    "windows": "packing",
    "reading": "reading",
    "chats": "reading",
    "offline": "offline",
    "fast_axolotl": "adapters",
    "megatron": "megatron",
    "utilization": "packing",
    "feeding": "feeding.loaders",
}
"""By name, in the order run: the module whose `SECTIONS` have its steps."""


def main(arguments: list[str] | None = None) -> int:
    """Run the sections asked for; return 1 where a result was wrong, or with --strict a target missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog="example: python -m benchmarks packing collating; see also python -m benchmarks strategies --help",
    )
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; all by default"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="result file; by default results/<date>.json where all sections ran. The page shows a section that was "
        "run apart from results/<section>/<date>.json",
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a target is missed")
    asked = parser.parse_args(arguments)
    unknown = sorted(set(asked.sections) - set(SECTIONS))
    if unknown:
        parser.error(f"unknown section {unknown[0]!r}; there are {', '.join(SECTIONS)}")

    console = Console()
    sections = [section for section in SECTIONS if not asked.sections or section in asked.sections]
    begun, load_before = time.perf_counter(), load()
    rows, absent = _run(sections, console)
    if absent:
        table = Table("not measured", "why", title_justify="left", expand=True)
        for entry in absent:
            table.add_row(entry["what"], entry["why"])
        console.print(table)
    result = {
        **stamp(),
        "load": [load_before, load()],
        "seconds": round(time.perf_counter() - begun),
        "rows": [to_json(row) for row in rows],
        "absent": absent,
    }
    out = asked.out or (RESULTS / f"{result['date']}.json" if len(sections) == len(SECTIONS) else None)
    if out is not None:
        save(result, out)
        console.print(f"Written to {out.name}; `python -m benchmarks.table` puts it into the docs.")
    judged = [row for row in rows if row.met is not None]
    met = sum(bool(row.met) for row in judged)
    console.print(f"{met} of {len(judged)} targets met, in {result['seconds']} s.")
    is_wrong = any(entry["kind"] == "wrong" for entry in absent)
    return int(is_wrong or (asked.strict and met < len(judged)))


def _run(sections: list[str], console: Console) -> tuple[list[Row], list[dict[str, str]]]:
    """Run every step, printing each section's table as it is complete."""
    plans: dict[str, list[Step]] = {
        section: importlib.import_module(f"benchmarks.{SECTIONS[section]}").SECTIONS[section]()
        for section in sections
    }
    rows: list[Row] = []
    absent: list[dict[str, str]] = []
    columns = (SpinnerColumn(), "{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=sum(len(steps) for steps in plans.values()))
        for section, steps in plans.items():
            before = len(rows)
            for step in steps:
                what = f"{section}: {step.title}"
                progress.update(task, description=what)
                try:
                    rows += [replace(row, section=section) for row in step.run()]
                except (ImportError, RuntimeError, WrongResultError) as error:
                    kind = "wrong" if isinstance(error, WrongResultError) else "absent"
                    why = f"{type(error).__name__}: {reason(error)}"
                    absent.append({"kind": kind, "what": what, "why": why})
                progress.advance(task)
            progress.console.print(*_tables_of(section, rows[before:]))
    return rows, absent


def reason(error: Exception) -> str:
    """Return an error's last line without the folders of this machine."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"(?:/[^/\s'\"()]+)+/", "", lines[-1])


def _tables_of(section: str, rows: list[Row]) -> Iterator[Table]:
    """Yield one section's figures for the terminal; the settings of each peer stand in the result file."""
    races = [row for row in rows if isinstance(row, Race)]
    limits = worst_of_groups([row for row in rows if isinstance(row, Limit)])
    if races:
        table = Table(title=section, title_justify="left", title_style="bold", expand=True)
        for name in ("what", "peer"):
            table.add_column(name, overflow="fold", ratio=1)
        for name in ("varlen", "peer", "ratio", "target", "met"):
            table.add_column(name, justify="right", no_wrap=True)
        for race in races:
            target = "" if race.target is None else f"≥ {ratio_text(race.target)}"
            times = (quantity(side.samples.median_s, "s") for side in (race.ours, race.peer))
            what = race.what + (f" ({race.note})" if race.note else "")
            table.add_row(what, race.peer.name, *times, ratio_text(race.ratio), target, _VERDICTS[race.met])
        yield table
    if limits:
        table = Table("what", title=section, title_justify="left", title_style="bold")
        for name in ("measured", "limit", "met"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in limits:
            limit = "" if row.limit is None else f"≤ {quantity(row.limit, row.unit)}"
            table.add_row(row.what, quantity(row.value, row.unit), limit, _VERDICTS[row.met])
        yield table
