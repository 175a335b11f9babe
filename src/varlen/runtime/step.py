"""`run_stages`: a planned step in one process, in which all ranks and stages of its mesh take turns.

Tasks that several GPUs would run in parallel run here one after the other: a plan for one GPU on that GPU, and a plan
for any number of stages and ranks on a laptop, to check that it runs and that its gradients are the model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from varlen.attention.choice import KernelChoice
from varlen.cost.memory import Saved, layers_again
from varlen.cost.shape import ModelShape, stages_of
from varlen.errors import DeadlockError, DocumentsError, PlanError
from varlen.plan.check import check_contents
from varlen.runtime.chunk import AS_THEY_ARE, ChunkStep, Event, StepData, Units, whole_documents
from varlen.runtime.clock import BytesMeter, Clock
from varlen.runtime.decoder import IGNORED, DecoderParts
from varlen.runtime.main_grads import step_gradients, unscale
from varlen.runtime.masters import Masters
from varlen.runtime.mesh.shared_documents import SharedDocument
from varlen.runtime.stage_run import StageRunner, TaskRun
from varlen.step_plan import Mesh, StepPlan


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepRun:
    """What this process ran of a step; its gradients are in the model."""

    loss: float  # this process's part of the step's loss
    task_runs: Sequence[TaskRun]  # `[dp * pp]`: the tasks of each stage of each rank
    token_losses: torch.Tensor | None = None
    """`[num_tokens]`: cross-entropy of each token's label, where asked for."""
    kernels: KernelChoice = field(default_factory=KernelChoice)


class LocalTransport:
    """Between the stages of one process: keeps what was sent until it is received."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int, int], torch.Tensor] = {}

    def send(self, kind: int, micropack: int, chunk: int, rows: torch.Tensor) -> None:
        """Keep rows, as `Transport.send`."""
        self._waiting[kind, micropack, chunk] = rows

    def expect(self, kind: int, micropack: int, chunk: int) -> None:
        """Do nothing: rows are here, or aren't made yet."""

    def receive(self, kind: int, micropack: int, chunk: int) -> torch.Tensor:
        """Return rows, as `Transport.receive`."""
        return self._waiting.pop((kind, micropack, chunk))

    def has(self, message: tuple[int, int, int] | None) -> bool:
        """Return whether a message is there, or none is needed."""
        return message is None or message in self._waiting


def run_step(
    model: Any,
    input_ids: torch.Tensor,
    plan: StepPlan,
    *,
    labels: torch.Tensor | None = None,
    meter: BytesMeter | None = None,
    saved: Saved = "layers",
) -> StepRun:
    """Run a step's tasks in the plan's order, and add to every parameter's gradient.

    The gradients are those of the mean loss over the step's targets, as the uncut documents would give them.

    Args:
        input_ids: int64 `[num_tokens]`, documents one behind the other in the order of `plan.lengths`.
        labels: int64 `[num_tokens]`: the token after each, -100 where there is none to learn; None: the next token
            of the document.
    """
    check_contents(plan)
    check_runnable(plan)
    return run_stages(
        model, DecoderParts.of(model), step_data(plan, input_ids, labels), plan, meter=meter, saved=saved
    )


def run_stages(
    model: Any,
    parts: DecoderParts,
    data: StepData,
    plan: StepPlan,
    *,
    meter: BytesMeter | None = None,
    keeps_losses: bool = False,
    saved: Saved = "layers",
    masters: Masters | None = None,
    is_forward_only: bool = False,
) -> StepRun:
    """Run the tasks of all stages of all ranks in this process, and add to gradients as `run_step` does."""
    mesh, device = plan.mesh, data.input_ids.device
    layers = layers_of(model, mesh)
    if not _is_float16(model):
        data = replace(data, scale=1.0)  # so that gradients add to those of earlier batches in place
    settings: dict[str, Any] = {
        "keeps_losses": keeps_losses,
        "saved": saved,
        "is_forward_only": is_forward_only,
    }
    chunks = [chunk_steps(parts, layers, data, plan, **settings) for _ in range(mesh.dp)]
    transports = [LocalTransport() for _ in range(mesh.dp)]
    runners = [
        StageRunner(
            plan,
            rank,
            stage,
            chunks[rank][stage :: mesh.pp],
            transports[rank],
            clock=Clock(device),
            meter=meter,
            is_forward_only=is_forward_only,
        )
        for rank in range(mesh.dp)
        for stage in range(mesh.pp)
    ]
    trained = [] if is_forward_only else [p for p in model.parameters() if p.requires_grad]
    with step_gradients(trained, is_apart=data.scale != 1):
        take_turns(runners, [transports[rank] for rank in range(mesh.dp) for _ in range(mesh.pp)])
        unscale(trained, data.scale)
        if masters is not None and not is_forward_only:
            masters.collect()
    losses = [loss for of_rank in chunks for chunk in of_rank for loss in chunk.losses]
    return StepRun(
        loss=float(torch.stack(losses).sum()),
        task_runs=[runner.task_run() for runner in runners],
        token_losses=_added([of_rank[-1] for of_rank in chunks]) if keeps_losses else None,
        kernels=parts.kernels,
    )


def _is_float16(model: Any) -> bool:
    """Return whether a model computes in float16, of which gradients may underflow."""
    device = next(model.parameters()).device.type
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
        return True
    return any(parameter.dtype == torch.float16 for parameter in model.parameters())


