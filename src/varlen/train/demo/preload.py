"""Imported by the server that runs are forked from: compiles the kernels of `collate` once for all runs.

Matters where no folder can keep compiled kernels; else it saves reading them fourteen times.
"""

from __future__ import annotations

import numpy as np

from varlen.batch.collate import collate
from varlen.train.demo.orders import batches_as_packing


def compile_kernels() -> None:
    """Lay out one tiny document in both layouts, with the dtypes of the experiment."""
    lengths = np.array([3], dtype=np.int64)
    packing = batches_as_packing(lengths, np.zeros((1, 1), dtype=np.int64), 3)
    documents = (np.zeros(3, dtype=np.int32), np.array([0, 3], dtype=np.int64))
    collate(documents, packing, layout="rows")
    collate(documents, packing, layout="flat")


compile_kernels()
