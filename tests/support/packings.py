"""Lengths and settings to try, and a plain retelling of what a Packing holds, written apart from varlen."""

import random
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from hypothesis import strategies as st

from varlen.types import Method, Overlong, Packing

METHODS: tuple[Method, ...] = get_args(Method)
POLICIES: tuple[Overlong, ...] = get_args(Overlong)
WHOLE = tuple(method for method in METHODS if method != "wrapped")
UNLIMITED = 2**31 - 1

Piece = tuple[int, int, int]
"""Document, first token, one past the last token."""


def random_lengths(seed: int, count: int, longest: int, shape: str = "tail") -> list[int]:
    """Lengths from 1, drawn with Python's own generator: a long tail, all alike, or few distinct ones."""
    draw = random.Random(f"{seed} {count} {longest} {shape}")
    if shape == "tail":
        return [min(longest, 1 + int(draw.lognormvariate(0, 1.5) * longest / 12)) for _ in range(count)]
    if shape == "even":
        return [draw.randint(1, longest) for _ in range(count)]
    values = [draw.randint(1, longest) for _ in range(4)]
    return [draw.choice(values) for _ in range(count)]


@dataclass(frozen=True)
class Case:
    lengths: list[int]
    capacity: int
    method: Method
    overlong: Overlong
    max_documents: int | None
    multiple: int
    seed: int | None
    groups: list[int] | None

    def settings(self) -> dict[str, Any]:
        return {
            "capacity": self.capacity,
            "method": self.method,
            "overlong": self.overlong,
            "max_documents": self.max_documents,
            "document_multiple_of": self.multiple,
            "seed": self.seed,
            "groups": self.groups,
        }


@st.composite
def cases(
    draw: st.DrawFn, methods: tuple[Method, ...] = METHODS, policies: tuple[Overlong, ...] = POLICIES
) -> Case:
    """Calls that must succeed: small capacities, so that ties, full packs and overlong documents are common."""
    multiple = draw(st.sampled_from([1, 1, 2, 3, 8]))
    capacity = multiple * draw(st.integers(1, 24))
    method = draw(st.sampled_from(methods))
    overlong = draw(st.sampled_from(policies))
    grouped = method != "wrapped" and overlong in ("error", "drop") and draw(st.booleans())
    longest = capacity if overlong == "error" and method != "wrapped" else 3 * capacity
    few = st.sampled_from([0, 1, longest, capacity, max(1, capacity // 2), capacity // 2 + 1])
    lengths = draw(
        st.lists(st.one_of(st.integers(0, longest), few.filter(lambda n: n <= longest)), max_size=40)
    )
    max_documents = draw(st.sampled_from([None, None, 1, 2, 5]))
    groups = None
    if grouped:
        group = st.integers(-2, draw(st.sampled_from([0, 2, len(lengths)])))
        groups = [draw(group) for _ in lengths]
        if overlong == "error":
            lengths, groups = only_groups_that_fit(lengths, groups, capacity, multiple, max_documents)
    seed = draw(st.sampled_from([None, 0, 1, 2**64 - 1]))
    return Case(lengths, capacity, method, overlong, max_documents, multiple, seed, groups)


def only_groups_that_fit(
    lengths: list[int], groups: list[int], capacity: int, multiple: int, max_documents: int | None
) -> tuple[list[int], list[int]]:
    """Leave out documents that would make their group too large for a pack."""
    used: dict[int, int] = defaultdict(int)
    many: dict[int, int] = defaultdict(int)
    kept = []
    for length, group in zip(lengths, groups):
        slot = rounded(length, multiple)
        if used[group] + slot <= capacity and (not length or many[group] < (max_documents or UNLIMITED)):
            used[group] += slot
            many[group] += length > 0
            kept.append((length, group))
    return [length for length, _ in kept], [group for _, group in kept]


def rounded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def packs_of(packing: Packing) -> list[list[Piece]]:
    """The packs as lists of pieces, read straight from the arrays."""
    pieces = list(zip(packing.document_ids.tolist(), packing.starts.tolist(), packing.stops.tolist()))
    bounds = packing.offsets.tolist()
    return [pieces[begin:end] for begin, end in zip(bounds[:-1], bounds[1:])]


def kept_lengths(case: Case) -> list[int]:
    if case.groups is not None:
        used: dict[int, int] = defaultdict(int)
        many: dict[int, int] = defaultdict(int)
        for length, group in zip(case.lengths, case.groups):
            used[group] += rounded(length, case.multiple)
            many[group] += length > 0
        limit = case.max_documents or UNLIMITED
        return [
            length if used[group] <= case.capacity and many[group] <= limit else 0
            for length, group in zip(case.lengths, case.groups)
        ]
    return kept_of(case.lengths, case.capacity, case.overlong)


def kept_of(lengths: list[int], capacity: int, overlong: Overlong) -> list[int]:
    if overlong == "truncate":
        return [min(length, capacity) for length in lengths]
    if overlong == "drop":
        return [length if length <= capacity else 0 for length in lengths]
    return lengths


def check_complete(packs: list[list[Piece]], kept: list[int]) -> None:
    """Every token of the kept part of every document stands in exactly one piece, and no piece is empty."""
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for pack in packs:
        assert pack, "a pack is empty"
        for document, start, stop in pack:
            assert start < stop, f"document {document} has an empty piece"
            spans[document].append((start, stop))
    for document, length in enumerate(kept):
        at = 0
        for start, stop in sorted(spans.pop(document, [])):
            assert start == at, f"document {document}: a piece begins at {start}, the one before ends at {at}"
            at = stop
        assert at == length, f"document {document}: {at} of {length} tokens stand in packs"
    assert not spans, f"documents that were never given: {sorted(spans)}"


def check_limits(packs: list[list[Piece]], capacity: int, multiple: int, max_documents: int | None) -> None:
    """No pack holds more tokens (in slots) or more pieces than it may."""
    for pack in packs:
        assert sum(rounded(stop - start, multiple) for _, start, stop in pack) <= capacity
        assert len(pack) <= (max_documents or UNLIMITED)


def check_order(packs: list[list[Piece]], permuted: bool) -> None:
    """Pieces in input order within a pack; packs in the order of their first piece unless a seed permuted them."""
    for pack in packs:
        assert pack == sorted(pack)
    if not permuted:
        first = [pack[0] for pack in packs]
        assert first == sorted(first)


def arrays_of(packing: Packing) -> tuple[np.ndarray, ...]:
    return packing.document_ids, packing.starts, packing.stops, packing.offsets


def same_packing(first: Packing, second: Packing) -> bool:
    pairs = zip(arrays_of(first), arrays_of(second))
    return first.ledger == second.ledger and all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs
    )
