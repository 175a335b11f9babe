"""Data and trainers' halves for the tests of loaders behind others' protocols: documents that say who they are."""

import numpy as np
from tests.support.stores import write_store

FIRST = 1000
"""Document n begins with the token FIRST + n; all its others are below."""


def numbered_store(folder, documents=90, longest=40, seed=2):
    """A token store of documents of 1 to `longest` tokens; every third one has a loss mask with zeros in it."""
    rng = np.random.default_rng(seed)
    shards = []
    for shard in range(3):
        here = []
        for number in range(shard * documents // 3, (shard + 1) * documents // 3):
            tokens = [FIRST + number, *rng.integers(1, 99, rng.integers(0, longest)).tolist()]
            mask = None if shard else [1, *rng.integers(0, 2, len(tokens) - 1).tolist()]
            here.append((tokens, mask))
        shards.append([here])
    return write_store(folder, shards).folder


def numbers(tokens):
    """The documents that begin in these tokens."""
    flat = np.asarray(tokens).reshape(-1)
    return sorted((flat[flat >= FIRST] - FIRST).tolist())


def step_rows(ranks):
    """The rows of a step over all ranks, in no order: what must not depend on the number of ranks."""
    return sorted(bytes(row) for tokens in ranks for row in np.asarray(tokens))
