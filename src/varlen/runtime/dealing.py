"""Which rows of a shared document are whose: what neighbouring cuts enclose is dealt to a group's ranks in zigzag.

Causal rows cost more the later they stand. Cut in twice as many chunks as there are ranks, of which each takes one
from the front and the one as far from the back, every slice is the same work for all (as Llama 3 deals context
parallelism; Grattafiori et al. 2024, arXiv 2407.21783, §3.3.2). What a rank keeps of a document stays on it, so the
cuts of both passes decide together: a slice of either is whole pieces, of each of which every rank has as much.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from varlen.types import Int32Array, IntArray

Ranges = tuple[tuple[int, int], ...]
"""Tokens `[start, stop)` of a document, first to last, apart from each other."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dealing:
    """The rows of one document, dealt to a group of ranks.

    The rows of a rank, in the order of their tokens, are its own document in little: those before any token are the
    first ones.
    """

    starts: IntArray
    """int64 `[num_chunks]`: the first token of each chunk; chunks follow each other, and some may be empty."""
    stops: IntArray
    """int64 `[num_chunks]`."""
    owners: IntArray
    """int64 `[num_chunks]`: who computes each, counted within the group."""
    num_ranks: int

    def before(self, token: int) -> list[int]:
        """Return how many rows of each rank stand before a token.

        Args:
            token: of the document.

        Cost: O(chunks), which are `2 * num_ranks` a piece.
        """
        rows = np.clip(token - self.starts, 0, self.stops - self.starts)
        return np.bincount(self.owners, weights=rows, minlength=self.num_ranks).astype(np.int64).tolist()  # type: ignore[no-any-return]

    def ranges(self, rank: int, start: int, stop: int) -> Ranges:
        """Return the tokens of a slice whose rows are a rank's, neighbours joined; any slice of either pass.

        Args:
            rank: within the group.
            start: of the slice.
            stop: of the slice.
        """
        firsts, lasts = np.maximum(self.starts, start), np.minimum(self.stops, stop)
        mine = (self.owners == rank) & (firsts < lasts)
        found: list[tuple[int, int]] = []
        for first, last in zip(firsts[mine].tolist(), lasts[mine].tolist()):
            if found and found[-1][1] == first:
                first = found.pop()[0]
            found.append((first, last))
        return tuple(found)

    def places(self) -> tuple[Int32Array, Int32Array]:
        """Return where the row of each token is: its rank, and its place among that rank's; both int32 `[tokens]`."""
        sizes = self.stops - self.starts
        owners, places = np.repeat(self.owners, sizes), np.zeros(int(sizes.sum()), np.int32)
        for rank in range(self.num_ranks):
            mine = owners == rank
            places[mine] = np.arange(np.count_nonzero(mine), dtype=np.int32)
        return owners.astype(np.int32), places


def deal(cuts: Iterable[int], num_ranks: int) -> Dealing:
    """Deal a document's rows.

    Args:
        cuts: where slices of either pass begin and end, in any order, the document's ends among them.
        num_ranks: of the group.

    >>> dealing = deal([0, 8, 12], 2)
    >>> dealing.ranges(0, 0, 12), dealing.ranges(1, 0, 12)
    (((0, 2), (6, 9), (11, 12)), ((2, 6), (9, 11)))
    """
    ends = np.array(sorted(set(cuts)), np.int64)
    parts = np.arange(2 * num_ranks + 1)
    bounds = ends[:-1, np.newaxis] + parts * np.diff(ends)[:, np.newaxis] // (2 * num_ranks)
    owners = np.minimum(parts[:-1], parts[:-1][::-1])
    return Dealing(
        starts=bounds[:, :-1].ravel(),
        stops=bounds[:, 1:].ravel(),
        owners=np.tile(owners, len(ends) - 1),
        num_ranks=num_ranks,
    )
