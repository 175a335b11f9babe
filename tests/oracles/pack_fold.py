"""What folding rows means, token by token, in plain Python."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Node:
    """A token of the forest."""

    token: int
    position: int
    parent: Node | None
    children: dict[Hashable, Node] = field(default_factory=dict)
    at: int = -1
    end: int = -1


@dataclass
class Folded:
    """A forest as lists."""

    token_ids: list[int]
    position_ids: list[int]
    subtree_end: list[int]
    ancestors: list[set[int]]
    """Of each token: the tokens that it sees, itself included."""
    row_tokens: list[list[int]]
    num_segments: int
    merged_tokens: int


def fold(
    rows: Sequence[Sequence[int]], groups: Sequence[int], identity: Sequence[Sequence[Any]] | None = None
) -> Folded:
    """Fold rows, each of which takes the branches that exist and adds those that don't."""
    roots: dict[Hashable, Node] = {}
    paths: list[list[Node]] = []
    for number, row in enumerate(rows):
        parent: Node | None = None
        path: list[Node] = []
        for position, token in enumerate(row):
            apart = None if identity is None else identity[number][position]
            key = (token, apart) if parent is not None else (groups[number], token, apart)
            branches = roots if parent is None else parent.children
            if key not in branches:
                branches[key] = Node(token, position, parent)
            parent = branches[key]
            path.append(parent)
        paths.append(path)
    order: list[Node] = []

    def visit(node: Node) -> None:
        node.at = len(order)
        order.append(node)
        for child in node.children.values():
            visit(child)
        node.end = len(order)

    for root in roots.values():
        visit(root)
    ancestors: list[set[int]] = []
    for node in order:
        ancestors.append({node.at} | (set() if node.parent is None else ancestors[node.parent.at]))
    starts = [node for node in order if node.parent is None or len(node.parent.children) > 1]
    return Folded(
        token_ids=[node.token for node in order],
        position_ids=[node.position for node in order],
        subtree_end=[node.end for node in order],
        ancestors=ancestors,
        row_tokens=[[node.at for node in path] for path in paths],
        num_segments=len(starts),
        merged_tokens=sum(node.position + 1 for node in order if not node.children),
    )


# Every kernel of varlen.pack.kernels_fold in plain Python: arguments and results are those of the kernels.

ROW, START, STOP, PARENT, FIRST, CHILDREN = range(6)


def grow(ids: Any, identity: Any, offsets: Any, groups: Any, table: Any, segments: Any, last: Any) -> int:
    """Fold rows into segments; a segment is looked for among all."""
    found: list[list[int]] = []

    def same(one: int, other: int) -> bool:
        return bool(ids[one] == ids[other] and (identity[one] == identity[other]).all())

    def begin(row: int, start: int, stop: int, parent: int, first: int) -> int:
        found.append([row, start, stop, parent, first, 0])
        if parent >= 0:
            found[parent][CHILDREN] += 1
        return len(found) - 1

    for row in range(len(offsets) - 1):
        base, length = int(offsets[row]), int(offsets[row + 1] - offsets[row])
        parent, at = -1 - int(groups[row]), 0
        last[row] = -1
        while at < length:
            nexts = [
                number
                for number, each in enumerate(found)
                if each[PARENT] == parent and same(int(offsets[each[ROW]]) + each[START], base + at)
            ]
            if not nexts:
                last[row] = begin(row, at, length, parent, row)
                break
            (one,) = nexts
            last[row] = one
            each = found[one]
            while at < min(each[STOP], length) and same(int(offsets[each[ROW]]) + at, base + at):
                at += 1
            if at == length:
                break
            if at < each[STOP]:
                head = begin(each[ROW], each[START], at, each[PARENT], each[FIRST])
                if each[PARENT] >= 0:
                    found[each[PARENT]][CHILDREN] -= 1  # it goes through the head now
                found[head][CHILDREN] = 1
                each[START], each[PARENT] = at, head
                one = head
            elif not each[CHILDREN]:
                each[ROW], each[STOP] = row, length
                break
            parent = one
    for number, each in enumerate(found):
        segments[number] = each
    return len(found)


def depth_first(segments: Any, by_first: Any, order: Any) -> None:
    """Number segments depth first."""
    reached: list[int] = []

    def visit(one: int) -> None:
        reached.append(one)
        for other in by_first:
            if segments[other, PARENT] == one:
                visit(int(other))

    for one in by_first:
        if segments[one, PARENT] < 0:
            visit(int(one))
    order[:] = reached


def write_tokens(
    ids: Any, rows: Any, starts: Any, offsets: Any, parents: Any, depths: Any,
    token_ids: Any, position_ids: Any, subtree_end: Any,
) -> None:  # fmt: skip
    """Write the tokens of segments in depth-first order."""
    for one in range(len(rows)):
        depths[one] = 0 if parents[one] < 0 else depths[parents[one]] + 1
        behind = [other for other in range(len(rows)) if one in _path(other, parents)]
        for token in range(offsets[one], offsets[one + 1]):
            position = starts[one] + token - offsets[one]
            token_ids[token], position_ids[token] = ids[rows[one] + position], position
            subtree_end[token] = max(offsets[other + 1] for other in behind)


def _path(one: int, parents: Any) -> list[int]:
    """A segment and those before it."""
    return [] if one < 0 else [one, *_path(int(parents[one]), parents)]


def write_places(rows: Any, last: Any, starts: Any, offsets: Any, parents: Any, row_tokens: Any) -> None:
    """Write which token of the forest each token of each row is."""
    for row in range(len(rows) - 1):
        path = _path(int(last[row]), parents)
        for position in range(rows[row + 1] - rows[row]):
            one = next(each for each in path if starts[each] <= position)
            row_tokens[rows[row] + position] = offsets[one] + position - starts[one]


def find_targets(rows: Any, mask: Any, targets: Any) -> int:
    """Write where tokens are predicted."""
    firsts = set(rows[:-1].tolist())
    found = [at for at in range(rows[-1]) if at not in firsts and (not len(mask) or mask[at])]
    targets[: len(found)] = found
    return len(found)
