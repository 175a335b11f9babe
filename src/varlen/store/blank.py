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
    """A token store whose tokens are all 0."""

    def __init__(self, lengths: IntArray | Int32Array, shards: IntArray | None = None) -> None:
        """Create it from the lengths of all documents, empty ones included.

        Arrays: `lengths` is `[documents]`, in store order; `shards` is int64 `[parts]`, the documents of each part,
        which is one shard; None: all are in one.
        """
        self._lengths = lengths
        self._counts = np.array([lengths.size], np.int64) if shards is None else shards
        self._first = np.concatenate([[0], np.cumsum(self._counts)]).astype(np.int64)
        before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self._tokens: IntArray = np.diff(before[self._first])

    @property
    def documents(self) -> IntArray:
        """int64 `[shards]`: documents of each shard."""
        return self._counts

    @property
    def parts(self) -> IntArray:
        """int64 `[shards]`: each shard is a part."""
        return np.arange(self._counts.size)

    @property
    def tokens(self) -> IntArray:
        """int64 `[shards]`: tokens of each shard."""
        return self._tokens

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return int(self._counts.size)

    @property
    def fingerprint(self) -> str:
        """Hash of the lengths."""
        return digest(self._lengths.astype("<i8").tobytes().hex())

    @property
    def tables(self) -> Path | None:
        """None: nothing is cached."""
        return None

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
        lengths_: IntArray = self._lengths[self._first[shards] + documents].astype(np.int64)
        return lengths_

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
