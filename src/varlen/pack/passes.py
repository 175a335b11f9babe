"""Pack waiting pieces in several passes: first in the order of arrival, and sorted by length only at the end.

Shared by the packers of streams, which differ in what they do with packs that aren't full.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen import jit
from varlen.arguments import LARGEST
from varlen.errors import StateError
from varlen.pack.api import DEFAULT_WORK, FILL_PIECE_S, assign, fill, item_work, lower_bound, pack, spread
from varlen.pack.pieces import Items, Pieces, applied, arrange, audit, checksum, fit, slots_of
from varlen.types import Int32Array, IntArray, Method, Overlong

# Upper estimates of the seconds per piece in Python.
_SPREAD_PIECE_S = 5e-6
_ARRANGE_PIECE_S = 1e-6

_METHODS: dict[Method, tuple[Method, ...]] = {
    "best_fit": ("best_fit", "balanced", "best_fit_decreasing"),
    "first_fit": ("first_fit", "balanced", "best_fit_decreasing"),
}
"""The passes over a window: each method packs the pieces that the one before left in packs that aren't full."""

STREAMS: tuple[Method, ...] = ("next_fit", "wrapped")
"""Methods that keep one pack open, which the next documents continue."""


def arrived(
    lengths: Int32Array, first_record: int, capacity: int, method: Method, overlong: Overlong
) -> tuple[Waiting, dict[str, int]]:
    """Return new documents as pieces that fit, and counts of what was cut or dropped."""
    if method == "wrapped" and applied(method, overlong) == "split":
        pieces = Pieces(lengths=lengths)
    else:
        with jit.sized(lengths.size * _ARRANGE_PIECE_S):
            pieces = fit(lengths, capacity, overlong)
    sizes = pieces.lengths
    documents = np.arange(sizes.size) if pieces.documents is None else pieces.documents
    starts = np.zeros(sizes.size, np.int32) if pieces.starts is None else pieces.starts
    filled = sizes > 0
    waiting = Waiting(
        records=(documents + first_record)[filled],
        starts=starts[filled],
        stops=(starts + sizes)[filled],
        ages=np.zeros(int(filled.sum()), np.int32),
    )
    return waiting, pieces.losses


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """Settings of the passes, and methods that run them."""

    capacity: int
    method: Method
    max_documents: int | None
    multiple: int
    min_fill: float
    """Packs at least this full count as full, from 0 to 1."""

    @property
    def keeps_order(self) -> bool:
        """Whether packs keep the order of arrival, with one pack open at a time."""
        return self.method in STREAMS

    def run(self, pieces: Waiting) -> tuple[Packs, Packs]:
        """Run all passes; returns the full packs, and the packs of the last pass that aren't full."""
        full, rest, last = no_packs(), pieces, no_packs()
        for method in _METHODS.get(self.method, (self.method,)):
            spreads = method == "balanced" != self.method
            packs = self._spread(rest) if spreads else self.packed(rest, method)
            is_full = self.is_full(packs)
            full, last = full.and_then(packs.where(is_full)), packs.where(~is_full)
            rest = last.pieces.by_arrival()
        return full, last

    def all_of(self, pieces: Waiting) -> Packs:
        """Pack all pieces, so that none waits."""
        if self.method not in _METHODS:
            return self.packed(pieces, self.method)
        pack_of, num_packs = whole(
            pieces.lengths, self.capacity, self.method, self.max_documents or LARGEST, self.multiple
        )
        with jit.sized(len(pieces) * _ARRANGE_PIECE_S):
            return self.arranged(pieces, pack_of, num_packs)

    def packed(self, pieces: Waiting, method: Method) -> Packs:
        """Pack pieces by one method."""
        packing = pack(
            pieces.lengths,
            self.capacity,
            method,
            max_documents=self.max_documents,
            document_multiple_of=self.multiple,
        )
        ordered = pieces.take(packing.document_ids)
        if method == "wrapped":
            starts = ordered.starts + packing.starts
            stops = starts + packing.lengths
            ordered = Waiting(records=ordered.records, starts=starts, stops=stops, ages=ordered.ages)
        return Packs(pieces=ordered, offsets=packing.offsets)

    def _spread(self, pieces: Waiting) -> Packs:
        """Pack pieces into packs of about equal work, even if best-fit-decreasing needs fewer packs.

        Those that come out full are random mixtures; the pieces of the others are packed again.
        """
        lengths, most = pieces.lengths, self.max_documents or LARGEST
        with jit.sized(len(pieces) * _SPREAD_PIECE_S):
            items = Items(slots=slots_of(lengths, self.multiple), sizes=None, item_of=None)
            fewest = assign("best_fit_decreasing", items, None, self.capacity, most)[1]
            work, ones = item_work(lengths, items, DEFAULT_WORK), np.ones(len(pieces), np.int32)
            pack_of, num_packs = spread(fewest, items.slots, ones, work, self.capacity, most)
            return self.arranged(pieces, pack_of, num_packs)

    def arranged(self, pieces: Waiting, pack_of: Int32Array, num_packs: int) -> Packs:
        """Order packs by their first pieces, and audit them; overwrites `pack_of`."""
        lengths, most = np.where(pack_of < 0, np.int32(0), pieces.lengths), self.max_documents or LARGEST
        expected = checksum(lengths)
        numbers, packed_lengths, offsets = arrange(lengths, pack_of, num_packs, None)
        audit(numbers, packed_lengths, offsets, self.capacity, most, self.multiple, expected)
        return Packs(pieces=pieces.take(numbers), offsets=offsets)

    def is_full(self, packs: Packs) -> npt.NDArray[np.bool_]:
        """Whether each pack is full, by the space that it takes or by its number of pieces."""
        least = self.capacity if self.keeps_order else self.min_fill * self.capacity
        full = (packs.space(self.multiple) >= least) | (packs.sizes >= (self.max_documents or LARGEST))
        if self.keeps_order:
            full[:-1] = True
        return full


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Pieces that wait for a pack, in the order of arrival."""

    records: IntArray
    """int64 `[num_pieces]`: number of each piece's document, counted from the first ever taken."""
    starts: Int32Array
    """int32 `[num_pieces]`: first token of the piece within its document."""
    stops: Int32Array
    """int32 `[num_pieces]`: one past its last token."""
    ages: Int32Array
    """int32 `[num_pieces]`: windows through which each piece has been carried."""

    def __len__(self) -> int:
        return len(self.records)

    @property
    def lengths(self) -> Int32Array:
        """int32 `[num_pieces]`: tokens of each piece."""
        return self.stops - self.starts

    def take(self, index: Any) -> Waiting:
        """Return the pieces at an index."""
        return Waiting(
            records=self.records[index],
            starts=self.starts[index],
            stops=self.stops[index],
            ages=self.ages[index],
        )

    def by_arrival(self) -> Waiting:
        """Return the same pieces in the order of arrival."""
        return self.take(np.lexsort((self.starts, self.records)))

    def older(self) -> Waiting:
        """Return the same pieces, one window older."""
        return replace(self, ages=self.ages + np.int32(1))

    def and_then(self, other: Waiting) -> Waiting:
        """Return these pieces followed by others."""
        return Waiting(
            **{name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in self.__slots__}
        )

    def to_state(self) -> dict[str, list[int]]:
        """Return the pieces as lists of numbers."""
        return {name: getattr(self, name).tolist() for name in self.__slots__}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], num_records: int, fresh: int) -> Waiting:
        """Read and validate what `to_state` wrote; the last `fresh` pieces were in no window, so their age is 0."""
        columns = {name: _whole_numbers(state[name], name) for name in cls.__slots__}
        records, starts, stops, ages = columns.values()
        rising = (records[1:] > records[:-1]) | ((records[1:] == records[:-1]) & (starts[1:] >= stops[:-1]))
        sound = (
            len({len(column) for column in columns.values()}) == 1
            and bool(rising.all())
            and ((records >= 0) & (records < num_records) & (starts >= 0) & (starts < stops)).all()
            and stops.max(initial=0) < 2**31
            and ages.min(initial=0) >= 0
            and 0 <= fresh <= len(records)
            and not ages[len(ages) - fresh :].any()
        )
        if not sound:
            raise StateError(
                f"the state's {len(records):,} waiting pieces are not pieces of {num_records:,} documents in the "
                "order of their arrival; it was truncated or modified"
            )
        return cls(
            records=records,
            starts=starts.astype(np.int32),
            stops=stops.astype(np.int32),
            ages=ages.astype(np.int32),
        )


