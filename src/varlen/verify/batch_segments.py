"""Segments: where a batch says that documents begin, by each of the ways in which it says so.

A position *starts* a segment if the one before it belongs to another. Padding that every position shows as a
segment of its own (positions 0, 0, 0) is no document, and nobody is harmed by what it sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from varlen.verify.batch_reading import BoolArray, GivenBatch, IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """Where documents begin and what is no document; bool arrays `[rows, width]`."""

    starts_by: Mapping[str, BoolArray]
    """For each argument that tells boundaries, where segments start; the first column always does."""
    starts: BoolArray
    """All of them together: what the batch means."""
    padding: BoolArray
    """Positions of no document."""
    follows: BoolArray
    """Starts that have something before them in their row that isn't masked, padding of one token included."""
    needed: BoolArray
    """Starts of documents that have something before them in their row to be kept apart from."""

    @property
    def is_packed(self) -> bool:
        """Whether any row holds several documents."""
        return bool(self.needed.any())

    @property
    def documents(self) -> int:
        """Documents, padding not counted."""
        return int((self.starts & ~self.padding).sum())

    def numbers(self) -> IntArray:
        """Number the segments over the flattened batch, padding included; `[rows * width]`."""
        numbers: IntArray = self.starts.reshape(-1).cumsum() - 1
        return numbers


def segments_of(given: GivenBatch) -> Segments:
    """Find out where documents begin.

    Args:
        given: the batch.
    """
    starts_by = dict(_told(given))
    starts = np.zeros((given.rows, given.width), dtype=bool)
    starts[:, :1] = True
    for told in starts_by.values():
        starts |= told
    masked = _masked(given)
    alone = _alone(given, starts_by, starts)
    seen = ~masked
    after_something = np.zeros_like(starts)
    after_something[:, 1:] = np.logical_or.accumulate(seen, axis=1)[:, :-1]
    return Segments(
        starts_by=starts_by,
        starts=starts,
        padding=masked | (alone & _in_runs_of_padding(given, alone)),
        follows=starts & seen & after_something,
        needed=starts & seen & after_something & ~alone,
    )


def breaks(values: IntArray, step: int) -> BoolArray:
    """Return where a row doesn't go on from one column to the next by `step`; true in the first column.

    Args:
        values: `[rows, width]`.
        step: 1 for positions, 0 for numbers of documents.
    """
    starts = np.ones(values.shape, dtype=bool)
    np.not_equal(values[:, 1:], values[:, :-1] + step, out=starts[:, 1:])
    return starts


def usable_ends(given: GivenBatch, name: str = "cu_seq_lens_q") -> IntArray | None:
    """Return boundaries that run from 0 to the number of tokens without falling, or None.

    Args:
        given: the batch.
        name: of the boundaries.
    """
    ends = given.arrays.get(name)
    if ends is None or ends.ndim != 1 or len(ends) < 2:
        return None
    whole = ends[0] == 0 and ends[-1] == given.rows * given.width and bool((np.diff(ends) >= 0).all())
    return ends if whole else None


def segment_mask(given: GivenBatch) -> IntArray | None:
    """Return the attention mask if it numbers segments (1, 1, 2, 2, 0), else None.

    Args:
        given: the batch.
    """
    mask = given.by_token("attention_mask")
    return mask if mask is not None and mask.size and int(mask.max()) > 1 else None


def _told(given: GivenBatch) -> Mapping[str, BoolArray]:
    """Return the starts that each argument tells."""
    told = {}
    if (positions := given.arrays.get("position_ids")) is not None and positions.ndim == 3:
        # Image positions jump within a document; at its first token all of them are 0.
        first = given.by_token("position_ids")
        if len(positions) == 4 and first is not None:
            told["position_ids"] = breaks(first, 1)
        elif positions.shape[1:] == given.input_ids.shape:
            told["position_ids"] = (positions == 0).all(axis=0)
    elif (plain := given.by_token("position_ids")) is not None:
        told["position_ids"] = breaks(plain, 1)
    if (ends := usable_ends(given)) is not None:
        starts = np.zeros(given.rows * given.width, dtype=bool)
        starts[ends[:-1][np.diff(ends) > 0]] = True
        told["cu_seq_lens_q"] = starts.reshape(given.rows, given.width)
    if (numbers := given.by_token("seq_idx")) is not None:
        told["seq_idx"] = breaks(numbers, 0)
    if given.segment_ids is not None:
        told["segment_ids"] = breaks(given.segment_ids, 0)
    if (mask := segment_mask(given)) is not None:
        told["attention_mask"] = breaks(mask, 0)
    return told | {name: breaks(numbers, 0) for name, numbers in given.unread.items()}


def _masked(given: GivenBatch) -> BoolArray:
    """Return the positions that the batch itself says are padding."""
    if given.segment_ids is not None:
        padding: BoolArray = given.segment_ids < 0
        return padding
    mask = given.by_token("attention_mask")
    return np.zeros(given.input_ids.shape, dtype=bool) if mask is None else mask == 0


def _alone(given: GivenBatch, starts_by: Mapping[str, BoolArray], starts: BoolArray) -> BoolArray:
    """Return the positions that may be padding: nothing goes on from them, and they are no targets."""
    labels = given.by_token("labels")
    without_target = np.ones(starts.shape, dtype=bool) if labels is None else labels == -100
    if given.segment_ids is not None:
        return np.zeros_like(starts)  # a PackedBatch says what is padding
    if "position_ids" in starts_by:
        single = without_target & _single(starts_by["position_ids"])
        return single if labels is None else single | _tails(given, starts, without_target)
    if not starts_by:
        return np.zeros_like(starts)
    return _repeated(given, starts, without_target)


def _tails(given: GivenBatch, starts: BoolArray, without_target: BoolArray) -> BoolArray:
    """Return segments at the ends of rows that hold one token alone and no target: padding with its own positions."""
    last = np.zeros_like(starts)
    if starts.size:
        numbers = starts.cumsum(axis=1)
        last = (numbers == numbers[:, -1:]) & (numbers > 1)
    return last & _repeated(given, starts, without_target)


def _repeated(given: GivenBatch, starts: BoolArray, without_target: BoolArray) -> BoolArray:
    """Return segments of the same token over and over, none of them a target: padding in segments of any length."""
    ids, flat = given.input_ids.reshape(-1), starts.reshape(-1)
    first = np.flatnonzero(flat)
    if not len(first):
        return np.zeros_like(starts)
    differs = ids != ids[first][flat.cumsum() - 1]
    same = ~np.logical_or.reduceat(differs | ~without_target.reshape(-1), first)
    lengths = np.diff(np.append(first, len(ids)))
    return np.repeat(same, lengths).reshape(starts.shape)


def _single(starts: BoolArray) -> BoolArray:
    """Return the segments of one position."""
    single = starts.copy()
    single[:, :-1] &= starts[:, 1:]
    return single


def _in_runs_of_padding(given: GivenBatch, alone: BoolArray) -> BoolArray:
    """Return of the positions that may be padding those that follow one of the same token, or end a row.

    A document of one token looks like padding; between others it is counted as a document.
    """
    ids = given.input_ids
    run = np.zeros_like(alone)
    run[:, -1:] = True
    twin = alone[:, 1:] & alone[:, :-1] & (ids[:, 1:] == ids[:, :-1])
    run[:, 1:] |= twin
    run[:, :-1] |= twin
    return run
