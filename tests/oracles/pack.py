"""Every packing kernel in Python and NumPy: the specification that tests hold kernels against.

Written to be read. Arguments, results and numbering of packs are those of the kernels.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tests.oracles.pack_fill import fill as fill
from varlen.pack.in_python import _scramble as _scramble
from varlen.pack.in_python import audit as audit
from varlen.pack.in_python import batch_bounds as batch_bounds
from varlen.pack.in_python import best_fit as best_fit
from varlen.pack.in_python import best_fit_decreasing as best_fit_decreasing
from varlen.pack.in_python import checksum as checksum
from varlen.pack.in_python import gather_batches as gather_batches
from varlen.pack.in_python import misplaced as misplaced
from varlen.pack.in_python import next_fit as next_fit
from varlen.pack.in_python import order_batches as order_batches
from varlen.pack.in_python import permutation as permutation
from varlen.pack.in_python import rank_packs as rank_packs
from varlen.pack.in_python import renumber as renumber
from varlen.pack.in_python import wrapped as wrapped

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


def descending(slots: Int32, largest: int, order: Int32) -> None:
    """Write the items in order of falling slots, equal ones in input order."""
    order[:] = np.argsort(-slots, kind="stable")


def first_fit(
    order: Int32,
    slots: Int32,
    sizes: Int32,
    capacity: int,
    max_documents: int,
    most_packs: int,
    pack_of: Int32,
) -> int:
    """Put each item, in the order given, into the first pack with space; returns the number of packs."""
    rooms: list[int] = []
    places: list[int] = []
    for item in order.tolist():
        slot, size = int(slots[item]), int(sizes[item])
        if slot == 0:
            pack_of[item] = -1
            continue
        pack = next(_fitting(rooms, places, slot, size), len(rooms))
        if pack == len(rooms):
            rooms.append(capacity)
            places.append(max_documents)
        pack_of[item] = pack
        rooms[pack] -= slot
        places[pack] -= size
    return len(rooms)


def _fitting(rooms: list[int], places: list[int], slot: int, size: int) -> Iterator[int]:
    """The packs with space for an item, in order."""
    return (pack for pack in range(len(rooms)) if rooms[pack] >= slot and places[pack] >= size)


def balanced(
    order: Int32,
    slots: Int32,
    sizes: Int32,
    item_work: Float64,
    capacity: int,
    max_documents: int,
    num_packs: int,
    most_packs: int,
    pack_of: Int32,
) -> int:
    """Put each item, in the order given, into the pack with the least work that has space for it.

    Starts with `num_packs` empty packs and opens another only where no pack has space; returns the number of
    packs.
    """
    rooms = [capacity] * num_packs
    places = [max_documents] * num_packs
    work = [0.0] * num_packs
    for item in order.tolist():
        slot, size = int(slots[item]), int(sizes[item])
        if slot == 0:
            pack_of[item] = -1
            continue
        pack = min(_fitting(rooms, places, slot, size), key=work.__getitem__, default=len(rooms))
        if pack == len(rooms):
            rooms.append(capacity)
            places.append(max_documents)
            work.append(0.0)
        pack_of[item] = pack
        rooms[pack] -= slot
        places[pack] -= size
        work[pack] += float(item_work[item])
    return len(rooms)
