"""A whole window of pieces to packs, all of them, where nothing is to wait: full packs that stay at random.

::

    pieces ──► best fit in their order ──► filled in their order ──► best-fit-decreasing
                  full packs stay             full packs stay           what nothing fills

Short pieces are only filled: some of those that come next nearly always leave no space at all, so that packs are no
more alike than at random, and as few as can be. Long ones are placed best-fit first, which is fast and spreads the
short ones among them. Where that takes more packs than it must, other ways are tried, and the fewest packs are taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from varlen import jit
from varlen.pack.assign import FILL_PIECE_S, assign, fill
from varlen.pack.bound import lower_bound
from varlen.pack.pieces import Items, slots_of
from varlen.types import Int32Array, IntArray, Method

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
        capacity: tokens a pack can hold.
        method: by which long pieces are placed first, "best_fit" or "first_fit".
        max_documents: most pieces a pack may hold.
        document_multiple_of: the space of each piece is rounded up to it.

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
