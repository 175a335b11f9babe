"""What torchtitan's trainer reads of a packed batch: inputs, positions, and labels that are shifted already."""

from __future__ import annotations

import numpy as np
import torch

from varlen.batch.packed import IGNORE_INDEX, PackedBatch
from varlen.errors import SettingError
from varlen.types import IntArray

TrainerBatch = tuple[dict[str, torch.Tensor], torch.Tensor]

_BLOCK = 128
"""Positions of padding restart here at the latest: the block of FlexAttention's masks."""


def trainer_batch(batch: PackedBatch, *, flat: bool = False) -> TrainerBatch:
    """Return a batch as torchtitan's trainer takes it (0.3.0: `Trainer.post_dataloading_process`).

    torchtitan makes its attention masks from positions: a document begins wherever they are 0. So positions count
    within each document, and padding is documents of its own, none longer than 128 or across a multiple of 128: it
    is never joined to a document, costs a block mask nothing but its diagonal, and a varlen kernel a few segments.

    Args:
        batch: of numpy arrays in rows.
        flat: without rows, as torchtitan's trainer of August 2026 has batches.

    Returns:
        `{"input": int64 [rows, width], "positions": int64 [rows, width]}` and labels int64 `[rows, width]`: the label
        at t is the token at t + 1, and -100 at the last token of each document and at padding. With `flat` each is
        `[rows * width]`. Nothing of it shares memory with the batch.

    Raises:
        SettingError: targets weigh as their rows say.
    """
    if batch.target_weights is not None:
        raise SettingError(
            "targets of this batch weigh as their rows say (row_weights), and torchtitan's loss knows no weights; "
            "read the rows without"
        )
    labels = np.full(batch.labels.shape, IGNORE_INDEX, dtype=np.int64)
    # A document's first token is no target, so none is moved into the document before it.
    labels[:, :-1] = batch.labels[:, 1:]
    arrays = [batch.input_ids.astype(np.int64), positions(batch), labels]
    inputs, places, targets = (torch.from_numpy(one.reshape(-1) if flat else one) for one in arrays)
    return {"input": inputs, "positions": places}, targets


def positions(batch: PackedBatch) -> IntArray:
    """Return int64 `[rows, width]` positions that are 0 where a document begins, or a piece of padding.

    Args:
        batch: of numpy arrays in rows.
    """
    is_padding = batch.segment_ids < 0
    here = np.arange(is_padding.shape[1], dtype=np.int64)
    run_begins = np.maximum.accumulate(np.where(is_padding, 0, here + 1), axis=1)
    in_padding = here - np.maximum(run_begins, here // _BLOCK * _BLOCK)
    found: IntArray = np.where(is_padding, in_padding, batch.position_ids).astype(np.int64, copy=False)
    return found
