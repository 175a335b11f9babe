"""`SequencePacker`: the trajectories of a rollout in, bins of tokens, positions and loss mask out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from varlen.adapters.megatron.batches.in_batch import check_shapes, lengths_of
from varlen.adapters.megatron.rows import near_multiples
from varlen.adapters.peers import raises_too
from varlen.arguments import as_choice, as_count
from varlen.errors import DocumentsError, LengthsError, SettingError
from varlen.pack.lengths import as_lengths
from varlen.pack.pieces import check_fit
from varlen.plan.partition import even_ways, halved, packed
from varlen.types import FloatArray, Int32Array, IntArray

# Where each sequence lies among the packed bins: `PackingInfo`, and what follows from it.

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


def sequences_of(packing_info: PackingInfo) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return the sequences of these bins as flat arrays, bin by bin.

    Returns of each the number, the bin, where it begins in it, and its tokens: int64 `[sequences of these bins]`.
    """
    numbers: list[int] = []
    bins: list[int] = []
    starts: list[int] = []
    for number, here in enumerate(packing_info.bin_seq_indices):
        numbers += here
        bins += [number] * len(here)
        given = packing_info.seq_starts.get(number, [])
        if len(given) not in (len(here), len(here) + 1) and here:
            checked_starts(packing_info, number)
        starts += given[: len(here)]
    known = len(packing_info.seq_lengths)
    wrong = [number for number in numbers if not 0 <= number < known]
    if wrong:
        raise DocumentsError(
            f"a bin holds sequence {wrong[0]:,}, but there are {known:,} lengths in seq_lengths "
            f"({len(wrong):,} of {len(numbers):,} sequences have none)"
        )
    of_all = np.asarray(packing_info.seq_lengths, np.int64)
    ids = np.array(numbers, np.int64)
    return ids, np.array(bins, np.int64), np.array(starts, np.int64), of_all[ids]


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
        padding: positions behind the last slot attend to each other, as Megatron-LM runs them; False where they are
            cut into short pieces.

    Returns:
        float64 `[num_bins]`.
    """
    _, bins, _, lengths = sequences_of(packing_info)
    count = len(packing_info.bin_seq_indices)
    work: FloatArray = np.zeros(count)
    np.add.at(work, bins, lengths.astype(np.float64) ** 2)
    if padding:
        ends = [checked_starts(packing_info, number)[-1:] or [0] for number in range(count)]
        work = work + (bin_size - np.array(ends, np.float64).reshape(-1)) ** 2
    return work


_log = logging.getLogger(__name__)

PackMethod = Literal["best_fit_decreasing", "balanced"]
Masks = Tensor | Sequence[Tensor]
"""`[sequences, width]`: one tensor, or one for each sequence."""
PackedTrajectories = tuple[Tensor, Tensor, Tensor, PackingInfo]
"""Tokens, positions and loss mask, each `[num_bins, bin_size]`, and where each sequence lies."""


def get_actual_sequence_lengths(sequences: Tensor, pad_token: int) -> list[int]:
    """Return how long each row is, up to its last token other than padding, as Megatron-LM's function of this name.

    Real tokens that equal the padding are lost from the end of a row: where lengths or masks are known, use those.

    Args:
        sequences: `[sequences, width]`.
        pad_token: token of padding; inside a row it counts as real.

    Raises:
        DocumentsError: another shape.

    >>> get_actual_sequence_lengths(torch.tensor([[5, 0, 6, 0], [0, 0, 0, 0]]), pad_token=0)
    [3, 0]
    """
    if sequences.dim() != 2:
        raise DocumentsError(f"Expected 2D tensor [sequences, width], got shape {tuple(sequences.shape)}")
    return lengths_of(sequences, pad_token, None, only_right=False)


@raises_too(AssertionError)
class SequencePacker:
    """Packs trajectories into bins, with the arguments and outputs of Megatron-LM's class of this name.

    By default it packs better: best fit decreasing, so that there are fewer bins (there one bin is open at a time,
    whatever its docstring says); bins in the order of their first sequences, not from long to short, so that no
    optimizer step trains on the longest alone; sequences without a token are in no bin; and lengths by the masks, so
    that a real EOS is kept where it is the padding too. `compatible=True` gives Megatron-LM's values.
    """

    def __init__(
        self,
        bin_size: int,
        pad_token: int,
        max_sequences_per_bin: int = 16,
        seq_length_multiple: int = 1,
        *,
        method: PackMethod = "best_fit_decreasing",
        bin_count_multiple: int = 1,
        compatible: bool = False,
    ) -> None:
        """Take the settings.

        Args:
            bin_size: tokens of a bin.
            pad_token: token of padding.
            max_sequences_per_bin: most sequences of a bin.
            seq_length_multiple: a sequence's slot is rounded up to this: 2·CP for context parallelism.
            method: "best_fit_decreasing", or "balanced": as many bins, with even attention work.
            bin_count_multiple: the number of bins is a multiple of this, the data-parallel ranks, where there are
                sequences enough: the heaviest bins are cut rather than empty ones added.
            compatible: Megatron-LM's own bins: next fit from long to short, lengths by the last token other than
                padding, and sequences without a token in bins.

        Raises:
            SettingError: a setting out of range, or two that contradict each other.
        """
        self.bin_size = as_count(bin_size, "bin_size")
        self.pad_token = pad_token
        self.max_sequences_per_bin = as_count(max_sequences_per_bin, "max_sequences_per_bin")
        self.seq_length_multiple = as_count(seq_length_multiple, "seq_length_multiple")
        as_choice(method, "method", get_args(PackMethod))
        self.method = method
        self.bin_count_multiple = as_count(bin_count_multiple, "bin_count_multiple")
        self.compatible = compatible
        self.last_avg_seqs_per_bin = 0.0
        """Mean sequences of a bin in the last packing."""
        self._has_warned = False
        if self.bin_size % self.seq_length_multiple:
            raise SettingError(
                f"bin_size {self.bin_size:,} must be divisible by seq_length_multiple {seq_length_multiple:,}; the "
                f"nearest: {near_multiples(self.bin_size, seq_length_multiple)}"
            )
        if compatible and (method != "best_fit_decreasing" or bin_count_multiple != 1):
            raise SettingError(
                "compatible=True packs as Megatron-LM does, which has neither method nor bin_count_multiple; leave "
                "them out, or compatible"
            )

    def pack_sequences(
        self,
        trajs: Tensor,
        generation_masks: Masks | None = None,
        *,
        lengths: npt.ArrayLike | None = None,
        attention_mask: Tensor | None = None,
    ) -> PackedTrajectories:
        """Pack trajectories.

        A sequence is as long as `lengths` or `attention_mask` says; without them it ends at its last token that was
        generated or isn't padding. Without any mask real tokens that equal the padding are lost from its end, as in
        Megatron-LM; the log says so once.

        Args:
            trajs: `[sequences, width]` tokens, padded on the right.
            generation_masks: `[sequences, width]`, 1 at tokens that the policy wrote: the loss mask.
            lengths: `[sequences]` tokens of each, whole numbers from 0 to width.
            attention_mask: `[sequences, width]`, 1 at real tokens.

        Returns:
            Tokens in their own dtype; int64 positions that restart in every sequence, 0 at padding; and the float32
            loss mask, 0 at padding; each `[num_bins, bin_size]`. Then where each sequence lies. Those of a bin stand
            from long to short, equal ones by number.

        Raises:
            DocumentsError: shapes that differ; masks that contradict lengths.
            LengthsError: lengths that aren't whole numbers from 0 to width.
            OverlongDocumentError: a sequence is longer than a bin.

        Cost: one wait for the device, for lengths that aren't given.

        >>> packer = SequencePacker(bin_size=8, pad_token=0, seq_length_multiple=2)
        >>> rows, positions, loss_mask, info = packer.pack_sequences(torch.tensor([[5, 6, 0], [7, 8, 9]]))
        >>> rows.tolist(), positions.tolist(), info.seq_starts
        ([[7, 8, 9, 0, 5, 6, 0, 0]], [[0, 1, 2, 0, 0, 1, 0, 0]], {0: [0, 4, 6]})
        """
        masks = _as_masks(generation_masks)
        check_shapes(trajs, "trajs", {"generation_masks": masks, "attention_mask": attention_mask})
        tokens = self._lengths(trajs, masks, lengths, attention_mask)
        self._check_fit(tokens)
        slots = tokens + -tokens % self.seq_length_multiple
        order, counts = self._next_fit(slots, tokens) if self.compatible else self._packed(slots, tokens)
        return self._filled(trajs, masks, tokens, slots, order, counts)

    def _lengths(
        self,
        trajs: Tensor,
        masks: Tensor | None,
        lengths: npt.ArrayLike | None,
        attention_mask: Tensor | None,
    ) -> IntArray:
        """Return the tokens of each sequence, int64 `[sequences]`, from the surest that is known."""
        count, width = trajs.shape
        if lengths is None and attention_mask is None:
            if masks is None and not self._has_warned and not self.compatible:
                self._has_warned = True
                _log.warning(
                    "neither lengths nor a mask was given, so that each trajectory is taken to end at its last token "
                    "other than %d; real tokens that equal it are lost from the end",
                    self.pad_token,
                )
            if not trajs.numel():
                return np.zeros(count, np.int64)
            real = trajs != self.pad_token
            if masks is not None and not self.compatible:
                real = real | masks.to(real.device, torch.bool)
            return np.array(lengths_of(real, 0, real, only_right=False), np.int64)
        seen = None
        if attention_mask is not None:
            seen = np.array(lengths_of(trajs, self.pad_token, attention_mask, only_right=True), np.int64)
        found = seen if lengths is None else _as_lengths(lengths, count, width)
        assert found is not None  # one of the two is given
        if seen is not None:
            _check_ends(found, seen, seen != found, "attention_mask ends")
        if masks is not None and masks.numel():
            written = np.array(lengths_of(masks, 0, masks, only_right=False), np.int64)
            _check_ends(found, written, written > found, "generation_masks are set up")
        return found

    def _check_fit(self, tokens: IntArray) -> None:
        check_fit(
            [tokens],
            self.bin_size,
            "trajectory {:,}".format,
            limit_name="bin_size",
            out="raise the bin_size or cut such rollouts when they are generated",
            units="trajectories",
        )

    def _packed(self, slots: IntArray, tokens: IntArray) -> tuple[IntArray, IntArray]:
        """Return sequences bin by bin, and how many each bin has; those without a token are in none."""
        held = np.flatnonzero(tokens)
        sizes, work = slots[held].astype(np.int32), tokens[held].astype(np.float64) ** 2
        pack_of, fewest = packed(sizes, self.bin_size, self.max_sequences_per_bin)
        bins = min(fewest + -fewest % self.bin_count_multiple, held.size)
        if self.method == "balanced":
            ways = even_ways(sizes, work, pack_of, bins, self.bin_size, self.max_sequences_per_bin)
            pack_of = min(ways, key=lambda way: self._rank_work(way, work))
        else:
            pack_of = halved(pack_of, bins, work)
        first = np.full(bins, held.size, np.int64)
        np.minimum.at(first, pack_of, np.arange(held.size))
        order = np.lexsort((-tokens[held], first[pack_of]))
        return held[order], np.bincount(pack_of, minlength=bins)[np.argsort(first)]

    def _rank_work(self, pack_of: Int32Array, work: FloatArray) -> tuple[float, float]:
        """Return the attention work of ranks that wait for each other at every bin, and that of the heaviest."""
        heavy = np.sort(np.bincount(pack_of, weights=work, minlength=1))[::-1]
        return float(heavy[:: self.bin_count_multiple].sum()), float(heavy[0])

    def _next_fit(self, slots: IntArray, tokens: IntArray) -> tuple[IntArray, IntArray]:
        """Return the same as Megatron-LM packs: one open bin, sequences from long to short."""
        order = np.argsort(-tokens, kind="stable")
        counts: list[int] = []
        room = -1
        for slot in slots[order].tolist():
            if slot > room or counts[-1] == self.max_sequences_per_bin:
                counts.append(0)
                room = self.bin_size
            counts[-1] += 1
            room -= slot
        return order, np.array(counts, np.int64)

    def _filled(
        self,
        trajs: Tensor,
        masks: Tensor | None,
        tokens: IntArray,
        slots: IntArray,
        order: IntArray,
        counts: IntArray,
    ) -> PackedTrajectories:
        device, bins = trajs.device, counts.size
        ends = np.cumsum(slots[order])
        bounds = np.concatenate([[0], np.cumsum(counts)])
        before = np.concatenate([[0], ends])[bounds]  # positions in all earlier bins
        bin_of = np.repeat(np.arange(bins), counts)
        starts = ends - slots[order] - before[bin_of]
        lengths = tokens[order]
        target = torch.from_numpy(runs(bin_of * self.bin_size + starts, lengths)).to(device)
        source = torch.from_numpy(runs(order * trajs.shape[1], lengths)).to(device)
        rows = torch.full((bins, self.bin_size), self.pad_token, dtype=trajs.dtype, device=device)
        rows.view(-1)[target] = trajs.reshape(-1)[source]
        positions = torch.zeros((bins, self.bin_size), dtype=torch.int64, device=device)
        positions.view(-1)[target] = torch.from_numpy(runs(np.zeros_like(lengths), lengths)).to(device)
        loss_mask = torch.zeros((bins, self.bin_size), dtype=torch.float32, device=device)
        is_target = 1.0 if masks is None else masks.to(device, torch.float32).reshape(-1)[source]
        loss_mask.view(-1)[target] = is_target
        in_bin = np.split(order, bounds[1:-1]) if bins else []
        begins = np.split(starts, bounds[1:-1]) if bins else []
        bin_of_all = np.full(tokens.size, -1)
        bin_of_all[order] = bin_of
        info = PackingInfo(
            bin_seq_indices=[numbers.tolist() for numbers in in_bin],
            seq_starts={
                number: [*first.tolist(), int(before[number + 1] - before[number])]
                for number, first in enumerate(begins)
            },
            seq_lengths=tokens.tolist(),
            seq_to_bin_idx=[None if number < 0 else number for number in bin_of_all.tolist()],
        )
        self.last_avg_seqs_per_bin = order.size / bins if bins else 0.0
        return rows, positions, loss_mask, info


def _as_masks(masks: Masks | None) -> Tensor | None:
    if masks is None or isinstance(masks, Tensor):
        return masks
    shapes = [tuple(mask.shape) for mask in masks]
    if len(set(shapes)) > 1:
        other = next(number for number, shape in enumerate(shapes) if shape != shapes[0])
        raise DocumentsError(
            f"generation_masks must have one shape, that of their trajectories; 0 has {shapes[0]} and {other:,} "
            f"{shapes[other]}"
        )
    return torch.stack(list(masks)) if masks else None


def _as_lengths(lengths: npt.ArrayLike, count: int, width: int) -> IntArray:
    found = as_lengths(lengths).astype(np.int64)
    if found.size != count:
        raise LengthsError(f"there are {count:,} trajectories, but {found.size:,} lengths")
    beyond = np.flatnonzero(found > width)
    if beyond.size:
        raise LengthsError(
            f"trajectory {int(beyond[0]):,} can't have {int(found[beyond[0]]):,} tokens: trajs are {width:,} wide "
            f"({beyond.size:,} of {count:,} lengths are over it)"
        )
    return found


def _check_ends(lengths: IntArray, ends: IntArray, wrong: npt.NDArray[np.bool_], what: str) -> None:
    """Require that what is known of sequences agrees."""
    if wrong.any():
        first = int(np.argmax(wrong))
        raise DocumentsError(
            f"trajectory {first:,} has {int(lengths[first]):,} tokens by its length, but its {what} at token "
            f"{int(ends[first]):,} ({int(wrong.sum()):,} of {lengths.size:,} trajectories disagree); one is wrong"
        )
