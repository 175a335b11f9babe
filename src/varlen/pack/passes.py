"""Pieces that wait to packs that are full enough: in the order of arrival first, sorted by length only at last.

Shared by the packers of streams, which differ in what they do with the packs that aren't full.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen import jit
from varlen.arguments import LARGEST
from varlen.errors import StateError
from varlen.pack.api import DEFAULT_WORK, item_work, lower_bound, pack
from varlen.pack.assign import FILL_PIECE_S, assign, fill, spread
from varlen.pack.pieces import Items, arrange, audit, checksum, fit, slots_of
from varlen.types import Int32Array, IntArray, Method, Overlong

_SPREAD_PIECE_S = 5e-6
"""What a reference takes to spread one piece, at most."""

_ARRANGE_PIECE_S = 1e-6
"""What references take to lay out one piece, at most."""

_METHODS: dict[Method, tuple[Method, ...]] = {
    "best_fit": ("best_fit", "balanced", "best_fit_decreasing"),
    "first_fit": ("first_fit", "balanced", "best_fit_decreasing"),
}
"""Methods that pack a window one after the other, each what the one before left in packs that aren't full."""

STREAMS: tuple[Method, ...] = ("next_fit", "wrapped")
"""Methods with one open pack. It alone waits for the next documents, which continue it."""


def arrived(
    lengths: Int32Array, first_record: int, capacity: int, method: Method, overlong: Overlong
) -> tuple[Waiting, dict[str, int]]:
    """Return new documents as pieces that fit, and what was cut or dropped.

    Args:
        lengths: int32 `[documents]`, checked.
    """
    if method == "wrapped" and overlong in ("error", "split"):
        kept, documents, starts, losses = lengths, None, None, {}
    else:
        with jit.sized(lengths.size * _ARRANGE_PIECE_S):
            pieces = fit(lengths, capacity, overlong)
        kept, documents, starts, losses = pieces.lengths, pieces.documents, pieces.starts, pieces.losses
    numbers = np.arange(kept.size) if documents is None else documents
    first = np.zeros(kept.size, np.int32) if starts is None else starts
    real = kept > 0
    pieces_ = Waiting(
        records=(numbers + first_record)[real],
        starts=first[real],
        stops=(first + kept)[real],
        ages=np.zeros(int(real.sum()), np.int32),
    )
    return pieces_, losses


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """How pieces are packed."""

    capacity: int
    method: Method
    max_documents: int | None
    multiple: int
    min_fill: float
    """Packs at least this full are full, from 0 to 1."""

    @property
    def keeps_order(self) -> bool:
        """Whether documents stay in the order of their arrival, so that one pack is open at a time."""
        return self.method in STREAMS

    def run(self, pieces: Waiting) -> tuple[Packs, Packs]:
        """Pack pieces; returns the packs that are full, and those that the last pass left less full."""
        full, rest, last = no_packs(), pieces, no_packs()
        for method in _METHODS.get(self.method, (self.method,)):
            spreads = method == "balanced" != self.method
            packs = self._spread(rest) if spreads else self.packed(rest, method)
            is_full = self.is_full(packs)
            full, last = full.and_then(packs.where(is_full)), packs.where(~is_full)
            rest = last.pieces.by_arrival()
        return full, last

    def all_of(self, pieces: Waiting) -> Packs:
        """Pack pieces, all of them, in the order of their first pieces: where nothing is to wait."""
        if self.method not in _METHODS:
            return self.packed(pieces, self.method)
        found = whole(
            pieces.lengths, self.capacity, self.method, self.max_documents or LARGEST, self.multiple
        )
        with jit.sized(len(pieces) * _ARRANGE_PIECE_S):
            return self.arranged(pieces, *found)

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
        """Pieces in packs of about equal work, also where best-fit-decreasing would need fewer packs.

        Packs that come out full are mixed at random, and what doesn't is packed again.
        """
        with jit.sized(len(pieces) * _SPREAD_PIECE_S):
            return self._spread_sized(pieces)

    def _spread_sized(self, pieces: Waiting) -> Packs:
        lengths, most = pieces.lengths, self.max_documents or LARGEST
        items = Items(slots=slots_of(lengths, self.multiple), sizes=None, item_of=None)
        fewest = assign("best_fit_decreasing", items, None, self.capacity, most)[1]
        work, ones = item_work(lengths, items, DEFAULT_WORK), np.ones(len(pieces), np.int32)
        pack_of, num_packs = spread(fewest, items.slots, ones, work, self.capacity, most)
        return self.arranged(pieces, pack_of, num_packs)

    def arranged(self, pieces: Waiting, pack_of: Int32Array, num_packs: int) -> Packs:
        """Lay out packs in the order of their first pieces, and audit them.

        Args:
            pack_of: int32 `[num_pieces]`: packs as opened, -1 for pieces that aren't packed; overwritten.
        """
        lengths, most = np.where(pack_of < 0, np.int32(0), pieces.lengths), self.max_documents or LARGEST
        expected = checksum(lengths)
        placed, placed_lengths, offsets = arrange(lengths, pack_of, num_packs, None)
        audit(placed, placed_lengths, offsets, self.capacity, most, self.multiple, expected)
        return Packs(pieces=pieces.take(placed), offsets=offsets)

    def is_full(self, packs: Packs) -> npt.NDArray[np.bool_]:
        """Which packs are full enough to hand out, by the space they take up or their number of pieces."""
        least = self.capacity if self.keeps_order else self.min_fill * self.capacity
        full = (packs.space(self.multiple) >= least) | (packs.sizes >= (self.max_documents or LARGEST))
        if self.keeps_order:
            full[:-1] = True
        return full


