"""One context-parallel rank's share of a batch, and a rank's share of the data as micro-batches of one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from varlen.adapters.megatron.batches.boundaries import MegatronBatch, entries, physical_boundaries
from varlen.batch.context_parallel import contiguous_indices, zigzag_indices
from varlen.counts import many
from varlen.errors import DocumentsError, SettingError
from varlen.types import IntArray

PartitionMode = Literal["zigzag", "contiguous"]

_TOKENS = ("tokens", "labels", "loss_mask", "position_ids", "input_ids", "padding_mask")
_BOUNDS = ("cu_seqlens", "max_seqlen")


def cp_slice(
    batch: Mapping[str, Any], cp_rank: int, cp_world_size: int, mode: PartitionMode = "zigzag"
) -> MegatronBatch:
    """Return what one context-parallel rank holds of a micro-batch.

    With boundaries, each segment is cut into 2·CP chunks of its places, of which rank r holds chunks r and
    2·CP - 1 - r, in this order: the places that `thd_get_partitioned_indices` of Transformer Engine gives, computed
    on the CPU. Without boundaries the whole row is cut in this way. The -1 behind boundaries is cut off first.

    Args:
        batch: of any dialect, one row where it has boundaries.
        cp_rank: this rank, from 0.
        cp_world_size: ranks that share a row.
        mode: `"zigzag"`, or `"contiguous"` for attention that wants one part of the row on each rank.

    Returns:
        The same keys. Tensors with one value a place (`tokens`, `labels`, `loss_mask`, `position_ids`,
        `padding_mask` and any other of this width) are cut; of an attention mask the rows of queries. Boundaries stay
        those of the whole row, which attention takes. `total_tokens`, if there, is the rank's.
        `cp_partition_mode` is set where it is not zigzag.

    Raises:
        SettingError: a rank out of range, an unknown mode, or a segment that 2·CP doesn't divide.
        DocumentsError: several rows with boundaries, boundaries that end elsewhere than the row, or tensors of
            different widths.

    >>> batch = {"tokens": torch.arange(12).reshape(1, 12), "cu_seqlens_q": torch.tensor([[0, 8, 12]])}
    >>> cp_slice(batch, cp_rank=0, cp_world_size=2)["tokens"].tolist()
    [[0, 1, 6, 7, 8, 11]]
    """
    if mode not in ("zigzag", "contiguous"):
        raise SettingError(f'mode must be "zigzag" or "contiguous", got {mode!r}')
    width = _width(batch)
    bounds = _bounds(batch, width)
    if mode == "contiguous":
        index = contiguous_indices(bounds, cp_rank, cp_world_size)
    else:
        _refuse_uneven(bounds, cp_world_size)
        index = zigzag_indices(bounds, cp_rank, cp_world_size)
    mine = {name: _cut(name, value, index, width) for name, value in batch.items()}
    if mine.get("total_tokens") is not None:
        mine["total_tokens"] = len(index)
    if mode != "zigzag":
        mine["cp_partition_mode"] = mode
    return mine


def split_microbatches(batch: Mapping[str, Any]) -> list[MegatronBatch]:
    """Return the rows of a batch as micro-batches of one row each, in order.

    Args:
        batch: of any dialect.

    Returns:
        One mapping a row: views of the tensors with as many rows, one entry of lists with as many, and all else as it
        is.

    Raises:
        DocumentsError: a batch in which nothing says how many rows there are.
    """
    num_rows = _num_rows(batch)

    def part(value: Any, row: int) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() and value.size(0) == num_rows:
            return value[row : row + 1]
        return value[row : row + 1] if isinstance(value, list) and len(value) == num_rows else value

    return [{name: part(value, row) for name, value in batch.items()} for row in range(num_rows)]


def get_packed_seq_cp_partition_indices(
    packed_seq_params: Any,
    *,
    total_tokens: int,
    cp_size: int,
    cp_rank: int,
    device: torch.device | str | None = None,
    cp_group: Any = None,
) -> torch.Tensor:
    """Return the places of a packed row that one context-parallel rank holds, by its padded boundaries.

    Args:
        packed_seq_params: `PackedSeqParams`, this adapter's or Megatron-Core's.
        total_tokens: places of the row.
        cp_size: ranks that share the row.
        cp_rank: this rank.
        device: of the result.
        cp_group: process group, whose rank and size must be these.

    Returns:
        int64 `[places of this rank]`.

    Raises:
        SettingError: a group of another rank or size, or a segment that 2·CP doesn't divide.
        DocumentsError: boundaries that end elsewhere than the row.
    """
    if cp_group is not None and (cp_group.rank(), cp_group.size()) != (cp_rank, cp_size):
        raise SettingError(
            f"cp_group has rank {cp_group.rank()} and size {cp_group.size()}, but cp_rank={cp_rank} and "
            f"cp_size={cp_size} were given"
        )
    padded = packed_seq_params.cu_seqlens_q_padded
    physical = packed_seq_params.cu_seqlens_q if padded is None else padded
    bounds = _ending_at(entries(physical), total_tokens)
    _refuse_uneven(bounds, cp_size)
    return torch.from_numpy(zigzag_indices(bounds, cp_rank, cp_size)).to(device or physical.device)


def _num_rows(batch: Mapping[str, Any]) -> int:
    """Return the rows of a batch."""
    for name in (*_TOKENS, "cu_seqlens_q", "cu_seqlens"):
        value = batch.get(name)
        if isinstance(value, torch.Tensor):
            return int(value.size(0)) if value.dim() > 1 else 1
    raise DocumentsError(f"the batch has none of {', '.join(_TOKENS)} and no boundaries")


def _width(batch: Mapping[str, Any]) -> int | None:
    """Return the places of a row, or None where no tensor has one value a place."""
    widths = {
        name: int(batch[name].size(-1)) for name in _TOKENS if isinstance(batch.get(name), torch.Tensor)
    }
    if len(set(widths.values())) > 1:
        raise DocumentsError(
            "tensors of one batch have different widths: "
            + ", ".join(f"{name} {width:,}" for name, width in widths.items())
        )
    return next(iter(widths.values()), None)


def _bounds(batch: Mapping[str, Any], width: int | None) -> IntArray:
    """Return the boundaries of the places of a row; the row itself where the batch has none."""
    found = physical_boundaries(batch)
    if found is None:
        return np.array([0, width or 0])
    if (found.dim() > 1 and found.size(0) != 1) or _num_rows(batch) != 1:
        raise DocumentsError(
            f"Packed THD batches expect micro-batch size 1: this one has {_num_rows(batch):,} rows; pass "
            "each of split_microbatches(batch)"
        )
    bounds = entries(found)
    return bounds if width is None else _ending_at(bounds, width)


def _ending_at(bounds: IntArray, width: int) -> IntArray:
    """Return boundaries that begin with 0 and end with the row."""
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != width:
        ends = f"from {int(bounds[0]):,} to {int(bounds[-1]):,}" if len(bounds) else "nowhere"
        raise DocumentsError(
            f"boundaries reach {ends}, but the row has {width:,} places, which are all shared by context-parallel "
            "ranks; a batch can be cut once only, and its boundaries must cover the padding"
        )
    return bounds


def _refuse_uneven(bounds: IntArray, cp_world_size: int) -> None:
    """Refuse segments that can't be shared evenly."""
    if not isinstance(cp_world_size, int) or cp_world_size < 2:
        return
    chunks = 2 * cp_world_size
    sizes = np.diff(bounds)
    uneven = np.flatnonzero(sizes % chunks)
    if len(uneven):
        first, size = int(uneven[0]), int(sizes[uneven[0]])
        below = size // chunks * chunks
        raise SettingError(
            f"segment {first:,} takes up {size:,} places, which 2 x {cp_world_size} context-parallel ranks can't "
            f"share evenly; {' or '.join(f'{near:,}' for near in (below, below + chunks) if near)} would do "
            f"({many(len(uneven), 'segment')} of {len(sizes):,}); pack with pad_seq_to_mult={chunks}, or its least "
            "common multiple with CP x TP where sequence parallelism is on"
        )


def _cut(name: str, value: Any, index: IntArray, width: int | None) -> Any:
    """Return a rank's part of one value of a batch."""
    if width is None or not isinstance(value, torch.Tensor) or name.startswith(_BOUNDS):
        return value
    if name == "attention_mask":
        dimension = 2 if value.dim() == 4 and value.size(2) == width else None
    elif name in _TOKENS and value.dim() == 1:
        dimension = 0
    elif value.dim() > 1 and value.size(1) == width:
        dimension = 1
    else:
        dimension = value.dim() - 1 if value.dim() > 2 and value.size(-1) == width else None
    if dimension is None:
        return value
    return value.index_select(dimension, torch.from_numpy(index).to(value.device))
