"""`SliceEngine`: forward and backward of a batch in slices, with the gradients of the unsliced model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from varlen.batch.packed import LossWeighting, PackedBatch
from varlen.cost.memory import Saved
from varlen.counts import many
from varlen.errors import DocumentsError, PlanError, SettingError, VarlenError
from varlen.plan.check import check_contents
from varlen.plan.one_gpu import one_gpu_plan
from varlen.runtime.choice import Kernels
from varlen.runtime.chunk import StepData
from varlen.runtime.clock import Meter
from varlen.runtime.decoder import IGNORED, DecoderParts, check_model
from varlen.runtime.mesh.fsdp import Gathered, is_sharded
from varlen.runtime.mesh.rank import MeshRank
from varlen.runtime.split import check_layers
from varlen.runtime.stage_run import TaskRun
from varlen.runtime.step import check_plan, run_places
from varlen.step_plan import Mesh, Offload, Recompute, StepPlan
from varlen.types import FloatArray, Int32Array

SLICE_TOKENS = 8192
"""Rows of a MicroPack where nothing else is said: enough for attention kernels to run at their full rate."""
DEADLINE_S = 600.0
"""How long a process waits for others where nothing else is said: longer than any task takes."""


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


class SliceEngine:
    """Runs batches through a model slice by slice, so that activations follow the slice and not the document.

    A slice attends to its document's earlier slices through kept keys and values, so the gradients are those of
    whole documents, to the rounding of floats. What stays on the device for every token of a document is its keys and
    values, their gradients, and the input of each layer; activations are those of `slice_tokens` rows.

    The model is a causal transformers decoder whose tokens mix in its attention alone; it is not changed, but for
    its attention implementation while a step runs.

    >>> engine = vl.SliceEngine(model, slice_tokens=8192)                # doctest: +SKIP
    >>> stats = engine.step(batch)                                       # doctest: +SKIP
    >>> optimizer.step(); optimizer.zero_grad()                          # doctest: +SKIP

    On several GPUs each process makes an engine with the mesh and its rank among all, which cuts the model in place
    to the stage of that rank, and gives every step the whole step's batch and plan; gradients are summed over
    replicas.

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
                ("varlen"), "flash_attn", "flex", or the first of these that can.
            mesh: how the job's GPUs are arranged; None for this process alone, which runs plans of any mesh.
            rank: of this process among all, `stage * dp + data-parallel rank`; needed with a mesh.
            deadline_s: longest wait for other processes in anything, a whole step's computing among it.
            gathered: where FSDP2 has sharded parameters: whether they are whole during each "unit" of work, or all
                through the "step", which gathers them once and holds them all.

        Raises:
            ModelError: a family that isn't run in slices, a model without a head, or one that can't be cut.
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
                raise SettingError(f"{name}={value!r}; there are {', '.join(get_args(known))}")
        if mesh is None:
            check_alone(model)
        model = model.module if isinstance(model, DistributedDataParallel) else model
        self.model, self.weighting = model, weighting
        self.recompute, self.saved, self.offload = recompute, saved, offload
        self.kernels: Kernels = kernels
        self.slice_tokens = SLICE_TOKENS if slice_tokens is None else slice_tokens
        one_gpu_plan(np.ones(1, np.int32), self.slice_tokens)
        if mesh is None:
            check_model(model, kernels)  # else all ranks are told what is wrong on one
        self._member = _member(model, mesh, rank, deadline_s, gathered, kernels)

    def step(
        self,
        batch: PackedBatch,
        plan: StepPlan | None = None,
        *,
        document_losses: bool = False,
        meter: Meter | None = None,
    ) -> StepStats:
        """Run a batch forward and backward, and add to every parameter's gradient what the unsliced model would.

        That is the gradient of the sum of target losses over the targets of the whole step,
        `batch.step_num_targets`, so that several batches add up to a step. A step that fails in one process leaves no
        gradient where there was none before, so another one may be tried.

        Args:
            batch: on any device; its segments are the documents, in order.
            plan: of `batch.document_lengths`; None for slices of `slice_tokens`.
            document_losses: whether the loss of each document is wanted.
            meter: counts bytes task by task, by `varlen.runtime.clock.bytes_meter`; already entered.

        Raises:
            DocumentsError: the batch has no target, or isn't packed.
            PlanError: a plan of other documents, one that leaves some out or can't be run, or other plans or batches
                on other ranks.
            SettingError: weights that don't add up over batches; gradients are off; or several GPUs, and no plan.
            WorkerDiedError: another process is gone, or failed; says which. The engine is closed then.
        """
        if self._member is not None:
            return self._step_of_many(self._member, batch, plan, meter, document_losses)
        used, data = self._prepared(batch, plan, 1)
        before = _attention(self.model)
        parts = DecoderParts.of(self.model, self.kernels)
        try:
            check_layers(len(parts.layers), used.mesh)
            run = run_places(
                self.model, parts, data, used, meter=meter, keeps_losses=document_losses, saved=self.saved
            )
        finally:
            self.model.set_attn_implementation(before)
        peaks = [int(place.peak_bytes.max(initial=0)) for place in run.places]
        return StepStats(
            loss=run.loss,
            num_targets=run.num_targets,
            plan=used,
            places=run.places,
            document_losses=_means(run.token_losses, data) if run.token_losses is not None else None,
            peak_bytes=max(peaks),
            peaks_bytes=np.array([max(peaks)], np.int64),
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
        if self._member is not None:
            return self._member.clip_grad_norm_(self.model, max_norm)
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm))

    def close(self) -> None:
        """Leave the groups of the job's processes; a step after it is refused."""
        if self._member is not None:
            self._member.close()

    def _step_of_many(
        self,
        member: MeshRank,
        batch: PackedBatch,
        plan: StepPlan | None,
        meter: Meter | None,
        document_losses: bool,
    ) -> StepStats:
        """Run this process's part of a step; what is wrong with it here ends it on all ranks."""
        prepared: tuple[StepPlan, StepData] | VarlenError
        try:
            prepared = self._prepared(batch, plan, member.seat.mesh.num_gpus, shares=True)
        except VarlenError as error:
            prepared = error
        before = _attention(self.model)
        try:
            run, totals = member.run(
                self.model, prepared, meter=meter, keeps_losses=document_losses, saved=self.saved
            )
        finally:
            self.model.set_attn_implementation(before)
        assert isinstance(prepared, tuple)
        used, data = prepared
        losses = totals.token_losses
        return StepStats(
            loss=totals.loss,
            num_targets=run.num_targets,
            plan=used,
            places=run.places,
            document_losses=_means(losses, data) if losses is not None else None,
            peak_bytes=int(totals.peaks_bytes.max()),
            peaks_bytes=totals.peaks_bytes,
        )

    def _prepared(
        self, batch: PackedBatch, plan: StepPlan | None, num_gpus: int, *, shares: bool = False
    ) -> tuple[StepPlan, StepData]:
        """Return the plan that is run, slices of `slice_tokens` where none is given, and a batch's tokens."""
        check_grad()
        lengths = lengths_of(batch)
        if plan is None and num_gpus > 1:
            raise SettingError(
                f"a step of {num_gpus:,} GPUs without a plan; give engine.step the plan of "
                "vl.plan_step(batch.document_lengths, cost=..., mesh=...)"
            )
        if plan is None:
            plan = one_gpu_plan(lengths, self.slice_tokens, recompute=self.recompute, offload=self.offload)
        if not isinstance(plan, StepPlan):
            raise PlanError(
                f"plan={type(plan).__name__}; engine.step takes a StepPlan, as vl.plan_step makes it"
            )
        check_plan(plan, shares=shares)
        check_lengths(plan, lengths)
        check_contents(plan)
        return plan, step_data_of(
            batch,
            next(self.model.parameters()).device,
            self.weighting,
            vocabulary=self.model.config.get_text_config().vocab_size,
        )


