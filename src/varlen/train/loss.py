"""The sum of the target losses of a batch, in blocks, so that no second copy of all logits stands in memory."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from varlen.batch.packed import IGNORE_INDEX

BLOCK = 4096
"""Positions whose logits are widened to float32 at once: 512 MB at a vocabulary of 32,000."""


def target_loss_sum(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum of the losses of all targets, in nats, as float32; 0 where there is no target.

    Args:
        logits: `[rows, width, vocabulary]`.
        labels: int64 `[rows, width]`, not shifted: position t - 1 is to say the label of position t.
        weights: `[rows, width]`, by which each loss is multiplied, at the places of the labels; None for 1.
    """
    # Labels move instead of logits, which are the large ones: a row's last position has nothing to say.
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).reshape(-1)
    moved = None if weights is None else torch.nn.functional.pad(weights[:, 1:], (0, 1)).reshape(-1)
    flat = logits.reshape(-1, logits.shape[-1])
    if len(flat) <= BLOCK:
        return _block_sum(flat, targets, moved)
    total = torch.zeros((), dtype=torch.float32, device=logits.device)
    for begin in range(0, len(flat), BLOCK):
        block = slice(begin, begin + BLOCK)
        here = None if moved is None else moved[block]
        total = total + checkpoint(_block_sum, flat[block], targets[block], here, use_reentrant=False)
    return total


def _block_sum(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    if weights is None:
        return cross_entropy(logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return (
        cross_entropy(logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="none") * weights
    ).sum()
