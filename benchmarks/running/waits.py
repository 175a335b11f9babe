"""Many stages on few cores: the real executor, real messages over gloo, and timed waits in the place of computing.

Each task sleeps for the seconds that the calibrated cost model says, and gives on rows of the right shape. What is
compared with the simulator is therefore order, dependencies, messages and everything that the executor adds; the
seconds of computing are the cost model's own. The results say so: these are no measured steps.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import varlen as vl
from benchmarks.running.processes import link_of, side_by_side, turns
from benchmarks.running.steps import Step, raw_lengths, source_of
from varlen.plan.search import Search
from varlen.runtime.calibrate import quiet
from varlen.runtime.chunk import AS_THEY_ARE, Event
from varlen.runtime.clock import Clock
from varlen.runtime.mesh.channels import Channels
from varlen.runtime.mesh.failures import Notes, WaitReporter
from varlen.runtime.mesh.process_groups import coordinate_of, open_groups
from varlen.runtime.stage_run import StageRunner, keys_of
from varlen.simulate.graph import Durations, durations
from varlen.step_plan import BACKWARD, FORWARD, WEIGHT, SliceKey

HIDDEN = 64
"""Width of the rows that are sent: narrower than a model's, since all messages of a mesh pass through few cores."""
ROUNDS = 5
STEP_S = 4.0
"""Seconds that the waits of a step are stretched or shrunk to."""
MESHES = (vl.Mesh(pp=4), vl.Mesh(dp=2, pp=4), vl.Mesh(pp=4, virtual_stages=2))
DOCUMENTS = 64
CAPACITY = 131_072


class Waiting:
    """A chunk of layers that waits as long as it would compute."""

    def __init__(self, seconds: dict[int, dict[SliceKey, float]], *, has_embedding: bool, width: int) -> None:
        self._seconds, self._width = seconds, width
        self.has_embedding, self.layers, self.units = has_embedding, range(1), AS_THEY_ARE

    def events(self, _: int) -> list[Event]:
        return []

    def forward(self, key: SliceKey, _: torch.Tensor | None) -> torch.Tensor:
        return self._wait(FORWARD, key)

    def backward(self, key: SliceKey, _: torch.Tensor | None) -> torch.Tensor | None:
        """Wait, and return rows unless nobody takes them."""
        rows = self._wait(BACKWARD, key)
        return None if self.has_embedding else rows

    def weight(self, key: SliceKey) -> None:
        self._wait(WEIGHT, key)

    def _wait(self, kind: int, key: SliceKey) -> torch.Tensor:
        until = time.perf_counter() + self._seconds[kind][key]
        rows = torch.zeros(1, sum(stop - start for _, start, stop in key), self._width, dtype=torch.bfloat16)
        time.sleep(max(0.0, until - time.perf_counter()))
        return rows


def chunk_of(
    plan: vl.StepPlan, rank: int, chunk: int, seconds: Durations, scale: float, width: int
) -> Waiting:
    """Return a chunk whose tasks take `scale` times as long as the cost model says."""
    of_kind: dict[int, dict[SliceKey, float]] = {}
    passes = {FORWARD: (plan.forward, seconds.forward), BACKWARD: (plan.backward, seconds.backward)}
    passes[WEIGHT] = (plan.backward, seconds.weight)
    for kind, (packs, taken) in passes.items():
        first, last = packs.rank_offsets[rank : rank + 2].tolist()
        of_kind[kind] = dict(
            zip(keys_of(plan, min(kind, BACKWARD), rank), (scale * taken[chunk, first:last]).tolist())
        )
    return Waiting(of_kind, has_embedding=chunk == 0, width=width)


