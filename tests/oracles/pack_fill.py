"""The kernel that fills packs to the brim, in Python: the specification, and the oracle of its tests."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from varlen.pack.kernels_arrange import FAILED, FINEST, PASSED, PATIENT, SUMMED, UNSURE

Int32 = NDArray[np.int32]


def fill(
    order: Int32,
    slots: Int32,
    capacity: int,
    least: int,
    max_documents: int,
    from_first: bool,
    pack_of: Int32,
) -> int:
    """Fill a pack around each item of an order, if others fill it well enough; returns the number of packs.

    Others come from the first free item on, or from the item on around which the pack is, and round. A pack holds
    at least `least`; items that none holds keep -1.
    """
    sizes, free = slots.tolist(), np.flatnonzero(slots).tolist()
    left = sum(sizes)
    pack_of[:] = -1
    num_packs = failed = 0
    for seed in order.tolist():
        if left < least or failed > FAILED + num_packs:
            break
        if sizes[seed] == 0 or pack_of[seed] >= 0:
            continue
        at = bisect_left(free, seed)
        before, behind = islice(free, at), islice(free, at + 1, None)
        others = chain(before, behind) if from_first else chain(behind, before)
        filling = _filling(sizes, others, capacity - sizes[seed], least - sizes[seed])
        pack = [seed, *filling][:max_documents]  # fewer of them may be enough
        held = sum(sizes[item] for item in pack)
        if held < least:
            failed += 1
            continue
        for item in pack:
            pack_of[item] = num_packs
            del free[bisect_left(free, item)]
        left -= held
        num_packs += 1
    return num_packs


def _filling(slots: Sequence[int], others: Iterator[int], room: int, least: int) -> list[int]:
    """Return which of some items fill a room: those that come first, and at last those that sum up to it best.

    Bit s of a number says whether items can sum up to s, so that a shift adds an item to all sums at once.
    """
    fitting: list[int] = []
    over: list[int] = []
    held = passed = 0
    for item in others:
        if slots[item] > room:
            passed += 1
        elif held + slots[item] > room:
            over = [item]
        else:
            fitting.append(item)
            held += slots[item]
        if over or passed == PASSED:
            break
    chosen = fitting[: max(len(fitting) - UNSURE, 0)]
    held = sum(slots[item] for item in chosen)
    room, least = room - held, least - held
    unit = room // FINEST + 1
    within = (1 << room // unit + 1) - 1
    summed: list[int] = []
    sums = [1]
    for item in chain(fitting[len(chosen) :], over, islice(others, PASSED - passed)):
        is_enough = len(summed) >= PATIENT and (sums[-1].bit_length() - 1) * unit >= least
        if sums[-1] >> room // unit or is_enough or len(summed) == SUMMED:
            break
        if slots[item] <= room:
            summed.append(item)
            sums.append((sums[-1] | sums[-1] << -(-slots[item] // unit)) & within)
    left = sums.pop().bit_length() - 1
    for item, before in zip(reversed(summed), reversed(sums)):
        if not before >> left & 1:
            chosen.append(item)
            left -= -(-slots[item] // unit)
    return chosen
