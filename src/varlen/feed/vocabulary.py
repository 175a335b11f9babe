"""Ids that a model doesn't know, found where they are read: files of tokens don't say how large a vocabulary is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.errors import ModelError
from varlen.feed.unreadable import Pieces, place_of
from varlen.store.tokens import TokenDocuments
from varlen.types import IntArray

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
        tokens: of pieces of documents, end to end.
        lengths: int64 `[pieces]`: tokens of each.
        vocab_size: ids are below.
        where: says where the document of a piece lies.

    Raises:
        ModelError: an id isn't known; names the document.

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

    Args:
        tokens: the documents; nobody waits for those that aren't there yet.
        vocab_size: ids are below.

    Raises:
        ModelError: an id isn't known; names the document.
        SourceError: a file is damaged.

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
