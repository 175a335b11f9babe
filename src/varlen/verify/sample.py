"""A small packed batch of random tokens, for checks that need any documents rather than real ones."""

from __future__ import annotations

import numpy as np

from varlen.batch.collate import collate
from varlen.batch.packed import Layout, PackedBatch
from varlen.pack.api import pack

LENGTHS = (9, 21, 1, 13, 30, 6, 2, 64, 17)
"""Documents of one token and of two among them, one that is split, and rows that end in padding."""
_SPLIT = 7
"""The document that is longer than a row, whatever the capacity; its rest shares a row."""
CAPACITY = 52


def sample_batch(
    vocabulary_size: int, seed: int = 0, *, layout: Layout = "rows", capacity: int = CAPACITY
) -> PackedBatch:
    """Return documents in a few rows, their tokens drawn from the whole vocabulary.

    Args:
        vocabulary_size: tokens are drawn from 0 to one below.
        seed: of the tokens.
        layout: "rows", or "flat" for all of them in one row.
        capacity: tokens of a row; longer documents are split.
    """
    rng = np.random.default_rng(seed)
    lengths = [max(n, capacity + 12) if i == _SPLIT else n for i, n in enumerate(LENGTHS)]
    documents = [rng.integers(0, vocabulary_size, length).astype(np.int32) for length in lengths]
    return collate(
        documents, pack(lengths, capacity=capacity, method="next_fit", overlong="split"), layout=layout
    )
