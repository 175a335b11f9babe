"""Finished attention masks, read token by token: who sees another document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from varlen.verify.batch_reading import BoolArray, GivenBatch
from varlen.verify.batch_segments import Segments

CLOSED_BELOW = -1e3
"""Numbers added to scores that are lower close a position: even in half precision its weight is then 0."""
BLOCK = 1024
"""Queries looked at together, so that little memory is used beside the mask's own."""


def opened_across(given: GivenBatch, segments: Segments) -> BoolArray | None:
    """Return the tokens that a finished mask lets see another document, or None where it can't be read.

    Masks on a GPU and FlexAttention's block masks aren't read. Cost: the mask is gone through once.

    Args:
        given: the batch, with a finished mask.
        segments: where its documents begin.

    Returns:
        bool `[rows, width]`.
    """
    if not segments.starts_by:
        return None
    numbers = segments.numbers().reshape(given.rows, given.width)
    across = None
    for mask in _readable(given):
        if mask.ndim != 4 or mask.shape[2:] != (given.width, given.width):
            continue
        if mask.shape[0] not in (1, given.rows):
            continue
        across = np.zeros((given.rows, given.width), dtype=bool) if across is None else across
        for row in range(given.rows):
            own = mask[min(row, len(mask) - 1)]
            for start in range(0, given.width, BLOCK):
                block = slice(start, start + BLOCK)
                seen = own[:, block] if own.dtype == bool else own[:, block] > CLOSED_BELOW
                other = numbers[row, block, None] != numbers[row]
                across[row, block] |= (seen.any(axis=0) & other).any(axis=1)
    return None if across is None else across & ~segments.padding


def _readable(given: GivenBatch) -> Iterator[Any]:
    """Yield the masks that are arrays in host memory; integers are numbers to add, as floats are."""
    masks = (
        given.finished_mask.values() if isinstance(given.finished_mask, Mapping) else [given.finished_mask]
    )
    for mask in masks:
        if isinstance(mask, np.ndarray):
            yield mask
        elif hasattr(mask, "detach") and mask.device.type == "cpu":
            yield mask.detach().float().numpy() if mask.is_floating_point() else mask.detach().numpy()
