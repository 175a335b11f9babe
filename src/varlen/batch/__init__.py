"""Build a batch's arrays from a packing and its documents' tokens.

    Packing + documents ──► layout ──► kernels ──► packed.PackedBatch
    Packing + Forest ─────► trees ───► kernels_trees ──► tree_batch.TreeBatch

In: tokens in any form that `varlen.ragged` knows. Out: ids, labels, positions, segments, boundaries, loss weights.
Begin in `collate.py`; `flatten` is its form for whole documents in one row.
"""
