"""How long planning takes on one core: every set, at every capacity, by models and meshes of the grid."""

from __future__ import annotations

import itertools
import time
from typing import Any

from benchmarks.plan_grid import CAPACITIES, SETS, Cell
from benchmarks.plan_methods import planned, warm_up
from varlen.plan.search import Search

SMALL, LARGE = "512 on 4x4", "8192 on 64x16"
"""Documents, and dp x pp."""
_SMALL_TPS = {"llama-2-7b": (4, 8), "llama-2-13b": (4, 8), "llama-30b": (4,), "llama-2-70b": (4, 8)}
"""Those that the grid has on 4x4; the 52 heads of 30B can't be divided by 8."""
_LARGE_MODELS = ("llama-2-7b", "llama-2-70b")


def _cells(model: str, tp: int) -> list[Cell]:
    return [
        Cell(lengths=name, capacity=capacity, documents=512, model=model, dp=4, pp=4, tp=tp, seed=1)
        for name, capacity in itertools.product(SETS, CAPACITIES)
    ]


def _large_cells(model: str) -> list[Cell]:
    return [
        Cell(lengths=name, capacity=131_072, documents=8192, model=model, dp=64, pp=16, tp=8, seed=1)
        for name in SETS
    ]


TIMED = {(SMALL, model, tp): _cells(model, tp) for model, tps in _SMALL_TPS.items() for tp in tps} | {
    (LARGE, model, 8): _large_cells(model) for model in _LARGE_MODELS
}
"""Steps of one size, model and tp; other meshes are part of the grid, where planning is timed beside other work."""


def engine_cell() -> Cell:
    """Return the large step that simulating is timed on."""
    return next(cell for cell in TIMED[LARGE, "llama-2-7b", 8] if cell.lengths == "pub_distca_prolong")


def planning_times(size: str, model: str, tp: int, rounds: int) -> dict[str, Any]:
    """Time `plan_step` with its default search, on one core; return plain data.

    Seconds are those of the processor: planning runs in one thread and waits for nothing, and what else the machine
    does isn't counted.

    Args:
        size: `SMALL` or `LARGE`.
        model: by name.
        tp: tensor parallelism.
        rounds: how often each step is planned; before the first, kernels are compiled and loaded.
    """
    warm_up(("micropack",))
    steps = []
    for place, cell in enumerate(TIMED[size, model, tp]):
        lengths, told = cell.drawn()
        cost = cell.cost()
        seconds = []
        for _ in range(rounds + (place == 0)):
            begun = time.process_time()
            plan = planned("micropack", lengths, cell, cost, Search())
            seconds.append(time.process_time() - begun)
        steps.append(
            {
                "cell": cell.key,
                "tokens": told["tokens"],
                "recompute": plan.recompute,
                "seconds": seconds[-rounds:],
            }
        )
    return {"size": size, "model": model, "tp": tp, "steps": steps}
