"""`SliceEngine`: forward and backward of a batch in slices, with the gradients of the unsliced model."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from varlen.arguments import as_count, check_temperature, in_words
from varlen.attention.choice import KernelChoice
from varlen.attention.kernels import Kernels
from varlen.attention.rules import check_rotary
from varlen.batch.packed import LossWeighting, PackedBatch, on_host
from varlen.batch.tree_batch import TreeBatch
from varlen.cost.memory import Saved
from varlen.cost.states import Gathered
from varlen.errors import PlanError, SettingError, VarlenError
from varlen.plan.check import check_contents
from varlen.plan.one_gpu import one_gpu_plan
from varlen.runtime.chunk import StepData
from varlen.runtime.clock import BytesMeter
from varlen.runtime.decoder import (
    DecoderParts,
    attention_of,
    set_attention,
    without_checkpointing,
)
from varlen.runtime.forest_inputs import ForestInputs, occurrences_of_documents
from varlen.runtime.inputs import StepInputs, forest_inputs, lengths_of, means, step_inputs
from varlen.runtime.main_grads import local
from varlen.runtime.masters import Masters
from varlen.runtime.mesh.fsdp import is_sharded
from varlen.runtime.mesh.rank import MeshRank, Totals, totals_of_one
from varlen.runtime.objective import Function, Objective, Scope, check_scope, weights_of_step
from varlen.runtime.probe import admit
from varlen.runtime.split import check_layers, is_divided
from varlen.runtime.stage_run import TaskRun
from varlen.runtime.step import StepRun, check_runnable, run_stages
from varlen.step_plan import Mesh, Offload, Recompute, StepPlan
from varlen.types import FloatArray, IntArray

_log = logging.getLogger(__name__)
SLICE_TOKENS = 8192  # default rows of a MicroPack: enough for the full rate of attention kernels
DEADLINE_S = 600.0  # default wait for other processes: longer than any task takes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepStats:
    """What a step did; its gradients are in the model."""

    loss: float
    """The batch's part of the step's loss: the sum of target losses, weighed, over the targets of the whole step. The
    same on every rank."""
    num_targets: int
    """Of the batch, on all ranks together."""
    plan: StepPlan
    """What was run."""
    places: Sequence[TaskRun]
    """Tasks with their seconds, of each stage that ran here."""
    document_losses: FloatArray | None
    """float64 `[num_segments]`: the mean loss of each document's targets, NaN without any; None unless asked for."""
    peak_bytes: int
    """The most bytes of tensors alive at once, on the rank where it is most; 0 where no meter was given."""
    peaks_bytes: npt.NDArray[np.int64]
    """int64 `[processes]`: the same of each rank."""
    kernels: tuple[str, ...]
    """What computed attention on this rank, by the names that `kernels` of the engine takes."""
    refused_kernels: Mapping[str, str]
    """Why kernels that come before it in the order of "auto" didn't."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evaluation:
    """What a batch costs, without gradients."""

    loss: float
    """As `StepStats.loss`: the batch's part of the step's loss, the same on every rank."""
    num_targets: int
    """Of the batch, on all ranks together."""
    document_losses: FloatArray | None
    """float64 `[num_segments]`: as `StepStats.document_losses`; None unless asked for."""
    document_targets: IntArray | None
    """int64 `[num_segments]`: the number of each document's targets; None unless their losses are asked for."""
    document_sums: FloatArray | None
    """float64 `[num_segments]`: the sum of each document's losses, each times the weight of its row
    (`batch.target_weights`); None unless they are asked for."""
    document_weights: FloatArray | None
    """float64 `[num_segments]`: the sum of these weights, which is the number of targets where rows have none; None
    unless losses are asked for."""
    log_probs: torch.Tensor | None
    """float32 or wider, of the shape of `batch.labels`: each label's log-probability, 0 where there is none; of a
    TreeBatch `[num_targets]`, as its occurrences. None unless asked for, and on ranks that don't hold the last
    layers."""


