"""What attention is told about each bin: boundaries of one size, whatever the bin holds, for CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from varlen.adapters.megatron.batches.params import PackedSeqParams
from varlen.adapters.megatron.rl.bins import distribute_packed_bins
from varlen.adapters.megatron.rl.context import PackingContext
from varlen.adapters.megatron.rl.packer import PackingAlgo, PackingInfo, SequencePacker, checked_starts
from varlen.adapters.peers import raises_too
from varlen.arguments import as_count
from varlen.errors import DocumentsError, SettingError


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
    """Return what attention must know about a bin, as Megatron-LM's function of this name.

    Boundaries have `max_sequences_per_bin + 2` entries, the last ones the same, and the longest segment is always the
    bin: a CUDA graph fits every bin. An empty bin gets those of `get_default_packed_seq_params`; there it is None,
    and what is put in its place lacks the padded boundaries that other bins have under context parallelism.

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
    if not here:
        return get_default_packed_seq_params(
            bin_size, max_sequences_per_bin, device, seq_length_multiple, split_padding=split_padding
        )
    lengths = [packing_info.seq_lengths[number] for number in here]
    starts = checked_starts(packing_info, bin_idx)
    return _params(
        starts,
        lengths,
        f"bin {bin_idx:,}",
        bin_size,
        max_sequences_per_bin,
        device,
        seq_length_multiple,
        split_padding,
    )


def get_default_packed_seq_params(
    seq_length: int,
    max_sequences_per_bin: int,
    device: torch.device | str | None = None,
    seq_length_multiple: int = 1,
    *,
    split_padding: bool = False,
) -> PackedSeqParams:
    """Return the same of a row that is one sequence, or an empty bin, as Megatron-LM's function of this name.

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
    return _params(
        [0], [], "an empty bin", seq_length, max_sequences_per_bin, device, seq_length_multiple, split_padding
    )


@raises_too(AssertionError)
def create_packed_seq_params(
    packing_context: PackingContext, *, split_padding: bool = False
) -> list[PackedSeqParams]:
    """Return what attention must know about each bin of a rank, as Megatron-LM's function of this name.

    Args:
        packing_context: of the rank.
        split_padding: see `create_packed_seq_params_for_bin`.

    Raises:
        SettingError: it has no packer, whose settings are needed.
    """
    packer = packing_context.packer
    if packer is None:
        raise SettingError("this PackingContext has no packer, whose max_sequences_per_bin is needed")
    return [
        create_packed_seq_params_for_bin(
            packing_context.packing_info,
            number,
            packing_context.bin_size,
            packer.max_sequences_per_bin,
            packing_context.packed_trajs.device,
            packer.seq_length_multiple,
            split_padding=split_padding,
        )
        for number in range(len(packing_context.packing_info.bin_seq_indices))
    ]


def _params(
    starts: list[int],
    lengths: list[int],
    name: str,
    bin_size: int,
    most: int,
    device: torch.device | str | None,
    multiple: int,
    split_padding: bool,
) -> PackedSeqParams:
    """Return the boundaries of slots, padding behind them, and as many entries as there always are."""
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
            f"{name} has sequences of {lengths} tokens at {bounds.tolist()}, which don't lie one behind the other in "
            f"its {width:,}, rounded up to multiples of {multiple:,}"
        )
    room = most + 1 - len(lengths)  # segments that padding may be
    padding = _cut(width - int(bounds[-1]), room if split_padding else 1, multiple)
    entries = most + 2
    places = _padded(np.concatenate([bounds, bounds[-1] + np.cumsum(padding)]), entries)
    reals = _padded(np.cumsum([0, *lengths, *padding]), entries)
    cu_seqlens = torch.from_numpy(reals).to(device)
    padded = torch.from_numpy(places).to(device) if multiple > 1 else None
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=width,
        max_seqlen_kv=width,
        total_tokens=width,
        pad_between_seqs=multiple > 1,
    )


def _cut(length: int, pieces: int, multiple: int) -> list[int]:
    """Cut padding into pieces of about one length, each a multiple."""
    units = length // multiple
    pieces = min(pieces, units)
    return [
        units * (number + 1) // pieces * multiple - units * number // pieces * multiple
        for number in range(pieces)
    ]


def _padded(bounds: Iterable[int], entries: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Repeat the last boundary until there are as many as wanted."""
    known = np.array(list(bounds), np.int32)
    filled = np.full(entries, known[-1], np.int32)
    filled[: known.size] = known
    return filled


# `pack_all_trajectories`: a gathered rollout in, a rank's whole `PackingContext` out.


def pack_all_trajectories(
    trajs: torch.Tensor,
    generation_masks: torch.Tensor,
    inference_logprobs: torch.Tensor | Sequence[torch.Tensor | None] | None,
    global_advantages: torch.Tensor,
    packer: SequencePacker,
    packing_algo: PackingAlgo = "balanced",
    *,
    dp_rank: int,
    dp_size: int,
    lengths: npt.ArrayLike | None = None,
    split_padding: bool = True,
) -> PackingContext:
    """Pack a rollout and return what one rank trains on, as Megatron-LM's function of this name.

    It packs what is gathered already: Megatron-LM's gathers it too, which takes its process groups.

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
        SettingError: a rank or an algorithm that there isn't.
    """
    if len(global_advantages) != len(trajs):
        raise DocumentsError(
            f"there are {len(trajs):,} trajectories, but {len(global_advantages):,} global_advantages"
        )
    all_rows, all_positions, all_masks, info = packer.pack_sequences(trajs, generation_masks, lengths=lengths)
    rows, positions, loss_mask, mine = distribute_packed_bins(
        all_rows,
        all_positions,
        all_masks,
        info,
        dp_rank=dp_rank,
        dp_size=dp_size,
        pad_token=packer.pad_token,
        packing_algo=packing_algo,
        padding_work=not split_padding,
    )
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
        bin_advantages=[
            global_advantages[torch.tensor(numbers, dtype=torch.int64, device=global_advantages.device)]
            for numbers in mine.bin_seq_indices
        ],
    )
    context.cached_packed_seq_params = create_packed_seq_params(context, split_padding=split_padding)
    return context
