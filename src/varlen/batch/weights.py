"""Loss weights: documents, pairs or packs counted equally, whatever their number of targets."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np

from varlen.errors import SettingError
from varlen.types import FloatArray, IntArray

LossWeighting = Literal["token", "document", "pair", "longalign"]


def target_weights(
    weighting: LossWeighting, targets: Any, documents: Any, groups: Any | None, num_packs: int
) -> FloatArray:
    """Return what one target of each segment weighs; `PackedBatch.loss_weights` says what the words mean.

    Args:
        weighting: the word.
        targets: `[segments]`: targets in each segment, or the sum of what they weigh by themselves.
        documents: `[segments]`: document of each segment.
        groups: `[segments]`: group of each segment's document, or None.
        num_packs: packs in the batch.

    Returns:
        float64 `[segments]`; 0 where there is no target.

    Raises:
        SettingError: an unknown weighting, or "pair" without groups.
    """
    if weighting not in get_args(LossWeighting):
        raise SettingError(
            f"weighting must be one of {', '.join(get_args(LossWeighting))}; got {weighting!r}"
        )
    counts = np.asarray(targets).astype(np.float64)
    if weighting == "token":
        return np.ones_like(counts)
    if weighting == "document":
        return _shares(np.asarray(documents), counts)
    if weighting == "pair":
        if groups is None:
            raise SettingError('weighting "pair" needs groups: pack with groups=, one number a document')
        return _shares(np.asarray(groups), counts)
    with_targets = int((counts > 0).sum())
    return _reciprocals(counts) * (num_packs / with_targets if with_targets else 0.0)


def spread(weights: FloatArray, places: Any, lengths: Any, size: int) -> Any:
    """Write each segment's weight at all of its positions.

    Args:
        weights: `[segments]`.
        places: `[segments]`: first position of each segment.
        lengths: `[segments]`.
        size: positions in all.

    Returns:
        float64 `[size]`; 0 at padding.
    """
    flat = np.zeros(size, np.float64)
    owner, at = _positions(places, lengths)
    flat[at] = weights[owner]
    return flat


def sums(values: Any, places: Any, lengths: Any) -> FloatArray:
    """Return the sum of the values in each segment, float64 `[segments]`.

    Args:
        values: `[positions]`.
        places: `[segments]`: first position of each.
        lengths: `[segments]`.
    """
    owner, at = _positions(places, lengths)
    found: FloatArray = np.zeros(lengths.size)
    np.add.at(found, owner, values[at])
    return found


def _positions(places: Any, lengths: Any) -> tuple[IntArray, IntArray]:
    """Return the segment of each token, and its position."""
    owner = np.repeat(np.arange(lengths.size), lengths)
    first = np.cumsum(lengths, dtype=np.int64) - lengths
    return owner, places[owner] + np.arange(owner.size) - first[owner]


def _shares(owners: Any, counts: FloatArray) -> FloatArray:
    """One over the targets that each owner, a document or a group, has in this batch."""
    _, inverse = np.unique(owners, return_inverse=True)
    totals: FloatArray = np.bincount(inverse, weights=counts, minlength=1).astype(np.float64)
    return _reciprocals(totals)[inverse]


def _reciprocals(counts: FloatArray) -> FloatArray:
    """One over each count, 0 for 0."""
    return np.divide(1.0, counts, out=np.zeros_like(counts), where=counts > 0)
