"""Where documents end in a batch, in the keys of each dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from varlen.adapters.megatron.rows import Dialect
from varlen.errors import DocumentsError, SettingError
from varlen.types import Int32Array, IntArray

MegatronBatch: TypeAlias = dict[str, Any]
"""A batch as Megatron-Bridge's trainers read it: tensors, and some numbers, by name."""

TAIL = 128
"""Most positions in one segment of the padding behind a row's documents, as in `vl.collate`: the cost of attention
grows with the square of a segment, so padding must never become one long segment."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Boundaries:
    """Cumulative lengths of every row's segments; rows with fewer repeat their last value."""

    logical: Int32Array
    """int32 `[rows, entries]`: real tokens before each segment."""
    physical: Int32Array | None
    """int32 `[rows, entries]`: places before each segment; None where these are the same."""
    counts: IntArray
    """int64 `[rows]`: entries of each row of `physical` before the repeats."""
    logical_counts: IntArray
    """int64 `[rows]`: the same of `logical`."""
    max_seqlen: Int32Array
    """int32 `[rows, 1]`, or `[rows]` where it is a constant of the data set."""


def boundary_keys(bounds: Boundaries, dialect: Dialect) -> MegatronBatch:
    """Return the boundaries of rows as one dialect spells them.

    In `"0.4"` and `"0.5"`, `cu_seqlens` counts places and each row ends in at least one -1: a row without one is
    read as empty there, because the end is looked for with `argmin`. In `"0.6"`, `cu_seqlens_q` counts real tokens
    and rows are made equally long by repeats, which are segments without tokens.
    """
    longest = torch.from_numpy(bounds.max_seqlen)
    if dialect == "0.6":
        logical = torch.from_numpy(bounds.logical)
        keys: MegatronBatch = {
            "attention_mask": None,
            "cu_seqlens_q": logical,
            "cu_seqlens_kv": logical,
            "max_seqlen_q": longest,
            "max_seqlen_kv": longest,
        }
        if bounds.physical is not None:
            physical = torch.from_numpy(bounds.physical)
            keys |= {"cu_seqlens_q_padded": physical, "cu_seqlens_kv_padded": physical}
        return keys
    places = bounds.logical if bounds.physical is None else bounds.physical
    ended, argmin = _ended(places, bounds.counts)
    keys = {
        "attention_mask": torch.from_numpy(np.array([1] * len(places))),
        "cu_seqlens": ended,
        "cu_seqlens_argmin": argmin,
        "max_seqlen": longest,
    }
    if bounds.physical is not None:
        ended, argmin = _ended(bounds.logical, bounds.logical_counts)
        keys |= {"cu_seqlens_unpadded": ended, "cu_seqlens_unpadded_argmin": argmin}
    return keys


