"""A round of packing: exactly so many packs out of what waits, full ones, and the rest waits for the next round.

Few pieces wait, so methods that take each piece once leave packs half full. What best fit leaves is therefore packed
one pack at a time, each around the longest piece, and filled with such others as leave the least space.
"""

from __future__ import annotations

import numpy as np

from varlen import jit
from varlen.pack.assign import FILL_PIECE_S, fill
from varlen.pack.lengths import LARGEST
from varlen.pack.passes import Passes
from varlen.pack.pieces import slots_of
from varlen.pack.waiting import Packs, Waiting

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
    return passes.all_of(waiting)


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
    slots = slots_of(pieces.lengths, passes.multiple)
    order = np.lexsort((np.arange(len(pieces)), -slots, pieces.ages < _PATIENT)).astype(np.int32)
    with jit.sized(len(pieces) * FILL_PIECE_S):
        pack_of, num_packs = fill(order, slots, passes.capacity, passes.min_fill, LARGEST, from_first=True)
        rest = pieces.take(pack_of < 0)
        return passes.arranged(pieces, pack_of, num_packs), rest
