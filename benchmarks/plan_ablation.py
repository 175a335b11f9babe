"""What each idea of the planner brings, taken away one by one; and how long planning takes."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Any

from benchmarks.plan_grid import SETS, Cell
from benchmarks.plan_methods import of_method, planned, warm_up
from varlen.plan.search import Search

WITHOUT: dict[str, dict[str, Any]] = {
    "slicing": {"slices": False},
    "graded sizes": {"grades": False},
    "zero-bubble": {"splits_backward": False},
    "DP-Merge": {"merges": False},
    "asymmetry": {"asymmetric": False},
    "order": {"orders": False},
}
"""Ideas that are on, and the setting that takes each away."""
WITH: dict[str, dict[str, Any]] = {"exact solving": {"exact": True}}
"""Ideas that are off, and the setting that adds each."""
PEERS = ("as_run", "packed", "balanced")
SETTINGS: dict[str, dict[str, Any]] = {
    "calibrated": {},
    "FLOPs": {"mode": "flops"},
    "full recomputation": {"recompute": "full"},
    "tight memory": {"memory_fraction": 0.6},
    "few heads": {"heads_exponent": 1.0},
}
"""What is changed of a cell. "Few heads": attention needs as many query rows times heads as it was measured with, of
which a GPU has 4 of 64 here; otherwise rows alone count."""
_CELLS = [
    Cell(
        lengths=name,
        capacity=capacity,
        documents=512,
        model="llama-2-7b",
        dp=dp,
        pp=pp,
        tp=8,
        seed=1,
    )
    for name, capacity, (dp, pp) in itertools.product(SETS, (131_072, 262_144), ((4, 4), (8, 8)))
]
ABLATION_CELLS = [replace(cell, **changed) for changed in SETTINGS.values() for cell in _CELLS]
"""Each idea in each setting: 24 cells."""
TIMES = {
    "512 on 4x4": ("pub_flexsp_wikipedia", 512, 4, 4),
    "8192 on 64x16": ("pub_distca_prolong", 8192, 64, 16),
}


def ablated(cell: Cell) -> dict[str, Any]:
    """Plan a cell with everything, with each idea taken away or added, and by peers; return plain data."""
    warm_up(("micropack", *PEERS))
    lengths, _ = cell.drawn()
    cost = cell.cost()
    named = {name: Search(**changed) for name, changed in (WITHOUT | WITH).items()}
    plans = {
        name: of_method("micropack", lengths, cell, cost, search)
        for name, search in {"everything": Search(), **named}.items()
    }
    plans |= {name: of_method(name, lengths, cell, cost) for name in PEERS}
    return {"cell": cell.to_json(), "setting": _setting(cell), "plans": plans}


def timed_cell(key: str) -> Cell:
    """Return the cell of a step that planning or simulating is timed on.

    Args:
        key: of `TIMES`.
    """
    name, documents, dp, pp = TIMES[key]
    return Cell(
        lengths=name,
        capacity=131_072,
        documents=documents,
        model="llama-2-7b",
        dp=dp,
        pp=pp,
        tp=8,
        seed=1,
    )


def planning_times(key: str, rounds: int) -> dict[str, Any]:
    """Time `plan_step` with its default search, on one core; return plain data.

    Args:
        key: of `TIMES`.
        rounds: how often each is planned after the first time, which compiles.
    """
    cell = timed_cell(key)
    lengths, told = cell.drawn()
    cost = cell.cost()
    seconds = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        planned("micropack", lengths, cell, cost, Search())
        seconds.append(time.perf_counter() - begun)
    return {"cell": cell.to_json(), **told, "first_s": seconds[0], "seconds": seconds[1:]}


def _setting(cell: Cell) -> str:
    """Return the name of a cell's setting."""
    return next(
        name
        for name, changed in SETTINGS.items()
        if all(getattr(cell, field) == value for field, value in changed.items())
        and (changed or cell in _CELLS)
    )
