"""`partition`: divide weights into parts so that the heaviest is light, and documents into packs of even work."""

from __future__ import annotations

import heapq
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from varlen import jit
from varlen.arguments import LARGEST
from varlen.errors import LengthsError, SettingError
from varlen.pack.api import pack, spread
from varlen.plan import kernels
from varlen.types import FloatArray, Int32Array, IntArray

Division = Literal["best", "karmarkar_karp", "greedy"]
STEPS = 2**23
"""Steps of improvement, each about the time of a memory access: 0.1 s, more than a few thousand items need."""
_LARGEST = 2**62  # twice the weight of all items must stay within 64 bits


def partition(
    weights: npt.ArrayLike, num_parts: int, *, is_equal: bool = False, method: Division = "best"
) -> Int32Array:
    """Divide weights into parts so that the heaviest part is light; returns the part of each item.

    - "karmarkar_karp": the largest differencing method (Karmarkar & Karp 1982, "The Differencing Method of Set
      Partitioning"); for parts of equal size the balanced one (Michiels, Korst & Aarts 2003, "Performance ratios
      for the Karmarkar-Karp differencing method").
    - "greedy": each in input order to the lightest part, the lightest of the smallest for parts of equal size.
    - "best": begins with Karmarkar-Karp, and with greedy from heavy to light (Graham 1969, "Bounds on
      Multiprocessing Timing Anomalies"). Each is improved by moving or swapping items of the heaviest part as long as
      that helps; the better one is returned. Its heaviest part is never heavier than that of Karmarkar-Karp, nor over
      4/3 of the optimum, or twice the optimum for parts of equal size.

    No part is empty, except that "greedy" may leave parts empty if weights are 0. Karmarkar-Karp takes at most
    O(n·(log n + num_parts / 4)).

    >>> partition([8, 7, 6, 5, 4], 2).tolist()
    [0, 0, 1, 1, 1]
    """
    values = as_weights(weights)
    if method not in get_args(Division):
        raise SettingError(f"method must be one of {', '.join(get_args(Division))}; got {method!r}")
    _check_parts(values.size, num_parts, is_equal)
    part_of = np.zeros(values.size, np.int32)
    if num_parts == 1:
        return part_of
    with jit.sized(_reference_s(values.size, num_parts, method)):
        if method == "greedy":
            given = np.arange(values.size, dtype=np.int32)
            kernels.greedy(given, values, num_parts, is_equal, part_of)
            return part_of
        kernels.karmarkar_karp(values, num_parts, is_equal, part_of)
        if method == "karmarkar_karp":
            return part_of
        return _improved(values, num_parts, is_equal, part_of)


def loads_of(weights: npt.ArrayLike, part_of: Int32Array, num_parts: int) -> npt.NDArray[Any]:
    """Return the weight of each part, int64 for whole numbers and float64 for others."""
    values = as_weights(weights)
    loads = np.zeros(num_parts, values.dtype)
    np.add.at(loads, part_of, values)
    return loads


def by_part(part_of: Int32Array, num_parts: int) -> tuple[IntArray, IntArray]:
    """Return the items of each part as int64 `[num_items]`, rising, and offsets int64 `[num_parts + 1]`."""
    offsets = np.zeros(num_parts + 1, np.int64)
    np.cumsum(np.bincount(part_of, minlength=num_parts), out=offsets[1:])
    return np.argsort(part_of, kind="stable"), offsets


