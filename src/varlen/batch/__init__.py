"""A packing and its tokens to arrays.

    Packing + documents ──► documents.as_documents ──► layout ──► kernels ──► packed.PackedBatch

In: tokens in any form that `documents.py` knows. Out: ids, labels, positions, segments, boundaries, loss weights.
Begin in `collate.py`; `flatten` is its form for whole documents in one row.
"""
