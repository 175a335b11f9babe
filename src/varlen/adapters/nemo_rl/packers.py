"""The packers of NeMo-RL (`nemo_rl.data.packing`, main branch of 2026), over varlen's kernels."""

from __future__ import annotations

import enum
import heapq
import random
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from varlen.adapters.nemo_rl.metrics import Bins, PackingMetrics, Stats
from varlen.adapters.nemo_rl.mffd import modified_first_fit_decreasing
from varlen.counts import many
from varlen.errors import DocumentsError, LengthsError, OverlongDocumentError, SettingError
from varlen.pack.api import DEFAULT_WORK, as_work, pack
from varlen.pack.lengths import as_count, as_lengths
from varlen.plan.partition import partition
from varlen.types import FloatArray, Int32Array, IntArray, Method


class PackingAlgorithm(enum.Enum):
    """How sequences are packed; the last two are varlen's own."""

    CONCATENATIVE = "concatenative"
    FIRST_FIT_DECREASING = "first_fit_decreasing"
    FIRST_FIT_SHUFFLE = "first_fit_shuffle"
    MODIFIED_FIRST_FIT_DECREASING = "modified_first_fit_decreasing"
    BEST_FIT_DECREASING = "best_fit_decreasing"
    BALANCED = "balanced"


class SequencePacker(ABC):
    """Packs sequences into bins, perhaps into more of them than need be, none of them empty.

    Bins are NeMo-RL's, in its order, as long as no more are asked for. Where more are, the bin with the most work is
    cut into even halves until there are enough; there single sequences are taken from the bin with the most of them.
    """

    def __init__(
        self,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
        *,
        overlong: str = "error",
        allow_empty: bool = False,
        work: tuple[float, float] = DEFAULT_WORK,
    ) -> None:
        """Take the settings.

        Args:
            bin_capacity: tokens a bin can hold.
            collect_metrics: keep figures of all packings, for `get_aggregated_metrics`.
            min_bin_count: fewest bins; None or 0 for no limit.
            bin_count_multiple: the number of bins is a multiple of this: data-parallel ranks, or the micro-batches of
                a virtual pipeline; None for any number.
            overlong: sequences longer than a bin: "error", or "alone" in one, as NeMo-RL's tests have it of late.
            allow_empty: with fewer sequences than bins, the last bins are empty: a rank must run something in their
                place whose loss is masked. False: that is an error.
            work: (a, b): a sequence of s tokens is a·s + b·s² of work.

        Raises:
            SettingError: a setting out of range.
        """
        self.bin_capacity = as_count(bin_capacity, "bin_capacity")
        self.collect_metrics = collect_metrics
        self.min_bin_count = (
            None if min_bin_count is None else as_count(min_bin_count, "min_bin_count", least=0)
        )
        self.bin_count_multiple = (
            None if bin_count_multiple is None else as_count(bin_count_multiple, "bin_count_multiple")
        )
        if overlong not in ("error", "alone"):
            raise SettingError(f"overlong must be error or alone; got {overlong!r}")
        self.overlong = overlong
        self.allow_empty = allow_empty
        self.work = as_work(work)
        self.metrics = PackingMetrics() if collect_metrics else None
        self._others = 0  # bins that sequences longer than one take besides

    @abstractmethod
    def _bins(self, lengths: Int32Array) -> Bins:
        """Pack sequences that fit."""

    def pack(self, sequence_lengths: npt.ArrayLike) -> Bins:
        """Pack sequences.

        Args:
            sequence_lengths: `[num_sequences]` tokens of each, whole numbers from 1.

        Returns:
            The sequences of each bin, by number.

        Raises:
            LengthsError: lengths that aren't whole numbers from 1.
            OverlongDocumentError: a sequence is longer than a bin, and `overlong` is "error".
            DocumentsError: fewer sequences than bins are asked for, and `allow_empty` is False.
        """
        lengths = as_lengths(sequence_lengths)
        if lengths.size and not lengths.min():
            raise LengthsError(
                f"sequence lengths must be positive, but sequence {int(np.argmin(lengths)):,} has no tokens "
                f"({int((lengths == 0).sum()):,} of {lengths.size:,} have none); leave such sequences out"
            )
        beyond = np.flatnonzero(lengths > self.bin_capacity)
        if beyond.size and self.overlong == "error":
            raise OverlongDocumentError(
                f"sequence {int(beyond[0]):,}: length {int(lengths[beyond[0]]):,} exceeds bin capacity "
                f"{self.bin_capacity:,} ({beyond.size:,} of {lengths.size:,} do); cut it, raise the capacity, or "
                'pass overlong="alone"'
            )
        self._others = int(beyond.size)
        inner = np.flatnonzero(lengths <= self.bin_capacity)
        bins = self._bins(lengths[inner]) if inner.size else []
        if beyond.size:
            bins = [inner[numbers].tolist() for numbers in bins] + [[int(number)] for number in beyond]
        bins = self._enough(bins, lengths)
        if self.metrics is not None:
            self.metrics.update(lengths, bins, self.bin_capacity)
        return bins

    def _enough(self, bins: Bins, lengths: Int32Array) -> Bins:
        """Return as many bins as are asked for.

        Raises:
            DocumentsError: there are fewer sequences, and `allow_empty` is False.
        """
        goal = max(len(bins), self.min_bin_count or 0)
        goal += -goal % (self.bin_count_multiple or 1)
        if lengths.size < goal and not self.allow_empty:
            raise DocumentsError(
                f"Cannot create {goal:,} bins with only {many(lengths.size, 'sequence')}: each needs one. Give at "
                "least as many sequences, lower min_bin_count or bin_count_multiple, or pass allow_empty=True and "
                "mask the loss of the empty ones"
            )
        a, b = self.work
        tokens = lengths.astype(np.float64)
        cut = _cut(bins, min(goal, lengths.size), a * tokens + b * tokens**2)
        return cut + [[] for _ in range(goal - len(cut))]

    def reset_metrics(self) -> None:
        """Forget the figures of all packings."""
        if self.metrics is not None:
            self.metrics.reset()

    def compute_metrics(self, sequence_lengths: npt.ArrayLike, bins: Bins) -> Stats:
        """Return the figures of a packing, without counting it.

        Args:
            sequence_lengths: `[num_sequences]`.
            bins: the sequences of each bin.
        """
        return PackingMetrics().calculate_stats_only(sequence_lengths, bins, self.bin_capacity)

    def get_aggregated_metrics(self) -> Stats:
        """Return the figures of all packings together; empty without `collect_metrics`."""
        return {} if self.metrics is None else self.metrics.get_aggregated_stats()

    def print_metrics(self) -> None:
        """Print the figures of all packings together."""
        if self.metrics is None:
            print("No metrics are collected; pass collect_metrics=True.")
        else:
            self.metrics.print_aggregated_stats()


