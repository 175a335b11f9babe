"""What every reader of packed rows can do, whatever holds them; and what those over several files share."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from varlen.adapters.megatron.files.flat import as_dict
from varlen.adapters.megatron.rows import PackedRows
from varlen.counts import many
from varlen.types import IntArray

RowIds = Sequence[int] | npt.NDArray[np.integer[Any]] | range


class PackedReader(Protocol):
    """Packed rows that are read at any place."""

    @property
    def num_rows(self) -> int:
        """Packs of all files."""

    def rows(self, indices: RowIds) -> PackedRows:
        """Return some rows, in the order asked for.

        Args:
            indices: of rows over all files; repeated ones are given again, negative ones count from the end.

        Raises:
            SourceError: a file is damaged.
            DocumentsError: a row isn't a packed row.
        """

    def batches(self) -> Iterator[PackedRows]:
        """Yield all rows in order, some at a time, in bounded memory."""

    def close(self) -> None:
        """Give the files back."""

    def __len__(self) -> int:
        """Count the rows."""

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        """Return one row as lists."""

    def __enter__(self) -> PackedReader:
        """Return the reader."""

    def __exit__(self, *_: object) -> None:
        """Close it."""


class RowReader(ABC):
    """What a reader is once it knows its rows: a sequence of dictionaries, and a context that closes."""

    num_rows: int

    @abstractmethod
    def rows(self, indices: RowIds) -> PackedRows:
        """Return some rows, in the order asked for; as `PackedReader` has it."""

    def close(self) -> None:  # noqa: B027  (most readers hold nothing open)
        """Give the files back; they are opened again by the next read."""

    def __len__(self) -> int:
        """Count the rows."""
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        """Return one row as the releases' readers do: lists of `input_ids`, `loss_mask` and `seq_start_id`.

        `seq_boundaries` are the starts and the row's end; `seq_lengths` is there where the file has it. A negative
        index counts from the end, with the mask as it is: which rows complete a batch is the data set's business.
        """
        return as_dict(self.rows([operator.index(index)]), 0)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        """Yield every row as lists."""
        return (self[index] for index in range(self.num_rows))

    def __enter__(self) -> Any:
        """Return the reader."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


def row_ids(indices: RowIds, num_rows: int) -> IntArray:
    """Return indices of rows as they count from the beginning."""
    ids = np.asarray(indices)
    if ids.size == 0:
        return np.zeros(0, dtype=np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise IndexError(f"rows are named by a list of whole numbers, got {ids.dtype} of shape {ids.shape}")
    ids = ids.astype(np.int64)
    outside = np.flatnonzero((ids < -num_rows) | (ids >= num_rows))
    if len(outside):
        raise IndexError(
            f"there is no row {int(ids[outside[0]]):,}: rows are numbered 0 to {num_rows - 1:,}, or -{num_rows:,} to "
            f"-1 from the end ({many(len(outside), 'index', 'indices')} of {len(ids):,} out of range)"
        )
    return np.where(ids < 0, ids + num_rows, ids)