class SliceEngine:
    """Runs batches through a model slice by slice, so that activations follow the slice and not the document.

    A slice attends to its document's earlier slices through kept keys and values, so the gradients are those of
    whole documents, to the rounding of floats. What stays on the device for every token of a document is its keys and
    values, their gradients, and the input of each layer; activations are those of `slice_tokens` rows.

    The model is a causal transformers decoder whose tokens mix in its attention alone, which a small model of its
    class and config proves once (`varlen.runtime.probe`); it is not changed, but for its attention implementation
    while a step runs.

    >>> engine = vl.SliceEngine(model, slice_tokens=8192)                # doctest: +SKIP
    >>> stats = engine.step(batch)                                       # doctest: +SKIP
    >>> optimizer.step(); optimizer.zero_grad()                          # doctest: +SKIP

    On several GPUs each process makes an engine with the mesh and its rank among all, which cuts the model in place
    to the stage of that rank and divides its layers among tp ranks, and gives every step its share
    (`PackedLoader(plan=...)`), or the whole step's batch and plan; gradients are summed over replicas.

    >>> engine = vl.SliceEngine(model, mesh=vl.Mesh(dp=2, pp=2), rank=dist.get_rank())      # doctest: +SKIP
    >>> stats = engine.step(batch, plan)                                                    # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        slice_tokens: int | None = None,
        *,
        recompute: Recompute = "full",
        saved: Saved = "layers",
        offload: Offload = "none",
        weighting: LossWeighting = "token",
        kernels: Kernels = "auto",
        mesh: Mesh | None = None,
        rank: int | None = None,
        deadline_s: float = DEADLINE_S,
        gathered: Gathered = "unit",
    ) -> None:
        """Take a model.

        Args:
            model: a transformers model for causal language.
            slice_tokens: rows that run at once at most, where a step is given no plan; None for 8,192.
            recompute: what steps without a plan do with activations: "full" computes them again in the backward
                pass, "none" keeps those of a whole document, "selective" all but norm outputs and gated products.
            saved: what layers are computed again from: "layers" keeps what went into each of them, "stage" what
                went into the first alone, for one more forward pass.
            offload: of steps without a plan: "kv" keeps keys, values and their gradients of all but two layers in
                host memory, and with saved="stage" what went into the first layer.
            weighting: of targets, as `PackedBatch.loss_weights` says.
            kernels: what computes attention: PyTorch's dense kernels ("sdpa"), and on CUDA its variable-length one
                ("varlen"), "flash_attn_3", "cudnn", "flash_attn", "flex", or whichever of these can and is fastest.
            mesh: how the job's GPUs are arranged; None for this process alone, which runs plans of any mesh.
            rank: of this process among all, `((stage * dp + dp rank) * cp + cp rank) * tp + tp rank`; needed with a
                mesh.
            deadline_s: longest wait for other processes in anything, a whole step's computing among it.
            gathered: where FSDP2 has sharded parameters: whether they are whole during each "unit" of work, or all
                through the "step", which gathers them once and holds them all.

        Raises:
            ModelError: a model that slices wouldn't compute, one without a head, or one that can't be cut.
            SettingError: a number of tokens below 1, a setting that there isn't, processes that don't fit the mesh,
                or a model that several processes hold, and no mesh.
            PlanError: fewer layers than chunks, or other models on other ranks.
            WorkerDiedError: another process is gone.
        """
        for name, value, known in (
            ("recompute", recompute, Recompute),
            ("saved", saved, Saved),
            ("offload", offload, Offload),
        ):
            if value not in get_args(known):
                raise SettingError(f"{name}={value!r}; it must be {in_words(get_args(known))}")
        if mesh is None:
            check_not_distributed(model)
        model = model.module if isinstance(model, DistributedDataParallel) else model
        self.model, self.weighting = model, weighting
        self.recompute, self.saved, self.offload = recompute, saved, offload
        self.kernels: Kernels = kernels
        self.slice_tokens = SLICE_TOKENS if slice_tokens is None else as_count(slice_tokens, "slice_tokens")
        if mesh is None:  # else `MeshRank` checks it, so that an error on one rank reaches all
            admit(model, kernels)
        self._mesh_rank = _mesh_rank(model, mesh, rank, deadline_s, gathered, kernels)
        self._masters: Masters | None = None
        self._of_whole_step: weakref.ref[torch.Tensor] | None = None
        """A gradient that the last step left, if its batch was the whole step."""
        self._has_warned = self._has_logged = False

    def step(
        self,
        batch: PackedBatch | TreeBatch,
        plan: StepPlan | None = None,
        *,
        loss: Function | None = None,
        scope: Scope = "step",
        temperature: float = 1.0,
        document_losses: bool = False,
        meter: BytesMeter | None = None,
    ) -> StepStats:
        """Run a batch forward and backward, and add to every parameter's gradient what the unsliced model would.

        That is the gradient of the sum of target losses over the targets of the whole step,
        `batch.step_num_targets`, so that several batches add up to a step. A step that fails in one process leaves no
        gradient where there was none before, so another one may be tried.

        Args:
            batch: on any device; its segments are the documents, in order: those of the whole step, or of this
                data-parallel rank alone where a loader with plans made it.
            plan: of `batch.document_lengths`; None for `batch.plan`, or slices of `slice_tokens` where it has none.
                Always None of a TreeBatch.
            loss: a function of log-probabilities and columns, `loss(log_probs, columns) -> scalar`, whose gradients
                are computed in place of cross-entropy's. `log_probs` are float32 or wider, `[occurrences]`: of all
                targets, rows in the order given, by rising positions. `columns` are tensors beside them: the batch's
                columns, and `row`, `group`, `position` and `row_offsets`. The step's loss is the sum of what the
                calls return, divided by nothing.
            scope: what the function must see at once: "target" where it is a sum over occurrences, which costs
                nothing; "group" where it is one over groups, "step" where it couples anything: these run the batch
                forward once more.
            temperature: logits are divided by it.
            document_losses: whether the loss of each document is wanted.
            meter: counts bytes task by task, by `varlen.runtime.clock.bytes_meter`; already entered.

        Raises:
            DocumentsError: the batch has no target, or isn't packed.
            PlanError: a plan of other documents, one that leaves some out or can't be run, or other plans or batches
                on other ranks.
            SettingError: weights that don't add up over batches; gradients are off; several GPUs, and no plan; or a
                `loss` that returns no scalar, or one without a graph to its log-probabilities.
            WorkerDiedError: another process is gone, or failed; says which. The engine is closed then.
        """
        if loss is None:  # what a function returns is added up as it is
            self._warn_of_sums()
        _check_documents(batch, document_losses=document_losses)
        is_plain = loss is None and temperature == 1 and scope == "step"
        wanted = None if is_plain else Wanted(loss, scope, temperature)
        inputs, run, totals = self._run(batch, plan, meter=meter, keeps_losses=document_losses, wanted=wanted)
        if loss is None and totals.num_targets == inputs.step_num_targets:
            first = next((g for p in self._learning() if (g := p.grad) is not None), None)
            self._of_whole_step = None if first is None else weakref.ref(first)
        self._log_kernels(run.kernels)
        return StepStats(
            loss=totals.loss,
            num_targets=totals.num_targets,
            plan=inputs.plan,
            places=run.task_runs,
            document_losses=None if totals.document_losses is None else means(totals.document_losses),
            peak_bytes=int(totals.peaks_bytes.max()),
            peaks_bytes=totals.peaks_bytes,
            kernels=tuple(sorted(run.kernels.used)),
            refused_kernels=run.kernels.refused,
        )

    def _log_kernels(self, choice: KernelChoice) -> None:
        """Log once what computes attention, and why other kernels don't."""
        if not self._has_logged:
            others = "".join(f'; not by "{name}": {why}' for name, why in choice.refused.items())
            _log.info('attention is computed by "%s"%s', '" and "'.join(sorted(choice.used)), others)
        self._has_logged = True

    def _warn_of_sums(self) -> None:
        """Warn once if a step adds to the gradients of another one, of which each is a mean of its own."""
        ended, self._of_whole_step = self._of_whole_step, None
        before = None if ended is None or self._has_warned else ended()
        if before is None or not any(p.grad is before for p in self._learning()) or not local(before).any():
            return
        self._has_warned = True
        warnings.warn(
            "engine.step adds to gradients of an earlier step, which was whole: both count alike, however many "
            "targets each has. Call optimizer.zero_grad() between steps; or collate the batches of one step with "
            "step_num_targets, the targets of all",
            stacklevel=3,
        )

    def _learning(self) -> Iterable[Any]:
        return self.model.parameters() if self._masters is None else self._masters.parameters

    def evaluate(
        self,
        batch: PackedBatch | TreeBatch,
        plan: StepPlan | None = None,
        *,
        document_losses: bool = False,
        log_probs: bool = False,
    ) -> Evaluation:
        """Run a batch forward alone, in the slices of `step`, and leave gradients as they are.

        On a mesh, all ranks call it at once. Keys and values of a document stay until its last slice has run.

        Args:
            batch: as `step` takes it.
            plan: as `step` takes it; its backward pass isn't run.
            document_losses: whether the loss of each document is wanted.
            log_probs: whether the log-probability of each label, or occurrence, is wanted.

        Raises:
            DocumentsError: as `step`.
            PlanError: as `step`.
            SettingError: as `step`; gradients may be off.
            WorkerDiedError: another process is gone, or failed; says which. The engine is closed then.

        >>> engine.evaluate(batch, document_losses=True).document_losses.mean()                 # doctest: +SKIP
        """
        _check_documents(batch, document_losses=document_losses)
        keeps_losses = document_losses or log_probs
        _, _, totals = self._run(
            batch, plan, keeps_losses=keeps_losses, gives_tokens=log_probs, is_forward_only=True
        )
        losses, of_tokens = totals.document_losses, totals.token_losses
        found = losses.cpu().numpy() if document_losses and losses is not None else None
        return Evaluation(
            loss=totals.loss,
            num_targets=totals.num_targets,
            document_losses=None if found is None or losses is None else means(losses),
            document_targets=None if found is None else found[1].astype(np.int64),
            document_sums=None if found is None else found[2],
            document_weights=None if found is None else found[3],
            log_probs=None if of_tokens is None else _at_labels(batch, 0.0 - of_tokens),
        )

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale gradients so that their norm over all parameters, on all stages and shards, is at most a number.

        Returns what `torch.nn.utils.clip_grad_norm_` returns for the whole model in one process; all ranks call it
        at once.

        Args:
            max_norm: that it may be.

        Raises:
            WorkerDiedError: another process is gone.
        """
        if self._mesh_rank is not None:
            return self._mesh_rank.clip_grad_norm_(self.model, max_norm, self._masters)
        return float(torch.nn.utils.clip_grad_norm_(self._learning(), max_norm))

    def master_parameters(self, weights: Mapping[str, torch.Tensor] | None = None) -> list[nn.Parameter]:
        """Return float32 masters of the parameters that learn, for any optimizer of torch.

        From then on, `step` leaves gradients in the masters' `.grad`, in float32, and none in the model; after
        `optimizer.step()`, `publish` writes the masters into the model. They are in the order of the model's
        parameters. On a mesh with sharding="optimizer", all ranks call it at once, and masters are DTensors: each
        data-parallel rank has its part of every parameter's rows. A parameter that is in float32 and not divided is
        its own master. Later calls return the same.

        Args:
            weights: whole weights that masters begin with, by the model's names; by default those of the model, which
                are rounded. To resume, copy what was saved into the masters and call `publish`.

        Raises:
            SettingError: a weight of another shape.
            WorkerDiedError: another process is gone.

        >>> optimizer = torch.optim.AdamW(engine.master_parameters(), lr=1e-4)                  # doctest: +SKIP
        >>> engine.step(batch); engine.clip_grad_norm_(1.0)                                     # doctest: +SKIP
        >>> optimizer.step(); engine.publish(); optimizer.zero_grad()                           # doctest: +SKIP
        """
        if self._masters is None:
            trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
            rank, given = self._mesh_rank, weights or {}
            self._masters = Masters(trained, given) if rank is None else rank.masters_of(self.model, given)
        return self._masters.parameters

    def publish(self) -> None:
        """Write the masters into the model, in its dtypes; on a mesh, all ranks call it at once, and gather.

        Raises:
            SettingError: `master_parameters` wasn't called.
            WorkerDiedError: another process is gone.
        """
        if self._masters is None:
            raise SettingError(
                "engine.publish writes the masters into the model, and there are none; make the optimizer of "
                "engine.master_parameters()"
            )
        if self._mesh_rank is None:
            self._masters.publish()
        else:
            self._mesh_rank.publish(self._masters)

    def close(self) -> None:
        """Leave the groups of the job's processes; a step after it is refused."""
        if self._mesh_rank is not None:
            self._mesh_rank.close()

    def _run(
        self,
        batch: PackedBatch | TreeBatch,
        plan: StepPlan | None,
        *,
        wanted: Wanted | None = None,
        meter: BytesMeter | None = None,
        keeps_losses: bool,
        gives_tokens: bool = False,
        is_forward_only: bool = False,
    ) -> tuple[StepInputs, StepRun, Totals]:
        """Run a step, or this process's part of one; a fault here ends it on all ranks."""
        rank, before = self._mesh_rank, attention_of(self.model)
        settings: dict[str, Any] = {
            "meter": meter,
            "keeps_losses": keeps_losses,
            "saved": self.saved,
            "masters": self._masters,
            "is_forward_only": is_forward_only,
        }
        prepared: StepInputs | VarlenError
        try:
            where = (Mesh(), 0) if rank is None else (rank.coordinate.mesh, rank.coordinate.replica)
            if wanted is not None:
                wanted.check(where[0])
            has_function = wanted is not None and wanted.function is not None
            prepared = self._prepared(
                batch, plan, *where, is_forward_only=is_forward_only, has_function=has_function
            )
        except VarlenError as error:
            if rank is None:
                raise
            prepared = error
        try:
            with without_checkpointing(self.model):
                if rank is not None:
                    run, totals = rank.run(self.model, prepared, gives_tokens=gives_tokens, **settings)
                else:
                    assert isinstance(prepared, StepInputs)
                    parts = DecoderParts.of(self.model, self.kernels)
                    check_layers(len(parts.layers), prepared.plan.mesh)
                    data = prepared.weighed(lambda _: None)
                    value = None
                    if wanted is not None:
                        parts = replace(
                            parts, logits=parts.logits._replace(temperature=float(wanted.temperature))
                        )
                        data, value = self._aimed(batch, prepared, parts, data, wanted)
                    run = run_stages(self.model, parts, data, prepared.plan, **settings)
                    run = run if value is None else replace(run, loss=value)
                    totals = totals_of_one(prepared, run, gives_tokens=gives_tokens)
        finally:
            set_attention(self.model, before)
        assert isinstance(prepared, StepInputs)
        return prepared, run, totals

    def _aimed(
        self,
        batch: PackedBatch | TreeBatch,
        inputs: StepInputs,
        parts: DecoderParts,
        data: StepData,
        wanted: Wanted,
    ) -> tuple[StepData, float | None]:
        """Return the data with the weights of an objective, or with the objective; and the step's loss, if known."""
        if wanted.function is None:
            return data, None
        if inputs.trees is not None:
            occurrences = inputs.trees.occurrences(data.input_ids.device)
        else:
            assert isinstance(batch, PackedBatch), "a batch of trees has them in its inputs"
            occurrences = occurrences_of_documents(batch, data.labels)
        if wanted.scope == "target":
            return replace(data, objective=Objective(wanted.function, occurrences)), None
        seen = run_stages(
            self.model, parts, data, inputs.plan, keeps_losses=True, saved=self.saved, is_forward_only=True
        )
        assert seen.token_losses is not None
        # As in the head, where a function sees them with scope="target".
        losses = seen.token_losses.to(torch.promote_types(parts.embedding.weight.dtype, torch.float32))
        weights, value = weights_of_step(wanted.function, wanted.scope, losses, occurrences)
        return replace(data, weights=weights), value

    def _prepared(
        self,
        batch: PackedBatch | TreeBatch,
        plan: StepPlan | None,
        mesh: Mesh,
        replica: int,
        *,
        is_forward_only: bool,
        has_function: bool,
    ) -> StepInputs:
        """Check the step; return its plan (slices of `slice_tokens` if none is given) and tokens."""
        if not is_forward_only:
            check_grad()
        if self._masters is not None:
            self._masters.check(for_gradients=not is_forward_only)
        if isinstance(batch, TreeBatch):
            return self._prepared_trees(batch, plan, mesh, has_function=has_function)
        lengths = lengths_of(batch)
        plan = batch.plan if plan is None else plan
        if plan is None and mesh.num_gpus > 1:
            raise SettingError(
                f"a step of {mesh.num_gpus:,} GPUs without a plan; give engine.step the plan of "
                "vl.plan_step(batch.document_lengths, cost=..., mesh=...), or a batch of "
                "vl.PackedLoader(plan=...), which has its plan"
            )
        if plan is None:
            plan = one_gpu_plan(lengths, self.slice_tokens, recompute=self.recompute, offload=self.offload)
        if not isinstance(plan, StepPlan):
            raise PlanError(
                f"plan={type(plan).__name__}; engine.step takes a StepPlan, as vl.plan_step makes it"
            )
        check_contents(plan)
        if self._mesh_rank is None:
            check_runnable(plan)
        if batch.plan is not None and plan is not batch.plan and batch.plan.mesh.dp > 1:
            raise PlanError(
                "the batch holds the documents that batch.plan gives one rank, and engine.step got another plan; "
                "leave the plan out"
            )
        its, mine = ((of.dp, of.cp) for of in (plan.mesh, mesh))
        if plan is batch.plan and its != mine:
            raise PlanError(
                f"the batch holds the documents of one rank of (dp, cp) = {its}, and the engine's mesh has {mine}; "
                "make the engine with the mesh of the plan"
            )
        return step_inputs(
            batch,
            lengths,
            plan,
            replica,
            next(self.model.parameters()).device,
            "token" if has_function else self.weighting,
            vocabulary=self.model.config.get_text_config().vocab_size,
        )

    def _prepared_trees(
        self, batch: TreeBatch, plan: StepPlan | None, mesh: Mesh, *, has_function: bool
    ) -> StepInputs:
        """Check a step of trees; return its plan and tokens."""
        if self.weighting != "token" and not has_function:
            raise SettingError(
                f'weighting="{self.weighting}" is of documents, and a batch of trees has none; give the weights of '
                'targets as a column, and loss=lambda log_probs, columns: -(log_probs * columns["weight"]).sum()'
            )
        if plan is not None:
            raise PlanError("a step of trees makes its plan by itself; leave the plan out")
        if mesh.num_gpus > 1:
            raise SettingError(
                f"a step of trees on {mesh.num_gpus:,} GPUs; trees run on one so far: pack the rows as documents "
                "(vl.pack and vl.collate), or make an engine without a mesh"
            )
        if self.offload != "none":
            raise SettingError(
                f'offload="{self.offload}" keeps keys and values of documents in host memory, and a step of trees '
                'keeps one path on the device; choose offload="none"'
            )
        config = self.model.config.get_text_config()
        check_rotary(on_host(batch.row_lengths), config, type(self.model).__name__)
        device = next(self.model.parameters()).device
        return forest_inputs(batch, self.slice_tokens, self.recompute, device, config.vocab_size)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a step computes in place of the mean of its targets' losses."""

    function: Function | None
    scope: Scope
    temperature: float

    def check(self, mesh: Mesh) -> None:
        """Refuse what isn't computed."""
        check_scope(self.scope)
        if self.function is not None and not callable(self.function):
            raise SettingError(
                f"loss={type(self.function).__name__}; it must be a function loss(log_probs, columns) -> scalar"
            )
        check_temperature(self.temperature)
        if mesh.num_gpus > 1:
            raise SettingError(
                f"an objective on {mesh.num_gpus:,} GPUs; engines of one process compute them so far: make an engine "
                "without a mesh"
            )


