"""Who may attend to whom in a batch, as dense booleans: the readable truth that kernels are held against."""

from __future__ import annotations

from typing import Any

import numpy as np

from varlen.batch.packed import PackedBatch
from varlen.errors import SettingError


def dense_mask(batch: PackedBatch, sliding_window: int | None = None) -> Any:
    """Return bool `[rows, width, width]`: query q may attend to key k in its segment, not later than itself.

    Padding attends to itself alone, so that no softmax row is empty. Works on numpy arrays and on tensors, on
    the device where the batch lies. Quadratic in the width.

    Args:
        batch: the batch.
        sliding_window: attend to the last this many positions only, the token itself included.

    Raises:
        SettingError: a window below 1.
    """
    if sliding_window is not None and sliding_window < 1:
        raise SettingError(f"sliding_window must be at least 1, got {sliding_window}")
    owners = batch.segment_ids
    places = batch.position_ids
    queries, keys = places[:, :, None], places[:, None, :]
    same = (owners[:, :, None] == owners[:, None, :]) & (owners >= 0)[:, :, None]
    mask = same & (keys <= queries)
    if sliding_window is not None:
        mask = mask & (queries - keys < sliding_window)
    diagonal = np.arange(owners.shape[1])
    mask[:, diagonal, diagonal] = True
    return mask
