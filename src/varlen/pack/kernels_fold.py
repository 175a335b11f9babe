"""Fold rows into a tree of segments; `tests/oracles/fold.py` defines in plain Python what comes of it.

The tree grows row by row. A row follows segments as long as their tokens are its own; where it leaves one, that
segment is split, and where it goes beyond the last, a segment begins. A segment's tokens are those of a row that runs
through it, from one position to another, so nothing is copied before the tree is finished.

A hash table finds a segment by the one before it and by its first token. Every token of every row is compared once.
"""

# Kernels mix Python and numpy integers, which numba types by itself.
# mypy: disable-error-code="assignment,return-value,no-any-return"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from varlen.jit import compiled

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_BLOCK = 16
"""Tokens that are compared before any of them decides, so that they are compared at once."""
ROW, START, STOP, PARENT, FIRST, CHILDREN = range(6)
"""Of a segment: a row that runs through it, where it begins and ends in that row, the segment before it (a root has
-1 - its group), the first row that runs through it, and how many segments follow."""


@compiled
def _slot(table: Int32, parent: int, token: int) -> int:
    """The slot of the hash table at which the search for a segment begins."""
    mixed = np.int64(parent) * np.int64(0x9E3779B1) + np.int64(token) * np.int64(0x85EBCA77)
    mixed ^= (mixed >> 15) & 0x1FFFFFFFFFFFF
    mixed *= np.int64(0x2C1B3C6D)
    mixed ^= (mixed >> 17) & 0x7FFFFFFFFFFF
    return mixed & (table.size - 1)


@compiled
def _are_same(ids: Int32, identity: Bytes, one: int, other: int) -> bool:
    """Whether two tokens may be one."""
    if ids[one] != ids[other]:
        return False
    are_same = True
    for byte in range(identity.shape[1]):
        are_same = are_same and identity[one, byte] == identity[other, byte]
    return are_same


@compiled
def _find(
    table: Int32, segments: Int64, ids: Int32, identity: Bytes, offsets: Int64, parent: int, token: int
) -> int:
    """The slot of the segment after `parent` that begins with a token; of an empty slot if there is none."""
    slot = _slot(table, parent, ids[token])
    while table[slot] >= 0:
        found = table[slot]
        first = offsets[segments[found, ROW]] + segments[found, START]
        if segments[found, PARENT] == parent and _are_same(ids, identity, first, token):
            return slot
        slot = (slot + 1) & (table.size - 1)
    return slot


@compiled
def _agree(ids: Int32, identity: Bytes, one: int, other: int, most: int) -> int:
    """How many tokens from two places on are the same, at most `most`."""
    agreed = 0
    if identity.shape[1] == 0:
        while agreed + _BLOCK <= most:
            differing = np.int32(0)
            for each in range(_BLOCK):
                differing |= ids[one + agreed + each] ^ ids[other + agreed + each]
            if differing != 0:
                break
            agreed += _BLOCK
    while agreed < most and _are_same(ids, identity, one + agreed, other + agreed):
        agreed += 1
    return agreed


@compiled
def grow(
    ids: Int32,
    identity: Bytes,
    offsets: Int64,
    groups: Int64,
    table: Int32,
    segments: Int64,
    last: Int32,
) -> int:
    """Fold rows into segments, in the order in which they begin; returns the number of segments.

    Args:
        ids: `[raw tokens]` of all rows.
        identity: `[raw tokens, bytes]` that must be equal, too, of two tokens that are to be one.
        offsets: `[rows + 1]`: row r is `ids[offsets[r]:offsets[r + 1]]`.
        groups: `[rows]` from 0: rows of different groups share nothing.
        table: a power of two of slots, of at least four a row; all -1.
        segments: `[2 * rows, 6]`, filled.
        last: `[rows]`, filled: the segment that the row ended in when it was folded, or one behind it; -1 for none.
    """
    count = 0
    for row in range(offsets.size - 1):
        begin, length = offsets[row], offsets[row + 1] - offsets[row]
        parent, at = -1 - groups[row], 0
        last[row] = -1
        while at < length:
            slot = _find(table, segments, ids, identity, offsets, parent, begin + at)
            found = table[slot]
            if found < 0:
                found = _new(segments, count, row, at, length, parent, row)
                count += 1
                table[slot] = found
                last[row] = found
                break
            last[row] = found
            other = offsets[segments[found, ROW]]
            most = min(segments[found, STOP], length) - at
            at += _agree(ids, identity, begin + at, other + at, most)
            if at == length:
                break
            if at < segments[found, STOP]:
                head = _new(
                    segments, count, segments[found, ROW], segments[found, START], at,
                    segments[found, PARENT], segments[found, FIRST],
                )  # fmt: skip
                count += 1
                segments[head, CHILDREN] = 1
                if segments[head, PARENT] >= 0:  # it takes the place of the one that is split
                    segments[segments[head, PARENT], CHILDREN] -= 1
                table[slot] = head
                segments[found, START], segments[found, PARENT] = at, head
                table[_find(table, segments, ids, identity, offsets, head, other + at)] = found
                found = head
            elif segments[found, CHILDREN] == 0:  # the row goes on where all others have ended
                segments[found, ROW], segments[found, STOP] = row, length
                break
            parent = found
    return count


