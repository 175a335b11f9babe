"""What is looked at before training: vocabularies, lengths and labels of documents that are tokens already."""

from __future__ import annotations

import logging

import numpy as np

from varlen.counts import many
from varlen.errors import OverlongDocumentError, SourceError
from varlen.feed.bad_documents import check_first_ids
from varlen.feed.settings import LoaderSettings, check_vocabulary
from varlen.store.store import TokenStore
from varlen.store.tokens import TokenDocuments
from varlen.types import Ledger, Overlong

_CHECKED = 1 << 20
"""Documents whose lengths are looked at in one go."""
_COUNTED = 1 << 22
"""Documents whose lengths are looked at for a sentence, in a fraction of a second; of more, windows tell."""
_BECOME: dict[Overlong, str] = {
    "split": "cut into pieces that train as documents of their own",
    "truncate": "cut short",
    "drop": "left out",
}
_log = logging.getLogger(__name__)
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


def check_lengths(tokens: TokenDocuments, capacity: int, data: str) -> None:
    """Refuse documents longer than a pack before training, and not in the midst of it, as far as they are there."""
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
    others = [name for name in (*_BECOME, "error") if name != settings.overlong]
    _log.warning(
        "%s longer than capacity %s, and %s; overlong=%s does otherwise, and stats().ledger counts all",
        which,
        f"{settings.capacity:,}",
        _BECOME[settings.overlong],
        ", ".join(f'"{name}"' for name in others),
    )
