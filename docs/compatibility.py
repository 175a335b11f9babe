"""Verify every causal family of the installed transformers, and write what was found into docs/compatibility.md.

`python docs/compatibility.py` runs the families side by side, writes compatibility.json and the part of the page
between the markers. `--families a,b` runs only these and keeps the others' last results; `--page` writes the page
from the JSON, and `--check` says with exit code 1 whether it is what the JSON says.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "compatibility.json", HERE / "compatibility.md"
START = "<!-- matrix: start, written by `make matrix` -->"
END = "<!-- matrix: end -->"
LAYOUTS = ("rows", "flat")
PLAIN = "position_ids, use_cache=False"
"""The call of transformers' own collator under its own trainer."""
_ABSENT = {"verdict": "not run", "reason": "no run of this backend"}


def main(arguments: list[str] | None = None) -> int:
    """Run, write or check; return the exit code."""
    parser = argparse.ArgumentParser(prog="python docs/compatibility.py", description=__doc__)
    parser.add_argument("--families", help="separated by commas; all where it isn't said")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count(), help="side by side")
    parser.add_argument("--page", action="store_true", help="run nothing; write the page from the JSON")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 where the page is stale"
    )
    chosen = parser.parse_args(arguments)
    if not (chosen.page or chosen.check):
        _run(chosen.families.split(",") if chosen.families else None, chosen.processes)
    page = PAGE.read_text(encoding="utf-8")
    fresh = spliced(page, render(json.loads(RESULTS.read_text(encoding="utf-8"))))
    if fresh != page and chosen.check:
        print(
            f"{PAGE.name} is not what {RESULTS.name} says; run `python docs/compatibility.py --page`",
            file=sys.stderr,
        )
        return 1
    if fresh != page:
        PAGE.write_text(fresh, encoding="utf-8")
    return 0


def _run(families: list[str] | None, processes: int) -> None:
    """Verify families and write the JSON."""
    from benchmarks.records import machine, versions

    from varlen.verify.models.api import matrix_row
    from varlen.verify.models.loading import families as known

    names = list(known()) if families is None else families
    before: dict[str, Any] = {}
    if families is not None and RESULTS.exists():
        before = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows: dict[str, Any] = before.get("families", {})
    begun = time.monotonic()
    # Fresh processes: PyTorch's threads don't survive a fork.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for done, (name, row) in enumerate(zip(names, pool.imap(matrix_row, names)), 1):
            rows[name] = row
            print(f"{done:>4} of {len(names)}  {name:<28} {row['verdict']}", file=sys.stderr, flush=True)
    told = versions()
    found = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": {name: told[name] for name in ("varlen", "torch", "transformers")},
        "seconds": round(time.monotonic() - begun),
        "processes": processes,
        "again": [],
    }
    if before:  # what the page says of date and machine is true of the others
        again = sorted({*before.get("again", []), *names})
        found |= {name: before[name] for name in found if name in before} | {"again": again}
    found["families"] = dict(sorted(rows.items()))
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def spliced(page: str, part: str) -> str:
    """Return the page with what stands between its markers replaced."""
    before, rest = page.split(START)
    return f"{before}{START}\n\n{part}\n\n{END}{rest.split(END)[1]}"


def render(found: dict[str, Any]) -> str:
    """Return the summary, the table and the reasons, as Markdown."""
    families = found["families"]
    backends = list(dict.fromkeys(backend for row in families.values() for backend in row["cells"]))
    reasons: dict[str, int] = {}
    lines = [_line(name, row, backends, reasons) for name, row in families.items()]
    head = ["family", *(f"`{backend}`" for backend in backends), "`position_ids` alone"]
    return "\n".join(
        [
            *_summary(found, backends),
            "",
            "| " + " | ".join(head) + " |",
            "|---" * len(head) + "|",
            *lines,
            "",
            "Why:",
            "",
            *(f"{number}. {reason}" for reason, number in reasons.items()),
        ]
    )


