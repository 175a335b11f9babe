"""`MeshRank`: one process of a mesh, which runs its stage's part of every step and adds up with the others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from varlen.attention.kernels import Kernels
from varlen.cost.memory import Saved
from varlen.cost.states import Gathered
from varlen.errors import PlanError, SettingError, VarlenError
from varlen.plan.check import check_tasks
from varlen.plan.serialize import plan_fingerprint
from varlen.runtime.chunk import AS_THEY_ARE, StepData
from varlen.runtime.clock import BytesMeter, Clock
from varlen.runtime.decoder import DecoderParts, Vocabulary
from varlen.runtime.inputs import StepInputs
from varlen.runtime.main_grads import step_gradients, unscale
from varlen.runtime.masters import Masters
from varlen.runtime.mesh import gradients
from varlen.runtime.mesh.channels import Channels
from varlen.runtime.mesh.consistency import agree, batch_fingerprint, fingerprint_of
from varlen.runtime.mesh.failures import GRACE_S, Notes, WaitReporter, naming_the_missing, wait_until
from varlen.runtime.mesh.fsdp import Shards, is_sharded, waiting_at_most
from varlen.runtime.mesh.gradients import Reduction
from varlen.runtime.mesh.process_groups import Groups, MeshCoordinate, coordinate_of, in_axes, open_groups
from varlen.runtime.mesh.shared_documents import SharedDocument, peers_of, shared_documents
from varlen.runtime.probe import admit
from varlen.runtime.split import (
    check_division,
    check_ranks,
    cut_to_stage,
    devices_of,
    divide_layers,
    division_of,
    stage_dtype,
)
from varlen.runtime.stage_run import StageRunner
from varlen.runtime.step import StepRun, check_order, chunk_steps, layers_of
from varlen.step_plan import Mesh, StepPlan

_ENGINES = itertools.count()
_FACTS = (
    "kind of batch (whole step or share)",
    "plan",
    "step_num_targets",
    "batch",
    "settings document_losses, saved, gathered",
)
_WAY_OUT = "start the job again from its newest checkpoint"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Totals:
    """What all processes of a step did together."""

    loss: float
    peaks_bytes: npt.NDArray[np.int64]
    """int64 `[num_gpus]`: the most bytes of tensors alive at once, of each rank; 0 where no meter was given."""
    num_targets: int
    document_losses: torch.Tensor | None
    """float64 `[2, num_documents]`: the losses of each document's targets, summed, and their number; if asked for."""
    token_losses: torch.Tensor | None = None
    """`[num_tokens]`: of the documents that this process holds, where it has the last layers, if asked for."""


