"""The decoded size of Arrow values, row by row: shared values count as often as they are used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from varlen.types import IntArray

BATCH_BYTES = 4 << 20  # target size of a batch
MOST_ROWS = 8192
_VIEW_BYTES = 16
_APART = ("string", "binary", "large_string", "large_binary", "null")  # varying width, never shared


def row_sizes(array: Any) -> IntArray:
    """Return the decoded bytes of each value, int64 `[len(array)]`.

    Values that rows share (a dictionary's entries, the values of runs) count for every row.

    Cost: a few passes over offsets and indices; no value is decoded.
    """
    import pyarrow as pa

    kind, types = array.type, pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return row_sizes(array.storage)
    if types.is_dictionary(kind):
        chosen = _chosen(row_sizes(array.dictionary), array.indices.fill_null(0).to_numpy())
        return np.where(array.indices.is_null().to_numpy(zero_copy_only=False), 0, chosen)
    if types.is_run_end_encoded(kind):
        indices = np.arange(array.offset, array.offset + len(array))
        return _chosen(row_sizes(array.values), np.searchsorted(array.run_ends.to_numpy(), indices, "right"))
    if types.is_struct(kind):
        fields = (row_sizes(array.field(index)) for index in range(kind.num_fields))
        total: IntArray = sum(fields, start=np.zeros(len(array), dtype=np.int64))
        return total
    if types.is_fixed_size_list(kind):
        width = kind.list_size
        values = array.values.slice(array.offset * width, len(array) * width)
        widths: IntArray = row_sizes(values).reshape(len(array), width).sum(axis=1)
        return widths
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        return _of_lists(array, np.int64 if types.is_large_list(kind) else np.int32)
    if types.is_string(kind) or types.is_binary(kind):
        return _lengths(_offsets(array, np.int32))
    if types.is_large_string(kind) or types.is_large_binary(kind):
        return _lengths(_offsets(array, np.int64))
    if str(kind) in ("string_view", "binary_view") and array.buffers()[1] is not None:
        stop = array.offset + len(array)
        views = np.frombuffer(array.buffers()[1], dtype=np.int32, count=stop * _VIEW_BYTES // 4)
        return np.maximum(views.reshape(-1, _VIEW_BYTES // 4)[array.offset :, 0], 0).astype(np.int64)
    width = _width(kind)
    mean = -(-array.nbytes // max(len(array), 1)) if width is None else width
    return np.full(len(array), mean, dtype=np.int64)


def batch_sizes(batch: Any) -> IntArray:
    """Return the decoded bytes of each row of a batch, int64 `[rows]`."""
    sizes = np.zeros(batch.num_rows, dtype=np.int64)
    for column in batch.columns:
        sizes += row_sizes(column)
    return sizes


def cuts(sizes: IntArray, most_bytes: int, most_rows: int) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of pieces with at most so many bytes and rows; a single larger row is a piece."""
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        enough = int(np.searchsorted(ends, before + most_bytes, "right"))
        stop = min(max(enough, start + 1), start + most_rows, len(sizes))
        yield start, stop
        start = stop


def pieces(batch: Any) -> Iterator[Any]:
    """Cut a batch by the decoded size of its rows."""
    if not any(map(shares, batch.schema.types)) and batch.nbytes <= 2 * BATCH_BYTES:
        for start in range(0, batch.num_rows, MOST_ROWS):
            yield batch.slice(start, MOST_ROWS)
        return
    for start, stop in cuts(batch_sizes(batch), 2 * BATCH_BYTES, MOST_ROWS):
        yield batch.slice(start, stop - start)


def shares(kind: Any) -> bool:
    """Whether values of a type may be shared between rows."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return shares(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return True
    if kind.num_fields == 0:
        return _width(kind) is None and str(kind) not in _APART
    return any(shares(kind.field(index).type) for index in range(kind.num_fields))


def list_counts(array: Any) -> IntArray:
    """Return the number of innermost values in each row of nested lists, int64 `[len(array)]`."""
    import pyarrow as pa

    bounds = np.arange(len(array) + 1)
    while True:
        kind, types = array.type, pa.types
        if isinstance(kind, pa.BaseExtensionType):
            array = array.storage
        elif types.is_struct(kind):
            array = array.field(0)
        elif types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
            offsets = _offsets(array, np.int64 if types.is_large_list(kind) else np.int32)
            bounds, array = offsets[bounds], array.values
        elif types.is_fixed_size_list(kind):
            bounds, array = (bounds + array.offset) * kind.list_size, array.values
        else:
            return np.diff(bounds)


def plain(array: Any, kind: Any) -> Any:
    """Return an array with all its dictionaries decoded."""
    import pyarrow as pa

    types = pa.types
    if array.type == kind:
        return array
    if isinstance(kind, pa.BaseExtensionType):
        storage = array.storage if isinstance(array.type, pa.BaseExtensionType) else array
        return pa.ExtensionArray.from_storage(kind, plain(storage, kind.storage_type))
    if types.is_struct(kind):
        fields = [plain(array.field(index), kind.field(index).type) for index in range(kind.num_fields)]
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=array.is_null())
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        offsets = _offsets(array, np.int64 if types.is_large_list(kind) else np.int32)
        inner = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
        mask = array.is_null() if array.null_count else None
        bounds = pa.array(offsets - offsets[0], type=pa.int64() if types.is_large_list(kind) else pa.int32())
        if types.is_map(kind):
            keys, items = plain(inner.field(0), kind.key_type), plain(inner.field(1), kind.item_type)
            return pa.MapArray.from_arrays(bounds, keys, items, type=kind, mask=mask)
        made = pa.LargeListArray if types.is_large_list(kind) else pa.ListArray
        return made.from_arrays(bounds, plain(inner, kind.value_type), type=kind, mask=mask)
    if types.is_fixed_size_list(kind):
        inner = array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size)
        mask = array.is_null() if array.null_count else None
        return pa.FixedSizeListArray.from_arrays(plain(inner, kind.value_type), type=kind, mask=mask)
    return array.cast(kind)


def _chosen(sizes: IntArray, indices: Any) -> IntArray:
    if not len(sizes):
        return np.zeros(len(indices), dtype=np.int64)
    chosen: IntArray = sizes[np.clip(indices, 0, len(sizes) - 1)]
    return chosen


def _of_lists(array: Any, offset_type: type[np.signedinteger[Any]]) -> IntArray:
    """Sum the sizes of each list's values."""
    offsets = _offsets(array, offset_type)
    count = len(array.values)
    start, stop = (min(max(int(offset), 0), count) for offset in (offsets[0], offsets[-1]))
    values = array.values.slice(start, max(stop - start, 0))
    width = _width(values.type)
    if width is not None:
        return _lengths(offsets) * width
    ends = np.concatenate([[0], np.cumsum(row_sizes(values))])
    return _lengths(ends[np.clip(offsets - start, 0, len(values))])


def _offsets(array: Any, offset_type: type[np.signedinteger[Any]]) -> IntArray:
    """Return the offsets of values in the buffer or child array behind them, int64 `[len(array) + 1]`."""
    stored = array.buffers()[1]
    if stored is None or not len(array):  # an empty array may have none
        return np.zeros(len(array) + 1, dtype=np.int64)
    width = np.dtype(offset_type).itemsize
    offsets = np.frombuffer(stored, dtype=offset_type, count=len(array) + 1, offset=array.offset * width)
    return offsets.astype(np.int64)


def _lengths(offsets: IntArray) -> IntArray:
    return np.maximum(np.diff(offsets), 0)


def _width(kind: Any) -> int | None:
    """Return the bytes of a fixed-width type's values, at least 1; None for other types."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):  # its bit width is that of the indices
        return None
    try:
        return max(int(kind.bit_width) // 8, 1)
    except ValueError:
        return None