# Pieces of documents that wait for a pack, and packs of them, as flat arrays: what WindowPacker moves about.


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Pieces that no pack holds yet, in the order of their arrival."""

    records: IntArray
    """int64 `[num_pieces]`: number of each piece's document, counted from the first ever taken."""
    starts: Int32Array
    """int32 `[num_pieces]`: first token of the piece within its document."""
    stops: Int32Array
    """int32 `[num_pieces]`: one past its last token."""
    ages: Int32Array
    """int32 `[num_pieces]`: windows that a piece has been carried through."""

    def __len__(self) -> int:
        """Pieces."""
        return len(self.records)

    @property
    def lengths(self) -> Int32Array:
        """int32 `[num_pieces]`: tokens of each piece."""
        return self.stops - self.starts

    def take(self, index: Any) -> Waiting:
        """Some of the pieces."""
        return Waiting(
            records=self.records[index],
            starts=self.starts[index],
            stops=self.stops[index],
            ages=self.ages[index],
        )

    def by_arrival(self) -> Waiting:
        """The same pieces in the order in which they came."""
        return self.take(np.lexsort((self.starts, self.records)))

    def older(self) -> Waiting:
        """The same pieces, one window older."""
        return Waiting(
            records=self.records, starts=self.starts, stops=self.stops, ages=self.ages + np.int32(1)
        )

    def and_then(self, other: Waiting) -> Waiting:
        """These pieces and others after them."""
        return Waiting(
            records=np.concatenate([self.records, other.records]),
            starts=np.concatenate([self.starts, other.starts]),
            stops=np.concatenate([self.stops, other.stops]),
            ages=np.concatenate([self.ages, other.ages]),
        )

    def to_state(self) -> dict[str, list[int]]:
        """The pieces as lists of numbers."""
        return {name: getattr(self, name).tolist() for name in self.__slots__}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], num_records: int, fresh: int) -> Waiting:
        """Read what `to_state` wrote.

        Args:
            state: lists by name.
            num_records: documents taken so far; every piece belongs to one of them.
            fresh: pieces at the end that no window has held, and so have age 0.

        Raises:
            StateError: not pieces in the order of their arrival.
            KeyError: a list is missing.
        """
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
                "order of their arrival; it was cut or changed"
            )
        return cls(
            records=records,
            starts=starts.astype(np.int32),
            stops=stops.astype(np.int32),
            ages=ages.astype(np.int32),
        )


