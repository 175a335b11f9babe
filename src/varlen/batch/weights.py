"""Loss weights a token: documents, pairs or packs counted equally, whatever their number of targets."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np

from varlen.batch.packed import IGNORE_INDEX, LossWeighting, PackedBatch, on_host
from varlen.errors import SettingError


def loss_weights(batch: PackedBatch, weighting: LossWeighting) -> Any:
    """Return float32 weights shaped like the labels; see `PackedBatch.loss_weights`.

    Raises:
        SettingError: an unknown weighting, or "pair" without groups.
    """
    if weighting not in get_args(LossWeighting):
        raise SettingError(
            f"weighting must be one of {', '.join(get_args(LossWeighting))}; got {weighting!r}"
        )
    labels = on_host(batch.labels)
    per_segment = _segment_weights(batch, weighting)
    flat = np.zeros(labels.size, np.float32)
    spans = on_host(batch.cu_seqlens if batch.cu_seqlens_padded is None else batch.cu_seqlens_padded)
    places, lengths = _places(batch, spans), on_host(batch.document_lengths)
    owner = np.repeat(np.arange(lengths.size), lengths)
    first = np.cumsum(lengths, dtype=np.int64) - lengths
    positions = places[owner] + np.arange(owner.size) - first[owner]
    flat[positions] = per_segment[owner]
    weights = np.where(labels == IGNORE_INDEX, np.float32(0), flat.reshape(labels.shape))
    if isinstance(batch.labels, np.ndarray):
        return weights
    return batch.labels.new_tensor(weights, dtype=_float32_of(batch.labels))


def _places(batch: PackedBatch, spans: Any) -> Any:
    """First position of every segment in the flattened batch."""
    rows, width = batch.labels.shape
    is_start = on_host(batch.segment_ids).reshape(-1)[spans[:-1]] >= 0
    starts = spans[:-1][is_start]
    assert len(starts) == batch.num_segments, (rows, width)
    return starts.astype(np.int64)


def _segment_weights(batch: PackedBatch, weighting: LossWeighting) -> Any:
    """The weight of each target, by segment."""
    targets = on_host(batch.document_targets).astype(np.float64)
    share = np.divide(1.0, targets, out=np.zeros_like(targets), where=targets > 0)
    if weighting == "token":
        return np.ones_like(targets)
    if weighting == "document":
        return _per_owner(on_host(batch.document_ids), targets)
    if weighting == "pair":
        if batch.document_groups is None:
            raise SettingError('weighting "pair" needs groups: pack with groups=, one number a document')
        return _per_owner(on_host(batch.document_groups), targets)
    documents = int((targets > 0).sum())
    return share * (len(batch.pack_ids) / documents if documents else 0.0)


def _per_owner(owners: Any, targets: Any) -> Any:
    """One over the targets that each owner, a document or a group, has in this batch."""
    _, inverse = np.unique(owners, return_inverse=True)
    total = np.bincount(inverse, weights=targets, minlength=1)
    share = np.divide(1.0, total, out=np.zeros_like(total), where=total > 0)
    return share[inverse]


def _float32_of(tensor: Any) -> Any:
    """torch.float32 without importing torch: the dtype of a float view of a tensor."""
    return tensor.float().dtype
