"""Where each sequence lies among the packed bins: `PackingInfo`, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from varlen.arguments import as_choice
from varlen.errors import DocumentsError
from varlen.types import FloatArray, IntArray

PackingAlgo = Literal["fifo", "round-robin", "balanced"]
"""How bins are dealt to data-parallel ranks; the last is varlen's own."""


@dataclass
class PackingInfo:
    """How sequences lie in bins, with the fields of Megatron-LM's class of this name.

    As there it is mutable, and of one rank after `distribute_packed_bins`: its bins are that rank's, its sequences
    still all of them.
    """

    bin_seq_indices: list[list[int]]
    """Of each bin the numbers of its sequences, in their order; empty for an empty bin."""
    seq_starts: dict[int, list[int]]
    """Of each bin where each of its sequences begins, and where the last slot ends; [] for an empty bin."""
    seq_lengths: list[int]
    """Tokens of every sequence."""
    seq_to_bin_idx: list[int | None]
    """The bin of every sequence before bins are dealt to ranks; None where it is in none, having no token."""
    packing_algo: PackingAlgo = "fifo"
    """How bins are, or will be, dealt to ranks."""


def places(packing_info: PackingInfo) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return the sequences of these bins as flat arrays, bin by bin.

    Returns:
        Of each the number, the bin, where it begins in it, and its tokens: int64 `[sequences of these bins]`.
    """
    numbers: list[int] = []
    bins: list[int] = []
    starts: list[int] = []
    for number in range(len(packing_info.bin_seq_indices)):
        here = packing_info.bin_seq_indices[number]
        numbers += here
        bins += [number] * len(here)
        told = packing_info.seq_starts.get(number, [])
        if len(told) not in (len(here), len(here) + 1) and here:
            checked_starts(packing_info, number)
        starts += told[: len(here)]
    known = len(packing_info.seq_lengths)
    wrong = [number for number in numbers if not 0 <= number < known]
    if wrong:
        raise DocumentsError(
            f"a bin holds sequence {wrong[0]:,}, but there are {known:,} lengths in seq_lengths "
            f"({len(wrong):,} of {len(numbers):,} sequences have none)"
        )
    of_all = np.asarray(packing_info.seq_lengths, np.int64)
    placed = np.array(numbers, np.int64)
    return placed, np.array(bins, np.int64), np.array(starts, np.int64), of_all[placed]


def checked_starts(packing_info: PackingInfo, bin_idx: int) -> list[int]:
    """Return where the sequences of a bin begin, and where the last slot ends; [] for an empty bin."""
    here = packing_info.bin_seq_indices[bin_idx]
    starts = packing_info.seq_starts.get(bin_idx, [])
    if here and len(starts) != len(here) + 1:
        raise DocumentsError(
            f"seq_starts of bin {bin_idx:,} must have a start for each of its {len(here):,} sequences and, as end "
            f"sentinel, where the last slot ends; got {len(starts):,} entries"
        )
    return starts if here else []


def runs(starts: IntArray, lengths: IntArray) -> IntArray:
    """Return the numbers from each start on, as many as its length says, one run after the other.

    Args:
        starts: int64 `[runs]`.
        lengths: int64 `[runs]`, at least 0.

    >>> runs(np.array([5, 20]), np.array([3, 2])).tolist()
    [5, 6, 7, 20, 21]
    """
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum(), dtype=np.int64)


def attention_work(packing_info: PackingInfo, bin_size: int, *, padding: bool = True) -> FloatArray:
    """Return how much attention each bin is: the sum of the squares of what it attends to at once.

    All else in a bin costs the same, however full it is: Megatron runs every one at its full width.

    Args:
        packing_info: of all bins, or of a rank's.
        bin_size: tokens of a bin.
        padding: the places behind the last slot attend to each other, as Megatron-LM runs them; False where they are
            cut into short pieces.

    Returns:
        float64 `[num_bins]`.
    """
    _, bins, _, lengths = places(packing_info)
    count = len(packing_info.bin_seq_indices)
    work: FloatArray = np.zeros(count)
    np.add.at(work, bins, lengths.astype(np.float64) ** 2)
    if padding:
        ends = [checked_starts(packing_info, number)[-1:] or [0] for number in range(count)]
        work = work + (bin_size - np.array(ends, np.float64).reshape(-1)) ** 2
    return work


def as_algo(packing_algo: object) -> None:
    """Require one of the ways to deal bins."""
    as_choice(packing_algo, "packing_algo", get_args(PackingAlgo))
