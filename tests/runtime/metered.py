"""Steps with a thread for each stage of each rank, every tensor counted, and the simulator's word on their peaks."""

from __future__ import annotations

import copy
import queue
import threading
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tests.runtime.side_by_side import PATIENCE_S, Table, ThreadPeers, in_threads
from tests.support.sliced import tokens_of
from torch.utils._python_dispatch import _disable_current_modes

import varlen as vl
from varlen.cost.memory import Saved
from varlen.runtime.clock import Clock, TrackedBytes
from varlen.runtime.decoder import DecoderParts
from varlen.runtime.mesh.channels import Channels
from varlen.runtime.mesh.shared_documents import groups_of, shared_documents
from varlen.runtime.stage_run import StageRunner
from varlen.runtime.step import chunk_steps, layers_of, step_data
from varlen.step_plan import BACKWARD, FORWARD, StepPlan
from varlen.types import FloatArray

H100 = vl.Hardware.named("h100")


TOLD = {}


class Pipe:
    """One direction between two threads, which has sent a message once it was told of it."""

    def __init__(self) -> None:
        self._going: queue.Queue[torch.Tensor] = queue.Queue()

    def send(self, rows: torch.Tensor, _: int) -> Any:
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            self._going.put(rows.clone())
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

    def receive(self, rows: torch.Tensor, _: int) -> Any:
        def wait() -> None:
            with _disable_current_modes():  # type: ignore[no-untyped-call]
                rows.copy_(self._going.get(timeout=PATIENCE_S))

        return SimpleNamespace(wait=wait)


class End:
    """A stage's end of a pipe, as channels know groups."""

    index, ranks = 0, (0, 1)

    def __init__(self, pipe: Pipe) -> None:
        self.send, self.receive = pipe.send, pipe.receive


def measured(model: Any, plan: StepPlan, saved: Saved = "layers") -> FloatArray:
    """The most bytes of tensors on each stage of each rank beside parameters, gradients and tokens, `[dp, pp]`."""
    mesh, tokens = plan.mesh, tokens_of(plan.lengths.tolist())
    tables = {
        (stage, *group): Table(group[1])
        for rank in range(mesh.dp)
        for group in groups_of(plan, rank)
        for stage in range(mesh.pp)
    }
    models = [copy.deepcopy(model) for _ in range(mesh.dp * mesh.pp)]
    for parameter in (p for each in models for p in each.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    pipes: dict[Any, Pipe] = defaultdict(Pipe)
    guard, peaks = threading.Lock(), np.zeros((mesh.dp, mesh.pp))
    TOLD.clear()

    def run(number: int) -> None:
        rank, stage = divmod(number, mesh.pp)
        mine = models[number]
        groups: dict[tuple[int, int], Any] = {
            (first, size): ThreadPeers(tables[stage, first, size], rank - first)
            for first, size in groups_of(plan, rank)
        }
        with TrackedBytes() as meter:
            parts, data = DecoderParts.of(mine), step_data(plan, tokens, None)
            shared = shared_documents(plan, rank, groups, tokens.device)
            chunks = chunk_steps(parts, layers_of(mine, mesh), data, plan, shared=shared, saved=saved)
            before = meter.live
            with guard:
                ends = {
                    (kind, takes): End(pipes[rank, kind, takes])
                    for kind, step in ((FORWARD, 1), (BACKWARD, -1))
                    for takes in range(mesh.num_chunks)
                    if 0 <= takes - step < mesh.num_chunks
                    and stage in ((takes - step) % mesh.pp, takes % mesh.pp)
                }
            seat = SimpleNamespace(mesh=mesh, stage=stage, dp_rank=rank)
            here: Any = SimpleNamespace(seat=seat, channels=ends)
            lookout: Any = SimpleNamespace(waiting=nullcontext)
            like = torch.empty(mine.config.hidden_size, dtype=mine.dtype)
            wires = Channels(here, plan, like, lookout, shared)
            clock = Clock(tokens.device)
            place = StageRunner(plan, rank, stage, chunks[stage :: mesh.pp], wires, clock=clock, meter=meter)
            while place.next_task:
                place.run_next()
            TOLD[rank, stage] = (place.told(), before)
            peaks[rank, stage] = place.told().peak_bytes.max(initial=0) - before

    in_threads(run, len(models), list(tables.values()))
    return peaks


def predicted(model: Any, plan: StepPlan, saved: Saved = "layers") -> FloatArray:
    """The simulator's peaks beside states, float64 `[dp, pp]`."""
    shape = vl.ModelShape.from_config(model.config)
    cost = vl.CostModel(model=shape, hardware=H100, kernels="eager", saved=saved)
    return vl.simulate(plan, cost).peaks_bytes - cost.as_planned(plan).memory(plan.mesh).state_bytes
