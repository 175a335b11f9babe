"""Targets of multi-token prediction: later tokens of the same document, never of the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from varlen.adapters.megatron.batches.boundaries import entries, logical_boundaries, physical_boundaries
from varlen.errors import DocumentsError, SettingError
from varlen.types import IntArray


def mtp_targets(batch: Mapping[str, Any], depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the labels and loss masks of every layer of multi-token prediction.

    The model's own head predicts the label at its position; layer d (from 1) predicts the label d positions on, as
    Megatron-Core rolls labels and mask by one for each layer. A layer has no target in the last d positions of a
    document's real tokens. Megatron-Core rolls by the wrong boundaries where documents are padded (Megatron-LM
    pull request 6205): a layer then learns padding, or the next document.

    Args:
        batch: of any dialect, any number of rows, before it is cut for context parallelism.
        depth: layers.

    Returns:
        Labels int64 and loss mask in its own dtype, each `[depth, rows, width]`; 0 where a layer has no target.

    Raises:
        SettingError: a depth below 1.
        DocumentsError: a batch without labels, mask or boundaries, or a rank's share, whose boundaries are those
            of the whole row.

    >>> batch = {"labels": torch.tensor([[2, 3, 4, 6, 7]]), "loss_mask": torch.ones(1, 5, dtype=torch.int64),
    ...          "cu_seqlens_q": torch.tensor([[0, 3, 5]])}
    >>> labels, loss_mask = mtp_targets(batch, depth=2)
    >>> labels.tolist(), loss_mask.tolist()
    ([[[3, 4, 0, 7, 0]], [[4, 0, 0, 0, 0]]], [[[1, 1, 0, 1, 0]], [[1, 0, 0, 0, 0]]])
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise SettingError(f"depth must be a whole number from 1 on, got {depth!r}")
    labels, loss_mask = batch.get("labels"), batch.get("loss_mask")
    if labels is None or loss_mask is None:
        raise DocumentsError(
            "multi-token prediction needs labels and loss_mask, which only the last pipeline stage holds"
        )
    if labels.dim() != 2 or loss_mask.shape != labels.shape:
        raise DocumentsError(
            f"labels and loss_mask must have one shape, [rows, width]; got {tuple(labels.shape)} and "
            f"{tuple(loss_mask.shape)}"
        )
    ends = torch.from_numpy(_ends(batch, int(labels.size(0)), int(labels.size(1)))).to(labels.device)
    places = torch.arange(labels.size(1), device=labels.device)
    rolled, masks = labels.new_zeros(depth, *labels.shape), loss_mask.new_zeros(depth, *loss_mask.shape)
    for layer in range(min(depth, labels.size(1) - 1)):
        kept = (places + layer + 1 < ends)[:, : -layer - 1]
        rolled[layer, :, : -layer - 1] = torch.where(kept, labels[:, layer + 1 :], 0)
        masks[layer, :, : -layer - 1] = torch.where(kept, loss_mask[:, layer + 1 :], 0)
    return rolled, masks


def _ends(batch: Mapping[str, Any], num_rows: int, width: int) -> IntArray:
    """Return int64 `[rows, width]`: where the real tokens of each place's segment end."""
    logical, physical = logical_boundaries(batch), physical_boundaries(batch)
    if logical is None or physical is None:
        raise DocumentsError("the batch has no boundaries, so its documents can't be told apart")
    logical, physical = (bounds.reshape(-1, bounds.shape[-1]) for bounds in (logical, physical))
    if not len(logical) == len(physical) == num_rows:
        raise DocumentsError(f"the boundaries are of {len(logical):,} rows, the labels of {num_rows:,}")
    ends = np.empty((num_rows, width), np.int64)
    for row in range(num_rows):
        places, reals = entries(physical[row]), entries(logical[row])
        if len(places) and places[-1] > width:
            raise DocumentsError(
                f"the boundaries of row {row:,} end at {int(places[-1]):,}, but its labels at {width:,}; make the "
                "targets of the whole batch, before it is cut for context parallelism"
            )
        most = min(len(places), len(reals)) - 1
        stops = places[:most] + np.diff(reals[: most + 1])
        owner = np.searchsorted(places[1 : most + 1], np.arange(width), side="right")
        ends[row] = np.append(stops, 0)[np.minimum(owner, most)]
    return ends
