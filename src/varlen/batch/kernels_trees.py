"""Write the pieces of trees into the arrays of a batch."""

# Kernels mix Python and numpy integers, which numba types by itself.
# mypy: disable-error-code="assignment,return-value,no-any-return"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from varlen.jit import compiled

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@compiled
def lay_trees(
    token_ids: Int32,
    positions: Int32,
    ends: Int32,
    segment_offsets: Int64,
    parents: Int32,
    begins: Int64,
    sizes: Int64,
    prefixes: Int64,
    bases: Int64,
    segment_of: Int64,
    width: int,
    input_ids: Int32,
    position_ids: Int32,
    subtree_end: Int32,
    forest_tokens: Int32,
) -> None:
    """Write each piece: the tokens that it repeats, in the order of their positions, then its own.

    Args:
        token_ids: `[tokens]` of the forest, as are `positions` and `ends`.
        positions: of the tokens.
        ends: one past the last token that continues each.
        segment_offsets: `[segments + 1]` of the forest.
        parents: `[segments]`: the segment before each, -1 for none.
        begins: `[pieces]`: first own token, as are the other arrays of pieces.
        sizes: own tokens.
        prefixes: repeated tokens.
        bases: where it begins in the flattened batch.
        segment_of: the segment of its first own token.
        width: of a row.
        input_ids: `[rows * width]`, filled but for padding, as are the others.
        position_ids: as above.
        subtree_end: as above; columns of the row.
        forest_tokens: as above.
    """
    for piece in range(begins.size):
        begin, stop, base = begins[piece], begins[piece] + sizes[piece], bases[piece]
        column = base % width
        shift = column + prefixes[piece] - begin
        at, segment, last = base + prefixes[piece], segment_of[piece], begin
        while at > base:
            first = segment_offsets[segment]
            at -= last - first
            for token in range(first, last):
                to = at + token - first
                input_ids[to], position_ids[to] = token_ids[token], positions[token]
                subtree_end[to], forest_tokens[to] = min(ends[token], stop) + shift, token
            segment = parents[segment]
            last = segment_offsets[segment + 1]
        at = base + prefixes[piece] - begin
        for token in range(begin, stop):
            to = at + token
            input_ids[to], position_ids[to] = token_ids[token], positions[token]
            subtree_end[to], forest_tokens[to] = min(ends[token], stop) + shift, token