def _whole_numbers(values: Any, name: str) -> IntArray:
    """A list of a state as int64."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind != "i"):
        raise StateError(f"the state's {name} are no list of whole numbers; it was cut or changed")
    return array.astype(np.int64)


def nothing() -> Waiting:
    """No pieces."""
    empty = np.empty(0, np.int32)
    return Waiting(records=np.empty(0, np.int64), starts=empty, stops=empty, ages=empty)


@dataclass(frozen=True, kw_only=True, slots=True)
class Packs:
    """Pieces pack by pack."""

    pieces: Waiting
    offsets: IntArray
    """int64 `[num_packs + 1]`: where each pack's pieces begin."""

    def __len__(self) -> int:
        """Packs."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> IntArray:
        """int64 `[num_packs]`: pieces of each pack."""
        return np.diff(self.offsets)

    def space(self, multiple: int) -> IntArray:
        """Tokens that each pack takes up, its pieces rounded up to a multiple; int64 `[num_packs]`."""
        slots = -(-self.pieces.lengths.astype(np.int64) // multiple) * multiple
        return np.add.reduceat(slots, self.offsets[:-1]) if len(self) else slots[:0]

    def oldest(self) -> Int32Array:
        """The age of each pack's oldest piece, int32 `[num_packs]`."""
        ages = self.pieces.ages
        return np.maximum.reduceat(ages, self.offsets[:-1]) if len(self) else ages[:0]

    def where(self, chosen: npt.NDArray[np.bool_]) -> Packs:
        """Some of the packs."""
        return self._at(np.flatnonzero(chosen))

    def in_order(self) -> Packs:
        """The same packs in the order of their first piece."""
        first = self.pieces.take(self.offsets[:-1])
        return self._at(np.lexsort((first.starts, first.records)))

    def and_then(self, other: Packs) -> Packs:
        """These packs and others after them."""
        return Packs(
            pieces=self.pieces.and_then(other.pieces),
            offsets=np.concatenate([self.offsets, other.offsets[1:] + self.offsets[-1]]),
        )

    def _at(self, packs: IntArray) -> Packs:
        """Packs by number."""
        sizes = self.sizes[packs]
        ends = np.cumsum(sizes)
        index = np.arange(sizes.sum()) + np.repeat(self.offsets[packs] - (ends - sizes), sizes)
        return Packs(pieces=self.pieces.take(index), offsets=np.concatenate([[0], ends]).astype(np.int64))


def no_packs() -> Packs:
    """No packs."""
    return Packs(pieces=nothing(), offsets=np.zeros(1, np.int64))


# A whole window of pieces to packs, all of them, where nothing is to wait: full packs that stay at random.
#
# ::
#
#     pieces ──► best fit in their order ──► filled in their order ──► best-fit-decreasing
#                   full packs stay             full packs stay           what nothing fills
#
# Short pieces are only filled: some of those that come next nearly always leave no space at all, so that
# packs are no more alike than at random, and as few as can be. Long ones are placed best-fit first, which is
# fast and spreads the short ones among them. Where that takes more packs than it must, other ways are tried,
# and the fewest packs are taken.

MIN_FILL = 0.995
"""How full a pack is that is called full."""
_MANY = 14
"""Pieces a pack from which on they are short."""

_Placed = tuple[Int32Array, int]
"""int32 `[num_pieces]`, the pack of each piece or -1, and the number of packs."""
_Pass = Callable[[Int32Array, int, int], _Placed]
"""Takes the slots of pieces, the capacity and the most documents of a pack."""