@compiled
def _new(segments: Int64, at: int, row: int, start: int, stop: int, parent: int, first: int) -> int:
    """Write a segment without successors, and return its number."""
    segments[at, ROW], segments[at, START], segments[at, STOP] = row, start, stop
    segments[at, PARENT], segments[at, FIRST], segments[at, CHILDREN] = parent, first, 0
    if parent >= 0:
        segments[parent, CHILDREN] += 1
    return at


@compiled
def depth_first(segments: Int64, by_first: Int64, order: Int64) -> None:
    """Number segments depth first, and those after one fork by their first rows.

    Args:
        segments: `[segments, 6]` of `grow`.
        by_first: `[segments]`: their numbers by rising first rows.
        order: `[segments]`, filled: their numbers, depth first.
    """
    count = segments.shape[0]
    child, sibling = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
    root = -1
    for at in range(count - 1, -1, -1):
        one = by_first[at]
        parent = segments[one, PARENT]
        if parent < 0:
            sibling[one], root = root, one
        else:
            sibling[one], child[parent] = child[parent], one
    one = root
    for at in range(count):
        order[at] = one
        if child[one] >= 0:
            one = child[one]
            continue
        while sibling[one] < 0 and segments[one, PARENT] >= 0:
            one = segments[one, PARENT]
        one = sibling[one]


@compiled
def write_tokens(
    ids: Int32,
    rows: Int64,
    starts: Int64,
    offsets: Int64,
    parents: Int32,
    depths: Int32,
    token_ids: Int32,
    position_ids: Int32,
    subtree_end: Int32,
) -> None:
    """Write the tokens of segments in depth-first order.

    Args:
        ids: `[raw tokens]`.
        rows: `[segments]`: where in `ids` a row begins that runs through the segment.
        starts: `[segments]`: the position of the segment's first token.
        offsets: `[segments + 1]` of their tokens.
        parents: `[segments]`: the segment before each, or -1.
        depths: `[segments]`, filled: the segments before each.
        token_ids: `[tokens]`, filled; so are the others.
        position_ids: `[tokens]`.
        subtree_end: `[tokens]`: one past the last token behind each.
    """
    count = rows.size
    for one in range(count):
        depths[one] = 0 if parents[one] < 0 else depths[parents[one]] + 1
    ends = offsets[1:].copy()
    for one in range(count - 1, -1, -1):
        if parents[one] >= 0:
            ends[parents[one]] = max(ends[parents[one]], ends[one])
        begin, size = offsets[one], offsets[one + 1] - offsets[one]
        source = rows[one] + starts[one]
        for each in range(size):
            token_ids[begin + each] = ids[source + each]
            position_ids[begin + each] = starts[one] + each
            subtree_end[begin + each] = ends[one]


@compiled
def write_places(
    rows: Int64, last: Int32, starts: Int64, offsets: Int64, parents: Int32, row_tokens: Int32
) -> None:
    """Write which token of the forest each token of each row is.

    Args:
        rows: `[rows + 1]` offsets of the rows' tokens.
        last: `[rows]`: a segment that the row ends in, or one behind it; -1 of a row of no tokens.
        starts: `[segments]`: the position of each segment's first token.
        offsets: `[segments + 1]` of their tokens.
        parents: `[segments]`: the segment before each, or -1.
        row_tokens: `[raw tokens]`, filled.
    """
    for row in range(rows.size - 1):
        begin, stop, one = rows[row], rows[row + 1] - rows[row], last[row]
        while one >= 0:
            start = starts[one]
            shift = offsets[one] - start
            for position in range(start, stop):
                row_tokens[begin + position] = shift + position
            stop = min(stop, start)
            one = parents[one]


@compiled
def find_targets(rows: Int64, mask: Bytes, targets: Int64) -> int:
    """Write where tokens are predicted: all but the first of a row, and only those of the mask; returns how many.

    Args:
        rows: `[rows + 1]` offsets of the rows' tokens.
        mask: `[raw tokens]`, 0 where a token isn't trained; empty where all are.
        targets: `[raw tokens]`, filled from its beginning.
    """
    count = 0
    for row in range(rows.size - 1):
        for at in range(rows[row] + 1, rows[row + 1]):
            if mask.size == 0 or mask[at] != 0:
                targets[count] = at
                count += 1
    return count
