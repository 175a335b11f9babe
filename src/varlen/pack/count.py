"""How many packs a window of documents gives, without making them: a third of the work."""

from __future__ import annotations

import numpy.typing as npt

from varlen.pack.lengths import LARGEST, as_lengths
from varlen.pack.pieces import fit
from varlen.pack.whole import whole
from varlen.pack.window import WindowPacker
from varlen.types import Method, Overlong


def count_packs(
    lengths: npt.ArrayLike,
    *,
    capacity: int,
    method: Method = "best_fit",
    overlong: Overlong = "split",
    max_documents: int | None = None,
    document_multiple_of: int = 1,
) -> int:
    """Count the packs that a WindowPacker of these settings gives for documents that all wait until it is flushed.

    Args:
        lengths: `[any]` tokens of each document.
        capacity: tokens a pack can hold.
        method: any of `vl.pack`'s methods.
        overlong: what becomes of documents longer than `capacity`.
        max_documents: most pieces a pack may hold; None for no limit.
        document_multiple_of: round the space each piece takes up to this multiple.

    Raises:
        LengthsError: lengths that can't be.
        OverlongDocumentError: a document doesn't fit and `overlong` is "error".
    """
    if method in ("best_fit", "first_fit"):
        kept = fit(as_lengths(lengths), capacity, overlong).lengths
        return whole(kept[kept > 0], capacity, method, max_documents or LARGEST, document_multiple_of)[1]
    packer = WindowPacker(
        capacity=capacity,
        window=LARGEST,
        method=method,
        overlong=overlong,
        max_documents=max_documents,
        document_multiple_of=document_multiple_of,
    )
    packer.add(lengths)
    return packer.flush().num_packs
