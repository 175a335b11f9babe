"""Bins over data-parallel ranks, as many on each: in Megatron-LM's two ways, or with even attention work."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from varlen.adapters.megatron.rl.packer import (
    PackedTrajectories,
    PackingAlgo,
    PackingInfo,
    as_algo,
    attention_work,
    checked_starts,
)
from varlen.adapters.megatron.scheduler import dealt
from varlen.arguments import as_count
from varlen.errors import DocumentsError, SettingError

EmptyBins = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, list[dict[str, Any]]]
"""Tokens, positions and loss mask, and of each bin what `PackingInfo` says of it."""


def create_empty_bins(
    num_empty_bins: int,
    bin_size: int,
    packed_trajs: torch.Tensor,
    packed_position_ids: torch.Tensor,
    packed_loss_mask: torch.Tensor,
    tokenizer: Any = None,
    *,
    pad_token: int | None = None,
) -> EmptyBins:
    """Return bins of padding with no loss, as Megatron-LM's function of this name.

    Args:
        num_empty_bins: how many.
        bin_size: tokens of each.
        packed_trajs: bins whose dtype and device they take; so with the next two.
        packed_position_ids: see above.
        packed_loss_mask: see above.
        tokenizer: an object whose `pad` is the token of padding, as there.
        pad_token: the token itself, without a tokenizer.

    Returns:
        Tokens, positions of 0 and loss mask of 0, each `[num_empty_bins, bin_size]`, None where none are asked for;
        and for each bin its empty `bin_seq_indices` and `seq_starts`.

    Raises:
        SettingError: a number out of range, or no token of padding.
    """
    count = as_count(num_empty_bins, "num_empty_bins", least=0)
    width = as_count(bin_size, "bin_size")
    if pad_token is None:
        if tokenizer is None:
            raise SettingError("empty bins are made of padding; pass pad_token, or a tokenizer with `pad`")
        pad_token = int(tokenizer.pad)
    entries: list[dict[str, Any]] = [{"bin_seq_indices": [], "seq_starts": []} for _ in range(count)]
    if not count:
        return None, None, None, entries
    return (
        packed_trajs.new_full((count, width), pad_token),
        packed_position_ids.new_zeros((count, width)),
        packed_loss_mask.new_zeros((count, width)),
        entries,
    )


def distribute_packed_bins(
    packed_trajs: torch.Tensor,
    packed_position_ids: torch.Tensor,
    packed_loss_mask: torch.Tensor,
    packing_info: PackingInfo,
    *,
    dp_rank: int,
    dp_size: int,
    pad_token: int,
    packing_algo: PackingAlgo | None = None,
    padding_work: bool = True,
) -> PackedTrajectories:
    """Return the bins of a data-parallel rank, as many as on every other, as Megatron-LM's function of this name.

    Rank and padding are arguments; there they are looked up globally. A rank gets an empty bin, with no loss, only
    where the number of bins isn't a multiple of the ranks: `SequencePacker(bin_count_multiple=dp_size)` avoids that.

    - "fifo": neighbouring bins to each rank.
    - "round-robin": bin i to rank i mod `dp_size`.
    - "balanced": bins of about equal attention work run at the same time, the heaviest where there was least so far.

    Args:
        packed_trajs: `[num_bins, bin_size]`, all bins.
        packed_position_ids: the same shape.
        packed_loss_mask: the same shape.
        packing_info: of all bins.
        dp_rank: from 0 to `dp_size - 1`.
        dp_size: data-parallel ranks.
        pad_token: token of padding.
        packing_algo: see above; None: what `packing_info` says.
        padding_work: "balanced" counts what padding at the end of a bin attends to; False where it is cut into short
            pieces (`split_padding`).

    Returns:
        Tokens, positions and loss mask of the rank's bins, empty ones last, and a `PackingInfo` of them. Sequences in
        it keep their numbers, and its `seq_to_bin_idx` has those of all bins, as there.

    Raises:
        DocumentsError: shapes that differ.
        SettingError: a rank or an algorithm that there isn't.
    """
    ranks = as_count(dp_size, "dp_size")
    rank = as_count(dp_rank, "dp_rank", least=0, most=ranks - 1)
    algo = packing_info.packing_algo if packing_algo is None else packing_algo
    as_algo(algo)
    parts = _as_bins(packed_trajs, packed_position_ids, packed_loss_mask, packing_info)
    count, width = packed_trajs.shape
    mine = _bins_of(packing_info, algo, rank, ranks, width, padding_work)
    chosen = torch.tensor(mine, dtype=torch.int64, device=packed_trajs.device)
    trajs, positions, mask = (part[chosen.to(part.device)] for part in parts)
    missing = -(-count // ranks) - len(mine)
    empty = create_empty_bins(missing, width, trajs, positions, mask, pad_token=pad_token)
    info = PackingInfo(
        bin_seq_indices=[list(packing_info.bin_seq_indices[number]) for number in mine],
        seq_starts={local: list(checked_starts(packing_info, number)) for local, number in enumerate(mine)},
        seq_lengths=packing_info.seq_lengths,
        seq_to_bin_idx=packing_info.seq_to_bin_idx,
        packing_algo=algo,
    )
    for entry in empty[3]:
        info.seq_starts[len(info.bin_seq_indices)] = entry["seq_starts"]
        info.bin_seq_indices.append(entry["bin_seq_indices"])
    joined = [
        part if more is None else torch.cat([part, more])
        for part, more in zip((trajs, positions, mask), empty[:3])
    ]
    return joined[0], joined[1], joined[2], info


def _as_bins(
    trajs: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, info: PackingInfo
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the three, checked."""
    if trajs.dim() != 2 or trajs.shape[0] != len(info.bin_seq_indices):
        raise DocumentsError(
            f"packed_trajs must be [num_bins, bin_size], and packing_info has {len(info.bin_seq_indices):,} bins; "
            f"got shape {tuple(trajs.shape)}"
        )
    for name, part in (("packed_position_ids", positions), ("packed_loss_mask", mask)):
        if part.shape != trajs.shape:
            raise DocumentsError(
                f"{name} has the shape {tuple(part.shape)}, but packed_trajs {tuple(trajs.shape)}; they must be "
                "the same"
            )
    return trajs, positions, mask


def _bins_of(
    info: PackingInfo, algo: PackingAlgo, rank: int, ranks: int, bin_size: int, padding_work: bool
) -> list[int]:
    """Return the bins of a rank, in the order in which it runs them."""
    count = len(info.bin_seq_indices)
    if algo == "round-robin":
        return list(range(rank, count, ranks))
    if algo == "fifo":
        each, more = divmod(count, ranks)
        first = rank * each + min(rank, more)
        return list(range(first, first + each + (rank < more)))
    missing = -count % ranks
    idle = float(bin_size) ** 2 if padding_work else 0.0
    work = np.concatenate([attention_work(info, bin_size, padding=padding_work), np.full(missing, idle)])
    steps = dealt(work, ranks)
    # Steps in the order of the packing, so that none of them trains on the heaviest alone; what lacks a bin is last.
    steps = steps[np.lexsort((steps.min(axis=1), (steps >= count).any(axis=1)))]
    return [number for number in steps[:, rank].tolist() if number < count]