class ConcatenativePacker(SequencePacker):
    """Sequences in order; a new bin where one doesn't fit.

    >>> ConcatenativePacker(5).pack([4, 1, 3, 2, 1, 3, 4, 5])
    [[0, 1], [2, 3], [4, 5], [6], [7]]
    """

    max_sequences_per_bin = -1
    """Most sequences of a bin; -1 for no limit. Set on the class or an object, as there."""

    def _bins(self, lengths: Int32Array) -> Bins:
        """Next-fit."""
        most = None if self.max_sequences_per_bin == -1 else self.max_sequences_per_bin
        return _packed(lengths, np.arange(lengths.size), self.bin_capacity, "next_fit", most)


class FirstFitDecreasingPacker(SequencePacker):
    """Sequences from long to short, equal ones from last to first, each into the first bin with space."""

    def _bins(self, lengths: Int32Array) -> Bins:
        """First-fit in falling order of (length, number)."""
        order = np.argsort(lengths, kind="stable")[::-1]
        return _packed(lengths, order, self.bin_capacity, "first_fit")


class FirstFitShufflePacker(SequencePacker):
    """Sequences in random order, each into the first bin with space.

    The order is that of Python's `random`, as there: after the same `random.seed` the bins are NeMo-RL's. With `seed`
    set, each packing is the same, whatever else draws numbers.
    """

    seed: int | None = None
    """Of the order; None draws from Python's `random`."""

    def _bins(self, lengths: Int32Array) -> Bins:
        """First-fit in shuffled order."""
        order = list(range(lengths.size))
        (random if self.seed is None else random.Random(self.seed)).shuffle(order)
        return _packed(lengths, np.array(order), self.bin_capacity, "first_fit")


class ModifiedFirstFitDecreasingPacker(SequencePacker):
    """NeMo-RL's version of Johnson & Garey's algorithm; see `modified_first_fit_decreasing`."""

    def _bins(self, lengths: Int32Array) -> Bins:
        """Modified first-fit-decreasing."""
        return modified_first_fit_decreasing(lengths.tolist(), self.bin_capacity)


class BestFitDecreasingPacker(SequencePacker):
    """varlen's fullest bins: sequences from long to short, each where the least space stays free."""

    def _bins(self, lengths: Int32Array) -> Bins:
        """Best-fit-decreasing."""
        return _packed(lengths, np.arange(lengths.size), self.bin_capacity, "best_fit_decreasing")


