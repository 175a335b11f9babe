"""`python -m benchmarks plan`: every method of planning on one simulator, cell by cell.

Two processes; each cell is kept as it comes, so that a run that was stopped goes on where it was; `--again` starts
anew. `python -m benchmarks.plan.table` writes the page.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.plan.accuracy import MESHES, of_methods
from benchmarks.plan.delayed import DELAYED_CELLS, STEPS, delayed
from benchmarks.plan.figures import FOLDER, note_run
from benchmarks.plan.grid import Cell, equal_rates, grid, hidden, interleaved, published
from benchmarks.plan.methods import ABLATION_CELLS, METHODS, ablated, engine_speed, measured, planning_times
from benchmarks.plan.methods import TIMED as TIMED_STEPS
from benchmarks.plan.sharding import sharded
from benchmarks.records import asked_for, load, opened, parser, rounded, save, stamp

PROCESSES = 2
DIGITS = 6
"""Of every figure that is kept."""
Job = tuple[str, Callable[..., dict[str, Any]], tuple[Any, ...]]
"""The key of a record, and the call that makes it."""


def _cells(cells: list[Cell], *methods: str) -> list[Job]:
    return [(cell.key, measured, (cell, methods or METHODS)) for cell in cells]


def _jobs(part: str, is_quick: bool) -> list[Job]:
    if part == "grid":
        return _cells(grid()[:2] if is_quick else grid())
    if part == "hidden":
        return _cells(hidden(grid()[:2] if is_quick else grid()))
    if part == "equal_rates":
        return _cells(equal_rates()[:4] if is_quick else equal_rates(), "packed", "micropack")
    if part == "interleaved":  # packs as users run them have one chunk of layers a GPU; all others are tuned
        cells = interleaved(grid()[:2] if is_quick else grid()[::3])
        return _cells(cells, *(name for name in METHODS if name != "as_run"))
    if part == "ablation":
        return [(cell.key, ablated, (cell,)) for cell in ABLATION_CELLS[: 2 if is_quick else None]]
    if part == "published":
        return _cells(
            published(grid()[:1] if is_quick else grid()[::6]), *(n for n in METHODS if n != "as_run")
        )
    if part == "delayed":
        steps = 4 if is_quick else STEPS
        return [(cell.key, delayed, (cell, steps)) for cell in DELAYED_CELLS[: 1 if is_quick else None]]
    if part == "sharding":
        return [(cell.key, sharded, (cell,)) for cell in (grid()[:1] if is_quick else grid()[::9])]
    if part == "accuracy":
        return [(name, of_methods, (name, is_quick)) for name in MESHES]
    if part == "engine":
        return [("8192 on 64x16", engine_speed, (2 if is_quick else 7,))]
    return [
        (f"{size}/{model}/tp{tp}", planning_times, (size, model, tp, 1 if is_quick else 3))
        for size, model, tp in list(TIMED_STEPS)[: 1 if is_quick else None]
    ]


PARTS = (
    "times", "engine", "accuracy", "equal_rates", "ablation", "grid", "hidden", "published", "sharding", "delayed",
    "interleaved",
)  # fmt: skip
"""What is timed comes first, one process at a time, before two run side by side."""
TIMED = ("times", "engine", "accuracy")


def main(arguments: list[str] | None = None) -> int:
    reader = parser("plan", __doc__, PARTS, quick="a few cells of each part")
    reader.add_argument(
        "--only", nargs="+", metavar="METHOD", help="plan by these anew in the records of cells"
    )
    reader.add_argument("--processes", type=int, default=PROCESSES, help="that run side by side")
    asked = asked_for(reader, PARTS, arguments)
    result, out = opened(asked, FOLDER)
    result |= {**stamp(), "total_cells": len(grid(48))}
    for name in asked.parts:
        processes = 1 if name in TIMED else asked.processes
        if asked.only and name in ("grid", "hidden", "published", "interleaved", "equal_rates"):
            _renew(name, tuple(asked.only), result, out, processes)
        elif not asked.only:
            _run(name, _jobs(name, asked.quick), result, out, processes)
    print(f"Written to {out.name}; `python -m benchmarks.plan.table` puts it into the docs.")
    return 0


def _run(name: str, jobs: list[Job], result: dict[str, Any], out: Path, processes: int) -> None:
    """Run the jobs that the file holds no record of; keep each record as it comes."""
    part = result["parts"].setdefault(name, {"seconds": 0.0, "load": [], "records": []})
    known = {record["key"] for record in part["records"]}
    waiting = [job for job in jobs if job[0] not in known]
    begun = said = time.perf_counter()
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(call, *given): key for key, call, given in waiting}
        for done, future in enumerate(as_completed(running), 1):
            part["records"].append({"key": running[future], **rounded(future.result(), DIGITS)})
            part["load"] = [min([load(), *part["load"]]), max([load(), *part["load"]])]
            part["seconds"] = round(part["seconds"] + time.perf_counter() - said, 1)
            said = time.perf_counter()
            note_run(part, result)
            _write(result, out)
            what = f"{name} {done}/{len(waiting)} {said - begun:.0f} s  {running[future]:<60}"
            print(f"\r{what}", end="", file=sys.stderr, flush=True)
    order = {key: place for place, (key, _, _) in enumerate(jobs)}
    part["records"].sort(key=lambda record: order.get(record["key"], len(order)))
    _write(result, out)
    print(file=sys.stderr)


def _renew(name: str, methods: tuple[str, ...], result: dict[str, Any], out: Path, processes: int) -> None:
    """Plan the cells of a part anew by some methods, which have changed; the figures of all others stay."""
    records = result["parts"][name]["records"]
    begun = time.perf_counter()
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(measured, Cell(**record["cell"]), methods) for record in records]
        for record, future in zip(records, running):
            record["methods"] |= rounded(future.result()["methods"], DIGITS)
    part = result["parts"][name]
    part["renewed"] = {"methods": methods, "seconds": round(time.perf_counter() - begun, 1)}
    note_run(part, result, methods)
    _write(result, out)


def _write(result: dict[str, Any], out: Path) -> None:
    head = {key: value for key, value in result.items() if key != "parts"}
    parts = []
    for name, part in result["parts"].items():
        about = json.dumps({key: value for key, value in part.items() if key != "records"})[1:-1]
        records = ",\n  ".join(json.dumps(record) for record in part["records"])
        parts.append(f'{json.dumps(name)}: {{{about}, "records": [\n  {records}\n ]}}')
    text = json.dumps(head)[:-1] + ', "parts": {\n ' + ",\n ".join(parts) + "\n}}\n"
    save(text, out)
