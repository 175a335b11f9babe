"""Positions of a packed batch that each context-parallel rank holds: zigzag within every segment, or contiguous."""

from __future__ import annotations

import operator

import numpy as np
import numpy.typing as npt

from varlen.errors import DocumentsError, SettingError
from varlen.types import IntArray


def zigzag_indices(cu_slots: npt.ArrayLike, cp_rank: int, cp_world_size: int) -> IntArray:
    """Return the positions that one context-parallel rank holds, segment by segment; each belongs to one rank.

    Every segment is cut into 2·CP equal chunks and rank r takes chunks r and 2·CP - 1 - r, so that all ranks
    do the same causal attention work (the layout of Megatron and of zigzag ring attention). `cu_slots` is
    `cu_seqlens_padded` of a batch, or `cu_seqlens` where that is None. With
    `document_multiple_of=2 * cp_world_size` (or its least common multiple with CP·TP) in `vl.pack`, every
    slot divides evenly.

    >>> zigzag_indices([0, 8, 12], cp_rank=0, cp_world_size=2).tolist()
    [0, 1, 6, 7, 8, 11]
    """
    bounds = _as_bounds(cu_slots, cp_rank, cp_world_size)
    sizes = np.diff(bounds)
    chunks = 2 * cp_world_size
    uneven = sizes % chunks != 0
    if cp_world_size == 1:
        return np.arange(bounds[0], bounds[-1])
    if uneven.any():
        first = int(np.argmax(uneven))
        raise SettingError(
            f"segment {first} takes up {sizes[first]:,} positions, which can't be cut into 2 x {cp_world_size} equal "
            f"chunks for context-parallel ranks ({int(uneven.sum()):,} of {sizes.size:,} segments); "
            f"pack with document_multiple_of={chunks}"
        )
    width = sizes // chunks
    begins = np.stack([bounds[:-1] + cp_rank * width, bounds[:-1] + (chunks - 1 - cp_rank) * width], axis=1)
    return _spans(begins.reshape(-1), np.repeat(width, 2))


def contiguous_indices(cu_slots: npt.ArrayLike, cp_rank: int, cp_world_size: int) -> IntArray:
    """Return the positions of one context-parallel rank if each takes one contiguous part of the whole row."""
    bounds = _as_bounds(cu_slots, cp_rank, cp_world_size)
    total = int(bounds[-1] - bounds[0])
    if total % cp_world_size:
        raise SettingError(
            f"{total:,} positions can't be shared evenly by {cp_world_size} context-parallel ranks; "
            f"pad to a multiple of {cp_world_size}"
        )
    part = total // cp_world_size
    return np.arange(bounds[0] + cp_rank * part, bounds[0] + (cp_rank + 1) * part)


def _as_bounds(cu_slots: npt.ArrayLike, cp_rank: object, cp_world_size: object) -> IntArray:
    """Return validated boundaries as int64; also validates rank and world size."""
    try:
        ranks, rank = operator.index(cp_world_size), operator.index(cp_rank)  # type: ignore[arg-type]
    except TypeError:
        ranks, rank = 0, 0
    if not 0 <= rank < ranks:
        raise SettingError(
            f"cp_rank must be a whole number from 0 to cp_world_size - 1; got {cp_rank!r} of {cp_world_size!r}"
        )
    try:
        bounds = np.asarray(cu_slots)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise DocumentsError(f"cu_slots can't be read as whole numbers: {error}") from None
    if bounds.ndim != 1 or not bounds.size or bounds.dtype.kind not in "iu":
        raise DocumentsError(
            "cu_slots must be whole numbers in one dimension, one more than segments; got "
            f"{bounds.dtype} {bounds.shape}"
        )
    bounds = bounds.astype(np.int64)
    falls = bounds[1:] < bounds[:-1]
    if falls.any():
        first = int(np.argmax(falls))
        raise DocumentsError(
            f"cu_slots must rise, but segment {first:,} begins at {bounds[first]:,} and ends at "
            f"{bounds[first + 1]:,} ({int(falls.sum()):,} of {falls.size:,} segments)"
        )
    return bounds


def _spans(begins: IntArray, widths: IntArray) -> IntArray:
    """Return the whole numbers of several spans, one span after the other."""
    ends = np.cumsum(widths)
    shift = np.repeat(begins - (ends - widths), widths)
    spans: IntArray = np.arange(int(ends[-1]) if ends.size else 0) + shift
    return spans
