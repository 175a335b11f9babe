"""Packed rows in the few dtypes that the kernels of batches are compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.adapters.megatron.rows import PackedRows
from varlen.counts import many
from varlen.errors import DocumentsError, SettingError
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
        """Return rows in these dtypes, without a copy where they have them."""
        if rows.num_rows < 1:
            raise DocumentsError("a batch needs at least one packed row, got none")
        if len(rows.loss_mask) != len(rows.input_ids):
            rows.check()
        mask, given = np.asarray(rows.loss_mask), rows.seq_lengths
        ids = np.asarray(rows.input_ids)
        _check_values(ids, mask)
        # Kernels read one length a document, whatever stands behind the array.
        if given is not None and given.shape != (rows.num_documents,):
            raise DocumentsError(
                f"`seq_lengths` must have one value for each of {many(rows.num_documents, 'document')}, got the "
                f"shape {given.shape}"
            )
        if mask.dtype == np.bool_:
            mask = mask.view(np.int8)
        elif mask.dtype.kind == "f":
            mask = mask.astype(np.float32, copy=False)
        elif mask.dtype != np.int8:
            mask = mask.astype(np.int64, copy=False)
        if ids.dtype not in (np.int32, np.int64):
            ids = ids.astype(np.int64)
        return cls(
            input_ids=np.ascontiguousarray(ids),
            loss_mask=np.ascontiguousarray(mask),
            offsets=np.ascontiguousarray(rows.offsets, np.int64),
            starts=np.ascontiguousarray(rows.seq_start_id, np.int64),
            document_offsets=np.ascontiguousarray(rows.document_offsets, np.int64),
            given=NOTHING if given is None else np.ascontiguousarray(given, np.int64),
        )


def as_silent(silent: npt.ArrayLike, num_rows: int) -> npt.NDArray[np.bool_]:
    """Return which rows train nothing.

    Returns:
        bool `[rows]`.
    """
    found = np.ascontiguousarray(silent)
    if found.dtype != np.bool_ or found.shape != (num_rows,):
        raise SettingError(
            f"silent must be {many(num_rows, 'boolean')}, one a row; got {found.dtype} of the shape {found.shape}"
        )
    return found


def _check_values(ids: npt.NDArray[Any], mask: npt.NDArray[Any]) -> None:
    """Refuse tokens and masks that no kernel can take, or that would train nonsense."""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DocumentsError(
            f"`input_ids` must be whole numbers of one dimension, got {ids.dtype} of the shape {ids.shape}"
        )
    if ids.dtype == np.uint64 and len(ids) and int(ids.max()) > np.iinfo(np.int64).max:
        raise DocumentsError(f"`input_ids` hold {int(ids.max())}, which is no token")
    if mask.ndim != 1 or mask.dtype.kind not in "biuf":
        raise DocumentsError(
            f"`loss_mask` must be numbers of one dimension, got {mask.dtype} of the shape {mask.shape}"
        )
    if mask.dtype.kind == "f" and not np.isfinite(mask).all():
        wrong = np.flatnonzero(~np.isfinite(mask))
        raise DocumentsError(
            f"`loss_mask` holds {mask[wrong[0]]} at stored token {int(wrong[0]):,} ({len(wrong):,} of {len(mask):,} "
            "values aren't finite)"
        )
