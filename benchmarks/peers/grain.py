"""grain's packing transformations, which pack a stream of token arrays into padded rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

FIRST_FIT = "grain FirstFitPackIterDataset"
BEST_FIT = "grain BestFitPackIterDataset"
Fit = Literal["first", "best"]


def packer(
    arrays: list[np.ndarray], capacity: int, *, fit: Fit, num_bins: int
) -> Callable[[], list[dict[str, Any]]]:
    """Return a call that packs all documents into rows of ids, segments and positions.

    Args:
        arrays: token ids of each document.
        capacity: tokens a row can hold.
        fit: "first" is faster, "best" fuller.
        num_bins: rows open at a time.
    """
    import grain
    from grain import experimental

    packing = experimental.FirstFitPackIterDataset if fit == "first" else experimental.BestFitPackIterDataset
    reading = grain.ReadOptions(num_threads=0)

    def pack() -> list[dict[str, Any]]:
        stream = grain.MapDataset.source(arrays).map(_as_feature).to_iter_dataset(reading)
        length_struct = {"input_ids": capacity}
        return list(
            packing(stream, length_struct=length_struct, num_packing_bins=num_bins, shuffle_bins=False)
        )

    return pack


def _as_feature(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Name a document's tokens, as grain packs features by name."""
    return {"input_ids": tokens}