def _whole_numbers(values: Any, name: str) -> IntArray:
    """Return a list of a state as int64."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind != "i"):
        raise StateError(f"the state's {name} aren't a list of whole numbers; it was truncated or modified")
    return array.astype(np.int64)


def nothing() -> Waiting:
    """Return no pieces."""
    empty = np.empty(0, np.int32)
    return Waiting(records=np.empty(0, np.int64), starts=empty, stops=empty, ages=empty)


@dataclass(frozen=True, kw_only=True, slots=True)
class Packs:
    """Pieces grouped by pack."""

    pieces: Waiting
    offsets: IntArray
    """int64 `[num_packs + 1]`: where each pack's pieces begin."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> IntArray:
        """int64 `[num_packs]`: pieces of each pack."""
        return np.diff(self.offsets)

    def space(self, multiple: int) -> IntArray:
        """Return the slots of each pack: its pieces' lengths, each rounded up to a multiple."""
        slots = -(-self.pieces.lengths.astype(np.int64) // multiple) * multiple
        return np.add.reduceat(slots, self.offsets[:-1]) if len(self) else slots[:0]

    def oldest(self) -> Int32Array:
        """Return the age of each pack's oldest piece."""
        ages = self.pieces.ages
        return np.maximum.reduceat(ages, self.offsets[:-1]) if len(self) else ages[:0]

    def where(self, chosen: npt.NDArray[np.bool_]) -> Packs:
        """Return the packs where `chosen` is true."""
        return self._at(np.flatnonzero(chosen))

    def in_order(self) -> Packs:
        """Return the same packs, ordered by their first piece."""
        first = self.pieces.take(self.offsets[:-1])
        return self._at(np.lexsort((first.starts, first.records)))

    def and_then(self, other: Packs) -> Packs:
        """Return these packs followed by others."""
        return Packs(
            pieces=self.pieces.and_then(other.pieces),
            offsets=np.concatenate([self.offsets, other.offsets[1:] + self.offsets[-1]]),
        )

    def _at(self, packs: IntArray) -> Packs:
        """Return packs by number."""
        sizes = self.sizes[packs]
        ends = np.cumsum(sizes)
        index = np.arange(sizes.sum()) + np.repeat(self.offsets[packs] - (ends - sizes), sizes)
        return Packs(pieces=self.pieces.take(index), offsets=np.concatenate([[0], ends]).astype(np.int64))


def no_packs() -> Packs:
    """Return no packs."""
    return Packs(pieces=nothing(), offsets=np.zeros(1, np.int64))


# Packing all pieces of a window, so that none waits, into full packs that stay random:
#
#     pieces ──► best fit in order ──► `fill` in order ──► best-fit-decreasing
#                keeps full packs      keeps full packs    for the rest
#
# Where pieces are short, `fill` alone nearly always finds some of the next pieces that leave no space, so packs are
# random and as few as possible. Long pieces are placed best-fit first, which is fast and spreads the short pieces
# among them. If that takes more packs than necessary, other ways are tried, and the one with the fewest packs wins.

MIN_FILL = 0.995
"""A pack counts as full from this fill on."""
_MANY = 14  # with at least this many pieces per pack on average, pieces count as short

_Packed = tuple[Int32Array, int]  # the pack of each piece or -1, and the number of packs
_Pass = Callable[[Int32Array, int, int], _Packed]  # takes slots, capacity and max_documents


def whole(
    lengths: Int32Array, capacity: int, method: Method, max_documents: int, document_multiple_of: int
) -> _Packed:
    """Return the pack of each piece of a window, and the number of packs."""
    slots = slots_of(lengths, document_multiple_of)
    # A piece that fills a pack by itself gets one, so that it doesn't count in the average fill of the others.
    is_full = slots >= MIN_FILL * capacity
    pack_of = np.where(is_full, np.cumsum(is_full) - 1, -1).astype(np.int32)
    rest, num_full = np.flatnonzero(~is_full), int(np.count_nonzero(is_full))
    with jit.sized(rest.size * FILL_PIECE_S):
        pack_of_rest, num_packs = _fewest(slots[rest], capacity, method, max_documents)
    pack_of[rest] = pack_of_rest + np.int32(num_full)
    return pack_of, num_full + num_packs


def _fewest(slots: Int32Array, capacity: int, method: Method, max_documents: int) -> _Packed:
    """Try several ways to pack until packs are full enough; returns the result with the fewest packs."""
    best: _Packed | None = None
    for passes in _ways(slots, capacity, method, max_documents):
        if best is not None and _is_enough(best[1], slots, capacity, max_documents):
            break
        found = _run_passes(passes, slots, capacity, max_documents)
        best = found if best is None or found[1] < best[1] else best
    assert best is not None
    return best


def _ways(
    slots: Int32Array, capacity: int, method: Method, max_documents: int
) -> Iterator[tuple[_Pass, ...]]:
    """Yield sequences of passes, from the one that keeps packs most random to best-fit-decreasing alone."""
    first = functools.partial(_fitted, method=method)
    pieces_a_pack = slots.size * capacity / max(int(slots.sum(dtype=np.int64)), 1)
    if pieces_a_pack <= max_documents:  # else packs reach max_documents before they are full
        if pieces_a_pack >= _MANY:
            yield (_filled,)
        yield first, _filled
        yield first, functools.partial(_filled, long_first=True)
    yield (first,)
    yield ()


def _is_enough(num_packs: int, slots: Int32Array, capacity: int, max_documents: int) -> bool:
    """Whether packs are full on average, or their number is close to the lower bound."""
    tokens = int(slots.sum(dtype=np.int64))
    if num_packs * MIN_FILL <= tokens / capacity:
        return True
    fewest = lower_bound(slots, capacity, max_documents)
    return num_packs <= fewest or num_packs * MIN_FILL <= fewest - 1


def _run_passes(passes: tuple[_Pass, ...], slots: Int32Array, capacity: int, max_documents: int) -> _Packed:
    """Run passes, each over the pieces that those before left, and best-fit-decreasing at the end."""
    pack_of, num_packs = np.full(slots.size, -1, np.int32), 0
    rest: IntArray = np.arange(slots.size)
    for run in (*passes, _decreasing):
        pack_of_rest, count = run(slots[rest], capacity, max_documents)
        is_packed = pack_of_rest >= 0
        pack_of[rest[is_packed]] = pack_of_rest[is_packed] + np.int32(num_packs)
        rest, num_packs = rest[~is_packed], num_packs + count
    return pack_of, num_packs


def _decreasing(slots: Int32Array, capacity: int, max_documents: int) -> _Packed:
    """Pack all pieces best-fit-decreasing."""
    return assign("best_fit_decreasing", _items(slots), None, capacity, max_documents)


def _fitted(slots: Int32Array, capacity: int, max_documents: int, *, method: Method) -> _Packed:
    """Pack pieces by a method that keeps their order, and keep the full packs."""
    pack_of, num_packs = assign(method, _items(slots), None, capacity, max_documents)
    return _full(pack_of, num_packs, slots, capacity, max_documents)


def _filled(slots: Int32Array, capacity: int, max_documents: int, *, long_first: bool = False) -> _Packed:
    """Fill a pack around each piece in order; with `long_first`, around those over half a pack first."""
    order: Int32Array = np.arange(slots.size, dtype=np.int32)
    if long_first:
        order = np.argsort(np.where(slots > capacity // 2, -slots, 0), kind="stable").astype(np.int32)
    return fill(order, slots, capacity, MIN_FILL, max_documents, from_first=long_first)


def _full(
    pack_of: Int32Array, num_packs: int, slots: Int32Array, capacity: int, max_documents: int
) -> _Packed:
    """Keep the packs that are full, by the space that they take or their number of pieces."""
    space = np.bincount(pack_of, slots, num_packs)  # exact in float64: sums stay far below 2^53
    is_full = space >= MIN_FILL * capacity
    if max_documents < slots.size:
        is_full |= np.bincount(pack_of, minlength=num_packs) >= max_documents
    number = np.where(is_full, np.cumsum(is_full) - 1, -1).astype(np.int32)
    return number[pack_of], int(np.count_nonzero(is_full))


def _items(slots: Int32Array) -> Items:
    return Items(slots=slots, sizes=None, item_of=None)


# A round takes a given number of packs, full ones, out of the waiting pieces; the rest waits for the next round.
#
# Few pieces wait, so methods that place each piece once leave packs half full. The pieces that best fit leaves are
# therefore packed one pack at a time: each around the longest piece, with others that leave the least space.

_PATIENT = 4  # rounds after which a piece gets its pack before longer ones
SPARE_PACKS = 8
"""Packs' worth of pieces that should wait beyond those of the round, so that there is a choice."""
MOST_SPARE_PACKS = 32
"""The largest number of such packs, where few pieces are shorter than a pack."""
ENOUGH_SHORT = 128
"""With this many pieces shorter than a pack, some are found that fill one."""


def take(waiting: Waiting, count: int, passes: Passes, max_age: int) -> tuple[Packs, Waiting]:
    """Pack waiting pieces, and return `count` packs and the pieces that go on waiting.

    Packs with pieces of `max_age` come first, then full packs with the oldest pieces, then the fullest others. If
    packing keeps the order of documents, the first packs are returned.
    """
    if passes.keeps_order:
        packs = passes.packed(waiting, passes.method)
        chosen = np.arange(len(packs)) < count
    else:
        full, last = _packed(waiting, passes)
        packs = full.and_then(last)
        oldest = packs.oldest()
        is_full = np.arange(len(packs)) < len(full)
        # The last key is the most important: over max_age, full, the age of full packs, the fill of others.
        order = np.lexsort(
            (-packs.space(passes.multiple), -np.where(is_full, oldest, 0), ~is_full, oldest < max_age)
        )
        chosen = np.zeros(len(packs), np.bool_)
        chosen[order[:count]] = True
    return packs.where(chosen).in_order(), packs.where(~chosen).pieces.by_arrival().older()


def _packed(waiting: Waiting, passes: Passes) -> tuple[Packs, Packs]:
    """Return full packs, and those that can't be filled."""
    if passes.method != "best_fit" or passes.max_documents is not None:
        return passes.run(waiting)
    first = passes.packed(waiting, "best_fit")
    is_full = passes.is_full(first)
    full, rest = first.where(is_full), first.where(~is_full).pieces.by_arrival()
    filled, rest = _filled_one_by_one(rest, passes)
    more, last = passes.run(rest)
    return full.and_then(filled).and_then(more), last


def _filled_one_by_one(pieces: Waiting, passes: Passes) -> tuple[Packs, Waiting]:
    """Fill a pack around each piece, the longest first, with others in the order of arrival.

    Returns the full packs, and the remaining pieces.
    """
    slots = slots_of(pieces.lengths, passes.multiple)
    order = np.lexsort((np.arange(len(pieces)), -slots, pieces.ages < _PATIENT)).astype(np.int32)
    with jit.sized(len(pieces) * FILL_PIECE_S):
        pack_of, num_packs = fill(order, slots, passes.capacity, passes.min_fill, LARGEST, from_first=True)
        rest = pieces.take(pack_of < 0)
        return passes.arranged(pieces, pack_of, num_packs), rest
