"""`python -m benchmarks strategies`: padding and the ways of packing, by loss, throughput and memory.

After "Enhancing Training Efficiency Using Packing with Flash Attention" (arXiv:2407.09105). Parts can be run one by
one. Every record is kept as it comes, so that a run that was stopped goes on where it was; `--again` starts anew.
`python -m benchmarks.strategies.page` writes the page.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from benchmarks.records import asked_for, load, opened, parser, rounded, save, stamp
from benchmarks.strategies.figures import FOLDER, Told

DIGITS = 7
"""Of every figure that is kept: as many as float32 has."""
Arguments = dict[str, dict[str, Any]]
"""Of the function of each part: how much is trained."""

FAMILIES = ("llama", "mixtral", "gemma3")
FULL: Arguments = {
    "comparison": {"seeds": dict.fromkeys(FAMILIES, 5), "steps": {"short": 40, "long": 50}},
    "density": {"steps": 40, "seeds": 5, "factors": (1, 2, 4)},
    "ranks": {"steps": 40, "seeds": 5, "worlds": (1, 2, 4)},
    "throughput": {
        "families": FAMILIES,
        "steps": {"short": 24, "long": 24},
        "epoch": {"short": 40, "long": 50},
    },
    "lora": {"steps": 40},
    "extreme": {"factors": {10: 24, 100: 24, 1000: 5}},
}
QUICK: Arguments = {
    "comparison": {"seeds": {"llama": 1}, "steps": {"short": 5, "long": 5}},
    "density": {"steps": 3, "seeds": 2, "factors": (1,)},
    "ranks": {"steps": 3, "seeds": 1, "worlds": (1, 2), "peers": False},
    "throughput": {
        "families": ("llama",),
        "steps": {"short": 2, "long": 2},
        "epoch": {"short": 5, "long": 5},
    },
    "lora": {"steps": 3},
    "extreme": {"factors": {10: 2}},
}
PARTS = tuple(FULL)
"""Those for the loss first, which nothing disturbs, then those that are timed."""


def _records(part: str, is_quick: bool, told: Told, known: Container[str]) -> Iterator[dict[str, Any]]:
    """Give the records of a part that aren't known yet."""
    from benchmarks.strategies import compare, race, ranks
    from benchmarks.strategies.sets import text_sets

    calls = {
        "comparison": compare.compare,
        "density": compare.density,
        "ranks": ranks.on_ranks,
        "throughput": race.races,
        "lora": race.lora,
        "extreme": race.extreme,
    }
    given: tuple[Any, ...] = ()
    if part != "extreme":
        sets = text_sets(is_quick)
        given = (sets["short"] if part in ("density", "ranks") else sets,)
    records: Iterator[dict[str, Any]] = calls[part](
        *given, told, known, **(QUICK if is_quick else FULL)[part]
    )
    return records


def main(arguments: list[str] | None = None) -> int:
    reader = parser("strategies", __doc__, PARTS, quick="a few steps on the interpreter's own sources")
    asked = asked_for(reader, PARTS, arguments)
    result, out = opened(asked, FOLDER)
    measured = stamp()
    result |= {**measured, "sets": _described(asked.quick)}
    for name in asked.parts:
        _run(name, asked.quick, result, out, measured)
    print(f"Written to {out.name}; `python -m benchmarks.strategies.page` puts it into the docs.")
    return 0


def _run(name: str, is_quick: bool, result: dict[str, Any], out: Path, measured: dict[str, Any]) -> None:
    """Run what is missing of a part; keep each record as it comes, with the load of the machine meanwhile."""
    new: dict[str, Any] = {"measured": measured, "seconds": 0.0, "load": [], "figures": []}
    part = result["parts"].setdefault(name, new)
    begun = time.perf_counter()
    said = [begun]

    def told(done: int, total: int, what: str) -> None:
        passed = time.perf_counter() - begun
        print(f"\r{name} {done}/{total} {passed:.0f} s  {what:<60}", end="", file=sys.stderr, flush=True)

    known = {record["key"] for record in part["figures"]}
    for record in _records(name, is_quick, told, known):
        part["figures"].append(rounded(record, DIGITS))
        part["load"] = [min([load(), *part["load"]]), max([load(), *part["load"]])]
        part["seconds"] += round(time.perf_counter() - said[-1], 1)
        said.append(time.perf_counter())
        save(result, out)
    print(file=sys.stderr)


def _described(is_quick: bool) -> dict[str, Any]:
    from benchmarks.strategies.sets import described, text_sets

    return {name: described(found) for name, found in text_sets(is_quick).items()}
