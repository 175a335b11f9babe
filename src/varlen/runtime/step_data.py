"""`step_data_of`: the tokens of a batch as a step runs them, without padding and checked."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from varlen.batch.packed import LossWeighting, PackedBatch
from varlen.counts import many
from varlen.errors import DocumentsError, SettingError
from varlen.runtime.chunk import StepData
from varlen.runtime.parts import IGNORED
from varlen.types import Int32Array


def step_data_of(
    batch: PackedBatch, device: torch.device, weighting: LossWeighting, *, vocabulary: int
) -> StepData:
    """Return a batch's documents one behind the other, with each token's target and its weight.

    Args:
        batch: on any device.
        device: of the model.
        weighting: as `PackedBatch.loss_weights` says, which takes what rows weigh in.
        vocabulary: ids that the model knows.

    Raises:
        DocumentsError: it has no target, one that nothing stands before, or ids that the model doesn't know.
        SettingError: weights that don't add up over batches.
    """
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
    """Return the lengths of a batch's documents, int32 `[num_segments]`, in host memory.

    Args:
        batch: on any device.

    Raises:
        DocumentsError: no packed batch.
    """
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
        vocabulary: ids that the model knows.
        offsets: int64 `[num_documents + 1]`.
        verb: between a token and its id.

    Raises:
        DocumentsError: names the first.
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
