"""The interface of token documents with random access, wherever they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from varlen.text.loss_masks import Mask
from varlen.types import Int32Array, IntArray


class ReadableTokens(Protocol):
    """Documents as token ids, in shards, with random access."""

    @property
    def documents(self) -> IntArray:
        """int64 `[shards]`: documents of each existing shard; more may be appended."""

    def lengths(self, shards: IntArray, documents: IntArray) -> IntArray:
        """Return the lengths of documents, given by shard and number."""

    def where(self, shard: int) -> str:
        """Describe a shard's location."""

    def will_need(self, shards: IntArray, documents: IntArray) -> None:
        """Prefetch documents; arguments as in `lengths`."""

    def count_targets(
        self, shards: IntArray, documents: IntArray, starts: IntArray, stops: IntArray
    ) -> IntArray:
        """Count the labels of pieces, int64 `[pieces]`: supervised tokens except each piece's first.

        A piece is the tokens [start, stop) of a document, given by its shard and its number there.
        """

    def gather(
        self, shards: IntArray, documents: IntArray, starts: Sequence[int] | IntArray, lengths: IntArray
    ) -> tuple[Int32Array, Mask | None]:
        """Return the concatenated tokens of pieces in the given order, and the mask; None if all are supervised.

        A piece has `lengths` tokens from `starts` in a document, given by its shard and its number there. A float32
        mask holds weights.
        """


def lengths_in_order(tokens: ReadableTokens, at_once: int = 1 << 20) -> Iterator[IntArray]:
    """Yield the lengths of all existing documents, at most `at_once` of them at a time."""
    for shard, documents in enumerate(tokens.documents.tolist()):
        for start in range(0, documents, at_once):
            numbers = np.arange(start, min(start + at_once, documents))
            yield tokens.lengths(np.full(len(numbers), shard), numbers)


class TokenDocuments(ReadableTokens, Protocol):
    """Documents as token ids, in shards and parts, with random access.

    A part may have any number of shards, including none. The order of all parts is fixed before the first can be
    read, so that results don't depend on when they are read.
    """

    @property
    def parts(self) -> IntArray:
        """int64 `[shards]`: the part that each shard belongs to, ascending."""

    @property
    def tokens(self) -> IntArray:
        """int64 `[shards]`: tokens of each shard, possibly estimated; a function of the content."""

    @property
    def num_parts(self) -> int:
        """Number of parts, including unfinished ones."""

    @property
    def fingerprint(self) -> str:
        """Changes with the tokens and their order, but not with their location."""

    @property
    def tables(self) -> Path | None:
        """Folder for tables computed from the lengths; None: they aren't stored beside the data."""

    def fingerprint_at(self, num_parts: int) -> str | None:
        """Return the fingerprint of the first parts alone; None where they never were a store."""

    def wait_for(self, num_parts: int) -> None:
        """Wait until the first `num_parts` parts are there."""