def take_turns(runners: Sequence[StageRunner], transports: Sequence[LocalTransport]) -> None:
    """Run the tasks of stages, each as far as messages let it, until all are done."""
    while any(runner.next_task for runner in runners):
        has_run = False
        for runner, local in zip(runners, transports):
            while runner.next_task and local.has(runner.needs()):
                runner.run_next()
                has_run = True
        if not has_run:
            waiting = [number for number, runner in enumerate(runners) if runner.next_task]
            raise DeadlockError(
                f"{len(waiting):,} stages wait for each other; the first has come to {runners[waiting[0]].next_task} "
                "(kind, chunk, MicroPack); varlen.plan.check.check_plan names the circle"
            )


class _Unrun(ChunkStep):
    """A chunk that computes nothing, to find out whether an order of tasks can run."""

    def __init__(self) -> None:
        self.layers, self.units = range(1), AS_THEY_ARE

    def events(self, _: int) -> list[Event]:
        return []

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        return _NOTHING

    def backward(self, *_: Any, **__: Any) -> torch.Tensor:
        return _NOTHING

    def weight(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


_NOTHING = torch.empty(0)


def check_order(plan: StepPlan, rank: int) -> None:
    """Require that the stages of a pipeline don't wait for each other in a circle.

    Cost: some 5 microseconds a task.
    """
    pp, transport = plan.mesh.pp, LocalTransport()
    chunks = [_Unrun()] * plan.mesh.virtual_stages
    runners = [
        StageRunner(plan, rank, stage, chunks, transport, clock=Clock(_NOTHING.device)) for stage in range(pp)
    ]
    take_turns(runners, [transport] * pp)


def step_data(plan: StepPlan, input_ids: torch.Tensor, labels: torch.Tensor | None) -> StepData:
    """Return the tokens of a step, each target weighing the same.

    Args:
        input_ids: int64 `[num_tokens]`.
    """
    offsets = np.concatenate([[0], np.cumsum(plan.lengths, dtype=np.int64)])
    if input_ids.shape != (plan.num_tokens,) or (labels is not None and labels.shape != input_ids.shape):
        seen = [tuple(x.shape) for x in (input_ids, labels) if x is not None]
        raise DocumentsError(
            f"tokens and labels of shapes {seen}; the plan has {plan.num_tokens:,} tokens in a row"
        )
    labels = next_tokens(input_ids, offsets) if labels is None else labels
    known = labels != IGNORED
    num_targets = int(known.sum())
    if num_targets == 0:
        raise DocumentsError(f"none of {plan.num_tokens:,} tokens has a label to learn; leave this step out")
    return StepData(input_ids=input_ids, labels=labels, weights=known.double() / num_targets, offsets=offsets)


def layers_of(model: Any, mesh: Mesh) -> list[range]:
    """Return the layers of each chunk, as the cost model cuts them."""
    if mesh.num_chunks == 1:
        return [range(model.config.get_text_config().num_hidden_layers)]
    sizes = stages_of(ModelShape.from_config(model.config), mesh).layers.astype(int)
    return [range(stop - size, stop) for size, stop in zip(sizes.tolist(), np.cumsum(sizes).tolist())]


def chunk_steps(
    parts: DecoderParts,
    layers: Sequence[range],
    data: StepData,
    plan: StepPlan,
    *,
    keeps_losses: bool = False,
    shared: Mapping[int, SharedDocument] | None = None,
    saved: Saved = "layers",
    is_forward_only: bool = False,
    units: Units = AS_THEY_ARE,
) -> list[ChunkStep]:
    """Return the chunks of one rank's pipeline."""
    share = plan.recompute_share if plan.recompute == "full" else 0.0
    whole = whole_documents(plan)
    again = layers_again(np.array([len(each) for each in layers], np.float64), share).astype(int).tolist()
    return [
        ChunkStep(
            parts,
            each,
            data,
            layers_again=count,
            whole=whole,
            splits_backward=plan.splits_backward,
            saved=saved,
            is_selective=plan.recompute != "none",
            offload=plan.offload,
            keeps_losses=keeps_losses,
            shared=shared,
            is_forward_only=is_forward_only,
            units=units,
        )
        for each, count in zip(layers, again)
    ]


def _added(chunks: Sequence[ChunkStep]) -> torch.Tensor:
    """Add up token losses of all ranks; each has those of its documents, and 0 elsewhere."""
    return torch.stack([chunk.token_losses for chunk in chunks if chunk.token_losses is not None]).sum(0)


def next_tokens(input_ids: torch.Tensor, offsets: npt.NDArray[np.int64]) -> torch.Tensor:
    """Return each token's next one within its document, -100 at the last; int64 `[num_tokens]`."""
    labels = torch.roll(input_ids, -1)
    ends = offsets[1:][np.diff(offsets) > 0] - 1
    labels[torch.from_numpy(ends).to(labels.device)] = IGNORED
    return labels


def check_runnable(plan: StepPlan) -> None:
    """Refuse plans that one process can't run: of tensor or context parallelism, or of shared documents."""
    if plan.mesh.tp > 1 or plan.mesh.cp > 1:
        raise PlanError(
            f"a plan of tp={plan.mesh.tp} and cp={plan.mesh.cp}; one process alone divides neither layers nor slices "
            "among GPUs, so both must be 1: make the engine with mesh and rank in a job of "
            f"{plan.mesh.num_gpus:,} processes"
        )
    if plan.num_merged:
        raise PlanError(
            f"a plan of {plan.num_merged:,} documents that ranks share; one process alone runs documents that none "
            "share: plan with Search(merges=False), or make the engine with mesh and rank in a job of "
            f"{plan.mesh.num_gpus:,} processes"
        )
