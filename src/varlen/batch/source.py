"""Reads tokens, labels, masks and columns for the segments of a batch, and refuses what doesn't match."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.batch import kernels
from varlen.batch.layout import Segments, exactness, refuse_mismatch
from varlen.batch.ragged import Documents, as_ragged, check_integers, is_flat
from varlen.errors import DocumentsError, SettingError
from varlen.types import IntArray, Packing

_INT32 = np.iinfo(np.int32)
_SIZES = (1, 2, 4, 8)
"""Bytes of the numbers that kernels can read."""

Targets = tuple[npt.NDArray[Any], IntArray, npt.NDArray[Any], IntArray]
"""Labels and the index of each segment's first, the loss mask (of size 0 for none) and the same for it."""


@dataclass(frozen=True, slots=True)
class Column:
    """A per-token column as it is to be copied."""

    values: npt.NDArray[Any]
    starts: IntArray
    """int64 `[segments]`: index of each segment's first value."""
    pad: npt.NDArray[Any]
    """`[1]`, of the same dtype: the value at padding."""


class Source:
    """The documents of a batch, and whatever else has a value a token."""

    def __init__(self, documents: Documents, packing: Packing, segments: Segments) -> None:
        self._documents = documents
        self._packing = packing
        self._segments = segments

    def tokens(self) -> tuple[npt.NDArray[Any], IntArray]:
        """Return token ids and the index of each segment's first.

        Raises:
            DocumentsError: they are no whole numbers of 32 bits.
        """
        tokens, starts = self._segments.tokens, self._segments.sources
        check_integers(tokens, "token ids")
        self._check_range(tokens, starts, "token ids")
        return tokens, starts

    def targets(
        self,
        labels: Documents | None,
        loss_mask: Documents | None,
        weights: Column | None,
        tokens: npt.NDArray[Any],
        starts: IntArray,
    ) -> Targets | None:
        """Return labels and mask for the kernel, or None where every token is its own label.

        Raises:
            DocumentsError: labels or a mask that don't match the documents.
        """
        if labels is None and loss_mask is None and weights is None:
            return None
        values, value_starts = tokens, starts
        if labels is not None:
            values, value_starts = self._read(labels, "labels")
            check_integers(values, "labels")
            self._check_range(values, value_starts, "labels")
        mask: npt.NDArray[Any] = np.empty(0, np.uint8)
        mask_starts = starts
        if weights is not None:
            mask, mask_starts = weights.values, weights.starts
        if loss_mask is not None:
            mask, mask_starts = self._read(loss_mask, "loss_mask")
            if mask.dtype.kind not in "biuf":
                raise DocumentsError(f"loss_mask must be numbers or booleans, got dtype {mask.dtype}")
            if mask.dtype.itemsize not in _SIZES or mask.dtype == np.float16:
                mask = mask != 0  # kernels know no such number
        return values, value_starts, mask, mask_starts

    def column(self, values: Documents, name: str, pad: Any) -> Column:
        """Return a per-token column.

        Raises:
            DocumentsError: a column that doesn't match the documents or holds no numbers.
            SettingError: a pad value that the column's dtype can't hold.
        """
        array, starts = self._read(values, f"column {name!r}")
        if array.dtype.kind not in "biuf" or array.dtype.itemsize not in _SIZES:
            raise DocumentsError(f"column {name!r} must hold numbers or booleans, got dtype {array.dtype}")
        is_number = np.asarray(pad).dtype.kind in "biuf"
        if not array.size and is_number:  # nothing but padding: the pad says what it is
            array = array.astype(np.result_type(array.dtype, np.min_scalar_type(pad)))
        return Column(array, starts, _as_pad(pad, array.dtype, name))

    def weights(self, values: Documents) -> Column:
        """Return what labels weigh, as a column of float32.

        Raises:
            DocumentsError: they don't match the documents, hold no numbers, or such as only float64 tells from 0.
        """
        array, starts = self._read(values, "target_weights")
        if array.dtype.kind not in "biuf":
            raise DocumentsError(f"target_weights must be numbers, got dtype {array.dtype}")
        with np.errstate(over="ignore"):
            single = array.astype(np.float32, copy=False)
        if array.dtype.itemsize > 4 and np.count_nonzero(single) != np.count_nonzero(array):
            raise DocumentsError("target_weights hold numbers so small that float32 takes them for 0")
        return Column(single, starts, np.zeros(1, np.float32))

    def _read(self, values: Documents, name: str) -> tuple[npt.NDArray[Any], IntArray]:
        """Flat values and the index of each segment's first value."""
        if values is not self._documents and isinstance(self._documents, tuple) and is_flat(values):
            size, wanted = len(values), len(self._documents[0])
            if size != wanted:
                raise DocumentsError(f"{name}: {size:,} values for {wanted:,} tokens; one a token is needed")
            values = (values, self._documents[1])
        segments, packing = self._segments, self._packing
        ragged, homes = as_ragged(values, packing.num_documents, lambda: segments.documents, name)
        homes = segments.documents if homes is None else homes
        self._check_sizes(ragged.offsets, homes, name)
        starts = np.empty(homes.size, np.int64)
        wrong, first = kernels.locate(
            homes,
            segments.first_tokens,
            segments.lengths,
            ragged.offsets,
            ragged.values.size,
            packing.capacity,
            exactness(packing),
            starts,
        )
        if wrong:
            piece = np.array([segments.first_tokens[first], segments.lengths[first]])
            counts = (wrong, homes.size)
            refuse_mismatch(ragged, homes[first], segments.documents[first], piece, counts, name)
        return ragged.values, starts

    def _check_sizes(self, offsets: IntArray, homes: IntArray, name: str) -> None:
        """Require as many values as the documents have tokens."""
        sizes, wanted = (at[where + 1] - at[where] for at, where in ((offsets, homes), self._segments.bounds))
        wrong = sizes != wanted
        if wrong.any():
            first = int(np.argmax(wrong))
            raise DocumentsError(
                f"{name}: document {self._segments.documents[first]:,} has {sizes[first]:,} values for "
                f"{wanted[first]:,} tokens; one a token is needed "
                f"({int(wrong.sum()):,} of {sizes.size:,} segments in this batch don't match)"
            )

    def _check_range(self, values: npt.NDArray[Any], starts: IntArray, name: str) -> None:
        """Refuse numbers that an int32 can't hold, before anything is written."""
        kind, size = values.dtype.kind, values.dtype.itemsize
        if size < 4 or (size == 4 and kind == "i"):
            return
        unsigned = kind == "u"
        # Read as signed, what is above 2^63 is negative.
        signed = values.view(np.int64) if values.dtype == np.uint64 else values
        low, high = kernels.value_range(signed, starts, self._segments.lengths)
        if low < (0 if unsigned else _INT32.min) or high > _INT32.max:
            low, high = sorted((low % 2**64, high % 2**64)) if unsigned else (low, high)
            raise DocumentsError(
                f"{name} run from {low:,} to {high:,}, outside of int32; these are no token ids"
            )