def whole(
    lengths: Int32Array, capacity: int, method: Method, max_documents: int, document_multiple_of: int
) -> _Placed:
    """Give every piece of a window a pack.

    Args:
        lengths: int32 `[num_pieces]`, from 1 to the capacity.

    Returns:
        The pack of each piece, int32 `[num_pieces]`, and the number of packs.
    """
    slots = slots_of(lengths, document_multiple_of)
    # Pieces that fill a pack alone, as those of long documents that were cut, say nothing of how full the others get.
    is_full = slots >= MIN_FILL * capacity
    pack_of = np.where(is_full, np.cumsum(is_full) - 1, -1).astype(np.int32)
    rest, num_full = np.flatnonzero(~is_full), int(np.count_nonzero(is_full))
    with jit.sized(rest.size * FILL_PIECE_S):
        found, num_packs = _fewest(slots[rest], capacity, method, max_documents)
    pack_of[rest] = found + np.int32(num_full)
    return pack_of, num_full + num_packs


def _fewest(slots: Int32Array, capacity: int, method: Method, max_documents: int) -> _Placed:
    """Pack pieces in one way after the other, until packs are full enough; the fewest of all."""
    best: _Placed | None = None
    for passes in _ways(slots, capacity, method, max_documents):
        if best is not None and _is_enough(best[1], slots, capacity, max_documents):
            break
        found = _placed(passes, slots, capacity, max_documents)
        best = found if best is None or found[1] < best[1] else best
    assert best is not None
    return best


def _ways(
    slots: Int32Array, capacity: int, method: Method, max_documents: int
) -> Iterator[tuple[_Pass, ...]]:
    """Yield ways to pack, from the one that keeps packs most random to best-fit-decreasing alone."""
    first = functools.partial(_fitted, method=method)
    pieces_a_pack = slots.size * capacity / max(int(slots.sum(dtype=np.int64)), 1)
    if pieces_a_pack <= max_documents:  # else packs are full by their pieces, and none of them by tokens
        if pieces_a_pack >= _MANY:
            yield (_filled,)
        yield first, _filled
        yield first, functools.partial(_filled, long_first=True)
    yield (first,)
    yield ()


def _is_enough(num_packs: int, slots: Int32Array, capacity: int, max_documents: int) -> bool:
    """Whether packs are full on average, or as few as can be, or nearly so where they can't be full."""
    tokens = int(slots.sum(dtype=np.int64))
    if num_packs * MIN_FILL <= tokens / capacity:
        return True
    fewest = lower_bound(slots, capacity, max_documents)
    return num_packs <= fewest or num_packs * MIN_FILL <= fewest - 1


def _placed(passes: tuple[_Pass, ...], slots: Int32Array, capacity: int, max_documents: int) -> _Placed:
    """Pack pieces by one pass after the other, each what those before left; the last ones best-fit-decreasing."""
    pack_of, num_packs = np.full(slots.size, -1, np.int32), 0
    rest: IntArray = np.arange(slots.size)
    for one in (*passes, _decreasing):
        found, count = one(slots[rest], capacity, max_documents)
        is_placed = found >= 0
        pack_of[rest[is_placed]] = found[is_placed] + np.int32(num_packs)
        rest, num_packs = rest[~is_placed], num_packs + count
    return pack_of, num_packs


def _decreasing(slots: Int32Array, capacity: int, max_documents: int) -> _Placed:
    """All pieces, best-fit-decreasing."""
    return assign("best_fit_decreasing", _items(slots), None, capacity, max_documents)


def _fitted(slots: Int32Array, capacity: int, max_documents: int, *, method: Method) -> _Placed:
    """The full packs of a method that places pieces in their order."""
    found = assign(method, _items(slots), None, capacity, max_documents)
    return _full(*found, slots, capacity, max_documents)


