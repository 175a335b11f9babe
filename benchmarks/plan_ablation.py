"""What each idea of the planner brings, taken away one by one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from benchmarks.plan_grid import SETS, Cell
from benchmarks.plan_methods import of_method, warm_up
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


def _setting(cell: Cell) -> str:
    """Return the name of a cell's setting."""
    return next(
        name
        for name, changed in SETTINGS.items()
        if all(getattr(cell, field) == value for field, value in changed.items())
        and (changed or cell in _CELLS)
    )
