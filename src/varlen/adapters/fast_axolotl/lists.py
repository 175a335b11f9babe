"""Rows of Python lists from Python lists: joined as lists, since arrays on the way would cost ten times as much."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from varlen.types import Packing


def are_plain(columns: Sequence[Any]) -> bool:
    """Return whether all are lists of Python's own whole numbers, as long in each column as in the others.

    What isn't takes the way over arrays, which says what is wrong with it.
    """
    first = columns[0]
    for column in columns:
        if len(column) != len(first):
            return False
        for sequence, other in zip(column, first):
            if (
                type(sequence) is not list
                or len(sequence) != len(other)
                or not set(map(type, sequence)) <= {int}
            ):
                return False
    return True


def join(sequences: Sequence[Any], packing: Packing, pad: int) -> Any:
    """Return the rows of a packing, padded to its capacity: a list of lists, of lists."""
    rows: list[Any] = []
    bounds = packing.offsets.tolist()
    pieces = list(zip(packing.document_ids.tolist(), packing.starts.tolist(), packing.stops.tolist()))
    for first, last in zip(bounds[:-1], bounds[1:]):
        row: list[int] = []
        for document, start, stop in pieces[first:last]:
            sequence = sequences[document]
            row += sequence if stop - start == len(sequence) else sequence[start:stop]
        row += [pad] * (packing.capacity - len(row))
        rows.append(row)
    return rows
