"""`pack_all_trajectories`: a gathered rollout in, a rank's whole `PackingContext` out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy.typing as npt
import torch

from varlen.adapters.megatron.rl.bins import distribute_packed_bins
from varlen.adapters.megatron.rl.context import PackingContext
from varlen.adapters.megatron.rl.info import PackingAlgo
from varlen.adapters.megatron.rl.packer import SequencePacker
from varlen.adapters.megatron.rl.params import create_packed_seq_params
from varlen.errors import DocumentsError


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
