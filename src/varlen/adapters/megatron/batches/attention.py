"""Masks of a batch of packed rows: who may see whom, and which positions are padding."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from varlen.adapters.megatron.batches.boundaries import Boundaries
from varlen.adapters.megatron.batches.stored import StoredRows
from varlen.types import IntArray


def causal_mask(bounds: Boundaries | None, num_rows: int, width: int) -> torch.Tensor:
    """Return who may not see whom.

    Returns:
        bool `[rows, 1, width, width]`, True where position q (of the last dimension but one) must not see position k:

    Cost:
        Quadratic in the width; boundaries are the way for long rows.
    """
    later = torch.ones((width, width), dtype=torch.bool).triu_(1)
    if bounds is None:
        return later.expand(num_rows, 1, width, width).contiguous()
    physical = bounds.logical if bounds.physical is None else bounds.physical
    places = np.arange(width)
    segments = np.stack([np.searchsorted(row, places, side="right") for row in physical])
    owner = torch.from_numpy(segments)
    return ((owner[:, :, None] != owner[:, None, :]) | later).unsqueeze(1)


def padding_places(stored: StoredRows, lengths: IntArray, width: int) -> npt.NDArray[np.bool_]:
    """Return which positions are padding.

    Args:
        lengths: int64 `[documents]`: real inputs.

    Returns:
        bool `[rows, width]`.
    """
    num_rows = len(stored.offsets) - 1
    changes = np.zeros(num_rows * width + 1, np.int64)
    owners = np.repeat(np.arange(num_rows), np.diff(stored.document_offsets))
    within = np.arange(len(owners)) - stored.document_offsets[owners]
    begins = owners * width + stored.starts - within
    np.add.at(changes, begins, 1)
    np.add.at(changes, begins + lengths, -1)
    is_padding: npt.NDArray[np.bool_] = np.cumsum(changes[:-1]).reshape(num_rows, width) == 0
    return is_padding
