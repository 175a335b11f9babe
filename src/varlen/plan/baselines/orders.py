"""The orders in which a rank may run its packs: a setting that every method is given the best of."""

from __future__ import annotations

from typing import Final, Literal

import numpy as np

from varlen.types import FloatArray, Int32Array, IntArray

Order = Literal["given", "long_first", "long_last", "long_middle", "long_ends", "random"]

ORDERS: Final[tuple[Order, ...]] = ("given", "long_first", "long_last", "long_middle", "long_ends", "random")


def ordered(work: FloatArray, group_of: Int32Array, order: Order) -> IntArray:
    """Return all packs so that those of each group stand in an order.

    - "given": by number.
    - "long_first", "long_last": by falling and rising work; equal work by number.
    - "long_middle": rising up to the heaviest, then falling; "long_ends": the other way round.
    - "random": the same permutation every time.

    Args:
        work: float64 `[num_packs]`, in any unit.
        group_of: int32 `[num_packs]`: the rank of each pack, or zeros where all ranks run them in one order.
        order: see above.

    Returns:
        int64 `[num_packs]`: groups one after the other.

    >>> ordered(np.array([1.0, 5.0, 3.0, 2.0]), np.zeros(4, np.int32), "long_middle").tolist()
    [0, 2, 1, 3]
    """
    if order == "given":
        return np.argsort(group_of, kind="stable")
    if order == "random":
        return np.lexsort((np.random.default_rng(0).permutation(work.size), group_of))
    falling = np.lexsort((np.arange(work.size), -work, group_of))
    counts = np.bincount(group_of, minlength=1)[group_of[falling]]
    begins = np.searchsorted(group_of[falling], group_of[falling])
    turn = np.arange(work.size) - begins
    if order == "long_last":
        turn = counts - 1 - turn
    elif order == "long_middle":
        turn = _inwards(counts - 1 - turn, counts)
    elif order == "long_ends":
        turn = _inwards(turn, counts)
    return falling[np.lexsort((turn, group_of[falling]))]


def _inwards(turn: IntArray, counts: IntArray) -> IntArray:
    """Return places taken in turn from both ends: 0, last, 1, last but one, and so on."""
    return np.where(turn % 2 == 0, turn // 2, counts - 1 - turn // 2)
