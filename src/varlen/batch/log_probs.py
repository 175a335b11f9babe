"""Log-probabilities of targets, of documents and of trees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from varlen.arguments import check_temperature
from varlen.batch.packed import IGNORE_INDEX, PackedBatch, import_torch
from varlen.batch.tree_batch import TreeBatch
from varlen.errors import DocumentsError, SettingError

if TYPE_CHECKING:
    import torch


def log_probs(logits: torch.Tensor, batch: PackedBatch | TreeBatch, temperature: float = 1.0) -> torch.Tensor:
    """Return the log-probability of each target.

    Args:
        logits: `[rows, width, vocabulary]`, what the model returns for `model_inputs(batch, model)`.
        batch: of trees: its occurrences, in their order; of documents: its labels, in the order of the batch.
        temperature: logits are divided by it first.

    Returns:
        `[num_targets]`, float32 or wider.

    Raises:
        DocumentsError: logits of another shape, or of a smaller vocabulary.
        SettingError: no batch, or a temperature that isn't above 0.

    Cost: a softmax for each position that predicts anything; positions with several targets take one.

    >>> import torch, varlen as vl
    >>> forest = vl.fold([[0, 1], [0, 2]])
    >>> batch = vl.collate(forest, vl.pack_forest(forest, capacity=3))
    >>> vl.log_probs(torch.zeros(1, 3, 4), batch).exp().tolist()
    [0.25, 0.25]
    """
    torch_ = import_torch()
    if not isinstance(batch, PackedBatch | TreeBatch):
        raise SettingError(
            "vl.log_probs(logits, batch) takes a PackedBatch or a TreeBatch, as vl.collate makes them, and a "
            f"{type(batch).__name__} was given"
        )
    check_temperature(temperature)
    if logits.ndim != 3 or tuple(logits.shape[:2]) != tuple(batch.input_ids.shape):
        raise DocumentsError(
            f"logits are of shape {list(logits.shape)}, and the batch of {list(batch.input_ids.shape)}; they must be "
            "those of all its positions"
        )
    sources, targets = (torch_.as_tensor(x, device=logits.device).long() for x in _targets(batch))
    if len(targets) and int(targets.max()) >= logits.shape[2]:
        raise DocumentsError(
            f"the batch predicts token id {int(targets.max()):,}, and logits are of ids 0 to {logits.shape[2] - 1:,}"
        )
    predicting, which = torch_.unique(sources, return_inverse=True)
    wide = torch_.promote_types(logits.dtype, torch_.float32)
    scores = logits.flatten(0, 1)[predicting].to(wide) / float(temperature)
    found: torch.Tensor = scores[which, targets] - scores.logsumexp(-1)[which]
    return found


def _targets(batch: PackedBatch | TreeBatch) -> tuple[Any, Any]:
    """Return where each target is predicted, in the flattened batch, and its token."""
    if isinstance(batch, TreeBatch):
        return batch.sources, batch.targets
    labels = import_torch().as_tensor(batch.labels).flatten()
    at = (labels != IGNORE_INDEX).nonzero().flatten()
    return at - 1, labels[at]
