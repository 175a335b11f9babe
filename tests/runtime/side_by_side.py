"""Plans with a thread for each stage of each rank, which talk as processes would; each has a model of its own."""

import copy
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tests.support.sliced import take_gradients
from tests.support.step_plans import micropacks_of
from torch.utils._python_dispatch import _disable_current_modes

from varlen.runtime.clock import BytesMeter, Clock
from varlen.runtime.decoder import DecoderParts
from varlen.runtime.mesh.shared_documents import SharedDocument, groups_of, shared_documents
from varlen.runtime.stage_run import StageRunner, TaskRun
from varlen.runtime.step import chunk_steps, layers_of, step_data
from varlen.step_plan import BACKWARD, FORWARD, Mesh, StepPlan

PATIENCE_S = 60


class Table:
    """Where the threads of one group meet."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)
        self.given: list[Any] = [None] * size


class ThreadPeers:
    """Peers that are threads of one process, and count what they were told."""

    def __init__(self, table: Table, rank: int) -> None:
        self._table, self.rank, self.size = table, rank, len(table.given)

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        return self.begin_all_gather(rows)()

    def begin_all_gather(self, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        """What a gather takes is taken when it begins; threads meet when it ends."""
        out = rows.new_empty(self.size, *rows.shape)

        def wait() -> torch.Tensor:
            for into, given in zip(out, self._meet(rows)):
                into.copy_(given)
            return out

        return wait

    def reduce_scatter(self, parts: torch.Tensor) -> torch.Tensor:
        assert len(parts) == self.size
        given = self._meet(parts)
        with _disable_current_modes():
            summed = torch.stack([each[self.rank] for each in given]).sum(0)
        return summed.clone()

    def _meet(self, mine: torch.Tensor) -> list[torch.Tensor]:
        # A copy that no meter sees: what another thread still holds isn't alive on this rank.
        with _disable_current_modes():
            self._table.given[self.rank] = mine.detach().clone()
        self._table.barrier.wait()
        given = list(self._table.given)
        self._table.barrier.wait()
        self._table.given[self.rank] = None
        assert len({(x.shape, x.dtype) for x in given}) == 1, [x.shape for x in given]
        return given


class QueueTransport:
    """Between the stages of one rank, each a thread; keeps the rows of every message."""

    def __init__(self) -> None:
        self._made = threading.Lock()
        self._queues: dict[Any, queue.Queue[torch.Tensor]] = defaultdict(queue.Queue)
        self.rows: dict[tuple[int, int, int], int] = {}

    def _of(self, *message: int) -> queue.Queue[torch.Tensor]:
        with self._made:
            return self._queues[message]

    def send(self, kind: int, micropack: int, chunk: int, rows: torch.Tensor) -> None:
        self.rows[kind, micropack, chunk] = rows.shape[1]
        self._of(kind, micropack, chunk).put(rows)

    def expect(self, kind: int, micropack: int, chunk: int) -> None:
        """Queues take rows whenever they come."""

    def receive(self, kind: int, micropack: int, chunk: int) -> torch.Tensor:
        return self._of(kind, micropack, chunk).get(timeout=PATIENCE_S)


@dataclass
class Sides:
    """What a step side by side gave; gradients and losses are sums over ranks and stages."""

    loss: float = 0.0
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    token_losses: torch.Tensor | None = None
    transports: list[QueueTransport] = field(default_factory=list)
    shared: dict[int, dict[int, SharedDocument]] = field(default_factory=dict)
    """By rank."""


def run_side_by_side(
    model: Any,
    tokens: torch.Tensor,
    plan: StepPlan,
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Sides:
    """Run a plan, all stages of all ranks at the same time, each thread within a mode of torch."""
    mesh = plan.mesh
    sides = Sides(
        transports=[QueueTransport() for _ in range(mesh.dp)], token_losses=torch.zeros(len(tokens)).double()
    )
    tables = {
        (stage, *group): Table(group[1])
        for rank in range(mesh.dp)
        for group in groups_of(plan, rank)
        for stage in range(mesh.pp)
    }
    models = [copy.deepcopy(model) for _ in range(mesh.dp * mesh.pp)]
    guard = threading.Lock()

    def run(number: int) -> None:
        rank, stage = divmod(number, mesh.pp)
        mine = models[number]

        groups = {
            (first, size): ThreadPeers(tables[stage, first, size], rank - first)
            for first, size in groups_of(plan, rank)
        }
        shared = shared_documents(plan, rank, groups, tokens.device)
        with mode():
            losses, of_tokens, _ = run_place(mine, tokens, plan, rank, stage, sides.transports[rank], shared)
        with guard:
            sides.shared[rank] = shared
            sides.loss += losses
            if of_tokens is not None:
                assert sides.token_losses is not None
                sides.token_losses += of_tokens

    in_threads(run, len(models), list(tables.values()))
    for mine in models:
        for name, gradient in take_gradients(mine).items():
            known = sides.gradients.get(name)
            sides.gradients[name] = gradient if known is None else known + gradient
    return sides


def run_place(
    model: Any,
    tokens: torch.Tensor,
    plan: StepPlan,
    rank: int,
    stage: int,
    transport: Any,
    shared: dict[int, SharedDocument],
    meter: BytesMeter | None = None,
) -> tuple[float, torch.Tensor | None, TaskRun]:
    """Run one stage of one rank; returns its part of the loss, the losses of its tokens, and what tasks took."""
    parts, data = DecoderParts.of(model), step_data(plan, tokens, None)
    chunks = chunk_steps(parts, layers_of(model, plan.mesh), data, plan, keeps_losses=True, shared=shared)
    mine = chunks[stage :: plan.mesh.pp]
    place = StageRunner(plan, rank, stage, mine, transport, clock=Clock(tokens.device), meter=meter)
    while place.next_task:
        place.run_next()
    losses = [loss for chunk in mine for loss in chunk.losses]
    assert all(not chunk._documents and not chunk._graphs for chunk in mine)
    return float(sum(losses, torch.zeros(()))), mine[-1].token_losses, place.task_run()


def in_threads(run: Callable[[int], None], count: int, tables: list[Table]) -> None:
    """Run numbered work in threads; the first error ends all, and is raised."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            run(number)
        except BaseException as error:
            errors.append(error)
            for table in tables:
                table.barrier.abort()

    threads = [threading.Thread(target=guarded, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


Holders = list[tuple[int, int]]


"""The first rank of each document, and how many."""


def plan_of(lengths: list[int], holders: Holders, forward: Any, backward: Any, **settings: Any) -> StepPlan:
    """A plan of ranks of one stage, which run all forward and then all backward."""
    tasks = [[FORWARD] * len(one) + [BACKWARD] * len(other) for one, other in zip(forward, backward)]
    return StepPlan(
        lengths=np.array(lengths, np.int32),
        first_ranks=np.array([first for first, _ in holders], np.int32),
        num_ranks=np.array([num for _, num in holders], np.int32),
        forward=micropacks_of(forward),
        backward=micropacks_of(backward),
        tasks=np.array([code for one in tasks for code in one], np.uint8),
        task_offsets=np.cumsum([0, *map(len, tasks)]).astype(np.int32),
        mesh=Mesh(dp=len(forward)),
        **settings,
    )