def _ended(values: Int32Array, counts: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return boundaries with -1 behind each row's last, int32 `[rows, most + 1]`, and where the first -1 stands."""
    ends = counts.tolist()
    most = max(ends, default=0)
    ended = np.empty((len(values), most + 1), dtype=np.int32)
    ended[:, :most] = values[:, :most]
    ended[:, most] = -1
    if min(ends, default=0) < most:
        for row, end in zip(ended, ends):
            row[end:] = -1
    return torch.from_numpy(ended), torch.from_numpy(counts.reshape(-1, 1).copy())


def physical_boundaries(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the boundaries of a batch's places, in any dialect, -1 at the end included; None where it has none."""
    for name in ("cu_seqlens_q_padded", "cu_seqlens_q", "cu_seqlens"):
        if batch.get(name) is not None:
            found: torch.Tensor = batch[name]
            return found
    return None


def logical_boundaries(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the boundaries of a batch's real tokens, in any dialect; None where it has none."""
    for name in ("cu_seqlens_q", "cu_seqlens_unpadded", "cu_seqlens"):
        if batch.get(name) is not None:
            found: torch.Tensor = batch[name]
            return found
    return None


def entries(bounds: torch.Tensor) -> IntArray:
    """Return the boundaries of one row without what stands behind them: -1, and the batch dimension.

    Args:
        bounds: whole numbers `[entries]` or `[1, entries]`.
    """
    flat: IntArray = bounds.detach().cpu().numpy().reshape(-1).astype(np.int64)
    ends = np.flatnonzero(flat < 0)
    return flat[: ends[0]] if len(ends) else flat


# Targets of multi-token prediction: later tokens of the same document, never of the next.


def mtp_targets(batch: Mapping[str, Any], depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the labels and loss masks of every layer of multi-token prediction.

    The model's own head predicts the label at its position; layer d (from 1) predicts the label d positions on, as
    Megatron-Core rolls labels and mask by one for each layer. A layer has no target in the last d positions of a
    document's real tokens. Megatron-Core rolls by the wrong boundaries where documents are padded (Megatron-LM
    pull request 6205): a layer then learns padding, or the next document.

    Args:
        batch: of any dialect, any number of rows, before it is cut for context parallelism.
        depth: layers.

    Returns:
        Labels int64 and loss mask in its own dtype, each `[depth, rows, width]`; 0 where a layer has no target.

    Raises:
        SettingError: a depth below 1.
        DocumentsError: a batch without labels, mask or boundaries, or a rank's share, whose boundaries are those
            of the whole row.

    >>> batch = {"labels": torch.tensor([[2, 3, 4, 6, 7]]), "loss_mask": torch.ones(1, 5, dtype=torch.int64),
    ...          "cu_seqlens_q": torch.tensor([[0, 3, 5]])}
    >>> labels, loss_mask = mtp_targets(batch, depth=2)
    >>> labels.tolist(), loss_mask.tolist()
    ([[[3, 4, 0, 7, 0]], [[4, 0, 0, 0, 0]]], [[[1, 1, 0, 1, 0]], [[1, 0, 0, 0, 0]]])
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise SettingError(f"depth must be a whole number from 1 on, got {depth!r}")
    labels, loss_mask = batch.get("labels"), batch.get("loss_mask")
    if labels is None or loss_mask is None:
        raise DocumentsError(
            "multi-token prediction needs labels and loss_mask, which only the last pipeline stage holds"
        )
    if labels.dim() != 2 or loss_mask.shape != labels.shape:
        raise DocumentsError(
            f"labels and loss_mask must have one shape, [rows, width]; got {tuple(labels.shape)} and "
            f"{tuple(loss_mask.shape)}"
        )
    ends = torch.from_numpy(_ends(batch, int(labels.size(0)), int(labels.size(1)))).to(labels.device)
    places = torch.arange(labels.size(1), device=labels.device)
    rolled, masks = labels.new_zeros(depth, *labels.shape), loss_mask.new_zeros(depth, *loss_mask.shape)
    for layer in range(min(depth, labels.size(1) - 1)):
        kept = (places + layer + 1 < ends)[:, : -layer - 1]
        rolled[layer, :, : -layer - 1] = torch.where(kept, labels[:, layer + 1 :], 0)
        masks[layer, :, : -layer - 1] = torch.where(kept, loss_mask[:, layer + 1 :], 0)
    return rolled, masks


def _ends(batch: Mapping[str, Any], num_rows: int, width: int) -> IntArray:
    """Return int64 `[rows, width]`: where the real tokens of each place's segment end."""
    logical, physical = logical_boundaries(batch), physical_boundaries(batch)
    if logical is None or physical is None:
        raise DocumentsError("the batch has no boundaries, so its documents can't be told apart")
    logical, physical = (bounds.reshape(-1, bounds.shape[-1]) for bounds in (logical, physical))
    if not len(logical) == len(physical) == num_rows:
        raise DocumentsError(f"the boundaries are of {len(logical):,} rows, the labels of {num_rows:,}")
    ends = np.empty((num_rows, width), np.int64)
    for row in range(num_rows):
        places, reals = entries(physical[row]), entries(logical[row])
        if len(places) and places[-1] > width:
            raise DocumentsError(
                f"the boundaries of row {row:,} end at {int(places[-1]):,}, but its labels at {width:,}; make the "
                "targets of the whole batch, before it is cut for context parallelism"
            )
        most = min(len(places), len(reals)) - 1
        stops = places[:most] + np.diff(reals[: most + 1])
        owner = np.searchsorted(places[1 : most + 1], np.arange(width), side="right")
        ends[row] = np.append(stops, 0)[np.minimum(owner, most)]
    return ends


# What each pipeline stage gets of a batch: every stage its boundaries.

_FIRST = ("tokens", "position_ids")
_LAST = ("labels", "loss_mask")


def stage_batch(
    batch: Mapping[str, Any], is_first: bool, is_last: bool, has_mtp: bool = False
) -> MegatronBatch:
    """Return what one pipeline stage needs of a batch.

    Attention runs in every stage, so that boundaries, and masks of attention and padding, go to all of them. Releases
    up to 0.4.2 gave them to the first and last stage only: in the stages between documents attended to each other
    (Megatron-Bridge issue 2952, fixed in 0.5.0 by pull request 3926).

    Args:
        batch: of any dialect.
        is_first: whether the stage embeds tokens.
        is_last: whether the stage computes the loss.
        has_mtp: whether the stage holds layers of multi-token prediction, which embed tokens and compute a loss.

    Returns:
        The same keys; None for tokens and positions, and for labels and mask, where the stage doesn't use them.

    Raises:
        DocumentsError: a packed batch without boundaries, or without what this stage needs.

    >>> import torch
    >>> batch = {"tokens": torch.zeros(1, 4), "labels": torch.zeros(1, 4), "loss_mask": torch.ones(1, 4),
    ...          "position_ids": torch.zeros(1, 4), "cu_seqlens_q": torch.tensor([[0, 2, 4]])}
    >>> [name for name, value in stage_batch(batch, is_first=False, is_last=False).items() if value is not None]
    ['cu_seqlens_q']
    """
    mask = batch.get("attention_mask")
    if physical_boundaries(batch) is None and (mask is None or mask.dim() < 4):
        raise DocumentsError(
            "the batch has neither boundaries nor an attention mask: in this stage its documents would attend to "
            "each other; hand every stage the whole batch and let stage_batch take what it needs"
        )
    needed = dict.fromkeys(_FIRST, is_first or has_mtp) | dict.fromkeys(_LAST, is_last or has_mtp)
    missing = [name for name, needs in needed.items() if needs and batch.get(name) is None]
    if missing:
        raise DocumentsError(
            f"this stage needs {', '.join(missing)}, which the batch doesn't have; cut the whole batch for each "
            "stage, not what another stage has left"
        )
    return {name: value if needed.get(name, True) else None for name, value in batch.items()}
