"""`python -m benchmarks strategies`: padding and the ways of packing, by loss, throughput and memory.

After "Enhancing Training Efficiency Using Packing with Flash Attention" (arXiv:2407.09105). Parts can be run one by
one. Every record is kept as it comes, so that a run that was stopped goes on where it was; `--again` starts anew.
`python -m benchmarks.strategies.page` writes the page.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records import asked_for, load, opened, parser, rounded, save, stamp
from benchmarks.strategies.figures import FOLDER

DIGITS = 7
"""Of every figure that is kept: as many as float32 has."""
Told = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is trained."""

    quick: bool
    seeds: dict[str, int]
    """Of the comparison, by family of models."""
    steps: dict[str, int]
    """Minibatches of a run of the comparison, by set."""
    race_steps: dict[str, int]
    density_steps: int
    density_seeds: int
    density_factors: tuple[int, ...]
    rank_steps: int
    rank_seeds: int
    worlds: tuple[int, ...]
    lora_steps: int
    factors: dict[int, int]
    """How much longer long documents are, and for how many steps."""


FULL = Size(
    quick=False,
    seeds={"llama": 5, "mixtral": 5, "gemma3": 5},
    steps={"short": 40, "long": 50},
    race_steps={"short": 24, "long": 24},
    density_steps=40,
    density_seeds=5,
    density_factors=(1, 2, 4),
    rank_steps=40,
    rank_seeds=5,
    worlds=(1, 2, 4),
    lora_steps=40,
    factors={10: 24, 100: 24, 1000: 5},
)
QUICK = Size(
    quick=True,
    seeds={"llama": 1},
    steps={"short": 5, "long": 5},
    race_steps={"short": 2, "long": 2},
    density_steps=3,
    density_seeds=2,
    density_factors=(1,),
    rank_steps=3,
    rank_seeds=1,
    worlds=(1, 2),
    lora_steps=3,
    factors={10: 2},
)


def _records(part: str, size: Size, told: Told, known: Container[str]) -> Iterator[dict[str, Any]]:
    """Give the records of a part that aren't known yet."""
    from benchmarks.strategies import compare, race, ranks
    from benchmarks.strategies.sets import text_sets

    if part == "extreme":
        return race.extreme(told, known, factors=size.factors)
    sets = text_sets(size.quick)
    if part == "comparison":
        return compare.compare(sets, told, known, seeds=size.seeds, steps=size.steps)
    if part == "throughput":
        families = tuple(size.seeds)
        return race.races(sets, told, known, families=families, steps=size.race_steps, epoch=size.steps)
    if part == "lora":
        return race.lora(sets, told, known, steps=size.lora_steps)
    if part == "density":
        steps, seeds, factors = size.density_steps, size.density_seeds, size.density_factors
        return compare.density(sets["short"], told, known, steps=steps, seeds=seeds, factors=factors)
    return ranks.on_ranks(
        sets["short"],
        told,
        known,
        steps=size.rank_steps,
        seeds=size.rank_seeds,
        worlds=size.worlds,
        peers=not size.quick,
    )


PARTS = ("comparison", "density", "ranks", "throughput", "lora", "extreme")
"""Those for the loss first, which nothing disturbs, then those that are timed."""


def main(arguments: list[str] | None = None) -> int:
    reader = parser("strategies", __doc__, PARTS, quick="a few steps on the interpreter's own sources")
    asked = asked_for(reader, PARTS, arguments)
    result, out = opened(asked, FOLDER)
    size = QUICK if asked.quick else FULL
    measured = stamp()
    result |= {**measured, "sets": _described(size)}
    for name in asked.parts:
        _run(name, size, result, out, measured)
    print(f"Written to {out.name}; `python -m benchmarks.strategies.page` puts it into the docs.")
    return 0


def _run(name: str, size: Size, result: dict[str, Any], out: Path, measured: dict[str, Any]) -> None:
    """Run what is missing of a part; keep each record as it comes, with the load of the machine meanwhile."""
    new: dict[str, Any] = {"measured": measured, "seconds": 0.0, "load": [], "figures": []}
    part = result["parts"].setdefault(name, new)
    begun = time.perf_counter()
    said = [begun]

    def told(done: int, total: int, what: str) -> None:
        passed = time.perf_counter() - begun
        print(f"\r{name} {done}/{total} {passed:.0f} s  {what:<60}", end="", file=sys.stderr, flush=True)

    known = {record["key"] for record in part["figures"]}
    for record in _records(name, size, told, known):
        part["figures"].append(rounded(record, DIGITS))
        part["load"] = [min([load(), *part["load"]]), max([load(), *part["load"]])]
        part["seconds"] += round(time.perf_counter() - said[-1], 1)
        said.append(time.perf_counter())
        save(result, out)
    print(file=sys.stderr)


def _described(size: Size) -> dict[str, Any]:
    from benchmarks.strategies.sets import described, text_sets

    return {name: described(found) for name, found in text_sets(size.quick).items()}