def _check_documents(batch: object, *, document_losses: bool) -> None:
    """Refuse the losses of documents that there aren't."""
    if document_losses and isinstance(batch, TreeBatch):
        raise SettingError(
            "document_losses=True, and a batch of trees has no documents; engine.evaluate(batch, log_probs=True) "
            "gives the log-probability of each occurrence, whose row is in batch.rows"
        )


def _at_labels(batch: PackedBatch | TreeBatch, of_rows: torch.Tensor) -> torch.Tensor:
    """Return values of the tokens that predict, as `labels` has them: each at the token that is predicted.

    Of a TreeBatch, values of its targets, as its occurrences.
    """
    if isinstance(batch, TreeBatch):
        return of_rows[torch.from_numpy(ForestInputs(batch).targets[2]).to(of_rows.device)]
    inside = torch.as_tensor(batch.segment_ids).ravel() >= 0
    found = of_rows.new_zeros(inside.shape)
    found[inside.to(of_rows.device)] = of_rows.roll(1)
    return found.view(batch.labels.shape)


def _mesh_rank(
    model: Any,
    mesh: Mesh | None,
    rank: int | None,
    deadline_s: float,
    gathered: Gathered,
    kernels: Kernels,
) -> MeshRank | None:
    """Return this process's rank in a mesh; None without a mesh."""
    if gathered not in ("unit", "step") or not deadline_s > 0:
        raise SettingError(
            f'gathered={gathered!r} and deadline_s={deadline_s!r}; gathered must be "unit" or "step", and deadline_s '
            "above 0"
        )
    if mesh is None and rank is None:
        return None
    if mesh is None or rank is None:
        raise SettingError(
            f"mesh={mesh!r} and rank={rank!r}; give both, such as mesh=vl.Mesh(dp=2, pp=2), rank=dist.get_rank(), or "
            "neither"
        )
    return MeshRank(model, mesh, rank, deadline_s=deadline_s, gathered=gathered, kernels=kernels)


# Whether a step in this process would learn: no other process holds the model too, and gradients are on.


def check_not_distributed(model: Any) -> None:
    """Refuse to run a model by itself that this process holds together with others: gradients would not be summed."""
    if isinstance(model, DistributedDataParallel) and model.process_group.size() > 1:
        held = f"DistributedDataParallel holds the model in {model.process_group.size():,} processes"
    elif isinstance(model, nn.Module) and is_sharded(model):
        held = "fully_shard has divided the model among processes"
    elif is_divided(model):
        raise SettingError(
            "tensor parallelism has divided the model among processes, and the engine has no mesh, so it would "
            "take a part of it for the whole; give the undivided model, mesh=vl.Mesh(tp=...) and rank=dist.get_rank()"
        )
    else:
        return
    raise SettingError(
        f"{held}, and the engine has no mesh, so gradients would not be summed over them; give "
        "mesh=vl.Mesh(dp=dist.get_world_size()), rank=dist.get_rank()"
    )


def check_grad() -> None:
    """Refuse a step where PyTorch keeps no graphs."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise SettingError(
            "a step computes gradients, and they are off (torch.no_grad or torch.inference_mode); call engine.step "
            "outside of it"
        )
