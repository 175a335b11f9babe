"""Values of each token between sequences and bins, there and back: log-probs, and what else goes with the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from varlen.adapters.megatron.rl.info import PackingInfo, places, runs
from varlen.arguments import as_count
from varlen.errors import DocumentsError


def pack_inference_logprobs(
    inference_logprobs: Sequence[torch.Tensor | None] | torch.Tensor,
    packing_info: PackingInfo,
    generation_masks: torch.Tensor,
    bin_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay the inference engine's log-probs where the trained model's lie, as Megatron-LM's function of this name.

    The k-th log-prob of a sequence belongs to its k-th generated token, in several turns too, and lies one place
    before it: log-probs say how likely the next token is.

    Args:
        inference_logprobs: of every sequence one for each generated token, in order; None where there are none, and
            fewer where the engine didn't score the last ones, which Megatron adds. Padding among as many as were
            generated isn't told from log-probs: give tensors without it.
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
    numbers, bins, starts, lengths = places(packing_info)
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
        is_told = tokens > 0  # nothing stands before the first token that could predict it
        target = start + tokens[is_told] - 1
        values[row, target] = logprobs.detach()[: tokens.numel()].to("cpu", torch.float32)[is_told]
        known[row, target] = True
    return values, known


def pack_values(
    values: torch.Tensor, packing_info: PackingInfo, bin_size: int, fill: float = 0
) -> torch.Tensor:
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
    numbers, bins, starts, lengths = places(packing_info)
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


def unpack_sequences(packed: torch.Tensor, packing_info: PackingInfo) -> Mapping[int, torch.Tensor]:
    """Return the values of each sequence's tokens.

    Args:
        packed: `[num_bins, bin_size, ...]`: tokens, positions, loss mask, or what a model gives for each token.
        packing_info: of the same bins.

    Returns:
        By number `[length, ...]`, views of `packed`, for the sequences of these bins: with a rank's, its own.

    Raises:
        DocumentsError: another number of bins, or a sequence that ends behind one.

    >>> info = PackingInfo([[1, 0]], {0: [0, 3, 5]}, [2, 3], [0, 0])
    >>> {number: row.tolist() for number, row in unpack_sequences(torch.tensor([[7, 8, 9, 5, 6, 0]]), info).items()}
    {0: [5, 6], 1: [7, 8, 9]}
    """
    return _unpacked(packed, packing_info, 0)


def unpack_logprobs(packed: torch.Tensor, packing_info: PackingInfo) -> Mapping[int, torch.Tensor]:
    """Return the log-probs of each sequence: of its second token to its last, one fewer than tokens.

    Between sequences a bin has log-probs of first tokens given the sequence before; those are left out.

    Args:
        packed: `[num_bins, bin_size - 1]`.
        packing_info: of the same bins.

    Returns:
        By number `[length - 1]`, views of `packed`, for the sequences of these bins.

    Raises:
        DocumentsError: another number of bins, or a sequence that ends behind one.
    """
    return _unpacked(packed, packing_info, 1)


def _unpacked(packed: torch.Tensor, packing_info: PackingInfo, fewer: int) -> dict[int, torch.Tensor]:
    """Return the values of each sequence, so many fewer than its tokens."""
    if packed.dim() < 2 or len(packed) != len(packing_info.bin_seq_indices):
        raise DocumentsError(
            f"packing_info has {len(packing_info.bin_seq_indices):,} bins, but the values have the shape "
            f"{tuple(packed.shape)}"
        )
    numbers, bins, starts, lengths = places(packing_info)
    stops = starts + np.maximum(lengths - fewer, 0)
    if stops.max(initial=0) > packed.shape[1]:
        worst = int(np.argmax(stops))
        raise DocumentsError(
            f"sequence {int(numbers[worst]):,} ends at {int(stops[worst]):,}, behind its bin of {packed.shape[1]:,} "
            "values"
        )
    spans = sorted(zip(numbers.tolist(), bins.tolist(), starts.tolist(), stops.tolist()))
    return {number: packed[row, start:stop] for number, row, start, stop in spans}
