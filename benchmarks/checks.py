"""What must hold of a contestant's result before it is timed; a wrong result is no benchmark.

Every check raises `WrongResultError`, which says what was found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np


class WrongResultError(Exception):
    """A contestant lost, doubled or overfilled something, or two contestants disagree."""


def fill_of_ids(packs: Sequence[Sequence[int]], lengths: np.ndarray, capacity: int) -> float:
    """Return how full packs of document numbers are, after checking that each document stands in one."""
    ids = np.fromiter((i for pack in packs for i in pack), np.int64)
    if not np.array_equal(np.sort(ids), np.arange(len(lengths))):
        raise WrongResultError(
            f"{len(ids):,} places for {len(lengths):,} documents, or not each document once"
        )
    bounds = np.concatenate([[0], np.cumsum([len(pack) for pack in packs])])
    return _fill(np.add.reduceat(lengths[ids].astype(np.int64), bounds[:-1]), lengths, capacity)


def fill_of_lengths(packs: Sequence[Sequence[int]], lengths: np.ndarray, capacity: int) -> float:
    """Return how full packs of lengths are, after checking that every length given stands in them."""
    found = np.fromiter((length for pack in packs for length in pack), np.int64)
    if not np.array_equal(np.sort(found), np.sort(lengths)):
        raise WrongResultError(
            f"{len(found):,} lengths came back from {len(lengths):,}, or not the same ones"
        )
    return _fill(np.array([sum(pack) for pack in packs]), lengths, capacity)


def fill_of_rows(
    rows: Iterable[tuple[Any, Any]], tokens: np.ndarray, offsets: np.ndarray, capacity: int
) -> float:
    """Return how full rows of tokens are, after checking that every document stands in one of them, unharmed.

    Documents are recognized by their length and two sums over their tokens, the second weighted by position.

    A row is its tokens, padding left out, and the lengths of its segments; tokens and offsets are of the documents
    as given.
    """
    row_tokens, row_lengths = zip(*((np.asarray(ids), np.asarray(lengths)) for ids, lengths in rows))
    same_documents(np.concatenate(row_tokens), np.concatenate(row_lengths), tokens, offsets)
    return _fill(np.array([len(ids) for ids in row_tokens]), np.diff(offsets), capacity)


def same_documents(found: np.ndarray, lengths: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> None:
    """Check that documents, in any order, are those given.

    They are recognized by their length and two sums over their tokens, the second weighted by position.
    """
    back = _fingerprints(found, np.concatenate([[0], np.cumsum(lengths)]))
    if not np.array_equal(back, _fingerprints(tokens, offsets)):
        raise WrongResultError("the documents in the rows are not those given")


def same_outputs(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Check that two collators of one framework give the same keys, dtypes, shapes and values."""
    if list(ours) != list(theirs):
        raise WrongResultError(f"the keys are {', '.join(ours)}, and the other's {', '.join(theirs)}")
    for name, value in theirs.items():
        mine, other = np.asarray(ours[name]), np.asarray(value)
        if mine.dtype != other.dtype or not np.array_equal(mine, other):
            raise WrongResultError(f"{name} isn't the same as the other's")


def same_batch(flat: Any, theirs: Mapping[str, Any]) -> None:
    """Check that a flattening collator's output says the same as varlen's flat batch, value for value."""
    pairs = {
        "input_ids": flat.input_ids,
        "labels": flat.labels,
        "position_ids": flat.position_ids,
        "seq_idx": flat.segment_ids,
        "cu_seq_lens_q": flat.cu_seqlens,
        "max_length_q": flat.max_seqlen,
    }
    for name, ours in pairs.items():
        if not np.array_equal(np.asarray(ours), np.asarray(theirs[name])):
            raise WrongResultError(f"{name} differs between varlen and the collator")


def _fingerprints(tokens: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return int64 `[num_documents, 3]`, sorted: length, sum, and sum weighted by position."""
    starts = offsets[:-1].astype(np.int64)
    lengths = np.diff(offsets).astype(np.int64)
    positions = np.arange(len(tokens)) - np.repeat(starts, lengths)
    wide = tokens.astype(np.int64)
    sums = np.add.reduceat(wide, starts)
    weighted = np.add.reduceat(wide * (positions + 1), starts)
    prints = np.stack([lengths, sums, weighted], axis=1)
    return prints[np.lexsort(prints.T)]


def _fill(pack_tokens: np.ndarray, lengths: np.ndarray, capacity: int) -> float:
    """Return tokens over slots, after checking capacity and that no token is missing."""
    if pack_tokens.max() > capacity:
        raise WrongResultError(f"a pack of {pack_tokens.max():,} tokens, the capacity is {capacity:,}")
    num_tokens = int(lengths.sum(dtype=np.int64))
    if int(pack_tokens.sum()) != num_tokens:
        raise WrongResultError(f"{int(pack_tokens.sum()):,} tokens in packs, {num_tokens:,} given")
    return num_tokens / (len(pack_tokens) * capacity)
