"""The inputs of a step on one process: the tokens of a batch, checked and without padding, and the plan.

A batch holds the whole step or, from a loader with plans, the documents of one data-parallel rank. Documents are
numbered alike in both: those of other ranks have no tokens here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from varlen.batch.packed import LossWeighting, PackedBatch, on_host, target_weights
from varlen.batch.tree_batch import TreeBatch
from varlen.counts import many
from varlen.errors import DocumentsError, PlanError, SettingError
from varlen.plan.one_gpu import one_gpu_tree_plan
from varlen.runtime.chunk import StepData, loss_scale
from varlen.runtime.decoder import IGNORED
from varlen.runtime.forest_inputs import ForestInputs
from varlen.step_plan import Recompute, StepPlan, spread
from varlen.types import FloatArray, Int32Array

Sum = Callable[[torch.Tensor], None]
"""Replaces a tensor by its sum over data-parallel ranks."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepInputs:
    """One process's part of a step."""

    plan: StepPlan
    """As it was given."""
    spread: StepPlan
    """The same for replicas that share documents in place of cp; see `varlen.step_plan.spread`."""
    data: StepData
    """Tokens and targets; its weights are 1 or those of rows if targets have different weights: see `weighed`."""
    step_num_targets: int
    is_share: bool = False
    """Whether it holds the documents of its own data-parallel rank only."""
    weighting: LossWeighting | None = None
    """How targets are weighted; None where all have the same weight, which `data` holds."""
    groups: npt.NDArray[np.int64] | None = None
    """int64 `[num_documents]`: groups of the packing, if it has any."""
    own: npt.NDArray[np.bool_]
    """bool `[num_documents]`: the documents that this replica counts; one replica counts each."""
    document_ids: npt.NDArray[np.int64]
    """int64 `[num_documents]`: ids as in the batch; 0 for documents that this process doesn't hold."""
    trees: ForestInputs | None = None
    """The batch where it is of trees; None of documents."""

    def weighed(self, add: Sum) -> StepData:
        """Return the data with each target's weight in the step's loss.

        Args:
            add: sums over the data-parallel ranks; where they hold shares, all of them call it.
        """
        if self.weighting is None:
            return self.data
        weights, sums, ids = self.data.weights, self._by_document(self.data.weights), self.document_ids
        if self.is_share:
            totals = torch.tensor(np.where(self.own, sums, 0.0), device=weights.device)
            numbers = torch.tensor(np.where(self.own, ids, 0), device=weights.device)  # float64 has 53 bits
            add(totals)
            add(numbers)
            sums, ids = totals.cpu().numpy(), numbers.cpu().numpy()
        # A common factor, such as the number of packs, cancels in the mean.
        each = target_weights(self.weighting, sums, ids, self.groups, 1)
        each = each / (each * sums).sum()
        spread = torch.tensor(np.repeat(each, np.diff(self.data.offsets)), device=weights.device)
        return replace(self.data, weights=weights * spread)

    def losses_by_document(self, token_losses: torch.Tensor, *, is_counted: bool) -> torch.Tensor:
        """Return the sums of each document's losses that were computed here, and its number of targets.

        Args:
            token_losses: `[num_tokens]`; 0 where another process computed it.
            is_counted: whether this process counts its own documents.

        Returns:
            float64 `[4, num_documents]`: sums of losses, targets, sums of losses times the weights of their rows, and
            sums of these weights.
        """
        known = (self.data.labels != IGNORED).double()
        weights = known if self.weighting is None else self.data.weights
        sums = [self._by_document(each) for each in (token_losses, known, token_losses * weights, weights)]
        for counts in sums[1::2]:
            counts *= self.own * is_counted
        return torch.tensor(np.stack(sums), device=token_losses.device)

    @property
    def num_targets(self) -> int:
        """Labels of the documents that this rank counts."""
        if self.trees is not None:
            return self.trees.batch.num_targets
        return int(self._by_document((self.data.labels != IGNORED).double())[self.own].sum())

    def _by_document(self, values: torch.Tensor) -> FloatArray:
        """Return the sums of the documents' tokens, float64 `[num_documents]`."""
        before = np.concatenate([[0.0], np.cumsum(values.double().cpu().numpy())])
        sums: FloatArray = np.diff(before[self.data.offsets])
        return sums


def means(by_document: torch.Tensor) -> FloatArray:
    """Return the mean loss of each document's targets, float64 `[num_documents]`; NaN without any."""
    sums, counts = by_document[:2].cpu().numpy()
    found: FloatArray = np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)
    return found


