"""Write tables of token lists to Parquet and Arrow files, in row groups that can be read by themselves."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal


def write_table(
    columns: Mapping[str, Any], path: Path, kind: Literal["parquet", "arrow"], group_rows: int
) -> None:
    """Write columns to a file.

    Args:
        columns: Arrow arrays of one length.
        path: of the file.
        kind: "parquet", or "arrow": an Arrow stream, as Hugging Face's data sets are saved.
        group_rows: rows of a row group or record batch.
    """
    import pyarrow as pa

    table = pa.table(dict(columns))
    if kind == "arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=group_rows)
        return
    import pyarrow.parquet as pq

    # Bytes of ids of the same rank lie together: as small as with a dictionary, in half the time.
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


def unfinished(path: Path) -> Path:
    """Return a name for a file in the making that no other process, on any machine, gives it."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")


def sync(path: Path) -> None:
    """Have a file's content, or a folder's names, on the disk before going on: a power cut takes neither."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
