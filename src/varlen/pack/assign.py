"""Assign items to packs: calls the kernel of each method."""

from __future__ import annotations

import numpy as np

from varlen import jit
from varlen.pack import in_python, kernels, kernels_arrange
from varlen.pack.pieces import Items
from varlen.types import FloatArray, Int32Array, Method

FILL_PIECE_S = 6e-5  # upper estimate of what `fill` takes per piece in Python
_LARGEST_TABLE = (
    2**24
)  # largest capacity for kernels, whose tables take up to 40 bytes per amount of free space


def assign(
    method: Method, items: Items, item_work: FloatArray | None, capacity: int, max_documents: int
) -> tuple[Int32Array, int]:
    """Return the pack of each item, int32 or -1, and the number of packs, by any method but "wrapped"."""
    slots = items.slots
    if capacity > slots.size:
        # The tables of kernels grow with the capacity; one that holds all tokens is enough.
        capacity = min(capacity, max(int(slots.sum(dtype=np.int64)), 1))
    fitting = in_python if capacity > _LARGEST_TABLE or jit.in_python() else kernels
    pack_of = np.empty(slots.size, np.int32)
    if method == "best_fit_decreasing" and (items.sizes is None or max_documents >= items.sizes.sum()):
        return pack_of, fitting.best_fit_decreasing(slots, capacity, max_documents, pack_of)
    sizes = np.ones(slots.size, np.int32) if items.sizes is None else items.sizes
    if method == "next_fit":
        return pack_of, kernels.next_fit(slots, sizes, capacity, max_documents, pack_of)
    if method == "balanced":
        assert item_work is not None
        return _balance(slots, sizes, item_work, capacity, max_documents)
    order = np.arange(slots.size, dtype=np.int32)
    if method in ("first_fit_decreasing", "best_fit_decreasing"):
        if fitting is kernels:
            kernels.descending(slots, int(slots.max(initial=0)), order)
        else:
            order[:] = np.argsort(-slots, kind="stable")
    if method in ("best_fit", "best_fit_decreasing"):
        return pack_of, fitting.best_fit(order, slots, sizes, capacity, max_documents, pack_of)
    most = _most_packs(slots, sizes, capacity, max_documents)
    return pack_of, kernels.first_fit(order, slots, sizes, capacity, max_documents, most, pack_of)


def _most_packs(slots: Int32Array, sizes: Int32Array, capacity: int, max_documents: int) -> int:
    """Return an upper bound on the packs that a method opens if it opens one only where no pack has space.

    Any two such packs together hold more than `capacity` tokens or more than `max_documents` documents.
    """
    tokens = int(slots.sum(dtype=np.int64))
    documents = int(sizes.sum(dtype=np.int64))
    return min(slots.size, 2 * (tokens // capacity + documents // max_documents) + 4) + 1


def spread(
    num_packs: int,
    slots: Int32Array,
    sizes: Int32Array,
    item_work: FloatArray,
    capacity: int,
    max_documents: int,
) -> tuple[Int32Array, int]:
    """Balance work over `num_packs` packs, or a few more where not all items fit."""
    order = np.argsort(-item_work, kind="stable").astype(np.int32)
    best: tuple[Int32Array, int] | None = None
    for _ in range(3):  # if packs were added, a rerun that begins with them balances better
        most = num_packs + _most_packs(slots, sizes, capacity, max_documents)
        settings = (capacity, max_documents, num_packs, most)
        pack_of = np.empty(slots.size, np.int32)
        used = kernels.balanced(order, slots, sizes, item_work, *settings, pack_of)
        if best is not None and used > best[1]:
            break
        best = (pack_of, used)
        if used == num_packs:
            break
        num_packs = used
    assert best is not None
    return best


def fill(
    order: Int32Array,
    slots: Int32Array,
    capacity: int,
    min_fill: float,
    max_documents: int,
    *,
    from_first: bool = False,
) -> tuple[Int32Array, int]:
    """Fill a pack around each piece of `order` with other pieces in input order; see `kernels_arrange.fill`.

    Returns the pack of each piece or -1, and the number of packs.
    """
    pack_of, least = np.empty(slots.size, np.int32), -int(-min_fill * capacity // 1)
    return pack_of, kernels_arrange.fill(order, slots, capacity, least, max_documents, from_first, pack_of)


def _balance(
    slots: Int32Array, sizes: Int32Array, item_work: FloatArray, capacity: int, max_documents: int
) -> tuple[Int32Array, int]:
    """Balance work over the packs of best-fit-decreasing, or return those where balancing costs more."""
    dense = Items(slots=slots, sizes=sizes, item_of=None)
    fullest, num_packs = assign("best_fit_decreasing", dense, None, capacity, max_documents)
    even = spread(num_packs, slots, sizes, item_work, capacity, max_documents)
    return even if _cost(*even, item_work) <= _cost(fullest, num_packs, item_work) else (fullest, num_packs)


def _cost(pack_of: Int32Array, num_packs: int, item_work: FloatArray) -> float:
    """Return the largest work of a pack times the number of packs: parallel packs wait for the largest."""
    placed = pack_of >= 0
    work = np.bincount(pack_of[placed], weights=item_work[placed], minlength=1)
    return num_packs * float(work.max())
