"""Checks of documents that are tokens already: vocabulary, labels, overlong documents, unreadable documents."""

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

_CHUNK = 1 << 20
"""Number of documents whose lengths are read at a time."""
_MOST_COUNTED = 1 << 22
"""Overlong documents are counted in advance in data of at most so many documents (a fraction of a second)."""
_log = logging.getLogger(__name__)
NO_LABEL = (
    "the mixture holds nothing to train on: none of its {count} has a document with a label. A document of one token "
    "has none, nor has one that is dropped as too long, or what a loss mask or `supervise` leaves out"
)


def has_label(tokens: TokenDocuments, settings: LoaderSettings) -> bool:
    """Return whether any document has a label; True if a shard can't be read, as building its batch reports that.

    Cost: reading the first million lengths of a shard; more only while no label is found.
    """
    kept = POLICIES[settings.overlong].kept
    try:
        for shard, documents in enumerate(tokens.documents.tolist()):
            for start in range(0, documents, _CHUNK):
                numbers = np.arange(start, min(start + _CHUNK, documents))
                shards = np.full(len(numbers), shard)
                lengths = tokens.lengths(shards, numbers)
                stops = kept(lengths, settings.capacity)
                if tokens.count_targets(shards, numbers, np.zeros_like(lengths), stops).any():
                    return True
    except SourceError:
        return True
    return False


def check_tokens(tokens: TokenDocuments, settings: LoaderSettings) -> None:
    """Refuse tokens that the model doesn't know: by the store's vocabulary size, or else by its first documents."""
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
        if settings.on_error == "raise":  # otherwise unreadable documents are masked
            raise


def warn_overlong(tokens: TokenDocuments, data: str, settings: LoaderSettings) -> bool:
    """Log how many documents, of how many tokens, exceed the capacity; returns False if that wasn't counted."""
    counts = tokens.documents
    if settings.ranks[0] or settings.method == "wrapped" or settings.overlong == "error":
        return True
    if int(counts.sum()) > _MOST_COUNTED:
        return False
    count = long_tokens = 0
    try:
        for shard, documents in enumerate(counts.tolist()):
            lengths = tokens.lengths(np.full(documents, shard), np.arange(documents))
            long = lengths[lengths > settings.capacity]
            count, long_tokens = count + len(long), long_tokens + int(long.sum())
    except SourceError:  # building the batch reports it
        return False
    if count:
        _log_overlong(
            f"{many(count, 'document')} of {many(int(counts.sum()), 'document')} in {data}, with "
            f"{many(long_tokens, 'token')}, {'is' if count == 1 else 'are'}",
            settings,
        )
    return True


def warn_overlong_read(ledger: Ledger, settings: LoaderSettings) -> bool:
    """Log how many of the documents read so far exceed the capacity, if any; returns whether any do."""
    count = ledger.split_documents + ledger.truncated_documents + ledger.dropped_documents
    if count and not settings.ranks[0] and settings.method != "wrapped":
        _log_overlong(
            f"{many(count, 'document')} of the first {many(ledger.documents_in, 'document')} "
            f"{'was' if count == 1 else 'were'}",
            settings,
        )
    return count > 0


def _log_overlong(which: str, settings: LoaderSettings) -> None:
    others = [name for name in POLICIES if name != settings.overlong]
    _log.warning(
        "%s longer than capacity %s, and %s; overlong=%s does otherwise, and stats().ledger counts all",
        which,
        f"{settings.capacity:,}",
        POLICIES[settings.overlong].becomes,
        in_words(others),
    )


# Documents that can't be read when a batch is built: the error names them, or they are masked in place and counted.
#
# Plans depend only on lengths, which are the same on every rank. So a document whose tokens one rank can't read
# keeps its slot there: other documents, steps, their number and their denominators don't change, and other ranks
# aren't affected.

_MOST_NAMED = 1000
"""Skipped documents that the log names; further ones are only counted, as a missing file may have held millions."""


class Pieces(Protocol):
    """The part of `ReadableTokens` from which a batch is read."""

    @property
    def documents(self) -> IntArray:
        """int64 `[shards]`: documents of each shard."""

    def gather(
        self, shards: IntArray, documents: IntArray, starts: Sequence[int] | IntArray, lengths: IntArray
    ) -> tuple[Int32Array, Mask | None]:
        """Read pieces of documents end to end."""

    def where(self, shard: int) -> str:
        """Describe a shard for messages."""


