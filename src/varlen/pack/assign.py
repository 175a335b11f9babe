"""Items to packs: one function a method, each a few lines around a kernel."""

from __future__ import annotations

import numpy as np

from varlen import jit
from varlen.pack import in_python, kernels, kernels_arrange
from varlen.pack.pieces import Items
from varlen.types import FloatArray, Int32Array, Method

FILL_PIECE_S = 6e-5
"""What Python takes to fill packs with a piece, at most."""
_TABLE = 2**24
"""Largest capacity for which kernels keep a table of all free spaces, up to 40 bytes each."""


def assign(
    method: Method, items: Items, item_work: FloatArray | None, capacity: int, max_documents: int
) -> tuple[Int32Array, int]:
    """Give every item a pack by one of the methods; `wrapped` cuts documents and so is not among them.

    Args:
        item_work: float64 `[num_items]`, for "balanced".

    Returns:
        int32 `[num_items]`, the pack of each item or -1, numbered as opened; and the number of packs.
    """
    slots = items.slots
    if capacity > slots.size:
        # Kernels take memory for every free space that a pack can have; none needs more than for all tokens.
        capacity = min(capacity, max(int(slots.sum(dtype=np.int64)), 1))
    fitting = in_python if capacity > _TABLE or jit.in_python() else kernels
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
    """More packs than any method opens that opens one only where no pack has space.

    Packs that stood open from the start are not counted. Any two of the others hold more than one capacity of
    tokens, or of documents, between them.
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
    """Spread work over this many packs, or a few more where not all fits in those; arguments as in `assign`."""
    order = np.argsort(-item_work, kind="stable").astype(np.int32)
    best: tuple[Int32Array, int] | None = None
    for _ in range(3):  # a rerun with the packs that were missing spreads work over those as well
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
    """Fill packs to the brim, each around a piece, with others in their order and never by length.

    Args:
        order: int32 `[any]`: the pieces around which a pack is tried, unless a pack holds them by then.
        slots: int32 `[num_pieces]`.

    Returns:
        int32 `[num_pieces]`, the pack of each piece or -1, and the number of packs.
    """
    pack_of, least = np.empty(slots.size, np.int32), -int(-min_fill * capacity // 1)
    return pack_of, kernels_arrange.fill(order, slots, capacity, least, max_documents, from_first, pack_of)


def _balance(
    slots: Int32Array, sizes: Int32Array, item_work: FloatArray, capacity: int, max_documents: int
) -> tuple[Int32Array, int]:
    """Spread work over the packs of best-fit-decreasing, or keep those where spreading would cost more."""
    dense = Items(slots=slots, sizes=sizes, item_of=None)
    fullest, num_packs = assign("best_fit_decreasing", dense, None, capacity, max_documents)
    even = spread(num_packs, slots, sizes, item_work, capacity, max_documents)
    return even if _cost(*even, item_work) <= _cost(fullest, num_packs, item_work) else (fullest, num_packs)


def _cost(pack_of: Int32Array, num_packs: int, item_work: FloatArray) -> float:
    """Work of the heaviest pack times the packs: what packs cost that run side by side and wait for each other."""
    placed = pack_of >= 0
    work = np.bincount(pack_of[placed], weights=item_work[placed], minlength=1)
    return num_packs * float(work.max())
