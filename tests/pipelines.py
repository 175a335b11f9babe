"""Steps of several processes for tests: random plans, the batch of a plan, and what one process makes of it."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import torch
from random_plans import random_plan
from sliced import SIZES, take_gradients, tiny, uncut

import varlen as vl
from varlen.step_plan import MicroPacks, StepPlan

LAYERS = 8


def plan_of(seed: int, mesh: vl.Mesh) -> StepPlan:
    """A plan by dice that a mesh can run: no document is shared, and some document teaches something."""
    for attempt in range(1000):
        plan = random_plan(seed * 1000 + attempt, mesh=mesh)
        if not plan.num_merged and not plan.splits_backward and plan.lengths.max(initial=0) > 1:
            return plan
    raise AssertionError("no plan in 1,000 attempts")


def mesh_of(seed: int, world: int, **settings: Any) -> vl.Mesh:
    """A mesh by dice of as many GPUs as there are processes."""
    random = Random(seed)
    dp = random.choice([n for n in (1, 2) if world % n == 0])
    pp = world // dp
    return vl.Mesh(dp=dp, pp=pp, virtual_stages=random.choice([1, 2]) if pp > 1 else 1, **settings)


def batch_of(plan: StepPlan, seed: int = 0) -> vl.PackedBatch:
    random = np.random.default_rng(seed)
    documents = [random.integers(0, SIZES["vocab_size"], n).astype(np.int32) for n in plan.lengths.tolist()]
    filled = [document for document in documents if len(document)]
    packing = vl.pack([len(x) for x in filled], capacity=max(map(len, filled)), method="next_fit")
    return vl.collate(filled, packing)


def runnable(plan: StepPlan) -> StepPlan:
    """The plan without documents of no tokens, and with slices of a document in one MicroPack joined."""
    kept = np.flatnonzero(plan.lengths)
    number = np.full(len(plan.lengths), -1, np.int32)
    number[kept] = np.arange(len(kept), dtype=np.int32)
    columns = {name: getattr(plan, name)[kept] for name in ("lengths", "first_ranks", "num_ranks")}
    passes = {name: _joined(getattr(plan, name), number) for name in ("forward", "backward")}
    return replace(plan, **columns, **passes)


def _joined(packs: MicroPacks, number: Any) -> MicroPacks:
    flat, offsets = [], [0]
    for first, last in zip(packs.slice_offsets, packs.slice_offsets[1:]):
        spans: dict[int, tuple[int, int]] = {}
        for j in range(first, last):
            document, start, stop = (int(x[j]) for x in (packs.document_ids, packs.starts, packs.stops))
            before = spans.get(document, (start, stop))
            spans[document] = (min(start, before[0]), max(stop, before[1]))
        flat += [(number[document], *span) for document, span in spans.items()]
        offsets.append(len(flat))
    columns = np.array(flat, np.int32).reshape(-1, 3).T
    return MicroPacks(
        rank_offsets=packs.rank_offsets.copy(),
        slice_offsets=np.array(offsets, np.int32),
        document_ids=columns[0].copy(),
        starts=columns[1].copy(),
        stops=columns[2].copy(),
    )


def alone(model: Any, batch: vl.PackedBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the uncut model in one process."""
    inside = batch.segment_ids.ravel() >= 0
    tokens = torch.as_tensor(batch.input_ids.ravel()[inside]).long()
    return uncut(model, tokens, batch.document_lengths.tolist())


def furthest(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest difference of any tensor, relative to that tensor."""
    return max(
        (float((found[n] - wanted[n]).norm() / wanted[n].norm().clamp_min(1e-300)) for n in found), default=0.0
    )


def run_random_plan(seed: int, rank: int, world: int) -> dict[str, Any]:
    """Run a step by a random plan as one of several processes, and say how far it is from one process."""
    mesh = mesh_of(seed, world)
    plan = runnable(plan_of(seed, mesh))
    batch = batch_of(plan, seed)
    whole = tiny("llama", num_hidden_layers=LAYERS, hidden_size=16, intermediate_size=24)
    loss, wanted = alone(whole, batch)
    model = tiny("llama", num_hidden_layers=LAYERS, hidden_size=16, intermediate_size=24)
    engine = vl.SliceEngine(model, mesh=mesh, rank=rank, deadline_s=60)
    stats = engine.step(batch, plan)
    found = take_gradients(model)
    engine.close()
    return {
        "loss": abs(stats.loss - loss) / loss,
        "gradients": furthest(found, wanted),
        "names": sorted(found),
        "all": sorted(wanted),
        "mesh": [mesh.dp, mesh.pp, mesh.virtual_stages],
    }
