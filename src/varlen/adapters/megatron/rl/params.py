"""From a gathered rollout to each rank's bins: boundaries of one size for CUDA graphs, and equal shares of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from varlen.adapters.megatron.batches.params import PackedSeqParams
from varlen.adapters.megatron.rl.context import PackingContext
from varlen.adapters.megatron.rl.packer import (
    PackedTrajectories,
    PackingAlgo,
    PackingInfo,
    SequencePacker,
    attention_work,
    checked_starts,
)
from varlen.adapters.megatron.scheduler import dealt
from varlen.adapters.peers import raises_too
from varlen.arguments import as_choice, as_count
from varlen.errors import DocumentsError, SettingError
from varlen.types import IntArray


@raises_too(AssertionError)
def create_packed_seq_params_for_bin(
    packing_info: PackingInfo,
    bin_idx: int,
    bin_size: int,
    max_sequences_per_bin: int,
    device: torch.device | str | None = None,
    seq_length_multiple: int = 1,
    *,
    split_padding: bool = False,
) -> PackedSeqParams:
    """Return a bin's PackedSeqParams, like Megatron-LM's function of the same name.

    Boundaries have `max_sequences_per_bin + 2` entries, filled up with the last one, and `max_seqlen` is always
    `bin_size`, so that one CUDA graph fits every bin. An empty bin gets those of `get_default_packed_seq_params`;
    Megatron-LM's is None, and its replacement lacks the padded boundaries of other bins under context parallelism.

    Args:
        packing_info: of all bins, or of a rank's.
        bin_idx: one of them.
        bin_size: tokens of a bin.
        max_sequences_per_bin: most sequences of a bin.
        device: of the boundaries.
        seq_length_multiple: what slots are rounded up to: 2·CP for context parallelism.
        split_padding: cut the padding at the end of a bin into as many segments as there are entries for. In
            Megatron-LM it is one, which attends to itself: the emptier the bin, the more it costs.

    Returns:
        With `cu_seqlens_q_padded` where `seq_length_multiple` is over 1: where slots begin and end; `cu_seqlens_q`
        then counts real tokens. Else `cu_seqlens_q` alone.

    Raises:
        DocumentsError: no such bin; more sequences in it than its maximum; slots that aren't multiples, overlap or
            leave the bin; starts that aren't one for each sequence and one more.
        SettingError: a setting out of range, or `bin_size` no multiple.

    >>> info = PackingInfo([[1, 0]], {0: [0, 8, 16]}, [5, 7], [0, 0])
    >>> params = create_packed_seq_params_for_bin(info, 0, 24, 4, seq_length_multiple=4)
    >>> params.cu_seqlens_q.tolist(), params.cu_seqlens_q_padded.tolist()
    ([0, 7, 12, 20, 20, 20], [0, 8, 16, 24, 24, 24])
    """
    count = len(packing_info.bin_seq_indices)
    if not 0 <= bin_idx < count:
        raise DocumentsError(f"there is no bin {bin_idx:,}; packing_info has {count:,}")
    here = packing_info.bin_seq_indices[bin_idx]
    lengths = [packing_info.seq_lengths[number] for number in here]
    starts, name = (
        (checked_starts(packing_info, bin_idx), f"bin {bin_idx:,}") if here else ([0], "an empty bin")
    )
    sizes = bin_size, max_sequences_per_bin, seq_length_multiple
    return _params(starts, lengths, name, *sizes, device, split_padding)


def get_default_packed_seq_params(
    seq_length: int,
    max_sequences_per_bin: int,
    device: torch.device | str | None = None,
    seq_length_multiple: int = 1,
    *,
    split_padding: bool = False,
) -> PackedSeqParams:
    """Return the PackedSeqParams of one sequence or of an empty bin, like Megatron-LM's function of the same name.

    It has the fields that `create_packed_seq_params_for_bin` gives for these settings, of the same shapes.

    Args:
        seq_length: tokens of the row.
        max_sequences_per_bin: most sequences of a bin.
        device: of the boundaries.
        seq_length_multiple: what slots are rounded up to.
        split_padding: the row is padding: cut it into as many segments as there are entries for.

    Raises:
        SettingError: a setting out of range, or `seq_length` no multiple.

    >>> get_default_packed_seq_params(16, 4).cu_seqlens_q.tolist()
    [0, 16, 16, 16, 16, 16]
    """
    sizes = seq_length, max_sequences_per_bin, seq_length_multiple
    return _params([0], [], "an empty bin", *sizes, device, split_padding)


@raises_too(AssertionError)
def create_packed_seq_params(
    packing_context: PackingContext, *, split_padding: bool = False
) -> list[PackedSeqParams]:
    """Return the PackedSeqParams of each bin of a rank, like Megatron-LM's function of the same name.

    Args:
        packing_context: of the rank.
        split_padding: see `create_packed_seq_params_for_bin`.

    Raises:
        SettingError: it has no packer, whose settings are needed.
    """
    packer = packing_context.packer
    if packer is None:
        raise SettingError("this PackingContext has no packer, whose max_sequences_per_bin is needed")
    info, device = packing_context.packing_info, packing_context.packed_trajs.device
    sizes = packing_context.bin_size, packer.max_sequences_per_bin, device, packer.seq_length_multiple
    return [
        create_packed_seq_params_for_bin(info, number, *sizes, split_padding=split_padding)
        for number in range(len(info.bin_seq_indices))
    ]


def _params(
    starts: list[int],
    lengths: list[int],
    name: str,
    bin_size: int,
    most: int,
    multiple: int,
    device: torch.device | str | None,
    split_padding: bool,
) -> PackedSeqParams:
    """Return the boundaries of slots and of the padding after them, in a constant number of entries."""
    width, multiple = as_count(bin_size, "bin_size"), as_count(multiple, "seq_length_multiple")
    most = as_count(most, "max_sequences_per_bin")
    if width % multiple:
        raise SettingError(f"bin_size {width:,} must be divisible by seq_length_multiple {multiple:,}")
    if len(lengths) > most:
        raise DocumentsError(
            f"{name} holds {len(lengths):,} sequences, over the max_sequences_per_bin of {most:,}, and boundaries "
            "have one size; give the packer's own maximum"
        )
    bounds = np.array(starts, np.int64)
    slots = np.diff(bounds)
    if multiple > 1 and (slots % multiple).any():
        raise DocumentsError(
            f"{name} has slots of {slots.tolist()} tokens, which must each be divisible by seq_length_multiple "
            f"{multiple:,}, or context parallelism can't cut them; pack with that multiple"
        )
    # Without a multiple the boundaries of slots are those of sequences.
    if (
        bounds[0]
        or bounds[-1] > width
        or (slots < lengths).any()
        or (multiple == 1 and (slots > lengths).any())
    ):
        raise DocumentsError(
            f"{name} has sequences of {lengths} tokens at {bounds.tolist()}; they must follow one another from 0 "
            f"within its {width:,} tokens, in slots rounded up to multiples of {multiple:,}"
        )
    room = most + 1 - len(lengths)  # segments that padding may be
    padding = _cut(width - int(bounds[-1]), room if split_padding else 1, multiple)
    entries = most + 2
    ends = np.concatenate([bounds, bounds[-1] + np.cumsum(padding)])
    reals = np.cumsum([0, *lengths, *padding])
    cu_seqlens, slot_bounds = (
        torch.from_numpy(np.pad(known, (0, entries - len(known)), "edge").astype(np.int32)).to(device)
        for known in (reals, ends)
    )
    padded = slot_bounds if multiple > 1 else None
    given = cu_seqlens, cu_seqlens, padded, padded
    return PackedSeqParams("thd", *given, width, width, total_tokens=width, pad_between_seqs=multiple > 1)


def _cut(length: int, pieces: int, multiple: int) -> IntArray:
    """Cut padding into pieces of about one length, each a multiple."""
    units = length // multiple
    pieces = max(min(pieces, units), 1)
    return np.diff(np.arange(pieces + 1) * units // pieces) * multiple


# `pack_all_trajectories`: a gathered rollout in, a rank's whole `PackingContext` out.


def pack_all_trajectories(
    trajs: Tensor,
    generation_masks: Tensor,
    inference_logprobs: Tensor | Sequence[Tensor | None] | None,
    global_advantages: Tensor,
    packer: SequencePacker,
    packing_algo: PackingAlgo = "balanced",
    *,
    dp_rank: int,
    dp_size: int,
    lengths: npt.ArrayLike | None = None,
    split_padding: bool = True,
) -> PackingContext:
    """Pack a rollout and return what one rank trains on, like Megatron-LM's function of the same name.

    The rollout must be gathered already; Megatron-LM's function also gathers it, through its process groups.

    Args:
        trajs: `[sequences, width]`, of all ranks, the same on each.
        generation_masks: `[sequences, width]`, 1 at tokens that the policy wrote.
        inference_logprobs: of every sequence, or None.
        global_advantages: `[sequences]`.
        packer: how to pack; `bin_count_multiple=dp_size` leaves no bin empty.
        packing_algo: how bins are dealt to ranks.
        dp_rank: from 0 to `dp_size - 1`.
        dp_size: data-parallel ranks.
        lengths: `[sequences]` tokens of each.
        split_padding: see `create_packed_seq_params_for_bin`.

    Raises:
        DocumentsError: shapes that differ.
        LengthsError: lengths that aren't whole numbers from 0 to width.
        OverlongDocumentError: a sequence is longer than a bin.
        SettingError: `dp_rank` out of range, or an unknown algorithm.
    """
    if len(global_advantages) != len(trajs):
        raise DocumentsError(
            f"there are {len(trajs):,} trajectories, but {len(global_advantages):,} global_advantages"
        )
    packed = packer.pack_sequences(trajs, generation_masks, lengths=lengths)
    rows, positions, loss_mask, mine = distribute_packed_bins(
        *packed,
        dp_rank=dp_rank,
        dp_size=dp_size,
        pad_token=packer.pad_token,
        packing_algo=packing_algo,
        padding_work=not split_padding,
    )
    where, numbers = global_advantages.device, mine.bin_seq_indices
    context = PackingContext(
        bin_size=packer.bin_size,
        packer=packer,
        packing_info=mine,
        original_generation_masks=generation_masks,
        original_trajs=trajs,
        packed_trajs=rows,
        packed_position_ids=positions,
        packed_loss_mask=loss_mask,
        original_inference_logprobs=inference_logprobs,
        bin_advantages=[global_advantages[torch.tensor(n, dtype=torch.int64, device=where)] for n in numbers],
    )
    context.cached_packed_seq_params = create_packed_seq_params(context, split_padding=split_padding)
    return context


# Bins over data-parallel ranks, as many on each: in Megatron-LM's two ways, or with even attention work.

EmptyBins = tuple[Tensor | None, Tensor | None, Tensor | None, list[dict[str, Any]]]
"""Tokens, positions and loss mask, and of each bin what `PackingInfo` has of it."""


def create_empty_bins(
    num_empty_bins: int,
    bin_size: int,
    packed_trajs: Tensor,
    packed_position_ids: Tensor,
    packed_loss_mask: Tensor,
    tokenizer: Any = None,
    *,
    pad_token: int | None = None,
) -> EmptyBins:
    """Return bins of padding with no loss, like Megatron-LM's function of the same name.

    Args:
        num_empty_bins: how many.
        bin_size: tokens of each.
        packed_trajs, packed_position_ids, packed_loss_mask: bins whose dtype and device they take.
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
    packed_trajs: Tensor,
    packed_position_ids: Tensor,
    packed_loss_mask: Tensor,
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
        packed_trajs, packed_position_ids, packed_loss_mask: `[num_bins, bin_size]`, all bins.
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
        SettingError: `dp_rank` out of range, or an unknown algorithm.
    """
    ranks = as_count(dp_size, "dp_size")
    rank = as_count(dp_rank, "dp_rank", least=0, most=ranks - 1)
    algo = packing_info.packing_algo if packing_algo is None else packing_algo
    as_choice(algo, "packing_algo", get_args(PackingAlgo))
    parts = packed_trajs, packed_position_ids, packed_loss_mask
    _check_bins(*parts, packing_info)
    count, width = packed_trajs.shape
    mine = _bins_of(packing_info, algo, rank, ranks, width, padding_work)
    chosen = torch.tensor(mine, dtype=torch.int64, device=packed_trajs.device)
    missing = -(-count // ranks) - len(mine)
    rows, positions, mask = (
        torch.nn.functional.pad(part[chosen.to(part.device)], (0, 0, 0, missing), value=fill)
        for part, fill in zip(parts, (pad_token, 0, 0))
    )
    starts = [list(checked_starts(packing_info, number)) for number in mine] + [[] for _ in range(missing)]
    info = PackingInfo(
        bin_seq_indices=[list(packing_info.bin_seq_indices[number]) for number in mine]
        + [[] for _ in range(missing)],
        seq_starts=dict(enumerate(starts)),
        seq_lengths=packing_info.seq_lengths,
        seq_to_bin_idx=packing_info.seq_to_bin_idx,
        packing_algo=algo,
    )
    return rows, positions, mask, info


def _check_bins(trajs: Tensor, positions: Tensor, mask: Tensor, info: PackingInfo) -> None:
    if trajs.dim() != 2 or trajs.shape[0] != len(info.bin_seq_indices):
        raise DocumentsError(
            f"packed_trajs must be [num_bins, bin_size], and packing_info has {len(info.bin_seq_indices):,} bins; "
            f"got shape {tuple(trajs.shape)}"
        )
    for name, part in (("packed_position_ids", positions), ("packed_loss_mask", mask)):
        if part.shape != trajs.shape:
            raise DocumentsError(
                f"{name} has the shape {tuple(part.shape)}, but packed_trajs {tuple(trajs.shape)}; they must agree"
            )


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
