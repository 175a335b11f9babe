"""Run the long tests and write docs/soak.md: what ran, how long it took, on which machine.

Two parts: every property test again with many random examples, then the tests marked `soak`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONGEST_S = 90 * 60
OUT_OF_TIME = 124
VERSIONS = ("numpy", "numba", "torch", "transformers", "hypothesis")


@dataclass(frozen=True)
class Part:
    """One run of pytest."""

    title: str
    tests: int
    failed: int
    skipped: int
    seconds: float
    slowest: list[tuple[str, float]]
    exit_code: int


def run_part(title: str, marker: str, examples: int, scratch: Path, seconds: float) -> Part:
    """Run one part within so many seconds, and read back what pytest says about it."""
    report = scratch / "soak.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", marker, "-n", "2", f"--junitxml={report}"]
    command += ["-o", f"cache_dir={scratch / '.pytest_cache'}"]
    variables = os.environ | {"VARLEN_HYPOTHESIS": "soak", "VARLEN_SOAK_EXAMPLES": str(examples)}
    begun = time.monotonic()
    try:
        code = subprocess.run(command, cwd=ROOT, env=variables, timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        code = OUT_OF_TIME
    cases = ET.parse(report).getroot().findall(".//testcase") if report.exists() else []
    report.unlink(missing_ok=True)
    times = [(case.get("name", ""), float(case.get("time", 0))) for case in cases]
    return Part(
        title=title,
        tests=len(cases),
        failed=sum(case.find("failure") is not None or case.find("error") is not None for case in cases),
        skipped=sum(case.find("skipped") is not None for case in cases),
        seconds=time.monotonic() - begun,
        slowest=sorted(times, key=lambda timed: -timed[1])[:5],
        exit_code=code,
    )


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
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in VERSIONS)
    lines = [
        "# The long tests",
        "",
        "Written by `make soak`.",
        "",
        f"- {datetime.date.today()}, after commit {commit.stdout.strip() or 'unknown'}",
        f"- {machine()}; Python {platform.python_version()}, {versions}",
        "",
        "| part | tests | failed | skipped | minutes | result |",
        "|---|---|---|---|---|---|",
    ]
    for part in parts:
        result = {0: "passed", OUT_OF_TIME: "out of time"}.get(part.exit_code, f"failed ({part.exit_code})")
        counts = f"{part.tests:,} | {part.failed:,} | {part.skipped:,} | {part.seconds / 60:.1f}"
        lines.append(f"| {part.title} | {counts} | {result} |")
    lines += ["", "The slowest tests:", ""]
    lines += [f"- {name}: {seconds:,.0f} s" for part in parts for name, seconds in part.slowest]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run both parts; return 0 if all tests passed in time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--scratch", type=Path, default=ROOT, help="a folder for caches and the summary's copy"
    )
    parser.add_argument("--examples", type=int, default=1000, help="examples a property, in the first part")
    arguments = parser.parse_args()
    begun = time.monotonic()
    random = f"property tests, {arguments.examples:,} random examples each"
    parts = [run_part(random, "hypothesis and not soak", arguments.examples, arguments.scratch, LONGEST_S)]
    left = LONGEST_S - (time.monotonic() - begun)
    parts.append(run_part("tests marked soak", "soak", arguments.examples, arguments.scratch, left))
    page = summary(parts)
    # A read-only clone keeps its summary among the caches.
    folder = ROOT / "docs" if os.access(ROOT / "docs", os.W_OK) else arguments.scratch
    (folder / "soak.md").write_text(page, encoding="utf-8")
    print(page)
    return int(any(part.exit_code for part in parts))


if __name__ == "__main__":
    sys.exit(main())
