"""What each pipeline stage gets of a batch: every stage its boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from varlen.adapters.megatron.batches.boundaries import MegatronBatch, physical_boundaries
from varlen.errors import DocumentsError

_FIRST = ("tokens", "position_ids")
_LAST = ("labels", "loss_mask")


def stage_batch(
    batch: Mapping[str, Any], is_first: bool, is_last: bool, has_mtp: bool = False
) -> MegatronBatch:
    """Return what one pipeline stage needs of a batch.

    Attention runs in every stage, so that boundaries, and masks of attention and padding, go to all of them. Releases
    up to 0.4.2 gave them to the first and last stage only: in the stages between documents attended to each other
    (Megatron-Bridge issue 2952, fixed in 0.5.0 by pull request 3926).

    Args:
        batch: of any dialect.
        is_first: whether the stage embeds tokens.
        is_last: whether the stage computes the loss.
        has_mtp: whether the stage holds layers of multi-token prediction, which embed tokens and compute a loss.

    Returns:
        The same keys; None for tokens and positions, and for labels and mask, where the stage doesn't use them.

    Raises:
        DocumentsError: a packed batch without boundaries, or without what this stage needs.

    >>> import torch
    >>> batch = {"tokens": torch.zeros(1, 4), "labels": torch.zeros(1, 4), "loss_mask": torch.ones(1, 4),
    ...          "position_ids": torch.zeros(1, 4), "cu_seqlens_q": torch.tensor([[0, 2, 4]])}
    >>> [name for name, value in stage_batch(batch, is_first=False, is_last=False).items() if value is not None]
    ['cu_seqlens_q']
    """
    mask = batch.get("attention_mask")
    if physical_boundaries(batch) is None and (mask is None or mask.dim() < 4):
        raise DocumentsError(
            "the batch has neither boundaries nor an attention mask: in this stage its documents would attend to "
            "each other; hand every stage the whole batch and let stage_batch take what it needs"
        )
    needed = dict.fromkeys(_FIRST, is_first or has_mtp) | dict.fromkeys(_LAST, is_last or has_mtp)
    missing = [name for name, needs in needed.items() if needs and batch.get(name) is None]
    if missing:
        raise DocumentsError(
            f"this stage needs {', '.join(missing)}, which the batch doesn't have; cut the whole batch for each "
            "stage, not what another stage has left"
        )
    return {name: value if needed.get(name, True) else None for name, value in batch.items()}
