"""`PackingContext`: all that a rank keeps of a packed rollout, and what it feeds of it, bin by bin."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from varlen.adapters.megatron.batches.params import PackedSeqParams
from varlen.adapters.megatron.rl.packer import PackingInfo, SequencePacker, runs, sequences_of
from varlen.arguments import as_count
from varlen.errors import DocumentsError, SettingError


@dataclass
class PackingContext:
    """What training needs of a packed rollout, with the fields of Megatron-LM's class of this name.

    As there it is mutable: log-probs are added when they are known.
    """

    bin_size: int
    packer: SequencePacker | None
    packing_info: PackingInfo
    """Bins of this rank; lengths of all sequences."""
    original_generation_masks: Tensor | None
    """`[sequences, width]`, of all ranks."""
    original_trajs: Tensor | None
    """`[sequences, width]`, of all ranks."""
    packed_trajs: Tensor
    """`[num_bins, bin_size]`, of this rank, as are the next two."""
    packed_position_ids: Tensor
    packed_loss_mask: Tensor
    original_inference_logprobs: Any = None
    """Log-probs of the inference engine, of all ranks; None without."""
    bin_advantages: list[Tensor] = field(default_factory=list)
    """For each bin, the advantages of its sequences."""
    cached_packed_seq_params: list[PackedSeqParams] = field(default_factory=list)
    """For each bin, what attention must know."""
    old_logprobs: Tensor | None = None
    """`[num_bins, bin_size - 1]`; set once known, as are the next two."""
    ref_logprobs: Tensor | None = None
    packed_inference_logprobs: Tensor | None = None


Known: TypeAlias = Tensor | None
Numbers: TypeAlias = list[int]
PackedBin = tuple[
    Tensor, Tensor, Known, Tensor, Tensor, Known, Known, Numbers, Numbers, Numbers, PackedSeqParams
]
"""Tokens, advantages, old log-probs, loss mask from the second token on, positions, log-probs of the reference and of
inference, starts, lengths and numbers of the sequences, and what attention must know."""


def load_packed_data_by_index(
    bin_idx: int, packing_context: PackingContext, logprobs_is_correction: bool = False
) -> PackedBin:
    """Return what one micro-batch takes, in the order of Megatron-LM's function of this name.

    Args:
        bin_idx: a bin of this rank.
        packing_context: of this rank.
        logprobs_is_correction: return the log-probs of inference, which importance sampling takes.

    Returns:
        Rows are `[1, bin_size]`, log-probs and loss mask `[1, bin_size - 1]`; None where there are none yet. For an
        empty bin the lists are empty, and so are the advantages.

    Raises:
        DocumentsError: no such bin, or no boundaries were made for it.
    """
    info = packing_context.packing_info
    count = len(info.bin_seq_indices)
    if not 0 <= bin_idx < count:
        raise DocumentsError(f"there is no bin {bin_idx:,}; this rank has {count:,}")
    if bin_idx >= len(packing_context.cached_packed_seq_params):
        raise DocumentsError(
            f"no cached_packed_seq_params for bin {bin_idx:,}; set them to create_packed_seq_params(packing_context)"
        )
    row = slice(bin_idx, bin_idx + 1)
    numbers = info.bin_seq_indices[bin_idx]
    mask = packing_context.packed_loss_mask
    advantages = packing_context.bin_advantages[bin_idx] if numbers else torch.zeros(0, device=mask.device)

    def of_bin(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[row]

    return (
        packing_context.packed_trajs[row],
        advantages,
        of_bin(packing_context.old_logprobs),
        mask[row, 1:],
        packing_context.packed_position_ids[row],
        of_bin(packing_context.ref_logprobs),
        of_bin(packing_context.packed_inference_logprobs) if logprobs_is_correction else None,
        info.seq_starts[bin_idx],
        [info.seq_lengths[number] for number in numbers],
        numbers,
        packing_context.cached_packed_seq_params[bin_idx],
    )


def get_packing_actual_tokens(packing_context: PackingContext) -> int:
    """Return the real tokens of this rank's bins.

    Args:
        packing_context: of the rank.
    """
    info = packing_context.packing_info
    return sum(info.seq_lengths[number] for numbers in info.bin_seq_indices for number in numbers)


def get_packing_compute_tokens(packing_context: PackingContext) -> int:
    """Return the positions of this rank's bins, padding included.

    Args:
        packing_context: of the rank.
    """
    return packing_context.packed_trajs.numel()


def get_packing_efficiency(packing_context: PackingContext, dp_size: int = 1) -> float:
    """Return the share of the positions of all ranks' bins that real tokens take, from 0 to 1.

    Args:
        packing_context: of one rank.
        dp_size: data-parallel ranks, all with equally many bins; Megatron-LM takes it from its global state.

    Raises:
        SettingError: fewer than one rank.
    """
    room = get_packing_compute_tokens(packing_context) * as_count(dp_size, "dp_size")
    return sum(packing_context.packing_info.seq_lengths) / room if room else 0.0


def get_packing_avg_seq_length(packing_context: PackingContext) -> float:
    """Return the mean tokens of all sequences.

    Args:
        packing_context: of one rank.
    """
    lengths = packing_context.packing_info.seq_lengths
    return sum(lengths) / len(lengths) if lengths else 0.0


def bins_per_step(samples_ratio_per_step: float, num_bins_this_rank: int, dp_size: int) -> int:
    """Return the global batch size in bins, for Megatron's calculator of micro-batches.

    The number that Megatron-LM's `update_microbatch_calculator` sets. There the product is one of floats, rounded up,
    so that 0.07 of 100 bins are 8; here they are 7.

    Args:
        samples_ratio_per_step: share of the rollout that one optimizer step trains on, over 0 and up to 1.
        num_bins_this_rank: bins of a rank, equally many on all.
        dp_size: data-parallel ranks.

    Raises:
        SettingError: a number out of range.

    >>> bins_per_step(1 / 3, 4, 8), bins_per_step(0.07, 100, 1)
    (16, 7)
    """
    bins = as_count(num_bins_this_rank, "num_bins_this_rank")
    ranks = as_count(dp_size, "dp_size")
    if not 0 < samples_ratio_per_step <= 1:
        raise SettingError(f"samples_ratio_per_step must be over 0 and at most 1: {samples_ratio_per_step!r}")
    share = Fraction(samples_ratio_per_step).limit_denominator(1_000_000)
    return max(math.ceil(share * bins), 1) * ranks


# Values of each token between sequences and bins, there and back: log-probs, and what else goes with the tokens.


def pack_inference_logprobs(
    inference_logprobs: Sequence[Tensor | None] | Tensor,
    packing_info: PackingInfo,
    generation_masks: Tensor,
    bin_size: int,
) -> tuple[Tensor, Tensor]:
    """Lay the inference engine's log-probs where the trained model's lie, as Megatron-LM's function of this name.

    The k-th log-prob of a sequence belongs to its k-th generated token, in several turns too, and lies one place
    before it: log-probs say how likely the next token is.

    Args:
        inference_logprobs: for every sequence, one per generated token, in order; None where there are none. If there
            are fewer, the last tokens (such as those that Megatron appended) have none. They must not be padded:
            padding can't be told from log-probs.
        packing_info: of all bins, or of a rank's; sequences of other ranks are left out.
        generation_masks: `[sequences, width]`, 1 at generated tokens.
        bin_size: tokens of a bin.

    Returns:
        float32 `[num_bins, bin_size - 1]` on the host, 0 where there is none, and bool of the same shape, True where
        there is one. Releases before the middle of 2026 return the first alone.

    Raises:
        DocumentsError: masks or log-probs that aren't one for each sequence.

    >>> info = PackingInfo([[0]], {0: [0, 5]}, [5], [0])
    >>> mask = torch.tensor([[0, 1, 0, 1, 1]])
    >>> values, known = pack_inference_logprobs([torch.tensor([-1.0, -2.0])], info, mask, 6)
    >>> values.tolist(), known.int().tolist()
    ([[-1.0, 0.0, -2.0, 0.0, 0.0]], [[1, 0, 1, 0, 0]])
    """
    width = as_count(bin_size, "bin_size", least=2) - 1
    numbers, bins, starts, lengths = sequences_of(packing_info)
    count = len(packing_info.seq_lengths)
    if generation_masks.dim() != 2 or len(generation_masks) != count or len(inference_logprobs) != count:
        raise DocumentsError(
            f"there are {count:,} sequences, but generation_masks of shape {tuple(generation_masks.shape)} and "
            f"{len(inference_logprobs):,} inference_logprobs"
        )
    values = torch.zeros((len(packing_info.bin_seq_indices), width), dtype=torch.float32)
    known = torch.zeros(values.shape, dtype=torch.bool)
    written = generation_masks.to("cpu", torch.bool)
    for number, row, start, length in zip(numbers.tolist(), bins.tolist(), starts.tolist(), lengths.tolist()):
        logprobs = inference_logprobs[number]
        if logprobs is None:
            continue
        tokens = written[number, :length].nonzero().reshape(-1)[: logprobs.numel()]
        is_predicted = tokens > 0  # nothing stands before the first token that could predict it
        target = start + tokens[is_predicted] - 1
        values[row, target] = logprobs.detach()[: tokens.numel()].to("cpu", torch.float32)[is_predicted]
        known[row, target] = True
    return values, known


def pack_values(values: Tensor, packing_info: PackingInfo, bin_size: int, fill: float = 0) -> Tensor:
    """Lay a value of each token into the bins: advantages by token, rewards, the turn that it belongs to.

    Args:
        values: `[sequences, width, ...]`, of every sequence; those of other ranks are left out.
        packing_info: of all bins, or of a rank's.
        bin_size: tokens of a bin.
        fill: value at padding.

    Returns:
        `[num_bins, bin_size, ...]`, in their dtype and on their device.

    Raises:
        DocumentsError: values that aren't one row for each sequence, wide enough.
    """
    width = as_count(bin_size, "bin_size")
    numbers, bins, starts, lengths = sequences_of(packing_info)
    longest = int(lengths.max(initial=0))
    if values.dim() < 2 or len(values) != len(packing_info.seq_lengths) or values.shape[1] < longest:
        raise DocumentsError(
            f"values must be [sequences, width], {len(packing_info.seq_lengths):,} and at least {longest:,}; got "
            f"shape {tuple(values.shape)}"
        )
    packed = values.new_full((len(packing_info.bin_seq_indices), width, *values.shape[2:]), fill)
    source = torch.from_numpy(runs(numbers * values.shape[1], lengths)).to(values.device)
    target = torch.from_numpy(runs(bins * width + starts, lengths)).to(values.device)
    packed.flatten(0, 1)[target] = values.flatten(0, 1)[source]
    return packed


def unpack_sequences(packed: Tensor, packing_info: PackingInfo) -> Mapping[int, Tensor]:
    """Return the values of each sequence's tokens.

    Args:
        packed: `[num_bins, bin_size, ...]`: tokens, positions, loss mask, or what a model gives for each token.
        packing_info: of the same bins.

    Returns:
        By number `[length, ...]`, views of `packed`, for the sequences of these bins: with a rank's, its own.

    Raises:
        DocumentsError: another number of bins, or a sequence that ends beyond one.

    >>> info = PackingInfo([[1, 0]], {0: [0, 3, 5]}, [2, 3], [0, 0])
    >>> {number: row.tolist() for number, row in unpack_sequences(torch.tensor([[7, 8, 9, 5, 6, 0]]), info).items()}
    {0: [5, 6], 1: [7, 8, 9]}
    """
    return _unpacked(packed, packing_info, 0)


def unpack_logprobs(packed: Tensor, packing_info: PackingInfo) -> Mapping[int, Tensor]:
    """Return the log-probs of each sequence: of its second token to its last, one fewer than tokens.

    Between sequences a bin has log-probs of first tokens given the sequence before; those are left out.

    Args:
        packed: `[num_bins, bin_size - 1]`.
        packing_info: of the same bins.

    Returns:
        By number `[length - 1]`, views of `packed`, for the sequences of these bins.

    Raises:
        DocumentsError: another number of bins, or a sequence that ends beyond one.
    """
    return _unpacked(packed, packing_info, 1)


def _unpacked(packed: Tensor, packing_info: PackingInfo, fewer: int) -> dict[int, Tensor]:
    """Return the values of each sequence, so many fewer than its tokens."""
    if packed.dim() < 2 or len(packed) != len(packing_info.bin_seq_indices):
        raise DocumentsError(
            f"packing_info has {len(packing_info.bin_seq_indices):,} bins, but the values have the shape "
            f"{tuple(packed.shape)}; pass the packing_info of the same bins"
        )
    numbers, bins, starts, lengths = sequences_of(packing_info)
    stops = starts + np.maximum(lengths - fewer, 0)
    if stops.max(initial=0) > packed.shape[1]:
        worst = int(np.argmax(stops))
        raise DocumentsError(
            f"sequence {int(numbers[worst]):,} ends at {int(stops[worst]):,}, beyond its bin of {packed.shape[1]:,} "
            "values; pass the packing_info of the same bins"
        )
    spans = sorted(zip(numbers.tolist(), bins.tolist(), starts.tolist(), stops.tolist()))
    return {number: packed[row, start:stop] for number, row, start, stop in spans}
