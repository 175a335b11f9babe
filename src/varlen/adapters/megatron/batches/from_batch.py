"""varlen's own batches (`vl.collate`, `vl.PackedLoader`) in the keys that Megatron-Bridge's trainers read."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from varlen.adapters.megatron.batches.boundaries import Boundaries, MegatronBatch, boundary_keys
from varlen.adapters.megatron.rows import NEWEST, as_dialect
from varlen.batch.packed import IGNORE_INDEX, TARGET_WEIGHTS, PackedBatch, on_host
from varlen.errors import SettingError
from varlen.types import Int32Array, IntArray


def megatron_batch(
    batch: PackedBatch,
    dialect: str = NEWEST,
    *,
    weights: str | npt.ArrayLike | None = None,
    always_padded: bool = False,
    padding_mask: bool = False,
    total_tokens: bool = False,
) -> MegatronBatch:
    """Return a batch as a trainer of Megatron reads it.

    Here a label stands at its own token; there it stands at the token before, so that labels and mask are moved by
    one within each document, never across. A document's last position, which predicts nothing, has mask 0 and
    `pad_id` for a label.

    Args:
        batch: in either layout, as numpy arrays or tensors. `layout="rows"` gives as many rows, of which
            `split_microbatches` makes micro-batches of one; `layout="flat"` gives one row.
        dialect: `"0.4"`, `"0.5"` or `"0.6"`, or a release.
        weights: weight of each target, standing where its label stands in `batch.labels`: the name of one of its
            `columns`, or an array such as `batch.loss_weights("document")`. None: `batch.target_weights`, where
            rows weigh their targets, else 1 each.
        always_padded: give padded boundaries even where slots are as long as documents.
        padding_mask: add `padding_mask`, True at padding, for routers of experts.
        total_tokens: add `total_tokens`, from which `get_packed_seq_params` makes the `seq_idx` of recurrent layers.

    Returns:
        `tokens`, `labels`, `position_ids` int64 `[rows, width]`; `loss_mask` int64, or float32 with weights;
        `token_count`, tokens of each row; and the boundaries of the dialect, which cover the padding too: in segments
        of at most 128, and without real tokens where there are padded boundaries. Boundaries are `[rows, entries]`.

    Raises:
        SettingError: an unknown dialect, or weights that are not there, of another shape, or not
            finite.

    >>> import varlen as vl
    >>> packing = vl.pack([3, 2], capacity=8)
    >>> batch = megatron_batch(vl.collate([[5, 6, 7], [8, 9]], packing))
    >>> for name in ("tokens", "labels", "loss_mask", "cu_seqlens_q"):
    ...     print(name, batch[name].tolist())
    tokens [[5, 6, 7, 8, 9, 0, 0, 0]]
    labels [[6, 7, 0, 9, 0, 0, 0, 0]]
    loss_mask [[1, 1, 0, 1, 0, 0, 0, 0]]
    cu_seqlens_q [[0, 3, 5, 8]]
    """
    spelled = as_dialect(dialect)
    tokens, segments = on_host(batch.input_ids), on_host(batch.segment_ids)
    shape = (int(tokens.shape[0]), int(tokens.shape[1]))
    follows = np.zeros(shape, dtype=np.bool_)
    follows[:, :-1] = _same_segment(segments)
    targets = _moved(on_host(batch.labels), IGNORE_INDEX)
    trained = follows & (targets != IGNORE_INDEX)
    labels = np.where(trained, targets, np.where(follows, _moved(tokens, batch.pad_id), batch.pad_id))
    mask = trained.astype(np.int64)
    if weights is None and batch.target_weights is not None:
        weights = batch.target_weights
    if weights is not None:
        mask = _weighted(trained, _moved(_weights(batch, weights), 0))
    is_real = segments >= 0
    keys: MegatronBatch = {
        "tokens": torch.from_numpy(tokens.astype(np.int64)),
        "labels": torch.from_numpy(labels.astype(np.int64)),
        "loss_mask": torch.from_numpy(mask),
        "position_ids": torch.from_numpy(on_host(batch.position_ids).astype(np.int64)),
        "token_count": is_real.sum(axis=1).tolist(),
    }
    bounds = _row_boundaries(batch, segments, always_padded)
    keys |= boundary_keys(bounds, spelled)
    if padding_mask:
        keys["padding_mask"] = torch.from_numpy(~is_real)
        if spelled == "0.6":
            keys["pad_between_seqs"] = bounds.physical is not None
    if total_tokens:
        keys["total_tokens"] = shape[1]
    return keys


def _moved(values: npt.NDArray[Any], last: object) -> npt.NDArray[Any]:
    """Return rows moved by one to the left."""
    moved = np.empty_like(values)
    moved[:, :-1], moved[:, -1:] = values[:, 1:], last
    return moved


def _same_segment(segments: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return bool `[rows, width - 1]`: whether a position and the next hold tokens of one document."""
    same: npt.NDArray[np.bool_] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0)
    return same


