"""Loss masks: one value per token, whether its label is trained on, or its loss weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# One value per token: 0 where it isn't trained on, else 1; as float32, the weight of its label in the loss.
Mask = npt.NDArray[np.uint8] | npt.NDArray[np.float32]

ALLOWED = "a weight is a number from 0 that float32 can hold"
OPTION = "take it as a loss weight (row_weights=True, --row-weights)"  # how to enable weights


def as_marks(mask: Mask) -> npt.NDArray[np.uint8]:
    """Return 1 for each trained token, whatever its weight."""
    return mask if mask.dtype == np.uint8 else (mask != 0).view(np.uint8)  # type: ignore[return-value]


def all_weigh_one(mask: Mask) -> bool:
    """Whether all tokens are trained with weight 1."""
    return bool(mask.all()) if mask.dtype == np.uint8 else bool((mask == 1).all())


def end_to_end(masks: Sequence[Mask | None], sizes: Sequence[int]) -> Mask | None:
    """Concatenate masks, as weights if one of them holds weights; None if all are None."""
    if all(mask is None for mask in masks):
        return None
    whole = [np.ones(size, np.uint8) if mask is None else mask for mask, size in zip(masks, sizes)]
    joined: npt.NDArray[Any] = np.concatenate(whole)  # promotes to float if one is
    return joined


def as_wide(mask: Mask, marks: Mask) -> Mask:
    """Return a mask, converted to weights if `marks` holds weights."""
    return mask.astype(np.float32) if marks.dtype == np.float32 and mask.dtype == np.uint8 else mask
