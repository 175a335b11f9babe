"""The packers of NeMo-RL (`nemo_rl.data.packing`, main branch of 2026), over varlen's kernels."""

from __future__ import annotations

import enum
import heapq
import random
from abc import ABC, abstractmethod
from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from varlen.arguments import as_count
from varlen.counts import many
from varlen.errors import DocumentsError, LengthsError, SettingError
from varlen.pack.api import DEFAULT_WORK, as_work, pack
from varlen.pack.lengths import as_lengths
from varlen.pack.pieces import check_fit
from varlen.plan.partition import partition
from varlen.types import FloatArray, Int32Array, IntArray, Method

__all__ = [
    "BalancedPacker",
    "BestFitDecreasingPacker",
    "ConcatenativePacker",
    "FirstFitDecreasingPacker",
    "FirstFitShufflePacker",
    "ModifiedFirstFitDecreasingPacker",
    "PackingAlgorithm",
    "PackingMetrics",
    "SequencePacker",
    "get_packer",
]


class PackingAlgorithm(enum.Enum):
    """How sequences are packed; the last two are varlen's own."""

    CONCATENATIVE = "concatenative"
    FIRST_FIT_DECREASING = "first_fit_decreasing"
    FIRST_FIT_SHUFFLE = "first_fit_shuffle"
    MODIFIED_FIRST_FIT_DECREASING = "modified_first_fit_decreasing"
    BEST_FIT_DECREASING = "best_fit_decreasing"
    BALANCED = "balanced"


class SequencePacker(ABC):
    """Packs sequences into bins, perhaps into more than need be; none is empty unless `allow_empty`.

    The bins of NeMo-RL's algorithms are its own, in its order, as long as no more are asked for. Where more are, the
    bin with the most work is cut into even halves until there are enough; there single sequences are taken from the
    bin with the most of them.
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
        self._others = 0  # bins of overlong sequences, one each

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
        if self.overlong == "error":
            out = 'cut it, raise the capacity, or pass overlong="alone"'
            name = "sequence {:,}".format
            check_fit(
                [lengths], self.bin_capacity, name, limit_name="bin_capacity", out=out, units="sequences"
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
        most = None if self.max_sequences_per_bin == -1 else self.max_sequences_per_bin
        return _packed(lengths, np.arange(lengths.size), self.bin_capacity, "next_fit", most)


class FirstFitDecreasingPacker(SequencePacker):
    """Sequences from long to short, equal ones from last to first, each into the first bin with space."""

    def _bins(self, lengths: Int32Array) -> Bins:
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
        order = list(range(lengths.size))
        (random if self.seed is None else random.Random(self.seed)).shuffle(order)
        return _packed(lengths, np.array(order), self.bin_capacity, "first_fit")


class ModifiedFirstFitDecreasingPacker(SequencePacker):
    """NeMo-RL's version of Johnson & Garey's algorithm; see `modified_first_fit_decreasing`."""

    def _bins(self, lengths: Int32Array) -> Bins:
        return modified_first_fit_decreasing(lengths.tolist(), self.bin_capacity)


class BestFitDecreasingPacker(SequencePacker):
    """varlen's fullest bins: sequences from long to short, each where the least space stays free."""

    def _bins(self, lengths: Int32Array) -> Bins:
        return _packed(lengths, np.arange(lengths.size), self.bin_capacity, "best_fit_decreasing")


class BalancedPacker(SequencePacker):
    """varlen's bins of even work, attention included, about as few as best-fit-decreasing makes."""

    def _bins(self, lengths: Int32Array) -> Bins:
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
    """Pack sequences in an order; they stand in their bins in that order."""
    packing = pack(lengths[order], capacity, method, max_documents=most)
    return [numbers.tolist() for numbers in np.split(order[packing.document_ids], packing.offsets[1:-1])]


def _cut(bins: Bins, goal: int, work: FloatArray) -> Bins:
    """Cut the bin with the most work into even halves until there are enough; the second halves stand last.

    `work`: float64 `[num_sequences]`.
    """
    found = [list(numbers) for numbers in bins]
    waiting = [
        (-float(work[numbers].sum()), index) for index, numbers in enumerate(found) if len(numbers) > 1
    ]
    heapq.heapify(waiting)
    while len(found) < goal:
        _, index = heapq.heappop(waiting)
        numbers, side = found[index], partition(work[found[index]], 2)
        found[index] = [number for number, half in zip(numbers, side) if half == 0]
        found.append([number for number, half in zip(numbers, side) if half == 1])
        for part in (index, len(found) - 1):
            if len(found[part]) > 1:
                heapq.heappush(waiting, (-float(work[found[part]].sum()), part))
    return found