class Unreadable:
    """How to handle documents that can't be read, and which of them the log has named."""

    def __init__(self, on_error: OnError, pad_id: int) -> None:
        self.on_error, self.pad_id = on_error, pad_id
        self._named: set[str] = set()

    def name(self, where: str, why: SourceError) -> None:
        """Log once which document was skipped, and why."""
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
    """A store's pieces; masks and counts those that can't be read."""

    def __init__(self, store: ReadableTokens, unreadable: Unreadable) -> None:
        self._store, self._unreadable = store, unreadable
        self.skipped = 0
        """Number of pieces masked so far."""

    @property
    def documents(self) -> IntArray:
        """int64 `[shards]`: documents of each shard."""
        return self._store.documents

    def where(self, shard: int) -> str:
        """Describe a shard for messages."""
        return self._store.where(shard)

    def gather(
        self, shards: IntArray, documents: IntArray, starts: Sequence[int] | IntArray, lengths: IntArray
    ) -> tuple[Int32Array, Mask | None]:
        """Read pieces of documents end to end; the arguments are those of `ReadableTokens.gather`."""
        try:
            return self._store.gather(shards, documents, starts, lengths)
        except SourceError:
            return self._one_by_one(shards, documents, np.asarray(starts), lengths)

    def _one_by_one(
        self, shards: IntArray, documents: IntArray, starts: IntArray, lengths: IntArray
    ) -> tuple[Int32Array, Mask]:
        """Read each piece separately, to find those that can't be read."""
        begins = (np.cumsum(lengths) - lengths).tolist()
        tokens = np.full(int(lengths.sum()), self._unreadable.pad_id, dtype=np.int32)
        mask: Mask = np.ones(len(tokens), dtype=np.uint8)
        for number, (begin, length) in enumerate(zip(begins, lengths.tolist())):
            piece, span = slice(number, number + 1), slice(begin, begin + length)
            try:
                ids, piece_mask = self._store.gather(
                    shards[piece], documents[piece], starts[piece], lengths[piece]
                )
            except SourceError as error:
                where = _describe(self._store, int(shards[number]), int(documents[number]))
                if self._unreadable.on_error == "raise":
                    raise SourceError(f'{where} can\'t be read: {error}; on_error="skip" masks it') from error
                self._unreadable.name(where, error)
                self.skipped += 1
                mask[span] = 0
                continue
            tokens[span] = ids
            if piece_mask is not None:
                mask = as_wide(mask, piece_mask)
                mask[span] = piece_mask
        return tokens, mask


def _describe(store: Pieces, shard: int, document: int) -> str:
    """Describe a document for messages, by its shard and its number within the shard."""
    return f"document {document:,} of {store.where(shard)}"


# Ids that a model doesn't know are found when they are read, as token files don't record the vocabulary's size.

_DOCUMENTS, _TOKENS = 1 << 12, 10_000_000
"""Documents and tokens that are checked before training, at most."""


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
    """Refuse data whose first documents have ids that a model doesn't know.

    Cost: reading 4,096 documents of the first shard, or 10 million tokens if these have more.
    """
    shards_with_documents = np.flatnonzero(tokens.documents)
    if len(shards_with_documents) == 0:
        return
    shard = int(shards_with_documents[0])
    numbers = np.arange(min(int(tokens.documents[shard]), _DOCUMENTS))
    shards = np.full(len(numbers), shard)
    lengths = tokens.lengths(shards, numbers)
    # A document that exceeds the limit is cut to its beginning.
    before = np.cumsum(lengths) - lengths
    lengths = np.clip(_TOKENS - before, 0, lengths)
    ids, _ = tokens.gather(shards, numbers, np.zeros(len(numbers), dtype=np.int64), lengths)
    check_ids(ids, lengths, vocab_size, lambda piece: _describe(tokens, shard, piece))


def where_of(store: Pieces, document_id: int) -> str:
    """Describe a document for messages, by its number within the whole store."""
    before = np.concatenate([[0], np.cumsum(store.documents)])
    shard = int(np.searchsorted(before, document_id, side="right")) - 1
    return _describe(store, shard, document_id - int(before[shard]))
