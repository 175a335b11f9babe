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
