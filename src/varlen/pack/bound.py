"""The provable minimum number of packs, to say how far any packing could still be improved."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from varlen.arguments import as_count, check_multiple
from varlen.errors import OverlongDocumentError
from varlen.pack.lengths import as_lengths
from varlen.pack.pieces import slots_of


def lower_bound(
    lengths: npt.ArrayLike, capacity: int, max_documents: int | None = None, document_multiple_of: int = 1
) -> int:
    """Return a number of packs that no packing of whole documents can go below.

    The larger of two bounds by Martello and Toth (1990): L1, all tokens over the capacity, rounded up; and L2,
    which for every threshold t keeps documents longer than capacity - t apart, gives every document above half
    a capacity a pack of its own, and lets those of at least t fill only the space that is left there.

    Args:
        lengths: `[num_documents]` whole numbers from 0; documents of length 0 need no pack.
        capacity: tokens a pack can hold.
        max_documents: most documents a pack may hold.
        document_multiple_of: space a document takes up is rounded up to this multiple.

    Raises:
        LengthsError: lengths that can't be.
        OverlongDocumentError: a document longer than the capacity.

    Cost: O(num_documents log num_documents) time.

    >>> lower_bound([5, 5, 5], capacity=8)
    3
    """
    checked = as_lengths(lengths)
    capacity = as_count(capacity, "capacity")
    multiple = as_count(document_multiple_of, "document_multiple_of")
    check_multiple(capacity, multiple, "document_multiple_of")
    if checked.size and checked.max() > capacity:
        first = int(np.argmax(checked > capacity))
        raise OverlongDocumentError(
            f"document {first:,} has {checked[first]:,} tokens but capacity is {capacity:,} "
            f"({int((checked > capacity).sum()):,} of {checked.size:,} documents are too long); "
            "cut or drop them first: a bound speaks of whole documents"
        )
    slots = slots_of(checked, multiple)
    values, counts = np.unique(slots[slots > 0], return_counts=True)
    if not values.size:
        return 0
    documents = int(counts.sum())
    most = documents if max_documents is None else as_count(max_documents, "max_documents")
    return max(
        -(-documents // most), _martello_toth(values.astype(np.int64), counts.astype(np.int64), capacity)
    )


def _martello_toth(values: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], capacity: int) -> int:
    """L2 over distinct lengths (rising) and how often each occurs; the threshold 0 gives L1."""
    documents = np.concatenate([[0], np.cumsum(counts)])
    tokens = np.concatenate([[0], np.cumsum(counts * values)])
    half = int(np.searchsorted(values, capacity // 2, side="right"))  # values[:half] <= capacity / 2
    thresholds = np.concatenate([[0], values[:half]])
    big = np.searchsorted(values, capacity - thresholds, side="right")  # longer than capacity - t
    big = np.maximum(big, half)
    small = np.searchsorted(values, thresholds, side="left")
    alone = documents[-1] - documents[big]
    halves = documents[big] - documents[half]
    space = halves * capacity - (tokens[big] - tokens[half])
    rest = tokens[half] - tokens[np.minimum(small, half)] - space
    return int((alone + halves + np.maximum(0, -(-rest // capacity))).max())
