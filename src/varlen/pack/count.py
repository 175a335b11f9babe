"""How many packs a window of documents gives, without making them: a third of the work."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from varlen.pack.api import DEFAULT_WORK, item_work
from varlen.pack.assign import assign, spread
from varlen.pack.lengths import LARGEST, as_lengths
from varlen.pack.pieces import Items, fit, slots_of
from varlen.pack.window import MIN_FILL, WindowPacker
from varlen.types import Int32Array, IntArray, Method, Overlong


def count_packs(
    lengths: npt.ArrayLike,
    *,
    capacity: int,
    window: int,
    method: Method = "best_fit",
    overlong: Overlong = "split",
    max_documents: int | None = None,
    document_multiple_of: int = 1,
) -> int:
    """Count the packs that a WindowPacker of these settings gives for some documents and nothing after them.

    With the default method the passes of `WindowPacker` are gone through for their packs' sizes alone; whatever
    else may come up is packed.

    Args:
        lengths: `[any]` tokens of each document.
        capacity: tokens a pack can hold.
        window: pieces packed at a time.
        method: any of `vl.pack`'s methods.
        overlong: what becomes of documents longer than `capacity`.
        max_documents: most pieces a pack may hold; None for no limit.
        document_multiple_of: round the space each piece takes up to this multiple.

    Raises:
        LengthsError: lengths that can't be.
        OverlongDocumentError: a document doesn't fit and `overlong` is "error".
    """
    checked, most = as_lengths(lengths), max_documents or LARGEST
    if method == "best_fit":
        kept = fit(checked, capacity, overlong).lengths
        rest = kept[kept > 0]
        if len(rest) < window:
            return assign("best_fit_decreasing", _items(rest, document_multiple_of), None, capacity, most)[1]
        if len(rest) == window:
            return _passes(rest, capacity, most, document_multiple_of)
    packer = WindowPacker(
        capacity=capacity,
        window=window,
        method=method,
        overlong=overlong,
        max_documents=max_documents,
        document_multiple_of=document_multiple_of,
    )
    return packer.add(checked).num_packs + packer.flush().num_packs


def _passes(rest: Int32Array, capacity: int, most: int, multiple: int) -> int:
    """Count the packs of one full window.

    What the last pass leaves in packs that aren't full is packed best-fit-decreasing again in the end. Without the
    pieces of packs that have gone every piece finds the place that it had, so those packs needn't be made again.
    """
    done = 0
    methods: tuple[Method, ...] = ("best_fit", "balanced")
    for method in methods:
        items = _items(rest, multiple)
        if method == "balanced":
            fewest = assign("best_fit_decreasing", items, None, capacity, most)[1]
            ones = np.ones(len(rest), np.int32)
            work = item_work(rest, items, DEFAULT_WORK)
            pack_of, num_packs = spread(fewest, items.slots, ones, work, capacity, most)
        else:
            pack_of, num_packs = assign(method, items, None, capacity, most)
        space: IntArray = np.bincount(pack_of, items.slots, num_packs)  # sums are whole, far below 2^53
        sizes = np.bincount(pack_of, minlength=num_packs)
        full = (space >= MIN_FILL * capacity) | (sizes >= most)
        done += int(np.count_nonzero(full & (sizes > 0)))
        rest = rest[~full[pack_of]]
    return done + assign("best_fit_decreasing", _items(rest, multiple), None, capacity, most)[1]


def _items(lengths: Int32Array, multiple: int) -> Items:
    return Items(slots=slots_of(lengths, multiple), sizes=None, item_of=None)
