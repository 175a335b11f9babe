"""Write rows that are in memory to files, so that readers, workers and fingerprints treat them like any other.

::

    list of dicts, dict of columns,      ─ JSON lines ─┐
    DataFrame, map-style data set                      ├─► spool (spool.py) ─► File ─► readers, workers, fingerprints
    Table, RecordBatch, reader of such,  ─ Arrow IPC ──┘
    datasets.Dataset, __arrow_c_stream__
    function, iterable (streaming)       ─ JSON lines over a socket (serving.py) ─► File of unknown size

Workers are separate interpreters that receive a file name instead of the trainer's objects. Objects are written as
JSON, in which an absent key stays absent, and tables as Arrow, in which ids stay arrays; only the columns that
documents are made of are written. The fingerprint is that of the bytes, which depend only on the rows, however a
table is chunked. It is equal in every process for equal rows of equal form, so ranks share one file, and a state can
only be resumed with the rows that it was saved with. Messages name rows by what was given:
`memory (list of 40 rows) row 17`, counted from 1.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from varlen.documents.resource import Resource
from varlen.files.paths import File, entries_of, refuse_text


def spooled(
    data: Any,
    columns: Mapping[str, str] | None = None,
    cache: str | Path | None = None,
    *,
    is_streamed: bool = False,
) -> Any:
    """Replace rows in memory by files; paths, URLs and files stay as they are."""
    if isinstance(data, str):
        refuse_text(data, "data")
    if isinstance(data, str | os.PathLike | File):
        return data
    from varlen.documents.memory_forms import file_of  # rarely needed

    file = file_of(data, columns or {}, cache, is_streamed=is_streamed)
    if file is not None:
        return file
    entries = [spooled(entry, columns, cache, is_streamed=is_streamed) for entry in data]
    return data if all(a is b for a, b in zip(entries, data)) else entries


def release(data: Any) -> None:
    """Release the files of rows in memory."""
    for entry in entries_of(data):
        if isinstance(entry, File) and isinstance(entry.hold, Resource):
            entry.hold.release()
