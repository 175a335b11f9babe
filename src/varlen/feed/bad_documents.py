"""Documents that can't be read when a batch is made: an error that names them, or masked in their slots and counted.

Plans are made of lengths alone, the same on every rank. So a document whose tokens one rank can't read keeps its slot
there: other documents, steps, their number and their denominators stay what they are, and no other rank has to know.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from varlen.documents.source import OnError
from varlen.errors import ModelError, SourceError
from varlen.store.tokens import ReadableTokens, TokenDocuments
from varlen.text.loss_masks import Mask, as_wide
from varlen.types import Int32Array, IntArray

_log = logging.getLogger(__name__)
_MOST_NAMED = 1000
"""Documents that are named in the log; more are counted alone, as a file that is gone may have held millions."""


class Pieces(Protocol):
    """What a batch is read out of; as `ReadableTokens` has them."""

    @property
    def documents(self) -> IntArray:
        """int64 `[shards]`: documents of each shard."""

    def gather(
        self, shards: IntArray, documents: IntArray, starts: Sequence[int] | IntArray, lengths: IntArray
    ) -> tuple[Int32Array, Mask | None]:
        """Read pieces of documents end to end."""

    def where(self, shard: int) -> str:
        """Say where a shard lies."""


class Unreadable:
    """What becomes of documents that can't be read, and which were named already."""

    def __init__(self, on_error: OnError, pad_id: int) -> None:
        """Take whether they are an error or skipped, and what stands in their place then."""
        self.on_error, self.pad_id = on_error, pad_id
        self._named: set[str] = set()

    def name(self, where: str, why: SourceError) -> None:
        """Say once which document was skipped, and why."""
        if where in self._named or len(self._named) > _MOST_NAMED:
            return
        self._named.add(where)
        if len(self._named) > _MOST_NAMED:
            _log.warning(
                "skipped: more than %s documents; further ones are counted, and not named", f"{_MOST_NAMED:,}"
            )
        else:
            _log.warning("skipped: %s is masked: %s", where, why)


class ReadPieces:
    """A store as batches read it, which counts the pieces that are masked since they can't be read."""

    def __init__(self, store: ReadableTokens, unreadable: Unreadable) -> None:
        """Take the documents, and what becomes of those that can't be read."""
        self._store, self._unreadable = store, unreadable
        self.skipped = 0
        """Pieces that were masked so far."""

    @property
    def documents(self) -> IntArray:
        """int64 `[shards]`: documents of each shard."""
        return self._store.documents

    def where(self, shard: int) -> str:
        """Say where a shard lies."""
        return self._store.where(shard)

    def gather(
        self, shards: IntArray, documents: IntArray, starts: Sequence[int] | IntArray, lengths: IntArray
    ) -> tuple[Int32Array, Mask | None]:
        """Read pieces of documents end to end; arguments as `ReadableTokens` has them."""
        try:
            return self._store.gather(shards, documents, starts, lengths)
        except SourceError:
            return self._one_by_one(shards, documents, np.asarray(starts), lengths)

    def _one_by_one(
        self, shards: IntArray, documents: IntArray, starts: IntArray, lengths: IntArray
    ) -> tuple[Int32Array, Mask]:
        """Read each piece by itself, to find those that can't be."""
        begins = (np.cumsum(lengths) - lengths).tolist()
        tokens = np.full(int(lengths.sum()), self._unreadable.pad_id, dtype=np.int32)
        mask: Mask = np.ones(len(tokens), dtype=np.uint8)
        for number, (begin, length) in enumerate(zip(begins, lengths.tolist())):
            one, here = slice(number, number + 1), slice(begin, begin + length)
            try:
                found, marks = self._store.gather(shards[one], documents[one], starts[one], lengths[one])
            except SourceError as error:
                where = place_of(self._store, int(shards[number]), int(documents[number]))
                if self._unreadable.on_error == "raise":
                    raise SourceError(f'{where} can\'t be read: {error}; on_error="skip" masks it') from error
                self._unreadable.name(where, error)
                self.skipped += 1
                mask[here] = 0
                continue
            tokens[here] = found
            if marks is not None:
                mask = as_wide(mask, marks)
                mask[here] = marks
        return tokens, mask


def place_of(store: Pieces, shard: int, document: int) -> str:
    """Say where a document lies, by its shard and its number there."""
    return f"document {document:,} of {store.where(shard)}"


# Ids that a model doesn't know, found where they are read: files of tokens don't say how large a vocabulary is.

_DOCUMENTS, _TOKENS = 1 << 12, 10_000_000
"""Looked at before training: of the first part, up to so many."""


def check_ids(
    tokens: npt.NDArray[np.integer[Any]],
    lengths: IntArray,
    vocab_size: int,
    where: Callable[[int], str],
) -> None:
    """Refuse ids that a model doesn't know.

    Args:
        lengths: int64 `[pieces]`: tokens of each.

    Cost: 0.1 ms a million tokens.
    """
    if len(tokens) == 0 or int(tokens.max()) < vocab_size:
        return
    at = int(np.argmax(tokens >= vocab_size))
    piece = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
    raise ModelError(
        f"{where(piece)} holds the id {int(tokens[at]):,}, but the model knows {vocab_size:,} ids, from 0 to "
        f"{vocab_size - 1:,}; take the model that the tokens were made for, or resize its embeddings"
    )


def check_first_ids(tokens: TokenDocuments, vocab_size: int) -> None:
    """Refuse documents with ids that a model doesn't know, as far as the first of them tell.

    Cost: reading 4,096 documents of the first shard, or 10 million tokens if these have more.
    """
    held = np.flatnonzero(tokens.documents)[:1]
    if len(held) == 0:
        return
    shard = int(held[0])
    numbers = np.arange(min(int(tokens.documents[shard]), _DOCUMENTS))
    shards = np.full(len(numbers), shard)
    lengths = tokens.lengths(shards, numbers)
    # Of a document that would go beyond, its beginning alone.
    before = np.cumsum(lengths) - lengths
    lengths = np.clip(_TOKENS - before, 0, lengths)
    ids, _ = tokens.gather(shards, numbers, np.zeros(len(numbers), dtype=np.int64), lengths)
    check_ids(ids, lengths, vocab_size, lambda piece: place_of(tokens, shard, piece))


def where_of(store: Pieces, document_id: int) -> str:
    """Say where a document lies, by its number within the whole store."""
    before = np.concatenate([[0], np.cumsum(store.documents)])
    shard = int(np.searchsorted(before, document_id, side="right")) - 1
    return place_of(store, shard, document_id - int(before[shard]))
