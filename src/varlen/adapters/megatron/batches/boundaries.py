"""Where documents end in a batch, in the keys of each dialect; and the share of each rank and stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from varlen.adapters.megatron.rows import Dialect, near_multiples
from varlen.batch.context_parallel import contiguous_indices, zigzag_indices
from varlen.counts import many
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
    """int32 `[rows, entries]`: positions before each segment; None where these are the same."""
    counts: IntArray
    """int64 `[rows]`: entries of each row of `physical` before the repeats."""
    logical_counts: IntArray
    """int64 `[rows]`: the same of `logical`."""
    max_seqlen: Int32Array
    """int32 `[rows, 1]`, or `[rows]` where it is a constant of the data set."""


def boundary_keys(bounds: Boundaries, dialect: Dialect) -> MegatronBatch:
    """Return the boundaries of rows as one dialect spells them.

    In `"0.4"` and `"0.5"`, `cu_seqlens` counts positions and each row ends in at least one -1: a row without one is
    read as empty there, because the end is looked for with `argmin`. In `"0.6"`, `cu_seqlens_q` counts real tokens
    and rows are made equally long by repeats, which are segments without tokens.
    """
    longest = torch.from_numpy(bounds.max_seqlen)
    if dialect == "0.6":
        logical = torch.from_numpy(bounds.logical)
        keys: MegatronBatch = {"attention_mask": None, "cu_seqlens_q": logical, "cu_seqlens_kv": logical}
        keys |= {"max_seqlen_q": longest, "max_seqlen_kv": longest}
        if bounds.physical is not None:
            physical = torch.from_numpy(bounds.physical)
            keys |= {"cu_seqlens_q_padded": physical, "cu_seqlens_kv_padded": physical}
        return keys
    slots = bounds.logical if bounds.physical is None else bounds.physical
    ended, argmin = _ended(slots, bounds.counts)
    keys = {
        "attention_mask": torch.from_numpy(np.array([1] * len(slots))),
        "cu_seqlens": ended,
        "cu_seqlens_argmin": argmin,
        "max_seqlen": longest,
    }
    if bounds.physical is not None:
        ended, argmin = _ended(bounds.logical, bounds.logical_counts)
        keys |= {"cu_seqlens_unpadded": ended, "cu_seqlens_unpadded_argmin": argmin}
    return keys


def _ended(values: Int32Array, counts: IntArray) -> tuple[Tensor, Tensor]:
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


def physical_boundaries(batch: Mapping[str, Any]) -> Tensor | None:
    """Return the boundaries of a batch's positions, in any dialect, -1 at the end included; None without any."""
    return _first_of(batch, "cu_seqlens_q_padded", "cu_seqlens_q", "cu_seqlens")


def logical_boundaries(batch: Mapping[str, Any]) -> Tensor | None:
    """Return the boundaries of a batch's real tokens, in any dialect; None where it has none."""
    return _first_of(batch, "cu_seqlens_q", "cu_seqlens_unpadded", "cu_seqlens")


def _first_of(batch: Mapping[str, Any], *names: str) -> Tensor | None:
    return next((batch[name] for name in names if batch.get(name) is not None), None)


def entries(bounds: Tensor) -> IntArray:
    """Return the boundaries of one row without what stands behind them: -1, and the batch dimension.

    `bounds`: whole numbers `[entries]` or `[1, entries]`.
    """
    flat: IntArray = bounds.detach().cpu().numpy().reshape(-1).astype(np.int64)
    ends = np.flatnonzero(flat < 0)
    return flat[: ends[0]] if len(ends) else flat


# Targets of multi-token prediction: later tokens of the same document, never of the next.


def mtp_targets(batch: Mapping[str, Any], depth: int) -> tuple[Tensor, Tensor]:
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
            "multi-token prediction needs labels and loss_mask, and the batch lacks one of them; pass the whole batch"
        )
    if labels.dim() != 2 or loss_mask.shape != labels.shape:
        raise DocumentsError(
            f"labels and loss_mask must have one shape, [rows, width]; got {tuple(labels.shape)} and "
            f"{tuple(loss_mask.shape)}"
        )
    ends = torch.from_numpy(_ends(batch, int(labels.size(0)), int(labels.size(1)))).to(labels.device)
    positions = torch.arange(labels.size(1), device=labels.device)
    rolled, masks = labels.new_zeros(depth, *labels.shape), loss_mask.new_zeros(depth, *loss_mask.shape)
    for layer in range(min(depth, labels.size(1) - 1)):
        inside = (positions + layer + 1 < ends)[:, : -layer - 1]
        rolled[layer, :, : -layer - 1] = torch.where(inside, labels[:, layer + 1 :], 0)
        masks[layer, :, : -layer - 1] = torch.where(inside, loss_mask[:, layer + 1 :], 0)
    return rolled, masks


