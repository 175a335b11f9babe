"""Build a batch's arrays from a packing and its documents' tokens.

    Packing + documents ──► documents.as_ragged ──► layout ──► kernels ──► packed.PackedBatch

In: tokens in any form that `documents.py` knows. Out: ids, labels, positions, segments, boundaries, loss weights.
Begin in `collate.py`; `flatten` is its form for whole documents in one row.
"""
