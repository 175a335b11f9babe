"""Where documents end in a batch, in the keys of each dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from varlen.adapters.megatron.dialects import Dialect
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
