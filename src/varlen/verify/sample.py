"""A small packed batch of random tokens, for checks that need any documents rather than real ones."""

from __future__ import annotations

import numpy as np

from varlen.batch.collate import collate
from varlen.batch.packed import PackedBatch
from varlen.pack.api import pack

LENGTHS = (9, 21, 1, 13, 30, 6, 17, 2)
"""Documents of one token and of two among them, and a row that ends in padding."""


def sample_batch(vocabulary_size: int, seed: int = 0) -> PackedBatch:
    """Return eight documents in two rows, their tokens drawn from the whole vocabulary.

    Args:
        vocabulary_size: tokens are drawn from 0 to one below.
        seed: of the tokens.
    """
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, vocabulary_size, length).astype(np.int32) for length in LENGTHS]
    packing = pack(LENGTHS, capacity=52, method="next_fit")
    return collate(documents, packing)