class BalancedPacker(SequencePacker):
    """varlen's bins of even work, attention included, about as few as best-fit-decreasing makes."""

    def _bins(self, lengths: Int32Array) -> Bins:
        """Work spread over as few bins as are asked for; those of `pack` where it can't be."""
        packing = pack(lengths, self.bin_capacity, "balanced", work=self.work)
        goal = max(packing.num_packs + self._others, self.min_bin_count or 0)
        goal = min(goal + -goal % (self.bin_count_multiple or 1) - self._others, lengths.size)
        a, b = self.work
        tokens = lengths.astype(np.float64)
        part_of = partition(a * tokens + b * tokens**2, goal)
        if np.bincount(part_of, weights=lengths).max() > self.bin_capacity:
            return packing.to_lists()
        return [np.flatnonzero(part_of == part).tolist() for part in range(goal)]


def get_packer(
    algorithm: PackingAlgorithm | str,
    bin_capacity: int,
    collect_metrics: bool = False,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
    *,
    seed: int | None = None,
    overlong: str = "error",
    allow_empty: bool = False,
    work: tuple[float, float] = DEFAULT_WORK,
) -> SequencePacker:
    """Return a packer.

    Args:
        algorithm: a `PackingAlgorithm`, NeMo-RL's own, or the name of one, in upper or lower case.
        bin_capacity: tokens a bin can hold.
        collect_metrics: keep figures of all packings.
        min_bin_count: fewest bins; None for no limit.
        bin_count_multiple: the number of bins is a multiple of this; None for any number.
        seed: of "first_fit_shuffle"; None draws from Python's `random`, as NeMo-RL does.
        overlong: sequences longer than a bin: "error", or "alone" in one.
        allow_empty: with fewer sequences than bins, the last bins are empty; False: an error.
        work: (a, b): a sequence of s tokens is a·s + b·s² of work.

    Raises:
        SettingError: a setting out of range, or no algorithm of this name.

    >>> get_packer("first_fit_decreasing", 8, bin_count_multiple=4).pack([5, 2, 6, 3, 1, 7])
    [[5], [2, 1], [0, 3], [4]]
    """
    name = algorithm if isinstance(algorithm, str) else getattr(algorithm, "name", "")
    packer = _PACKERS.get(str(name).upper())
    if packer is None:
        raise SettingError(f"{algorithm!r} is no packing algorithm; available: {', '.join(_PACKERS)}")
    made = packer(
        bin_capacity,
        collect_metrics,
        min_bin_count,
        bin_count_multiple,
        overlong=overlong,
        allow_empty=allow_empty,
        work=work,
    )
    if isinstance(made, FirstFitShufflePacker):
        made.seed = seed
    return made


_PACKERS: dict[str, type[SequencePacker]] = {
    PackingAlgorithm.CONCATENATIVE.name: ConcatenativePacker,
    PackingAlgorithm.FIRST_FIT_DECREASING.name: FirstFitDecreasingPacker,
    PackingAlgorithm.FIRST_FIT_SHUFFLE.name: FirstFitShufflePacker,
    PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING.name: ModifiedFirstFitDecreasingPacker,
    PackingAlgorithm.BEST_FIT_DECREASING.name: BestFitDecreasingPacker,
    PackingAlgorithm.BALANCED.name: BalancedPacker,
}


def _packed(
    lengths: Int32Array, order: IntArray, capacity: int, method: Method, most: int | None = None
) -> Bins:
    """Pack sequences in an order by one of the packer's methods; they stand in their bins in that order."""
    packing = pack(lengths[order], capacity, method, max_documents=most)
    return [numbers.tolist() for numbers in np.split(order[packing.document_ids], packing.offsets[1:-1])]


def _cut(bins: Bins, goal: int, work: FloatArray) -> Bins:
    """Cut the bin with the most work into even halves until there are enough; the second halves stand last.

    Args:
        bins: none empty.
        goal: bins wanted, at most as many as sequences.
        work: float64 `[num_sequences]`.
    """
    found = [list(numbers) for numbers in bins]
    waiting = [
        (-float(work[numbers].sum()), place) for place, numbers in enumerate(found) if len(numbers) > 1
    ]
    heapq.heapify(waiting)
    while len(found) < goal:
        _, place = heapq.heappop(waiting)
        numbers, side = found[place], partition(work[found[place]], 2)
        found[place] = [number for number, half in zip(numbers, side) if half == 0]
        found.append([number for number, half in zip(numbers, side) if half == 1])
        for part in (place, len(found) - 1):
            if len(found[part]) > 1:
                heapq.heappush(waiting, (-float(work[found[part]].sum()), part))
    return found
