"""Groups of shards, within which documents are shuffled: so many parts each, whether they are there yet or not.

::

    parts     0 1 2 3 4 | 5 6 7 8 | 9        documents of one group are shuffled and packed together
    holds     enough      enough    the rest

A window never crosses groups, and its last pack is seldom full: a group takes in small parts until it holds enough.
Where it ends depends on the settings, and on it and the parts before it alone: it is sealed when these are finished.
What a group holds then never changes, so windows of it may be made while later ones are still being written. An epoch
of a store that grows holds the parts that were there when it began, and no others.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from varlen.store.tokens import TokenDocuments
from varlen.types import IntArray, Overlong

PARTS_A_GROUP = 16
WINDOWS_A_GROUP, PACKS_A_GROUP = 4, 1024
"""A group of more parts than that ends where it has so many windows, or so many packs where documents are long: some
packs that aren't full are few among them, and what is to be there before training begins isn't more than that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Enough:
    """What a group holds at least, but for the last one of an epoch."""

    parts: int = PARTS_A_GROUP
    documents: int = 1
    """Beside the parts: so many documents, or so many tokens."""
    tokens: int = 1
    longest: int | None = None
    """Tokens that become of a document at most; None: all that it has."""


def enough_for(window: int, capacity: int, overlong: Overlong, parts: int = PARTS_A_GROUP) -> Enough:
    """Return what a group holds at least so that hardly any of its packs aren't full.

    Args:
        window: documents that are packed together.
        capacity: of a pack.
        overlong: what becomes of longer documents.
        parts: that a group has at least.
    """
    return Enough(
        parts=parts,
        documents=WINDOWS_A_GROUP * window,
        tokens=PACKS_A_GROUP * capacity,
        longest=capacity if overlong in ("truncate", "drop") else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sums:
    """What the shards hold that are there."""

    of: tuple[IntArray, IntArray, IntArray]
    """What they were summed up of."""
    parts: IntArray
    documents: IntArray
    tokens: IntArray
    """int64 `[shards + 1]`: before each."""


class Groups:
    """Where groups of a store's shards begin and end."""

    def __init__(self, store: TokenDocuments, enough: Enough | None = None) -> None:
        """Take the store, and what a group holds at least; None: the usual number of parts."""
        self._store, self._enough = store, enough or Enough()
        self._ends = [0]
        """Parts that begin a group, as far as no later part can change that."""
        self._finding = threading.Lock()
        self._there = 0
        self._sums: _Sums | None = None

    @property
    def parts_a_group(self) -> int:
        """Parts of the store whose documents are shuffled together, at least."""
        return self._enough.parts

    def num_groups(self, num_parts: int) -> int:
        """Return how many groups the first parts make, each of which holds a document; waits for all these parts.

        Raises:
            SourceError: they don't come.
        """
        group = 0
        while True:
            first, stop = self.shards(group, num_parts)
            if not self._store.documents[first:stop].any():
                return group
            group += 1

    def is_there(self, group: int, num_parts: int) -> bool:
        """Return whether a group is known to be sealed, or not to be one, without waiting for it."""
        return self._parts(group, num_parts, is_waiting=False) is not None

    def shards(self, group: int, num_parts: int) -> tuple[int, int]:
        """Return the shard at which a group begins, and the one at which it ends; waits until it is sealed.

        Behind the last group there are no more shards with documents.

        Args:
            group: from 0.
            num_parts: parts of the epoch.

        Raises:
            SourceError: the parts of it don't come.
        """
        found = self._parts(group, num_parts, is_waiting=True)
        start, end = np.searchsorted(self._store.parts, found or (0, 0))
        return int(start), int(end)

    def _parts(self, group: int, num_parts: int, *, is_waiting: bool) -> tuple[int, int] | None:
        """Return the first part of a group, and that after its last; None where that isn't known yet."""
        while True:
            known, begins = len(self._ends), self._ends[-1]
            if group + 1 < known:
                first, stop = self._ends[group], self._ends[group + 1]
                return min(first, num_parts), min(stop, num_parts)
            if begins >= num_parts:
                return num_parts, num_parts
            end = self._end(begins, num_parts, is_waiting=is_waiting)
            if end is None:
                return None
            if end > num_parts:  # the rest of the epoch is its last group, and not yet one of a larger store
                return (begins, num_parts) if group + 1 == known else (num_parts, num_parts)
            with self._finding:
                if len(self._ends) == known:
                    self._ends.append(end)

    def _end(self, begins: int, num_parts: int, *, is_waiting: bool) -> int | None:
        """Return the part after the last of a group that begins at a part; more than `num_parts` if it goes on there.

        Returns:
            None where parts have to be there to tell, and nobody waits for them.
        """
        wanted = min(begins + self._enough.parts, num_parts)
        while True:
            if is_waiting and wanted > self._there:
                self._store.wait_for(wanted)
                self._there = max(self._there, wanted)
            there = self._there  # before a look at what is there by now
            sums = self._summed()
            there = min(max(there, int(sums.parts[-1]) + 1 if len(sums.parts) else 0), num_parts)
            first = int(np.searchsorted(sums.parts, begins))
            shard = min(
                int(np.searchsorted(before, before[first] + least)) - 1
                for before, least in (
                    (sums.documents, self._enough.documents),
                    (sums.tokens, self._enough.tokens),
                )
            )
            if shard < len(sums.parts):
                end = max(begins + self._enough.parts, int(sums.parts[shard]) + 1)
                if end <= there:
                    return end
            if there >= num_parts:
                return num_parts + 1
            if not is_waiting:
                return None
            wanted = there + 1

    def _summed(self) -> _Sums:
        """Return sums of what the store has by now."""
        sums = self._sums
        of = (self._store.documents, self._store.tokens, self._store.parts)
        if sums is None or any(now is not then for now, then in zip(of, sums.of)):
            count = min(map(len, of))  # more may have come between two looks
            documents, tokens, parts = (one[:count] for one in of)
            if self._enough.longest is not None:
                tokens = np.minimum(tokens, self._enough.longest * documents)
            sums = _Sums(
                of=of,
                parts=parts,
                documents=np.concatenate([[0], np.cumsum(documents)]),
                tokens=np.concatenate([[0], np.cumsum(tokens)]),
            )
            self._sums = sums
        return sums