def _filled(slots: Int32Array, capacity: int, max_documents: int, *, long_first: bool = False) -> _Placed:
    """Packs filled around one piece after the other, in their order; on request those over half a pack first."""
    order: Int32Array = np.arange(slots.size, dtype=np.int32)
    if long_first:
        order = np.argsort(np.where(slots > capacity // 2, -slots, 0), kind="stable").astype(np.int32)
    return fill(order, slots, capacity, MIN_FILL, max_documents, from_first=long_first)


def _full(
    pack_of: Int32Array, num_packs: int, slots: Int32Array, capacity: int, max_documents: int
) -> _Placed:
    """Only those of some packs that are full, by the space they take up or their number of pieces."""
    space = np.bincount(pack_of, slots, num_packs)  # sums are whole, far below 2^53
    is_full = space >= MIN_FILL * capacity
    if max_documents < slots.size:
        is_full |= np.bincount(pack_of, minlength=num_packs) >= max_documents
    number = np.where(is_full, np.cumsum(is_full) - 1, -1).astype(np.int32)
    return number[pack_of], int(np.count_nonzero(is_full))


def _items(slots: Int32Array) -> Items:
    return Items(slots=slots, sizes=None, item_of=None)


# A round of packing: exactly so many packs out of what waits, full ones, and the rest waits for the next round.
#
# Few pieces wait, so methods that take each piece once leave packs half full. What best fit leaves is
# therefore packed one pack at a time, each around the longest piece, and filled with such others as leave the
# least space.

_PATIENT = 4
"""Rounds after which a piece gets its pack before longer ones."""
SPARE_PACKS = 8
"""Packs that should wait beside those of the round, so that there is a choice."""
MOST_SPARE_PACKS = 32
"""Packs that wait at most beside those of the round, where there are few pieces shorter than a pack."""
ENOUGH_SHORT = 128
"""Pieces shorter than a pack among which those that fill one are found."""


def take(waiting: Waiting, count: int, passes: Passes, max_age: int) -> tuple[Packs, Waiting]:
    """Pack what waits, and hand out so many packs.

    Of the full packs those go out that hold the oldest pieces; where they aren't enough, the fullest others follow.
    Where packing keeps the order of documents, the first packs go out.
    """
    if passes.keeps_order:
        packs = passes.packed(waiting, passes.method)
        chosen = np.arange(len(packs)) < count
    else:
        full, last = _packed(waiting, passes)
        packs = full.and_then(last)
        oldest = packs.oldest()
        is_full = np.arange(len(packs)) < len(full)
        # From the most important key, which comes last: must it go, is it full, how old is it or how full.
        order = np.lexsort(
            (-packs.space(passes.multiple), -np.where(is_full, oldest, 0), ~is_full, oldest < max_age)
        )
        chosen = np.zeros(len(packs), np.bool_)
        chosen[order[:count]] = True
    return packs.where(chosen).in_order(), packs.where(~chosen).pieces.by_arrival().older()


def take_all(waiting: Waiting, passes: Passes) -> Packs:
    """Pack all that waits into few packs, where no more will come."""
    return passes.all_of(waiting)


def _packed(waiting: Waiting, passes: Passes) -> tuple[Packs, Packs]:
    """Return full packs, and those that nothing fills."""
    if passes.method != "best_fit" or passes.max_documents is not None:
        return passes.run(waiting)
    first = passes.packed(waiting, "best_fit")
    is_full = passes.is_full(first)
    full, rest = first.where(is_full), first.where(~is_full).pieces.by_arrival()
    filled, rest = _filled_one_by_one(rest, passes)
    more, last = passes.run(rest)
    return full.and_then(filled).and_then(more), last


def _filled_one_by_one(pieces: Waiting, passes: Passes) -> tuple[Packs, Waiting]:
    """Fill a pack around each piece, the longest first, with others in the order of their arrival, never by length.

    Returns the packs that get full, and what is left.
    """
    slots = slots_of(pieces.lengths, passes.multiple)
    order = np.lexsort((np.arange(len(pieces)), -slots, pieces.ages < _PATIENT)).astype(np.int32)
    with jit.sized(len(pieces) * FILL_PIECE_S):
        pack_of, num_packs = fill(order, slots, passes.capacity, passes.min_fill, LARGEST, from_first=True)
        rest = pieces.take(pack_of < 0)
        return passes.arranged(pieces, pack_of, num_packs), rest
