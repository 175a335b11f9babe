"""What several chunks of layers a GPU bring: the cells of large meshes planned with interleaved stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.plan_figures import LARGE_MESH
from benchmarks.plan_grid import Cell, grid
from benchmarks.plan_methods import figures
from varlen.errors import PlanError
from varlen.plan.api import plan_step

CHUNKS = (1, 2, 3)
"""Chunks of layers a GPU, one after another on every stage."""


def interleaved_cells() -> list[Cell]:
    """Return the cells of the grid whose pipelines have least to do beside filling: dp x pp of 64 and more."""
    return [cell for cell in grid() if cell.dp * cell.pp >= LARGE_MESH]


def interleaved(cell: Cell) -> dict[str, Any]:
    """Plan a cell by micropack with one chunk of layers a GPU and with more; return plain data.

    Args:
        cell: which step, on what.
    """
    lengths, told = cell.drawn()
    cost = cell.cost()
    chunks: dict[str, Any] = {}
    for count in CHUNKS:
        mesh = replace(cell.mesh, virtual_stages=count)
        try:
            plan = plan_step(lengths, cost=cost, mesh=mesh)
        except PlanError as error:
            chunks[str(count)] = {"refused": str(error)}
        else:
            chunks[str(count)] = figures(plan, cost, lengths)
    return {"cell": cell.to_json(), "is_large": cell.is_large, **told, "chunks": chunks}
