"""seqpack's packer, in the variant that its documentation recommends by default."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

NAME = "seqpack heap_pack_sequences"


def packer(lengths: np.ndarray, capacity: int) -> Callable[[], list[list[int]]]:
    """Return a call that packs worst-fit-decreasing with a heap."""
    from seqpack.packing import heap_pack_sequences

    def pack() -> list[list[int]]:
        return heap_pack_sequences(lengths, capacity)

    return pack
