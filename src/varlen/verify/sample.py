"""A small packed batch of random tokens, for checks that need any documents rather than real ones."""

from __future__ import annotations

import numpy as np

from varlen.batch.collate import collate
from varlen.batch.packed import Layout, PackedBatch
from varlen.pack.api import pack

LENGTHS = (9, 21, 1, 13, 30, 6, 17, 2, 64)
"""Documents of one token and of two among them, one that is split, and rows that end in padding."""
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
    lengths = (*LENGTHS[:-1], max(LENGTHS[-1], capacity + 12))
    documents = [rng.integers(0, vocabulary_size, length).astype(np.int32) for length in lengths]
    return collate(
        documents, pack(lengths, capacity=capacity, method="next_fit", overlong="split"), layout=layout
    )
