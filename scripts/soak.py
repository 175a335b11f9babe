"""Run the long tests and write docs/soak.md and a result file: what ran, how long it took, on which machine.

Two parts: every property test again with many random examples, then the tests marked `soak`. After a mend, `--again`
runs what failed once more, and adds that as a part of its own.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LONGEST_S = 150 * 60
OUT_OF_TIME = 124
AGAIN = "what failed, once more"
VERSIONS = ("numpy", "numba", "torch", "transformers", "hypothesis")


@dataclass(frozen=True)
class Part:
    """One run of pytest."""

    title: str
    date: str
    commit: str
    tests: int
    failed: list[str]
    """By pytest's name."""
    skipped: int
    seconds: float
    slowest: list[tuple[str, float]]
    exit_code: int
    meshes: list[dict[str, Any]]
    """Of each mesh, how far its steps are from one process's, as the test of all meshes records them."""


def run_part(
    title: str, marker: str, examples: int, scratch: Path, seconds: float, tests: Sequence[str] = ()
) -> Part:
    """Run one part, or some tests of it, within so many seconds, and read back what pytest says about it."""
    report = scratch / "soak.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *tests, "-m", marker, "-n", "2", "--dist", "worksteal"]
    command += [f"--junitxml={report}", "-o", f"cache_dir={scratch / '.pytest_cache'}"]
    variables = os.environ | {"VARLEN_HYPOTHESIS": "soak", "VARLEN_SOAK_EXAMPLES": str(examples)}
    begun = time.monotonic()
    try:
        code = subprocess.run(command, cwd=ROOT, env=variables, timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        code = OUT_OF_TIME
    cases = ET.parse(report).getroot().findall(".//testcase") if report.exists() else []
    report.unlink(missing_ok=True)
    recorded = [
        each.get("value", "") for case in cases for each in case.findall("properties/property[@name='mesh']")
    ]
    times = [(case.get("name", ""), float(case.get("time", 0))) for case in cases]
    return Part(
        title=title,
        date=str(datetime.date.today()),
        commit=newest_commit(),
        tests=len(cases),
        failed=[
            f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            for case in cases
            if case.find("failure") is not None or case.find("error") is not None
        ],
        skipped=sum(case.find("skipped") is not None for case in cases),
        seconds=time.monotonic() - begun,
        slowest=sorted(times, key=lambda timed: -timed[1])[:5],
        exit_code=code,
        meshes=[json.loads(row) for row in recorded],
    )


def still_failed(parts: list[Part]) -> list[str]:
    """Return the tests that failed and haven't passed since."""
    found: list[str] = []
    for part in parts:
        found = part.failed if part.title == AGAIN and part.tests else [*found, *part.failed]
    return found


def newest_commit() -> str:
    """Return the short name of what is checked out."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def machine() -> str:
    """Return what ran the tests: processor, cores and memory, no names."""
    cpuinfo = Path("/proc/cpuinfo")
    models = (
        [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        if cpuinfo.exists()
        else []
    )
    name = models[0].partition(":")[2].strip() if models else platform.processor() or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{name}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}"


def summary(parts: list[Part]) -> str:
    """Return the page: date, machine, versions, and a table of the parts."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in VERSIONS)
    lines = [
        "# The long tests",
        "",
        "For maintainers: which long tests ran last, on what, and what came of them. Written by `make soak`.",
        "",
        f"On {machine()}; Python {platform.python_version()}, {versions}.",
        "",
        "| part | after commit | tests | failed | skipped | minutes | result |",
        "|---|---|---|---|---|---|---|",
    ]
    for part in parts:
        result = {0: "passed", OUT_OF_TIME: "out of time"}.get(part.exit_code, f"failed ({part.exit_code})")
        counts = f"{part.tests:,} | {len(part.failed):,} | {part.skipped:,} | {part.seconds / 60:.1f}"
        lines.append(f"| {part.title} | {part.commit}, {part.date} | {counts} | {result} |")
    failed = still_failed(parts)
    every = [name for part in parts if part.title != AGAIN for name in part.failed]
    lines += [""] if every else []
    lines += [
        f"- {name} failed" + ("" if name in failed else ", and passed when run again") for name in every
    ]
    lines += ["", "The slowest tests:", ""]
    lines += [
        f"- {name}: {seconds:,.0f} s"
        for part in parts
        if part.title != AGAIN
        for name, seconds in part.slowest
    ]
    return "\n".join([*lines, *of_meshes([row for part in parts for row in part.meshes])]) + "\n"


def of_meshes(rows: list[dict[str, Any]]) -> list[str]:
    """Return a table of meshes beside one process; nothing if none ran."""
    if not rows:
        return []
    names = [name for name in rows[0] if name not in ("mesh", "steps")]
    lines = [
        "",
        "Steps of random plans on meshes of 2 and 4 processes beside the same steps of one process, in float64: the "
        "largest relative difference of any tensor on any rank; documents are shared where there are dp or cp ranks.",
        "",
        f"| mesh | plans x ranks | {' | '.join(name.replace('_', ' ') for name in names)} |",
        "|---|---|" + "---|" * len(names),
    ]
    for row in rows:
        cells = " | ".join(f"{row[name]:.0e}" for name in names)
        lines.append(f"| {row['mesh']} | {row['steps']} | {cells} |")
    return lines


def main() -> int:
    """Run both parts; return 0 if all tests passed in time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--scratch", type=Path, default=ROOT, help="a folder for caches and the summary's copy"
    )
    parser.add_argument("--examples", type=int, default=500, help="examples a property, in the first part")
    parser.add_argument(
        "--again", action="store_true", help="run only what failed in the newest result, and add that to it"
    )
    arguments = parser.parse_args()
    scratch, examples, begun = arguments.scratch, arguments.examples, time.monotonic()
    results = ROOT / "benchmarks" / "results" / "run"
    # A read-only clone keeps its summary among the caches.
    folder = results if os.access(results, os.W_OK) else scratch
    file = folder / f"soak-{datetime.date.today()}.json"
    if arguments.again:
        file = max(folder.glob("soak-*.json"))
        parts = [Part(**part) for part in json.loads(file.read_text(encoding="utf-8"))]
        if not still_failed(parts):
            parser.error(f"nothing in {file.name} failed; without --again, all tests run")
        parts.append(run_part(AGAIN, "soak or hypothesis", examples, scratch, LONGEST_S, still_failed(parts)))
    else:
        random = f"property tests, {examples:,} random examples each"
        parts = [run_part(random, "hypothesis and not soak", examples, scratch, LONGEST_S)]
        left = LONGEST_S - (time.monotonic() - begun)
        parts.append(run_part("tests marked soak", "soak", examples, scratch, left))
    file.write_text(json.dumps([asdict(part) for part in parts], indent=1) + "\n", encoding="utf-8")
    page = summary(parts)
    folder = ROOT / "docs" if os.access(ROOT / "docs", os.W_OK) else scratch
    (folder / "soak.md").write_text(page, encoding="utf-8")
    print(page)
    return int(bool(still_failed(parts)) or any(part.exit_code not in (0, 1) for part in parts))


if __name__ == "__main__":
    sys.exit(main())
