"""Who may attend to whom in a batch, as dense booleans: the readable truth that kernels are held against."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from varlen.errors import SettingError


def dense_mask(segment_ids: Any, position_ids: Any, sliding_window: int | None = None) -> Any:
    """Return bool `[rows, width, width]`: query q may attend to key k in its segment, not later than itself.

    Padding attends to itself alone, so that no softmax row is empty. Works on numpy arrays and on tensors, on
    the device where they lie. Quadratic in the width.

    Args:
        segment_ids: integers `[rows, width]`, -1 at padding.
        position_ids: integers `[rows, width]`, restarting with each segment.
        sliding_window: attend to the last this many positions only, the token itself included.

    Raises:
        SettingError: a window that is no whole number, or below 1.
    """
    check_window(sliding_window)
    queries, keys = position_ids[:, :, None], position_ids[:, None, :]
    same = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids >= 0)[:, :, None]
    mask = same & (keys <= queries)
    if sliding_window is not None:
        mask = mask & (queries - keys < sliding_window)
    diagonal = np.arange(segment_ids.shape[1])
    mask[:, diagonal, diagonal] = True
    return mask


def check_window(sliding_window: int | None) -> None:
    """Require a window that holds the token itself.

    Raises:
        SettingError: it is no whole number, or below 1.
    """
    if sliding_window is None:
        return
    try:
        positions = operator.index(sliding_window)
    except TypeError:
        positions = 0
    if positions < 1:
        raise SettingError(f"sliding_window must be a whole number of at least 1, got {sliding_window!r}")
