"""Documents of which only the lengths are known, with the interface of a token store.

They are packed as a store is, so that its packs are known before a token is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from varlen.text.loss_masks import Mask
from varlen.text.tokenizer import digest
from varlen.types import Int32Array, IntArray


class BlankTokens:
    """A token store whose tokens are all 0, one shard per part."""

    tables: Path | None = None  # nothing is cached

    def __init__(self, lengths: IntArray | Int32Array, part_sizes: IntArray | None = None) -> None:
        """Create it from `[documents]` lengths, and int64 `[parts]` documents of each part; None: all are in one."""
        self._lengths = lengths
        self.documents: IntArray = np.array([lengths.size], np.int64) if part_sizes is None else part_sizes
        self.num_parts = int(self.documents.size)
        self.parts: IntArray = np.arange(self.num_parts)
        self._first = np.concatenate([[0], np.cumsum(self.documents)]).astype(np.int64)
        before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self.tokens: IntArray = np.diff(before[self._first])

    @property
    def fingerprint(self) -> str:
        """Hash of the lengths."""
        return digest(self._lengths.astype("<i8").tobytes().hex())

    def fingerprint_at(self, num_parts: int) -> str | None:
        """Return the fingerprint of all parts; the first ones alone never were a store."""
        return self.fingerprint if num_parts == self.num_parts else None

    def wait_for(self, num_parts: int) -> None:
        """Return immediately: all parts are there."""

    def where(self, shard: int) -> str:
        """Describe a shard's location."""
        return f"part {shard:,} of the documents"

    def lengths(self, shards: IntArray, documents: IntArray) -> IntArray:
        """Return the lengths of documents, given by shard and number."""
        chosen: IntArray = self._lengths[self._first[shards] + documents].astype(np.int64)
        return chosen

    def will_need(self, shards: IntArray, documents: IntArray) -> None:
        """Do nothing: no file is read."""

    def count_targets(
        self,
        shards: IntArray,  # noqa: ARG002 - all tokens are supervised
        documents: IntArray,  # noqa: ARG002
        starts: IntArray,
        stops: IntArray,
    ) -> IntArray:
        """Count the labels of pieces: all tokens but the first of each."""
        labels: IntArray = np.maximum(stops - starts - 1, 0)
        return labels

    def gather(
        self,
        shards: IntArray,  # noqa: ARG002 - all tokens are alike
        documents: IntArray,  # noqa: ARG002
        starts: Sequence[int] | IntArray,  # noqa: ARG002
        lengths: IntArray,
    ) -> tuple[Int32Array, Mask | None]:
        """Return zeros for the pieces' tokens, all of them supervised."""
        return np.zeros(int(lengths.sum()), np.int32), None