def check_weights(weights: npt.NDArray[np.float32]) -> None:
    """Refuse weights that are negative or not finite.

    Args:
        weights: of a batch, `[rows, width]`.

    Raises:
        DocumentsError: names the first and how many there are.
    """
    wrong = ~((weights >= 0) & (weights < np.inf))
    if wrong.any():
        first = float(weights[wrong][0])
        raise DocumentsError(
            f"target_weights must be finite numbers from 0 (in float32), got {first:g} ({int(wrong.sum()):,} of the "
            f"batch's {weights.size:,})"
        )


def check_columns(columns: Mapping[str, Any], pads: Mapping[str, Any], taken: tuple[str, ...]) -> None:
    """Refuse columns by the names of arrays that a batch has anyway, and pads of columns that aren't there.

    Raises:
        SettingError: either.
    """
    reserved = [name for name in columns if name in taken]
    if reserved:
        raise SettingError(
            f"a column can't be called {', '.join(map(repr, reserved))}: a batch has that array anyway"
        )
    unknown = [name for name in pads if name not in columns]
    if unknown:
        raise SettingError(
            f"column_pads names {', '.join(map(repr, unknown))}, but the columns are "
            f"{', '.join(map(repr, columns)) or 'none'}"
        )


def _as_pad(pad: Any, dtype: np.dtype[Any], name: str) -> npt.NDArray[Any]:
    """A pad value in the dtype of its column.

    Raises:
        SettingError: the dtype can't hold it.
    """
    given = np.asarray(pad)
    if given.ndim == 0 and given.dtype.kind in "biuf":
        with np.errstate(all="ignore"):
            held = given.astype(dtype)
        same = held == given or (dtype.kind == "f" and (given != given or abs(given) <= np.finfo(dtype).max))
        if same:
            return held.reshape(1)
    raise SettingError(f"column_pads[{name!r}] is {pad!r}, which the column's dtype {dtype} can't hold")
