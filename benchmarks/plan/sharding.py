"""What WLB-LLM's choice between two ways to share micro-batches would bring where rates are this cost model's.

Under context parallelism a micro-batch is shared document by document, so that ranks have equal work and kernels
short pieces, or as one sequence: kernels have longer pieces, and ranks unequal work. WLB-LLM takes the way that it
predicts to be faster, micro-batch by micro-batch.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.plan.grid import Cell, Int32Array
from benchmarks.plan.methods import warm_up
from varlen.cost import kernels
from varlen.cost.model import CostModel
from varlen.cost.rates import FORWARD_LAYER, INPUT_LAYER, WEIGHT_LAYER
from varlen.errors import PlanError
from varlen.plan.api import plan_step
from varlen.step_plan import Mesh, MicroPacks


def sharded(cell: Cell) -> dict[str, Any]:
    """Price the micro-batches of balanced plans, shared both ways at every context parallelism above 1."""
    warm_up(("balanced",))
    lengths, _ = cell.drawn()
    cost, rows = cell.cost(), []
    for mesh in cell.meshes[1:]:
        try:
            plan = plan_step(lengths, cost=cost, mesh=mesh, method="balanced")
        except PlanError:
            continue
        used = cost.as_planned(plan)
        by_document, by_sequence = (
            by_documents(plan.forward, used, mesh),
            by_sequences(plan.forward, used, mesh),
        )
        rows.append(
            {
                "cp": mesh.cp,
                "micro_batches": len(by_document),
                "faster_as_sequence": int((by_sequence < by_document * (1 - 1e-9)).sum()),
                "by_document_s": float(by_document.sum()),
                "by_sequence_s": float(by_sequence.sum()),
                "adaptive_s": float(np.minimum(by_document, by_sequence).sum()),
            }
        )
    return {"cell": asdict(cell), "plans": rows}


def by_documents(packs: MicroPacks, cost: CostModel, mesh: Mesh) -> np.ndarray:
    """Return seconds of a layer's passes of each MicroPack, each rank with an equal part of every document.

    Both ways gather the keys and values of all documents, which isn't counted.
    """
    return _priced(packs.slice_offsets, packs.starts, packs.stops, cost, mesh)


def by_sequences(packs: MicroPacks, cost: CostModel, mesh: Mesh) -> np.ndarray:
    """Return the same of the slowest rank, each with two of 2 cp equal parts of the whole: the first and the last."""
    pieces = [_parts(packs, pack, mesh.cp) for pack in range(packs.num_micropacks)]
    ranks = [rank for parts in pieces for rank in parts]
    offsets = np.cumsum([0, *(len(rank) for rank in ranks)]).astype(np.int32)
    starts, stops = np.array([piece for rank in ranks for piece in rank], np.int32).reshape(-1, 2).T
    alone = Mesh(dp=mesh.dp, pp=mesh.pp, tp=mesh.tp)
    seconds = _priced(offsets, starts.copy(), stops.copy(), cost, alone)
    return seconds.reshape(-1, mesh.cp).max(axis=1)


def _parts(packs: MicroPacks, pack: int, cp: int) -> list[list[tuple[int, int]]]:
    """Return what each rank has of the documents: starts and stops."""
    first, last = packs.slice_offsets[pack : pack + 2].tolist()
    begins, ends = packs.starts[first:last], packs.stops[first:last]
    offsets = np.concatenate([[0], np.cumsum((ends - begins).astype(np.int64))])
    cuts = np.linspace(0, offsets[-1], 2 * cp + 1).round().astype(np.int64)
    parts: list[list[tuple[int, int]]] = [[] for _ in range(cp)]
    for part in range(2 * cp):
        low, high = cuts[part : part + 2].tolist()
        for place in range(len(begins)):
            a, b = max(low, int(offsets[place])), min(high, int(offsets[place + 1]))
            if a < b:
                moved = int(begins[place] - offsets[place])
                parts[min(part, 2 * cp - 1 - part)].append((a + moved, b + moved))
    return parts


def _priced(
    offsets: Int32Array, starts: Int32Array, stops: Int32Array, cost: CostModel, mesh: Mesh
) -> np.ndarray:
    """Price without links and launches."""
    nothing = np.zeros(2)
    rates = cost.rates(mesh)._replace(
        link_s_per_byte=nothing,
        link_latency_s=nothing,
        launch_s=0.0,
        slice_launch_s=0.0,
        slice_launch_back_s=0.0,
    )
    prices = kernels.price(
        np.asarray(offsets, np.int32).copy(),
        starts.copy(),
        stops.copy(),
        np.ones(len(starts), np.int32),
        rates,
    )
    return np.asarray(prices[:, [FORWARD_LAYER, INPUT_LAYER, WEIGHT_LAYER]].sum(axis=1))
