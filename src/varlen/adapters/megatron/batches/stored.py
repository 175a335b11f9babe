"""Packed rows in the few dtypes that the kernels of batches are compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.adapters.megatron.rows import PackedRows
from varlen.errors import DocumentsError
from varlen.types import IntArray

NOTHING: IntArray = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredRows:
    """The arrays of `PackedRows`, each contiguous."""

    input_ids: npt.NDArray[Any]
    loss_mask: npt.NDArray[Any]
    offsets: IntArray
    starts: IntArray
    document_offsets: IntArray
    given: IntArray
    """int64 `[documents]`: real inputs of each; empty where the rows don't say."""

    @classmethod
    def of(cls, rows: PackedRows) -> StoredRows:
        """Return rows in these dtypes, without a copy where they have them.

        Args:
            rows: any packed rows.

        Raises:
            DocumentsError: no rows, or not as many values of the mask as tokens.
        """
        if rows.num_rows < 1:
            raise DocumentsError("a batch needs at least one packed row, got none")
        if len(rows.loss_mask) != len(rows.input_ids):
            rows.check()
        mask = np.asarray(rows.loss_mask)
        if mask.dtype == np.bool_:
            mask = mask.view(np.int8)
        elif mask.dtype.kind == "f":
            mask = mask.astype(np.float32, copy=False)
        elif mask.dtype != np.int8:
            mask = mask.astype(np.int64, copy=False)
        ids = np.asarray(rows.input_ids)
        if ids.dtype not in (np.int32, np.int64):
            ids = ids.astype(np.int64)
        given = rows.seq_lengths
        return cls(
            input_ids=np.ascontiguousarray(ids),
            loss_mask=np.ascontiguousarray(mask),
            offsets=np.ascontiguousarray(rows.offsets, np.int64),
            starts=np.ascontiguousarray(rows.seq_start_id, np.int64),
            document_offsets=np.ascontiguousarray(rows.document_offsets, np.int64),
            given=NOTHING if given is None else np.ascontiguousarray(given, np.int64),
        )