def check_lengths(plan: StepPlan, lengths: Int32Array) -> None:
    """Refuse a plan of other documents than a batch's.

    Args:
        lengths: int32 `[num_segments]`: of the batch.
    """
    if len(plan.lengths) != len(lengths):
        raise PlanError(
            f"the plan is of {len(plan.lengths):,} documents and the batch holds {len(lengths):,}; plan the step "
            "from batch.document_lengths"
        )
    wrong = np.flatnonzero(plan.lengths != lengths)
    if wrong.size:
        first = int(wrong[0])
        raise PlanError(
            f"document {first} has {plan.lengths[first]:,} tokens in the plan and {lengths[first]:,} in the batch "
            f"({wrong.size:,} of {len(lengths):,} differ); plan the step from batch.document_lengths"
        )


def _means(losses: torch.Tensor, data: StepData) -> FloatArray:
    """The mean loss of each document's targets, float64 `[num_documents]`."""
    known = (data.labels != IGNORED).double().cpu().numpy()
    sums, counts = (
        np.diff(np.concatenate([[0.0], np.cumsum(of)])[data.offsets])
        for of in (losses.double().cpu().numpy(), known)
    )
    means: FloatArray = np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)
    return means


def _member(
    model: Any,
    mesh: Mesh | None,
    rank: int | None,
    deadline_s: float,
    gathered: Gathered,
    kernels: Kernels,
) -> MeshRank | None:
    """This process among those of a mesh; None where it is alone."""
    if gathered not in ("unit", "step") or not deadline_s > 0:
        raise SettingError(
            f'gathered={gathered!r} and deadline_s={deadline_s!r}; there are "unit" and "step", and a deadline is '
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


def _attention(model: Any) -> str:
    """The attention that a model has now."""
    return str(model.config._attn_implementation)


# Whether a step in this process would learn: nobody else holds the model too, and gradients are on.


def check_alone(model: Any) -> None:
    """Refuse to run a model by itself that this process holds with others, who would learn something else."""
    if isinstance(model, DistributedDataParallel) and model.process_group.size() > 1:
        held = f"DistributedDataParallel holds the model in {model.process_group.size():,} processes"
    elif isinstance(model, nn.Module) and is_sharded(model):
        held = "fully_shard has divided the model among processes"
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


# `step_data_of`: the tokens of a batch as a step runs them, without padding and checked.


def step_data_of(
    batch: PackedBatch, device: torch.device, weighting: LossWeighting, *, vocabulary: int
) -> StepData:
    """Return a batch's documents one behind the other, with each token's target and its weight."""
    is_plain = weighting == "token" and batch.target_weights is None
    if not is_plain and batch.num_targets != batch.step_num_targets:
        why = f"weighting={weighting!r}" if weighting != "token" else "target_weights (row_weights)"
        raise SettingError(
            f"{why} of a batch with {batch.num_targets:,} of the step's {batch.step_num_targets:,} "
            "targets; give the whole step as one batch, or weigh tokens alike"
        )
    held = batch.to_torch(device)
    inside = held.segment_ids.ravel() >= 0
    ids = held.input_ids.ravel()[inside]
    labels = held.labels.ravel()[inside]
    offsets = np.concatenate([[0], np.cumsum(lengths_of(batch), dtype=np.int64)])
    _check_ids(ids, torch.zeros_like(ids, dtype=torch.bool), vocabulary, offsets, "is id")
    _check_ids(labels, labels == IGNORED, vocabulary, offsets, "has label")
    filled = np.flatnonzero(np.diff(offsets))
    taught = filled[(labels.cpu().numpy()[offsets[filled]] != IGNORED)]
    if taught.size:
        raise DocumentsError(
            f"the first token of document {taught[0]} has a label ({taught.size:,} of {len(filled):,} documents are "
            "so), and nothing stands before it to learn it from; a first token's label must be -100"
        )
    labels = labels.roll(-1)
    known = labels != IGNORED
    if not known.any():
        raise DocumentsError(f"none of {len(ids):,} tokens has a label to learn; leave this batch out")
    if is_plain:
        weights = known.double() / batch.step_num_targets
    else:
        weights = held.loss_weights(weighting).ravel()[inside].roll(-1).double()
        weights = weights * known / (weights * known).sum()
    return StepData(input_ids=ids, labels=labels, weights=weights, offsets=offsets)


def lengths_of(batch: PackedBatch) -> Int32Array:
    """Return the lengths of a batch's documents, int32 `[num_segments]`, in host memory."""
    if not isinstance(batch, PackedBatch):
        raise DocumentsError(
            f"a batch of type {type(batch).__name__}; engine.step takes a PackedBatch, as vl.collate and "
            "vl.PackedLoader make it"
        )
    lengths = batch.document_lengths
    return np.asarray(lengths.cpu() if isinstance(lengths, torch.Tensor) else lengths, np.int32)


def _check_ids(
    ids: torch.Tensor, allowed: torch.Tensor, vocabulary: int, offsets: npt.NDArray[np.int64], verb: str
) -> None:
    """Refuse ids that would stop the embedding or the loss in the middle of a step.

    Args:
        ids: int64 `[num_tokens]`.
        allowed: bool `[num_tokens]`: those that may be anything.
        offsets: int64 `[num_documents + 1]`.
    """
    wrong = ((ids < 0) | (ids >= vocabulary)) & ~allowed
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0, 0])
        document = int(np.searchsorted(offsets, first, side="right")) - 1
        raise DocumentsError(
            f"token {first - offsets[document]:,} of document {document:,} {verb} {int(ids[first]):,}, and the model "
            f"knows 0 to {vocabulary - 1:,} ({many(int(wrong.sum()), 'token is', 'tokens are')} so); use the "
            "tokenizer that the model was made with, or resize its embedding"
        )