# Modified first-fit-decreasing: the packs that NeMo-RL's packer of this name makes, found by bisection.

Bins = list[list[int]]  # the sequences of each bin, by number


class _Shelf:
    """Sequences by length, of which the longest that fits is taken, the first of equally long ones."""

    def __init__(self, items: list[tuple[int, int]]) -> None:
        ranked = sorted((length, -turn, number) for turn, (length, number) in enumerate(items))
        self.lengths = [length for length, _, _ in ranked]
        self.numbers = [number for _, _, number in ranked]

    def take(self, room: int) -> tuple[int, int] | None:
        """Remove and return (length, number) of the longest that fits; None if none does."""
        index = bisect_right(self.lengths, room) - 1
        return None if index < 0 else (self.lengths.pop(index), self.numbers.pop(index))


def modified_first_fit_decreasing(lengths: list[int], capacity: int) -> Bins:
    """Pack sequences by NeMo-RL's version of Johnson & Garey 1985, "A 71/60 theorem for bin packing".

    Every sequence over half a bin opens one. From long to short these get a sequence over a third, where one fits;
    then, from short to long, those without one get two over a sixth: the shortest, and the longest that fits beside
    it. Then all are filled up, long sequences first. What is left goes, from long to short, each into the emptiest of
    new bins, which stand last, from empty to full.

    Args:
        lengths: `[num_sequences]`, from 1 to `capacity`.

    Cost: O(n·log n) comparisons, where there every bin searches all that is left.
    """
    numbered = list(zip(lengths, range(len(lengths))))
    large = sorted((item for item in numbered if item[0] > capacity / 2), key=lambda item: -item[0])
    medium = _Shelf([item for item in numbered if capacity / 3 < item[0] <= capacity / 2])
    small = sorted(
        (item for item in numbered if capacity / 6 < item[0] <= capacity / 3), key=lambda item: item[0]
    )
    bins = [[number] for _, number in large]
    rooms = [capacity - length for length, _ in large]
    for index, room in enumerate(rooms):
        fitting = medium.take(room)
        if fitting is not None:
            rooms[index] -= fitting[0]
            bins[index].append(fitting[1])
    small = _paired(small, bins, rooms)
    rest = _Shelf(
        [
            *sorted(zip(medium.lengths, medium.numbers), key=lambda item: item[1]),
            *small,
            *(item for item in numbered if item[0] <= capacity / 6),
        ]
    )
    for index, numbers in enumerate(bins):
        while (fitting := rest.take(rooms[index])) is not None:
            rooms[index] -= fitting[0]
            numbers.append(fitting[1])
    return bins + _emptiest_first(rest, capacity)


def _paired(small: list[tuple[int, int]], bins: Bins, rooms: list[int]) -> list[tuple[int, int]]:
    """Put two small sequences into each bin that holds one long one, last bin first; return those left over."""
    lengths = [length for length, _ in small]
    first, numbers = 0, [number for _, number in small]
    for index in range(len(bins) - 1, -1, -1):
        if (
            len(bins[index]) > 1
            or len(lengths) - first < 2
            or lengths[first] + lengths[first + 1] > rooms[index]
        ):
            continue
        second = bisect_right(lengths, rooms[index] - lengths[first], lo=first + 1) - 1
        bins[index] += [numbers[first], numbers[second]]
        rooms[index] -= lengths[first] + lengths[second]
        del lengths[second], numbers[second]
        first += 1
    return list(zip(lengths[first:], numbers[first:]))


def _emptiest_first(rest: _Shelf, capacity: int) -> Bins:
    """Put sequences, longest first, into the emptiest bin, or into a new one if it has no room."""
    bins: Bins = []
    loads: list[int] = []
    while (item := rest.take(capacity)) is not None:
        length, number = item
        numbers, load = [], 0
        if loads and loads[0] + length <= capacity:
            numbers, load = bins.pop(0), loads.pop(0)
        index = bisect_right(loads, load + length)
        bins.insert(index, [*numbers, number])
        loads.insert(index, load + length)
    return bins


