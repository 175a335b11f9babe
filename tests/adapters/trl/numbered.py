"""Data sets in which every token is another, so that a test sees where each has gone."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from datasets import Dataset


def numbered(lengths: list[int], kind: pa.DataType | None = None) -> Dataset:
    """Documents whose tokens are all different, and a second column of their negatives."""
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    tokens = np.arange(offsets[-1])
    ids = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(tokens))
    others = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(-tokens))
    if kind is not None:
        ids, others = ids.cast(kind), others.cast(kind)
    return Dataset(pa.table({"input_ids": ids, "labels": others}))
