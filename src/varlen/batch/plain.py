"""The most frequent batch, of documents that lie flat in memory and are their own labels, in one kernel call."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from varlen.batch import kernels
from varlen.batch.layout import exactness, padding_segment
from varlen.batch.packed import Layout
from varlen.batch.ragged import Documents, as_flat
from varlen.errors import DocumentsError
from varlen.types import IntArray, Packing


def plain_fields(
    documents: Documents,
    packing: Packing,
    pack_ids: IntArray,
    layout: Layout,
    pad_to_multiple_of: int,
    pad_id: int,
) -> tuple[dict[str, Any], int] | None:
    """Return the arrays and counts of a PackedBatch, and the length of its shortest segment.

    None where documents must be converted first, or where anything is wrong: what, the long way says.
    """
    multiple = packing.document_multiple_of
    width = packing.capacity if layout == "rows" else 0
    if width % pad_to_multiple_of:
        return None
    try:
        ragged = as_flat(documents, "documents")
    except DocumentsError:
        return None
    if ragged is None or ragged.offsets.size - 1 != packing.num_documents:
        return None
    dtype = ragged.values.dtype
    if dtype.kind not in "iu" or dtype == np.uint64:
        return None
    fits, wide, narrow, boundaries, block, targets, longest, shortest, largest = _kernel()(
        packing.document_ids,
        packing.starts,
        packing.stops,
        packing.offsets,
        pack_ids,
        width,
        multiple,
        math.lcm(multiple, pad_to_multiple_of),
        padding_segment(multiple),
        ragged.values,
        ragged.offsets,
        packing.capacity,
        exactness(packing),
        dtype.itemsize > 4 or dtype == np.uint32,
        pad_id,
    )
    if not fits:
        return None
    count = narrow.shape[1]
    input_ids, labels, position_ids, segment_ids = block
    first_tokens, lengths, document_targets = narrow
    is_exact = multiple == 1 or np.array_equal(boundaries[0], boundaries[1])
    return {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": position_ids,
        "segment_ids": segment_ids,
        "cu_seqlens": boundaries[0],
        "cu_seqlens_padded": None if is_exact else boundaries[1],
        "max_seqlen": longest,
        "document_ids": wide[:count],
        "document_starts": first_tokens,
        "document_lengths": lengths,
        "document_targets": document_targets,
        "pack_offsets": wide[3 * count :],
        "max_token_id": largest,
        "num_targets": targets,
        "columns": {},
    }, shortest


def _kernel() -> Any:
    return kernels.plain_batch
