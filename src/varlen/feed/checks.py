"""What is looked at before training: vocabularies, lengths and labels of documents that are tokens already."""

from __future__ import annotations

import numpy as np

from varlen.counts import many
from varlen.errors import OverlongDocumentError, SourceError
from varlen.feed.settings import LoaderSettings, check_vocabulary
from varlen.feed.vocabulary import check_first_ids
from varlen.source.store import TokenStore
from varlen.source.token_documents import TokenDocuments

_CHECKED = 1 << 20
"""Documents whose lengths are looked at in one go."""
NO_LABEL = (
    "the mixture holds nothing to train on: none of its {count} has a document with a label. A document of one token "
    "has none, nor has one that is dropped as too long, or what a loss mask or `supervise` leaves out"
)


def has_label(tokens: TokenDocuments, settings: LoaderSettings) -> bool:
    """Return whether any document gives a label; where some shard can't be read, batches tell.

    Cost: that of the first documents, unless they have none.
    """
    capacity, is_whole = settings.capacity, settings.overlong in ("split", "error")
    try:
        for shard, documents in enumerate(tokens.documents.tolist()):
            for start in range(0, documents, _CHECKED):
                numbers = np.arange(start, min(start + _CHECKED, documents))
                shards = np.full(len(numbers), shard)
                lengths = tokens.lengths(shards, numbers)
                stops = lengths if is_whole else np.minimum(lengths, capacity)
                labels = tokens.count_targets(shards, numbers, np.zeros_like(lengths), stops)
                if (labels[lengths <= capacity] if settings.overlong == "drop" else labels).any():
                    return True
    except SourceError:
        return True
    return False


def check_tokens(tokens: TokenDocuments, settings: LoaderSettings) -> None:
    """Refuse tokens that the model doesn't know; where nobody says how many there are, the first are looked at.

    Raises:
        SettingError: the vocabulary of a store is larger.
        ModelError: some of the first are beyond the model's; batches tell of others.
        SourceError: a file is damaged.
    """
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


def check_lengths(tokens: TokenDocuments, capacity: int, data: str) -> None:
    """Refuse documents longer than a pack before training, and not in the midst of it, as far as they are there.

    Raises:
        OverlongDocumentError: there are some; names the first.
    """
    first, count = "", 0
    for shard, documents in enumerate(tokens.documents.tolist()):
        for start in range(0, documents, _CHECKED):
            numbers = np.arange(start, min(start + _CHECKED, documents))
            lengths = tokens.lengths(np.full(len(numbers), shard), numbers)
            long = np.flatnonzero(lengths > capacity)
            count += len(long)
            if len(long) and not first:
                where = f"document {start + int(long[0]):,} of shard {shard:,}"
                first = f"{where} of {data} has {int(lengths[long[0]]):,} tokens"
    if first:
        raise OverlongDocumentError(
            f"{first}, more than the capacity {capacity:,} ({many(count, 'such document')} in all); pass "
            'overlong="split", "truncate" or "drop", or a larger capacity'
        )