def step_inputs(
    batch: PackedBatch,
    lengths: Int32Array,
    plan: StepPlan,
    replica: int,
    device: torch.device,
    weighting: LossWeighting,
    *,
    vocabulary: int,
) -> StepInputs:
    """Return a batch's documents end to end, with the target of each token and its weight.

    Args:
        lengths: int32 `[num_segments]`: of the batch.
        replica: of this process, `dp_rank * cp + cp_rank`.
    """
    spread_plan, dp_rank = spread(plan), replica // plan.mesh.cp
    is_share = plan is batch.plan and plan.mesh.dp > 1
    here = plan.documents_of(dp_rank) if is_share else np.ones(len(plan.lengths), bool)
    check_lengths(plan, lengths, here if is_share else None, dp_rank)
    is_plain = weighting == "token" and batch.target_weights is None
    if not is_share and not is_plain and batch.num_targets != batch.step_num_targets:
        why = f"weighting={weighting!r}" if weighting != "token" else "target_weights (row_weights)"
        raise SettingError(
            f"{why} needs all targets of the step, and this batch holds {batch.num_targets:,} of "
            f"{batch.step_num_targets:,}; give the whole step as one batch, or weigh tokens alike"
        )
    held = batch.to_torch(device)
    inside = held.segment_ids.ravel() >= 0
    ids = held.input_ids.ravel()[inside]
    offsets = np.concatenate([[0], np.cumsum(np.where(here, plan.lengths, 0), dtype=np.int64)])
    labels = _targets(ids, held.labels.ravel()[inside], offsets, vocabulary, is_all=not is_share)
    known = labels != IGNORED
    _check_step(batch)
    weights = known.double()
    if is_plain:
        weights = weights / batch.step_num_targets
    elif held.target_weights is not None:
        weights = weights * held.target_weights.ravel()[inside].roll(-1)
    numbers = np.zeros(len(here), np.int64)
    numbers[here] = on_host(batch.document_ids)
    return StepInputs(
        plan=plan,
        spread=spread_plan,
        data=StepData(
            input_ids=ids,
            labels=labels,
            weights=weights,
            offsets=offsets,
            scale=loss_scale(plan, batch.step_num_targets),
        ),
        step_num_targets=batch.step_num_targets,
        is_share=is_share,
        weighting=None if is_plain else weighting,
        groups=None if batch.document_groups is None else on_host(batch.document_groups),
        own=spread_plan.first_ranks == replica,
        document_ids=numbers,
    )


def _check_step(batch: PackedBatch | TreeBatch) -> None:
    """Refuse a step of no targets, which are divided by."""
    if batch.step_num_targets < 1:
        raise SettingError(
            f"step_num_targets is 0, and the batch has {batch.num_targets:,} targets; it is the number of all of the "
            "step: collate with that, or leave it out where the step is one batch"
        )


def forest_inputs(
    batch: TreeBatch, slice_tokens: int, recompute: Recompute, device: torch.device, vocabulary: int
) -> StepInputs:
    """Return the trees of a batch end to end, their plan, and the targets of each token.

    Without an objective each occurrence weighs the same: a target weighs as many as it has.
    """
    if batch.num_targets == 0:
        raise DocumentsError(f"none of {batch.num_tokens:,} tokens has a target; leave this batch out")
    if batch.max_token_id >= vocabulary:
        raise DocumentsError(
            f"the batch holds token id {batch.max_token_id:,}, and the model knows 0 to {vocabulary - 1:,}; use the "
            "tokenizer that the model was made with, or resize its embedding"
        )
    _check_step(batch)
    inputs = ForestInputs(batch)
    plan, _ = one_gpu_tree_plan(inputs.segments, slice_tokens, recompute=recompute)
    _, ids, which = inputs.targets
    counts = np.bincount(which, minlength=len(ids))
    data = StepData(
        input_ids=torch.from_numpy(inputs.input_ids).to(device),
        labels=torch.from_numpy(ids).to(device),
        weights=torch.from_numpy(counts / batch.step_num_targets).to(device),
        offsets=inputs.offsets,
        scale=loss_scale(plan, batch.step_num_targets),
        forest=inputs.forest(plan),
    )
    return StepInputs(
        plan=plan,
        spread=plan,
        data=data,
        step_num_targets=batch.step_num_targets,
        own=np.ones(len(plan.lengths), np.bool_),
        document_ids=np.arange(len(plan.lengths)),
        trees=inputs,
    )


def _targets(
    ids: torch.Tensor,
    labels: torch.Tensor,
    offsets: npt.NDArray[np.int64],
    vocabulary: int,
    *,
    is_all: bool,
) -> torch.Tensor:
    """Return the target of each token, int64 `[num_tokens]`; refuse ids and labels that a model can't run or learn.

    Args:
        ids: int64 `[num_tokens]`.
        labels: int64 `[num_tokens]`, each at its own token.
        offsets: int64 `[num_documents + 1]`.
        vocabulary: number of ids that the model knows.
        is_all: whether these are all tokens of the step, one of which must have a label.
    """
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
    if is_all and not (labels != IGNORED).any():
        raise DocumentsError(f"none of {len(ids):,} tokens has a label to learn; leave this batch out")
    return labels


def check_lengths(
    plan: StepPlan, lengths: Int32Array, here: npt.NDArray[np.bool_] | None = None, dp_rank: int = 0
) -> None:
    """Refuse a plan of other documents than those of a batch.

    Args:
        lengths: int32 `[num_segments]`: of the batch.
        here: bool `[num_documents]`: those that the batch must hold; None for all.
        dp_rank: rank that they belong to.
    """
    planned = plan.lengths if here is None else plan.lengths[here]
    whose = "" if here is None else f" for data-parallel rank {dp_rank:,}"
    way_out = (
        "plan the step from batch.document_lengths"
        if here is None
        else "give the engine of a rank what the loader of the same data-parallel rank gives"
    )
    if len(planned) != len(lengths):
        raise PlanError(
            f"the plan is of {len(planned):,} documents{whose} and the batch holds {len(lengths):,}; {way_out}"
        )
    wrong = np.flatnonzero(planned != lengths)
    if wrong.size:
        first = int(wrong[0])
        raise PlanError(
            f"document {first:,} of the batch has {lengths[first]:,} tokens, and {planned[first]:,} in the "
            f"plan{whose} ({wrong.size:,} of {len(lengths):,} differ); {way_out}"
        )


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
    """Refuse ids that would make the embedding or the loss fail in the middle of a step.

    Args:
        ids: int64 `[num_tokens]`.
        allowed: bool `[num_tokens]`: tokens that aren't checked.
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
