"""Modified first-fit-decreasing: the packs that NeMo-RL's packer of this name makes, found by bisection."""

from __future__ import annotations

from bisect import bisect_right

Bins = list[list[int]]
"""The sequences of each bin, by number."""


class _Shelf:
    """Sequences from short to long, of which the longest that fits is taken; of equally long ones the first."""

    def __init__(self, items: list[tuple[int, int]]) -> None:
        """Take (length, number) of each, in the order in which equally long ones have their turn."""
        ranked = sorted((length, -turn, number) for turn, (length, number) in enumerate(items))
        self.lengths = [length for length, _, _ in ranked]
        self.numbers = [number for _, _, number in ranked]

    def take(self, room: int) -> tuple[int, int] | None:
        """Remove and return (length, number) of the longest that fits; None where none does."""
        place = bisect_right(self.lengths, room) - 1
        return None if place < 0 else (self.lengths.pop(place), self.numbers.pop(place))


def modified_first_fit_decreasing(lengths: list[int], capacity: int) -> Bins:
    """Pack sequences by NeMo-RL's version of Johnson & Garey 1985, "A 71/60 theorem for bin packing".

    Every sequence over half a bin opens one. From long to short these get a sequence over a third, where one fits;
    then, from short to long, those without one get two over a sixth: the shortest, and the longest that fits beside
    it. Then all are filled up, long sequences first. What is left goes, from long to short, each into the emptiest of
    new bins, which stand last, from empty to full.

    Args:
        lengths: `[num_sequences]`, from 1 to `capacity`.
        capacity: tokens a bin can hold.

    Returns:
        The bins of NeMo-RL's packer, in its order, without the empty one that its releases return where nothing is
        left.

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
    for place, room in enumerate(rooms):
        fitting = medium.take(room)
        if fitting is not None:
            rooms[place] -= fitting[0]
            bins[place].append(fitting[1])
    small = _paired(small, bins, rooms)
    rest = _Shelf(
        [
            *sorted(zip(medium.lengths, medium.numbers), key=lambda item: item[1]),
            *small,
            *(item for item in numbered if item[0] <= capacity / 6),
        ]
    )
    for place, numbers in enumerate(bins):
        while (fitting := rest.take(rooms[place])) is not None:
            rooms[place] -= fitting[0]
            numbers.append(fitting[1])
    return bins + _emptiest_first(rest, capacity)


def _paired(small: list[tuple[int, int]], bins: Bins, rooms: list[int]) -> list[tuple[int, int]]:
    """Put two small sequences into bins that hold one long one, the last bin first; return those left over.

    Args:
        small: (length, number) from short to long, equal ones in their order.
        bins: those of the long sequences, changed.
        rooms: tokens free in each, changed.
    """
    lengths = [length for length, _ in small]
    first, numbers = 0, [number for _, number in small]
    for place in range(len(bins) - 1, -1, -1):
        if (
            len(bins[place]) > 1
            or len(lengths) - first < 2
            or lengths[first] + lengths[first + 1] > rooms[place]
        ):
            continue
        second = bisect_right(lengths, rooms[place] - lengths[first], lo=first + 1) - 1
        bins[place] += [numbers[first], numbers[second]]
        rooms[place] -= lengths[first] + lengths[second]
        del lengths[second], numbers[second]
        first += 1
    return list(zip(lengths[first:], numbers[first:]))


def _emptiest_first(rest: _Shelf, capacity: int) -> Bins:
    """Put sequences from long to short each into the emptiest bin, or a new one where that is too full."""
    bins: Bins = []
    loads: list[int] = []
    while (item := rest.take(capacity)) is not None:
        length, number = item
        numbers, load = [], 0
        if loads and loads[0] + length <= capacity:
            numbers, load = bins.pop(0), loads.pop(0)
        place = bisect_right(loads, load + length)
        bins.insert(place, [*numbers, number])
        loads.insert(place, load + length)
    return bins
