"""The order in which documents of a store are packed: as stored, or shuffled in bounded memory.

A shuffle permutes runs of neighbours over the whole store, then the documents within every stretch (65,536 places by
default). So a stretch is read in runs of documents that lie together on disk, but packs mix these runs; a set with no
more documents than a stretch is permuted completely. Sort keys are hashes, so the order depends only on the seed and
the counts of documents.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from varlen.types import IntArray

_RUN = 64
STRETCH = 1 << 16


class DocumentOrder:
    """A permutation of all documents."""

    def __init__(self, documents: IntArray, seed: int | None, *, stretch: int | None = None) -> None:
        """Create the order of shards with these numbers of documents; a seed of None doesn't shuffle."""
        self._seed, self._size = seed, stretch or STRETCH
        self._first = np.concatenate([[0], np.cumsum(documents)]).astype(np.int64)
        if seed is None or self.num_documents <= self._size:
            self._runs = self._run_starts = self._run_ends = np.zeros(0, dtype=np.int64)
            return
        counts = -(-documents // _RUN)
        shards = np.repeat(np.arange(len(documents)), counts)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = self._first[shards] + within * _RUN
        order = np.argsort(hashed(begins, seed))  # hashes are distinct: any sort will do
        sizes = np.minimum(begins + _RUN, self._first[shards + 1]) - begins
        self._runs, self._run_ends = begins[order], np.cumsum(sizes[order])
        self._run_starts = self._run_ends - sizes[order]

    @property
    def num_documents(self) -> int:
        """Documents in all shards."""
        return int(self._first[-1])

    @property
    def num_stretches(self) -> int:
        """Number of stretches; the last may be shorter."""
        return -(-self.num_documents // self._size)

    def stretch(self, number: int) -> tuple[IntArray, IntArray]:
        """Return the shards, and the numbers within them, of a stretch's documents."""
        start = number * self._size
        stop = min(start + self._size, self.num_documents)
        documents = self._permuted(start, stop)
        shards = np.searchsorted(self._first, documents, side="right") - 1
        if self._seed is not None:
            order = np.argsort(hashed(documents, self._seed + 1))  # hashes are distinct: any sort will do
            documents, shards = documents[order], shards[order]
        return shards.astype(np.int64), documents - self._first[shards]

    def _permuted(self, start: int, stop: int) -> IntArray:
        """Return the documents at places [start, stop) after permuting runs."""
        if len(self._runs) == 0:
            return np.arange(start, stop)
        first, last = np.searchsorted(self._run_ends, [start, max(stop - 1, start)], side="right")
        runs = slice(int(first), int(last) + 1)
        begins = np.maximum(self._run_starts[runs], start)
        sizes = np.minimum(self._run_ends[runs], stop) - begins
        documents: IntArray = np.repeat(self._runs[runs] - self._run_starts[runs], sizes) + np.arange(
            start, stop
        )
        return documents


def hashed(values: IntArray, seed: int | npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash numbers with one seed or one seed each; the same on every machine.

    The finalizer of splitmix64 (Steele et al. 2014).
    """
    factor = 0xD1342543DE82EF95
    added = np.uint64(seed * factor % 2**64) if isinstance(seed, int) else seed * np.uint64(factor)
    state: npt.NDArray[np.uint64] = values.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + added
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