def _summary(found: dict[str, Any], backends: list[str]) -> list[str]:
    """Say how much was run, and count verdicts."""
    families, cpu = found["families"], found["machine"]["cpu"]
    counts: dict[str, Counter[str]] = {backend: Counter() for backend in backends}
    for row in families.values():
        for backend in backends:
            for layout in LAYOUTS:
                cell = row["cells"].get(backend, {}).get(layout, _ABSENT)
                counts[backend][cell["verdict"]] += 1
    verdicts = [
        v
        for v in ("isolated", "coupled", "leaks", "refuses", "not run")
        if any(c[v] for c in counts.values())
    ]
    plain = Counter(_plain(row) for row in families.values())
    told = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return [
        f"{len(families)} families on {found['date']}: {told}; {cpu}, {found['processes']} processes, "
        f"{found['seconds']:,} seconds."
        + (f" Run again since then: {', '.join(found['again'])}." if found.get("again") else ""),
        "",
        "| cells | " + " | ".join(f"`{backend}`" for backend in backends) + " |",
        "|---" * (len(backends) + 1) + "|",
        *(
            f"| {verdict} | " + " | ".join(str(counts[backend][verdict]) for backend in backends) + " |"
            for verdict in verdicts
        ),
        "",
        f"Called with `position_ids` alone, as transformers' collator does: {plain['isolated']} families are "
        f"isolated, {plain['**leaks**']} leak, {plain['in part']} leak with some attention or layout, "
        f"{plain['refuses'] + plain['not run'] + plain['coupled']} refuse, are coupled or weren't run.",
    ]


def _line(name: str, row: dict[str, Any], backends: list[str], reasons: dict[str, int]) -> str:
    """Return one family's line of the table; new reasons get the next number."""
    cells = []
    for backend in backends:
        by_layout = row["cells"].get(backend, {})
        said = [_cell(by_layout.get(layout, _ABSENT), row.get("model", ""), reasons) for layout in LAYOUTS]
        same = said[0] == said[1]
        cells.append(
            said[0] if same else "<br>".join(f"{layout}: {word}" for layout, word in zip(LAYOUTS, said))
        )
    return "| " + " | ".join([f"`{name}`", *cells, _plain(row)]) + " |"


def _cell(cell: dict[str, Any], model: str, reasons: dict[str, int]) -> str:
    """Return a verdict, marked where something stood in, with the number of its reason."""
    verdict = cell["verdict"] if cell["verdict"] != "leaks" else "**leaks**"
    mark = r"\*" if cell.get("stand_in") else ""
    if "reason" not in cell:
        return verdict + mark
    reason = cell["reason"].replace(model, "It") if model else cell["reason"]
    number = reasons.setdefault(_escaped(reason), len(reasons) + 1)
    return f"{verdict}{mark} [{number}]"


def _plain(row: dict[str, Any]) -> str:
    """Return what becomes of a family that is called with positions alone, over all that ran."""
    calls = row["calls"].get(PLAIN, {})
    # A row of its own for each pack can't be told by positions to FlashAttention, in any family.
    found = {
        verdict
        for backend, by_layout in calls.items()
        for layout, verdict in by_layout.items()
        if "flash" not in backend or layout == "flat"
    }
    ran = found & {"isolated", "leaks", "coupled"}
    if not ran:
        return "refuses" if "refuses" in found else "not run"
    if ran == {"leaks"}:
        return "**leaks**"
    if "leaks" in ran:
        return "in part"
    return "coupled" if "coupled" in ran else "isolated"


def _escaped(text: str) -> str:
    """Return text that Markdown leaves alone."""
    return text.replace("|", r"\|").replace("*", r"\*").replace("<", "&lt;")


def missing(names: Iterable[str], found: dict[str, Any]) -> list[str]:
    """Return families that the JSON has no row for, which a complete matrix must have."""
    return [name for name in names if name not in found["families"]]


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    raise SystemExit(main())
