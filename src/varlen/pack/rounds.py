"""A round of packing: exactly so many packs out of what waits, full ones, and the rest waits for the next round.

Few pieces wait, so methods that take each piece once leave packs half full. What best fit leaves is therefore packed
one pack at a time, each around the longest piece and filled as far as any choice of the others fills it: the minimum
bin slack of Gupta and Ho (1999), found by the sums that the pieces can make.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from varlen.pack.passes import Passes
from varlen.pack.pieces import slots_of
from varlen.pack.waiting import Packs, Waiting, no_packs
from varlen.types import IntArray

_MOST_TRIED = 256
"""Pieces among which those that fill a pack are looked for."""
_PATIENT = 4
"""Rounds after which a piece gets its pack before longer ones."""
_FINEST = 1 << 14
"""Sums that are told apart at most; of longer packs they are rounded up."""


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

    Args:
        waiting: in the order of their arrival, more of them than so many packs can hold, or all that is left.
        count: of packs.
        passes: how.
        max_age: rounds after which a piece goes out, however full its pack is.

    Returns:
        The packs, in the order of their first pieces, fewer than `count` only where nothing is left to wait; and the
        pieces that wait for the next round, a round older.
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
    """Pack all that waits into few packs, where no more will come.

    Args:
        waiting: in the order of their arrival.
        passes: how.
    """
    if passes.keeps_order:
        return passes.packed(waiting, passes.method)
    full, last = _packed(waiting, passes)
    return full.and_then(last).in_order()


def _packed(waiting: Waiting, passes: Passes) -> tuple[Packs, Packs]:
    """Return full packs, and those that nothing fills."""
    if passes.method != "best_fit" or passes.max_documents is not None:
        return passes.run(waiting)
    first = passes.packed(waiting, "best_fit")
    is_full = passes.is_full(first)
    full, rest = first.where(is_full), first.where(~is_full).pieces.by_arrival()
    filled, rest = _filled(rest, passes)
    more, last = passes.run(rest)
    return full.and_then(filled).and_then(more), last


def _filled(pieces: Waiting, passes: Passes) -> tuple[Packs, Waiting]:
    """Fill a pack around each piece, the longest first, with others in the order of their arrival, never by length.

    Returns the packs that get full, and what is left.
    """
    unit = max(-(-passes.capacity // _FINEST), passes.multiple)
    slots = -(-slots_of(pieces.lengths, passes.multiple) // unit)
    room, least = passes.capacity // unit, passes.min_fill * passes.capacity / unit
    free = np.ones(len(pieces), np.bool_)
    members: list[IntArray] = []
    patient = pieces.ages < _PATIENT
    for piece in np.lexsort((np.arange(len(pieces)), -slots, patient)).tolist():
        if not free[piece]:
            continue
        free[piece] = False
        others = np.flatnonzero(free)[:_MOST_TRIED]
        chosen = _closest(slots[others].tolist(), room - int(slots[piece]))
        pack = np.sort(np.append(others[chosen], piece)).astype(np.int64)
        if slots[pack].sum() >= least:
            members.append(pack)
            free[pack] = False
        else:
            free[piece] = True
    if not members:
        return no_packs(), pieces
    placed = np.concatenate(members)
    offsets = np.concatenate([[0], np.cumsum([len(pack) for pack in members])]).astype(np.int64)
    left = np.ones(len(pieces), np.bool_)
    left[placed] = False
    return Packs(pieces=pieces.take(placed), offsets=offsets), pieces.take(left)


def _closest(slots: Sequence[int], room: int) -> list[int]:
    """Return which of some pieces fill a room best, the first ones where several do as well.

    Bit s of a number says whether pieces can sum up to s, so that a shift adds a piece to all sums at once.
    """
    within = (1 << (room + 1)) - 1
    sums = [1]
    for slot in slots:
        sums.append(sums[-1] | (sums[-1] << slot) & within)
        if sums[-1] >> room:
            break
    at, chosen = sums[-1].bit_length() - 1, []
    for index in range(len(sums) - 2, -1, -1):
        if not sums[index] >> at & 1:
            chosen.append(index)
            at -= slots[index]
    return chosen[::-1]
