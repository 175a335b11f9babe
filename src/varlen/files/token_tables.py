"""Write tables of token lists to Parquet and Arrow files, in row groups that can be read independently."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from varlen.types import IntArray


def write_table(
    columns: Mapping[str, Any], path: Path, kind: Literal["parquet", "arrow"], group_rows: int
) -> None:
    """Write columns to a Parquet or Arrow file."""
    import pyarrow as pa

    table = pa.table(dict(columns))
    if kind == "arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=group_rows)
        return
    import pyarrow.parquet as pq

    # Byte-stream split: as small as with a dictionary, in half the time.
    split = [f"{name}.list.element" for name in table.column_names]
    pq.write_table(
        table,
        path,
        compression="zstd",
        compression_level=1,
        row_group_size=group_rows,
        use_dictionary=False,
        use_byte_stream_split=split,
    )


# Arrow lists over NumPy's memory, and NumPy arrays over Arrow's, without copying contiguous values.
#
# Arrow's own conversions (`pyarrow.array`, `Array.to_numpy`) import pandas where it is installed, which takes longer
# than packing many a data set. Buffers avoid that.


def list_column(values: npt.NDArray[Any], offsets: IntArray) -> Any:
    """Return an Arrow list array over flat numbers or booleans; offsets, `[rows + 1]`, are below 2^31."""
    import pyarrow as pa

    return pa.ListArray.from_arrays(_arrow(offsets.astype(np.int32, copy=False)), _arrow(values))


def _arrow(values: npt.NDArray[Any]) -> Any:
    import pyarrow as pa

    kind = pa.from_numpy_dtype(values.dtype.newbyteorder("="))
    if values.dtype.kind == "b":  # a bit each in Arrow, a byte each in NumPy
        flat = np.packbits(values, bitorder="little")
    else:
        flat = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("="))
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(flat) if len(flat) else None])


def flat_values(column: Any) -> tuple[npt.NDArray[Any], IntArray] | None:
    """Return the values of an Arrow list array and its int64 offsets, from 0; None where it holds nulls."""
    if column.null_count:
        return None
    if len(column) == 0:  # its offsets may have no buffer
        return np.zeros(0, dtype=_dtype(column.type.value_type)), np.zeros(1, dtype=np.int64)
    offsets = _numpy(column.offsets)
    start, stop = int(offsets[0]), int(offsets[-1])
    values = column.values.slice(start, stop - start)
    if values.null_count:
        return None
    return _numpy(values), offsets.astype(np.int64) - start


_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}  # Arrow's names of NumPy's types


def _dtype(kind: Any) -> np.dtype[Any]:
    return np.dtype(_FLOATS.get(str(kind), str(kind)))


def _numpy(values: Any) -> npt.NDArray[Any]:
    """Return numbers without nulls as a read-only view."""
    dtype = _dtype(values.type)
    data = values.buffers()[1]
    if not len(values) or data is None:
        return np.zeros(0, dtype=dtype)
    return np.frombuffer(data, dtype=dtype, count=len(values), offset=values.offset * dtype.itemsize)