def waited(
    rank: int, found: list[Step], cost: vl.CostModel, scales: list[float], rounds: int
) -> dict[str, Any]:
    mesh = found[0].plan.mesh
    coordinate = coordinate_of(mesh, rank)
    store = dist.distributed_c10d._get_default_store()
    groups = open_groups(
        coordinate, dist.PrefixStore("waits", store), torch.device("cpu"), 300.0, lambda _: None
    )
    notes = Notes(
        store=store, rank=rank, world_size=1, name_of=coordinate.name_of
    )  # of a job that nobody watches
    wait_reporter = WaitReporter(notes)
    like = torch.empty(HIDDEN, dtype=torch.bfloat16)
    spans: list[list[tuple[float, float]]] = [[] for _ in found]
    for number in range(rounds + 1):
        for index, (step, scale) in enumerate(zip(found, scales)):
            seconds = durations(step.plan, cost)
            chunks: Any = [
                chunk_of(step.plan, coordinate.dp_rank, chunk, seconds, scale, HIDDEN)
                for chunk in range(coordinate.stage, mesh.num_chunks, mesh.pp)
            ]
            channels = Channels(groups, step.plan, like, wait_reporter)
            place = StageRunner(
                step.plan, coordinate.dp_rank, coordinate.stage, chunks, channels, clock=Clock(like.device)
            )
            dist.barrier()
            begun = time.perf_counter()
            while place.next_task:
                place.run_next()
            if number:
                spans[index].append((begun, time.perf_counter()))
            channels.finish()
    exchanges = turns(rank)
    groups.close()
    return {"spans": spans, "link": link_of([exchanges]) if rank < 2 else None}


def steps(mesh: vl.Mesh, lengths: np.ndarray, cost: vl.CostModel, name: str, capacity: int) -> list[Step]:
    """Plan a step of a real shape as it is planned for GPUs, with no documents shared."""
    search = Search(merges=False)
    given: dict[str, Any] = {"cost": cost, "mesh": mesh}
    found = {
        "packed, as users run it": vl.plan_step(lengths, method="packed", capacity=capacity, **given),
        "sliced": vl.plan_step(lengths, method="sliced", **given),
        "micropack": vl.plan_step(lengths, search=search, **given),
    }
    return [Step(documents=name, method=method, plan=plan) for method, plan in found.items()]


def compared(found: list[Step], cost: vl.CostModel, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Run steps in timed waits, each stretched to `STEP_S`, and compare with the simulator."""
    scales = [STEP_S / vl.simulate(step.plan, cost).makespan_s for step in found]
    ranks = side_by_side(waited, found[0].plan.mesh.num_gpus, found, cost, scales, rounds)
    rows = []
    for index, (step, scale) in enumerate(zip(found, scales)):
        spans = np.array([rank["spans"][index] for rank in ranks])
        taken = spans[:, :, 1].max(axis=0) - spans[:, :, 0].min(axis=0)
        timeline = vl.simulate(step.plan, cost)
        last = timeline.stops_s[np.isin(timeline.kinds, (FORWARD, BACKWARD, WEIGHT))].max()
        rows.append(
            {
                "documents": step.documents,
                "method": step.method,
                "mesh": [step.plan.mesh.dp, step.plan.mesh.pp, step.plan.mesh.virtual_stages],
                "tasks": len(step.plan.tasks),
                "predicted_s": scale * float(last),
                "waited_s": float(quiet(taken)),
                "rounds_s": taken.tolist(),
                "error": scale * float(last) / float(quiet(taken)) - 1,
                "link": [ranks[0]["link"].latency_s, ranks[0]["link"].bytes_per_s],
            }
        )
    return rows


def run(rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Plan steps of an 8B model on H100s for several meshes, and run them in timed waits."""
    cost = vl.CostModel(
        model=vl.ModelShape.named("llama-3-8b"),
        hardware=replace(vl.Hardware.named("h100"), memory_bytes=2e11),
        recompute="full",
        kernels="eager",
    )
    lengths = np.minimum(raw_lengths("code_src", DOCUMENTS), CAPACITY).astype(np.int32)
    return [
        row
        for mesh in MESHES
        for row in compared(steps(mesh, lengths, cost, source_of("code_src"), CAPACITY), cost, rounds)
    ]
