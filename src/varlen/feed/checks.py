"""Documents that are tokens already: checks before training, and batches of which pieces can't be read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from varlen.arguments import in_words
from varlen.counts import many
from varlen.documents.source import OnError
from varlen.errors import ModelError, SourceError
from varlen.feed.settings import LoaderSettings, check_vocabulary
from varlen.pack.pieces import POLICIES
from varlen.store.store import TokenStore
from varlen.store.tokens import ReadableTokens, TokenDocuments
from varlen.text.loss_masks import Mask, as_wide
from varlen.types import Int32Array, IntArray, Ledger

_CHECKED = 1 << 20
"""Documents whose lengths are looked at in one go."""
_COUNTED = 1 << 22
"""Documents whose lengths are looked at for a sentence, in a fraction of a second; of more, windows tell."""
_log = logging.getLogger(__name__)
NO_LABEL = (
    "the mixture holds nothing to train on: none of its {count} has a document with a label. A document of one token "
    "has none, nor has one that is dropped as too long, or what a loss mask or `supervise` leaves out"
)


def has_label(tokens: TokenDocuments, settings: LoaderSettings) -> bool:
    """Return whether any document gives a label; where some shard can't be read, batches tell.

    Cost: that of the first documents, unless they have none.
    """
    kept = POLICIES[settings.overlong].kept
    try:
        for shard, documents in enumerate(tokens.documents.tolist()):
            for start in range(0, documents, _CHECKED):
                numbers = np.arange(start, min(start + _CHECKED, documents))
                shards = np.full(len(numbers), shard)
                lengths = tokens.lengths(shards, numbers)
                stops = kept(lengths, settings.capacity)
                if tokens.count_targets(shards, numbers, np.zeros_like(lengths), stops).any():
                    return True
    except SourceError:
        return True
    return False


def check_tokens(tokens: TokenDocuments, settings: LoaderSettings) -> None:
    """Refuse tokens that the model doesn't know; where nobody says how many there are, the first are looked at."""
    if isinstance(tokens, TokenStore):
        made_by = tokens.manifest.get("source", {}).get("tokenizer", {})
        if made_by.get("vocab_size") is not None:
            check_vocabulary(made_by["vocab_size"], made_by.get("name", "of the store"), settings)
            return
    if settings.vocab_size is None:
        return
    try:
        check_first_ids(tokens, settings.vocab_size)
    except SourceError:
        if settings.on_error == "raise":  # else what can't be read is masked
            raise


def say_cut(tokens: TokenDocuments, data: str, settings: LoaderSettings) -> bool:
    """Say how many documents, and tokens of theirs, are longer than a pack, and what becomes of them."""
    counts = tokens.documents
    if settings.ranks[0] or settings.method == "wrapped" or settings.overlong == "error":
        return True
    if int(counts.sum()) > _COUNTED:
        return False
    count = long_tokens = 0
    try:
        for shard, documents in enumerate(counts.tolist()):
            lengths = tokens.lengths(np.full(documents, shard), np.arange(documents))
            long = lengths[lengths > settings.capacity]
            count, long_tokens = count + len(long), long_tokens + int(long.sum())
    except SourceError:  # batches tell of what can't be read
        return False
    if count:
        _say_cut(
            f"{many(count, 'document')} of {many(int(counts.sum()), 'document')} in {data}, with "
            f"{many(long_tokens, 'token')}, {'is' if count == 1 else 'are'}",
            settings,
        )
    return True


def say_first_cut(ledger: Ledger, settings: LoaderSettings) -> bool:
    """Say how many documents were longer than a pack so far, where none of that was known before they were read."""
    count = ledger.split_documents + ledger.truncated_documents + ledger.dropped_documents
    if count and not settings.ranks[0] and settings.method != "wrapped":
        _say_cut(
            f"{many(count, 'document')} of the first {many(ledger.documents_in, 'document')} "
            f"{'was' if count == 1 else 'were'}",
            settings,
        )
    return count > 0


def _say_cut(which: str, settings: LoaderSettings) -> None:
    """Log it."""
    others = [name for name in POLICIES if name != settings.overlong]
    _log.warning(
        "%s longer than capacity %s, and %s; overlong=%s does otherwise, and stats().ledger counts all",
        which,
        f"{settings.capacity:,}",
        POLICIES[settings.overlong].becomes,
        in_words(others),
    )


# Documents that can't be read when a batch is made: an error that names them, or masked in their slots and counted.
#
# Plans are made of lengths alone, the same on every rank. So a document whose tokens one rank can't read
# keeps its slot there: other documents, steps, their number and their denominators stay what they are, and no
# other rank has to know.

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