def as_weights(weights: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return validated weights, as int64 if the dtype is integral, else as float64."""
    try:
        array = np.asarray(weights)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise LengthsError(f"weights can't be read as one number per item: {error}") from None
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise LengthsError(
            f"weights must be numbers in one dimension, one per item; got {array.dtype} of shape {array.shape}"
        )
    wide = array.astype(np.float64)
    wrong = ~(np.isfinite(wide) & (wide >= 0))
    if wrong.any():
        first = int(np.argmax(wrong))
        raise LengthsError(
            f"weight {array[first].item()!r} of item {first:,} is negative or not finite "
            f"({int(wrong.sum()):,} of {array.size:,} weights are)"
        )
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            if not np.isfinite(2 * wide.sum()):
                raise LengthsError(
                    "the weights are too large: twice their sum is no finite number; scale them down"
                )
        return wide
    if wide.sum() >= _LARGEST:
        raise LengthsError(
            f"the weights add up to {wide.sum():.3g}, over the limit of 2^62 for whole numbers; "
            "scale them down, or pass them as floats"
        )
    return array.astype(np.int64)


def _check_parts(num_items: int, num_parts: int, is_equal: bool) -> None:
    """Require that every part can have an item, and the same number of items if sizes are equal."""
    if isinstance(num_parts, bool) or not isinstance(num_parts, int | np.integer) or num_parts < 1:
        raise SettingError(f"the number of parts must be a whole number of at least 1, got {num_parts!r}")
    if num_parts > num_items:
        raise SettingError(
            f"{num_items:,} items can't fill {num_parts:,} parts; ask for at most {num_items:,} parts or give more"
        )
    if is_equal and num_items % num_parts:
        below = num_items // num_parts * num_parts
        raise SettingError(
            f"{num_items:,} items can't be divided into {num_parts:,} parts of equal size; give {below:,} or "
            f"{below + num_parts:,} items, or allow parts of different sizes"
        )


def _improved(values: npt.NDArray[Any], num_parts: int, is_equal: bool, first: Int32Array) -> Int32Array:
    """Improve `first` (in place) and the greedy division; returns the better one, parts numbered by first item."""
    order = np.argsort(-values, kind="stable").astype(np.int32)
    second = np.empty(values.size, np.int32)
    kernels.greedy(order, values, num_parts, is_equal, second)
    candidates = [first]
    if np.bincount(second, minlength=num_parts).min() > 0:  # items of weight 0 may all be in one part
        candidates.append(second)
    for part_of in candidates:
        kernels.improve(order, values, num_parts, is_equal, STEPS // 2, part_of)
    best = min(candidates, key=lambda part_of: loads_of(values, part_of, num_parts).max())
    _, begins, numbers = np.unique(best, return_index=True, return_inverse=True)
    rank = np.empty(num_parts, np.int32)
    rank[np.argsort(begins, kind="stable")] = np.arange(num_parts, dtype=np.int32)
    return rank[numbers]


def _reference_s(num_items: int, num_parts: int, method: Division) -> float:
    """Return an upper estimate of the seconds that `partition` takes in Python."""
    dealt = 1e-6 * num_items
    if method == "greedy":
        return dealt
    merged = 4e-7 * num_items * num_parts
    searched = 2e-7 * (num_items / num_parts) ** 2 * 4 * num_parts
    return dealt + merged + (searched if method == "best" else 0.0)


# Packs of even work in a given number, for ranks or pipelines that all run equally many.


def packed(
    lengths: Int32Array,
    capacity: int,
    max_documents: int = LARGEST,
    method: Literal["best_fit_decreasing", "next_fit"] = "best_fit_decreasing",
) -> tuple[Int32Array, int]:
    """Return the pack of each document by one of the packer's methods, and the number of packs."""
    packing = pack(lengths, capacity, method, max_documents=max_documents)
    pack_of = np.empty(lengths.size, np.int32)
    pack_of[packing.document_ids] = np.repeat(np.arange(packing.num_packs), np.diff(packing.offsets))
    return pack_of, packing.num_packs


def even_ways(
    lengths: Int32Array,
    work: FloatArray,
    pack_of: Int32Array,
    num_packs: int,
    capacity: int,
    max_documents: int = LARGEST,
) -> list[Int32Array]:
    """Return one to four ways to fill a number of packs evenly, none of them empty, for the caller to choose from.

    The first halves the heaviest of the given packs (`pack_of`, as `packed` returns it). The others, if they fit, are
    the parts of `fitting_parts`, and documents by falling work, each to the pack with the least.
    """
    ways = [halved(pack_of, num_packs, work)]
    if not lengths.size:
        return ways
    ways += fitting_parts(lengths, work, num_packs, capacity, max_documents)
    ones = np.ones(lengths.size, np.int32)
    even, used = spread(num_packs, lengths, ones, work, capacity, max_documents)
    if used == num_packs and np.bincount(even, minlength=used).min():
        ways.append(even)
    return ways


def even_packs(
    lengths: Int32Array, work: FloatArray, num_packs: int, capacity: int, max_documents: int = LARGEST
) -> Int32Array:
    """Divide documents into a number of packs, none of them empty, whose heaviest is light.

    >>> even_packs(np.array([5, 5, 2, 2], np.int32), np.array([5.0, 5.0, 2.0, 2.0]), 2, 8).tolist()
    [0, 1, 0, 1]
    """
    fullest, fewest = packed(lengths, capacity, max_documents)
    if num_packs > lengths.size:
        raise SettingError(
            f"{lengths.size:,} documents can't fill {num_packs:,} packs; ask for at most as many"
        )
    if num_packs >= fewest:
        ways = even_ways(lengths, work, fullest, num_packs, capacity, max_documents)
    else:
        ways = fitting_parts(lengths, work, num_packs, capacity, max_documents)
    if not ways:
        raise SettingError(
            f"{num_packs:,} packs of {capacity:,} tokens don't hold {lengths.size:,} documents; {fewest:,} do"
        )
    return min(ways, key=lambda way: float(np.bincount(way, weights=work, minlength=1).max()))


def fitting_parts(
    lengths: Int32Array, work: FloatArray, num_packs: int, capacity: int, max_documents: int = LARGEST
) -> list[Int32Array]:
    """Return partitions of even work, by "best" and "karmarkar_karp", as far as they fit into packs."""
    parts = [partition(work, num_packs), partition(work, num_packs, method="karmarkar_karp")]
    return [part_of for part_of in parts if _holds(part_of, lengths, num_packs, capacity, max_documents)]


def halved(pack_of: Int32Array, num_packs: int, work: FloatArray) -> Int32Array:
    """Cut the pack with the most work into even halves until there are `num_packs`; no given pack may be empty."""
    packs = int(pack_of.max(initial=-1)) + 1
    if packs == num_packs:
        return pack_of
    cut = pack_of.copy()
    items_of = np.split(
        np.argsort(pack_of, kind="stable"), np.cumsum(np.bincount(pack_of, minlength=packs))[:-1]
    )
    waiting = [(-float(work[items].sum()), number) for number, items in enumerate(items_of) if items.size > 1]
    heapq.heapify(waiting)
    for number in range(packs, num_packs):
        _, heavy = heapq.heappop(waiting)
        side = partition(work[items_of[heavy]], 2)
        cut[items_of[heavy][side == 1]] = number
        items_of.append(items_of[heavy][side == 1])
        items_of[heavy] = items_of[heavy][side == 0]
        for part in (heavy, number):
            if items_of[part].size > 1:
                heapq.heappush(waiting, (-float(work[items_of[part]].sum()), part))
    return cut


def _holds(
    pack_of: Int32Array, lengths: Int32Array, num_packs: int, capacity: int, max_documents: int
) -> bool:
    """Whether no pack is empty, over capacity or over `max_documents`."""
    tokens = np.bincount(pack_of, weights=lengths, minlength=num_packs)
    counts = np.bincount(pack_of, minlength=num_packs)
    return bool(tokens.max() <= capacity and counts.min() >= 1 and counts.max() <= max_documents)