def _weighted(trained: npt.NDArray[np.bool_], weights: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return float32 `[rows, width]`: the weight of each trained position, 0 elsewhere."""
    with np.errstate(over="ignore"):
        mask: npt.NDArray[np.float32] = np.where(trained, weights, 0).astype(np.float32)
    wrong = ~np.isfinite(mask)
    if wrong.any():
        raise SettingError(
            f"weights hold {weights[wrong][0]} ({int(wrong.sum()):,} of {int(trained.sum()):,} targets aren't finite "
            "in float32)"
        )
    return mask


def _weights(batch: PackedBatch, weights: str | npt.ArrayLike) -> npt.NDArray[Any]:
    """Return the weight of every label, of the shape of the labels."""
    if isinstance(weights, str):
        if weights not in batch.columns:
            there = ", ".join(map(repr, batch.columns)) or "none"
            raise SettingError(f"the batch has no column {weights!r} to weigh targets with; it has {there}")
        if batch.target_weights is not None and weights != TARGET_WEIGHTS:
            raise SettingError(
                "targets of this batch weigh as their rows say (batch.target_weights), and by the column "
                f"{weights!r}; pass an array that takes both in"
            )
        weights = on_host(batch.columns[weights])
    found = np.asarray(on_host(weights) if isinstance(weights, torch.Tensor) else weights)
    if found.shape != tuple(batch.labels.shape):
        raise SettingError(
            f"weights must have the shape of the labels, {tuple(batch.labels.shape)}; got {found.shape}"
        )
    if found.dtype.kind not in "biuf":
        raise SettingError(f"weights must be numbers, got {found.dtype}")
    return found


def _row_boundaries(batch: PackedBatch, segments: npt.NDArray[Any], always_padded: bool) -> Boundaries:
    """Return each row's boundaries from those of the whole batch."""
    num_rows, width = segments.shape
    logical = on_host(batch.cu_seqlens).astype(np.int64)
    is_padded = batch.cu_seqlens_padded is not None
    physical = on_host(batch.cu_seqlens_padded).astype(np.int64) if is_padded else logical
    places, reals = np.diff(physical), np.diff(logical)
    begins = physical[:-1]
    padded = is_padded or always_padded
    if padded:
        at = np.minimum(begins, segments.size - 1) if segments.size else begins
        is_padding = (segments.reshape(-1)[at] < 0) & (places > 0)
        reals = np.where(is_padding, 0, reals)
    owners = np.minimum(begins // max(width, 1), num_rows - 1)
    counts = np.bincount(owners, minlength=num_rows).astype(np.int64) + 1
    shape = num_rows, int(counts.max(initial=1))
    return Boundaries(
        logical=_cumulated(reals, owners, counts, shape),
        physical=_cumulated(places, owners, counts, shape) if padded else None,
        counts=counts,
        logical_counts=counts,
        max_seqlen=_longest(places, owners, num_rows),
    )


def _cumulated(sizes: IntArray, owners: IntArray, counts: IntArray, shape: tuple[int, int]) -> Int32Array:
    """Return int32 `[rows, entries]`: sizes summed up within each row; 0 before the first and nothing behind."""
    table = np.zeros(shape, np.int32)
    within = np.arange(len(sizes)) - (np.cumsum(counts - 1) - (counts - 1))[owners]
    table[owners, within + 1] = sizes
    return np.cumsum(table, axis=1, dtype=np.int32)


def _longest(sizes: IntArray, owners: IntArray, num_rows: int) -> Int32Array:
    """Return int32 `[rows, 1]`: the longest segment of each row."""
    longest = np.zeros(num_rows, np.int32)
    np.maximum.at(longest, owners, sizes.astype(np.int32))
    return longest.reshape(-1, 1)
