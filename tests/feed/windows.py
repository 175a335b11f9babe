"""Windows of stores of known lengths, and the packs in them."""

import numpy as np
from hypothesis import strategies as st

from varlen.feed.indexed.windows import GroupMinimum, Groups, Windows


class Store:
    """Stands in for a token store of known lengths, shard by shard; each is a part, unless told."""

    tables = None

    def __init__(self, shards, parts=None):
        self.shards = shards
        self.documents = np.array([len(lengths) for lengths in shards], dtype=np.int64)
        self.tokens = np.array([sum(lengths) for lengths in shards], dtype=np.int64)
        self.parts = np.arange(len(shards)) if parts is None else np.array(parts, dtype=np.int64)
        self.num_parts = int(self.parts[-1]) + 1 if len(self.parts) else 0
        self.fingerprint = self.fingerprint_at(self.num_parts)

    def wait_for(self, num_parts):
        assert num_parts <= self.num_parts

    def fingerprint_at(self, num_parts):
        ends = int(np.searchsorted(self.parts, num_parts))
        return repr((self.shards[:ends], self.parts[:ends].tolist()))  # as stores tell parts apart

    def lengths(self, shards, documents):
        return np.array(
            [self.shards[s][d] for s, d in zip(shards.tolist(), documents.tolist())], dtype=np.int64
        )


def windows_of(shards, ends, settings):
    parts = np.searchsorted(ends, np.arange(len(shards)), side="right")
    return Windows(Store(shards, parts), Groups(Store(shards, parts), GroupMinimum(parts=1)), settings)


def pieces_of(packs):
    fields = (packs.shards, packs.documents, packs.starts, packs.stops)
    return list(zip(*(field.tolist() for field in fields)))


SHARDS = st.lists(st.lists(st.integers(0, 40), max_size=30), min_size=1, max_size=5)


def packs_of(taken):
    pieces = pieces_of(taken)
    bounds = taken.offsets.tolist()
    return [pieces[a:b] for a, b in zip(bounds, bounds[1:])]
