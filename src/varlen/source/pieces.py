"""Pieces of documents out of the open files of many shards, read by one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.jit import kernel
from varlen.source.documents import Mask
from varlen.source.shard import Shard, ShardFiles
from varlen.types import Int32Array, IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pieces:
    """Where pieces stand, and where they go."""

    shards: IntArray
    """int64 `[pieces]`, ascending."""
    firsts: IntArray
    """int64 `[pieces]`: the first token of each within its shard."""
    sizes: IntArray
    """int64 `[pieces]`: tokens of each."""
    targets: IntArray
    """int64 `[pieces]`: where each goes."""

    def take(self, numbers: IntArray) -> Pieces:
        """Return some of them."""
        return Pieces(
            shards=self.shards[numbers],
            firsts=self.firsts[numbers],
            sizes=self.sizes[numbers],
            targets=self.targets[numbers],
        )


def read_pieces(
    pieces: Pieces,
    files: list[ShardFiles],
    shard: Callable[[int], Shard],
    tokens: Int32Array,
    mask: Mask | None,
) -> Mask | None:
    """Read the tokens of pieces, and what is supervised of them.

    Args:
        pieces: what to read.
        files: of each shard that is among them, in their order.
        shard: returns a shard, to say what is wrong with it.
        tokens: written.
        mask: written; None as long as all are supervised.

    Returns:
        The mask; None where there is still none.

    Raises:
        SourceError: a shard is damaged.
    """
    of_shard = np.diff(np.flatnonzero(np.diff(pieces.shards, prepend=-1, append=-1)))
    opened = np.array([(held.tokens, held.mask, held.width) for held in files], dtype=np.int64)
    numbers, masks, widths = np.repeat(opened, of_shard, axis=0).T
    _read(pieces, numbers, widths, tokens, lambda at, some: some.read_tokens(at[0], at[1]), shard)
    if masks.max() < 0:
        return mask
    if mask is None:
        mask = np.ones(len(tokens), dtype=np.uint8)
    has_one = np.flatnonzero(masks >= 0)
    ones = np.ones(len(has_one), dtype=np.int64)
    _read(
        pieces.take(has_one), masks[has_one], ones, mask, lambda at, some: some.read_mask(at[0], at[1]), shard
    )
    return mask


def _read(
    pieces: Pieces,
    files: IntArray,
    widths: IntArray,
    values: npt.NDArray[Any],
    again: Callable[[tuple[int, int], Shard], Any],
    shard: Callable[[int], Shard],
) -> None:
    """Read one value a token; where that fails, once more in a way that says why."""
    read, start = kernel("varlen.source", "kernels", "read_pieces"), 0
    arrays = (
        files.astype(np.int32),
        pieces.firsts * widths,
        pieces.sizes,
        np.ascontiguousarray(widths),
        pieces.targets,
    )
    while (failed := read(*(array[start:] for array in arrays), values)) >= 0:
        start += failed + 1
        number = start - 1
        first, size, target = (int(array[number]) for array in (pieces.firsts, pieces.sizes, pieces.targets))
        with shard(int(pieces.shards[number])) as some:
            values[target : target + size] = again((first, first + size), some)
