"""Groups of shards, within which documents are shuffled: so many parts each, whether they are there yet or not.

A group is sealed when all its parts, and those before it, are finished. What a group holds then never changes, so
windows of it may be made while later ones are still being written. An epoch of a store that grows holds the parts
that were there when it began, and no others.
"""

from __future__ import annotations

import numpy as np

from varlen.source.token_documents import TokenDocuments

PARTS_A_GROUP = 16


class Groups:
    """Where groups of a store's shards begin and end."""

    def __init__(self, store: TokenDocuments, parts_a_group: int = PARTS_A_GROUP) -> None:
        """Take the store, and how many parts are shuffled together."""
        self._store, self.parts_a_group = store, parts_a_group

    def num_groups(self, num_parts: int) -> int:
        """Return how many groups the first parts make; some may hold nothing."""
        return -(-num_parts // self.parts_a_group)

    def is_there(self, group: int, num_parts: int) -> bool:
        """Return whether a group is known to be sealed, without waiting for it."""
        stop = min((group + 1) * self.parts_a_group, num_parts)
        parts = self._store.parts
        return len(parts) > 0 and int(parts[-1]) + 1 >= stop

    def shards(self, group: int, num_parts: int) -> tuple[int, int]:
        """Return the shard at which a group begins, and the one at which it ends; waits until it is sealed.

        Args:
            group: from 0.
            num_parts: parts of the epoch.

        Raises:
            SourceError: the parts of it don't come.
        """
        first, stop = (min(number * self.parts_a_group, num_parts) for number in (group, group + 1))
        self._store.wait_for(stop)
        start, end = np.searchsorted(self._store.parts, [first, stop])
        return int(start), int(end)