# How full and how even bins are, in NeMo-RL's words.

Stats = dict[str, float]


class PackingMetrics:
    """Figures of one packing, and of all since the last reset, with NeMo-RL's names.

    Where no bin holds a token, `bin_balance` is 1 here; there that divides by zero.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all packings."""
        self._solutions: list[Stats] = []
        self._times: list[float] = []

    def update(
        self,
        sequence_lengths: npt.ArrayLike,
        bins: Bins,
        bin_capacity: int,
        packing_time: float | None = None,
    ) -> Stats:
        """Count a packing, and return its figures.

        Args:
            sequence_lengths: `[num_sequences]`.
            bins: the sequences of each bin.
            bin_capacity: tokens a bin can hold.
            packing_time: seconds that it took, where known.
        """
        stats = self.calculate_stats_only(sequence_lengths, bins, bin_capacity)
        lengths = np.asarray(sequence_lengths)
        # Without bins the figures of one packing are all 0, but its sequences count in the sum, as there.
        tokens = {"_sequences": int(lengths.size), "_tokens": int(lengths.sum())}
        self._solutions.append(stats | tokens)
        if packing_time is not None:
            self._times.append(packing_time)
        return stats

    def calculate_stats_only(self, sequence_lengths: npt.ArrayLike, bins: Bins, bin_capacity: int) -> Stats:
        """Return the figures of a packing without counting it.

        Args:
            sequence_lengths: `[num_sequences]`.
            bins: the sequences of each bin.
            bin_capacity: tokens a bin can hold.

        >>> PackingMetrics().calculate_stats_only([6, 2, 8], [[0, 1], [2]], 8)["average_utilization"]
        1.0
        """
        lengths = np.asarray(sequence_lengths, dtype=np.int64)
        total, room = int(lengths.sum()) if bins else 0, len(bins) * bin_capacity
        least = -(-total // bin_capacity)
        return {
            "num_sequences": lengths.size if bins else 0,
            "num_bins": len(bins),
            "total_sequence_length": total,
            "total_bin_capacity": room,
            "total_waste": room - total,
            "average_utilization": total / room if bins else 0.0,
            "waste_ratio": (room - total) / room if bins else 0.0,
            "bin_balance": _balance(lengths, bins, bin_capacity) if bins else 0.0,
            "theoretical_min_bins": least,
            "bin_efficiency": least / len(bins) if bins else 0.0,
        }

    def get_aggregated_stats(self) -> Stats:
        """Return the figures of all packings together; empty before the first."""
        if not self._solutions:
            return {}

        def every(name: str) -> list[float]:
            return [stats[name] for stats in self._solutions]

        bins, room, tokens = sum(every("num_bins")), sum(every("total_bin_capacity")), sum(every("_tokens"))
        full, wasted = every("average_utilization"), every("waste_ratio")
        least = -(-tokens * bins // room) if room else 0
        stats = {
            "total_sequences": sum(every("_sequences")),
            "total_bins": bins,
            "average_utilization": tokens / room if room else 0.0,
            "min_utilization": min(1.0, *full),
            "max_utilization": max(0.0, *full),
            "average_waste_ratio": sum(every("total_waste")) / room if room else 0.0,
            "min_waste_ratio": min(1.0, *wasted),
            "max_waste_ratio": max(0.0, *wasted),
            "average_bin_count": bins / len(self._solutions),
            "bin_efficiency": least / bins if bins else 0.0,
        }
        if self._times:
            stats["average_packing_time"] = sum(self._times) / len(self._times)
        return stats

    def print_aggregated_stats(self) -> None:
        """Print the figures of all packings together."""
        stats = self.get_aggregated_stats()
        if not stats:
            print("Nothing has been packed yet.")
        for name, value in stats.items():
            print(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value:.4f}")


def _balance(lengths: npt.NDArray[np.int64], bins: Bins, bin_capacity: int) -> float:
    """Return 1 minus the ratio of standard deviation to mean of the bins' fill."""
    loads = np.array([lengths[numbers].sum() if numbers else 0 for numbers in bins]) / bin_capacity
    mean = float(lengths.sum()) / (len(bins) * bin_capacity)
    return 1.0 - float(loads.std(ddof=1)) / mean if len(bins) > 1 and mean else 1.0
