"""Loss masks: a value a token that says whether its label is trained on, and what it weighs where rows say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.uint8] | npt.NDArray[np.float32]
"""A value a token: 0 where it isn't trained on, else 1, or as float32 what its label weighs in the loss."""

ALLOWED = "a weight is a number from 0 that float32 can hold"
OPTION = "take it as a loss weight (row_weights=True, --row-weights)"
"""How weights are taken."""


def as_marks(mask: Mask) -> npt.NDArray[np.uint8]:
    """Return 1 where a token is trained on, whatever its label weighs."""
    return mask if mask.dtype == np.uint8 else (mask != 0).view(np.uint8)  # type: ignore[return-value]


def all_weigh_one(mask: Mask) -> bool:
    """Whether all tokens are trained on, and their labels weigh 1."""
    return bool(mask.all()) if mask.dtype == np.uint8 else bool((mask == 1).all())


def end_to_end(masks: Sequence[Mask | None], sizes: Sequence[int]) -> Mask | None:
    """Return masks one after the other, as weights where one of them holds weights; None where all are."""
    if all(mask is None for mask in masks):
        return None
    whole = [np.ones(size, np.uint8) if mask is None else mask for mask, size in zip(masks, sizes)]
    joined: npt.NDArray[Any] = np.concatenate(whole)  # which makes floats of all where one is
    return joined


def as_wide(mask: Mask, marks: Mask) -> Mask:
    """Return a mask as it is, or as weights where others that are to be written into it are weights."""
    return mask.astype(np.float32) if marks.dtype == np.float32 and mask.dtype == np.uint8 else mask