class MeshRank:
    """One process of a mesh."""

    def __init__(
        self,
        model: Any,
        mesh: Mesh,
        rank: int,
        *,
        deadline_s: float,
        gathered: Gathered,
        kernels: Kernels = "auto",
    ) -> None:
        """Cut the model to this process's stage, and meet the others."""
        self.coordinate = coordinate_of(mesh, rank)
        store = _engine_store(self.coordinate)
        grace_s = min(GRACE_S, deadline_s / 4)
        self._timeout_s = deadline_s - grace_s
        self._notes = Notes(
            store=PrefixStore("notes", store),
            rank=rank,
            world_size=mesh.num_gpus,
            name_of=self.coordinate.name_of,
            grace_s=grace_s,
        )
        self._groups: Groups | None = None
        self._devices: DeviceMesh | None = None
        self._wait_reporter = WaitReporter(
            self._notes, every_s=grace_s / 8, timeout_s=self._timeout_s, give_up=self._abort
        )
        self._gathered: Gathered = gathered
        self._kernels: Kernels = kernels
        self._dtype: torch.dtype | None = None
        self._partial: list[str] = []
        """Whole parameters of which each tp rank has a part of the gradient."""
        fault, fingerprint = None, "0" * 64
        with self._ending():
            device = next(model.parameters()).device
            devices = self._devices_of(device)["tp"] if mesh.tp > 1 else None
            try:
                check_division(model, devices)
                admit(model, kernels)
                check_ranks(model, mesh)
                cut = cut_to_stage(model, mesh, self.coordinate.stage)
                fingerprint, self._is_tied = cut.fingerprint, cut.is_tied and mesh.pp > 1
                self._partial = divide_layers(model, devices)
            except VarlenError as error:
                fault = error
            with self._wait_reporter.waiting():
                self._groups = open_groups(self.coordinate, store, device, self._timeout_s, self._settle)
                agree(
                    self._groups.world,
                    "model",
                    {"model": fingerprint},
                    fault,
                    name_of=self.coordinate.name_of,
                )

    def run(
        self,
        model: Any,
        prepared: StepInputs | VarlenError,
        *,
        meter: BytesMeter | None = None,
        keeps_losses: bool = False,
        gives_tokens: bool = False,
        saved: Saved = "layers",
        masters: Masters | None = None,
        is_forward_only: bool = False,
    ) -> tuple[StepRun, Totals]:
        """Run this process's part of a step, or of its forward pass alone; all processes do so at once."""
        with self._ending():
            groups = self._open()
            fault = prepared if isinstance(prepared, VarlenError) else self._fault_of(model, prepared.plan)
            facts, distinct = dict.fromkeys(_FACTS, "0" * 64), {}
            if fault is None and isinstance(prepared, StepInputs):
                found = (
                    fingerprint_of(prepared.is_share),
                    plan_fingerprint(prepared.plan),
                    fingerprint_of(int(prepared.is_share and prepared.step_num_targets)),
                    batch_fingerprint(prepared.data),
                    fingerprint_of((keeps_losses, gives_tokens, saved, self._gathered, is_forward_only)),
                )
                facts = dict(zip(_FACTS, found))
                # All processes of one data-parallel rank have the same share.
                distinct = {"batch": self._dp_ranks()} if prepared.is_share else {}
            with self._wait_reporter.waiting():
                agree(groups.world, "step", facts, fault, name_of=self.coordinate.name_of, distinct=distinct)
            assert isinstance(prepared, StepInputs)
            with self._wait_reporter.waiting():
                data = prepared.weighed(groups.replicas.sum)
            with waiting_at_most(self._timeout_s, model):
                settings = {"keeps_losses": keeps_losses, "saved": saved, "is_forward_only": is_forward_only}
                run = self._run(model, groups, data, prepared.spread, meter, masters, settings)
            with self._wait_reporter.waiting():
                totals = self._total(groups, run, prepared)
                if gives_tokens and self.coordinate.stage == self.coordinate.mesh.pp - 1:
                    totals = replace(totals, token_losses=self._of_tokens(groups, run, prepared))
                return run, totals

    def masters_of(self, model: Any, weights: Mapping[str, torch.Tensor]) -> Masters:
        """Return float32 masters of the stage's parameters; all processes call it if its replicas divide them."""
        with self._ending():
            groups, mesh, replicas = self._open(), self.coordinate.mesh, self.coordinate.num_replicas
            if mesh.sharding != "optimizer" or replicas == 1:
                return Masters(_trained(model), weights)
            devices = self._devices_of(groups.device)["replicas"]
            return Masters(_trained(model), weights, groups.replicas, devices)

    def publish(self, masters: Masters) -> None:
        """Write masters into the model; all processes do so at once."""
        with self._ending():
            self._open()
            with self._wait_reporter.waiting():
                masters.publish()

    def clip_grad_norm_(self, model: Any, max_norm: float, masters: Masters | None = None) -> float:
        """Scale the gradients of all stages and shards to a norm; all processes do so at once."""
        with self._ending():
            groups, trained = self._open(), _trained(model)
            parameters = trained if masters is None else masters.by_name
            counted = dict(parameters)
            if self._is_tied and self.coordinate.stage == self.coordinate.mesh.pp - 1:
                head = model.get_output_embeddings().weight
                counted = {name: p for name, p in parameters.items() if trained[name] is not head}
            holders = self.coordinate.num_replicas * self.coordinate.mesh.tp
            squares = gradients.squares(counted, groups.device, holders)
            with self._wait_reporter.waiting():
                norm = math.sqrt(float(groups.world.on_host(groups.world.gathered(squares)).sum()))
            gradients.clip(parameters, norm, max_norm)
            return norm

    def close(self) -> None:
        """Leave all groups, so that ranks that wait for this one fail at once."""
        self._wait_reporter.close()
        groups, self._groups = self._groups, None
        if groups is not None:
            groups.close()

    def _devices_of(self, device: torch.device) -> DeviceMesh:
        """Return the processes as PyTorch knows them; it makes groups of its own, so it is asked once."""
        if self._devices is None:
            with self._wait_reporter.waiting():
                self._devices = devices_of(self.coordinate.mesh, device)
        return self._devices

    def _abort(self) -> None:
        if (groups := self._groups) is not None:
            groups.abort()

    def _open(self) -> Groups:
        if self._groups is None:
            raise SettingError("the engine is closed, or a step of it has failed; make a new one")
        return self._groups

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Close this process's part of the job if something fails, and name the process that failed first."""
        with naming_the_missing(self._notes, _WAY_OUT):
            try:
                yield
            except BaseException:
                self.close()
                raise

    def _fault_of(self, model: Any, plan: StepPlan) -> VarlenError | None:
        """Return why a plan can't run here; None if it can."""
        mine, its = self.coordinate.mesh, plan.mesh
        shapes = [(m.dp, m.pp, m.cp, m.tp, m.virtual_stages) for m in (mine, its)]
        if shapes[0] != shapes[1]:
            return PlanError(
                f"the plan is for (dp, pp, cp, tp, virtual_stages) = {shapes[1]} and the engine's mesh is "
                f"{shapes[0]}; plan the step for the engine's mesh"
            )
        if is_sharded(model) and self._gathered == "unit" and its.sharding != "parameters" and its.dp > 1:
            return PlanError(
                f'parameters are sharded, and the plan is for sharding="{its.sharding}", whose ranks run unequal '
                'numbers of MicroPacks; plan for Mesh(sharding="parameters"), or make the engine with gathered="step"'
            )
        try:
            if plan.num_merged or its.sharding == "parameters":
                check_tasks(plan)  # shared documents and sharding also make ranks wait for each other
            else:
                check_order(plan, self.coordinate.dp_rank)  # cp ranks run the same tasks in the same order
        except VarlenError as error:
            return error
        return None

    def _run(
        self,
        model: Any,
        groups: Groups,
        data: StepData,
        plan: StepPlan,
        meter: BytesMeter | None,
        masters: Masters | None,
        settings: dict[str, Any],
    ) -> StepRun:
        """Run the tasks, and reduce gradients, which a forward pass alone has none of."""
        mesh, stage = self.coordinate.mesh, self.coordinate.stage
        is_forward_only = settings["is_forward_only"]
        parameters = {} if is_forward_only else _trained(model)
        parts = self._parts(model, groups)
        shards = self._shards(model, parts, groups, plan) if is_sharded(model) else None
        alike = {n: p for n, p in parameters.items() if shards is None or n not in shards.parameters}
        divided = set() if masters is None else masters.divided & alike.keys()
        reduction = Reduction(alike, groups.replicas, parts, divided)
        # Communicators of shared documents and of replicas would wait for each other.
        units = shards or (reduction if not plan.num_merged and not is_forward_only else AS_THEY_ARE)
        parts = parts if shards is None else shards.parts
        layers = layers_of(model, mesh)
        shared = self._shared(groups, plan)
        every = chunk_steps(parts, layers, data, plan, shared=shared, units=units, **settings)
        chunks = every[stage :: mesh.pp]
        with step_gradients(parameters.values(), is_apart=True):
            with nullcontext() if shards is None else shards.step():
                like = torch.empty(
                    model.config.get_text_config().hidden_size,
                    dtype=self._hidden_dtype(parts, layers[stage], shards),
                    device=groups.device,
                )
                channels = Channels(
                    groups, plan, like, self._wait_reporter, shared, is_forward_only=is_forward_only
                )
                runner = StageRunner(
                    plan,
                    self.coordinate.replica,
                    stage,
                    chunks,
                    channels,
                    clock=Clock(groups.device),
                    meter=meter,
                    is_forward_only=is_forward_only,
                )
                _run_tasks(runner, channels, shards, shared.values())
            with self._wait_reporter.waiting():
                self._settle(groups.device)
                if not is_forward_only:
                    self._reduce(model, groups, reduction, shards, masters, data.scale)
                    self._settle(groups.device)
        losses = [loss.double() for chunk in chunks for loss in chunk.losses]
        return StepRun(
            loss=float(torch.stack(losses).sum()) if losses else 0.0,
            task_runs=[runner.task_run()],
            token_losses=_token_losses(chunks, data) if settings["keeps_losses"] else None,
            kernels=parts.kernels,
        )

    def _parts(self, model: Any, groups: Groups) -> DecoderParts:
        """Return the stage taken apart, with what tp ranks add up."""
        parts, tensor = DecoderParts.of(model, self._kernels), groups.tensor
        if tensor.size == 1:
            return parts
        add, most = (self._waiting_for(each) for each in (tensor.sum, tensor.most))
        return replace(parts, vocabulary=Vocabulary(rank=tensor.index, size=tensor.size, add=add, most=most))

    def _waiting_for(self, collective: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        def run(tensor: torch.Tensor) -> None:
            with self._wait_reporter.waiting():
                collective(tensor)

        return run

    def _settle(self, device: torch.device) -> None:
        """On CUDA, wait for queued work; the wait ends if another process has ended."""
        if device.type == "cuda":
            end = torch.cuda.Event()  # type: ignore[no-untyped-call]
            end.record()
            wait_until(end.query, self._notes, self._timeout_s)

    def _shards(self, model: Any, parts: DecoderParts, groups: Groups, plan: StepPlan) -> Shards:
        """Return the parameters that FSDP2 divides, for one step."""
        waiting, is_split, division = self._wait_reporter.waiting, plan.splits_backward, division_of(model)
        divided = () if division is None else division.names
        return Shards(
            model, parts, groups.replicas, self._gathered, waiting, splits_backward=is_split, divided=divided
        )

    def _shared(self, groups: Groups, plan: StepPlan) -> dict[int, SharedDocument]:
        """Return the documents of a plan that this process shares with others of its stage."""
        rank = self.coordinate.replica
        with self._wait_reporter.waiting():
            peers = peers_of(plan, rank, groups.peers, self._wait_reporter.waiting)
        return shared_documents(plan, rank, peers, groups.device)

    def _hidden_dtype(self, parts: DecoderParts, layers: range, shards: Shards | None) -> torch.dtype:
        """Return the dtype of what chunks exchange; sharded layers are gathered for it once."""
        if self._dtype is None:
            own = [parts.layers[layer] for layer in layers]
            self._dtype = stage_dtype(own) if shards is None else shards.whole_dtype(layers)
        return self._dtype

    def _reduce(
        self,
        model: Any,
        groups: Groups,
        reduction: Reduction,
        shards: Shards | None,
        masters: Masters | None,
        scale: float,
    ) -> None:
        """Sum gradients over replicas, and those of a tied weight over both ends."""
        if shards is not None:
            shards.finish()
        reduction.finish()
        rows, trained = reduction.rows, _trained(model)
        partial = {name: trained[name] for name in self._partial if name in trained}
        gradients.sum_partial(partial, rows, groups.tensor)
        unscale(trained.values(), scale, rows.values())
        if self._is_tied and groups.ends is not None:
            is_first = self.coordinate.stage == 0
            end = model.get_input_embeddings() if is_first else model.get_output_embeddings()
            for name in (name for name, parameter in trained.items() if parameter is end.weight):
                own = reduction.rows_of(name) if name in reduction.divided else None
                gradients.sum_tied(end.weight, own, groups.ends)
        if masters is not None:
            masters.collect(rows)

    def _dp_ranks(self) -> list[int]:
        """Return the data-parallel rank of each process."""
        mesh = self.coordinate.mesh
        return [MeshCoordinate(mesh=mesh, rank=rank).dp_rank for rank in range(mesh.num_gpus)]

    def _of_tokens(self, groups: Groups, run: StepRun, inputs: StepInputs) -> torch.Tensor:
        """Return the losses of all tokens of the documents held here, whichever replica computed them."""
        assert run.token_losses is not None
        losses = run.token_losses
        if not inputs.is_share:
            groups.replicas.sum(losses)
            return losses
        for document, shared in self._shared(groups, inputs.spread).items():
            rows = slice(*inputs.data.offsets[document : document + 2].tolist())
            losses[rows] = shared.peers.all_gather(losses[rows]).sum(0)
        return losses

    def _total(self, groups: Groups, run: StepRun, inputs: StepInputs) -> Totals:
        peak = int(run.task_runs[0].peak_bytes.max(initial=0))
        is_first = self.coordinate.tp_rank == 0  # all tp ranks have the same losses
        targets = inputs.num_targets if self.coordinate.stage == 0 else 0
        counted = [run.loss * is_first, peak, targets * is_first]
        mine = torch.tensor(counted, dtype=torch.float64, device=groups.device)
        every = groups.world.on_host(groups.world.gathered(mine))
        losses = None
        if run.token_losses is not None:
            losses = inputs.losses_by_document(run.token_losses, is_counted=self.coordinate.stage == 0)
            losses *= is_first
            groups.world.sum(losses)
        return Totals(
            loss=float(every[:, 0].sum()),
            peaks_bytes=every[:, 1].numpy().astype(np.int64),
            num_targets=int(every[:, 2].sum()),
            document_losses=losses,
        )


def _run_tasks(
    runner: StageRunner, channels: Channels, shards: Shards | None, shared: Iterable[SharedDocument]
) -> None:
    """Run all tasks of a stage, and drop what is on its way if one fails."""
    try:
        while runner.next_task:
            runner.run_next()
        channels.finish()
    except BaseException:
        channels.drop()
        for document in shared:
            document.gathers.clear()
        if shards is not None:
            shards.forget()
        raise


def totals_of_one(inputs: StepInputs, run: StepRun, *, gives_tokens: bool) -> Totals:
    """Return the totals of a step that one process ran, of whatever mesh."""
    # It counts all documents, whichever rank the plan gives them.
    every = replace(inputs, own=np.ones_like(inputs.own))
    losses = None
    if run.token_losses is not None and inputs.trees is None:
        losses = every.losses_by_document(run.token_losses, is_counted=True)
    return Totals(
        loss=run.loss,
        peaks_bytes=np.array([max(int(task_run.peak_bytes.max(initial=0)) for task_run in run.task_runs)]),
        num_targets=every.num_targets,
        document_losses=losses,
        token_losses=run.token_losses if gives_tokens else None,
    )


def _token_losses(chunks: Any, data: StepData) -> torch.Tensor:
    """Return the losses of this process's tokens, and 0 elsewhere."""
    found = [chunk.token_losses for chunk in chunks if chunk.token_losses is not None]
    return found[0].contiguous() if found else torch.zeros_like(data.weights)


def _trained(model: Any) -> dict[str, torch.Tensor]:
    """Return parameters with gradients by name; a shared one once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _engine_store(coordinate: MeshCoordinate) -> Any:
    """Return the job's store, under a prefix for the new engine."""
    mesh, number = coordinate.mesh, next(_ENGINES)
    if mesh.num_gpus == 1:
        return HashStore()
    if not dist.is_initialized():
        raise SettingError(
            f"a mesh of {mesh.num_gpus:,} GPUs needs as many processes, and torch.distributed has none here; start "
            f"them by torchrun --nproc-per-node, and call torch.distributed.init_process_group"
        )
    if dist.get_world_size() != mesh.num_gpus or dist.get_rank() != coordinate.rank:
        raise SettingError(
            f"this is process {dist.get_rank()} of {dist.get_world_size():,}, and the engine was given rank "
            f"{coordinate.rank} of {in_axes(mesh)} = {mesh.num_gpus:,}; start as many processes as the mesh has "
            "GPUs, and give each its own rank"
        )
    from torch.distributed.distributed_c10d import _get_default_store

    return PrefixStore(f"varlen engine {number}", _get_default_store())