def _ends(batch: Mapping[str, Any], num_rows: int, width: int) -> IntArray:
    """Return int64 `[rows, width]`: where the real tokens of each position's segment end."""
    logical, physical = logical_boundaries(batch), physical_boundaries(batch)
    if logical is None or physical is None:
        raise DocumentsError("the batch has no boundaries: pass its cu_seqlens, which tell documents apart")
    logical, physical = (bounds.reshape(-1, bounds.shape[-1]) for bounds in (logical, physical))
    if not len(logical) == len(physical) == num_rows:
        raise DocumentsError(f"the boundaries are of {len(logical):,} rows, the labels of {num_rows:,}")
    ends = np.empty((num_rows, width), np.int64)
    for row in range(num_rows):
        slots, reals = entries(physical[row]), entries(logical[row])
        if len(slots) and slots[-1] > width:
            raise DocumentsError(
                f"the boundaries of row {row:,} end at {int(slots[-1]):,}, but its labels at {width:,}; make the "
                "targets of the whole batch, before it is cut for context parallelism"
            )
        most = min(len(slots), len(reals)) - 1
        stops = slots[:most] + np.diff(reals[: most + 1])
        owner = np.searchsorted(slots[1 : most + 1], np.arange(width), side="right")
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
    up to 0.4.2 gave them to the first and last stage only: in the other stages, documents attended to each other
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
            "each other; pass the whole batch to every stage, and let stage_batch take what it needs"
        )
    needed = dict.fromkeys(_FIRST, is_first or has_mtp) | dict.fromkeys(_LAST, is_last or has_mtp)
    missing = [name for name, needs in needed.items() if needs and batch.get(name) is None]
    if missing:
        raise DocumentsError(
            f"this stage needs {', '.join(missing)}, which the batch doesn't have; cut the whole batch for each "
            "stage, not what another stage has left"
        )
    return {name: value if needed.get(name, True) else None for name, value in batch.items()}


# One context-parallel rank's share of a batch, and a rank's share of the data as micro-batches of one row.

PartitionMode = Literal["zigzag", "contiguous"]

_TOKENS = ("tokens", "labels", "loss_mask", "position_ids", "input_ids", "padding_mask")
_BOUNDS = ("cu_seqlens", "max_seqlen")


def cp_slice(
    batch: Mapping[str, Any], cp_rank: int, cp_world_size: int, mode: PartitionMode = "zigzag"
) -> MegatronBatch:
    """Return what one context-parallel rank holds of a micro-batch.

    With boundaries, each segment is cut into 2·CP chunks of its positions, of which rank r holds chunks r and
    2·CP - 1 - r, in this order: the positions of `thd_get_partitioned_indices` in Transformer Engine, computed
    on the CPU. Without boundaries the whole row is cut in this way. The -1 behind boundaries is cut off first.

    Args:
        batch: of any dialect, one row where it has boundaries.
        cp_rank: this rank, from 0.
        cp_world_size: ranks that share a row.
        mode: `"zigzag"`, or `"contiguous"` for attention that wants one part of the row on each rank.

    Returns:
        The same keys. Tensors with one value a position (`tokens`, `labels`, `loss_mask`, `position_ids`,
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
        For each row, its entry of every tensor (a view) or list that has one for each row, and all else as it is.

    Raises:
        DocumentsError: a batch in which nothing says how many rows there are.
    """
    num_rows = _num_rows(batch)

    def part(value: Any, row: int) -> Any:
        if isinstance(value, Tensor) and value.dim() and value.size(0) == num_rows:
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
) -> Tensor:
    """Return the positions of a packed row that one context-parallel rank holds, by its padded boundaries.

    Args:
        packed_seq_params: `PackedSeqParams`, this adapter's or Megatron-Core's.
        total_tokens: positions of the row.
        cp_size: ranks that share the row.
        cp_rank: this rank.
        device: of the result.
        cp_group: process group, whose rank and size must be these.

    Returns:
        int64 `[positions of this rank]`.

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
    for name in (*_TOKENS, "cu_seqlens_q", "cu_seqlens"):
        value = batch.get(name)
        if isinstance(value, Tensor):
            return int(value.size(0)) if value.dim() > 1 else 1
    raise DocumentsError(f"the batch has {[*batch]}, but none of {', '.join(_TOKENS)} and no cu_seqlens")


def _width(batch: Mapping[str, Any]) -> int | None:
    """Return the positions of a row, or None where no tensor has one value a position."""
    widths = {name: int(batch[name].size(-1)) for name in _TOKENS if isinstance(batch.get(name), Tensor)}
    if len(set(widths.values())) > 1:
        raise DocumentsError(
            "tensors of one batch have different widths: "
            + ", ".join(f"{name} {width:,}" for name, width in widths.items())
        )
    return next(iter(widths.values()), None)


def _bounds(batch: Mapping[str, Any], width: int | None) -> IntArray:
    """Return the boundaries of the positions of a row; the row itself where the batch has none."""
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
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != width:
        ends = f"from {int(bounds[0]):,} to {int(bounds[-1]):,}" if len(bounds) else "nowhere"
        raise DocumentsError(
            f"boundaries reach {ends}, but the row has {width:,} places, which are all shared by context-parallel "
            "ranks; a batch can be cut once only, and its boundaries must cover the padding"
        )
    return bounds


def _refuse_uneven(bounds: IntArray, cp_world_size: int) -> None:
    if not isinstance(cp_world_size, int) or cp_world_size < 2:
        return
    chunks = 2 * cp_world_size
    sizes = np.diff(bounds)
    uneven = np.flatnonzero(sizes % chunks)
    if len(uneven):
        first, size = int(uneven[0]), int(sizes[uneven[0]])
        raise SettingError(
            f"segment {first:,} takes up {size:,} places, which can't be cut into 2 x {cp_world_size} equal chunks "
            f"for context-parallel ranks; {near_multiples(size, chunks)} would do "
            f"({many(len(uneven), 'segment')} of {len(sizes):,}); pack with pad_seq_to_mult={chunks}, or its least "
            "common multiple with CP x TP where sequence parallelism is on"
        )


def _cut(name: str, value: Any, index: IntArray, width: int | None) -> Any:
    if width is None or not isinstance(value, Tensor) or name.startswith(_BOUNDS):
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
